"""Hybrid iterations: serving and fine-tuning share each within a latency budget (MACE 4.2, FlexLLM 6.2)."""

from collections.abc import Iterator
from itertools import chain, filterfalse

from edged.scheduler.cost.model import CostModel
from edged.scheduler.planning import slo
from edged.scheduler.planning.bin_builder import BinBuilder, grant_finetune
from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.policies.base import Entry, Fill, Policy
from edged.scheduler.policies.options import PackingOptions
from edged.scheduler.task import Plan, Resources, ServingTask
from edged.settings.load import SchedulerSettings

SMALLEST_CHUNK = 32
"""Least tokens of prompts together, or of an overdue pair's forward, whatever the budget: they go on."""
LOOK_AHEAD = 32
"""Number of waiting prompts, the next ones in order, whose deadlines an iteration heeds."""


class Hybrid(Fill):
    """Every decode that is not paused, chunks of the prompts that the admission chose, and its step in what is left.

    Chunks keep the decodes on time, or are longer where a prompt would be late otherwise. A step that is due or in the
    way comes first with what it is owed, the others have what serving leaves of the latency budget.
    """

    paced = True
    """Whether chunks of prompts heed the decodes beside them and the deadlines of all."""

    def configure(self, settings: SchedulerSettings, cost: CostModel) -> None:
        """Take how many tasks a decision looks at."""
        super().configure(settings, cost)
        self._tau_tasks = PackingOptions.of(settings).tau_tasks

    def plan(self, policy: Policy, queues: TaskQueues, now: float, resources: Resources) -> Plan:
        """Return the next bin within `resources`; empty only if no task can run."""
        cost, finetune_share = policy.cost, policy.finetune_share
        builder = BinBuilder(queues, now, resources, policy.victims.ranked)
        plan = builder.plan
        # Nobody enters where others are preempted.
        if queues.started or not builder.preempted:
            # Where nobody overtakes, those beyond are looked for only if all of these enter.
            waiting = queues.first(LOOK_AHEAD if queues.order.strict else max(LOOK_AHEAD, self._tau_tasks + 1))
            builder.prompts, builder.heeded = policy.rank(queues.started + waiting[:LOOK_AHEAD], now)
            if not queues.order.strict:
                waiting = [*filterfalse(set(queues.started).__contains__, builder.prompts), *waiting[LOOK_AHEAD:]]
            builder.waiting = waiting
        entry = policy.admission.choose(builder, queues, finetune_share, now)
        if entry.paused:
            builder.pause(entry.paused, now)
        step, owed_s = entry.step, 0.0
        if step is not None and (entry.due or entry.in_the_way):
            owed_s = finetune_share.owed_s(builder, entry, now)
            plan.prepaid = entry.in_the_way
        self._add_chunks(policy, builder, entry, owed_s, now)
        plan.predicted_forward_s = cost.forward_s(builder.load)
        plan.budget_s = finetune_share.limit_s(builder, now)
        if step is not None:
            served = builder.load.decodes or builder.load.prefill_tokens
            at_least = SMALLEST_CHUNK if entry.due or entry.in_the_way or not served else 0
            limit_s = max(plan.budget_s, plan.predicted_forward_s + owed_s)
            grant_finetune(builder, step, cost, limit_s, at_least)
        if not plan.grants:
            builder.rescue()
        if builder.load.finetune_tokens or not plan.predicted_forward_s:
            plan.predicted_forward_s = cost.forward_s(builder.load)
        return plan

    def most_tokens(self, builder: BinBuilder) -> int:
        """Return the most prompt tokens of the iteration beside the decodes that `builder` has; here all that fit."""
        return builder.tokens_left

    def _add_chunks(self, policy: Policy, builder: BinBuilder, entry: Entry, owed_s: float, now: float) -> None:
        """Grant chunks to the runnable prompts: as much as keeps decodes on time, or keeps all heeded prompts on time.

        Fine-tuning that is due is left the tokens that it is owed.
        """
        if not entry.runnable:
            return
        cost, load, step, kept = policy.cost, builder.load, entry.step, 0
        at_most = max(SMALLEST_CHUNK, self.most_tokens(builder))
        if owed_s and step is not None and step.num_tokens:
            most = max(0, builder.room(step))
            forward_s = cost.forward_s(load)
            kept = cost.chunk(builder.load_beside(step), step.context, most, forward_s + owed_s, finetune=True)
            kept = max(kept, min(most, SMALLEST_CHUNK))
        builder.tokens_left -= kept
        limit_s = builder.slack_s * (1.0 - cost.headroom) - owed_s
        # A pace for many iterations: at prices, not at the slowness of the moment.
        priced_s, all_tokens, needed = cost.priced_s(load), builder.tokens_left, 0
        runnable = set(entry.runnable)

        def beyond() -> Iterator[ServingTask]:
            yield from sorted(runnable.difference(builder.prompts), key=policy.order)

        for task in chain(filter(runnable.__contains__, builder.prompts), beyond()):
            if builder.tokens_left <= 0:
                break
            most = min(builder.room(task), at_most - load.prefill_tokens)
            if most <= 0:
                continue
            num_tokens = most
            if load.decodes and self.paced:
                num_tokens = cost.chunk(builder.load_beside(task), task.context, most, limit_s, finetune=False)
            if num_tokens < most:
                if not needed:
                    needed = slo.required_tokens(builder.heeded, now, priced_s, cost.token_s, all_tokens)
                    needed = max(SMALLEST_CHUNK, needed)
                num_tokens = max(num_tokens, min(most, needed - load.prefill_tokens))
            if num_tokens > 0:
                builder.grant(task, num_tokens)
        builder.tokens_left += kept
