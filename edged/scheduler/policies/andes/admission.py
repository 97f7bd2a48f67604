"""Andes' admission: where memory or time is short, those are served whose readers gain most by it (Andes 2.4)."""

import math
from collections.abc import Sequence

from edged.scheduler.cost.model import CostModel, Load
from edged.scheduler.planning.bin_builder import BinBuilder
from edged.scheduler.planning.queues import TaskQueues, by_arrival
from edged.scheduler.policies.andes.knapsack import Contender, batch_sizes, fewest, pack, total
from edged.scheduler.policies.base import Entry, Spare
from edged.scheduler.policies.hybrid import LOOK_AHEAD
from edged.scheduler.policies.mace.triage import PatientAdmission, overdue_s
from edged.scheduler.reader import Reader
from edged.scheduler.task import Task
from edged.settings.load import SchedulerSettings

SHORT = 0.9
"""Share of the pages that are held or asked for from which on memory is short."""
URGENT = 1e9
"""Gain of those who must not wait any more: above all others together, whatever their pages."""


class ReaderAdmission(PatientAdmission):
    """MACE's admission; where memory, slots or time are short, the knapsack of readers comes first.

    Answers whose readers have enough to read give way to prompts that gain more; each once, the oldest of all never.
    """

    refines = True
    """Whether a prompt enters only if it gains more than its entry costs the others (2.4.3)."""

    def configure(self, settings: SchedulerSettings, cost: CostModel) -> None:
        """Take the horizon, too."""
        super().configure(settings, cost)
        self._horizon_s = settings.reader_horizon_s

    def choose(self, draft: BinBuilder, queues: TaskQueues, spare: Spare, now: float) -> Entry:
        """Choose by what readers gain, then as MACE what finds room."""
        contested = not (queues.order.strict or draft.preempted) and self._short(draft)
        entered, paused = self._contest(draft, queues, now) if contested else ([], set())
        entry = super().choose(draft, queues, spare, now)
        entry.runnable += entered
        entry.paused = paused
        return entry

    def _short(self, draft: BinBuilder) -> bool:
        """Whether not all can be served, or not as fast as the fastest reader reads."""
        asked = sum([draft.pages(task, task.tokens) for task in draft.waiting[:LOOK_AHEAD]])
        if asked and draft.open_pages - asked < (1.0 - SHORT) * draft.total_pages:
            return True
        paces = [grant.task.reader.pace for grant in draft.plan.grants if grant.task.reader is not None]
        slow = bool(paces) and self.cost.priced_s(draft.load) * max(paces) > 1.0
        return slow or draft.sequences_left < len(draft.waiting)

    def _contest(self, draft: BinBuilder, queues: TaskQueues, now: float) -> tuple[list[Task], set[Task]]:
        """Return the prompts that enter, with their pages promised, and the decodes that stand still; who gives way is
        preempted in `draft`."""
        decodes = [grant.task for grant in draft.plan.grants]
        oldest = min((*decodes, *queues.started), key=by_arrival, default=None)
        running = [task for task in decodes if task.reader and not task.preemptions and task is not oldest]
        waiting = [task for task in draft.waiting[: 2 * LOOK_AHEAD] if task.reader]
        ranked, served, size = self._best(draft, running, waiting, now)
        chosen = {one.task for one in served}
        entered = self._refined(draft, ranked, chosen, now)
        if len(served) < size:
            return entered, set()
        # The size of the batch leaves them out, not memory.
        held_out = {one.task for one in ranked if one.task not in chosen}
        draft.waiting = [task for task in draft.waiting if task not in held_out]
        return entered, held_out - draft.preempted

    def _best(
        self, draft: BinBuilder, running: list[Task], waiting: list[Task], now: float
    ) -> tuple[list[Contender], list[Contender], float]:
        """Return contenders by rank, who of them is served, and their most where memory would hold more; all of the
        batch size with the most gain."""
        load = draft.load
        others, each = load.decodes - len(running), load.context / max(1, load.decodes)
        pages = draft.open_pages + sum([task.held_pages for task in running])
        needs = [(task, task.held_pages, 0.0) for task in running]
        needs += [(task, draft.pages(task, task.tokens), self.cost.prompt_s(task.tokens)) for task in waiting]
        asking = [(task, task.reader, need, starts_s) for task, need, starts_s in needs if task.reader is not None]

        def token_s(size: int) -> float:
            decodes = others + size
            return self.cost.priced_s(Load(decodes=decodes, context=round(each * decodes), adapters=load.adapters))

        fastest_s = 1.0 / max([reader.pace for _, reader, _, _ in asking], default=1.0)
        slots = draft.sequences_left + len(running)
        sizes = batch_sizes([need for _, need, _ in needs], pages, slots, token_s, fastest_s)

        def packed(size: int) -> tuple[list[Contender], list[Contender], float]:
            rate = 1.0 / token_s(size)
            contenders = [
                Contender(task, reader, need, self._gain(task, reader, starts_s, rate, now), not starts_s)
                for task, reader, need, starts_s in asking
            ]
            ranked = sorted(contenders, key=lambda one: one.rank)
            return ranked, pack(ranked, pages, size), size if size < sizes[0] else math.inf

        return max(map(packed, sizes), key=lambda each: total(each[1]), default=([], [], math.inf))

    def _gain(self, task: Task, reader: Reader, starts_s: float, tokens_per_s: float, now: float) -> float:
        """Return what a reader gains by being served; `starts_s` is 0 for those that run."""
        if starts_s and (reader.dry_s - starts_s if task.preemptions else overdue_s(task)) <= now:
            return URGENT
        return reader.gain(now, self._horizon_s, starts_s, tokens_per_s)

    def _refined(self, draft: BinBuilder, ranked: Sequence[Contender], chosen: set[Task], now: float) -> list[Task]:
        """Let those of the `chosen` enter who wait, each for the fewest of the lowest others, while it pays."""
        free, slots, tokens = draft.open_pages, draft.sequences_left, draft.tokens_left
        lowest = [one for one in reversed(ranked) if one.runs and one.task not in chosen]
        entered: list[Task] = []
        gone: list[Contender] = []
        for one in ranked:
            if one.runs or (one.task not in chosen and one.gain < URGENT):
                continue
            victims = fewest(lowest, one.pages - free, max(0, 1 - slots)) if tokens > 0 else None
            if victims is None:
                if one.gain < URGENT:
                    continue
                # Nobody overtakes it: pages that come free next are its own.
                break
            if victims and self.refines and one.gain < URGENT and not self._pays(draft, one, victims, now):
                break
            gone += victims
            lowest = [other for other in lowest if other not in victims]
            free += sum([victim.pages for victim in victims]) - one.pages
            slots += len(victims) - 1
            tokens -= one.task.tokens
            entered.append(one.task)
        draft.preempt([victim.task for victim in gone], now)
        for task in entered:
            draft.sequences_left -= 1
            draft.enter(task)
            draft.waiting.remove(task)
        return entered

    def _pays(self, draft: BinBuilder, one: Contender, victims: list[Contender], now: float) -> bool:
        """Whether victims have text until they are back, and a prompt gains more than others lose while all of them are
        computed."""
        again_s = [self.cost.prompt_s(victim.task.context) for victim in victims]
        back_s = [now + self._horizon_s + seconds for seconds in again_s]
        if any(victim.reader.dry_s < back for victim, back in zip(victims, back_s, strict=True)):
            return False
        overhead_s = self.cost.prompt_s(one.task.tokens) + sum(again_s)
        left = {victim.task for victim in victims}
        stay = [grant.task.reader for grant in draft.plan.grants if grant.task not in left]
        return one.gain > sum([reader.loss(now, self._horizon_s, overhead_s) for reader in stay if reader is not None])
