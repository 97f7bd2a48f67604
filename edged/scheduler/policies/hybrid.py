"""Hybrid iterations: serving and fine-tuning share each within a latency budget (MACE 4.2, FlexLLM 6.2)."""

from collections.abc import Iterator
from itertools import chain, filterfalse

from edged.scheduler.planning import slo
from edged.scheduler.planning.bin_builder import BinBuilder, grant_finetune
from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.policies.base import Entry, Fill, Policy
from edged.scheduler.task import Plan, Resources, Task

SMALLEST_CHUNK = 32
"""Least tokens of prompts together, or of an overdue pair's forward, whatever the budget: they go on."""
LOOK_AHEAD = 32
"""Number of waiting prompts, the next ones in order, whose deadlines an iteration heeds."""


class Hybrid(Fill):
    """Every decode that is not paused, chunks of the prompts that the admission chose, and its step in what is left.

    Chunks keep the decodes on time, or are longer where a prompt would be late otherwise. A step that is due or in the
    way comes first with what it is owed, the others have what serving leaves of the latency budget.
    """

    def plan(self, policy: Policy, queues: TaskQueues, now: float, resources: Resources) -> Plan:
        """Return the next bin within `resources`; empty only if no task can run."""
        cost, spare = policy.cost, policy.spare
        draft = BinBuilder(queues, now, resources, policy.victims.ranked)
        plan = draft.plan
        # Nobody enters where others are preempted.
        if queues.started or not draft.preempted:
            # Where nobody overtakes, those beyond are looked for only if all of these enter.
            waiting = queues.first(LOOK_AHEAD if queues.order.strict else max(LOOK_AHEAD, self.settings.tau_tasks + 1))
            draft.prompts, draft.heeded = policy.rank(queues.started + waiting[:LOOK_AHEAD], now)
            if not queues.order.strict:
                waiting = [*filterfalse(set(queues.started).__contains__, draft.prompts), *waiting[LOOK_AHEAD:]]
            draft.waiting = waiting
        entry = policy.admission.choose(draft, queues, spare, now)
        if entry.paused:
            draft.pause(entry.paused, now)
        step, owed_s = entry.step, 0.0
        if step is not None and (entry.due or entry.in_the_way):
            owed_s = spare.owed_s(draft, entry, now)
            plan.prepaid = entry.in_the_way
        self._add_chunks(policy, draft, entry, owed_s, now)
        plan.predicted_forward_s = cost.forward_s(draft.load)
        plan.budget_s = spare.limit_s(draft, now)
        if step is not None:
            served = draft.load.decodes or draft.load.prefill_tokens
            at_least = SMALLEST_CHUNK if entry.due or entry.in_the_way or not served else 0
            limit_s = max(plan.budget_s, plan.predicted_forward_s + owed_s)
            grant_finetune(draft, step, cost, limit_s, at_least)
        if not plan.grants:
            draft.rescue()
        if draft.load.finetune_tokens or not plan.predicted_forward_s:
            plan.predicted_forward_s = cost.forward_s(draft.load)
        return plan

    def _add_chunks(self, policy: Policy, draft: BinBuilder, entry: Entry, owed_s: float, now: float) -> None:
        """Grant chunks to the runnable prompts: as much as keeps decodes on time, or keeps all heeded prompts on time.

        Fine-tuning that is due is left the tokens that it is owed.
        """
        if not entry.runnable:
            return
        cost, load, step, kept = policy.cost, draft.load, entry.step, 0
        if owed_s and step is not None and step.num_tokens:
            most = max(0, draft.room(step))
            forward_s = cost.forward_s(load)
            kept = cost.chunk(draft.load_beside(step), step.context, most, forward_s + owed_s, finetune=True)
            kept = max(kept, min(most, SMALLEST_CHUNK))
        draft.tokens_left -= kept
        limit_s = draft.slack_s * (1.0 - cost.headroom) - owed_s
        # A pace for many iterations: at prices, not at the slowness of the moment.
        priced_s, all_tokens, needed = cost.priced_s(load), draft.tokens_left, 0
        runnable = set(entry.runnable)

        def beyond() -> Iterator[Task]:
            yield from sorted(runnable.difference(draft.prompts), key=policy.order)

        for task in chain(filter(runnable.__contains__, draft.prompts), beyond()):
            if draft.tokens_left <= 0:
                break
            most = draft.room(task)
            if most <= 0:
                continue
            num_tokens = most
            if load.decodes:
                num_tokens = cost.chunk(draft.load_beside(task), task.context, most, limit_s, finetune=False)
            if num_tokens < most:
                if not needed:
                    needed = slo.required_tokens(draft.heeded, now, priced_s, cost.token_s, all_tokens)
                    needed = max(SMALLEST_CHUNK, needed)
                num_tokens = max(num_tokens, min(most, needed - load.prefill_tokens))
            if num_tokens > 0:
                draft.grant(task, num_tokens)
        draft.tokens_left += kept
