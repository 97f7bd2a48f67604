"""How soon a request that comes in the middle of fine-tuning is begun: at most one unit later is the target.

    python -m benchmarks.preemption hh-harmless.jsonl.gz [--model DIR] [--requests 200] [--output FILE]

An engine fine-tunes without pause for --adapters users (default 2: as many steps as the engine has open at once) while
requests of 64 tokens come one at a time, at random. For each, the delay from its submission to the start of the packed
forward that computes its first tokens, in milliseconds and in lengths of the piece (a unit, or a packed forward) that
ran when it came, and the number of units that ended in between. The floor of a delay is none, as nothing must be read
or computed before a prompt is begun. Beside a piece's length stands its floor: what this machine must read and compute
for it, attention aside, at the bandwidth and the rate that it reached when the benchmark began. Without --model: a
random-weight Llama, of SmolLM2-135M's shape unless --size says another.
"""

from __future__ import annotations

import benchmarks.support.prepared  # noqa: F401

# isort: split
import random
import tempfile
import time
from argparse import Namespace
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.command import DEVICE, FORMAT, PAIRS, SEED, SIZE, finish, markdown, model_folder, option, parse
from benchmarks.support.local_engine import LocalEngine
from benchmarks.support.machine_limits import Machine, Sizes, measure_machine, report_header, unit
from benchmarks.support.random_llama import SHAPES, device_dtype, write_random_llama, write_tokenizer
from edged.align.feedback.pair import TokenPair
from edged.align.feedback.pair_formats import read_pairs
from edged.engine.stats.iterations import Iteration
from edged.lab.bench.replay import load_pairs
from edged.settings.load import Settings
from edged.tensors.cpu_threads import apart
from edged.text.tokenizer import Tokenizer

PERCENTILES = (50, 95, 99, 100)
CHAT_TEMPLATE = (
    "{% for message in messages %}\n\n{{ message.role }}: {{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}\n\nassistant:{% endif %}"
)
FORWARD = "forward"
"""Kind of a packed forward; units have their own kinds' names."""
BETWEEN = "between"
"""Kind of the time between pieces: planning, bookkeeping, opening a step."""
_PROMPT_TOKENS, _ANSWER_TOKENS = 64, 4


@dataclass(frozen=True, slots=True)
class Piece:
    """A packed forward or a unit with its begin and end, in seconds of the monotonic clock."""

    kind: str
    tokens: int
    """Number of tokens; for an optimizer step, the number of adapters that take one."""
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """The wait of one arrival: the piece that ran when it came, and the time until its own packed forward began."""

    kind: str
    tokens: int
    """The piece's tokens, as in `Piece`."""
    delay_s: float
    piece_s: float
    """Duration of the whole piece; 0 between pieces."""
    outside_s: float
    """Part of the delay outside pieces: bookkeeping, opening a step, planning."""
    unit_ends: int
    """Number of units that ended between arrival and start: at most one is the target."""


def wait_of(pieces: Sequence[Piece], arrived_s: float, started_s: float) -> Wait:
    """Return an arrival's wait; `pieces` are in order of time."""
    index = bisect_right(pieces, arrived_s, key=lambda piece: piece.begin_s) - 1
    met = pieces[index] if index >= 0 and arrived_s < pieces[index].end_s else None
    ended = [piece for piece in pieces[max(index, 0) :] if arrived_s < piece.end_s <= started_s]
    return Wait(
        kind=met.kind if met else BETWEEN,
        tokens=met.tokens if met else 0,
        delay_s=started_s - arrived_s,
        piece_s=met.end_s - met.begin_s if met else 0.0,
        outside_s=started_s - arrived_s - sum(piece.end_s - max(arrived_s, piece.begin_s) for piece in ended),
        unit_ends=sum(piece.kind != FORWARD for piece in ended),
    )


def pieces_of(iterations: Iterable[Iteration]) -> Iterator[Piece]:
    """Yield the pieces of iterations: units lie back to back at the end, the forward before them."""
    for one in iterations:
        moment = one.started_s + one.elapsed_s - sum(seconds for _, _, seconds in one.units)
        if one.forward_s:
            yield Piece(FORWARD, sum(share.num_tokens for share in one.members), moment - one.forward_s, moment)
        for kind, tokens, seconds in one.units:
            yield Piece(kind, tokens, moment, moment + seconds)
            moment += seconds


class Bench(LocalEngine):
    """An engine that learns without pause while requests come one at a time."""

    def arrive(self, name: str, prompt: tuple[int, ...]) -> tuple[float, float]:
        """Run one request to its end; return the times of its arrival and of its forward's start."""
        arrived_s = self.ask(name, prompt, _ANSWER_TOKENS)
        finish = self.wait()[name].finish
        assert finish is not None, "a whole answer has ended"
        return arrived_s, arrived_s + finish.queue_s


