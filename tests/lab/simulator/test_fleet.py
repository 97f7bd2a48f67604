"""Simulated boxes behind a placement policy: where requests are answered and pairs are learned."""

from __future__ import annotations

from typing import Any

import pytest

from edged.lab.simulator.fleet import Conversations, SimulatedFleet
from edged.lab.simulator.fleet_runs import ROWS, FleetCase, LemixBoxes, run_fleet
from edged.scheduler.reader import Pace
from edged.settings.load import Settings
from tests.placement.nodes import node


def case(policy: str = "fleet", **changes: Any) -> FleetCase:
    values: dict[str, Any] = {"load": 0.6, "seconds": 8.0, "pace": Pace(8.0), "pairs": 0.5}
    return FleetCase(settings=Settings(), policy=policy, **(values | changes))


def requests(report: dict[str, Any]) -> list[int]:
    return [counts["requests"] for counts in report["nodes"].values()]


@pytest.mark.parametrize("policy", ["fleet", "separate", "lemix"])
def test_every_request_is_answered_and_every_pair_learned_once(policy: str) -> None:
    report = run_fleet(case(policy))
    assert report["in_time_share"] > 0.5
    assert report["pairs_learned"] == report["pairs"] > 10
    assert sum(requests(report)) == report["requests"]


def test_the_literal_score_sends_most_to_one_box_and_the_mended_one_does_not() -> None:
    literal, mended = requests(run_fleet(case("lemix-paper"))), requests(run_fleet(case("lemix")))
    assert max(literal) > 0.6 * sum(literal)
    assert max(mended) < 0.5 * sum(mended)


def test_lemix_on_boxes_does_not_depend_on_the_order_of_nodes() -> None:
    from edged.placement.node import RoutedRequest

    views = [node("a"), node("b", decodes=3), node("c", backlog_tokens=600)]
    for literal in (True, False):
        one, other = LemixBoxes(literal), LemixBoxes(literal)
        for size in (400, 900, 100, 2000):
            ranked = one.place(RoutedRequest(size), views, 0.0).ranking
            assert ranked == other.place(RoutedRequest(size), views[::-1], 0.0).ranking


def test_a_box_of_separate_serves_nobody_and_readers_wait_for_a_hundred_pairs() -> None:
    what = case("separate", pairs=1.0, seconds=10.0)
    policy, teaching = ROWS["separate"]
    fleet = SimulatedFleet(what.plan(), [what.hardware(1.0) for _ in range(3)], policy(), teaching)
    talks = list(Conversations().arrivals(6.0, 10.0, 0, 1.0))
    report = fleet.play(talks, 10.0)
    counts = list(report["nodes"].values())
    assert (counts[0]["requests"], counts[1]["pairs"], counts[2]["pairs"]) == (0, 0, 0)
    assert counts[0]["pairs"] == report["pairs_learned"] < 100
    users = {item.user for item in talks}
    versions = [max(each.engine.learning.version(user) for user in users) for each in fleet.nodes.values()]
    assert versions[0] > 1
    assert versions[1:] == [1, 1]


def test_readers_of_an_adapter_have_each_version_that_its_writer_made() -> None:
    what = case(seconds=10.0)
    fleet = SimulatedFleet(what.plan(), [what.hardware(1.0) for _ in range(3)], ROWS["fleet"][0]())
    talks = list(Conversations(users=3).arrivals(4.0, 10.0, 0, 1.0))
    fleet.play(talks, 10.0)
    for user in {item.user for item in talks}:
        versions = {each.engine.learning.version(user) for each in fleet.nodes.values()}
        assert min(versions) > 1
        # A version that a writer makes after a move follows those of the writer before it.
        assert max(versions) - min(versions) <= fleet.moves


@pytest.mark.slow
def test_pairs_move_to_where_they_are_learned_sooner() -> None:
    busy: dict[str, Any] = {"load": 0.9, "seconds": 25.0, "pairs": 0.5, "zipf": 1.4}
    moved, home = run_fleet(case("fleet", **busy)), run_fleet(case("fleet-at-home", **busy))
    assert moved["writers_moved"] > 0 == home["writers_moved"]
    assert moved["pairs_learned"] == moved["pairs"] == home["pairs"]
    assert moved["learned_p95_s"] < home["learned_p95_s"]


def test_a_slower_box_is_given_less() -> None:
    shares = requests(run_fleet(case(speeds=(1.0, 0.5, 0.25), load=0.9, seconds=15.0)))
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 1.5 * shares[2]
