"""Iterations that only serve, and which fine-tune steps may run: for policies without hybrid bins."""

import math

from edged.scheduler.planning.bin_builder import BinBuilder
from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.policies.base import Fill, Policy, Row
from edged.scheduler.task import FinetuneTask, Plan, Resources


def serve_only(
    policy: Policy, queues: TaskQueues, now: float, resources: Resources, before_s: float = math.inf
) -> Plan:
    """Plan every decode, then whole prompts, first come first served, until tokens, pages or sequences run out.

    Waiting prompts enter if they arrived before `before_s`. Empty only if no sequence can run.
    """
    builder = BinBuilder(queues, now, resources, policy.victims.ranked)
    for task in builder.started:
        num_tokens = builder.room(task)
        if num_tokens > 0:
            builder.grant(task, num_tokens)
    for task in queues.first(max(0, builder.sequences_left)):
        full = not builder.tokens_left or builder.sequences_left <= 0
        if full or task.arrival_s >= before_s or builder.pages(task, task.num_tokens) > builder.open_pages:
            break
        builder.sequences_left -= 1
        builder.enter(task)
        builder.grant(task, builder.room(task))
    builder.rescue()
    plan = builder.plan
    plan.predicted_forward_s = policy.cost.forward_s(builder.load)
    return plan


def runnable_steps(queues: TaskQueues, resources: Resources) -> list[FinetuneTask]:
    """Return fine-tune tasks with work to do that memory can hold: those in the middle of a step, then by arrival;
    those of jobs and passes come last.

    Empty while fine-tuning is throttled.
    """
    if queues.throttled:
        return []
    able = [
        task
        for task in queues.finetunes
        if task.has_work
        and task.held_pages + task.pages_for(task.num_tokens, resources.page_size) <= resources.total_pages
    ]
    return sorted(able, key=lambda task: (task.bulk, not task.begun))


class ServeOnly(Fill):
    """Every decode, then prompts in the order of the policy until tokens, pages or sequences run out."""

    def plan(self, policy: Policy, queues: TaskQueues, now: float, resources: Resources) -> Plan:
        """Return the next bin; deadlines do not matter."""
        return serve_only(policy, queues, now, resources)


FCFS = Row("fcfs", "continuous batching (MACE, Algorithm 2), first come first served", fill=ServeOnly, trains=False)
"""First come, first served, without training: the baseline of a server that only serves."""
