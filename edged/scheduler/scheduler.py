"""The scheduler's lifecycle: tasks enter, are planned, advance, wait again, and leave.

Deterministic: the clock is passed in.
"""

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar, TypeVarTuple

from edged.runtime import logs
from edged.scheduler.cost.model import CostModel
from edged.scheduler.cost.prices import Load
from edged.scheduler.fairness.justitia import JustitiaOrder
from edged.scheduler.fairness.order import FairOrder
from edged.scheduler.fairness.turns import fair_order
from edged.scheduler.lookahead import LookaheadPlan, advanced
from edged.scheduler.planning.finetune_budget import DutyCycle
from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.planning.slo import SloTargets
from edged.scheduler.policies.base import Part, Policy
from edged.scheduler.policies.phased import FCFS
from edged.scheduler.policies.registry import ROWS
from edged.scheduler.task import FINETUNE, Grant, IterationResult, Kind, Plan, Resources, ServingTask, Task
from edged.settings.load import FairnessSettings, SchedulerSettings

log = logging.getLogger(__name__)
T = TypeVar("T")
Happened = TypeVarTuple("Happened")


class Scheduler:
    """Plans iterations and applies their results.

    A task is the same object from `add` until an outcome retires it or `remove` takes it away; only the engine sets its
    `held_pages` and `capacity`, only the scheduler its kind, `num_tokens`, `context` and `next_unit` meanwhile (but see
    `update`).
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        cost: CostModel,
        policy: Policy | None = None,
        fairness: FairnessSettings | None = None,
    ) -> None:
        """Take `policy`, or where it is None the one that the settings name; `fairness` wraps its order."""
        self.policy = policy or Policy(ROWS[settings.policy], settings, cost)
        self.degraded = ""
        """Reason why the policy is not asked any more; "" while it is."""
        self._plain = Policy(FCFS, settings, cost)
        self.cost = cost
        self._running = Plan()
        self._parked: dict[int, ServingTask] = {}
        self._now = 0.0
        self.throttle = DutyCycle()
        self.queues = TaskQueues(self.policy.flow_order)
        self.targets = SloTargets(settings, cost)
        if fairness is not None:
            self.share_by(fairness)

    def share_by(self, fairness: FairnessSettings) -> None:
        """Order users or applications by other settings; what they had counts on where the policy is the same."""
        policy = self.policy
        order = fair_order(fairness, policy.row_order, policy.flow_order)
        if order is policy.flow_order:
            return
        policy.take_order(order)
        order.configure(policy.row_order.settings, self.cost)
        # Of all: one that is preempted later waits again.
        for task in (*self.queues.tasks.values(), *self._parked.values()):
            order.arrived(task, self._now)
        if not self.degraded:
            self.queues.refile(order)

    def late_s(self, run: str) -> float:
        """Return how much later than under fair sharing a run ended; 0 where it did not, or is not known."""
        order = self.policy.flow_order
        return order.late_s.get(run, 0.0) if isinstance(order, JustitiaOrder) else 0.0

    def fairness_report(self) -> dict[str, Any]:
        """Return whose turn it is, as the status shows it; any thread may ask."""
        order = self.policy.flow_order
        if isinstance(order, FairOrder):
            return order.report()
        return {"policy": "off", "virtual_time": 0.0, "open": 0, "runs": [], "users": {}}

    def configure(self, settings: SchedulerSettings) -> None:
        """Decide by other settings from the next plan on; the policy keeps its state; a failed one is asked again."""
        degraded, self.degraded = self.degraded, ""
        self._tell(Part.configure, settings, self.cost)
        self.targets = SloTargets(settings, self.cost)
        if degraded and not self.degraded:
            try:
                self.queues.refile(self.policy.flow_order)
            except Exception as error:
                self._degrade(error)

    def add(self, task: Task, now: float) -> None:
        """Add a task; a deadline of inf becomes its TTFT or TBT target. ValueError if its id is live already."""
        if task.task_id in self.queues.tasks:
            raise ValueError(f"task {task.task_id} is scheduled already: ids must be unique among live tasks")
        if task.kind is not Kind.FINETUNE and math.isinf(task.deadline_s):
            if task.kind is Kind.PREFILL:
                task.deadline_s = task.arrival_s + self.targets.ttft_s(task.service, task.num_tokens, task.context)
            else:
                self._set_due([task], self.queues.decodes, now)
        if self._parked.pop(task.task_id, None) is None:
            self._tell(Part.arrived, task, now)
        # A request that was held back comes with the moment of its arrival.
        self._now = max(self._now, now)
        self._guarded(self.queues.file, task)

    def remove(self, task_id: int) -> Task | None:
        """Forget a cancelled task and return it; None if no such task is live."""
        task = self.queues.tasks.get(task_id)
        if task is not None:
            self._retire(task)
        elif (parked := self._parked.pop(task_id, None)) is not None:
            self._tell(Part.left, parked, self._now)
        return task

    def park(self, task: ServingTask) -> None:
        """Take a live task out of the queues until it is added again or removed: it has not left meanwhile."""
        self._take(task)
        self._parked[task.task_id] = task

    def restart(self, task: Task, num_tokens: int, now: float) -> None:
        """Start a preempted task, whose pages are gone, over with `num_tokens` to compute; it keeps its arrival."""
        self._take(task)
        self._now = now
        task.num_tokens = num_tokens
        task.context = task.held_pages = task.capacity = 0
        if task.kind is Kind.FINETUNE:
            task.next_unit, task.ahead, task.underway = 0, 0, False
        else:
            task.kind, task.pruned = Kind.PREFILL, 0
            task.preemptions += 1
        self._guarded(self.queues.file, task)

    def update(self, task: Task) -> None:
        """File a waiting task that the engine changed anew: a loss, a prefix hit, or a fine-tune task's next step.

        The next step of a fine-tune task has context 0 and next_unit 0, and is not `underway`. One that has no work is
        removed, not updated: fine-tuning is owed work for as long as it has tasks.
        """
        self._guarded(self.queues.file, task, self._take(task))

    def plan(self, now: float, resources: Resources, foresight: LookaheadPlan | None = None) -> Plan:
        """Return the next iteration's bin, the foreseen one where it came true; empty only if no task can run."""
        self._tell(Part.before, self.queues, now)
        self.queues.throttled = self.throttle.closed(now)
        plan = foresight.corrected(self.queues, now) if foresight is not None else None
        if plan is None:
            plan = self._ask(lambda policy: policy.fill.plan(policy, self.queues, now, resources))
        if self.queues.throttled and self.queues.finetunes and not plan.grants:
            plan.resume_s = min(plan.resume_s, self.throttle.opens_s(now))
        self._running = plan
        self._tell(Part.begun, plan, now)
        return plan

    def foresee(self, plan: Plan, now: float, resources: Resources) -> LookaheadPlan | None:
        """Plan the iteration after `plan`, which has begun at `now` and has its pages (no longer in `resources`).

        None where `plan` fine-tunes or preempts: what that leaves to do is known when it is done.
        """
        if any(grant.task.kind is Kind.FINETUNE for grant in plan.grants) or plan.preempt:
            return None
        end_s = now + plan.predicted_forward_s
        queues, decoded = advanced(self.queues, plan, resources.page_size)
        for task in decoded:
            if task.reader is not None:
                task.reader = replace(task.reader)
                task.reader.take(end_s)
        self._set_due(decoded, queues.decodes, end_s)
        ahead = self._ask(lambda policy: policy.fill.plan(policy, queues, end_s, resources))
        return LookaheadPlan(ahead, queues.tasks, self.queues.filings, resources.page_size, now, end_s)

    def order(self, task: ServingTask) -> tuple[float, ...]:
        """Return a prompt's place among all at this moment; the least goes first."""
        return self._ask(lambda policy: policy.flow_order.place(task))

    def rank(self, prompts: list[ServingTask], now: float) -> list[ServingTask]:
        """Return prompts, also parked ones, in the order in which they would enter at `now`."""
        return self._ask(lambda policy: policy.flow_order.rank(prompts, now)[0])

    def next_steps(self, adapters: Collection[str], most: int) -> list[str]:
        """Return the adapters, of those that are ready, whose steps are next, at most so many."""
        return self._ask(lambda policy: policy.flow_order.next_steps(adapters, most))

    @property
    def lent_s(self) -> float:
        """Seconds of fine-tuning so far in time that readers had no need of."""
        return self.policy.finetune_share.lent_s

    # -- a policy that fails -----------------------------------------------------------------------------------------

    def _ask(self, question: Callable[[Policy], T]) -> T:
        """Return the policy's answer, or that of first come, first served once the policy has failed."""
        if not self.degraded:
            try:
                return question(self.policy)
            except Exception as error:
                self._degrade(error)
        return question(self._plain)

    def _tell(self, hook: Callable[[Part, *Happened], None], *happened: *Happened) -> None:
        try:
            for heard in self.policy.hooks[hook]:
                heard(*happened)
        except Exception as error:
            self._degrade(error)

    def _guarded(self, change: Callable[[*Happened], T], *arguments: *Happened) -> T:
        """Call `change` on the queues; where the policy's order fails, again in the order of arrival."""
        try:
            return change(*arguments)
        except Exception as error:
            if self.degraded:
                raise
            self._degrade(error)
            return change(*arguments)

    def _take(self, task: Task) -> bool:
        """Take a task out of its queue; True if it was a started prefill. ValueError if it is not live."""
        if self.queues.tasks.get(task.task_id) is not task:
            raise ValueError(f"task {task.task_id} is not scheduled: add it first")
        return self._guarded(self.queues.take, task)

    def _degrade(self, error: Exception) -> None:
        if self.degraded:
            return
        name = self.policy.name
        message = f"the policy {name} failed: requests are served first come, first served"
        logs.event(log, logging.ERROR, "policy_failed", message, exc_info=True, policy=name)
        self.degraded = (
            f"the policy {name} failed ({type(error).__name__}: {error}): requests are served first "
            "come, first served, and fine-tuning waits, until edged is reloaded or started again"
        )
        self.queues.refile(self._plain.flow_order)

    def complete(self, result: IterationResult, now: float) -> None:
        """Learn from an iteration and advance its tasks. A grant without an outcome leaves its task as it was."""
        queues = self.queues
        self._now = now
        finetune_s = self.cost.observe(result)
        self.throttle.settle(finetune_s, now)
        self._tell(Part.completed, self._running, result, finetune_s, now)
        decoded: list[ServingTask] = []
        for outcome in result.outcomes:
            task, kind = outcome.task, outcome.next_kind
            if queues.tasks.get(task.task_id) is not task:
                continue
            task.context += outcome.num_tokens
            if task.kind is FINETUNE and not task.num_tokens:
                task.ahead -= outcome.num_tokens
            else:
                task.num_tokens -= outcome.num_tokens
            if task.kind is FINETUNE:
                task.next_unit += outcome.units
                task.underway |= bool(outcome.num_tokens or outcome.units)
            elif kind is Kind.DECODE:
                if task.kind is Kind.PREFILL:
                    if task.num_tokens:
                        left = f"{task.num_tokens} tokens of its prompt are left"
                        raise ValueError(f"task {task.task_id} cannot decode: {left}")
                    self._take(task)
                    task.kind = Kind.DECODE
                    self._guarded(queues.file, task)
                task.num_tokens = 1
                decoded.append(task)
                continue
            if kind is None:
                self._retire(task)
            elif kind is Kind.PREFILL and outcome.num_tokens:
                self._take(task)
                self._guarded(queues.file, task, True)
        self._set_due(decoded, queues.decodes, now)

    def counts(self) -> dict[Kind, int]:
        """Return the number of live tasks by kind."""
        queues = self.queues
        return {
            Kind.PREFILL: len(queues.started) + queues.count_waiting,
            Kind.DECODE: len(queues.decodes),
            Kind.FINETUNE: len(queues.finetunes),
        }

    def _set_due(self, tasks: Sequence[ServingTask], decodes: Sequence[Grant[ServingTask]], now: float) -> None:
        """Set when the next tokens of `tasks`, which are among `decodes`, are due."""
        if not tasks:
            return
        adapters = {grant.task.adapter for grant in decodes}
        adapters.discard(0)
        context = sum([grant.task.context - grant.task.pruned for grant in decodes])
        alone_s = self.cost.priced_s(Load(decodes=len(decodes), context=context, adapters=len(adapters)))
        dues_s = self._ask(lambda policy: policy.due.due_s(tasks, alone_s, now))
        for task, due_s in zip(tasks, dues_s, strict=True):
            task.deadline_s = math.inf if task.candidate else due_s

    def _retire(self, task: Task) -> None:
        self._take(task)
        self._tell(Part.left, task, self._now)
