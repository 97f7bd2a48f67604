"""Preference learning in virtual time: steps with the tokens and units of real ones, and no numbers in them.

Every pair is taken to have a loss that is worth a step, and none is held out for tests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from edged.align.dpo.micro_batch import Work as UnitWork
from edged.align.dpo.micro_batch import head_window_size
from edged.align.dpo.recompute import windows_of
from edged.align.dpo.step import groups_of
from edged.align.feedback.pair import TokenPair
from edged.align.pair_queues import FIRST_LOSS, AdapterQueue, StepBatch
from edged.bench.recorder import SentPair
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import Kind, Task, Unit
from edged.settings.load import AlignSettings


@dataclass(slots=True)
class SimulatedStream:
    """One pair's forward under the adapter or, when `reference`, under the base."""

    tokens: int
    scored: int
    """Predictions whose log-probability is asked for."""
    reference: bool
    packed: bool
    """Whether packed forwards compute it."""
    done: int = 0
    pages: int = 0

    @classmethod
    def of(cls, pair: TokenPair, reference: bool, packed: bool) -> SimulatedStream:
        """The stream of a pair."""
        answers = len(pair.chosen) + len(pair.rejected)
        return cls(pair.tokens, answers - (0 if pair.prompt else 2), reference, packed)

    @property
    def left(self) -> int:
        """Tokens that packed forwards are still to compute."""
        return self.tokens - self.done if self.packed else 0


class SimulatedStep:
    """The work of a `DpoStep` of one adapter: the same tokens and units in the same order."""

    def __init__(
        self,
        draw: StepBatch,
        version: int,
        align: AlignSettings,
        layers: int,
        vocab_size: int,
        most_tokens: int,
        keep_graph: bool,
    ) -> None:
        """Parameters as those of `DpoStep`; `version` 0 needs no reference, for it answers as the base."""
        self.draw, self.finished = draw, False
        self._version, self._align, self._layers, self._keep_graph = version, align, layers, keep_graph
        self._head_size = head_window_size(align.window_tokens, vocab_size)
        windows = 1 if keep_graph else 2
        self._batches = groups_of([*draw.fresh, *draw.replay], min(windows * align.window_tokens, most_tokens))
        self.streams: list[SimulatedStream] = []
        self.groups_done = 0
        self._open()

    def _open(self) -> None:
        self._pairs = self._batches.pop(0)
        self._graphed = self._keep_graph and sum(pair.tokens for pair in self._pairs) <= self._align.window_tokens
        self.restart()

    def restart(self) -> None:
        """The group's forward begins, or begins again: its pages are somebody else's."""
        self.streams = []
        for pair in self._pairs:
            if pair.ref_chosen_logp is None and self._version > 0:
                self.streams.append(SimulatedStream.of(pair, reference=True, packed=True))
            self.streams.append(SimulatedStream.of(pair, reference=False, packed=not self._graphed))
        self._units = self._all_units()

    def _all_units(self) -> list[UnitWork]:
        rows = sum(stream.tokens for stream in self.streams if not stream.reference)
        units: list[UnitWork] = [("graph", rows)] * (self._layers if self._graphed else 0)
        for kind, reference in (("score", True), ("head", False)):
            scored = sum(stream.scored for stream in self.streams if stream.reference == reference)
            units += [(kind, min(self._head_size, scored - at)) for at in range(0, scored, self._head_size)]
        windows = windows_of([(0, rows)], rows if self._graphed else self._align.window_tokens)
        units += [("grad" if self._graphed else "layer", stop - start) for start, stop in windows] * self._layers
        return units if self._batches else [*units, ("step", 1)]

    @property
    def tokens_left(self) -> int:
        """Forward tokens of the present group that are still to compute."""
        return sum(stream.left for stream in self.streams)

    def units_left(self) -> list[UnitWork]:
        """What is left of this group after its forward."""
        return self._units

    @property
    def needs_pages(self) -> bool:
        """Whether anything but the optimizer is left of this group."""
        return len(self._units) > 1 or (bool(self._units) and self._units[0][0] != "step")

    def run_unit(self) -> UnitWork:
        """Run the next unit; what ran."""
        unit = self._units.pop(0)
        if not self._units:
            if self._batches:
                self.groups_done += 1
                self._open()
            else:
                self.finished = True
        return unit


@dataclass(slots=True)
class SimulatedJob:
    """A step under way, and the pages that each of its streams holds."""

    step: SimulatedStep
    task: Task
    pages: list[int]


@dataclass(frozen=True, slots=True)
class SimulatedVersion:
    """What serving must know of an adapter's state."""

    name: str
    version: int


