"""Measurements of a device for the cost model: packed forwards of many shapes, and the units of fine-tune steps.

They drive the real executor, in process and without the engine's thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from statistics import median_high

import numpy as np

from edged.align.dpo.step_plan import Recompute
from edged.align.feedback.pair import TokenPair
from edged.align.pair_queues import FinetuneStep
from edged.engine.engine import Engine
from edged.engine.lora.segments import NO_SLOT
from edged.engine.model_runner import OpenStep, RunnerOutput
from edged.engine.request import Request
from edged.engine.sampling.params import Sampling
from edged.engine.sequence import Sequence as Running
from edged.scheduler.cost.prices import Load
from edged.scheduler.cost.profile import ForwardTime, UnitTime
from edged.scheduler.task import FinetuneTask, Grant, Kind, Plan, ServingTask

DECODES = (1, 2, 4, 8, 16, 32, 64)
CHUNKS = (4, 12, 30, 70, 150, 300, 600, 1024)
"""Prompt lengths in tokens. Powers of two alone would flatter a device: see
`edged.engine.model.packed_linear.tiles`."""
CONTEXTS = (16, 128, 512, 2048, 8192)
MIXED_DECODES, MIXED_CHUNKS = (2, 8, 24), (16, 64, 256)
ADAPTERS = (1, 4, 16)
"""Distinct adapters in a forward, as far as there are slots."""
ROUNDS, QUICK_ROUNDS = 12, 4
"""Number of measured rounds, beside one to warm up. No shape runs twice in a row, since its data would still be in the
caches, unlike in an engine whose forwards differ; and a neighbour's busy seconds do not meet one shape alone."""
_STEPS_EVERY = 3
"""Interval, in rounds, at which steps are measured: each is many forwards and units."""
_WINDOWS = (16, 0, 0, 32, 0, 0, 64, 0, 0, 128, 0, 0)
"""Rows to which units are cut in turn, as far as they can be; 0: none. After a cut one come its rest and a whole."""
_LONG_S = 0.25
"""Longest forward that every round measures; longer ones are measured only in the rounds with steps."""
_DECODE_CONTEXT = 64
"""Context of the decodes beside a fine-tune forward."""

