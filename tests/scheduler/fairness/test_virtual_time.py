"""Virtual time against fluid fair sharing: the order of tags, the bound on lateness, and demand that is wrong."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.scheduler.fairness.virtual_time import VirtualTime, call_cost
from tests.scheduler.gps import fair_ends


@dataclass
class Call:
    prompt: int
    answer: int
    made: int = 0

    @property
    def width(self) -> int:
        """Tokens that it holds at the end."""
        return self.prompt + self.answer


@dataclass
class App:
    """An application: stages of calls, each of which begins when the one before has ended."""

    arrival: int
    stages: list[list[Call]]
    error: float = 1.0
    waiting: deque[Call] = field(default_factory=deque)
    running: list[Call] = field(default_factory=list)
    end: int = 0

    @property
    def cost(self) -> float:
        return sum(call_cost(call.prompt, call.answer) for stage in self.stages for call in stage)

    @property
    def critical_path(self) -> int:
        return sum(max(call.answer for call in stage) for stage in self.stages)


def keys(clock: VirtualTime) -> list[str]:
    return [known.key for known in clock.ranked()]


def serve(apps: list[App], memory: int) -> VirtualTime:
    """Run all: iterations of one second, who has the least tag enters while there is room, nobody overtakes."""
    clock, free, second = VirtualTime(), memory, 0
    left = {str(number): list(app.stages) for number, app in enumerate(apps)}
    while left:
        for key in left:
            app = apps[int(key)]
            if app.arrival == second:
                clock.open(key, key, 1.0, app.cost * app.error)
            if app.arrival <= second and not app.waiting and not app.running and left[key]:
                app.waiting.extend(left[key].pop(0))
        for key in keys(clock):
            app = apps[int(key)]
            while app.waiting and app.waiting[0].width <= free:
                free -= app.waiting[0].width
                app.running.append(app.waiting.popleft())
            if app.waiting:
                break
        work: dict[str, float] = {}
        second += 1
        for key in keys(clock):
            app = apps[int(key)]
            for call in list(app.running):
                call.made += 1
                work[key] = work.get(key, 0.0) + call.prompt + call.made
                if call.made == call.answer:
                    app.running.remove(call)
                    free += call.width
        clock.serve(work, float(second))
        for key in list(left):
            app = apps[int(key)]
            if app.arrival < second and not (app.waiting or app.running or left[key]):
                app.end = second
                clock.close(key)
                del left[key]
    return clock


def drawn_apps(chance: random.Random, count: int, chains: bool, memory: int) -> list[App]:
    apps = []
    for _ in range(count):
        stages = [
            [
                Call(chance.randint(1, memory // 6), chance.randint(1, memory // 6))
                for _ in range(chance.choice([1, 1, 2, 6]))
            ]
            for _ in range(chance.randint(2, 4) if chains else 1)
        ]
        apps.append(App(chance.randint(0, 40), stages))
    return apps


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), chains=st.booleans(), memory=st.integers(40, 300))
def test_nobody_is_later_than_under_fair_sharing_by_more_than_the_bound(seed: int, chains: bool, memory: int) -> None:
    """d_max (1 + M / M_e), with fair sharing of M_e = M - w_max + 1; an application whose calls wait for each other
    has its own critical path besides."""
    chance = random.Random(seed)
    apps = drawn_apps(chance, chance.randint(2, 12), chains, memory)
    serve(apps, memory)
    calls = [call for app in apps for stage in app.stages for call in stage]
    sure = memory - max(call.width for call in calls) + 1
    longest = max(call.answer for call in calls)
    fair = fair_ends([float(app.arrival) for app in apps], [app.cost for app in apps], float(sure))
    for app, end in zip(apps, fair, strict=True):
        bound = longest * (1 + memory / sure) + (app.critical_path if chains else 0)
        assert app.end - end <= bound


@settings(max_examples=100, deadline=None)
@given(
    costs=st.lists(st.integers(1, 1000), min_size=1, max_size=12),
    gaps=st.lists(st.integers(0, 30), min_size=12, max_size=12),
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=12, max_size=12),
)
def test_tags_pass_in_the_order_and_at_the_time_of_fluid_sharing(
    costs: list[int], gaps: list[int], weights: list[float]
) -> None:
    """The box does 7 units a second for whoever has the least tag."""
    rate, tick = 7.0, 0.125
    arrivals = [sum(gaps[: number + 1]) * 1.0 for number in range(len(costs))]
    shares = weights[: len(costs)]
    fair = fair_ends(arrivals, [float(cost) for cost in costs], rate, shares)
    clock, second, ended = VirtualTime(), 0.0, dict[str, float]()
    applications, left = {}, dict(enumerate(map(float, costs)))
    while len(ended) < len(costs):
        for number, arrival in enumerate(arrivals):
            if arrival == second:
                clock.open(str(number), str(number), shares[number], float(costs[number]))
                applications[str(number)] = clock.applications[str(number)]
        second += tick
        work, room = dict[str, float](), rate * tick
        for key in keys(clock):
            part = min(room, left[int(key)])
            room -= part
            left[int(key)] -= part
            work[key] = part
        clock.serve(work, second)
        for key, known in applications.items():
            if known.fair_end_s < float("inf") and key not in ended:
                ended[key] = known.fair_end_s
        assert second < 5000
    for number, end in enumerate(fair):
        assert ended[str(number)] == pytest.approx(end, abs=2 * tick)


@pytest.mark.parametrize("error", [0.5, 0.05])
def test_an_elephant_that_says_it_is_a_mouse_does_not_stay_ahead(error: float) -> None:
    """Mice come when the elephants have had more than they said, but less than they need."""

    def mice_wait(error: float) -> float:
        elephants = [App(0, [[Call(30, 40) for _ in range(8)] for _ in range(8)], error=error) for _ in range(4)]
        mice = [App(400 + 5 * number, [[Call(10, 5)]]) for number in range(30)]
        serve(elephants + mice, 150)
        return sum(mouse.end - mouse.arrival for mouse in mice) / len(mice)

    assert mice_wait(error) <= 1.5 * mice_wait(1.0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), error=st.sampled_from([0.05, 0.5, 2.0, 20.0]))
def test_with_wrong_demand_every_tag_stays_within_twice_what_was_served(seed: int, error: float) -> None:
    chance = random.Random(seed)
    apps = drawn_apps(chance, 8, True, 120)
    for app in apps:
        app.error = error if chance.random() < 0.5 else 1.0
    clock = VirtualTime()
    for number, app in enumerate(apps):
        clock.open(str(number), str(number), 1.0, app.cost * app.error)
    left = {str(number): app.cost for number, app in enumerate(apps)}
    while left:
        key = keys(clock)[0]
        part = min(20.0, left[key])
        left[key] -= part
        clock.serve({key: part}, 0.0)
        if left[key] <= 0:
            ended, app = clock.applications[key], apps[int(key)]
            clock.close(key)
            assert ended.tag - ended.begun <= max(2.0 * ended.served, app.cost * app.error, 1.0) + 1e-6
            del left[key]


class TestUsers:
    """Tags of one user's applications follow each other: ten runs of one person get one person's share."""

    def test_ten_runs_of_one_get_as_much_as_one_of_another(self) -> None:
        clock = VirtualTime()
        for number in range(10):
            clock.open(f"many-{number}", "many", 1.0, 100.0)
        clock.open("one", "one", 1.0, 300.0)
        order = keys(clock)
        assert order.index("one") == 3 - 1 or order.index("one") == 3
        assert clock.applications["many-9"].tag == 1000.0

    def test_of_one_user_the_shorter_goes_first(self) -> None:
        clock = VirtualTime()
        clock.open("long", "ann", 1.0, 1000.0)
        clock.open("short", "ann", 1.0, 10.0)
        assert keys(clock) == ["short", "long"]
        assert clock.applications["long"].tag == 1010.0

    def test_a_weight_shortens_the_way_to_the_tag(self) -> None:
        clock = VirtualTime()
        clock.open("a", "ann", 2.0, 100.0)
        clock.open("b", "bob", 1.0, 100.0)
        assert keys(clock) == ["a", "b"]
        clock.serve({"a": 75.0}, 1.0)
        assert clock.now == 25.0

    def test_what_an_application_really_needed_counts_for_the_next(self) -> None:
        clock = VirtualTime()
        clock.open("guessed", "ann", 1.0, 1000.0)
        clock.serve({"guessed": 30.0}, 1.0)
        clock.close("guessed")
        clock.open("next", "ann", 1.0, 50.0)
        assert clock.applications["next"].tag == 80.0

    @settings(max_examples=60, deadline=None)
    @given(seed=st.integers(0, 2**32))
    def test_tags_are_those_that_all_applications_in_a_row_would_get(self, seed: int) -> None:
        """Whatever came, grew or ended in between: those with less to do first, each behind the one before it."""
        chance, clock, ended = random.Random(seed), VirtualTime(), dict[str, float]()
        for number in range(120):
            user = chance.choice("abc")
            clock.open(f"{user}/{number}", user, {"a": 1.0, "b": 2.0, "c": 0.5}[user], chance.uniform(1.0, 400.0))
            now = list(clock.applications)
            served = chance.sample(now, min(len(now), 5))
            clock.serve({key: chance.uniform(0.0, 80.0) for key in served}, float(number))
            for key in chance.sample(now, len(now) > 20 or chance.random() < 0.5):
                known = clock.applications[key]
                since = max(ended.get(known.sharer, -float("inf")), known.begun)
                clock.close(key)
                ended[known.sharer] = since + known.served / known.weight
            open_now = clock.applications.values()
            for name in {known.sharer for known in open_now}:
                end = ended.get(name, -float("inf"))
                own = [known for known in open_now if known.sharer == name]
                for known in sorted(own, key=lambda known: known.begun + known.cost / known.weight):
                    end = max(end, known.begun) + known.cost / known.weight
                    assert known.tag == pytest.approx(end)
                    assert (known.fair_end_s < float("inf")) == (known.tag <= clock.now)
            assert [known.tag for known in clock.ranked()] == sorted(known.tag for known in open_now)

    def test_nothing_is_kept_of_who_has_nothing_open(self) -> None:
        clock = VirtualTime()
        for number in range(1000):
            clock.open(f"run-{number}", f"user-{number}", 1.0, 10.0)
            clock.serve({f"run-{number}": 10.0}, float(number))
            clock.close(f"run-{number}")
        assert len(clock._sharers) < 5
        assert len(clock._ahead) < 100


def test_the_clock_stands_while_nothing_is_served() -> None:
    clock = VirtualTime()
    clock.open("a", "a", 1.0, 100.0)
    clock.serve({}, 100.0)
    assert clock.now == 0.0
