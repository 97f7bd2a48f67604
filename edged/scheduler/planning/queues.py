"""Task queues: live tasks by state, each queue in an order that time does not change."""

from bisect import insort
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import chain
from operator import attrgetter
from typing import Protocol

from edged.scheduler.task import FinetuneTask, Grant, Kind, ServingTask, Task

by_arrival: Callable[[Task], tuple[float, int]] = attrgetter("arrival_s", "task_id")
_queue_key = attrgetter("queue_key")
_grant_arrival: Callable[[Grant[Task]], tuple[float, int]] = attrgetter("task.arrival_s", "task.task_id")


class TaskOrder(Protocol):
    """The order of prompts in the queues: see `edged.scheduler.policies.base.Order`."""

    strict: bool

    def flow(self, task: ServingTask) -> Hashable: ...

    def first(self, flows: Mapping[Hashable, list[ServingTask]], most: int) -> list[ServingTask]: ...

    def key(self, task: ServingTask) -> tuple[float, int]: ...


class TaskQueues:
    """Tasks by state: `decodes`, by arrival, each as the grant that it gets in every iteration; `started` prefills,
    which hold pages already, and `waiting` ones, both in the policy's order; `finetunes` in no order.

    Arrivals and deadlines stay as they are while a task is in its queue, so nothing is sorted again as time passes.
    """

    __slots__ = ("decodes", "filings", "finetunes", "flows", "order", "started", "tasks", "throttled")

    def __init__(self, order: TaskOrder) -> None:
        self.order = order
        self.tasks: dict[int, Task] = {}
        """All live tasks by id."""
        self.decodes: list[Grant[ServingTask]] = []
        self.started: list[ServingTask] = []
        self.flows: dict[Hashable, list[ServingTask]] = {}
        """Waiting prompts by flow; none is empty."""
        self.filings = 0
        """Number of times that a prompt was put among the waiting ones: unchanged while none came and none changed."""
        self.finetunes: list[FinetuneTask] = []
        self.throttled = False
        """Whether fine-tuning waits because it has had its share of the time; it may still give its pages back."""

    @property
    def count_waiting(self) -> int:
        """The number of waiting prompts."""
        return sum(map(len, self.flows.values()))

    @property
    def any_order(self) -> Iterator[ServingTask]:
        """The waiting prompts in no order."""
        return chain.from_iterable(self.flows.values())

    def first(self, most: int) -> list[ServingTask]:
        """Return the waiting prompts that are next, at most so many."""
        if len(self.flows) < 2:
            return next(iter(self.flows.values()), [])[:most]
        return self.order.first(self.flows, most)

    def file(self, task: Task, started: bool = False) -> None:
        """Put a task where its kind belongs; a prefill goes to `started` once it has run."""
        if task.kind is Kind.DECODE:
            insort(self.decodes, Grant(task, 1), key=_grant_arrival)
        elif task.kind is Kind.FINETUNE:
            self.finetunes.append(task)
        else:
            task.queue_key = self.order.key(task)
            if started:
                queue = self.started
            else:
                self.filings += 1
                queue = self.flows.setdefault(self.order.flow(task), [])
            insort(queue, task, key=_queue_key)
        self.tasks[task.task_id] = task

    def refile(self, order: TaskOrder) -> None:
        """File all prompts anew, in another order."""
        flows: dict[Hashable, list[ServingTask]] = {}
        # All are asked before anything changes: an order that fails leaves the queues as they were.
        waiting = [(order.flow(task), task) for task in self.any_order]
        places = {task: order.key(task) for task in (*self.started, *self.any_order)}
        for task, place in places.items():
            task.queue_key = place
        for flow, task in waiting:
            insort(flows.setdefault(flow, []), task, key=_queue_key)
        self.order, self.started, self.flows = order, sorted(self.started, key=_queue_key), flows
        self.filings += 1

    def active(self) -> Iterator[Task]:
        """Yield all tasks but the waiting prompts."""
        yield from [grant.task for grant in self.decodes]
        yield from self.started
        yield from self.finetunes

    def take(self, task: Task) -> bool:
        """Take a task out of its queue, before its kind changes; True if it was a started prefill."""
        started = task.kind is Kind.PREFILL and task in self.started
        if task.kind is Kind.DECODE:
            at = next(index for index, grant in enumerate(self.decodes) if grant.task is task)
            del self.decodes[at]
        elif task.kind is Kind.FINETUNE:
            self.finetunes.remove(task)
        elif started:
            self.started.remove(task)
        else:
            self.take_waiting(task)
        del self.tasks[task.task_id]
        return started

    def take_waiting(self, task: ServingTask) -> None:
        """Take a waiting prompt out of its flow."""
        flow = self.order.flow(task)
        self.flows[flow].remove(task)
        if not self.flows[flow]:
            del self.flows[flow]