Progress = Callable[[int, int, str], None]
"""Progress callback: (done, total, what is measured now)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One packed forward: `decodes` over `context` keys each, and `chunks` of (tokens, context)."""

    decodes: int = 0
    context: int = 0
    chunks: tuple[tuple[int, int], ...] = ()
    adapters: int = 0

    @property
    def text(self) -> str:
        """A description for people."""
        chunks = ", ".join(f"{num_tokens} tokens after {context}" for num_tokens, context in dict.fromkeys(self.chunks))
        parts = [f"{self.decodes} decodes over {self.context}"] if self.decodes else []
        return ", ".join([*parts, f"{len(self.chunks)} x {chunks}"] if chunks else parts)

    @property
    def load(self) -> Load:
        """The load that the cost model prices."""
        load = Load(decodes=self.decodes, context=self.decodes * self.context, adapters=self.adapters)
        for num_tokens, context in self.chunks:
            load.add_chunk(num_tokens, context, finetune=False)
        return load

    def pages(self, page_size: int) -> int:
        """Return the pages that its sequences hold together."""
        ends = [self.context + 1] * self.decodes + [num_tokens + context for num_tokens, context in self.chunks]
        return sum(-(-end // page_size) for end in ends)


@dataclass(frozen=True, slots=True)
class StepShape:
    """One DPO step: `pairs` of `num_tokens` each for each of `adapters` adapters, beside `decodes`."""

    num_tokens: int
    pairs: int
    recompute: Recompute
    decodes: int = 0
    adapters: int = 1

    @property
    def text(self) -> str:
        """A description for people."""
        return f"a step of {self.adapters} over {self.pairs} x {self.num_tokens} tokens"


def forward_shapes(parts: Engine, quick: bool) -> list[Shape]:
    """Return the grid of serving forwards, within batch, pages and context of this engine.

    Each has an adapter, if there are slots: users with feedback have one, and it costs time for every token.
    """
    serving, stride = parts.settings.serving, 2 if quick else 1
    longest = parts.max_context_tokens
    contexts = sorted({min(context, longest - 1) for context in CONTEXTS})
    found = [Shape(n, context) for n in DECODES[::stride] for context in contexts[::stride]]
    before = [0, *contexts[1::stride]]
    found += [Shape(chunks=((num_tokens, context),)) for num_tokens in CHUNKS[::stride] for context in before]
    found += [Shape(chunks=((num_tokens, 0),) * 4) for num_tokens in CHUNKS[1:6:stride]]
    for number in MIXED_DECODES[::stride]:
        for num_tokens in MIXED_CHUNKS:
            found.append(Shape(number, contexts[0], ((num_tokens, 0),)))
            found.append(Shape(number, contexts[-1] // 4, ((num_tokens, contexts[-1] // 8),)))
    for adapters in ADAPTERS[::stride]:
        found += [Shape(max(number, adapters), contexts[0], adapters=adapters) for number in (1, 8, 32)]
        found.append(Shape(chunks=((128, 0),) * adapters, adapters=adapters))
    least = min(1, parts.slots.count)
    return sorted(
        {
            replace(shape, adapters=max(least, shape.adapters))
            for shape in found
            if shape.load.num_tokens <= serving.max_batch_tokens
            and shape.decodes <= serving.max_sequences
            and shape.adapters <= parts.slots.count
            and all(num_tokens + context <= longest for num_tokens, context in shape.chunks)
            and shape.pages(parts.runner.pages.pool.page_size) < parts.runner.pages.pool.pages
        },
        key=repr,
    )


def step_shapes(parts: Engine, quick: bool) -> list[StepShape]:
    """Return steps of several window sizes, with and without a kept graph; none if the model cannot be trained."""
    align = parts.settings.align
    if parts.model.trainable_error:
        return []
    found = []
    for eighths in (1, 4) if quick else (1, 2, 3, 4, 6, 8):
        num_tokens = min(max(12, align.window_tokens * eighths // 8), align.max_pair_tokens)
        for pairs, decodes in ((1, 0), (2, 8)):
            found.append(StepShape(num_tokens, pairs, "full", decodes))
            if align.recompute in ("auto", "none") and num_tokens * pairs <= align.window_tokens:
                found.append(StepShape(num_tokens, pairs, "none"))
    joint = [number for number in (2, 4) if number <= align.joint_adapters]
    return found + [StepShape(max(12, align.window_tokens // 8), 1, "full", adapters=number) for number in joint]


def measure(parts: Engine, quick: bool, progress: Progress = lambda _done, _all, _what: None) -> Prober:
    """Measure all shapes in several rounds, each in its own order; return what has their times.

    The engine's thread must not run on `parts`.
    """
    prober, chance = Prober(parts), random.Random(0)
    forwards, steps = forward_shapes(parts, quick), step_shapes(parts, quick)
    latest_s: dict[Shape, float] = {}
    for index, shape in enumerate(forwards):
        progress(index, len(forwards), f"{shape.text}, to warm up")
        latest_s[shape] = prober.run_forward(shape, noted=False)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    for number in range(rounds):
        with_steps = number % _STEPS_EVERY == 0
        work: list[Shape | StepShape] = [shape for shape in forwards if with_steps or latest_s[shape] <= _LONG_S]
        work += steps if with_steps else []
        chance.shuffle(work)
        for index, item in enumerate(work):
            progress(number * len(work) + index, rounds * len(work), item.text)
            if isinstance(item, Shape):
                latest_s[item] = prober.run_forward(item)
            else:
                prober.run_step(item)
    return prober


class Prober:
    """Runs forwards and fine-tune steps on an engine's parts, whose thread must not run, and keeps their times.

    It must be made on the thread that runs them.
    """

    def __init__(self, parts: Engine) -> None:
        # With the threads and the device that the engine's own thread would have.
        parts.runner.begin_thread()
        self._parts = parts
        self._pages = parts.runner.pages
        self._generator = np.random.default_rng(0)
        self._pair_ids = 0
        self._slots: list[int] = []
        self._forwards: dict[str, tuple[Load, list[float]]] = {}
        self._after_chunk = False
        self.runs: list[tuple[ForwardTime, bool]] = []
        """Every single forward in order, and whether one with a chunk ran right before."""
        self._units: dict[tuple[str, int], list[float]] = {}
        self._windows = cycle(_WINDOWS)

    def times(self) -> tuple[list[ForwardTime], list[UnitTime]]:
        """Return the times of all forwards, by their loads, and of all units, by kind and tokens; in a random order.

        The times are medians: what other programs take from the device now and then does not count.
        """
        forwards = [
            ForwardTime(**asdict(load), seconds=median_high(times))
            for _, (load, times) in sorted(self._forwards.items())
        ]
        units = [
            UnitTime(kind=kind, tokens=num_tokens, seconds=median_high(times))
            for (kind, num_tokens), times in sorted(self._units.items())
        ]
        random.Random(0).shuffle(forwards)
        random.Random(0).shuffle(units)
        return forwards, units

    def _note(self, load: Load, seconds: float) -> None:
        self._forwards.setdefault(repr(load), (load, []))[1].append(seconds)
        self.runs.append((ForwardTime(**asdict(load), seconds=seconds), self._after_chunk))
        self._after_chunk = load.prefill_tokens + load.finetune_tokens > 0

    # -- forwards ----------------------------------------------------------------------------------------------------

    def run_forward(self, shape: Shape, noted: bool = True) -> float:
        """Run a shape's forward with sampling once; return its seconds, and record them if `noted`."""
        slots = self._adapter_slots(shape.adapters)
        ends = [(1, shape.context)] * shape.decodes + list(shape.chunks)
        running = [self._sequence(*end, slots[i % len(slots)]) for i, end in enumerate(ends)]
        try:
            seconds = self._run(running).forward_s
            if noted:
                self._note(shape.load, seconds)
            return seconds
        finally:
            for sequence in running:
                self._pages.free(sequence)

    def _run(
        self, running: Sequence[Running], *tuned: Grant[FinetuneTask], open_steps: dict[int, OpenStep] | None = None
    ) -> RunnerOutput:
        """Run one plan on the executor; the sequences are restored afterwards."""
        grants = [Grant(sequence.task, sequence.task.num_tokens) for sequence in running]
        known = {sequence.task.task_id: sequence for sequence in running}
        plan = Plan([*grants, *tuned])
        work = self._parts.runner.run(plan, known, open_steps or {}, lambda: False, lambda: None)
        for sequence in running:
            sequence.computed = sequence.task.context
        return work

    def _sequence(self, num_tokens: int, context: int, slot: int) -> Running:
        """Make a sequence with `num_tokens` to compute after `context` others, which have pages."""
        task = ServingTask(next(self._parts.stats.task_ids), Kind.PREFILL, 0.0, num_tokens=num_tokens, context=context)
        prompt = self._tokens(num_tokens + context)
        size = self._pages.page_size
        sequence = Running(
            Request(f"probe {task.task_id}", prompt, Sampling()),
            task,
            seed=task.task_id,
            submitted_s=0.0,
            token_ids=list(prompt),
            table=np.zeros(-(-(num_tokens + context) // size), np.int64),
            computed=context,
            slot=slot,
        )
        sequence.add_pages(self._pages.allocate(-(-context // size)))
        return sequence

    def _tokens(self, count: int) -> tuple[int, ...]:
        vocab = self._parts.model.shape.vocab_size
        return tuple(self._generator.integers(min(8, vocab - 1), vocab, count).tolist())

    def _adapter_slots(self, count: int) -> list[int]:
        """Return slots of `count` adapters with weights that are not zero."""
        while len(self._slots) < count:
            state = self._parts.trainer.adapter_cache.get(f"prober-{len(self._slots)}")
            if not state.version:
                state.restore({key: value + 0.01 for key, value in state.tensors().items()}, 1)
            slot = self._parts.slots.acquire(state)
            assert slot is not None, "forward_shapes() asks for no more adapters than there are slots"
            self._slots.append(slot)
        return self._slots[:count] or [NO_SLOT]

    # -- steps -------------------------------------------------------------------------------------------------------

    def run_step(self, shape: StepShape) -> None:
        """Run one DPO step: its packed forwards and its units. Raises RuntimeError when one of these fails."""
        running = [self._sequence(1, _DECODE_CONTEXT, NO_SLOT) for _ in range(shape.decodes)]
        step, began = self._open(shape), time.monotonic()
        task = FinetuneTask(next(self._parts.stats.task_ids), 0.0)
        states = self._pages.begin_step()
        open_step = OpenStep(step, task, dict.fromkeys(step.adapters, NO_SLOT), began, states=states)
        try:
            while not step.finished:
                work, chunk = self._advance(open_step, running)
                if work.failed:
                    raise RuntimeError(f"a fine-tune unit failed: {next(iter(work.failed.values()))}")
                if chunk:
                    load = Load(decodes=shape.decodes, context=_DECODE_CONTEXT * shape.decodes, finetune_tokens=chunk)
                    self._note(load, work.forward_s)
                for unit, seconds in work.units:
                    self._units.setdefault((unit.kind, unit.num_tokens), []).append(seconds)
        finally:
            self._pages.end_step(states)
            for sequence in running:
                self._pages.free(sequence)
        self._parts.trainer.close(step, time.monotonic() - began)
        self._parts.trainer.records.clear()

    def _advance(self, open_step: OpenStep, running: Sequence[Running]) -> tuple[RunnerOutput, int]:
        """Run the step's next chunk of forward, or its next unit; return the output and the chunk's tokens."""
        task = open_step.task
        left, most = (
            open_step.step.micro_batch.tokens_left,
            self._parts.settings.serving.max_batch_tokens - len(running),
        )
        if not left:
            return self._run((), Grant(task, 0, 1, next(self._windows)), open_steps={task.task_id: open_step}), 0
        # Chunks of all lengths: a third of the rest, then of what remains, and then all of it.
        chunk = min(most, left if left < 24 else max(24, left // 3))
        return self._run(running, Grant(task, chunk), open_steps={task.task_id: open_step}), chunk

    def _open(self, shape: StepShape) -> FinetuneStep:
        trainer = self._parts.trainer
        names = [f"prober-learner-{number}" for number in range(shape.adapters)]
        for name in names:
            trainer.submit([self._pair(name, shape.num_tokens) for _ in range(shape.pairs)])
            trainer.adapter_cache.get(name)
        return trainer.open(names[0], shape.recompute, lambda name: name in names)

    def _pair(self, adapter: str, num_tokens: int) -> TokenPair:
        """Make a pair of random tokens: half prompt, a quarter each answer."""
        answer = max(2, num_tokens // 4)
        self._pair_ids += 1
        prompt = self._tokens(max(1, num_tokens - 2 * answer))
        return TokenPair(self._pair_ids, adapter, prompt, self._tokens(answer), self._tokens(answer))
