"""The engine in virtual time: its own loop, scheduler, sequences, page pool and trie, over a device's times.

`SimulatedRunner` replaces `ModelRunner` and asks the device how long a computation takes; tokens are placeholders that
no two requests share, or quotations of the prompt.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from edged.cache.page_pool import OutOfPages, PagePool
from edged.engine.attention.attention_stats import AttentionStats
from edged.engine.command_queue import CommandQueue
from edged.engine.kv.pruned_layout import PrunedLayout
from edged.engine.kv_pages import KvPages
from edged.engine.loop import EngineLoop
from edged.engine.lora.segments import NO_SLOT
from edged.engine.model_runner import RunnerOutput
from edged.engine.pruner import Pruner
from edged.engine.request import EngineBusy, Request
from edged.engine.resource_limits import bin_resources
from edged.engine.sampling.sampler import Drawn
from edged.engine.sequence import Sequence
from edged.engine.sequences import SequenceTable
from edged.engine.stats.counters import Counters, percentile
from edged.lab.bench.load_run import ADAPTER
from edged.lab.simulator.hardware import SimulatedHardware
from edged.lab.simulator.roofline import Device, Pass
from edged.lab.simulator.steps import SimulatedFinetuning, SimulatedOpenStep, SimulatedPairForward, SimulatedVersion
from edged.placement.node import NodeLoad
from edged.profiler.recorder import ReplayRecorder
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import Grant, Kind, Plan, Resources, Task, Unit
from edged.settings.live import Live
from edged.settings.load import CacheSettings, ServingSettings, Settings

START_S = 1.0
"""Start of virtual time, not 0: a moment of 0 means "not happened yet" in a request's record."""
_SHORTEST_REST_S = 1e-3
_PLACEHOLDER = 1 << 32
"""Offset of placeholder tokens, beyond any vocabulary; a request's answer consists of this plus its task id."""


@dataclass(slots=True)
class VirtualClock:
    """A clock of virtual time in seconds, from START_S."""

    now: float = START_S

    def __call__(self) -> float:
        """Return the current virtual time."""
        return self.now


@dataclass(frozen=True, slots=True)
class Coming:
    """An event at a moment of virtual time: a request or a pair that arrives."""

    at_s: float
    happen: Callable[[], None]


class ComingCommands(CommandQueue):
    """A command queue whose commands arrive at moments of virtual time."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self.coming: deque[Coming] = deque()
        """Future events in order of time."""

    @property
    def arrived(self) -> bool:
        """Whether an event is due."""
        return bool(self.coming) and self.coming[0].at_s <= self._clock.now

    def run_pending(self) -> None:
        """Run every event that is due, with the clock at the event's own moment."""
        now = self._clock.now
        while self.coming and self.coming[0].at_s <= now:
            event = self.coming.popleft()
            self._clock.now = event.at_s
            event.happen()
        self._clock.now = now


class _Observations(AttentionStats):
    """Attention statistics of a sequence that count observations and hold no values."""

    def __init__(self) -> None:
        self.observations = 0


class SimulatedPruner(Pruner):
    """The engine's pruner over pages without contents: heads share each budget evenly.

    When and how many pages go are the engine's own rule; no rows are chosen, and pruning takes no time.
    """

    def __init__(self, settings: CacheSettings, pages: KvPages) -> None:
        super().__init__(settings, None, pages)

    def look(self, sequence: Sequence) -> None:
        """Observe a decode of `sequence` if an observation is due."""
        if self.pressure.near and self._rule.nears(sequence.rows):
            if sequence.watch is None:
                sequence.watch = _Observations()
            sequence.watch.observations += 1

    def prune(self, sequence: Sequence) -> None:
        """Compact the old pages of a sequence that is `due`; the pages have no contents."""
        slabs, old = self._rule.budget_pages, self._rule.old_pages(sequence.rows)
        free = self._pages.available
        before = sequence.compacted or PrunedLayout(0, np.zeros((0, 0), np.int64), 0)
        self._pool.release(sequence.pages[:old])
        own = self._pages.allocate(slabs)
        removed = before.removed + (old - slabs) * self._pool.page_size
        sequence.compact(own, old, PrunedLayout(slabs, before.counts, removed))
        self.prunings += 1
        self.pages_returned += max(0, self._pages.available - free)


