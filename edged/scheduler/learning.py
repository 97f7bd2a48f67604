"""What a fine-tune task does of its step in one iteration.

Owns that arithmetic of tokens and units. Must not know why the task runs, nor who else does.
"""

from __future__ import annotations

from edged.scheduler.cost import CostModel
from edged.scheduler.draft import Draft
from edged.scheduler.task import Grant, Task


def learn(draft: Draft, task: Task, cost: CostModel, limit_s: float, at_least: int) -> None:
    """Grant forward tokens, then units, while the bin is predicted to take no longer than `limit_s`.

    With `at_least` the task gets as many tokens, as far as it has them and there is room, or one unit in any case.
    """
    plan = draft.plan
    tokens = units = 0
    most = draft.room(task)
    if most > 0:
        left_s = limit_s - plan.predicted_units_s
        tokens = cost.chunk(draft.load_beside(task), task.context, most, left_s, finetune=True)
        tokens = max(tokens, min(most, at_least))
        if tokens > 0:
            draft.take(task, tokens, finetune=True)
    if tokens == task.tokens:
        left_s = limit_s - cost.forward_s(draft.load)
        for unit in task.units[task.next_unit :]:
            unit_s = cost.unit_s(unit)
            if plan.predicted_units_s + unit_s > left_s and (units or tokens or not at_least):
                break
            plan.predicted_units_s += unit_s
            units += 1
    if tokens or units:
        plan.grants.append(Grant(task, tokens, units))
