"""First come, first served, without training: the baseline of a server that only serves.

Owns that order. Fine-tune tasks are never granted anything.
"""

from __future__ import annotations

from edged.config import SchedulerSettings
from edged.scheduler.cost import CostModel
from edged.scheduler.draft import Draft
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
        draft = Draft(queues, now, resources)
        for task in queues.started:
            if task not in draft.preempted:
                tokens = draft.room(task)
                if tokens > 0:
                    draft.grant(task, tokens)
        for task in queues.waiting:
            if not draft.tokens_left or not draft.sequences_left or draft.pages(task, task.tokens) > draft.open_pages:
                break
            draft.sequences_left -= 1
            draft.enter(task)
            draft.grant(task, draft.room(task))
        draft.rescue()
        plan = draft.plan
        plan.predicted_forward_s = self._cost.forward_s(draft.load)
        return plan
