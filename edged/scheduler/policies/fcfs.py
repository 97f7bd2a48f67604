"""First come, first served, without training: the baseline of a server that only serves.

Owns that order. Fine-tune tasks are never granted anything.
"""

from __future__ import annotations

from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.policies.phased import PhasedPolicy, serve_only
from edged.scheduler.task import Plan, Resources


class Fcfs(PhasedPolicy):
    """Every decode, then prompts in the order of arrival until tokens, pages or sequences run out."""

    name = "fcfs"
    trains = False

    def plan(self, queues: TaskQueues, now: float, resources: Resources) -> Plan:
        """The next bin; deadlines do not matter."""
        return serve_only(queues, now, resources, self._cost)