class SimulatedRunner:
    """Runs plans on a simulated device: the clock advances by the device's times. See `ModelRunner`."""

    overlaps = False
    last_sign_s = 0.0
    end_ids: frozenset[int] = frozenset()

    def __init__(
        self,
        device: Device,
        clock: VirtualClock,
        pages: KvPages,
        pruner: SimulatedPruner | None,
        max_context_tokens: int,
        seed: int,
        two_streams: bool = False,
        quote_tokens: int = 0,
    ) -> None:
        """With `two_streams` fine-tuning runs beside the forward, not in and after it.

        Answers quote `quote_tokens` of their prompts after each other, which drafts can find; 0: nothing.
        """
        self._device, self._clock, self._pruner, self._two_streams = device, clock, pruner, two_streams
        self._quote_tokens, self._seed, self.drafts = quote_tokens, seed, quote_tokens > 0
        self.pages, self.max_context_tokens = pages, max_context_tokens
        self.pruner: Pruner | None = pruner
        self.at_rest = True
        """Whether nothing has run since the device was last idle."""
        self._after_chunk = False
        self._chance = random.Random(f"noise {seed}")

    def begin_thread(self) -> None:
        """Do nothing: there is no device to bind."""

    def begin_iteration(self, now: float) -> None:
        """Do nothing: no other program uses the device."""

    def check_device(self) -> None:
        """Raise the iteration's own error again: what fails in a simulation is its code, and none is survived."""
        raise

    def return_memory(self) -> None:
        """No memory is taken."""

    def close(self) -> None:
        """Do nothing: there are no resources to free."""

    def run(
        self,
        plan: Plan,
        sequences: Mapping[int, Sequence],
        open_steps: Mapping[int, SimulatedOpenStep],
        interrupted: Callable[[], bool],
        while_waiting: Callable[[], None],
    ) -> RunnerOutput:
        """Advance the clock by the time of the plan's forward and units."""
        work, load = RunnerOutput(), Pass()
        tuned = Pass() if self._two_streams else load
        for grant in plan.grants:
            if not grant.num_tokens:
                continue
            task_id = grant.task.task_id
            try:
                if task_id in sequences:
                    self._serve(sequences[task_id], grant.num_tokens, work, load)
                else:
                    work.finetuned[task_id] = self._tune(open_steps[task_id], grant.num_tokens, tuned)
            except OutOfPages:
                # As in ModelRunner: the task waits an iteration.
                continue
        for sequence, _ in work.prefilled:
            self._try_draft(sequence, work, load)
        load.sampled = len(work.sampled)
        load.adapters = len({sequence.slot for sequence, _ in work.prefilled} - {NO_SLOT})
        pace = 1.0
        if tuned is not load and load.num_tokens:
            units = [
                unit
                for grant in plan.grants
                if grant.units
                for unit in open_steps[grant.task.task_id].next(grant.units)
            ]
            pace = self._device.overlap(load, tuned, units)
            # All of it has begun already.
            interrupted = _never
        work.forward_s = pace * self._forward_s(load)
        if tuned is not load:
            work.forward_s += pace * self._forward_s(tuned)
        for sequence, num_tokens in work.prefilled:
            sequence.computed += num_tokens
        rows: Counter[int] = Counter()
        drawn = []
        for sequence in work.sampled:
            drawn.append(self._token(sequence, rows[sequence.task.task_id]))
            rows[sequence.task.task_id] += 1
        nothing: list[Any] = [None] * len(drawn)
        work.drawn = Drawn(drawn, nothing, nothing) if drawn else None
        waking_s, self.at_rest = self._device.rest_s if self.at_rest else 0.0, False
        self._clock.now = self._clock.now + waking_s + self._device.overhead_s + work.forward_s
        for grant in plan.grants:
            if grant.units:
                if (work.finetuned or work.units) and interrupted():
                    break
                open_step = open_steps[grant.task.task_id]
                work.units_run[grant.task.task_id] = self.run_units(open_step, grant, interrupted, work, pace)
        return work

    def _forward_s(self, load: Pass) -> float:
        """Return the seconds that a forward takes this time."""
        chunks = load.prefill_tokens + load.finetune_tokens > 0
        penalty = self._device.noise.decode_after_chunk if self._after_chunk and not chunks else 0.0
        self._after_chunk = chunks or (self._after_chunk and not load.num_tokens)
        return self._jittered(self._device.forward_s(load) * (1.0 + penalty))

    def _jittered(self, seconds: float) -> float:
        """Return a time with the device's jitter, of the same mean."""
        jitter = self._device.noise.jitter
        return seconds * self._chance.lognormvariate(-0.5 * jitter**2, jitter) if jitter else seconds

    def _serve(self, sequence: Sequence, num_tokens: int, work: RunnerOutput, load: Pass) -> None:
        num_tokens = self.pages.grow(sequence, num_tokens)
        if sequence.task.kind is Kind.DECODE:
            load.decodes += 1
            load.context += sequence.rows
            if self._pruner is not None:
                self._pruner.look(sequence)
        else:
            load.add_chunk(num_tokens, sequence.computed, finetune=False)
        if sequence.slot != NO_SLOT:
            load.adapted += num_tokens
        work.prefilled.append((sequence, num_tokens))
        if sequence.computed + num_tokens == len(sequence.token_ids):
            work.sampled.append(sequence)

    def _try_draft(self, sequence: Sequence, work: RunnerOutput, load: Pass) -> None:
        """Add a sequence's draft to the forward, as further decodes of it, as far as it gets pages."""
        if sequence.draft is None or not sequence.decoding:
            sequence.draft = None
            return
        own = sequence.draft.tokens
        del own[self.pages.reach(sequence, len(own)) :]
        work.sampled += [sequence] * len(own)
        load.decodes += len(own)
        load.context += len(own) * sequence.rows
        load.adapted += len(own) if sequence.slot != NO_SLOT else 0

    def _token(self, sequence: Sequence, ahead: int) -> int:
        """Return the token of an answer at a place from the next one on, whatever is drafted."""
        if not self._quote_tokens:
            # Each request has its own token, so that no other prompt shares its answer as a prefix.
            return _PLACEHOLDER + sequence.task.task_id
        quote, place = divmod(sequence.generated + ahead, self._quote_tokens)
        begin = random.Random(f"{self._seed} {sequence.task.task_id} {quote}").randrange(sequence.prompt_tokens)
        return sequence.request.prompt_ids[(begin + place) % sequence.prompt_tokens]

    def _tune(self, open_step: SimulatedOpenStep, num_tokens: int, load: Pass) -> int:
        """Advance a step by up to `num_tokens`; return the tokens done. Raises OutOfPages before any stream has
        advanced."""
        pieces: list[tuple[SimulatedPairForward, int]] = []
        needed, left, size = 0, num_tokens, self.pages.page_size
        for pair_forward in open_step.step.packing:
            piece = min(pair_forward.left, left)
            if piece:
                pieces.append((pair_forward, piece))
                needed += max(0, -(-(pair_forward.done + piece) // size) - pair_forward.pages)
                left -= piece
        open_step.pages += self.pages.allocate(needed)
        for pair_forward, piece in pieces:
            load.add_chunk(piece, pair_forward.done, finetune=True)
            load.adapted += 0 if pair_forward.reference else piece
            pair_forward.done += piece
            pair_forward.pages = max(pair_forward.pages, -(-pair_forward.done // size))
        return num_tokens - left

    def run_units(
        self,
        open_step: SimulatedOpenStep,
        grant: Grant[Task],
        interrupted: Callable[[], bool],
        work: RunnerOutput,
        pace: float = 1.0,
    ) -> int:
        """Run the granted units of a step whose forward is done, one by one until interrupted; return how many ran.

        Each takes `pace` times what it takes alone.
        """
        ran = 0
        while ran < grant.units and not open_step.step.finished and not open_step.step.tokens_left:
            pair_forwards = open_step.step.pair_forwards
            ran += 1
            unit = Unit(*open_step.step.run_unit(grant.window if ran == grant.units else 0))
            if open_step.step.pair_forwards is not pair_forwards or open_step.step.group_ended:
                # Those of the next group's forward were allocated after all of this one's.
                held = sum(pair_forward.pages for pair_forward in pair_forwards)
                self.pages.pool.release(open_step.pages[:held])
                open_step.pages = open_step.pages[held:]
            seconds = pace * self._jittered(self._device.unit_s(unit))
            self._clock.now += seconds
            work.units.append((unit, seconds))
            if interrupted():
                break
        return ran


def _never() -> bool:
    return False


class _Slots:
    """LoRA slots without weights: one for each adapter, always free."""

    idle = 1

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}

    def held(self, _adapter: str, _version: int) -> bool:
        return True

    def acquire(self, state: SimulatedVersion, _spare: int = 0) -> int:
        return self._slots.setdefault(state.name, len(self._slots))

    def release(self, _slot: int) -> None:
        pass

    def update(self, state: SimulatedVersion, _previous: int, _hot: bool) -> int:
        return self.acquire(state)


class _AllPages:
    """Engine limits without a governor: all pages may be used."""

    unsettled = False

    def __init__(self, settings: ServingSettings, pages: KvPages) -> None:
        self._settings, self._pages = settings, pages

    def apply(self) -> bool:
        return False

    def resources(self) -> Resources:
        return bin_resources(self._settings, self._pages, self._pages.pool.pages - 1, self._pages.available)


class SimulatedEngine:
    """An engine in virtual time: serves requests and learns from pairs by the engine's own loop, at a device's
    speed."""

    def __init__(
        self, settings: Settings, hardware: SimulatedHardware, seed: int = 0, quote_tokens: int = 0, best_of: int = 1
    ) -> None:
        self.device, self.settings, self._hardware, self._best_of = hardware.device, settings, hardware, best_of
        shape, pages = hardware.model.shape, hardware.pages
        longest = settings.model.max_context_tokens or shape.max_positions
        self.max_context_tokens = min(longest, shape.max_positions, (pages - 1) * settings.cache.page_size)
        self.clock = VirtualClock()
        self.recorder = ReplayRecorder(self.clock)
        self.commands = ComingCommands(self.clock)
        self.stats = Counters()
        self.scheduler = Scheduler(settings.scheduler, self.device.guess(), fairness=settings.fairness)
        policy, cache = self.scheduler.policy, settings.cache
        self.pool = PagePool(pages, cache.page_size)
        # As in the engine, page 0 belongs to no sequence.
        self.pool.allocate(1)
        kv_pages = KvPages(self.pool, cache.share_across != "none" and policy.shares_prefixes and not shape.states)
        self.trie = kv_pages.trie
        prunes = cache.pruning != "off" and policy.prunes and not shape.states
        self.pruner = SimulatedPruner(cache, kv_pages) if prunes else None
        self.runner = SimulatedRunner(
            self.device,
            self.clock,
            kv_pages,
            self.pruner,
            self.max_context_tokens,
            seed,
            policy.two_streams,
            quote_tokens,
        )
        self.learning = SimulatedFinetuning(
            ADAPTER,
            settings.align,
            self.scheduler,
            shape.layers,
            shape.vocab_size,
            bool(shape.states),
            cache.page_size,
            (pages - 1) * cache.page_size,
            self._may_keep_graph,
            self.pool.release,
            lambda state, previous: self._sequences.on_publish(state, previous, True),
            self.stats.task_ids,
        )
        self.recorder.pairs = self.learning.pairs
        self._sequences = SequenceTable(
            settings.serving,
            self.scheduler,
            self.runner,
            _Slots(),
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
            self.recorder.deliver,
            clock=self.clock,
        )

    def _may_keep_graph(self) -> bool:
        """Whether a step may keep its graph: not while a GPU reads the weights for serving anyway, see
        `StepTable`."""
        counts = self.scheduler.counts()
        serving = counts[Kind.PREFILL] + counts[Kind.DECODE] > 0
        return self._hardware.keeps_graph and not (serving and self.device.cuda)

    @property
    def now(self) -> float:
        """Seconds of virtual time."""
        return self.clock.now

    def status(self) -> dict[str, Any]:
        """Return the part of `Engine.status` that a report is made of."""
        learning = self.learning
        learned = {name: getattr(learning, name) for name in ("pairs_trained", "trained_tokens", "optimizer_steps")}
        return {
            "model": self._hardware.model.report(self.device.name, self.max_context_tokens),
            "totals": asdict(self.stats.totals) | learned,
            "busy": asdict(self.stats.busy),
            "prefix": asdict(self.trie.stats),
            "scheduler": {
                "decision_ms_p50": percentile(list(self.stats.decision_ms), 0.5),
                "lent_s": self.scheduler.lent_s,
            },
            "cost_model": self.scheduler.cost.report(),
        }

    def load(self) -> NodeLoad:
        """Return the load, as `Engine.load` does."""
        queued, same = self.learning.pairs_queued, ""
        facts = {"version": same, "model": same, "fingerprint": same, "dtype": same}
        return self._loop.load(**facts, pairs_queued=queued)

    def submit(self, request: Request) -> None:
        """Submit a request, as `Engine.submit` does. Raises EngineBusy."""
        if self._sequences.waiting >= self.settings.serving.max_queue:
            raise EngineBusy
        self._sequences.refuse_late(request, self.settings.scheduler.refuse_ttft_factor, self.now)
        if self._best_of > 1:
            request = replace(request, fairness_key=request.request_id)
        self._sequences.add(request, self.now)
        if self._best_of > 1:
            longest = len(request.prompt_ids) + request.sampling.max_tokens
            rows = self._sequences.spare_rows(longest, request.fairness_key)
            for row in range(1, min(self._best_of, 1 + rows)):
                name = f"{request.request_id}-{row}"
                self._sequences.add(replace(request, request_id=name, pace=None, candidate=True), self.now)

    def cancel_all(self) -> None:
        """Cancel every request that has not finished."""
        self._sequences.end_all(self.now)
        self.recorder.deliver(self._sequences.take_events())

    def run(self, until_s: float, drained: bool = False) -> None:
        """Advance time to `until_s`, or, with `drained`, until no request is open and no event is left."""
        while self.now < until_s:
            self.commands.run_pending()
            coming = self.commands.coming
            if drained and not coming and not self._sequences.by_task:
                return
            idle = not self._loop.step()
            if self.scheduler.degraded:
                # As any error of a simulation: its figures would be another policy's.
                raise RuntimeError(self.scheduler.degraded)
            if idle:
                self.runner.at_rest = True
                next_s = coming[0].at_s if coming else until_s
                self.clock.now = min(until_s, next_s, max(self._loop.resumes_s, self.now + _SHORTEST_REST_S))
