"""The MACE policy: serving and fine-tuning share each iteration, by priority, memory and latency budget.

Owns how long each works: the latency budget (MACE 4.2, FlexLLM 6.2). Who works and who enters memory is the choice of
`edged.scheduler.policies.mace.admission`. Must not know how tasks are executed.
"""

from __future__ import annotations

import math

from edged.scheduler.cost.model import CostModel
from edged.scheduler.planning import slo
from edged.scheduler.planning.bin_builder import BinBuilder, grant_finetune
from edged.scheduler.planning.queues import TaskQueues, by_deadline
from edged.scheduler.policies.mace.admission import FinetuneTurn, MaceAdmission
from edged.scheduler.task import Plan, Resources, Task
from edged.settings.load import SchedulerSettings

SMALLEST_CHUNK = 32
"""Tokens that prompts together, or an overdue pair's forward, get at least: whatever the budget, they go on."""
LOOK_AHEAD = 32
"""Waiting prompts, the next ones due, whose deadlines an iteration heeds."""


class Mace:
    """MACE 4.1 and 4.2 with a latency budget.

    Every decode runs in every iteration. Prompts come in the order of their deadlines, in chunks that keep the decodes
    on time, or longer ones where a prompt would be late otherwise. Fine-tuning gets what is left of the budget; when
    it has waited so long that it outranks serving, it comes first, with `finetune_min_share` of the time it waited.
    A step keeps memory from its first token to its last unit. So beside serving none begins of itself unless it leaves
    as many pages as it takes, and one that keeps prompts out gets the quantum in every iteration until it ends, which
    the waits after it pay for.
    """

    name = "mace"
    trains = True
    shares_prefixes = True
    prunes = True
    order = staticmethod(by_deadline)
    admission = MaceAdmission

    def __init__(self, settings: SchedulerSettings, cost: CostModel) -> None:
        self._cost = cost
        self._admission = self.admission(settings, cost)
        self._quantum_s = settings.idle_quantum_ms / 1000.0

    def plan(self, queues: TaskQueues, now: float, resources: Resources) -> Plan:
        """The next bin within `resources`; empty only if no task can run."""
        draft = BinBuilder(queues, now, resources)
        plan = draft.plan
        prompts = queues.started + queues.waiting[:LOOK_AHEAD]
        if queues.started:
            prompts.sort(key=self.order)
        turn, runnable = self._admission.choose(draft, queues, prompts, now)
        if turn.task is not None and (turn.due or turn.in_the_way):
            turn.owed_s = self._owed_s(draft, runnable, turn, queues, now)
            plan.prepaid = turn.in_the_way
        self._add_chunks(draft, prompts, runnable, turn, now)
        plan.budget_s = self._budget_s(draft, queues, prompts, resources, now)
        if turn.task is not None:
            served = draft.load.decodes or draft.load.prefill_tokens
            at_least = SMALLEST_CHUNK if turn.due or turn.in_the_way or not served else 0
            limit_s = max(plan.budget_s, self._cost.forward_s(draft.load) + turn.owed_s)
            grant_finetune(draft, turn.task, self._cost, limit_s, at_least)
        if not plan.grants:
            draft.rescue()
        plan.predicted_forward_s = self._cost.forward_s(draft.load)
        return plan

    def _owed_s(
        self, draft: BinBuilder, runnable: list[Task], turn: FinetuneTurn, queues: TaskQueues, now: float
    ) -> float:
        """Seconds of work that fine-tuning gets now, whatever the budget.

        Its share of the time it waited: at most the quantum, or twice the share of this iteration's own length where
        that is more, so that what is owed can shrink. The quantum, when it is in the way.
        """
        if turn.in_the_way:
            return self._quantum_s
        share = queues.arrears.share
        tokens = min(draft.tokens_left, sum(task.tokens for task in runnable))
        serving_s = self._cost.priced_s(draft.load) + tokens * self._cost.token_s
        most_s = 2.0 * serving_s * share / (1.0 - share) if share < 1.0 else math.inf
        return min(share * queues.arrears.wait_s(now), max(self._quantum_s, most_s))

    def _add_chunks(
        self, draft: BinBuilder, prompts: list[Task], runnable: list[Task], turn: FinetuneTurn, now: float
    ) -> None:
        """Chunks of the runnable prompts: as much as keeps the decodes on time, or keeps all `prompts` on time.

        Fine-tuning that is due is left the tokens that it is owed.
        """
        cost, load = self._cost, draft.load
        base_s = cost.forward_s(load)
        kept = 0
        if turn.owed_s and turn.task is not None and turn.task.tokens:
            most = max(0, draft.room(turn.task))
            limit_s = base_s + turn.owed_s
            kept = cost.chunk(draft.load_beside(turn.task), turn.task.context, most, limit_s, finetune=True)
            kept = max(kept, min(most, SMALLEST_CHUNK))
        draft.tokens_left -= kept
        limit_s = draft.slack_s * (1.0 - cost.headroom) - turn.owed_s
        needed = draft.tokens_left
        if load.decodes:
            # A pace for many iterations: at prices, not at the slowness of the moment.
            priced_s = cost.priced_s(load)
            needed = max(SMALLEST_CHUNK, slo.required_tokens(prompts, now, priced_s, cost.token_s, needed))
        for task in sorted(runnable, key=self.order):
            most = draft.room(task)
            if most <= 0:
                continue
            tokens = min(most, needed - load.prefill_tokens)
            if tokens < most:
                beside = draft.load_beside(task)
                tokens = max(tokens, cost.chunk(beside, task.context, most, limit_s, finetune=False))
            if tokens > 0:
                draft.grant(task, tokens)
        draft.tokens_left += kept

    def _budget_s(
        self, draft: BinBuilder, queues: TaskQueues, prompts: list[Task], resources: Resources, now: float
    ) -> float:
        """The iteration's latency budget: the least slack of its members and of the prompts behind them.

        Fine-tuning takes of it what serving allows (`tbt_slowdown`), and the share that slots and pages are free. Where
        serving is dense, a longer iteration keeps more sequences in memory until those that arrive find none; so
        training thins out before.
        """
        if not (draft.load.decodes or draft.load.prefill_tokens):
            return self._quantum_s
        granted = {grant.task: grant.tokens for grant in draft.plan.grants[draft.load.decodes :]}
        slack_s = min(draft.slack_s, slo.slack_s(prompts, granted, now, self._cost.token_s))
        forward_s = self._cost.forward_s(draft.load)
        spare_s = min(
            slack_s * (1.0 - self._cost.headroom) - forward_s, self._quantum_s, max(0.0, queues.allowance.left_s)
        )
        free = min(draft.sequences_left / resources.max_sequences, draft.open_pages / resources.total_pages)
        return max(0.0, forward_s + spare_s * max(0.0, free))
