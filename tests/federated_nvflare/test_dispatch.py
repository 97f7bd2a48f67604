"""Which open round gets which boxes, tick by tick."""

from __future__ import annotations

import random

from edged.federated.campaigns import Campaign
from edged.federated.signature import Capacity
from edged.federated_nvflare.dispatch import BoxGrant, Dispatcher, WaitingRound

SMALL, LARGE = Capacity(1024, 8.0, 1, "base"), Capacity(8192, 64.0, 4, "base")


def campaign(name: str, demand: int, requires: Capacity = SMALL) -> Campaign:
    return Campaign(
        name=name, submitted_s=0.0, requires=requires, demand=demand, rounds=1, deadline_s=60.0, overcommit=1.0
    )


def opened(name: str, demand: int, requires: Capacity = SMALL, counted: tuple[str, ...] = ()) -> WaitingRound:
    return WaitingRound(campaign(name, demand, requires), 1, frozenset(counted))


def boxes(*names: str, capacity: Capacity = SMALL) -> dict[str, Capacity]:
    return dict.fromkeys(names, capacity)


def granted(grants: list[BoxGrant]) -> dict[str, set[str]]:
    return {grant.job: set(grant.boxes) for grant in grants}


def test_a_round_begins_when_it_has_all_the_boxes_that_it_asks_for() -> None:
    dispatcher, rounds = Dispatcher(random.Random(1)), {"job": opened("tone", 3)}
    assert not dispatcher.tick(rounds, boxes("a", "b"), 0.0)
    assert granted(dispatcher.tick(rounds, boxes("a", "b", "c"), 2.0)) == {"job": {"a", "b", "c"}}


def test_a_box_that_says_no_meanwhile_is_not_waited_for() -> None:
    dispatcher, rounds = Dispatcher(random.Random(1)), {"job": opened("tone", 2)}
    assert not dispatcher.tick(rounds, boxes("a"), 0.0)
    assert not dispatcher.tick(rounds, boxes("b"), 2.0)
    assert granted(dispatcher.tick(rounds, boxes("b", "c"), 4.0)) == {"job": {"b", "c"}}


def test_a_box_that_waited_and_left_is_not_granted_to_a_round_that_opens() -> None:
    dispatcher = Dispatcher(random.Random(1))
    dispatcher.tick({"far": opened("far", 1, LARGE)}, boxes("a", "b"), 0.0)
    rounds = {"far": opened("far", 1, LARGE), "near": opened("near", 2)}
    assert granted(dispatcher.tick(rounds, boxes("b", "c"), 2.0)) == {"near": {"b", "c"}}


def test_boxes_of_a_cancelled_round_go_to_another_one() -> None:
    dispatcher = Dispatcher(random.Random(1))
    both = {"first": opened("first", 3), "second": opened("second", 4)}
    assert not dispatcher.tick(both, boxes("a", "b"), 0.0)
    assert not dispatcher.tick({"second": both["second"]}, boxes("a", "b"), 2.0)
    grants = dispatcher.tick({"second": both["second"]}, boxes("a", "b", "c", "d"), 4.0)
    assert granted(grants) == {"second": {"a", "b", "c", "d"}}


def test_no_box_is_granted_twice_when_a_round_fills_up_in_the_middle_of_a_tick() -> None:
    dispatcher = Dispatcher(random.Random(1))
    rounds = {"first": opened("first", 2), "second": opened("second", 2)}
    assert not dispatcher.tick(rounds, boxes("b"), 0.0)
    assert len(granted(dispatcher.tick(rounds, boxes("a", "b"), 2.0))) == 1
    (other,) = granted(dispatcher.tick({"second": rounds["second"]}, boxes("c", "d"), 4.0)).values()
    assert other == {"c", "d"}


def test_a_large_box_is_kept_for_the_round_that_needs_it() -> None:
    dispatcher = Dispatcher(random.Random(1))
    rounds = {"any": opened("any", 2), "large": opened("large", 1, LARGE)}
    able = {**boxes("a", "b"), **boxes("big", capacity=LARGE)}
    assert granted(dispatcher.tick(rounds, able, 0.0)) == {"any": {"a", "b"}, "large": {"big"}}


def test_an_interrupted_round_asks_for_what_it_lacks_and_for_no_box_that_it_has() -> None:
    dispatcher, rounds = Dispatcher(random.Random(1)), {"job": opened("tone", 3, counted=("a", "b"))}
    assert not dispatcher.tick(rounds, boxes("a", "b"), 0.0)
    assert granted(dispatcher.tick(rounds, boxes("a", "b", "c"), 2.0)) == {"job": {"c"}}


def test_a_box_is_free_again_after_its_round() -> None:
    dispatcher = Dispatcher(random.Random(1))
    (grant,) = dispatcher.tick({"one": opened("tone", 1)}, boxes("a"), 0.0)
    dispatcher.answered(campaign("tone", 1), grant, {"a": 3.0, "stranger": 1.0})
    assert granted(dispatcher.tick({"two": opened("tone", 1)}, boxes("a"), 9.0)) == {"two": {"a"}}
