"""The cost of many adapters: a decode batch of 32 shared by 1 or 16 of them, and 1,000 registered with 64 active.

    python -m benchmarks.adapters [--rounds 5] [--registered 1000] [--active 64] [--output FILE]

The batch: a random-weight Llama of SmolLM2-135M's shape (--quick: 4 M parameters), median time between tokens, sides in
turns. The crowd: the demo model; first tokens of users whose adapters are on disk alone ("cold") and in memory
("warm"), and the gaps in a stream that runs meanwhile. Beside each figure stands its floor: what this machine must read
and compute for it, at the bandwidth and the rate that it reached when the benchmark began.
"""

from __future__ import annotations

import benchmarks.support.prepared  # noqa: F401

# isort: split
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.command import finish, option, parse
from benchmarks.support.interleave import Spread, paired_ratio
from benchmarks.support.local_engine import LocalEngine
from benchmarks.support.machine_limits import Machine, Sizes, decode, measure_machine, prefill
from benchmarks.support.random_llama import SHAPES, device_dtype, write_random_llama
from edged.align.adapters.adapter import Snapshot
from edged.engine.engine import Engine
from edged.models import demo_model_dir
from edged.settings.load import AlignSettings, Settings
from edged.tensors.cpu_threads import apart

BATCH = 32
PROMPT_TOKENS, ANSWER_TOKENS = 32, 24
ADAPTERS_IN_A_BATCH = (0, 1, 16)


class Bench(LocalEngine):
    """An engine with random adapters in a temporary folder."""

    def __init__(self, model: Path, adapters: Sequence[str], settings: dict[str, dict[str, Any]]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="edged-bench-")
        folder = Path(self._folder.name)
        made = Settings.model_validate(settings)
        write_adapters(made, model, folder, adapters)
        started = time.monotonic()
        super().__init__(model, made, folder)
        self.start_s = time.monotonic() - started
        self._generator = np.random.default_rng(0)

    def ask_at_random(self, name: str, adapter: str | None, tokens: int = ANSWER_TOKENS) -> float:
        """Submit a request with a random prompt; return its submission time (monotonic clock)."""
        return self.ask(name, self._generator.integers(8, self.vocab, PROMPT_TOKENS).tolist(), tokens, adapter)

    def moments(self) -> dict[str, list[float]]:
        """Wait until all requests are answered; return the times of each one's tokens since the last call."""
        return {name: answer.token_s for name, answer in self.wait().items()}

    def close(self) -> None:
        """Stop the engine and remove its folder."""
        super().close()
        self._folder.cleanup()


def write_adapters(settings: Settings, model: Path, folder: Path, names: Iterable[str]) -> None:
    """Write a small random version 1 of each adapter, as if an engine of that folder had learned it."""
    files = Engine.build(settings, model, lambda _events: None, lambda _records: None, folder).adapter_files
    generator = torch.Generator().manual_seed(0)
    form = files.spec.form
    weights = {name: 0.01 * torch.randn(shape, generator=generator) for name, shape in form.shapes.items()}
    snapshot = Snapshot("", 1, weights, {}, form)
    for name in names:
        files.save(replace(snapshot, adapter=name))


def batch_cost(model: Path, rounds: int) -> dict[str, Any]:
    """Return seconds between the tokens of a full decode batch with no, one or many adapters; they take turns."""
    names = [f"user{index}" for index in range(max(ADAPTERS_IN_A_BATCH))]
    bench = Bench(model, names, {"align": {"max_active_adapters": len(names)}})
    try:
        gaps: dict[int, list[float]] = {count: [] for count in ADAPTERS_IN_A_BATCH}
        for number in range(rounds + 1):
            for count in ADAPTERS_IN_A_BATCH:
                for index in range(BATCH):
                    bench.ask_at_random(f"{number}-{count}-{index}", names[index % count] if count else None)
                gap = _decode_gap(bench.moments())
                if number:
                    gaps[count].append(gap)
    finally:
        bench.close()
    return {
        "batch": BATCH,
        "rounds": rounds,
        "gap_ms": {str(n): Spread.of([1e3 * gap for gap in found]).as_json() for n, found in gaps.items()},
        "over_one_adapter": {str(n): paired_ratio(gaps[n], gaps[1]).as_json() for n in ADAPTERS_IN_A_BATCH},
    }


def _decode_gap(moments: dict[str, list[float]]) -> float:
    """Return the median seconds between tokens while all requests decode."""
    begin = max(times[0] for times in moments.values())
    end = min(times[-1] for times in moments.values())
    ticks = sorted({moment for times in moments.values() for moment in times if begin <= moment <= end})
    return statistics.median(np.diff(ticks).tolist())