def measure(
    model: Path, settings: Settings, pairs: Sequence[TokenPair], requests: int, mean_gap_s: float, seed: int
) -> tuple[list[Wait], dict[str, Any]]:
    """Return the waits of `requests` requests, each at a random time after the previous one ended; and the learning
    meanwhile."""
    chance = random.Random(seed)
    bench = Bench(model, settings)
    bench.submit_pairs(pairs)
    ran: list[Iteration] = []
    try:
        # Warm-up: the first step loads code that is imported lazily.
        bench.recorder.wait_for(lambda: bench.engine.error or bench.recorder.versions, "a step")
        before = bench.engine.status()
        moments = []
        for number in range(requests):
            time.sleep(chance.expovariate(1.0 / mean_gap_s))
            prompt = tuple(chance.randrange(3, bench.vocab) for _ in range(_PROMPT_TOKENS))
            moments.append(bench.arrive(str(number), prompt))
            ran += bench.engine.iterations(ran[-1].number if ran else 0)
        after = bench.engine.status()
    finally:
        bench.close()
    pieces = list(pieces_of(ran))
    learned = {
        "steps": after["finetune"]["steps"] - before["finetune"]["steps"],
        "pairs_left": after["finetune"]["pairs_queued"],
    }
    return [wait_of(pieces, *moment) for moment in moments], learned


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the benchmark."""
    options = parse(
        __doc__,
        PAIRS,
        FORMAT,
        option("--model", "a model's directory (default: random weights)", type=model_folder),
        option("--requests", "arrivals", 200, 20),
        option("--gap-s", "mean pause before one", 0.5, 0.1),
        option("--adapters", "users whose pairs are learned", 2),
        SIZE,
        SEED,
        DEVICE,
        quick="a 4 M parameter model and few requests",
    )
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        chosen = options.model or random_model(Path(folder), options)
        report = {"model": options.model.name if options.model else f"{options.size} random-weight Llama"}
        report |= run(chosen, options)
    finish(options, report, table(report))


def random_model(folder: Path, options: Namespace) -> Path:
    """Write a random-weight Llama with a tokenizer that was trained on the pairs."""
    shape = SHAPES[options.size]
    apart(lambda: write_random_llama(folder, shape, device_dtype(options.device)))
    pairs = read_pairs(options.pairs, options.format)
    texts = (pair[key] for _, pair in pairs if isinstance(pair, dict) for key in ("chosen",))
    tokenizer = write_tokenizer(folder, texts, shape.vocab)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def run(model: Path, options: Namespace) -> dict[str, Any]:
    """Measure and summarise."""
    header = report_header(options.device)
    settings = Settings.model_validate(
        {
            "model": {"device": options.device},
            "align": {"loss_threshold": 0.0, "max_active_adapters": max(8, options.adapters)},
            "store": {"save_every_s": 3600.0},
        }
    )
    pairs, _ = load_pairs(options.pairs, options.format, Tokenizer.load(model), settings.align.max_pair_tokens)
    shared = [replace(pair, adapter=f"user{number % options.adapters}") for number, pair in enumerate(pairs)]
    dtype = device_dtype(options.device)
    machine = apart(lambda: measure_machine(torch.device(options.device), dtype))
    floors = Floors(Sizes.of(model, dtype, settings.align.rank), machine)
    waits, learned = measure(model, settings, shared, options.requests, options.gap_s, options.seed)
    return {
        **header,
        "requests": options.requests,
        "mean_gap_s": options.gap_s,
        "adapters": options.adapters,
        "learnt_meanwhile": learned,
        "machine": asdict(machine),
        "all": summary(waits, floors),
        "by_kind": {
            kind: summary([wait for wait in waits if wait.kind == kind], floors)
            for kind in sorted({w.kind for w in waits})
        },
    }


@dataclass(frozen=True, slots=True)
class Floors:
    """The floors of one model's pieces on one machine."""

    sizes: Sizes
    machine: Machine

    def ms(self, wait: Wait) -> float:
        """Return the floor of the piece that an arrival waited for."""
        return 1e3 * unit(self.sizes, wait.kind, wait.tokens).floor_s(self.machine)


def summary(waits: Sequence[Wait], floors: Floors) -> dict[str, Any]:
    """Return percentiles of the delay, and the number of units that ended in it."""
    pieces = [wait for wait in waits if wait.piece_s]
    return {
        "arrivals": len(waits),
        "delay_ms": percentiles([1e3 * wait.delay_s for wait in waits]),
        "outside_ms": percentiles([1e3 * wait.outside_s for wait in waits]),
        "delay_in_pieces": percentiles([wait.delay_s / wait.piece_s for wait in pieces]),
        "piece_ms": percentiles([1e3 * wait.piece_s for wait in pieces]),
        "piece_floor_ms": percentiles([floors.ms(wait) for wait in pieces]),
        "unit_ends": {str(ends): count for ends, count in sorted(Counter(wait.unit_ends for wait in waits).items())},
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return percentiles by name; p100 is the largest. None if there are no values."""
    if not values:
        return None
    return {f"p{share}": float(np.percentile(values, share)) for share in PERCENTILES}


def table(report: dict[str, Any]) -> str:
    """Return the distribution as Markdown."""
    rows = []
    for label, found in [("anything", report["all"]), *report["by_kind"].items()]:
        lengths, piece = found["delay_in_pieces"], found["piece_ms"]
        rows.append(
            (
                label,
                found["arrivals"],
                ", ".join(f"{value:.1f}" for value in found["delay_ms"].values()),
                ", ".join(f"{lengths[key]:.2f}" for key in ("p50", "p95", "p100")) if lengths else "-",
                f"{piece['p50']:.1f}" if piece else "-",
                f"{found['piece_floor_ms']['p50']:.1f}" if piece else "-",
                ", ".join(f"{found['outside_ms'][key]:.1f}" for key in ("p50", "p95")),
                ", ".join(f"{ends}: {count}" for ends, count in found["unit_ends"].items()),
            )
        )
    columns = (
        "what ran at the arrival",
        "arrivals",
        "delay p50, p95, p99, longest (ms)",
        "in lengths of it p50, p95, longest",
        "its own ms p50",
        "floor p50",
        "delay outside pieces p50, p95 (ms)",
        "units ended before the start",
    )
    title = (
        f"{report['model']}, {report['requests']} requests while {report['adapters']} adapters learn without pause "
        f"({report['learnt_meanwhile']['steps']} steps), {report['device']}"
    )
    return "\n".join([title, "", *markdown(columns, rows)])


if __name__ == "__main__":
    main()
