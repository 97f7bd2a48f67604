"""How soon a request that comes in the middle of fine-tuning is begun: at most one unit later is the target.

    python -m benchmarks.preemption hh-harmless.jsonl.gz [--model DIR] [--requests 200] [--output FILE]

An engine fine-tunes without pause for --adapters users (default 2: as many steps as the engine has open at once) while
requests of 64 tokens come one at a time, at random. For each, the delay from its submission to the start of the packed
forward that computes its first tokens, in milliseconds and in lengths of the piece (a unit, or a packed forward) that
ran when it came, and the number of units that ended in between. The floor of a delay is none, as nothing must be read
or computed before a prompt is begun. Beside a piece's length stands its floor: what this machine must read and compute
for it, attention aside, at the bandwidth and the rate that it reached when the benchmark began. Without --model: a
random-weight Llama of SmolLM2-135M's shape.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.command import DEVICE, FORMAT, PAIRS, SEED, finish, markdown, model_folder, option, parse
from benchmarks.support.interleave import LONGEST_WAIT_S
from benchmarks.support.local_engine import LocalEngine
from benchmarks.support.machine_limits import Machine, Sizes, measure_machine, report_header, unit
from benchmarks.support.random_llama import SHAPES, device_dtype, write_random_llama, write_tokenizer
from edged.align.feedback.pair import TokenPair
from edged.align.feedback.pair_formats import read_pairs
from edged.bench.replay import load_pairs
from edged.engine.engine import Engine
from edged.engine.model_runner import RunnerOutput
from edged.settings.load import Settings
from edged.tensors.cpu_threads import apart
from edged.text.tokenizer import Tokenizer

PERCENTILES = (50, 95, 99, 100)
CHAT_TEMPLATE = (
    "{% for message in messages %}\n\n{{ message.role }}: {{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}\n\nassistant:{% endif %}"
)
FORWARD = "forward"
"""The kind of a packed forward; units have their own kinds' names."""
BETWEEN = "between"
"""The kind of what is no piece: planning, bookkeeping, opening a step."""
_PROMPT_TOKENS, _ANSWER_TOKENS = 64, 4


@dataclass(frozen=True, slots=True)
class Piece:
    """What ran, and when: seconds of the monotonic clock."""

    kind: str
    tokens: int
    """Of an optimizer step the adapters that take one."""
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """One arrival: the piece that it met, and how long until its own packed forward began."""

    kind: str
    tokens: int
    """Of the piece, as `Piece` has them."""
    delay_s: float
    piece_s: float
    """How long the piece took in all; 0 between pieces."""
    outside_s: float
    """Of the delay, what was no piece: bookkeeping, opening a step, planning."""
    unit_ends: int
    """Units that ended between arrival and start: at most one is the target."""


def wait_of(pieces: Sequence[Piece], arrived_s: float, started_s: float) -> Wait:
    """What an arrival met; `pieces` are in order of time."""
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


class Watch:
    """Remembers every piece of an executor's runs. Must be put in its place before the engine starts."""

    def __init__(self, run: Callable[..., RunnerOutput]) -> None:
        self.pieces: list[Piece] = []
        self._run = run

    def __call__(self, *arguments: Any, **named: Any) -> RunnerOutput:
        """`ModelRunner.run`: units lie back to back at its end, the forward before them."""
        work = self._run(*arguments, **named)
        moment = time.monotonic() - sum(seconds for _, seconds in work.units)
        if work.forward_s:
            tokens = sum(count for _, count in (*work.prefilled, *work.finetuned.items()))
            self.pieces.append(Piece(FORWARD, tokens, moment - work.forward_s, moment))
        for piece, seconds in work.units:
            self.pieces.append(Piece(piece.kind, piece.tokens, moment, moment + seconds))
            moment += seconds
        return work