class SimulatedFinetuning:
    """One adapter's pairs, steps and versions; the counterpart of the engine's `FinetuneJobs` and its trainer."""

    def __init__(
        self,
        adapter: str,
        align: AlignSettings,
        scheduler: Scheduler,
        layers: int,
        vocab_size: int,
        page_size: int,
        cache_tokens: int,
        may_keep_graph: Callable[[], bool],
        release: Callable[[list[int]], None],
        publish: Callable[[SimulatedVersion, int], None],
        task_ids: Iterator[int],
    ) -> None:
        """`publish(new, previous version)` gets each version; `cache_tokens` is the whole KV cache."""
        self.resumes_s = math.inf
        self._task_ids = task_ids
        self._align, self._scheduler, self._page_size = align, scheduler, page_size
        self._layers, self._vocab_size, self._most_tokens = layers, vocab_size, cache_tokens // 4
        self._may_keep_graph, self._release, self._publish = may_keep_graph, release, publish
        # As a replay introduces its adapter: untrained weights that cost what trained ones do.
        self.state = SimulatedVersion(adapter, 1)
        self._learner = AdapterQueue(adapter)
        self.pairs: dict[int, SentPair] = {}
        """By pair id."""
        self.jobs: dict[int, SimulatedJob] = {}
        self.pairs_trained = self.steps = 0

    def submit(self, pair: TokenPair, now: float) -> None:
        """Queue a pair; one that the K/V cache has no room for, or that the policy never trains on, is dropped."""
        self.pairs[pair.pair_id] = SentPair(now)
        if self._scheduler.policy.trains and self._align.enabled and pair.tokens <= self._most_tokens:
            self._learner.queue.append(pair)

    def version(self, adapter: str | None) -> int:
        """The adapter's current version."""
        return self.state.version if adapter == self.state.name else 0

    def resident(self, _adapter: str) -> bool:
        """Nothing is on disk."""
        return True

    def get(self, _adapter: str) -> SimulatedVersion:
        """The current state."""
        return self.state

    def open_due_steps(self, now: float, slots_wanted: bool) -> None:
        """Open the next step where none is under way."""
        if self.jobs or not self._learner.queue:
            return
        draw = self._learner.draw(self._align)
        self._learner.begin(draw)
        step = SimulatedStep(
            draw,
            self.state.version,
            self._align,
            self._layers,
            self._vocab_size,
            self._most_tokens,
            self._align.keep_graph and self._may_keep_graph(),
        )
        task = Task(next(self._task_ids), Kind.FINETUNE, now, loss=FIRST_LOSS)
        self.jobs[task.task_id] = job = SimulatedJob(step, task, [])
        self._sync(job)
        self._scheduler.add(task, now)

    def _sync(self, job: SimulatedJob) -> None:
        task, streams = job.task, job.step.streams
        task.tokens, task.next_unit = job.step.tokens_left, 0
        task.units = tuple(Unit(kind, tokens) for kind, tokens in job.step.units_left())
        task.context = sum(stream.done for stream in streams)
        task.held_pages = len(job.pages)
        unfinished = sum(stream.left > 0 for stream in streams)
        task.capacity = task.context - unfinished * self._page_size

    def preempt(self, task_id: int, now: float) -> bool:
        """Take a step's pages away; False when the task is no step."""
        job = self.jobs.get(task_id)
        if job is None:
            return False
        self._free(job)
        job.step.restart()
        self._scheduler.restart(job.task, job.step.tokens_left, now)
        job.task.underway = job.step.groups_done > 0
        self._sync(job)
        self._scheduler.update(job.task)
        return True

    def _free(self, job: SimulatedJob) -> None:
        self._release(job.pages)
        job.pages = []

    def starved(self, task_ids: set[int], reason: str, now: float) -> None:
        """Memory does not run out in a simulation."""

    def fail(self, task_ids: set[int], reason: str) -> None:
        """No step fails in a simulation."""

    def flush(self, now: float, answering: Callable[[], set[str]]) -> None:
        """Nothing is on record."""

    def next_due_s(self) -> float | None:
        """Nothing is due but steps."""
        return None

    def close(self) -> None:
        """Nothing is to be saved."""

    def close_finished(self, now: float, failed: Mapping[int, Exception], suspects: deque[tuple[str, int]]) -> None:
        """Publish what finished steps learned; bring the others' tasks up to date."""
        for task_id, job in list(self.jobs.items()):
            if job.step.finished:
                del self.jobs[task_id]
                self._close(job.step.draw, now)
            else:
                self._sync(job)
                self._scheduler.update(job.task)

    def _close(self, draw: StepBatch, now: float) -> None:
        learner = self._learner
        learner.end()
        for pair in draw.fresh:
            known = replace(pair, epochs_done=pair.epochs_done + 1, ref_chosen_logp=0.0, ref_rejected_logp=0.0)
            sent = self.pairs[pair.pair_id]
            sent.learnt_s = sent.learnt_s or now
            if known.epochs_done < self._align.epochs:
                learner.queue.append(known)
                continue
            learner.replay.append(known)
            self.pairs_trained += 1
        self.steps += 1
        previous = self.state.version
        self.state = replace(self.state, version=previous + 1)
        self._publish(self.state, previous)
