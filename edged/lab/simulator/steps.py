"""Simulated preference learning: steps in virtual time, with the tokens and units of real ones but no tensors.

Every pair is assumed to have a loss over the threshold, and none is held out for tests.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from edged.align.dpo.step_plan import StepPlan
from edged.align.dpo.step_plan import Work as UnitWork
from edged.align.feedback.pair import TokenPair
from edged.align.pair_queues import FIRST_LOSS, AdapterQueue
from edged.engine.model_runner import RunnerOutput
from edged.profiler.recorder import SentPair
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import FinetuneTask, Plan, TaskOutcome, Unit
from edged.settings.load import AlignSettings


@dataclass(slots=True)
class SimulatedPairForward:
    """One pair's forward under the adapter or, when `reference`, under the base."""

    num_tokens: int
    reference: bool
    packed: bool
    """Whether packed forwards compute it."""
    done: int = 0
    pages: int = 0

    @property
    def left(self) -> int:
        """Tokens that packed forwards are still to compute."""
        return self.num_tokens - self.done if self.packed else 0


class SimulatedStep(StepPlan):
    """The work of a `DpoStep` of one adapter: the same tokens and units in the same order."""

    finished = False
    pair_forwards: Sequence[SimulatedPairForward]
    ahead: Sequence[SimulatedPairForward] = ()
    """Forwards of the next group, where they may be computed ahead: see `DpoStep.look_ahead`."""

    def next_group(self) -> None:
        """Begin the next group, or go on with what of its forward was computed ahead."""
        ahead = self.ahead
        super().next_group()
        self.pair_forwards = ahead or self.pair_forwards

    def restart(self) -> None:
        """Begin the group's forward, or begin it again after its pages were taken away."""
        super().restart()
        self.pair_forwards, self.ahead = self._forwards(self.pairs, not self.graphed), ()

    def look_ahead(self) -> None:
        """Let the next group's forward begin, once the present one's has ended."""
        if not self.ahead and not self.tokens_left:
            self.ahead = self._forwards(self.following, True)

    def _forwards(self, pairs: Sequence[TokenPair], packed: bool) -> Sequence[SimulatedPairForward]:
        """Return the forwards of `pairs`; the policy's are computed in `packed` ones or over a kept graph."""
        pair_forwards = []
        for pair in pairs:
            if self.needs_reference(pair):
                pair_forwards.append(SimulatedPairForward(pair.num_tokens, reference=True, packed=True))
            pair_forwards.append(SimulatedPairForward(pair.num_tokens, reference=False, packed=packed))
        return pair_forwards

    @property
    def packing(self) -> Sequence[SimulatedPairForward]:
        """The forwards that are computed next."""
        return self.pair_forwards if self.tokens_left else self.ahead

    @property
    def tokens_left(self) -> int:
        """Forward tokens of the current group that are still to compute."""
        return sum(pair_forward.left for pair_forward in self.pair_forwards)

    def run_unit(self, most: int = 0) -> UnitWork:
        """Run the next unit, or `most` of its rows, and return what ran."""
        unit = self.take_unit(most)
        self.finished = unit[0] == "step"
        if not self.units and not self.finished:
            self.next_group()
        return unit


@dataclass(slots=True)
class SimulatedOpenStep:
    """A step under way, and the pages that each of its streams holds."""

    step: SimulatedStep
    task: FinetuneTask
    pages: list[int]

    def next(self, units: int) -> list[Unit]:
        """Return the step's next units, as many as that; none before its forward has ended."""
        return [] if self.step.tokens_left else [Unit(*work) for work in self.step.units[:units]]


@dataclass(frozen=True, slots=True)
class SimulatedVersion:
    """The part of an adapter's state that serving needs."""

    name: str
    version: int


