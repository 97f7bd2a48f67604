"""Whole lives in virtual time: whatever comes, everything that was asked for is done once, within the resources."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edged.scheduler.cost.model import CostModel, roofline
from edged.scheduler.policies.registry import ROWS
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import Resources, Unit
from tests.scheduler.test_scheduler import settings_of
from tests.scheduler.world import Device, Life, Tuning, World

UNITS = [Unit("head", 16), Unit("layer", 32), Unit("layer", 32), Unit("step", 0)]


def world_of(
    policy: str = "mace",
    pages: int = 500,
    page_size: int = 16,
    max_tokens: int = 512,
    max_sequences: int = 32,
    device: Device | None = None,
    seed: int = 0,
    **scheduler: float,
) -> World:
    cost = CostModel(roofline(parameters=135_000_000, flops_per_s=2e11, bytes_per_s=2e10))
    made = Scheduler(settings_of(policy=policy, **scheduler), cost)
    return World(made, Resources(pages, pages, page_size, max_tokens, max_sequences), device, seed)


@dataclass
class Ask:
    """A request of a drawn world, `after_s` the one before it, cancelled once it has `leaves` tokens."""

    after_s: float
    prompt: int
    answer: int
    shared: int
    leaves: int | None


@st.composite
def worlds(draw: st.DrawFn, policies: tuple[str, ...]) -> tuple[World, list[Ask], list[tuple[int, int]]]:
    page_size = draw(st.sampled_from([1, 4, 16]))
    pages = draw(st.integers(4, 60))
    world = world_of(
        draw(st.sampled_from(policies)),
        pages=pages,
        page_size=page_size,
        max_tokens=draw(st.integers(1, 200)),
        max_sequences=draw(st.integers(1, 12)),
        device=Device(
            pass_s=draw(st.sampled_from([0.001, 0.02, 0.2])),
            token_s=draw(st.sampled_from([1e-5, 1e-3])),
            noise=draw(st.sampled_from([0.0, 0.5])),
        ),
        finetune_max_wait_s=draw(st.sampled_from([0.05, 0.5, 5.0])),
        finetune_min_share=draw(st.sampled_from([0.0, 0.1, 1.0])),
        tbt_floor_ms=draw(st.sampled_from([1.0, 50.0])),
        ttft_floor_ms=draw(st.sampled_from([1.0, 200.0, 1e5])),
        tau_memory=draw(st.sampled_from([0.0, 0.5, 0.95, 1.0])),
        tau_tasks=draw(st.sampled_from([1, 256])),
        retrain_every_s=draw(st.sampled_from([0.1, 1.0, 30.0])),
    )
    world.plans_ahead = draw(st.booleans())
    longest = pages * page_size
    asks = []
    for _ in range(draw(st.integers(0, 12))):
        answer = draw(st.integers(1, min(40, longest - 1)))
        asks.append(
            Ask(
                after_s=draw(st.sampled_from([0.0, 0.01, 0.5])),
                prompt=draw(st.integers(1, longest - answer)),
                answer=answer,
                shared=draw(st.sampled_from([0, 0, 1, 3])),
                leaves=draw(st.sampled_from([None, None, None, 0, 2])),
            )
        )
    lessons = draw(st.lists(st.tuples(st.integers(1, longest), st.integers(1, 3)), max_size=3))
    return world, asks, lessons


def play(world: World, asks: list[Ask], lessons: list[tuple[int, int]]) -> tuple[list[Life], list[Tuning]]:
    """Feed a world and run it to its end."""
    due = list(zip(itertools.accumulate(ask.after_s for ask in asks), asks, strict=True))
    lives: list[tuple[Life, Ask]] = []
    tunings = [world.teach(tokens, UNITS, steps) for tokens, steps in lessons]
    while due or world.lives or world.tunings:
        while due and due[0][0] <= world.now:
            ask = due.pop(0)[1]
            lives.append((world.ask(ask.prompt, ask.answer, ask.shared), ask))
        for life, ask in lives:
            if ask.leaves is not None and life.made >= ask.leaves and life.task.task_id in world.lives:
                world.cancel(life)
        world.busy_again_s = due[0][0] if due else math.inf
        plan = world.step()
        if not plan.grants and not plan.preempt and math.isinf(plan.resume_s):
            assert not world.lives, "nothing runs though a request is live"
            if not due:
                break
            world.now = max(world.now, due[0][0])
        assert world.iterations < 20_000, "no end in sight"
    return [life for life, ask in lives if ask.leaves is None or ask.leaves >= life.answer], tunings


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(worlds(tuple(ROWS)))
def test_every_request_gets_each_of_its_tokens_once_and_every_page_comes_back(
    drawn: tuple[World, list[Ask], list[tuple[int, int]]],
) -> None:
    world, asks, lessons = drawn
    lives, _ = play(world, asks, lessons)
    for life in lives:
        assert life.made == len(life.token_times) == life.answer
        assert life.token_times == sorted(life.token_times)
    assert not world.lives
    if not world.tunings:
        assert world.free == world.resources.total_pages
        assert sum(world.scheduler.counts().values()) == 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(worlds(tuple(name for name, policy in ROWS.items() if policy.trains)))
def test_every_step_is_taken_whatever_serving_asks_for(
    drawn: tuple[World, list[Ask], list[tuple[int, int]]],
) -> None:
    world, asks, lessons = drawn
    _, tunings = play(world, asks, lessons)
    assert not world.tunings
    assert [tuning.taken for tuning in tunings] == [steps for _, steps in lessons]


def profile(world: World) -> None:
    """Let the cost model meet forwards of many lengths."""
    for prompt in (5, 20, 60, 150, 300, 10, 40, 100, 200):
        world.ask(prompt, answer=3)
        world.teach(prompt, UNITS)
        world.run()


def overload(world: World, seconds: float, tokens: int = 400, rounds: int = 10, backlog: int = 12) -> Tuning:
    """Keep `backlog` requests waiting for `seconds` while one adapter learns, `rounds` times all units a step."""
    tuning = world.teach(tokens, UNITS * rounds, steps=1_000_000)
    while world.now < seconds:
        while world.scheduler.queues.count_waiting < backlog:
            world.ask(prompt=200, answer=30)
        world.step()
    return tuning


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([0.1, 0.5, 2.0]),
    st.sampled_from([0.05, 0.1, 0.3]),
    st.sampled_from([0.02, 0.1]),
    st.sampled_from([1e-4, 1e-3]),
    st.integers(64, 512),
)
def test_under_overload_fine_tuning_never_starves_and_keeps_its_share(
    wait_s: float, share: float, pass_s: float, token_s: float, max_tokens: int
) -> None:
    device = Device(pass_s=pass_s, token_s=token_s, noise=0.1)
    world = world_of(
        pages=4000, max_tokens=max_tokens, device=device, finetune_max_wait_s=wait_s, finetune_min_share=share
    )
    profile(world)
    world.longest_iteration_s, started_s = 0.0, world.now
    tuning = overload(world, seconds=started_s + 15.0 + 10.0 * wait_s, tokens=40, rounds=40)
    # It becomes due within the longest wait, while an iteration runs, and its own iteration then has to end.
    bound_s = wait_s + 2.0 * world.longest_iteration_s
    gaps = [later - earlier for earlier, later in itertools.pairwise([started_s, *tuning.run_times, world.now])]
    assert max(gaps) <= bound_s + 1e-9
    assert tuning.work_s / (world.now - started_s) >= 0.8 * share


@pytest.mark.parametrize("wait_s", [5.0, 30.0])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.5])
def test_over_minutes_of_overload_fine_tuning_gets_its_minimum_share_and_hardly_more(
    share: float, wait_s: float
) -> None:
    world = world_of(pages=4000, finetune_min_share=share, finetune_max_wait_s=wait_s, device=Device(noise=0.1))
    profile(world)
    started_s = world.now
    tuning = overload(world, seconds=started_s + 300.0)
    # Nothing is owed before the first wait is over.
    got = tuning.work_s / (world.now - started_s - wait_s)
    assert 0.95 * share <= got <= share + 0.05
    assert tuning.taken > 0 or not share


def test_overload_leaves_serving_what_the_share_does_not_take() -> None:
    # Everybody is late, so fine-tuning gets no more than it is owed.
    world = world_of(pages=4000, finetune_min_share=0.1)
    tuning = overload(world, seconds=60.0)
    assert tuning.work_s / world.now < 0.2


def test_a_step_that_keeps_prompts_out_of_memory_ends_soon() -> None:
    # The step takes 100 of the 150 pages. At its minimum share it would hold them for 60 times its own length.
    world = world_of(pages=150, finetune_min_share=0.01, finetune_max_wait_s=0.5)
    tuning = overload(world, seconds=30.0, tokens=1500)
    assert tuning.taken >= 3


def test_preempted_requests_end_in_the_order_of_their_arrival() -> None:
    world = world_of(pages=20, max_tokens=64, policy="fcfs")
    lives = [world.ask(prompt=30, answer=200) for _ in range(6)]
    world.run()
    assert sum(life.preemptions for life in lives) > 0
    assert lives[0].preemptions == 0
    ends = [life.token_times[-1] for life in lives]
    assert ends == sorted(ends)


@pytest.mark.parametrize("policy", ROWS)
def test_the_same_world_is_planned_the_same_way_twice(policy: str) -> None:
    def times() -> list[list[float]]:
        world = world_of(policy, pages=60, device=Device(noise=0.3), seed=5)
        world.teach(100, UNITS, steps=3)
        lives = [world.ask(prompt=40 + 13 * i, answer=10 + i) for i in range(10)]
        while world.lives:
            world.step()
        return [life.token_times for life in lives]

    assert times() == times()


def serve(policy: str, rate_per_s: float, **scheduler: float) -> tuple[World, list[Life]]:
    """A minute of requests that leave much of the device free, beside a lesson without end."""
    world = world_of(policy, pages=4000, **scheduler)
    world.teach(400, UNITS * 10, steps=1_000_000)
    lives: list[Life] = []
    while world.now < 60.0:
        while len(lives) < world.now * rate_per_s:
            lives.append(world.ask(prompt=200, answer=30))
        plan = world.step()
        if not plan.grants:
            world.now += 0.01
    return world, [life for life in lives if life.made == life.answer]


def gaps_of(lives: list[Life]) -> list[float]:
    return sorted(b - a for life in lives for a, b in itertools.pairwise(life.token_times))


def test_serving_is_not_slowed_beyond_its_targets_by_fine_tuning() -> None:
    world, done = serve("mace", 1.0, tbt_slowdown=3.0)
    in_time = [life.token_times[0] - life.task.arrival_s <= 0.6 for life in done]
    assert sum(in_time) / len(in_time) > 0.98
    gaps = gaps_of(done)
    assert gaps[int(0.9 * len(gaps))] <= 0.060
    tuning = next(iter(world.tunings.values()))
    assert tuning.work_s / world.now > 0.3


def test_the_mean_time_between_tokens_grows_by_what_the_setting_allows() -> None:
    def mean_gap(policy: str, **scheduler: float) -> float:
        # What is granted in advance is used up by then.
        done = [life for life in serve(policy, 0.8, finetune_min_share=0.0, **scheduler)[1] if life.task.arrival_s > 15]
        gaps = gaps_of(done)
        return sum(gaps) / len(gaps)

    alone = mean_gap("fcfs")
    assert 1.0 < mean_gap("mace", tbt_slowdown=1.05) / alone < 1.07
    assert 1.1 < mean_gap("mace", tbt_slowdown=1.3) / alone < 1.4


def test_what_is_free_between_requests_is_all_for_fine_tuning() -> None:
    world, done = serve("mace", 0.5)
    busy_s = sum(life.token_times[-1] - life.task.arrival_s for life in done)
    tuning = next(iter(world.tunings.values()))
    assert tuning.work_s > 0.85 * (world.now - busy_s)
