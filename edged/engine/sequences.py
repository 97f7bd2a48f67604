"""The table of open requests' sequences: queued, admitted, prefilled, decoded, preempted, finished."""

from __future__ import annotations

import logging
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from edged.engine.drafts import draft
from edged.engine.lora.segments import NO_SLOT
from edged.engine.model_runner import RunnerOutput
from edged.engine.prefix_wait import PrefixWait
from edged.engine.renewals import Renewals
from edged.engine.request import Event, FinishReason, FirstTokenLate, Request, TokenEvent
from edged.engine.sampling.sampler import NOT_A_TOKEN, Drawn
from edged.engine.sequence import NOT_SHARED, Sequence, SequenceStatus
from edged.engine.stats.counters import Counters
from edged.scheduler.cost.prices import Load
from edged.scheduler.planning.slo import MARGIN
from edged.scheduler.reader import GOOD_QOE, Reader
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import Kind, Plan, ServiceClass, ServingTask, TaskOutcome
from edged.settings.load import ServingSettings
from edged.text.grammar import GrammarMatcher

if TYPE_CHECKING:
    from edged.engine.interfaces import Runner

log = logging.getLogger("edged.engine")
_NEARLY_FREE, _DEAR = 0.02, 0.05
"""Shares by which candidates may lengthen an iteration: up to the first they begin, beyond the second some go."""
_TALK_VERSIONS = 64
"""Earlier versions whose K/V talks go on over."""
_READ_ALONG = 5.0
"""Times these shares where all who are served read along, slower than their answers are made."""


