"""The live tasks, filed by what they wait for, each queue in order of arrival.

Owns where a task is filed. Must not know priorities, costs or resources. MACE's priority grows linearly with the wait,
so within one kind the order of arrival is the order of priority, and nothing is sorted again while time passes.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from edged.scheduler.arrears import Arrears
from edged.scheduler.task import Grant, Kind, Task

arrival = attrgetter("arrival_s")


def _decode_arrival(grant: Grant) -> float:
    return grant.task.arrival_s


class Queues:
    """Tasks by state: `decodes` (as the grant each gets in every iteration), `started` prefills, which hold pages and
    go on before others enter, `waiting` prefills, and `finetunes` in no order."""

    __slots__ = ("_tasks", "arrears", "decodes", "finetunes", "started", "waiting")

    def __init__(self, arrears: Arrears) -> None:
        self._tasks: dict[int, Task] = {}
        self.arrears = arrears
        self.decodes: list[Grant] = []
        self.started: list[Task] = []
        self.waiting: list[Task] = []
        self.finetunes: list[Task] = []

    def get(self, task_id: int) -> Task | None:
        """The live task of that id."""
        return self._tasks.get(task_id)

    def file(self, task: Task, started: bool = False) -> None:
        """Put a task where its kind belongs; a prefill goes to `started` once it has run."""
        self._tasks[task.task_id] = task
        if task.kind is Kind.DECODE:
            insort(self.decodes, Grant(task, 1), key=_decode_arrival)
        elif task.kind is Kind.FINETUNE:
            self.finetunes.append(task)
        else:
            insort(self.started if started else self.waiting, task, key=arrival)

    def take(self, task: Task) -> bool:
        """Take a task out of its queue, before its kind changes; True if it was a started prefill."""
        del self._tasks[task.task_id]
        if task.kind is Kind.DECODE:
            at = next(index for index, grant in enumerate(self.decodes) if grant.task is task)
            del self.decodes[at]
        elif task.kind is Kind.FINETUNE:
            self.finetunes.remove(task)
        elif task in self.started:
            self.started.remove(task)
            return True
        else:
            self.waiting.remove(task)
        return False
