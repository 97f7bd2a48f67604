"""Iterations that only serve and iterations that only fine-tune: what policies without hybrid bins are made of.

Owns how such an iteration is filled. Must not know when which of them is due: that is the policies' difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from edged.scheduler.cost.model import CostModel
from edged.scheduler.planning.bin_builder import BinBuilder, grant_finetune
from edged.scheduler.planning.queues import TaskQueues, by_arrival
from edged.scheduler.task import Plan, Resources, Task
from edged.settings.load import SchedulerSettings

NOBODY = -math.inf
"""As `before_s` of `serve`: no prompt enters."""


class PhasedPolicy:
    """What policies without hybrid bins have in common: they learn, share prefixes, and go by arrival."""

    trains = True
    shares_prefixes = True
    prunes = False
    order = staticmethod(by_arrival)

    def __init__(self, settings: SchedulerSettings, cost: CostModel) -> None:
        self._cost = cost


def serve_only(
    queues: TaskQueues, now: float, resources: Resources, cost: CostModel, before_s: float = math.inf
) -> Plan:
    """Every decode, then whole prompts, first come first served, until tokens, pages or sequences run out.

    Waiting prompts enter if they arrived before `before_s`. Empty only if no sequence can run.
    """
    draft = BinBuilder(queues, now, resources)
    for task in queues.started:
        if task not in draft.preempted:
            tokens = draft.room(task)
            if tokens > 0:
                draft.grant(task, tokens)
    for task in queues.waiting:
        full = not draft.tokens_left or draft.sequences_left <= 0
        if full or task.arrival_s >= before_s or draft.pages(task, task.tokens) > draft.open_pages:
            break
        draft.sequences_left -= 1
        draft.enter(task)
        draft.grant(task, draft.room(task))
    draft.rescue()
    plan = draft.plan
    plan.predicted_forward_s = cost.forward_s(draft.load)
    return plan


def runnable_steps(queues: TaskQueues, resources: Resources) -> list[Task]:
    """Fine-tune tasks with work to do that memory can hold: those in the middle of a step, then the first come.

    None while fine-tuning is throttled.
    """
    if queues.throttled:
        return []
    able = [
        task
        for task in queues.finetunes
        if task.has_work and task.held_pages + task.pages_for(task.tokens, resources.page_size) <= resources.total_pages
    ]
    return sorted(able, key=lambda task: not task.begun)


def train_only(
    tasks: Sequence[Task],
    queues: TaskQueues,
    now: float,
    resources: Resources,
    cost: CostModel,
    limit_s: float = math.inf,
    preempts: bool = False,
) -> Plan | None:
    """An iteration of fine-tuning alone, in which sequences stand still and keep their pages.

    Each of `tasks` does as much as is left to do of its step, the first one at least a token or a unit, the others as
    far as `limit_s` is predicted to suffice. Where the first finds no pages for its forward, the latest requests lose
    theirs if it `preempts`; else there is no such iteration yet.
    """
    draft = BinBuilder(queues, now, resources, serves=False)
    if preempts:
        draft.make_room(tasks[0])
    plan, free_pages = draft.plan, draft.free_pages
    for task in tasks:
        # Promises to prompts under way still hold: by the time that they run again, this step has ended.
        free_pages -= draft.pages(task, task.tokens)
        if free_pages < 0:
            break
        grant_finetune(draft, task, cost, limit_s, 0 if plan.grants else 1)
    plan.predicted_forward_s = cost.forward_s(draft.load)
    return plan if plan.grants else None