def registered_cost(model: Path, registered: int, active: int) -> dict[str, Any]:
    """Measure a start with many adapters on disk, and TTFT of users whose adapters are on disk alone and in memory."""
    names = [f"user{index}" for index in range(registered)]
    bench = Bench(model, names, {"align": {"max_active_adapters": active, "max_loaded_adapters": active}})
    try:
        chosen = names[:: max(1, registered // active)][:active]
        bench.ask_at_random("first of all", None)
        bench.moments()
        found: dict[str, Any] = {"registered": registered, "active": active, "start_s": bench.start_s}
        for label in ("cold", "warm"):
            bench.ask_at_random("stream", None, tokens=active * 8)
            asked_s = {}
            for name in (f"{label} {name}" for name in chosen):
                asked_s[name] = bench.ask_at_random(name, name.removeprefix(f"{label} "), tokens=4)
                time.sleep(0.02)
            moments = bench.moments()
            waits = [1e3 * (moments[name][0] - asked) for name, asked in asked_s.items()]
            gaps = 1e3 * np.diff(moments["stream"])
            found[label] = {
                "ttft_ms_p50": float(np.percentile(waits, 50)),
                "ttft_ms_p95": float(np.percentile(waits, 95)),
                "stream_gap_ms_p50": float(np.percentile(gaps, 50)),
                "stream_gap_ms_p99": float(np.percentile(gaps, 99)),
            }
        found["loaded"] = bench.engine.status()["finetune"]["adapters_loaded"]
        return found
    finally:
        bench.close()


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the benchmark."""
    options = parse(
        __doc__,
        option("--rounds", "measured rounds of the batch", 5, 2),
        option("--registered", "adapters on disk", 1000, 100),
        option("--active", "users who ask", 64, 8),
        quick="a 4 M parameter model and 100 adapters",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"  # as an engine chooses by default
    dtype, rank = device_dtype(device), AlignSettings().rank
    machine = apart(lambda: measure_machine(torch.device(device), dtype))
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        model = apart(lambda: write_random_llama(Path(folder), SHAPES["4m" if options.quick else "135m"]))
        batch = batch_cost(model, options.rounds)
        batch["floor_ms"] = batch_floors(Sizes.of(model, dtype, rank), machine, list(batch["gap_ms"]))
    crowd = registered_cost(demo_model_dir(), options.registered, options.active)
    crowd |= crowd_floors(Sizes.of(demo_model_dir(), dtype, rank), machine)
    lines = [f"the machine: {machine.text()}", *batch_lines(batch), *crowd_lines(crowd)]
    finish(options, {"machine": asdict(machine), "batch": batch, "crowd": crowd}, "\n".join(lines))


def batch_floors(sizes: Sizes, machine: Machine, counts: list[str]) -> dict[str, float]:
    """Return the least milliseconds between the batch's tokens, by the number of adapters."""
    context = PROMPT_TOKENS + ANSWER_TOKENS // 2
    return {count: 1e3 * decode(sizes, BATCH, context, int(count)).floor_s(machine) for count in counts}


def crowd_floors(sizes: Sizes, machine: Machine) -> dict[str, float]:
    """Return the least milliseconds of a first token and between a stream's tokens."""
    return {
        "ttft_floor_ms": 1e3 * prefill(sizes, PROMPT_TOKENS, adapters=1).floor_s(machine),
        "stream_gap_floor_ms": 1e3 * decode(sizes, 1, PROMPT_TOKENS).floor_s(machine),
    }


def batch_lines(batch: dict[str, Any]) -> list[str]:
    """Return lines with the batch's times, their ratios, and the floors of both."""
    floor_ms = batch["floor_ms"]
    return [
        f"{count} adapters in a batch of {batch['batch']}: {batch['gap_ms'][count]['median']:.1f} ms "
        f"(floor {floor_ms[count]:.1f}), {Spread.read(ratio).text(3)} of the time with one "
        f"(floors: {floor_ms[count] / floor_ms['1']:.3f})"
        for count, ratio in batch["over_one_adapter"].items()
    ]


def crowd_lines(crowd: dict[str, Any]) -> list[str]:
    """Return lines with TTFT, gaps, and their floors."""
    started = f"{crowd['registered']} registered: started in {crowd['start_s']:.1f} s"
    return [f"{started}, {crowd['loaded']} in memory at the end"] + [
        f"{label}: TTFT p50 {found['ttft_ms_p50']:.0f} ms, p95 {found['ttft_ms_p95']:.0f} ms (floor "
        f"{crowd['ttft_floor_ms']:.1f}); gaps of a stream p50 {found['stream_gap_ms_p50']:.1f} ms, p99 "
        f"{found['stream_gap_ms_p99']:.1f} ms (floor {crowd['stream_gap_floor_ms']:.1f})"
        for label, found in (("cold", crowd["cold"]), ("warm", crowd["warm"]))
    ]


if __name__ == "__main__":
    main()