class SimulatedFinetuning:
    """Pairs, steps and versions; the counterpart of the engine's `StepTable` and its trainer.

    Pairs of all adapters wait in one queue, and a step takes the next ones, whosever they are.
    """

    def __init__(
        self,
        adapter: str,
        align: AlignSettings,
        scheduler: Scheduler,
        layers: int,
        vocab_size: int,
        keeps_states: bool,
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
        self._layers, self._vocab_size, self._max_tokens = layers, vocab_size, cache_tokens // 4
        self._keeps_states = keeps_states
        self._may_keep_graph, self._release, self._publish = may_keep_graph, release, publish
        self._states: dict[str, SimulatedVersion] = {}
        self._queue = AdapterQueue(adapter)
        self.pairs: dict[int, SentPair] = {}
        """Submitted pairs by pair id."""
        self.by_task: dict[int, SimulatedOpenStep] = {}
        self.pairs_trained = self.trained_tokens = self.optimizer_steps = 0

    def submit(self, pair: TokenPair, now: float) -> None:
        """Queue a pair that was sent at `now`, before those that were sent later; one that the KV cache has no room
        for, or that the policy never trains on, is dropped."""
        self.pairs[pair.pair_id], queue = SentPair(now), self._queue.queue
        if self._scheduler.policy.trains and self._align.enabled and pair.num_tokens <= self._max_tokens:
            later = (place for place, other in enumerate(queue) if self.pairs[other.pair_id].sent_s > now)
            queue.insert(next(later, len(queue)), pair)

    @property
    def pairs_queued(self) -> int:
        """Number of pairs that wait for training or are in a step, as a daemon counts them."""
        return self._queue.pairs

    def version(self, adapter: str | None) -> int:
        """The adapter's current version."""
        return self.get(adapter).version if adapter else 0

    def resident(self, _adapter: str) -> bool:
        """Whether the adapter is in memory, as it always is in a simulation."""
        return True

    def get(self, adapter: str) -> SimulatedVersion:
        """The adapter's current state. It begins as version 1: untrained weights that cost as much as trained ones."""
        return self._states.setdefault(adapter, SimulatedVersion(adapter, 1))

    def adopt(self, adapter: str) -> None:
        """Serve the adapter's next version, wherever it was made."""
        previous = self.get(adapter).version
        self._states[adapter] = state = SimulatedVersion(adapter, previous + 1)
        self._publish(state, previous)

    def withdraw(self, adapter: str) -> list[TokenPair]:
        """Take an adapter's pairs out of the queue, which are to be learned elsewhere; those of an open step stay."""
        queue = self._queue.queue
        gone = [pair for pair in queue if pair.adapter == adapter]
        for pair in gone:
            queue.remove(pair)
            del self.pairs[pair.pair_id]
        return gone

    def open_due(self, now: float) -> None:
        """Open the next step where none is under way."""
        if self.by_task or not self._queue.queue:
            return
        draw = self._queue.draw(self._align)
        self._queue.begin(draw)
        step = SimulatedStep(
            [*draw.fresh, *draw.replay],
            lambda pair: pair.ref_chosen_logp is None,
            self._align,
            self._layers,
            self._vocab_size,
            self._max_tokens,
            self._may_keep_graph(),
            keeps_states=self._keeps_states,
        )
        task = FinetuneTask(next(self._task_ids), now, loss=FIRST_LOSS)
        self.by_task[task.task_id] = open_step = SimulatedOpenStep(step, task, [])
        self._sync(open_step)
        self._scheduler.add(task, now)

    def _sync(self, open_step: SimulatedOpenStep) -> None:
        task, pair_forwards = open_step.task, [*open_step.step.pair_forwards, *open_step.step.ahead]
        task.num_tokens, task.next_unit = open_step.step.tokens_left, 0
        task.ahead = sum(pair_forward.left for pair_forward in open_step.step.ahead)
        task.units = tuple(Unit(kind, num_tokens) for kind, num_tokens in open_step.step.units)
        task.groups_done = open_step.step.groups_done
        task.context = sum(pair_forward.done for pair_forward in pair_forwards)
        task.held_pages = len(open_step.pages)
        unfinished = sum(pair_forward.left > 0 for pair_forward in pair_forwards)
        task.capacity = task.context - unfinished * self._page_size

    def preempt(self, task_id: int, now: float) -> None:
        """Take a step's pages away."""
        open_step = self.by_task.get(task_id)
        if open_step is None:
            return
        self._release(open_step.pages)
        open_step.pages = []
        open_step.step.restart()
        self._scheduler.restart(open_step.task, open_step.step.tokens_left, now)
        open_step.task.underway = open_step.step.groups_done > 0
        self._sync(open_step)
        self._scheduler.update(open_step.task)

    def starved(self, task_ids: set[int], reason: str, now: float) -> None:
        """Do nothing: memory does not run out in a simulation."""

    def fail(self, task_ids: set[int], error: str, now: float) -> list[str]:
        """Do nothing: no step fails in a simulation."""
        return []

    def process(self, output: RunnerOutput, plan: Plan, now: float) -> list[TaskOutcome]:
        """Return the outcomes of the plan's grants to steps."""
        return output.finetune_outcomes(plan, self.by_task)

    def flush(self, now: float) -> None:
        """Do nothing: a simulation keeps no records."""

    def next_due_s(self) -> float | None:
        """Return None: only steps become due in a simulation."""
        return None

    def close(self) -> None:
        """Do nothing: a simulation saves nothing."""

    def close_finished(self, now: float, failed: Mapping[int, Exception]) -> None:
        """Publish the versions of finished steps, and update the tasks of the others."""
        for task_id, open_step in list(self.by_task.items()):
            if open_step.step.finished:
                del self.by_task[task_id]
                self._close(now)
            else:
                if self._scheduler.policy.fills_ahead:
                    open_step.step.look_ahead()
                self._sync(open_step)
                self._scheduler.update(open_step.task)

    def _close(self, now: float) -> None:
        pairs = self._queue.taken
        self._queue.end()
        self.trained_tokens += sum(pair.num_tokens for pair in pairs)
        for pair in pairs:
            known = replace(pair, epochs_done=pair.epochs_done + 1, ref_chosen_logp=0.0, ref_rejected_logp=0.0)
            sent = self.pairs[pair.pair_id]
            sent.learned_s = sent.learned_s or now
            if known.epochs_done < self._align.epochs:
                self._queue.queue.append(known)
                continue
            self._queue.replay.append(known)
            self.pairs_trained += 1
        self.optimizer_steps += 1
        for adapter in dict.fromkeys(pair.adapter for pair in pairs):
            self.adopt(adapter)
