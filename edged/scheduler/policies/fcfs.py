"""First come, first served, without training: the baseline of a server that only serves."""

from __future__ import annotations

from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.policies.base import Fill, Policy, Row
from edged.scheduler.policies.phased import serve_only
from edged.scheduler.task import Plan, Resources


class ServeOnly(Fill):
    """Every decode, then prompts in the order of the policy until tokens, pages or sequences run out."""

    def plan(self, policy: Policy, queues: TaskQueues, now: float, resources: Resources) -> Plan:
        """The next bin; deadlines do not matter."""
        return serve_only(policy, queues, now, resources)


FCFS = Row("fcfs", "continuous batching (MACE, Algorithm 2), first come first served", fill=ServeOnly, trains=False)
