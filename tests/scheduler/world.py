"""A world in virtual time for the scheduler: a pool of pages, a device of known speed, requests and preference steps.

It does what the engine does (allocate, run, complete) and checks every plan against what the scheduler promises.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

from edged.scheduler.cost.prices import WINDOW_STEP, Load
from edged.scheduler.lookahead import LookaheadPlan
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import (
    CUTTABLE_UNITS,
    FinetuneTask,
    Grant,
    IterationResult,
    Kind,
    Plan,
    Resources,
    ServingTask,
    Task,
    TaskOutcome,
    Unit,
)


@dataclass
class Device:
    """How long things really take, in seconds; `noise` is the relative spread of one measurement."""

    pass_s: float = 0.020
    token_s: float = 0.0005
    decode_s: float = 0.0002
    key_s: float = 1e-7
    pair_s: float = 1e-8
    mixed_s: float = 0.0
    unit_token_s: float = 0.0001
    unit_base_s: float = 0.001
    free_tokens: int = 0
    free_rows: int = 0
    """Rows of a unit that take as long as one."""
    past_s: float = 0.0
    """Once where there are more than the free tokens."""
    noise: float = 0.0

    def forward_s(self, load: Load) -> float:
        tokens = load.prefill_tokens + load.decodes + load.finetune_tokens
        if not tokens:
            return 0.0
        beyond = max(0, tokens - self.free_tokens)
        return (
            self.pass_s
            + self.token_s * beyond
            + self.decode_s * load.decodes
            + self.key_s * load.context
            + self.pair_s * load.pairs
            + self.mixed_s * (0 < load.decodes < tokens)
            + self.past_s * (beyond > 0)
        )

    def unit_s(self, unit: Unit) -> float:
        return self.unit_base_s + self.unit_token_s * max(unit.num_tokens, self.free_rows)


@dataclass
class Life:
    """One request: what it asks for, and when its tokens came."""

    task: ServingTask
    prompt: int
    answer: int
    shared: int = 0
    made: int = 0
    token_times: list[float] = field(default_factory=list)
    preemptions: int = 0


@dataclass
class Tuning:
    """One adapter's fine-tune task: `steps` still to take, each `tokens` of forward and `units`."""

    task: FinetuneTask
    tokens: int
    units: tuple[Unit, ...]
    steps: int
    taken: int = 0
    run_times: list[float] = field(default_factory=list)
    work_s: float = 0.0


