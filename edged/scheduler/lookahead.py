"""The plan of the iteration after the present one, made while the present one runs.

A decode is expected to go on, a chunk to be computed; an answer that ends instead only takes its grant away. The plan's
predicted seconds are from before the cost model learned from the present iteration.
"""

from dataclasses import dataclass, replace
from operator import attrgetter

from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.task import FINETUNE, PREFILL, Grant, Kind, Plan, ServingTask, Task

_LATE = 0.25
"""Chunks are sized for the time that is left; after an iteration longer by more than this share they are sized anew."""

_state = attrgetter("kind", "num_tokens", "context", "capacity")
"""Fields of a task that have to be as foreseen; its deadline may differ by the iteration's prediction error."""
_progress = attrgetter("units", "next_unit")
"""Those that a fine-tune task has besides."""


@dataclass(frozen=True, slots=True)
class LookaheadPlan:
    """`plan` is over copies of the tasks; `tasks` are these by id, as they are expected to be at `now`.

    Waiting prompts that had no part in the iteration are not copied, there may be thousands: `filings` tells whether
    they are still the same.
    """

    plan: Plan
    tasks: dict[int, Task]
    filings: int
    page_size: int
    made_s: float
    now: float

    def corrected(self, queues: TaskQueues, now: float) -> Plan | None:
        """Return the plan over the real tasks, without ended ones; None when anything else was not foreseen."""
        late = now - self.now > _LATE * (self.now - self.made_s)
        if self.plan.preempt or (late and any(grant.task.kind is not Kind.DECODE for grant in self.plan.grants)):
            return None
        live = queues.tasks
        if queues.filings != self.filings or any(task.task_id not in self.tasks for task in queues.active()):
            return None
        if any(task_id in live and _state(copy) != _state(live[task_id]) for task_id, copy in self.tasks.items()):
            return None
        if any(_progress(self.tasks[step.task_id]) != _progress(step) for step in queues.finetunes):
            return None
        grants = [
            Grant(live[grant.task.task_id], grant.num_tokens, grant.units, grant.window)
            for grant in self.plan.grants
            if grant.task.task_id in live
        ]
        pages = sum(grant.task.pages_for(grant.num_tokens, self.page_size) for grant in grants)
        return replace(self.plan, grants=grants, pages=pages, foreseen=True) if grants else None


def advanced(queues: TaskQueues, plan: Plan, page_size: int) -> tuple[TaskQueues, list[ServingTask]]:
    """Return queues of copies as they will be when every serving grant of `plan` is computed, and the copies that will
    have got a token by then, whose deadlines are not set.

    Prompts that `plan` leaves waiting are not copied.
    """
    ahead = TaskQueues(queues.order)
    ahead.throttled = queues.throttled
    granted = {grant.task.task_id: grant.num_tokens for grant in plan.grants}
    started = {task.task_id for task in queues.started}
    running = list(queues.active())
    known = {task.task_id for task in running}
    entered = [grant.task for grant in plan.grants if grant.task.task_id not in known and grant.task.kind is PREFILL]
    ahead.flows = {flow: tasks.copy() for flow, tasks in queues.flows.items()}
    for prompt in entered:
        ahead.take_waiting(prompt)
    decoded: list[ServingTask] = []
    for task in running + entered:
        copy = replace(task)
        # A prompt whose beginning was found in the cache has less to do than was granted.
        num_tokens = min(granted.get(task.task_id, 0), task.num_tokens)
        if num_tokens and copy.kind is not FINETUNE:
            _advance(copy, num_tokens, page_size)
            if copy.kind is Kind.DECODE:
                decoded.append(copy)
        ahead.file(copy, started=task.task_id in started or num_tokens > 0)
    return ahead, decoded


def _advance(task: ServingTask, num_tokens: int, page_size: int) -> None:
    pages = task.pages_for(num_tokens, page_size)
    task.held_pages += pages
    task.capacity += pages * page_size
    task.context += num_tokens
    task.num_tokens -= num_tokens
    if not task.num_tokens:
        task.kind, task.num_tokens = Kind.DECODE, 1
