"""Andes' admission: where memory or time is short, those are served whose readers gain most by it (Andes 2.4)."""

from collections.abc import Sequence

from edged.scheduler.cost.model import CostModel
from edged.scheduler.cost.prices import Load
from edged.scheduler.planning.bin_builder import BinBuilder
from edged.scheduler.planning.queues import TaskQueues, by_arrival
from edged.scheduler.policies.andes.knapsack import Contender, contest, fewest
from edged.scheduler.policies.base import Entry, FinetuneShare
from edged.scheduler.policies.hybrid import LOOK_AHEAD
from edged.scheduler.policies.mace.triage import PatientAdmission
from edged.scheduler.policies.options import AndesOptions
from edged.scheduler.task import ServingTask
from edged.settings.load import SchedulerSettings

SHORT = 0.9
"""Share of the pages that are held or asked for from which on memory is short."""


class ReaderAdmission(PatientAdmission):
    """MACE's admission; where memory, slots or time are short, the knapsack of readers comes first.

    Answers whose readers have enough to read give way to prompts that gain more; each once, the oldest of all never.
    """

    refines = True
    """Whether a prompt enters only if it gains more than its entry costs the others (2.4.3)."""

    def configure(self, settings: SchedulerSettings, cost: CostModel) -> None:
        """Take the span of which gains are told."""
        super().configure(settings, cost)
        self._horizon_s = AndesOptions.of(settings).reader_horizon_s

    def choose(self, builder: BinBuilder, queues: TaskQueues, finetune_share: FinetuneShare, now: float) -> Entry:
        """Choose by what readers gain, then as MACE what finds room."""
        contested = not (queues.order.strict or builder.preempted) and self._short(builder)
        entered, paused = self._contest(builder, queues, now) if contested else ([], set())
        entry = super().choose(builder, queues, finetune_share, now)
        entry.runnable += entered
        entry.paused = paused
        return entry

    def _short(self, builder: BinBuilder) -> bool:
        """Whether not all can be served, readers among them, or not as fast as the fastest reader reads."""
        paces = [reader.pace for grant in builder.decodes if (reader := grant.task.reader) is not None]
        if not paces and all([task.reader is None for task in builder.waiting[: 2 * LOOK_AHEAD]]):
            return False
        if builder.sequences_left < len(builder.waiting):
            return True
        asking, least = builder.waiting[:LOOK_AHEAD], (1.0 - SHORT) * builder.total_pages
        if builder.open_pages - builder.max_pages(asking) < least:
            asked = sum([task.pages_for(task.num_tokens, builder.page_size) for task in asking])
            if asked and builder.open_pages - asked < least:
                return True
        return bool(paces) and self.cost.priced_s(builder.load) * max(paces) > 1.0

    def _contest(
        self, builder: BinBuilder, queues: TaskQueues, now: float
    ) -> tuple[list[ServingTask], set[ServingTask]]:
        """Return the prompts that enter, with their pages promised, and the decodes that stand still; who gives way is
        preempted in `builder`."""
        grants, load = builder.decodes, builder.load
        # Decodes are queued by arrival.
        first = [next(grant.task for grant in queues.decodes if grant in grants)] if grants else []
        oldest = min(first + queues.started, key=by_arrival, default=None)
        contenders = [
            Contender(task, reader, task.held_pages, 0.0)
            for grant in grants
            if (reader := (task := grant.task).reader) is not None and not task.preemptions and task is not oldest
        ]
        running = len(contenders)
        pages = builder.open_pages + sum([one.pages for one in contenders])
        prompt_s, page_size = self.cost.prompt_s, builder.page_size
        for task in builder.waiting[: 2 * LOOK_AHEAD]:
            if (reader := task.reader) is not None:
                starts_s = prompt_s(task.num_tokens)
                late = (reader.dry_s - starts_s if task.preemptions else self.overdue_s(task)) <= now
                contenders.append(Contender(task, reader, task.pages_for(task.num_tokens, page_size), starts_s, late))
        if not contenders:
            return [], set()
        others, each = load.decodes - running, load.context / max(1, load.decodes)

        def token_s(size: int) -> float:
            decodes = others + size
            return self.cost.priced_s(Load(0, decodes, 0, round(each * decodes), 0.0, load.adapters))

        slots = builder.sequences_left + running
        ranked, chosen, size = contest(contenders, pages, slots, token_s, now, self._horizon_s)
        entered = self._refined(builder, ranked, chosen, now)
        if len(chosen) < size:
            return entered, set()
        # The size of the batch leaves them out, not memory.
        held_out = {one.task for one, _ in ranked if one.task not in chosen}
        builder.waiting = [task for task in builder.waiting if task not in held_out]
        return entered, held_out - builder.preempted

    def _refined(
        self, builder: BinBuilder, ranked: Sequence[tuple[Contender, float]], chosen: set[ServingTask], now: float
    ) -> list[ServingTask]:
        """Let those of the `chosen` enter who wait, each for the fewest of the lowest others, while it pays."""
        free, slots, num_tokens = builder.open_pages, builder.sequences_left, builder.tokens_left
        lowest = [one for one, _ in reversed(ranked) if not one.starts_s and one.task not in chosen]
        entered: list[ServingTask] = []
        gone: list[Contender] = []
        for one, gained in ranked:
            if not one.starts_s or not (one.urgent or one.task in chosen):
                continue
            victims = fewest(lowest, one.pages - free, max(0, 1 - slots)) if num_tokens > 0 else None
            if victims is None:
                if not one.urgent:
                    continue
                # Nobody overtakes it: pages that come free next are its own.
                break
            if victims and self.refines and not one.urgent and not self._pays(builder, one, gained, victims, now):
                break
            gone += victims
            lowest = [other for other in lowest if other not in victims]
            free += sum([victim.pages for victim in victims]) - one.pages
            slots += len(victims) - 1
            num_tokens -= one.task.num_tokens
            entered.append(one.task)
        builder.preempt([victim.task for victim in gone], now)
        for task in entered:
            builder.sequences_left -= 1
            builder.enter(task)
            builder.waiting.remove(task)
        return entered

    def _pays(self, builder: BinBuilder, one: Contender, gained: float, victims: list[Contender], now: float) -> bool:
        """Whether victims have text until they are back, and a prompt gains more than others lose while all of them are
        computed."""
        again_s = [self.cost.prompt_s(victim.task.context) for victim in victims]
        back_s = [now + self._horizon_s + seconds for seconds in again_s]
        if any(victim.reader.dry_s < back for victim, back in zip(victims, back_s, strict=True)):
            return False
        overhead_s = self.cost.prompt_s(one.task.num_tokens) + sum(again_s)
        left = {victim.task for victim in victims}
        stay = [grant.task.reader for grant in builder.decodes if grant.task not in left]
        return gained > sum([reader.loss(now, self._horizon_s, overhead_s) for reader in stay if reader is not None])
