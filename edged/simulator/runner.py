"""The engine in virtual time: its own loop, scheduler, sequences, page pool and trie, over a device's times.

Where `ModelRunner` computes, `SimulatedRunner` asks the device how long that takes; tokens are placeholders that no two
requests share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from edged.bench.recorder import ReplayedAnswer
from edged.cache.page_pool import OutOfPages, PagePool
from edged.engine.command_queue import CommandQueue
from edged.engine.kv_pages import KvPages
from edged.engine.loop import EngineLoop
from edged.engine.lora.segments import NO_SLOT
from edged.engine.model_runner import RunnerOutput
from edged.engine.pruner import Pruner
from edged.engine.request import Event, Request, TokenEvent
from edged.engine.resource_limits import bin_resources
from edged.engine.sampling.sampler import Drawn
from edged.engine.sequence import Sequence
from edged.engine.sequences import SequenceTable
from edged.engine.stats.counters import Counters
from edged.scheduler.cost.model import CostModel
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import Kind, Plan, Resources, Unit
from edged.settings.live import Live
from edged.settings.load import ServingSettings, Settings
from edged.simulator.pruner import SimulatedPruner
from edged.simulator.roofline import Pass
from edged.simulator.steps import SimulatedFinetuning, SimulatedJob, SimulatedStream

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


@dataclass(slots=True)
class VirtualClock:
    """Seconds of virtual time, from START_S."""

    now: float = START_S

    def __call__(self) -> float:
        """The present moment."""
        return self.now


@dataclass(order=True, slots=True)
class Coming:
    """Something that happens to the engine at a moment of virtual time."""

    at_s: float
    happen: Callable[[], None] = field(compare=False)


class ComingCommands(CommandQueue):
    """Commands that arrive in their moments of virtual time."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self.coming: deque[Coming] = deque()

    @property
    def arrived(self) -> bool:
        """Whether one is due."""
        return bool(self.coming) and self.coming[0].at_s <= self._clock.now

    def run_pending(self) -> None:
        """Have everything happen that is due, with the clock of its own moment."""
        now = self._clock.now
        while self.coming and self.coming[0].at_s <= now:
            event = self.coming.popleft()
            self._clock.now = event.at_s
            event.happen()
        self._clock.now = now


