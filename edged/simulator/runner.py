"""The engine in virtual time: its scheduler, lives of requests, page pool and prefix trie, over a device's times.

Owns the virtual clock and what one iteration comes to. Must not know traces or reports. Where the real engine computes,
this one asks the device how long that takes; tokens are placeholders that no two requests share.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol, cast

from edged.bench.recorder import ReplayedAnswer
from edged.cache.page_pool import OutOfPages, PagePool
from edged.cache.prefix_trie import PrefixTrie
from edged.engine.attention.packed_batch import NO_SLOT
from edged.engine.build import EngineParts
from edged.engine.model_runner import ModelRunner, RunnerOutput
from edged.engine.request import Request, TokenEvent
from edged.engine.sampling.sampler import Drawn
from edged.engine.sequence import Sequence
from edged.engine.sequences import SequenceTable
from edged.engine.stats.counters import Counters, TimeShares
from edged.scheduler.cost.model import CostModel
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import IterationResult, Kind, Plan, Resources, Unit
from edged.settings.load import CacheSettings, Settings
from edged.simulator.pruner import VirtualPruner
from edged.simulator.roofline import Pass
from edged.simulator.steps import SimulatedVersion, VirtualJob, VirtualLearning

ADAPTER = "replay"
START_S = 1.0
"""Not 0, which stands for what has not happened yet in the lives of requests."""
_SLOT = 0
_SHORTEST_REST_S = 1e-3
_PLACEHOLDER = 1 << 32
"""Beyond any vocabulary: what the answers of a request are made of, with its task's id."""


class Device(Protocol):
    """What a simulation must be told of a device; all times are seconds."""

    name: str
    cuda: bool
    overhead_s: float
    """Of an iteration, outside its forward and units."""
    rest_s: float
    """Of one that finds the engine at rest, besides."""

    def guess(self) -> CostModel:
        """The prices that its scheduler starts from."""
        ...

    def forward_s(self, load: Pass) -> float:
        """One packed forward with sampling; 0 when there is nothing in it."""
        ...

    def unit_s(self, unit: Unit) -> float:
        """One fine-tune unit."""
        ...


