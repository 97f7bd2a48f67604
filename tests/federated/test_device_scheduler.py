"""The device scheduler by events: who gets a box, what stays idle, and that nothing that is needed does."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edged.federated.campaigns import Campaign, RoundRequest
from edged.federated.device_scheduler import DeviceScheduler
from edged.federated.policies import POLICIES
from edged.federated.signature import Capacity, signature
from edged.federated.supply import Supply

ANY, FAST, LARGE, SLOW = Capacity(), Capacity(tokens_per_s=50), Capacity(memory_mb=100), Capacity(tokens_per_s=5)
BOXES = [SLOW, FAST, LARGE, Capacity(memory_mb=100, tokens_per_s=50)]
DAY_S = 86400.0


def campaign(name: str = "tone", requires: Capacity = ANY, demand: int = 2, **more: float) -> Campaign:
    return Campaign(
        **{"name": name, "submitted_s": 0.0, "rounds": 1, "deadline_s": 300.0, "overcommit": 1.0, **more},
        requires=requires,
        demand=demand,
    )  # type: ignore[arg-type]


def scheduler(policy: str = "venn", max_tiers: int = 2) -> DeviceScheduler:
    return DeviceScheduler(POLICIES[policy], random.Random(0), max_tiers)


def test_a_signature_has_a_bit_for_each_requirement_that_is_met() -> None:
    assert signature(Capacity(100, 50.0, 3, "qwen r8"), [ANY, Capacity(100, 50.0, 3, "qwen r8"), FAST]) == 0b010
    asked = [Capacity(), Capacity(memory_mb=100), Capacity(tokens_per_s=51), Capacity(participants=4)]
    assert signature(Capacity(100, 50.0, 3), asked) == 0b0011


def test_supply_is_of_the_last_24_hours() -> None:
    supply: Supply[str] = Supply()
    for hour in range(30):
        supply.add("a", hour * 3600.0)
    assert supply.counts == {"a": 25}
    supply.add("b", 53 * 3600.0, 3)
    assert supply.counts == {"a": 1, "b": 3}
    assert supply.span_s(53 * 3600.0) == DAY_S
    supply.forget(80 * 3600.0)
    assert not supply.counts


def test_a_round_asks_for_more_than_it_needs() -> None:
    small = campaign(demand=10, overcommit=1.3)
    assert (small.asked, small.needed) == (13, 8)


def test_idle_boxes_are_granted_at_once_the_least_able_first() -> None:
    venn = scheduler()
    for number, box in enumerate(BOXES):
        assert venn.check_in(str(number), box, 0.0) is None
    venn.request(campaign("fast", FAST, demand=5), 1, 1.0)
    venn.request(campaign("any", ANY, demand=1), 1, 2.0)
    assert [list(request.granted) for request in venn.full] == [["0"]]


@pytest.mark.parametrize(
    ("policy", "first"), [("fifo", "large"), ("srsf", "small"), ("venn", "small"), ("venn-queue", "small")]
)
def test_a_policy_orders_the_requests_of_a_group(policy: str, first: str) -> None:
    chosen = scheduler(policy)
    chosen.request(campaign("large", demand=3), 1, 0.0)
    chosen.request(campaign("small", demand=2, submitted_s=1.0), 1, 1.0)
    granted = chosen.check_in("a", SLOW, 2.0)
    assert granted is not None
    assert granted.campaign.name == first


def test_the_order_of_random_is_drawn_anew_for_each_request() -> None:
    firsts = set()
    for seed in range(20):
        drawn = DeviceScheduler(POLICIES["random"], random.Random(seed))
        for name in ("a", "b"):
            drawn.request(campaign(name), 1, 0.0)
        granted = drawn.check_in("box", SLOW, 1.0)
        firsts.add(granted and granted.campaign.name)
    assert firsts == {"a", "b"}


def test_rounds_count_where_they_are_declared() -> None:
    for declares, first in ((False, "long"), (True, "short")):
        venn = scheduler()
        venn.request(campaign("long", demand=2, declares_rounds=declares), 9, 0.0)
        venn.request(campaign("short", demand=3, declares_rounds=declares), 1, 0.0)
        granted = venn.check_in("box", SLOW, 1.0)
        assert granted is not None
        assert granted.campaign.name == first


def test_a_box_that_checks_in_again_stays_what_it_is() -> None:
    venn = scheduler()
    venn.check_in("a", SLOW, 0.0)
    venn.check_in("a", SLOW, 1.0)
    assert venn.idle[SLOW] == {"a": None}
    request = venn.request(campaign(), 1, 2.0)
    assert venn.check_in("a", SLOW, 3.0) is request
    assert (request.missing, venn.idle[SLOW]) == (1, {})


def test_who_leaves_before_the_dispatch_is_asked_for_again() -> None:
    venn = scheduler()
    request = venn.request(campaign(), 1, 0.0)
    venn.check_in("a", SLOW, 1.0)
    venn.leave("a", SLOW)
    assert request.missing == 2
    for name in ("b", "c"):
        venn.check_in(name, SLOW, 2.0)
    assert venn.full == [request]
    assert list(request.granted) == ["b", "c"]


def test_boxes_of_a_withdrawn_request_go_to_others() -> None:
    venn = scheduler()
    first = venn.request(campaign("first", demand=2), 1, 0.0)
    venn.check_in("a", SLOW, 1.0)
    second = venn.request(campaign("second", demand=3), 1, 2.0)
    venn.withdraw(first, 3.0)
    assert list(second.granted) == ["a"]
    venn.withdraw(second, 4.0)
    assert list(venn.idle[SLOW]) == ["a"]


SLOW_S, FAST_S = 20000.0, 8000.0
"""Response times."""


def known(seed: int, max_tiers: int = 2, idle: int = 100) -> tuple[DeviceScheduler, Campaign]:
    """Return a scheduler that saw 400 slow and 400 fast boxes in a day, the last of which are idle, and a campaign that
    had participants of both kinds."""
    venn, tone = DeviceScheduler(POLICIES["venn"], random.Random(seed), max_tiers), campaign(demand=4)
    for number in range(800):
        box = (SLOW, FAST)[number % 2]
        venn.check_in(str(number), box, DAY_S * number / 800)
        if number < 800 - idle:
            venn.leave(str(number), box)
    for box, response_s in ((SLOW, SLOW_S), (FAST, FAST_S)) * 20:
        venn.answered(tone, box, response_s)
    return venn, tone


def test_a_round_is_confined_to_a_tier_where_that_pays() -> None:
    confined = set()
    for seed in range(12):
        venn, tone = known(seed)
        request = venn.request(tone, 1, DAY_S)
        confined.add(request.tier is not None)
        if request.tier:
            assert set(request.granted.values()) == {FAST}
    # The slow tier is drawn as often, and never worth it: then any box does.
    assert confined == {True, False}
    assert not any(venn.request(tone, 1, DAY_S).tier for venn, tone in (known(seed, max_tiers=1) for seed in range(12)))


def test_no_round_is_confined_while_more_is_asked_for_than_comes() -> None:
    for seed in range(12):
        venn, tone = known(seed)
        venn.request(campaign("huge", FAST, demand=1000), 1, DAY_S)
        assert venn.request(tone, 1, DAY_S).tier is None


def test_tiers_are_used_only_while_more_boxes_come_than_are_asked_for() -> None:
    """Those behind it in its own group count: 700 and its four are fewer than the 800 that came, 1,000 are more."""
    confined = {}
    for demand in (700, 1000):
        tiers = []
        for seed in range(12):
            venn, tone = known(seed)
            venn.request(campaign("behind", demand=demand), 1, DAY_S)
            tiers.append(venn.request(tone, 1, DAY_S).tier)
        confined[demand] = any(tiers)
    assert confined == {700: True, 1000: False}


def test_what_a_tier_leaves_goes_to_the_next_request_and_a_tier_lapses() -> None:
    confined = ((venn, venn.request(tone, 1, DAY_S)) for venn, tone in (known(seed, idle=0) for seed in range(12)))
    venn, request = next((venn, request) for venn, request in confined if request.tier)
    # Four boxes of any kind come in 432 s, of the tier in 864 s.
    assert request.tier_until_s == pytest.approx(DAY_S + 432 + SLOW_S - FAST_S, rel=0.01)
    assert venn.check_in("slow", SLOW, DAY_S + 1) is None
    other = venn.request(campaign("other", demand=9), 1, DAY_S + 2)
    assert list(other.granted) == ["slow"]
    venn.withdraw(other, DAY_S + 3)
    assert not request.granted
    venn.check_in("fast", FAST, request.tier_until_s)
    assert set(request.granted) == {"slow", "fast"}


class Federation(RuleBasedStateMachine):
    """Boxes come, stay and leave, campaigns ask and withdraw, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.names = 0.0, 0
        self.there: dict[str, Capacity] = {}
        self.scheduler = scheduler(max_tiers=1)
        self.opened: list[RoundRequest] = []

    @rule(box=st.sampled_from(BOXES), later=st.sampled_from([0.0, 60.0, 7200.0]))
    def come(self, box: Capacity, later: float) -> None:
        self.now += later
        self.names += 1
        self.there[str(self.names)] = box
        self.scheduler.check_in(str(self.names), box, self.now)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.there)))
        self.scheduler.leave(name, self.there.pop(name))

    @rule(requires=st.sampled_from([ANY, FAST, LARGE, BOXES[3]]), demand=st.integers(1, 4))
    def ask(self, requires: Capacity, demand: int) -> None:
        self.names += 1
        self.opened.append(self.scheduler.request(campaign(str(self.names), requires, demand), 1, self.now))

    @precondition(lambda self: self.scheduler.open)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        self.scheduler.withdraw(data.draw(st.sampled_from(self.scheduler.open)), self.now)

    @rule()
    def dispatch(self) -> None:
        for request in self.scheduler.full:
            for name in request.granted:
                self.there.pop(name, None)
        self.scheduler.full.clear()

    @invariant()
    def no_box_that_is_needed_is_idle(self) -> None:
        for box, names in self.scheduler.idle.items():
            assert not names or not any(box.meets(request.campaign.requires) for request in self.scheduler.open)

    @invariant()
    def a_box_is_in_one_place_and_fit_for_it(self) -> None:
        places = [name for names in self.scheduler.idle.values() for name in names]
        for request in self.scheduler.open + self.scheduler.full:
            places += request.granted
            assert all(box.meets(request.campaign.requires) for box in request.granted.values())
        assert len(places) == len(set(places))
        assert all(request.missing > 0 for request in self.scheduler.open)
        assert all(request.missing == 0 for request in self.scheduler.full)


Federation.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestFederation = Federation.TestCase


@settings(max_examples=30, deadline=None)
@given(
    demands=st.lists(st.tuples(st.sampled_from([ANY, FAST, LARGE]), st.integers(1, 5)), min_size=1, max_size=8),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_all_requests_end_where_boxes_of_every_kind_keep_coming(
    demands: list[tuple[Capacity, int]], policy: str
) -> None:
    chosen, boxes = scheduler(policy), 0
    for number, (requires, demand) in enumerate(demands):
        chosen.request(campaign(str(number), requires, demand), 1, 0.0)
    while chosen.open:
        chosen.check_in(str(boxes), BOXES[boxes % 4], float(boxes))
        boxes += 1
        assert boxes <= 4 * sum(demand for _, demand in demands)