class SimulatedRunner:
    """Runs plans on a simulated device: the clock moves on by the device's times. See `ModelRunner`."""

    overlaps = False
    end_ids: frozenset[int] = frozenset()

    def __init__(
        self,
        device: Device,
        clock: VirtualClock,
        pages: KvPages,
        pruner: SimulatedPruner | None,
        max_context_tokens: int,
    ) -> None:
        self._device, self._clock, self._pages, self._pruner = device, clock, pages, pruner
        self.pages, self.max_context_tokens = pages, max_context_tokens
        self.pruner: Pruner | None = pruner
        self.at_rest = True
        """Whether nothing has run since the device was idle."""

    def begin_thread(self) -> None:
        """There is no device to bind."""

    def begin_iteration(self, now: float) -> None:
        """No other program uses the device."""

    def check_device(self) -> None:
        """No device fails."""

    def return_memory(self) -> None:
        """No memory is taken."""

    def close(self) -> None:
        """There is nothing to end."""

    def run(
        self,
        plan: Plan,
        sequences: Mapping[int, Sequence],
        jobs: Mapping[int, SimulatedJob],
        interrupted: Callable[[], bool],
        while_waiting: Callable[[], None],
    ) -> RunnerOutput:
        """Have the plan's forward and units take their time."""
        work, load = RunnerOutput(), Pass()
        for grant in plan.grants:
            if not grant.tokens:
                continue
            task_id = grant.task.task_id
            try:
                if task_id in sequences:
                    self._serve(sequences[task_id], grant.tokens, work, load)
                else:
                    work.finetuned[task_id] = self._tune(jobs[task_id], grant.tokens, load)
            except OutOfPages:
                # As in the model's runner: the task waits an iteration.
                continue
        load.sampled = len(work.sampled)
        work.forward_s = self._device.forward_s(load)
        for sequence, tokens in work.prefilled:
            sequence.computed += tokens
        # A token of its own for each request: no other prompt goes on with it.
        drawn = [_PLACEHOLDER + sequence.task.task_id for sequence in work.sampled]
        nothing: list[Any] = [None] * len(drawn)
        work.drawn = Drawn(drawn, nothing, nothing) if drawn else None
        waking_s, self.at_rest = self._device.rest_s if self.at_rest else 0.0, False
        self._clock.now = self._clock.now + waking_s + self._device.overhead_s + work.forward_s
        for grant in plan.grants:
            if grant.units:
                if (work.finetuned or work.units) and interrupted():
                    break
                job = jobs[grant.task.task_id]
                work.units_run[grant.task.task_id] = self.run_units(job, grant.units, interrupted, work)
        return work

    def _serve(self, sequence: Sequence, tokens: int, work: RunnerOutput, load: Pass) -> None:
        tokens = self._pages.grow(sequence, tokens)
        if sequence.task.kind is Kind.DECODE:
            load.decodes += 1
            load.context += sequence.rows
            if self._pruner is not None:
                self._pruner.look(sequence)
        else:
            load.add_chunk(tokens, sequence.computed, finetune=False)
        if sequence.slot != NO_SLOT:
            load.adapted += tokens
            load.adapters = 1
        work.prefilled.append((sequence, tokens))
        if sequence.computed + tokens == len(sequence.tokens):
            work.sampled.append(sequence)

    def _tune(self, job: SimulatedJob, tokens: int, load: Pass) -> int:
        """Compute up to `tokens` of a step's streams. Raises OutOfPages before any of them has advanced."""
        taken: list[tuple[SimulatedStream, int]] = []
        needed, left, size = 0, tokens, self._pages.page_size
        for stream in job.step.streams:
            piece = min(stream.left, left)
            if piece:
                taken.append((stream, piece))
                needed += max(0, -(-(stream.done + piece) // size) - stream.pages)
                left -= piece
        job.pages += self._pages.allocate(needed)
        for stream, piece in taken:
            load.add_chunk(piece, stream.done, finetune=True)
            load.adapted += 0 if stream.reference else piece
            stream.done += piece
            stream.pages = max(stream.pages, -(-stream.done // size))
        return tokens - left

    def run_units(self, job: SimulatedJob, count: int, interrupted: Callable[[], bool], work: RunnerOutput) -> int:
        """Run up to `count` units of a step whose forward is done, one by one until interrupted; how many ran."""
        ran = 0
        while ran < count and not job.step.finished and not job.step.tokens_left:
            streams = job.step.streams
            unit = Unit(*job.step.run_unit())
            ran += 1
            if job.step.streams is not streams or not job.step.needs_pages:
                self._pages.pool.release(job.pages)
                job.pages = []
            seconds = self._device.unit_s(unit)
            self._clock.now += seconds
            work.units.append((unit, seconds))
            if interrupted():
                break
        return ran


class _OneSlot:
    """LoRA slots without weights: there is always one."""

    idle = 1

    def held(self, _adapter: str, _version: int) -> bool:
        return True

    def acquire(self, _state: object, _spare: int = 0) -> int:
        return _SLOT

    def release(self, _slot: int) -> None:
        pass

    def publish(self, _state: object, _previous: int, _hot: bool) -> int:
        return _SLOT


class _AllPages:
    """The limits of an engine that no governor limits."""

    unsettled = False

    def __init__(self, settings: ServingSettings, pages: KvPages) -> None:
        self._settings, self._pages = settings, pages

    def apply(self) -> bool:
        return False

    def resources(self) -> Resources:
        return bin_resources(self._settings, self._pages, self._pages.pool.pages - 1, self._pages.available)


class SimulatedEngine:
    """Serves requests and learns from pairs as fast as `device` does, by the engine's own loop."""

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
        self.device, self.settings, self.max_context_tokens = device, settings, max_context_tokens
        self.answers: dict[str, ReplayedAnswer] = {}
        self.clock = VirtualClock()
        self.commands = ComingCommands(self.clock)
        self.stats = Counters()
        self.scheduler = Scheduler(settings.scheduler, device.guess())
        policy, cache = self.scheduler.policy, settings.cache
        self.pool = PagePool(pages, cache.page_size)
        # As in the engine, no sequence owns page 0.
        self.pool.allocate(1)
        kv_pages = KvPages(self.pool, cache.prefix_sharing and policy.shares_prefixes)
        self.trie = kv_pages.trie
        prunes = cache.pruning != "off" and policy.prunes
        self.pruner = SimulatedPruner(cache, kv_pages) if prunes else None
        self.runner = SimulatedRunner(device, self.clock, kv_pages, self.pruner, max_context_tokens)
        self._keeps_graph = keeps_graph
        self.learning = SimulatedFinetuning(
            ADAPTER,
            settings.align,
            self.scheduler,
            layers,
            vocab_size,
            cache.page_size,
            (pages - 1) * cache.page_size,
            self._may_keep_graph,
            self.pool.release,
            lambda state, previous: self._sequences.on_publish(state, previous),
            self.stats.task_ids,
        )
        self._sequences = SequenceTable(
            settings.serving,
            self.scheduler,
            self.runner,
            _OneSlot(),
            self.learning,
            lambda _adapter: None,
            self.stats,
        )
        self._loop = EngineLoop(
            Live(settings),
            self.commands,
            _AllPages(settings.serving, kv_pages),
            self.scheduler,
            self.runner,
            self._sequences,
            self.learning,
            self._deliver,
            clock=self.clock,
            # An error of a simulation is one of its code: none is survived.
            most_failures=1,
        )

    def _may_keep_graph(self) -> bool:
        """Not where the weights are read for serving anyway: see `FinetuneJobs`."""
        counts = self.scheduler.counts()
        serving = counts[Kind.PREFILL] + counts[Kind.DECODE] > 0
        return self._keeps_graph and not (serving and self.device.cuda)

    @property
    def now(self) -> float:
        """Seconds of virtual time."""
        return self.clock.now

    @property
    def open_requests(self) -> int:
        """Requests that are not answered yet."""
        return len(self._sequences.by_task)

    def schedule(self, coming: Iterable[Coming]) -> None:
        """Let these happen in their moments, besides what is to happen already."""
        self.commands.coming = deque(sorted([*self.commands.coming, *coming]))

    def submit(self, request: Request) -> None:
        """A request, as `Engine.submit` takes it; it is refused where the queue is full."""
        self.answers[request.request_id] = ReplayedAnswer(self.now, len(request.prompt_ids))
        if self._sequences.waiting < self.settings.serving.max_queue:
            self._sequences.add(request, self.now)

    def cancel_all(self) -> None:
        """End every request that is not answered."""
        self._sequences.end_all(self.now)
        self._deliver(self._sequences.take_events())

    def run(self, until_s: float, drained: bool = False) -> None:
        """Let time pass until `until_s`, or, with `drained`, until nothing is asked and nothing comes any more."""
        while self.now < until_s:
            self.commands.run_pending()
            coming = self.commands.coming
            if drained and not coming and not self.open_requests:
                return
            if not self._loop.step():
                self.runner.at_rest = True
                next_s = coming[0].at_s if coming else until_s
                self.clock.now = min(until_s, next_s, max(self._loop.resumes_s, self.now + _SHORTEST_REST_S))

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            answer = self.answers[event.request_id]
            if isinstance(event, TokenEvent):
                answer.token_s.append(self.now)
            else:
                answer.finish = event