class Bench(LocalEngine):
    """An engine that learns without pause while requests come one at a time."""

    def __init__(self, model: Path, settings: Settings, pairs: Sequence[TokenPair]) -> None:
        super().__init__(model, settings, watch=self._watch)
        self.engine.submit_pairs(list(pairs))

    def _watch(self, parts: Engine) -> None:
        self.watch = Watch(parts.runner.run)
        setattr(parts.runner, "run", self.watch)  # noqa: B010 - a method of one object is watched

    def wait_until_learning(self) -> None:
        """Until the first step has been taken: what is loaded late is loaded then."""
        deadline_s = time.monotonic() + LONGEST_WAIT_S
        while not self.engine.status()["finetune"]["steps"]:
            if self.engine.error or time.monotonic() > deadline_s:
                raise RuntimeError(f"the engine: {self.engine.error or 'no step in time'}")
            time.sleep(0.05)

    def arrive(self, name: str, prompt: tuple[int, ...]) -> tuple[float, float]:
        """One request from its arrival to its end: the moments of its arrival and of its forward's start."""
        arrived_s = self.ask(name, prompt, _ANSWER_TOKENS)
        finish = self.wait()[name].finish
        assert finish is not None, "a whole answer has ended"
        return arrived_s, arrived_s + finish.queue_s


def measure(
    model: Path, settings: Settings, pairs: Sequence[TokenPair], requests: int, mean_gap_s: float, seed: int
) -> tuple[list[Wait], dict[str, Any]]:
    """What each of `requests` met that came at random after the one before it ended; and what was learnt meanwhile."""
    chance = random.Random(seed)
    bench = Bench(model, settings, pairs)
    try:
        bench.wait_until_learning()
        before = bench.engine.status()
        moments = []
        for number in range(requests):
            time.sleep(chance.expovariate(1.0 / mean_gap_s))
            prompt = tuple(chance.randrange(3, bench.vocab) for _ in range(_PROMPT_TOKENS))
            moments.append(bench.arrive(str(number), prompt))
        after = bench.engine.status()
    finally:
        bench.close()
    learnt = {
        "steps": after["finetune"]["steps"] - before["finetune"]["steps"],
        "pairs_left": after["finetune"]["pairs_queued"],
    }
    return [wait_of(bench.watch.pieces, *moment) for moment in moments], learnt


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
        SEED,
        DEVICE,
        quick="a 4 M parameter model and few requests",
    )
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        size = "4m" if options.quick else "135m"
        chosen = options.model or random_model(Path(folder), options.pairs, options.format, size)
        report = {"model": options.model.name if options.model else f"{size} random-weight Llama"}
        report |= run(chosen, options)
    finish(options, report, table(report))


def random_model(folder: Path, pairs: Path, format: Any, size: str) -> Path:
    """A random-weight Llama with a tokenizer that was trained on the pairs."""
    apart(lambda: write_random_llama(folder, SHAPES[size]))
    texts = (pair[key] for _, pair in read_pairs(pairs, format) if isinstance(pair, dict) for key in ("chosen",))
    tokenizer = write_tokenizer(folder, texts, SHAPES[size].vocab)
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
    waits, learnt = measure(model, settings, shared, options.requests, options.gap_s, options.seed)
    return {
        **header,
        "requests": options.requests,
        "mean_gap_s": options.gap_s,
        "adapters": options.adapters,
        "learnt_meanwhile": learnt,
        "machine": machine.as_json(),
        "all": summary(waits, floors),
        "by_kind": {
            kind: summary([wait for wait in waits if wait.kind == kind], floors)
            for kind in sorted({w.kind for w in waits})
        },
    }


@dataclass(frozen=True, slots=True)
class Floors:
    """Of pieces of one model on one machine."""

    sizes: Sizes
    machine: Machine

    def ms(self, wait: Wait) -> float:
        """Of the piece that an arrival met."""
        return 1e3 * unit(self.sizes, wait.kind, wait.tokens).floor_s(self.machine)


def summary(waits: Sequence[Wait], floors: Floors) -> dict[str, Any]:
    """Percentiles of the delay, and how many units ended in it."""
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
    """By name; p100 is the largest. None where there are none."""
    if not values:
        return None
    return {f"p{share}": float(np.percentile(values, share)) for share in PERCENTILES}


def table(report: dict[str, Any]) -> str:
    """The distribution as Markdown."""
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
