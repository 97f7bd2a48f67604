"""Justitia: the application goes next that would end first under fair sharing; nobody overtakes it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from itertools import chain, islice
from typing import Any

from edged.scheduler.fairness.order import MAX_SHOWN, FairOrder
from edged.scheduler.fairness.training import TrainingTurns
from edged.scheduler.fairness.virtual_counters import VirtualCounters
from edged.scheduler.fairness.virtual_time import Application, VirtualTime
from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.policies.base import Order
from edged.scheduler.task import IterationResult, Kind, Plan, ServingTask, Task
from edged.settings.load import FairnessSettings

_MAX_ENDED = 4096
"""Ended runs whose lateness is kept."""


def run_of(task: ServingTask) -> str:
    """Return the run that a call belongs to; one that belongs to none is a run of its own."""
    return task.run or f"#{task.task_id}"


class JustitiaOrder(FairOrder):
    """The run with the least tag enters next. Calls that are in memory are not preempted for it.

    A run is open from its first call until `fairness.idle_s` after its last one. It is charged as its tokens are made,
    by the K/V rows that it holds then.
    """

    state_is_of = ("by",)

    def __init__(self, fairness: FairnessSettings, row_order: Order) -> None:
        super().__init__(fairness, row_order)
        self.clock = VirtualTime()
        self.training = TrainingTurns(VirtualCounters(self.weight))
        self._runs: dict[int, Application] = {}
        """The run of each live call, by the number of its task."""
        self._idle: OrderedDict[str, float] = OrderedDict()
        """When runs without a live call are closed, the next one first."""
        self.late_s: OrderedDict[str, float] = OrderedDict()
        """Seconds by which runs' last calls ended later than under fair sharing; 0 where they did not."""

    def flow(self, task: ServingTask) -> str:
        """Return the run."""
        return run_of(task)

    def place(self, task: ServingTask) -> tuple[float, ...]:
        """Return the tag of a call's run, and its place in the run; a run that was not heard of begins now."""
        run = self._runs.get(task.task_id) or self.clock.applications.get(run_of(task))
        at_s, number = self.key(task)
        return self.clock.now if run is None else run.tag, at_s, number

    def rank(self, prompts: list[ServingTask], now: float) -> tuple[list[ServingTask], list[ServingTask]]:
        """Return prompts by their places, twice: live calls by those in their runs at which they were filed."""
        known = self._runs.get
        places = [(run.tag, task.queue_key, task) for task in prompts if (run := known(task.task_id))]
        if len(places) < len(prompts):
            return super().rank(prompts, now)
        ranked = [task for _, _, task in sorted(places)]
        return ranked, ranked

    def first(self, flows: Mapping[Hashable, list[ServingTask]], most: int) -> list[ServingTask]:
        """Return the prompts that enter next, run by run."""
        # A few are sorted sooner than they are found among all open ones.
        if len(flows) <= 2 * most:
            known = self.clock.applications.get
            places = sorted([(run.tag, run.number, tasks) for key, tasks in flows.items() if (run := known(key))])
            return list(islice(chain.from_iterable([tasks for _, _, tasks in places]), most))
        ranked = self.clock.ranked()
        return list(islice(chain.from_iterable(flows[run.key] for run in ranked if run.key in flows), most))

    def arrived(self, task: Task, now: float) -> None:
        """Open the call's run, or take it up again with its old tag."""
        if task.kind is Kind.FINETUNE:
            return
        run = run_of(task)
        if run not in self.clock.applications:
            sharer = task.tenant if self.fairness.by == "user" else run
            self.clock.open(run, sharer, self.weight(task.tenant), task.run_cost or task.num_tokens)
        self._idle.pop(run, None)
        self._runs[task.task_id] = self.clock.applications[run]
        self._runs[task.task_id].calls += 1

    def left(self, task: Task, now: float) -> None:
        """Note the end of a run's last call, which may be followed by others; charge a step that is done."""
        if task.kind is Kind.FINETUNE:
            self.training.ended(task)
            return
        run = self._runs.pop(task.task_id, None)
        if run is None:
            return
        run.calls -= 1
        if run.calls:
            return
        self.late_s[run.key] = max(0.0, now - run.fair_end_s)
        self.late_s.move_to_end(run.key)
        if len(self.late_s) > _MAX_ENDED:
            self.late_s.popitem(last=False)
        if task.run:
            self._idle[run.key] = now + self.fairness.idle_s
        else:
            self.clock.close(run.key)

    def before(self, queues: TaskQueues, now: float) -> None:
        """Close runs of which nothing came for long enough."""
        while self._idle and (first := next(iter(self._idle.items())))[1] <= now:
            del self._idle[first[0]]
            self.clock.close(first[0])

    def completed(self, plan: Plan, result: IterationResult, finetune_s: float, now: float) -> None:
        """Charge runs for the rows that they held as their tokens were made."""
        work: dict[str, float] = {}
        for outcome in result.outcomes:
            task = outcome.task
            if task.kind is not Kind.FINETUNE and outcome.next_kind is not Kind.PREFILL:
                run = self._runs.get(task.task_id)
                if run is not None:
                    rows = task.context - task.pruned + outcome.num_tokens + 1.0
                    if task.kind is Kind.DECODE:
                        # Each of its tokens held the rows before it.
                        count = outcome.num_tokens
                        rows = count * (rows - count + 1.0) + count * (count - 1) / 2.0
                    work[run.key] = work.get(run.key, 0.0) + rows
        self.clock.serve(work, now)
        self.training.completed(result, finetune_s, self.cost.token_s)

    def report(self) -> dict[str, Any]:
        """Return the virtual time, and the open runs in the order of their tags."""
        known = list(self.clock.applications.values())
        ranked = sorted(known, key=lambda run: run.tag)
        runs = [
            {
                "run": run.key.partition("/")[2] or run.key,
                "user": run.key.partition("/")[0] if "/" in run.key else run.sharer,
                **{name: getattr(run, name) for name in ("calls", "tag", "cost", "served")},
            }
            for run in islice(ranked, MAX_SHOWN)
        ]
        return {"policy": "justitia", "virtual_time": self.clock.now, "open": len(known), "runs": runs, "users": {}}