class SequenceTable:
    """The open requests' sequences.

    Other threads read only `waiting`, `queue_report`, `admitted`, `stats` and a copy of `by_task`.
    """

    def __init__(
        self,
        settings: ServingSettings,
        scheduler: Scheduler,
        runner: Runner,
        slots: Any,
        adapter_cache: Any,
        fetch: Callable[[str], None],
        stats: Counters,
    ) -> None:
        """`slots` and `adapter_cache` are as `SlotTable` and `AdapterCache`, or simulated. `fetch` starts to read an
        adapter's state from disk; `on_fetched` is called when it ends."""
        self._scheduler, self._slots, self.stats = scheduler, slots, stats
        self._pages, self._pruner, self._end_ids = runner.pages, runner.pruner, runner.end_ids
        self._max_context, self.adapter_cache, self._fetch = runner.max_context_tokens, adapter_cache, fetch
        self._drafts = settings.prompt_lookup and runner.drafts
        self._pins, self._max_sequences = settings.on_update == "pin", settings.max_sequences
        self.by_task: dict[int, Sequence] = {}
        """Sequences of open requests by task id."""
        self._by_request: dict[str, Sequence] = {}
        self._by_status: dict[SequenceStatus, dict[int, Sequence]] = {status: {} for status in SequenceStatus}
        self.admitted = 0
        """Number of requests that hold pages."""
        self._prefix_wait = PrefixWait(self, runner.pages, scheduler)
        self._events: list[Event] = []
        self.suspects: deque[tuple[str, int]] = deque()
        """(adapter, version) of answers that were not finite; `StepTable.close_finished` removes them."""
        self._planned_s = 0.0
        """When the last plan was about to be made."""
        self._candidates: dict[int, Sequence] = {}
        """Sequences of candidates by task id, the oldest first."""
        self.renewals = Renewals(self._max_context)
        self._random = random.SystemRandom()

    def move(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Change a sequence's status; asserts that the new one may follow."""
        assert sequence.status.may_become(status), f"a sequence in {sequence.status} cannot become {status}"
        task_id, held = sequence.task.task_id, sequence.admitted
        self._by_status[sequence.status].pop(task_id, None)
        sequence.status = status
        if status is not SequenceStatus.FINISHED:
            self._by_status[status][task_id] = sequence
        self.admitted += sequence.admitted - held

    # -- in ----------------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float, asked_s: float | None = None) -> None:
        """Take a request in; one whose prompt begins like another that is being computed waits for that.

        Its place in the queue counts from `now`, its latency from `asked_s`: a request that waited for its user's turn
        does not overtake requests that were taken in before.
        """
        if not request.own:
            # What was computed is shared; the rest waits for the next idle moment.
            self.end_renewal(now)
        task_id = self.stats.new_task(request.request_id, request.adapter or "")
        token_ids = [*request.prompt_ids, *request.resumed_ids]
        num_tokens, most = len(token_ids), len(request.prompt_ids) + request.sampling.max_tokens
        task = ServingTask(task_id, Kind.PREFILL, now, num_tokens=num_tokens, service=request.service)
        task.run, task.run_cost = request.run, request.run_cost
        task.tenant, task.candidate = request.fairness_key or request.user or request.adapter or "", request.candidate
        if request.pace is not None:
            # Nobody expects a first token before the prompt can be computed.
            ttft_s = max(request.pace.ttft_s, self._scheduler.cost.prompt_s(num_tokens, 0))
            task.reader = Reader(request.pace.tokens_per_s, (now if asked_s is None else asked_s) + ttft_s)
        seed = request.sampling.seed
        sequence = Sequence(
            request=request,
            task=task,
            seed=self._random.getrandbits(63) if seed is None else seed,
            submitted_s=now if asked_s is None else asked_s,
            token_ids=token_ids,
            table=np.zeros(-(-most // self._pages.page_size), np.int64),
        )
        if (grammar := request.sampling.grammar) is not None:
            sequence.matcher = GrammarMatcher(grammar, sequence.token_ids, len(request.prompt_ids))
        # Set before it is scheduled, because deadlines decide which sequence waits for the other.
        task.deadline_s = now + self._scheduler.targets.ttft_s(task.service, task.num_tokens)
        self._by_request[request.request_id] = self.by_task[task.task_id] = sequence
        if request.delivery == "none":
            self.renewals.running = sequence
        elif request.candidate:
            self._candidates[task_id] = sequence
            self.stats.totals.candidates += 1
        self.stats.totals.requests += request.counts
        self._enter(sequence)

    def refuse_late(self, request: Request, factor: float, now: float) -> None:
        """Raise FirstTokenLate where the TTFT is predicted to be more than `factor` targets; 0: never.

        Predicted are its own prompt and those that are due before it, one after another. Any thread may ask.
        """
        if not factor:
            return
        cost, num_tokens = self._scheduler.cost, len(request.prompt_ids)
        target_s = self._scheduler.targets.ttft_s(request.service, num_tokens)
        tasks = [sequence.task for sequence in list(self.by_task.values())]
        ahead = sum(t.num_tokens for t in tasks if t.kind is Kind.PREFILL and t.deadline_s <= now + target_s)
        predicted_s = cost.prompt_s(num_tokens) + ahead * cost.token_s
        if predicted_s > factor * target_s:
            raise FirstTokenLate(predicted_s, target_s, factor)

    def _enter(self, sequence: Sequence) -> None:
        """Give a sequence to the scheduler, or have it wait for its adapter on disk or for its prefix."""
        adapter = sequence.request.adapter
        if adapter is not None and self.adapter_cache.version(adapter) and not self.adapter_cache.resident(adapter):
            self.move(sequence, SequenceStatus.WAITING_ADAPTER)
            self._fetch(adapter)
        elif sequence.request.sampling.prompt_logprobs:
            self.schedule(sequence)
        else:
            self._prefix_wait.enter(sequence)

    def on_fetched(self, adapter: str, error: str, now: float) -> None:
        """Let an adapter's sequences go on after its state was read from disk; or end them with `error`."""
        for sequence in list(self._by_status[SequenceStatus.WAITING_ADAPTER].values()):
            if sequence.request.adapter != adapter:
                continue
            if error:
                self._end(sequence, "error", now, error)
            else:
                self._enter(sequence)

    @property
    def waiting_for_slot(self) -> bool:
        """Whether a request waits for a LoRA slot; fine-tuning leaves it the next one."""
        return bool(self._by_status[SequenceStatus.WAITING_SLOT] or self._by_status[SequenceStatus.SLOT_OFFERED])

    @property
    def adapters(self) -> set[str]:
        """Names of the adapters of open requests."""
        return {sequence.request.adapter for sequence in self._by_request.values() if sequence.request.adapter}

    def schedule(self, sequence: Sequence) -> None:
        """Give a sequence to the scheduler."""
        self.move(sequence, SequenceStatus.WAITING)
        task = sequence.task
        self._scheduler.add(task, task.arrival_s)
        sequence.ttft_due_s = task.deadline_s - task.arrival_s + sequence.submitted_s

    def admit(self, plan: Plan, now: float) -> None:
        """Give newly granted sequences their adapter and the pages of a shared prefix; drop grants that must wait."""
        kept = []
        for grant in plan.grants:
            sequence = self.by_task.get(grant.task.task_id)
            if sequence is None or sequence.admitted or self._admit(sequence, plan.pages, now):
                kept.append(grant)
        plan.grants[:] = kept

    def draft(self, plan: Plan, now: float, limited: bool) -> None:
        """Give the decodes of a plan drafts, where settings and runner allow it; none while memory is `limited`."""
        if self._drafts:
            decoding = self._by_status[SequenceStatus.DECODE]
            granted = [decoding[task_id] for grant in plan.grants if (task_id := grant.task.task_id) in decoding]
            draft(granted, plan, self._scheduler.cost, now, 0 if limited else self._max_sequences)

    def open_due(self, now: float) -> None:
        """End waits that have become vain, offer LoRA slots, and prune K/V."""
        if self._candidates:
            self._drop_candidates()
        self._planned_s = now
        if self._by_status[SequenceStatus.WAITING_PREFIX]:
            self._prefix_wait.reorder(now)
        if self._by_status[SequenceStatus.WAITING_SLOT]:
            self._offer_slots(now)
        if self._pruner is None or not self._by_status[SequenceStatus.DECODE]:
            return
        for sequence in self._pruner.due(self.by_task.values()):
            try:
                self._pruner.prune(sequence)
                self._count_pages(sequence)
            except Exception:
                log.exception("a sequence could not be pruned: it is computed again")
                self._pruner.failed()
                self.preempt(sequence.task.task_id, now)
        totals = self.stats.totals
        totals.prunings, totals.pruned_pages = self._pruner.prunings, self._pruner.pages_returned

    def _offer_slots(self, now: float) -> None:
        """Give sequences that may find a slot now back to the scheduler, in the order of the policy at `now`."""
        slots, idle, yields = self._slots, self._slots.idle, False
        without = self._by_status[SequenceStatus.WAITING_SLOT]
        for task in self._scheduler.rank([sequence.task for sequence in without.values()], now):
            sequence = without[task.task_id]
            adapter = sequence.request.adapter or ""
            version = self.adapter_cache.version(adapter)
            takes = bool(version) and not slots.held(adapter, version)
            if yields or (takes and not idle):
                yields |= _waits_long(task, now)
                continue
            idle -= takes
            self.move(sequence, SequenceStatus.SLOT_OFFERED)
            self._scheduler.add(task, task.arrival_s)

    def _yields(self, newcomer: Sequence, now: float) -> bool:
        """Whether a newcomer must not share a slot, because a sequence that goes before it has waited long for one."""
        without = self._by_status[SequenceStatus.WAITING_SLOT]
        if not without or self._slots.idle:
            return False
        waiting = [sequence.task for sequence in without.values() if _waits_long(sequence.task, now)]
        return bool(waiting) and self._scheduler.rank([*waiting, newcomer.task], now)[0] is not newcomer.task

    def _admit(self, sequence: Sequence, reserve: int, now: float) -> bool:
        adapter, task = sequence.request.adapter, sequence.task
        if adapter is not None and not sequence.pinned and self.adapter_cache.version(adapter):
            if not self.adapter_cache.resident(adapter):
                # Its version was withdrawn, and the one that takes its place is being read.
                self._prefix_wait.leave(sequence)
                self._scheduler.park(task)
                self.move(sequence, SequenceStatus.WAITING_ADAPTER)
                self._fetch(adapter)
                return False
            state = self.adapter_cache.get(adapter)
            slot = None if self._yields(sequence, now) else self._slots.acquire(state)
            if slot is None and sequence is self.renewals.running:
                self.end_renewal(now, again=False)
                return False
            if slot is None:
                self.move(sequence, SequenceStatus.WAITING_SLOT)
                self._scheduler.park(task)
                return False
            sequence.slot, sequence.version = slot, state.version
        elif not sequence.pinned:
            sequence.version = 0
        sequence.pinned = self._pins
        sequence.kv_version = NOT_SHARED if sequence.forgotten else self._kv_version(sequence)
        self.move(sequence, SequenceStatus.PREFILL)
        first = not sequence.started_s
        sequence.started_s = sequence.started_s or now
        self._pages.match_prefix(sequence, reserve, first and sequence.request.delivery != "none")
        if not sequence.computed and sequence.kv_version > 0:
            sequence.kv_version = sequence.version
        task.num_tokens, task.context = len(sequence.token_ids) - sequence.computed, sequence.computed
        task.adapter = sequence.slot + 1
        self._count_pages(sequence)
        return True

    def _kv_version(self, sequence: Sequence) -> int:
        """Return the version whose K/V a sequence goes on over: its own, or an earlier one where that saves a wait.

        A long talk is not computed anew by each version that comes meanwhile, as an answer under way is not: the new
        weights compute what is new. What takes no longer than the strictest TTFT target is computed anew.
        """
        request, trie, cost = sequence.request, self._pages.trie, self._scheduler.cost
        exact = self._pins or request.own or request.sampling.prompt_logprobs
        if exact or not sequence.version or not self._pages.shares_prefixes:
            return sequence.version
        token_ids, key, least_s = sequence.token_ids, sequence.key_under(sequence.version), self._least_s

        def rest_s(reached: int) -> float:
            return cost.prompt_s(len(token_ids) - reached, reached)

        if rest_s(0) <= least_s or (anew_s := rest_s(trie.reach(key, token_ids))) <= least_s:
            return sequence.version
        best_s, best = anew_s / 2, sequence.version
        for version, reached in trie.earlier(key, token_ids):
            if (left_s := rest_s(reached)) < best_s:
                best_s, best = left_s, version
                if left_s <= least_s:
                    break
        return best

    @property
    def _least_s(self) -> float:
        """The strictest TTFT target."""
        return self._scheduler.targets.ttft_s(ServiceClass.INTERACTIVE, 1)

    def _count_pages(self, sequence: Sequence) -> None:
        task = sequence.task
        task.held_pages, task.pruned = len(sequence.pages), sequence.computed - sequence.rows
        task.capacity = task.held_pages * self._pages.page_size + task.pruned

    # -- after an iteration ------------------------------------------------------------------------------------------

    def process(self, work: RunnerOutput, _plan: Plan, now: float) -> list[TaskOutcome]:
        """Append sampled tokens and finish sequences that ended. Returns the outcomes of all serving grants."""
        drawn = work.drawn
        if work.scores is not None:
            scores = zip(work.scores.logprobs, work.scores.tops, strict=True)
            for sequence, count in work.scored:
                sequence.scored += [(logprob or 0.0, top or []) for logprob, top in islice(scores, count)]
        rows: dict[int, list[int]] = {}
        for place, sequence in enumerate(work.sampled):
            rows.setdefault(sequence.task.task_id, []).append(place)
        outcomes = []
        for sequence, computed in work.prefilled:
            self._count_pages(sequence)
            own = rows.get(sequence.task.task_id, [])
            row = own[0] if own else None
            error = sequence.matcher.error if sequence.matcher is not None else ""
            if sequence.task.task_id in work.broken or (
                row is not None and drawn and drawn.token_ids[row] == NOT_A_TOKEN
            ):
                error = self._not_finite(sequence)
            if error:
                outcomes.append(TaskOutcome(sequence.task, computed, 0, None))
                self._end(sequence, "error", now, error, retire=False)
                continue
            self._pages.copy_states(sequence)
            if row is None or drawn is None:
                outcomes.append(TaskOutcome(sequence.task, computed, 0, Kind.PREFILL))
                self.stats.totals.prompt_tokens += computed
                self._prefix_wait.advanced(sequence)
                continue
            if sequence.task.kind is Kind.PREFILL:
                self.stats.totals.prompt_tokens += computed
                self._pages.share(sequence)
                self._prefix_wait.leave(sequence)
                self.move(sequence, SequenceStatus.DECODE)
            right, reason = self._append_drawn(sequence, drawn, own, now)
            drafted = len(own) - 1
            next_kind = None if reason else Kind.DECODE
            outcomes.append(TaskOutcome(sequence.task, computed + right, 0, next_kind, drafted))
            if reason:
                self._end(sequence, reason, now, retire=False)
        return outcomes

    def _not_finite(self, sequence: Sequence) -> str:
        """Expire the prefixes of a version whose numbers were not finite; returns the error message."""
        self._pages.trie.expire(sequence.trie_key)
        if sequence.version and sequence.request.adapter is not None:
            self._pages.trie.expire_versions(sequence.request.adapter, sequence.version)
            self.suspects.append((sequence.request.adapter, sequence.version))
        who = f"version {sequence.version} of {sequence.request.adapter}" if sequence.version else "the base model"
        return f"{who} answers with numbers that are not finite"

    def _append_drawn(
        self, sequence: Sequence, drawn: Drawn, rows: list[int], now: float
    ) -> tuple[int, FinishReason | None]:
        """Append the token of the first of `rows`, and of further ones while what was drafted before them was right.

        Returns how many drafted tokens were right, and the reason to end with the last one, or None.
        """
        draft, sequence.draft, right = sequence.draft, None, 0
        for row in rows:
            token = drawn.token_ids[row]
            self._append(sequence, drawn, row, now)
            reason = sequence.end(token, self._end_ids, self._max_context)
            if reason or row == rows[-1] or draft is None or draft.tokens[right] != token:
                break
            if drawn.token_ids[rows[right + 1]] == NOT_A_TOKEN:
                # The next iteration computes it again, and finds out.
                break
            right += 1
        if draft is not None and draft.tokens:
            tried = min(right + 1, len(draft.tokens))
            sequence.lookup.learn(draft.kind, right, tried)
            sequence.computed += right
            self.stats.totals.drafted_tokens += len(draft.tokens)
            self.stats.totals.drafted_right += right
        return right, reason

    def _append(self, sequence: Sequence, drawn: Drawn, row: int, now: float) -> None:
        stats, task, token, request = self.stats, sequence.task, drawn.token_ids[row], sequence.request
        first = not sequence.first_token_s
        if first:
            sequence.first_token_s = now
        if request.delivery == "tokens" and not request.candidate:
            if first:
                stats.ttft.add(now - sequence.submitted_s, now <= sequence.ttft_due_s, task.service)
            else:
                stats.tbt.add(now - sequence.last_token_s, now <= task.deadline_s, task.service)
        if task.reader is not None:
            task.reader.take(now)
        sequence.last_token_s = now
        sequence.token_ids.append(token)
        if request.delivery == "none":
            return
        stats.totals.candidate_tokens += request.candidate
        stats.totals.output_tokens += not request.candidate
        event = TokenEvent(sequence.request.request_id, token, sequence.version, drawn.logprobs[row], drawn.tops[row])
        if first and sequence.request.sampling.prompt_logprobs:
            event.prompt = sequence.scored
        self._events.append(event)

    def _end(self, sequence: Sequence, reason: FinishReason, now: float, error: str = "", retire: bool = True) -> None:
        """End a sequence: share or free its pages, and queue its last event."""
        task_id = sequence.task.task_id
        if retire:
            self._scheduler.remove(task_id)
        self.by_task.pop(task_id, None)
        self._candidates.pop(task_id, None)
        if sequence is self.renewals.running:
            self.renewals.on_end(now)
        self._by_request.pop(sequence.request.request_id, None)
        if sequence.admitted:
            if not error:
                self._pages.share(sequence)
            self._pages.free(sequence)
        self.move(sequence, SequenceStatus.FINISHED)
        self._leave_slot(sequence)
        request, task = sequence.request, sequence.task
        if request.delivery == "block" and not request.candidate and sequence.first_token_s:
            # The first token of a block leaves with its last.
            self.stats.ttft.add(now - sequence.submitted_s, now <= sequence.ttft_due_s, task.service)
        if request.counts and request.delivery == "tokens":
            self.count_end(reason, task.reader, None if sequence.forgotten else task.tenant, task.service)
        if request.delivery != "none":
            self._events.append(sequence.finish(reason, now, error))
            if reason != "error" and not request.own and self._pages.shares_prefixes:
                self.renewals.note(sequence, self.adapter_cache.version(request.adapter), now)
        self._prefix_wait.leave(sequence)

    def count_end(self, reason: FinishReason, reader: Reader | None, user: str | None, service: ServiceClass) -> None:
        """Count the end of an answer, and what its reader experienced; None is a user who was forgotten."""
        self.stats.outcomes[reason] += 1
        if reader is not None and reader.num_tokens:
            self.stats.qoe.add(reader.qoe, reader.qoe >= GOOD_QOE, service)
            if user is not None:
                self.stats.qoe_by_user.append((user, reader.qoe))
            self.stats.totals.stall_s += reader.stall_s

    def _leave_slot(self, sequence: Sequence) -> None:
        self._slots.release(sequence.slot)
        sequence.slot = NO_SLOT

    def preempt(self, task_id: int, now: float) -> None:
        """Free the pages of a sequence that holds some; all its tokens are recomputed when there is room.

        A candidate is dropped.
        """
        sequence = self.by_task.get(task_id)
        if sequence is None or not sequence.admitted:
            return
        if sequence.request.candidate:
            self._drop(sequence, now)
            return
        self._pages.share(sequence)
        self._pages.free(sequence)
        self.move(sequence, SequenceStatus.WAITING)
        if not sequence.pinned:
            self._leave_slot(sequence)
        self._count_pages(sequence)
        self._scheduler.restart(sequence.task, len(sequence.token_ids), now)
        self._prefix_wait.leave(sequence)
        self._prefix_wait.lead(sequence)
        self.stats.totals.preemptions += 1

    # -- candidates --------------------------------------------------------------------------------------------------

    def spare_rows(self, num_tokens: int, tenant: str) -> int:
        """Return how many candidates of a `tenant`, of `num_tokens` each, find room that nothing else needs; any thread
        may ask.

        Where others are served, too, a row more must make an iteration hardly longer, or leave the decodes half of the
        time until their tokens are due. Where all that runs is one user's, the time is theirs to use. Half of the pages
        and a quarter of the sequences stay free.
        """
        sequences = list(self.by_task.values())
        if self._wanted:
            return 0
        pages = self._pages
        each = -(-num_tokens // pages.page_size) + 1
        by_pages = (pages.available - pages.pool.capacity // 2) // each
        by_sequences = self._max_sequences * 3 // 4 - len(sequences)
        return max(0, min(by_pages, by_sequences, self._rows_in_time(sequences, {tenant}, _NEARLY_FREE)))

    def _rows_in_time(self, sequences: list[Sequence], tenants: set[str], share: float) -> int:
        """Return how many rows more than `sequences` find room at such a `share` of the time of those served."""
        tasks = [sequence.task for sequence in sequences]
        if len({*tenants, *(task.tenant for task in tasks)}) < 2:
            return self._max_sequences
        served = [sequence for sequence in sequences if not sequence.request.candidate]
        cost, targets = self._scheduler.cost, self._scheduler.targets
        context = sum(task.context - task.pruned for task in tasks)

        def forward_s(rows: int) -> float:
            return cost.priced_s(Load(decodes=rows, context=context * rows // max(1, len(tasks))))

        due_s = targets.tbt_s(ServiceClass.INTERACTIVE, forward_s(len(served)))
        if all(each.task.reader is not None or each.request.delivery != "tokens" for each in served):
            share *= _READ_ALONG
        limit_s = max(MARGIN * due_s, (1.0 + share) * forward_s(len(served)))
        fit = (forward_s(len(tasks) + rows) <= limit_s for rows in range(1, self._max_sequences + 1))
        return sum(takewhile(bool, fit))

    @property
    def _wanted(self) -> bool:
        """Whether a request's prompt found no room in the last plan, for which candidates are dropped."""
        return any(
            not sequence.request.candidate and sequence.task.arrival_s < self._planned_s
            for status in (SequenceStatus.WAITING, SequenceStatus.WAITING_SLOT)
            for sequence in list(self._by_status[status].values())
        )

    def _drop_candidates(self) -> None:
        """Drop the latest candidates, as many as there is no room for any more."""
        served = [sequence for sequence in self.by_task.values() if not sequence.request.candidate]
        short = self._pages.available < self._pages.pool.capacity // 4
        tenants = {sequence.task.tenant for sequence in self.by_task.values()}
        room = min(self._rows_in_time(served, tenants, _DEAR), self._max_sequences - len(served))
        if short or self._wanted:
            room = 0
        for sequence in list(self._candidates.values())[max(0, room) :]:
            self._drop(sequence, self._planned_s)

    def _drop(self, sequence: Sequence, now: float) -> None:
        self.stats.totals.candidates_dropped += sequence is not self.renewals.running
        self._end(sequence, "dropped", now)

    # -- talks under new versions ------------------------------------------------------------------------------------

    def renew(self, now: float) -> None:
        """Compute a talk's K/V again under its adapter's new version, while nobody is served.

        Its next turn then finds all but its own tokens. What is asked meanwhile ends it.
        """
        if self.renewals.pending and all(each.request.own for each in self.by_task.values()):
            beside_work = bool(self.by_task or self._scheduler.queues.finetunes)
            if (request := self.renewals.next(now, beside_work)) is not None:
                self.stats.totals.renewals += 1
                self.add(request, now)

    def end_renewal(self, now: float, again: bool = True) -> None:
        """End the renewal that is under way, if any is: what it computed is shared. `again`: it goes on later."""
        if (renewal := self.renewals.running) is not None:
            if again:
                self.renewals.on_version(renewal.request.adapter or "")
            self._end(renewal, "dropped", now)

    # -- ends from outside -------------------------------------------------------------------------------------------

    def cancel(self, request_id: str, reason: FinishReason, now: float, error: str = "") -> None:
        """End a request, whatever its status; unknown ids are ignored."""
        sequence = self._by_request.get(request_id)
        if sequence is not None:
            self._end(sequence, reason, now, error)

    def fail(self, task_ids: set[int], error: str, now: float) -> list[str]:
        """End the sequences among `task_ids` with an error; returns their requests' ids."""
        failed = [self.by_task[task_id] for task_id in task_ids if task_id in self.by_task]
        for sequence in failed:
            self._end(sequence, "error", now, error)
        return [sequence.request.request_id for sequence in failed]

    def end_all(self, now: float, error: str = "") -> None:
        """End all requests, with an error if one is given, else as cancelled."""
        for sequence in list(self._by_request.values()):
            self._end(sequence, "error" if error else "cancelled", now, error)

    # -- versions ----------------------------------------------------------------------------------------------------

    def on_publish(self, state: Any, previous: int, stepped: bool) -> None:
        """Take in a new version: "hot" moves running sequences to it, "pin" does not.

        The K/V of earlier ones expire, but for those that its own steps made: talks go on over them.
        """
        if (renewal := self.renewals.running) is not None and renewal.request.adapter == state.name:
            self.end_renewal(self._planned_s)
        try:
            slot = self._slots.update(state, previous, not self._pins)
            if not self._pins:
                for sequence in self.by_task.values():
                    if sequence.admitted and sequence.request.adapter == state.name:
                        self._move_slot(sequence, state, slot)
        except Exception:
            # Slots are loaded wholly or not at all: running answers go on with the weights that they have.
            log.exception(
                "version %d of %s is not in a slot yet: its next answer tries again", state.version, state.name
            )
        last = state.version - 1 - (_TALK_VERSIONS if stepped and not self._pins else 0)
        self._pages.trie.expire_versions(state.name, last)
        # Nobody goes on over what is computed anew in that time.
        prompt_s, lengths = self._scheduler.cost.prompt_s, range(1, self._max_context)
        short = 1 + bisect_right(lengths, self._least_s, key=lambda num_tokens: prompt_s(num_tokens, 0))
        self._pages.trie.expire_short(state.name, previous, short)
        for sequence in self.by_task.values():
            if sequence.request.adapter == state.name and 0 < sequence.kv_version <= last and not sequence.pinned:
                # What it has computed over these must not come back when it ends.
                sequence.kv_version = NOT_SHARED
        self._prefix_wait.renew(state.name)
        self.renewals.on_version(state.name)

    def forget(self, name: str) -> None:
        """Stop sharing K/V of the open requests of a forgotten user or adapter, and forget how it was served."""
        self.stats.forget(name)
        for sequence in self._by_request.values():
            if sequence.request.is_of(name):
                sequence.forgotten, sequence.kv_version = True, NOT_SHARED
        self._prefix_wait.forget(name)
        self.renewals.forget(name)
        if (renewal := self.renewals.running) is not None and renewal.request.is_of(name):
            self.end_renewal(self._planned_s, again=False)

    def _move_slot(self, sequence: Sequence, state: Any, slot: int | None) -> None:
        if slot is not None and sequence.slot == slot:
            sequence.version = state.version
            return
        new = self._slots.acquire(state)
        if new is not None:
            self._slots.release(sequence.slot)
            sequence.slot, sequence.version = new, state.version
            sequence.task.adapter = new + 1

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Number of requests that hold no pages."""
        return max(0, len(self._by_request) - self.admitted)

    def queue_report(self) -> dict[str, int]:
        """Return the number of requests by stage."""
        return {
            "waiting": self.waiting,
            "prefill": len(self._by_status[SequenceStatus.PREFILL]),
            "decode": len(self._by_status[SequenceStatus.DECODE]),
        }

    def take_events(self) -> list[Event]:
        """Return and remove the events since the last call."""
        events, self._events = self._events, []
        return events


def _waits_long(task: ServingTask, now: float) -> bool:
    """Whether a prompt has waited twice its TTFT target."""
    return now > 2 * task.deadline_s - task.arrival_s
