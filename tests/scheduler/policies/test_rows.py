"""Two rows that only tests have, a fair queue and one that pauses decodes: a policy is its parts, and nothing else."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from edged.scheduler.cost.model import CostModel, roofline
from edged.scheduler.planning.bin_builder import BinBuilder
from edged.scheduler.planning.queues import TaskQueues, by_arrival
from edged.scheduler.policies.base import Entry, FinetuneShare, Order, Policy, Row
from edged.scheduler.policies.mace.admission import MaceAdmission
from edged.scheduler.policies.mace.policy import MACE
from edged.scheduler.policies.phased import FCFS
from edged.scheduler.policies.registry import ROWS
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import IterationResult, Kind, Plan, Resources, ServingTask, Task, TaskOutcome
from edged.settings.load import SchedulerSettings
from tests.scheduler.policies.test_policies import add_decode, granted, resources
from tests.scheduler.world import World

ROOT = Path(__file__).parents[3]


class LeastServed(Order):
    """The tenant whose requests got the fewest tokens first (virtual token counters; Sheng et al., OSDI 2024).

    One that comes back after a rest has saved nothing up: its counter is lifted to the least of those who are there.
    """

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self.live: Counter[str] = Counter()

    def flow(self, task: ServingTask) -> str:
        return task.tenant

    def flow_key(self, flow: object) -> float:
        return self.served[str(flow)]

    def arrived(self, task: Task, now: float) -> None:
        if task.kind is not Kind.FINETUNE:
            if not self.live[task.tenant]:
                least = min((self.served[tenant] for tenant in +self.live), default=0.0)
                self.served[task.tenant] = max(self.served.get(task.tenant, 0.0), least)
            self.live[task.tenant] += 1

    def left(self, task: Task, now: float) -> None:
        if task.kind is not Kind.FINETUNE:
            self.live[task.tenant] -= 1

    def completed(self, plan: Plan, result: IterationResult, finetune_s: float, now: float) -> None:
        for outcome in result.outcomes:
            if outcome.task.kind is not Kind.FINETUNE:
                self.served[outcome.task.tenant] += outcome.num_tokens


class TwoAtOnce(MaceAdmission):
    """The two decodes with the fewest tokens run, the others stand still."""

    def choose(self, builder: BinBuilder, queues: TaskQueues, finetune_share: FinetuneShare, now: float) -> Entry:
        entry = super().choose(builder, queues, finetune_share, now)
        decodes = sorted([grant.task for grant in queues.decodes], key=lambda task: (task.context, by_arrival(task)))
        entry.paused = set(decodes[2:])
        return entry


FAIR = replace(FCFS, name="fair", summary="VTC", order=LeastServed)
FAIR_HYBRID = replace(MACE, name="fair-hybrid", summary="VTC in hybrid bins", order=LeastServed)
PAUSING = replace(MACE, name="pausing", summary="decodes that stand still", admission=TwoAtOnce)
fair = pytest.mark.parametrize("row", [FAIR, FAIR_HYBRID], ids=lambda row: row.name)


def scheduler_with(row: Row) -> Scheduler:
    cost = CostModel(roofline(parameters=135_000_000, flops_per_s=2e11, bytes_per_s=2e10))
    return Scheduler(SchedulerSettings(), cost, Policy(row, SchedulerSettings(), cost))


def world_with(row: Row, pages: int = 500, max_tokens: int = 512, max_sequences: int = 32) -> World:
    return World(scheduler_with(row), Resources(pages, pages, 16, max_tokens, max_sequences))


def served(scheduler: Scheduler) -> dict[str, float]:
    order = scheduler.policy.flow_order
    assert isinstance(order, LeastServed)
    return order.served


class TestFairQueue:
    """Flows by `ServingTask.tenant`, whose keys change with what was served."""

    @fair
    def test_one_request_is_not_behind_all_of_anothers(self, row: Row) -> None:
        world = world_with(row, max_sequences=1)
        many = [world.ask(prompt=100, answer=5, tenant="ann") for _ in range(10)]
        world.step()
        one = world.ask(prompt=100, answer=5, tenant="bob")
        world.run()
        firsts = [life.token_times[0] for life in many]
        assert firsts[0] < one.token_times[0] < firsts[1]

    @fair
    def test_inside_a_flow_the_first_come_is_the_first_served(self, row: Row) -> None:
        world = world_with(row, max_sequences=1)
        lives = [world.ask(prompt=50 + 10 * (5 - i), answer=3, tenant="ann") for i in range(5)]
        world.ask(prompt=50, answer=3, tenant="bob")
        world.run()
        firsts = [life.token_times[0] for life in lives]
        assert firsts == sorted(firsts)

    @fair
    def test_two_who_always_ask_get_as_many_tokens_however_long_their_prompts(self, row: Row) -> None:
        world = world_with(row, max_sequences=2)
        asked = {"ann": 300, "bob": 60}
        while world.now < 60.0:
            for tenant, prompt in asked.items():
                while sum(life.task.tenant == tenant for life in world.lives.values()) < 6:
                    world.ask(prompt, answer=10, tenant=tenant)
            world.step()
        ann, bob = served(world.scheduler).values()
        assert 0.95 < ann / bob < 1.05

    @fair
    def test_who_rested_has_saved_nothing_up(self, row: Row) -> None:
        world = world_with(row, max_sequences=1)
        world.ask(prompt=10, answer=2, tenant="bob")
        for _ in range(10):
            world.ask(prompt=100, answer=5, tenant="ann")
        while sum(served(world.scheduler).values()) < 600:
            world.step()
        world.ask(prompt=10, answer=2, tenant="bob")
        assert served(world.scheduler)["bob"] == served(world.scheduler)["ann"]

    @fair
    @pytest.mark.parametrize("plans_ahead", [False, True])
    def test_each_token_counts_once_also_where_plans_are_made_ahead(self, row: Row, plans_ahead: bool) -> None:
        world = world_with(row)
        world.plans_ahead = plans_ahead
        world.ask(prompt=100, answer=30, tenant="ann")
        world.ask(prompt=40, answer=50, tenant="bob")
        world.run()
        assert served(world.scheduler) == {"ann": 100 + 29, "bob": 40 + 49}
        assert (world.foreseen > 10) is plans_ahead

    @fair
    def test_a_reload_keeps_the_counters(self, row: Row) -> None:
        world = world_with(row, max_sequences=1)
        for tenant in ("ann", "ann", "bob"):
            world.ask(prompt=100, answer=1, tenant=tenant)
        world.step()
        world.scheduler.configure(SchedulerSettings(options={"tau_tasks": 5}))
        assert [grant.task.tenant for grant in world.step().grants] == ["bob"]

    def test_who_is_parked_has_not_left(self) -> None:
        scheduler = scheduler_with(FAIR)
        task = ServingTask(1, Kind.PREFILL, 0.0, num_tokens=50, tenant="ann")
        scheduler.add(task, 0.0)
        served(scheduler)["bob"] = 70.0
        scheduler.add(ServingTask(2, Kind.PREFILL, 0.0, num_tokens=50, tenant="bob"), 0.0)
        scheduler.park(task)
        assert list(granted(scheduler.plan(0.0, resources()))) == [2]
        scheduler.add(task, 0.0)
        assert served(scheduler) == {"ann": 0.0, "bob": 70.0}
        assert list(granted(scheduler.plan(0.0, resources()))) == [1, 2]

    def test_who_is_removed_while_parked_has_left(self) -> None:
        scheduler = scheduler_with(FAIR)
        task = ServingTask(1, Kind.PREFILL, 0.0, num_tokens=50, tenant="ann")
        scheduler.add(task, 0.0)
        scheduler.park(task)
        scheduler.remove(1)
        order = scheduler.policy.flow_order
        assert isinstance(order, LeastServed)
        assert order.live["ann"] == 0

    def test_the_engine_orders_tasks_as_the_queues_do(self) -> None:
        scheduler = scheduler_with(FAIR)
        tasks = [
            ServingTask(i, Kind.PREFILL, float(i), num_tokens=50, tenant="ann" if i < 3 else "bob") for i in range(5)
        ]
        for task in tasks:
            scheduler.add(task, task.arrival_s)
        served(scheduler)["ann"] = 9.0
        assert sorted(tasks, key=scheduler.policy.order) == tasks[3:] + tasks[:3]
        assert list(granted(scheduler.plan(5.0, resources()))) == [3, 4, 0, 1, 2]


class TestPausing:
    """Decodes that stand still, keep their pages, and run later."""

    @pytest.mark.parametrize("plans_ahead", [False, True])
    def test_all_answers_end_two_at_a_time_and_nothing_is_computed_again(self, plans_ahead: bool) -> None:
        world = world_with(PAUSING)
        world.plans_ahead = plans_ahead
        lives = [world.ask(prompt=40, answer=20) for _ in range(5)]
        while world.lives:
            held = {task: pages for life in lives if (pages := (task := life.task).held_pages)}
            plan = world.step()
            decodes = [grant.task for grant in plan.grants if grant.num_tokens == 1]
            assert len(decodes) <= 2
            ended = [life.task for life in lives if life.made == life.answer]
            assert all(task.held_pages >= pages for task, pages in held.items() if task not in ended)
        assert [life.preemptions for life in lives] == [0] * 5
        assert (world.foreseen > 10) is plans_ahead

    def test_one_that_stands_still_takes_neither_tokens_nor_time_of_the_iteration(self) -> None:
        scheduler, alone = scheduler_with(PAUSING), scheduler_with(MACE)
        for task_id in range(2):
            for each in (scheduler, alone):
                add_decode(each, task_id, context=64).deadline_s = 1.0
        for task_id in range(2, 6):
            add_decode(scheduler, task_id, context=640).deadline_s = 0.0
        plan, wanted = (each.plan(0.1, resources()) for each in (scheduler, alone))
        assert granted(plan) == granted(wanted) == {0: (1, 0), 1: (1, 0)}
        assert (plan.pages, plan.predicted_forward_s) == (wanted.pages, wanted.predicted_forward_s)

    def test_the_pages_of_their_next_tokens_are_for_others(self) -> None:
        scheduler = scheduler_with(PAUSING)
        for task_id in range(6):
            add_decode(scheduler, task_id, context=64)
        task = ServingTask(9, Kind.PREFILL, 1.0, num_tokens=48)
        scheduler.add(task, 1.0)
        scheduler.complete(IterationResult([TaskOutcome(task, 16, 0, Kind.PREFILL)], 0.02), 1.1)
        task.held_pages, task.capacity = 1, 16
        plan = scheduler.plan(1.2, resources(free=6))
        assert granted(plan) == {0: (1, 0), 1: (1, 0), 9: (32, 0)}
        assert plan.pages == 2 + 2

    def test_they_count_among_the_sequences_in_memory(self) -> None:
        scheduler = scheduler_with(PAUSING)
        for task_id in range(4):
            add_decode(scheduler, task_id)
        scheduler.add(ServingTask(9, Kind.PREFILL, 0.0, num_tokens=20), 0.0)
        assert 9 not in granted(scheduler.plan(0.0, resources(sequences=4)))
        assert 9 in granted(scheduler.plan(0.0, resources(sequences=5)))

    def test_beside_fine_tuning_too(self) -> None:
        world = world_with(PAUSING)
        for _ in range(4):
            world.ask(prompt=40, answer=20)
        world.teach(100, [], steps=3)
        world.run()
        assert len(world.done) == 4


def test_the_documentation_says_what_each_policy_keeps() -> None:
    text = (ROOT / "docs" / "policies.md").read_text()
    table = re.findall(r"^\| `(.+?)` \| (.+?) \| .*?\| (yes|no) \| (yes|no) \|$", text, re.MULTILINE)
    yes = {True: "yes", False: "no"}
    assert table == [(row.name, row.summary, yes[row.shares_prefixes], yes[row.prunes]) for row in ROWS.values()]
