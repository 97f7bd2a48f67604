"""What many adapters cost: of one batch, and of one daemon.

Owns the two measurements. Must not know how adapters are multiplied or where they are kept: it drives an engine.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.interleave import Spread, paired_ratio
from edged.align.adapters.adapter import AdapterFiles, Snapshot
from edged.engine.engine import Engine
from edged.engine.request import Event, FinishEvent, Request, Sampling, TokenEvent
from edged.settings.load import Settings

_LONGEST_WAIT_S = 600.0
BATCH = 32
PROMPT_TOKENS, ANSWER_TOKENS = 32, 24
ADAPTERS_IN_A_BATCH = (0, 1, 16)


class Bench:
    """An engine with random adapters in a temporary folder; times are seconds of the monotonic clock."""

    def __init__(self, model: Path, adapters: Sequence[str], settings: dict[str, dict[str, Any]]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="edged-bench-")
        folder = Path(self._folder.name)
        made = Settings.model_validate(settings)
        blank = Engine.build(made, model, lambda _: None, lambda _: None, folder)
        write_adapters(blank.adapter_files, adapters)
        del blank
        self._token_s: dict[str, list[float]] = {}
        self._finished = threading.Condition()
        self._open = 0
        started = time.monotonic()
        self.engine = Engine.build(made, model, self._deliver, lambda _: None, folder)
        self.start_s = time.monotonic() - started
        self.engine.start()
        self._generator = np.random.default_rng(0)

    def _deliver(self, events: list[Event]) -> None:
        now = time.monotonic()
        with self._finished:
            for event in events:
                if isinstance(event, TokenEvent):
                    self._token_s[event.request_id].append(now)
                elif isinstance(event, FinishEvent):
                    if event.reason != "length":
                        raise RuntimeError(f"a request ended with {event.reason}: {event.error}")
                    self._open -= 1
            self._finished.notify_all()

    def ask(self, name: str, adapter: str | None, tokens: int = ANSWER_TOKENS) -> None:
        """Submit a request with a random prompt."""
        vocab = int(self.engine.status()["model"]["vocab_size"])
        prompt = tuple(self._generator.integers(8, vocab, PROMPT_TOKENS).tolist())
        with self._finished:
            self._open += 1
            self._token_s[name] = []
        self.engine.submit(
            Request(name, prompt, Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True), adapter)
        )

    def wait(self) -> dict[str, list[float]]:
        """Until all are answered: the moments of every request's tokens since the last call."""
        with self._finished:
            if not self._finished.wait_for(lambda: not self._open or self.engine.error, _LONGEST_WAIT_S) or self._open:
                raise RuntimeError(f"the engine: {self.engine.error or 'no answer in time'}")
            found, self._token_s = self._token_s, {}
        return found

    def close(self) -> None:
        """Stop the engine and remove its folder."""
        self.engine.stop(0.0)
        self._folder.cleanup()


def write_adapters(files: AdapterFiles, names: Iterable[str]) -> None:
    """A small random version 1 of each, as if it had been learnt."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, (fan_in, fan_out) in files.spec.shapes.items():
        for part, shape in (("A", (files.spec.rank, fan_in)), ("B", (fan_out, files.spec.rank))):
            weights[f"base_model.model.{name}.lora_{part}.weight"] = 0.01 * torch.randn(shape, generator=generator)
    snapshot = Snapshot("", 1, weights, {})
    for name in names:
        files.save(replace(snapshot, adapter=name))


def batch_cost(model: Path, rounds: int) -> dict[str, Any]:
    """Seconds between the tokens of a full decode batch, shared by none, one or many adapters; in turns."""
    names = [f"user{index}" for index in range(max(ADAPTERS_IN_A_BATCH))]
    bench = Bench(model, names, {"align": {"max_active_adapters": len(names)}})
    try:
        gaps: dict[int, list[float]] = {count: [] for count in ADAPTERS_IN_A_BATCH}
        for number in range(rounds + 1):
            for count in ADAPTERS_IN_A_BATCH:
                for index in range(BATCH):
                    bench.ask(f"{number}-{count}-{index}", names[index % count] if count else None)
                gap = _decode_gap(bench.wait())
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
    """Median seconds between tokens while all requests decode."""
    begin = max(times[0] for times in moments.values())
    end = min(times[-1] for times in moments.values())
    ticks = sorted({moment for times in moments.values() for moment in times if begin <= moment <= end})
    return statistics.median(np.diff(ticks).tolist())


def registered_cost(model: Path, registered: int, active: int) -> dict[str, Any]:
    """The start with many adapters on disk; first tokens of users who are not in memory, and of those who are."""
    names = [f"user{index}" for index in range(registered)]
    bench = Bench(model, names, {"align": {"max_active_adapters": active, "max_loaded_adapters": active}})
    try:
        chosen = names[:: max(1, registered // active)][:active]
        bench.ask("first of all", None)
        bench.wait()
        found: dict[str, Any] = {"registered": registered, "active": active, "start_s": bench.start_s}
        for label in ("cold", "warm"):
            bench.ask("stream", None, tokens=active * 8)
            ttft = []
            for name in chosen:
                asked = time.monotonic()
                bench.ask(f"{label} {name}", name, tokens=4)
                ttft.append((f"{label} {name}", asked))
                time.sleep(0.02)
            moments = bench.wait()
            waits = [1e3 * (moments[name][0] - asked) for name, asked in ttft]
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