class VirtualExecutor(ModelRunner):
    """The engine's bookkeeping of pages and prefixes, without its tensors."""

    def __init__(self, pool: PagePool, trie: PrefixTrie | None, pruning: CacheSettings | None) -> None:
        """`pruning`: settings of pruning; None where nothing is pruned."""
        # Nothing of the executor's own construction applies: there is no model.
        self.pool, self.trie = pool, trie
        self.kv = cast(Any, SimpleNamespace(page_size=pool.page_size))
        self.graphs = self.spill = None
        self.virtual_pruner = VirtualPruner(pruning, pool, self.evictable_pages, self.allocate) if pruning else None
        self.pruner = self.virtual_pruner

    def grow(self, sequence: Sequence, tokens: int) -> int:
        """Give a sequence the pages for `tokens` more; how many of them it can use. Raises OutOfPages."""
        tokens = min(tokens, len(sequence.tokens) - sequence.computed)
        needed = -(-(sequence.rows + tokens) // self.pool.page_size) - len(sequence.pages)
        if needed > 0:
            sequence.add_pages(self.allocate(needed))
        return tokens


class _Slots:
    """LoRA slots without weights: there is always one."""

    def acquire(self, _state: SimulatedVersion) -> int:
        return _SLOT

    def release(self, _slot: int) -> None:
        pass

    def publish(self, _state: SimulatedVersion, _previous: int, _hot: bool) -> int:
        return _SLOT


@dataclass(slots=True)
class SimulatedTotals:
    """Counts since the start."""

    iterations: int = 0
    preemptions: int = 0
    finetune_tokens: int = 0


@dataclass(order=True, slots=True)
class Coming:
    """Something that happens to the engine at a moment of virtual time."""

    at_s: float
    happen: Callable[[], None] = field(compare=False)


class VirtualEngine:
    """Serves requests and learns from pairs as fast as `device` does; `now` is its clock, from START_S."""

    def __init__(
        self,
        settings: Settings,
        device: Device,
        pages: int,
        layers: int,
        vocab_size: int,
        max_context_tokens: int,
        keeps_graph: bool,
    ) -> None:
        """`pages` are those of the pool; `keeps_graph`: memory allows it."""
        self.now = START_S
        self.device, self.settings = device, settings
        self.max_context_tokens = max_context_tokens
        self.answers: dict[str, ReplayedAnswer] = {}
        self.totals = SimulatedTotals()
        self.decision_ms: deque[float] = deque(maxlen=1000)
        self.busy = TimeShares()
        self.cost = device.guess()
        self.scheduler = Scheduler(settings.scheduler, self.cost)
        self.pool = PagePool(pages, settings.cache.page_size)
        # As in the engine, nobody owns page 0.
        self.pool.allocate(1)
        shares = settings.cache.prefix_sharing and self.scheduler.policy.shares_prefixes
        self.trie = PrefixTrie(self.pool) if shares else None
        prunes = settings.cache.pruning != "off" and self.scheduler.policy.prunes
        self._runner = VirtualExecutor(self.pool, self.trie, settings.cache if prunes else None)
        self._task_ids = itertools.count(1)
        self._keeps_graph = keeps_graph
        self.learning = VirtualLearning(
            ADAPTER,
            settings.align,
            self.scheduler,
            layers,
            vocab_size,
            settings.cache.page_size,
            (pages - 1) * settings.cache.page_size,
            self._may_keep_graph,
            self.pool.release,
            self._published,
        )
        self._serving = SequenceTable(self._parts(pages - 1))
        self._coming: deque[Coming] = deque()
        self._at_rest = True

    def _parts(self, pages: int) -> EngineParts:
        """What `SequenceTable` works with: real scheduler, pool and trie; slots and versions that hold no weights."""
        learning = self.learning
        trainer = SimpleNamespace(
            version=lambda adapter: learning.state.version if adapter == ADAPTER else 0,
            state=lambda _adapter: learning.state,
            adapter_cache=SimpleNamespace(resident=lambda _adapter: True),
        )
        parts = SimpleNamespace(
            settings=self.settings,
            runner=self._runner,
            scheduler=self.scheduler,
            slots=_Slots(),
            trainer=trainer,
            stats=Counters(),
            pages=pages,
            max_context_tokens=self.max_context_tokens,
            end_ids=frozenset(),
            task_ids=self._task_ids,
        )
        return cast(EngineParts, parts)

    def _may_keep_graph(self) -> bool:
        """Not where the weights are read for serving anyway: see the engine's `FinetuneSteps`."""
        counts = self.scheduler.counts()
        serving = counts[Kind.PREFILL] + counts[Kind.DECODE] > 0
        return self._keeps_graph and not (serving and self.device.cuda)

    def _published(self, state: SimulatedVersion, previous: int) -> None:
        self._serving.on_publish(cast(Any, state), previous)

    # -- what comes --------------------------------------------------------------------------------------------------

    def schedule(self, coming: Iterable[Coming]) -> None:
        """Let these happen in their moments, besides what is to happen already."""
        self._coming = deque(sorted([*self._coming, *coming]))

    def submit(self, request: Request) -> None:
        """A request, as `Engine.submit` takes it; it is refused where the queue is full."""
        self.answers[request.request_id] = ReplayedAnswer(self.now, len(request.prompt_ids))
        if self._serving.waiting < self.settings.serving.max_queue:
            self._serving.add(request, self.now)

    @property
    def pruner(self) -> VirtualPruner | None:
        """Where settings and policy have K/V pruned."""
        return self._runner.virtual_pruner

    @property
    def open_requests(self) -> int:
        """Requests that are not answered yet."""
        return len(self._serving.running)

    def cancel_all(self) -> None:
        """End every request that is not answered."""
        self._serving.cancel_all(self.now)
        self._deliver()

    # -- time --------------------------------------------------------------------------------------------------------

    def run(self, until_s: float, drained: bool = False) -> None:
        """Let time pass until `until_s`, or, with `drained`, until nothing is asked and nothing comes any more."""
        while self.now < until_s:
            self._happen()
            if drained and not self._coming and not self._serving.busy:
                return
            self.learning.feed(self._next_task_id, self.now)
            self._serving.prune(self.now)
            started = time.perf_counter()
            plan = self.scheduler.plan(self.now, self._resources())
            self.decision_ms.append((time.perf_counter() - started) * 1e3)
            if plan.grants or plan.preempt:
                self._iterate(plan)
            else:
                self._at_rest = True
                next_s = self._coming[0].at_s if self._coming else until_s
                self.now = min(until_s, next_s, max(plan.resume_s, self.now + _SHORTEST_REST_S))

    def _next_task_id(self) -> int:
        return next(self._task_ids)

    def _happen(self) -> None:
        """Everything that was due by now, with the clock of its own moment."""
        coming, now = self._coming, self.now
        while coming and coming[0].at_s <= now:
            event = coming.popleft()
            self.now = event.at_s
            event.happen()
        self.now = now

    def _resources(self) -> Resources:
        serving = self.settings.serving
        return Resources(
            free_pages=self.pool.free_pages + self._runner.evictable_pages(),
            total_pages=self.pool.pages - 1,
            page_size=self.pool.page_size,
            max_tokens=serving.max_batch_tokens,
            max_sequences=min(serving.max_sequences, serving.max_batch_tokens // 2),
        )

    # -- one iteration -----------------------------------------------------------------------------------------------

    def _iterate(self, plan: Plan) -> None:
        """What `EngineLoop._iterate` does; the clock moves on by what the device takes."""
        started_s = self.now
        for task in plan.preempt:
            if not self.learning.preempt(task.task_id, started_s):
                self._serving.preempt(task.task_id, started_s)
                self.totals.preemptions += 1
        self._serving.admit(plan, started_s)
        work, tuned = self._forward(plan)
        waking_s, self._at_rest = self.device.rest_s if self._at_rest else 0.0, False
        self.now = started_s + waking_s + self.device.overhead_s + work.forward_s
        self._run_units(plan, work, began=bool(tuned))
        outcomes = self._serving.after(work, self.now) + self.learning.after(plan, tuned, work.units_run)
        result = IterationResult(outcomes, work.forward_s, work.units)
        self.totals.iterations += 1
        self.totals.finetune_tokens += sum(tuned.values())
        self.busy.add(self.cost, result, self.now - started_s)
        self.scheduler.complete(result, self.now)
        self.learning.close_finished(self.now)
        self._deliver()

    def _forward(self, plan: Plan) -> tuple[RunnerOutput, dict[int, int]]:
        """The packed forward: pages for it, its time, who got a token; also its fine-tune tokens by task id."""
        work, load, tuned = RunnerOutput(), Pass(), dict[int, int]()
        running, jobs = self._serving.running, self.learning.jobs
        for grant in plan.grants:
            if not grant.tokens:
                continue
            task_id = grant.task.task_id
            try:
                if task_id in jobs:
                    tuned[task_id] = self._tune(jobs[task_id], grant.tokens, load)
                else:
                    self._serve(running[task_id], grant.tokens, work, load)
            except OutOfPages:
                # As in the executor: the task waits an iteration.
                continue
        load.sampled = len(work.sampled)
        work.forward_s = self.device.forward_s(load)
        for sequence, tokens in work.prefilled:
            sequence.computed += tokens
        # A token of its own for each request: nobody else's prompt goes on with it.
        drawn = [_PLACEHOLDER + sequence.task.task_id for sequence in work.sampled]
        nothing: list[Any] = [None] * len(drawn)
        work.drawn = Drawn(drawn, nothing, nothing) if drawn else None
        return work, tuned

    def _serve(self, sequence: Sequence, tokens: int, work: RunnerOutput, load: Pass) -> None:
        tokens = self._runner.grow(sequence, tokens)
        if sequence.task.kind is Kind.DECODE:
            load.decodes += 1
            load.context += sequence.rows
            if self.pruner is not None:
                self.pruner.look(sequence)
        else:
            load.add_chunk(tokens, sequence.computed, finetune=False)
        if sequence.slot != NO_SLOT:
            load.adapted += tokens
            load.adapters = 1
        work.prefilled.append((sequence, tokens))
        if sequence.computed + tokens == len(sequence.tokens):
            work.sampled.append(sequence)

    def _tune(self, job: VirtualJob, tokens: int, load: Pass) -> int:
        """Compute up to `tokens` of a step's streams. Raises OutOfPages before any of them has advanced."""
        taken: list[tuple[Any, int]] = []
        needed, left = 0, tokens
        for stream in job.step.streams:
            piece = min(stream.left, left)
            if piece:
                taken.append((stream, piece))
                needed += max(0, -(-(stream.done + piece) // self.pool.page_size) - stream.pages)
                left -= piece
        job.pages += self._runner.allocate(needed)
        for stream, piece in taken:
            load.add_chunk(piece, stream.done, finetune=True)
            load.adapted += 0 if stream.reference else piece
            stream.done += piece
            stream.pages = max(stream.pages, -(-stream.done // self.pool.page_size))
        return tokens - left

    def _run_units(self, plan: Plan, work: RunnerOutput, began: bool) -> None:
        """Units one by one; an arrival ends them, but not before something of fine-tuning has run."""

        def clock(unit: Unit) -> bool:
            seconds = self.device.unit_s(unit)
            self.now += seconds
            work.units.append((unit, seconds))
            return not (self._coming and self._coming[0].at_s <= self.now)

        for grant in plan.grants:
            if grant.units:
                begun = began or bool(work.units)
                if begun and self._coming and self._coming[0].at_s <= self.now:
                    break
                job = self.learning.jobs[grant.task.task_id]
                work.units_run[grant.task.task_id] = self.learning.run_units(job, grant.units, clock)

    def _deliver(self) -> None:
        now = self.now
        for event in self._serving.take_events():
            answer = self.answers[event.request_id]
            if isinstance(event, TokenEvent):
                answer.token_s.append(now)
            else:
                answer.finish = event
