"""The order of MACE's prompts when not all can be in time: those that can go first, others wait for a bounded time."""

from collections.abc import Hashable, Mapping
from itertools import takewhile
from operator import attrgetter

from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.policies.base import Order
from edged.scheduler.policies.hybrid import LOOK_AHEAD
from edged.scheduler.policies.mace.admission import MaceAdmission
from edged.scheduler.policies.mace.patience import Patience
from edged.scheduler.task import IterationResult, Kind, Plan, ServingTask, Task

FIRST, HOPEFUL, LATE = 0, 1, 2
"""Flows of the queue, in their order."""

_number, _deadline, _rest = attrgetter("task_id"), attrgetter("deadline_s"), attrgetter("num_tokens")


class Triage(Order):
    """Prompts that can be in time before late ones, which go first once their `Patience` ends.

    Those that can be are in order of their deadlines where that saves all of them, else the shortest rest of a prompt
    is first. A preempted answer goes before all: its reader has begun to read.
    """

    def __init__(self) -> None:
        # By task id, under which plans made ahead know copies of tasks.
        self._flows: dict[int, int] = {}
        self._answered: set[int] = set()
        self._begun: list[ServingTask] = []
        """Tasks that had their first token in the latest iteration."""
        self._patience = Patience()

    def flow(self, task: ServingTask) -> Hashable:
        """Return the flow that `before` last found a prompt to belong to."""
        return self._flows.get(task.task_id, HOPEFUL)

    def flow_key(self, flow: Hashable) -> float:
        """Return the place of a flow: its number."""
        assert isinstance(flow, int)
        return flow

    def first(self, flows: Mapping[Hashable, list[ServingTask]], most: int) -> list[ServingTask]:
        """Return the next prompts, flow by flow."""
        first_ones, hopeful, late = flows.get(FIRST, []), flows.get(HOPEFUL, []), flows.get(LATE, [])
        return [*first_ones[:most], *hopeful[:most], *late[:most]][:most]

    def key(self, task: ServingTask) -> tuple[float, int]:
        """Return the deadline of a prompt, of one that was given up the moment at which it goes first."""
        number = task.task_id
        return self._patience.due_s(task) if number in self._flows else task.deadline_s, number

    def arrived(self, task: Task, now: float) -> None:
        """Note how long a prompt may wait."""
        if task.kind is Kind.PREFILL:
            self._patience.arrived(task, self.cost.token_s)

    def left(self, task: Task, now: float) -> None:
        """Forget it."""
        self._patience.left(task)
        self._flows.pop(task.task_id, None)
        self._answered.discard(task.task_id)

    def completed(self, plan: Plan, result: IterationResult, finetune_s: float, now: float) -> None:
        """Note which tasks have a first token, and what prompts take."""
        self._patience.completed(result, finetune_s)
        for outcome in result.outcomes:
            if outcome.task.kind is Kind.PREFILL and outcome.next_kind is Kind.DECODE:
                self._answered.add(outcome.task.task_id)
                self._begun.append(outcome.task)

    def before(self, queues: TaskQueues, now: float) -> None:
        """File anew the prompts that have become late, and those that have been it too long."""
        for task in self._begun:
            # That it was late once is no reason to let it wait if it loses its pages.
            if task.kind is Kind.DECODE:
                self._flows.pop(task.task_id, None)
        self._begun.clear()
        flows = queues.flows
        token_s = self.cost.token_s
        # Whose first token is late whatever is done.
        late = [
            task for task in flows.get(HOPEFUL, ())[:LOOK_AHEAD] if now + task.num_tokens * token_s > task.deadline_s
        ]
        moves = [(task, FIRST if task.task_id in self._answered else LATE) for task in late]
        if (waited := flows.get(LATE)) and waited[0].queue_key[0] <= now:
            moves += [(task, FIRST) for task in takewhile(lambda task: task.queue_key[0] <= now, waited)]
        for task, flow in moves:
            queues.take_waiting(task)
            self._flows[task.task_id] = flow
            queues.file(task)

    def rank(self, prompts: list[ServingTask], now: float) -> tuple[list[ServingTask], list[ServingTask]]:
        """Return prompts in their order at `now`, and those that can be in time."""
        answered, patience, token_s = self._answered, self._patience, self.cost.token_s
        hopeful: list[ServingTask] = []
        first_ones: dict[ServingTask, float] = {}
        late: dict[ServingTask, float] = {}
        for task in prompts:
            in_time = now <= (deadline_s := task.deadline_s) and now + task.num_tokens * token_s <= deadline_s
            if in_time and task.task_id not in answered:
                hopeful.append(task)
                continue
            due_s = patience.due_s(task)
            if due_s > now and task.task_id not in answered:
                late[task] = due_s
            else:
                first_ones[task] = due_s
        # Two keys in turn: a pair of them is a new tuple for each prompt.
        hopeful.sort(key=_number)
        hopeful.sort(key=_deadline)
        end_s = now
        for task in hopeful:
            end_s += task.num_tokens * token_s
            if end_s > task.deadline_s:
                # Of equals the one that is due first.
                hopeful.sort(key=_rest)
                break
        urgent = sorted(first_ones, key=first_ones.__getitem__)
        return [*urgent, *hopeful, *sorted(late, key=late.__getitem__)], hopeful


class PatientAdmission(MaceAdmission):
    """MACE's admission for an order that puts late prompts last: best fit may put them off for eight targets."""

    patience = 8.0

    def overdue_s(self, task: ServingTask) -> float:
        """Return the moment from which on nobody overtakes a prompt."""
        return task.arrival_s + self.patience * (task.deadline_s - task.arrival_s)
