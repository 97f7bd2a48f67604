"""The lives of requests: queued, admitted, prefilled, decoded, preempted, finished.

Owns the running sequences and their events. Must not know how an iteration is packed or run.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from edged.align.adapters.adapter import AdapterState
from edged.engine.attention.packed_batch import NO_SLOT
from edged.engine.build import EngineParts
from edged.engine.model_runner import RunnerOutput
from edged.engine.prefix_wait import PrefixWait
from edged.engine.request import Event, FinishReason, Request, TokenEvent
from edged.engine.sampling.sampler import NOT_A_TOKEN
from edged.engine.sequence import NOT_SHARED, Sequence
from edged.scheduler.task import Kind, Plan, Task, TaskOutcome

log = logging.getLogger("edged.engine")


class SequenceTable:
    """Used by the engine thread alone, but for `waiting`, `busy` and `queue_report`, which only read integers."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._scheduler, self._runner, self._stats = parts.scheduler, parts.runner, parts.stats
        self._page_size = parts.runner.pool.page_size
        self.running: dict[int, Sequence] = {}
        """Sequences that the scheduler was given and that have not ended, by task id."""
        self._by_request: dict[str, Sequence] = {}
        self._prefix_wait = PrefixWait(parts, self.running, self._schedule)
        self._unloaded: dict[str, list[Sequence]] = {}
        """Sequences whose adapter is being read from disk, by adapter."""
        self._fetch: Callable[[str], None] = lambda adapter: None
        self._refused: set[int] = set()
        """Tasks that found no LoRA slot, until they have one."""
        self._parked: dict[int, Sequence] = {}
        """Those of them that the scheduler does not know meanwhile: it would give them what others can use."""
        self._task_ids = parts.task_ids
        self._events: list[Event] = []
        self.suspects: list[tuple[str, int]] = []
        """(adapter, version) of answers that were not finite, until the engine asks."""
        self._admitted = 0
        self._decoding = 0
        self._random = random.SystemRandom()
        self._pins = parts.settings.serving.on_update == "pin"

    # -- in ----------------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float, asked_s: float | None = None) -> None:
        """Take a request in; one whose prompt begins like another that is being computed waits for that.

        Its turn counts from now on, its latency from `asked_s`: who waited for a turn among users does not overtake
        those who had theirs before.
        """
        task = Task(next(self._task_ids), Kind.PREFILL, now, tokens=len(request.prompt_ids), service=request.service)
        task.tenant = request.user or request.adapter or ""
        most = len(request.prompt_ids) + request.sampling.max_tokens
        seed = request.sampling.seed
        sequence = Sequence(
            request=request,
            task=task,
            seed=self._random.getrandbits(63) if seed is None else seed,
            submitted_s=now if asked_s is None else asked_s,
            tokens=list(request.prompt_ids),
            table=np.zeros(-(-most // self._page_size), np.int64),
        )
        # Known before it is scheduled: who waits for whom depends on who is due first.
        task.deadline_s = now + self._scheduler.targets.ttft_s(task.service, task.tokens)
        self._by_request[request.request_id] = sequence
        self._stats.totals.requests += 1
        self._stats.labels.append((task.task_id, request.request_id, request.adapter or ""))
        self._enter(sequence)

    def _enter(self, sequence: Sequence) -> None:
        """Give a sequence to the scheduler; or have it wait for its adapter, which is on disk, or for its prefix."""
        adapter = sequence.request.adapter
        if adapter is not None and self._missing(adapter):
            self._unloaded.setdefault(adapter, []).append(sequence)
            self._fetch(adapter)
        else:
            self._prefix_wait.enter(sequence)

    def _missing(self, adapter: str) -> bool:
        """Whether the adapter has learnt something that is not in memory."""
        trainer = self._parts.trainer
        return bool(trainer.version(adapter)) and not trainer.adapter_cache.resident(adapter)

    def on_missing(self, fetch: Callable[[str], None]) -> None:
        """Whom to ask for an adapter's state; `on_fetched` is the answer."""
        self._fetch = fetch

    def on_fetched(self, adapter: str, error: str, now: float) -> None:
        """What was asked for has been read, or could not be: those who waited for it go on, or end."""
        for sequence in self._unloaded.pop(adapter, ()):
            if error:
                self._end(sequence, "error", now, error, retire=False)
            else:
                self._enter(sequence)

    @property
    def refused(self) -> bool:
        """Whether a request waits for a LoRA slot: fine-tuning leaves it the next one."""
        return bool(self._refused)

    @property
    def adapters(self) -> set[str]:
        """Whose adapters answer somebody now."""
        return {sequence.request.adapter for sequence in self._by_request.values() if sequence.request.adapter}

    def _schedule(self, sequence: Sequence) -> None:
        self.running[sequence.task.task_id] = sequence
        task = sequence.task
        self._scheduler.add(task, task.arrival_s)
        sequence.ttft_due_s = task.deadline_s - task.arrival_s + sequence.submitted_s

    def admit(self, plan: Plan, now: float) -> None:
        """Give newly granted sequences their adapter and the pages of a shared prefix; drop grants that must wait."""
        kept = []
        for grant in plan.grants:
            sequence = self.running.get(grant.task.task_id)
            if sequence is None or sequence.admitted or self._admit(sequence, plan.pages, now):
                kept.append(grant)
        plan.grants[:] = kept

    def unpark(self) -> None:
        """Have those planned again who found no LoRA slot and may find one now, in the order of the policy."""
        if not self._parked:
            return
        slots, idle = self._parts.slots, self._parts.slots.idle
        order = self._scheduler.policy.order
        for sequence in sorted(self._parked.values(), key=lambda sequence: order(sequence.task)):
            adapter, task = sequence.request.adapter or "", sequence.task
            version = self._parts.trainer.version(adapter)
            takes = bool(version) and not slots.held(adapter, version)
            if takes and not idle:
                continue
            idle -= takes
            del self._parked[task.task_id]
            self._scheduler.add(task, task.arrival_s)

    def _yields(self, newcomer: Sequence, now: float) -> bool:
        """Whether a newcomer would keep a slot from becoming idle for one who comes before it and has waited for twice
        its target."""
        if not self._parked or self._parts.slots.idle:
            return False
        order, own = self._scheduler.policy.order, newcomer.task
        waiting = (sequence.task for sequence in self._parked.values())
        return any(now > 2 * task.deadline_s - task.arrival_s and order(task) < order(own) for task in waiting)

    def _admit(self, sequence: Sequence, reserve: int, now: float) -> bool:
        adapter = sequence.request.adapter
        if adapter is not None and not sequence.pinned and self._parts.trainer.version(adapter):
            state = self._parts.trainer.state(adapter)
            slot = None if self._yields(sequence, now) else self._parts.slots.acquire(state)
            if slot is None:
                self._refused.add(sequence.task.task_id)
                self._parked[sequence.task.task_id] = sequence
                self._scheduler.park(sequence.task)
                return False
            sequence.slot, sequence.version = slot, state.version
        elif not sequence.pinned:
            sequence.version = 0
        self._refused.discard(sequence.task.task_id)
        sequence.pinned = self._pins
        sequence.kv_version = NOT_SHARED if sequence.forgotten else sequence.version
        sequence.admitted = True
        self._admitted += 1
        first = not sequence.started_s
        sequence.started_s = sequence.started_s or now
        self._runner.begin(sequence, reserve, first)
        task = sequence.task
        task.tokens, task.context = len(sequence.tokens) - sequence.computed, sequence.computed
        task.adapter = sequence.slot + 1
        self._count_pages(sequence)
        return True

    def _count_pages(self, sequence: Sequence) -> None:
        task = sequence.task
        task.held_pages, task.pruned = len(sequence.pages), sequence.computed - sequence.rows
        task.capacity = task.held_pages * self._page_size + task.pruned

    def prune(self, now: float) -> None:
        """Make room in the cache before an iteration, where the settings and the policy allow it."""
        pruner = self._runner.pruner
        if pruner is None or not self._decoding:
            return
        for sequence in pruner.due(self.running.values()):
            try:
                pruner.prune(sequence)
                self._count_pages(sequence)
            except Exception:
                log.exception("a sequence could not be pruned: it is computed again")
                pruner.failed()
                self.preempt(sequence.task.task_id, now)
                self._stats.totals.preemptions += 1

    # -- after an iteration ------------------------------------------------------------------------------------------

    def after(self, work: RunnerOutput, now: float) -> list[TaskOutcome]:
        """Append sampled tokens, finish what ended, and tell the scheduler what came of each sequence's grant."""
        drawn = work.drawn
        tokens = dict(zip((id(s) for s in work.sampled), range(len(work.sampled)), strict=True))
        outcomes = []
        for sequence, computed in work.prefilled:
            self._count_pages(sequence)
            row = tokens.get(id(sequence))
            if sequence.task.task_id in work.broken or (row is not None and drawn and drawn.tokens[row] == NOT_A_TOKEN):
                outcomes.append(TaskOutcome(sequence.task, computed, 0, None))
                self._end(sequence, "error", now, self._not_finite(sequence), retire=False)
                continue
            if row is None or drawn is None:
                outcomes.append(TaskOutcome(sequence.task, computed, 0, Kind.PREFILL))
                self._stats.totals.prompt_tokens += computed
                self._prefix_wait.advanced(sequence)
                continue
            if sequence.task.kind is Kind.PREFILL:
                self._stats.totals.prompt_tokens += computed
                self._runner.share(sequence)
                self._prefix_wait.leave(sequence)
                sequence.decoding = True
                self._decoding += 1
            self._append(sequence, drawn.tokens[row], drawn.logprobs[row], drawn.tops[row], now)
            reason = sequence.end(drawn.tokens[row], self._parts.end_ids, self._parts.max_context_tokens)
            outcomes.append(TaskOutcome(sequence.task, computed, 0, None if reason else Kind.DECODE))
            if reason:
                self._end(sequence, reason, now, retire=False)
        return outcomes

    def _not_finite(self, sequence: Sequence) -> str:
        """Why such a sequence ends. Nothing that its version computed is found by others any more."""
        if self._runner.trie is not None:
            self._runner.trie.expire(sequence.trie_key)
        if sequence.version and sequence.request.adapter is not None:
            self.suspects.append((sequence.request.adapter, sequence.version))
        who = f"version {sequence.version} of {sequence.request.adapter}" if sequence.version else "the base model"
        return f"{who} answers with numbers that are not finite"

    def _append(
        self, sequence: Sequence, token: int, logprob: float | None, top: list[tuple[int, float]] | None, now: float
    ) -> None:
        stats, task = self._stats, sequence.task
        if not sequence.first_token_s:
            sequence.first_token_s = now
            stats.ttft.add(now - sequence.submitted_s, now <= sequence.ttft_due_s, task.service)
        else:
            stats.tbt.add(now - sequence.last_token_s, now <= task.deadline_s, task.service)
        sequence.last_token_s = now
        sequence.tokens.append(token)
        stats.totals.output_tokens += 1
        self._events.append(TokenEvent(sequence.request.request_id, token, sequence.version, logprob, top))

    def _end(self, sequence: Sequence, reason: FinishReason, now: float, error: str = "", retire: bool = True) -> None:
        """The last thing that happens to a sequence: its pages are shared or freed, its event is queued."""
        task_id = sequence.task.task_id
        if retire:
            self._scheduler.remove(task_id)
        self.running.pop(task_id, None)
        self._refused.discard(task_id)
        self._parked.pop(task_id, None)
        self._by_request.pop(sequence.request.request_id, None)
        if sequence.admitted:
            if not error:
                self._runner.share(sequence)
            self._give_back(sequence)
        self._leave_slot(sequence)
        self._prefix_wait.leave(sequence)
        self._stats.outcomes[reason] += 1
        self._events.append(sequence.finish(reason, now, error))

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.decoding:
            self._decoding -= 1
            sequence.decoding = False
        self._runner.drop(sequence)
        sequence.admitted = False
        self._admitted -= 1

    def _leave_slot(self, sequence: Sequence) -> None:
        self._parts.slots.release(sequence.slot)
        sequence.slot = NO_SLOT

    def preempt(self, task_id: int, now: float) -> None:
        """Take a sequence's pages away; it will be recomputed, with all tokens it has, when there is room."""
        sequence = self.running[task_id]
        self._runner.share(sequence)
        self._give_back(sequence)
        if not sequence.pinned:
            self._leave_slot(sequence)
        self._count_pages(sequence)
        self._scheduler.restart(sequence.task, len(sequence.tokens), now)
        self._prefix_wait.leave(sequence)
        self._prefix_wait.lead(sequence)

    # -- ends from outside -------------------------------------------------------------------------------------------

    def cancel(self, request_id: str, reason: FinishReason, now: float, error: str = "") -> None:
        """End a request, wherever it is; unknown ids are ignored."""
        sequence = self._by_request.get(request_id)
        if sequence is None:
            return
        if sequence.task.task_id not in self.running:
            for waiting in self._unloaded.values():
                if sequence in waiting:
                    waiting.remove(sequence)
        self._end(sequence, reason, now, error)

    def cancel_all(self, now: float) -> None:
        """End everything, as when a drain ran out of time."""
        for request_id in list(self._by_request):
            self.cancel(request_id, "cancelled", now)

    def fail(self, task_ids: Iterable[int], error: str, now: float) -> list[str]:
        """End the sequences among `task_ids` with an error; returns their requests' ids."""
        failed = [self.running[task_id] for task_id in task_ids if task_id in self.running]
        for sequence in failed:
            self._end(sequence, "error", now, error)
        return [sequence.request.request_id for sequence in failed]

    def fail_all(self, error: str, now: float) -> None:
        """End everything with an error."""
        for sequence in list(self._by_request.values()):
            self._end(sequence, "error", now, error)

    # -- versions ----------------------------------------------------------------------------------------------------

    def on_publish(self, state: AdapterState, previous: int) -> None:
        """A new version: "hot" moves running sequences to it, "pin" leaves them; the old one's prefixes expire."""
        slot = self._parts.slots.publish(state, previous, not self._pins)
        if not self._pins:
            for sequence in self.running.values():
                if sequence.admitted and sequence.request.adapter == state.name:
                    self._move(sequence, state, slot)
        if self._runner.trie is not None and previous:
            self._runner.trie.expire_version(state.name, previous)
        self._prefix_wait.renew(state.name)

    def forget(self, name: str) -> None:
        """Nothing is shared that answers under way compute of a forgotten user, or with the adapter of that name."""
        for sequence in self._by_request.values():
            if sequence.request.is_of(name):
                sequence.forgotten, sequence.kv_version = True, NOT_SHARED
        self._prefix_wait.forget(name)

    def _move(self, sequence: Sequence, state: AdapterState, slot: int | None) -> None:
        if slot is not None and sequence.slot == slot:
            sequence.version = state.version
            return
        new = self._parts.slots.acquire(state)
        if new is not None:
            self._parts.slots.release(sequence.slot)
            sequence.slot, sequence.version = new, state.version
            sequence.task.adapter = new + 1

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests that hold no pages yet."""
        return len(self._by_request) - self._admitted

    @property
    def admitted(self) -> int:
        """Requests that hold pages."""
        return self._admitted

    def largest_pages(self) -> int:
        """Pages of the largest request at hand, with the longest answer that it may get."""
        return max((len(sequence.table) for sequence in self._by_request.values()), default=0)

    def move(self, moved: Mapping[int, int]) -> None:
        """Pages that the pool has moved: what was in the keys is in the values."""
        for sequence in self.running.values():
            sequence.move(moved)

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._by_request)

    def queue_report(self) -> dict[str, int]:
        """Requests by stage."""
        decoding = self._decoding
        return {
            "waiting": self.waiting,
            "prefill": max(0, self._admitted - decoding),
            "decode": decoding,
        }

    def take_events(self) -> list[Event]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events