class World:
    """Runs a scheduler against a device. Like the engine it leaves out a grant for which, after all, no page is free
    (a preempted task shared its pages with others)."""

    def __init__(self, scheduler: Scheduler, resources: Resources, device: Device | None = None, seed: int = 0) -> None:
        self.scheduler = scheduler
        self.resources = resources
        self.device = device or Device()
        self.now = 0.0
        self.free = resources.total_pages
        self.lives: dict[int, Life] = {}
        self.tunings: dict[int, Tuning] = {}
        self.done: list[Life] = []
        self.longest_iteration_s = 0.0
        self.iterations = 0
        self.plans_ahead = False
        """Plan the next iteration while one runs; `foreseen` counts the plans that were used."""
        self.foreseen = 0
        self.foresight: LookaheadPlan | None = None
        self.busy_again_s = math.inf
        """When somebody asks for something next: nobody sleeps longer."""
        self._own: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        self._random = random.Random(seed)
        self._next_id = 0

    # -- in

    def ask(self, prompt: int, answer: int, shared: int = 0, tenant: str = "") -> Life:
        """A request whose first `shared` pages are another's, once it is admitted."""
        task = ServingTask(self._id(), Kind.PREFILL, self.now, num_tokens=prompt, tenant=tenant)
        life = self.lives[task.task_id] = Life(task, prompt, answer, shared)
        self.scheduler.add(task, self.now)
        return life

    def teach(self, tokens: int, units: list[Unit], steps: int = 1) -> Tuning:
        """A fine-tune task of `steps` steps."""
        task = FinetuneTask(self._id(), self.now, num_tokens=tokens, units=tuple(units), loss=0.69)
        tuning = self.tunings[task.task_id] = Tuning(task, tokens, tuple(units), steps)
        self.scheduler.add(task, self.now)
        return tuning

    def cancel(self, life: Life) -> None:
        """The client went away."""
        assert self.scheduler.remove(life.task.task_id) is life.task
        self._release(life.task)
        del self.lives[life.task.task_id]

    def run(self, iterations: int = 20_000) -> None:
        """Until all that was asked is done; fails if a plan is empty before, or `iterations` do not suffice."""
        while self.lives or self.tunings:
            plan = self.step()
            assert plan.grants or plan.preempt or plan.resume_s < math.inf, "nothing runs though tasks are live"
            assert self.iterations < iterations, "no end in sight"

    def _id(self) -> int:
        self._next_id += 1
        return self._next_id

    # -- one iteration

    def step(self) -> Plan:
        """Plan, check, run, complete; time advances by what the iteration took."""
        foresight, self.foresight = self.foresight, None
        plan = self.scheduler.plan(self.now, self.room(), foresight)
        self.foreseen += plan.foreseen
        self.check(plan)
        for task in plan.preempt:
            self._preempt(task)
        result = self._run(plan)
        self.iterations += 1
        self.scheduler.complete(result, self.now)
        for grant in plan.grants:
            if grant.window:
                self._leave_rest(grant)
        for outcome in result.outcomes:
            self._follow_up(outcome)
        self.check_pages()
        if not plan.grants and not plan.preempt and plan.resume_s < math.inf:
            self.now = max(self.now, min(plan.resume_s, self.busy_again_s))
        return plan

    def _leave_rest(self, grant: Grant) -> None:
        """The rows that a cut unit left are the next unit."""
        task = grant.task
        task.next_unit -= 1
        units = list(task.units)
        units[task.next_unit] = replace(
            units[task.next_unit], num_tokens=units[task.next_unit].num_tokens - grant.window
        )
        task.units = tuple(units)

    def room(self) -> Resources:
        """What the next bin may use."""
        return replace(self.resources, free_pages=self.free)

    def check(self, plan: Plan) -> None:
        """What every plan must keep to."""
        tasks = [grant.task for grant in plan.grants]
        assert len(set(tasks)) == len(tasks), "a task was granted twice in one bin"
        assert not set(tasks) & set(plan.preempt), "a preempted task was granted"
        assert len(set(plan.preempt)) == len(plan.preempt)
        for task in (*tasks, *plan.preempt):
            assert task.task_id in self.lives or task.task_id in self.tunings, "a finished task was planned"
        assert sum(grant.num_tokens for grant in plan.grants) <= self.resources.max_tokens
        for grant in plan.grants:
            task = grant.task
            assert 0 <= grant.num_tokens <= task.num_tokens
            assert grant.num_tokens or grant.units
            if task.kind is not Kind.FINETUNE:
                assert grant.units == grant.window == 0, "units of a request"
                continue
            assert grant.units <= len(task.units) - task.next_unit
            if grant.units:
                assert grant.num_tokens == task.num_tokens, "units before the end of the forward"
            if grant.window:
                cut = task.units[task.next_unit + grant.units - 1]
                assert cut.kind in CUTTABLE_UNITS
                assert 0 < grant.window < cut.num_tokens
                assert grant.window % WINDOW_STEP == 0
        needed = sum(self._needed(grant) for grant in plan.grants)
        assert needed == plan.pages
        assert needed <= self.free + sum(task.held_pages for task in plan.preempt)
        holders = {life.task for life in self.lives.values() if life.task.held_pages} - set(plan.preempt)
        holders |= {task for task in tasks if task.kind is not Kind.FINETUNE}
        assert len(holders) <= self.resources.max_sequences

    def check_pages(self) -> None:
        """No page is lost or held twice."""
        assert self.free >= 0
        assert self.free + sum(self._own.values()) == self.resources.total_pages

    def _needed(self, grant: Grant) -> int:
        task = grant.task
        return max(0, -(-(task.context + grant.num_tokens - task.capacity) // self.resources.page_size))

    def _run(self, plan: Plan) -> IterationResult:
        load = Load()
        outcomes = []
        units: list[tuple[Unit, float]] = []
        for grant in plan.grants:
            task = grant.task
            needed = self._needed(grant)
            if needed > self.free:
                continue
            self._allocate(task, needed)
            if task.kind is Kind.DECODE:
                load.decodes += 1
                load.context += task.context
            elif grant.num_tokens:
                load.add_chunk(grant.num_tokens, task.context, task.kind is Kind.FINETUNE)
            if task.kind is Kind.FINETUNE:
                granted = list(task.units[task.next_unit : task.next_unit + grant.units])
                if grant.window:
                    granted[-1] = replace(granted[-1], num_tokens=grant.window)
                units += [(unit, self.device.unit_s(unit) * self._noise()) for unit in granted]
            outcomes.append(TaskOutcome(task, grant.num_tokens, grant.units, self._next(grant)))
        if self.plans_ahead:
            self.foresight = self.scheduler.foresee(plan, self.now, self.room())
        forward_s = self.device.forward_s(load) * self._noise()
        spent_s = forward_s + sum(seconds for _, seconds in units)
        if load.finetune_tokens:
            bare = Load(load.prefill_tokens, load.decodes, 0, load.context, load.pairs)
            tuned_s = forward_s - self.device.forward_s(bare)
        else:
            tuned_s = 0.0
        self.now += max(spent_s, 1e-6)
        self.longest_iteration_s = max(self.longest_iteration_s, spent_s)
        for outcome in outcomes:
            if (tuning := self.tunings.get(outcome.task.task_id)) is None:
                if outcome.task.reader is not None and outcome.next_kind is not Kind.PREFILL:
                    outcome.task.reader.take(self.now)
            else:
                tuning.run_times.append(self.now)
                tuning.work_s += tuned_s + sum(seconds for _, seconds in units)
        return IterationResult(outcomes, forward_s, units)

    def _noise(self) -> float:
        return 1.0 + self.device.noise * (2.0 * self._random.random() - 1.0)

    def _next(self, grant: Grant) -> Kind | None:
        task = grant.task
        if task.kind is Kind.FINETUNE:
            tuning = self.tunings[task.task_id]
            ended = (
                grant.num_tokens == task.num_tokens
                and task.next_unit + grant.units == len(task.units)
                and not grant.window
            )
            return None if ended and tuning.steps == 1 else Kind.FINETUNE
        life = self.lives[task.task_id]
        if grant.num_tokens < task.num_tokens:
            return Kind.PREFILL
        return None if life.made + 1 >= life.answer else Kind.DECODE

    def _follow_up(self, outcome: TaskOutcome) -> None:
        """What the engine does with a task after the scheduler has advanced it."""
        task = outcome.task
        if task.kind is Kind.FINETUNE:
            tuning = self.tunings[task.task_id]
            if not task.num_tokens and task.next_unit == len(task.units):
                self._release(task)
                tuning.steps -= 1
                tuning.taken += 1
                if tuning.steps:
                    task.num_tokens, task.context, task.next_unit = tuning.tokens, 0, 0
                    task.units = tuning.units
                    task.underway = False
                    self.scheduler.update(task)
                else:
                    del self.tunings[task.task_id]
            return
        life = self.lives[task.task_id]
        if outcome.next_kind is not Kind.PREFILL:
            life.made += 1
            life.token_times.append(self.now)
        if outcome.next_kind is None:
            self._release(task)
            self.done.append(self.lives.pop(task.task_id))

    def _preempt(self, task: Task) -> None:
        self._release(task)
        if task.kind is Kind.FINETUNE:
            task.units = self.tunings[task.task_id].units
            self.scheduler.restart(task, self.tunings[task.task_id].tokens, self.now)
        else:
            life = self.lives[task.task_id]
            life.preemptions += 1
            self.scheduler.restart(task, life.prompt + life.made, self.now)

    # -- pages

    def _allocate(self, task: Task, pages: int) -> None:
        life = self.lives.get(task.task_id)
        if life is not None and not task.held_pages and life.shared:
            # Its first pages belong to another sequence: preempting it will not free them.
            self._shared[task.task_id] = min(life.shared, pages)
        shared = self._shared.get(task.task_id, 0) if not task.held_pages else 0
        self.free -= pages - shared
        self._own[task.task_id] = self._own.get(task.task_id, 0) + pages - shared
        task.held_pages += pages
        task.capacity += pages * self.resources.page_size

    def _release(self, task: Task) -> None:
        self.free += self._own.pop(task.task_id, 0)
        self._shared.pop(task.task_id, None)
        task.held_pages = task.capacity = 0
