"""First come, first served, without training: the baseline of a server that only serves.

Owns that order. Fine-tune tasks are never granted anything.
"""

from __future__ import annotations

from edged.config import SchedulerSettings
from edged.scheduler.cost import CostModel
from edged.scheduler.phases import serve
from edged.scheduler.queues import Queues, by_arrival
from edged.scheduler.task import Plan, Resources


class Fcfs:
    """Every decode, then prompts in the order of arrival until tokens, pages or sequences run out."""

    name = "fcfs"
    trains = False
    shares_prefixes = True
    prunes = False
    order = staticmethod(by_arrival)

    def __init__(self, settings: SchedulerSettings, cost: CostModel) -> None:
        self._cost = cost

    def plan(self, queues: Queues, now: float, resources: Resources) -> Plan:
        """The next bin; deadlines do not matter."""
        return serve(queues, now, resources, self._cost)
