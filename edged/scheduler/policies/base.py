"""What a scheduling policy is.

Owns the interface between the scheduler's lifecycle and its decisions. Must not know how a policy decides.
"""

from __future__ import annotations

from typing import Protocol

from edged.scheduler.cost.model import CostModel
from edged.scheduler.planning.queues import Order, TaskQueues
from edged.scheduler.task import Plan, Resources
from edged.settings.load import SchedulerSettings


class Policy(Protocol):
    """Decides which of the live tasks share the next iteration.

    `plan` must be deterministic and must not change tasks or queues: `Scheduler` does, when the outcome is known.
    """

    name: str
    trains: bool
    """Whether it ever gives fine-tune tasks anything."""
    shares_prefixes: bool
    """Whether equal beginnings of prompts are computed once, where the settings allow it."""
    prunes: bool
    """Whether K/V of uninformative heads and positions may be given up, where the settings allow it."""
    order: Order
    """In which order the queues keep prefills."""

    def __init__(self, settings: SchedulerSettings, cost: CostModel) -> None: ...

    def plan(self, queues: TaskQueues, now: float, resources: Resources) -> Plan:
        """The next bin, within `resources`; empty only if no task can run."""
        ...
