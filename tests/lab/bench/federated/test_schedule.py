"""Simulated federations: Figure 4.3, what workloads and boxes are, and campaigns that end."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean

import pytest

from edged.federated.campaigns import Campaign
from edged.federated.policies import POLICIES
from edged.federated.signature import Capacity
from edged.lab.bench.federated.devices import FleetError, Session, draw_boxes, draw_sessions, read_boxes, read_sessions
from edged.lab.bench.federated.schedule import (
    REQUIREMENTS,
    WORKLOADS,
    ScheduleLoad,
    ScheduleSimulation,
    draw_campaigns,
    run_schedule,
    toy,
)

BOX = Capacity(16384, 40.0)
LOAD = ScheduleLoad(workload="low", campaigns=6, boxes=500, seeds=2, tiers=2, declares_rounds=False)


@pytest.mark.parametrize(("policy", "seconds"), [("srsf", 11), ("fifo", 11), ("venn", 28 / 3), ("venn-queue", 28 / 3)])
def test_figure_4_3(policy: str, seconds: float) -> None:
    campaigns, sessions = toy()
    runs = ScheduleSimulation(campaigns, policy, 0, 2).play(sessions)
    assert fmean(run.completion_s for run in runs) == pytest.approx(seconds)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_all_campaigns_end(policy: str) -> None:
    campaigns = draw_campaigns("low", 8, 0, policy == "srsf")
    runs = ScheduleSimulation(campaigns, policy, 0, 2).play(draw_sessions(draw_boxes(500, 0), 0))
    for run in runs:
        assert run.rounds_left == 0
        assert len(run.responses_s) == run.campaign.rounds
        assert len(run.delays_s) == run.campaign.rounds + run.aborted
        assert run.completion_s >= sum(run.delays_s) + sum(run.responses_s) - 1e-3


def play(sessions: list[Session], **more: float) -> tuple[float, int]:
    """A campaign of one round of two boxes, submitted at 10 s: when it ended, and rounds that were aborted."""
    campaign = Campaign(
        name="tone",
        submitted_s=10.0,
        requires=BOX,
        demand=2,
        rounds=1,
        deadline_s=300.0,
        overcommit=1.5,
        min_response=1.0,
    )
    (run,) = ScheduleSimulation([replace(campaign, **more)], "venn", 0, 2).play(sessions)  # type: ignore[arg-type]
    return run.completion_s, run.aborted


def session(box: str, start_s: float, end_s: float = 1e9, response_s: float = 100.0) -> Session:
    return Session(start_s, end_s, box, BOX, response_s)


LAST = [session("last", 5e8)]
"""A box that comes when all is over: events are played until it does."""


def test_a_round_ends_with_the_last_answer_that_it_needs() -> None:
    boxes = [session("a", 0.0), session("b", 20.0, response_s=150.0), session("c", 60.0, response_s=400.0)]
    # Dispatched at 60 s, when it has its three boxes; the second answer is there after 150 s.
    assert play(boxes + LAST) == (60 + 150 - 10, 0)


def test_a_box_that_leaves_before_the_dispatch_is_replaced_and_one_that_leaves_later_is_missing() -> None:
    boxes = [session("a", 0.0, 15.0), session("b", 20.0, 90.0), session("c", 30.0), session("d", 60.0)]
    assert play(boxes + LAST) == (60 + 100 - 10, 0)


def test_a_round_without_enough_answers_is_asked_for_again_and_boxes_rest_for_a_day() -> None:
    boxes = [session(name, 1.0, response_s=500.0) for name in "abc"]
    day_s = 86400.0
    again = [session("a", 500.0, day_s), *(session(name, 600.0, 1e6) for name in "bde")]
    # Dispatched at 10 s, given up at 310 s; d and e are there at 600 s, b's rest is over a day after 10 s.
    assert play(boxes[:0] + [replace(box, end_s=400.0) for box in boxes] + again + LAST) == (day_s + 10 + 100 - 10, 1)


def test_workloads_differ_as_their_names_say() -> None:
    drawn = {name: draw_campaigns(name, 300, 0, False) for name in WORKLOADS}
    mean_demand = {name: fmean(each.demand for each in campaigns) for name, campaigns in drawn.items()}
    mean_total = {name: fmean(each.demand * each.rounds for each in campaigns) for name, campaigns in drawn.items()}
    assert mean_demand["low"] < mean_demand["even"] < mean_demand["high"]
    assert mean_total["small"] < mean_total["even"] < mean_total["large"]
    for name, requires in REQUIREMENTS.items():
        share = fmean(each.requires == requires for each in drawn[name])
        assert share == pytest.approx(0.5, abs=0.08)
        assert fmean(each.requires == requires for each in drawn["even"]) == pytest.approx(0.25, abs=0.08)


def test_boxes_come_in_order_once_a_day_most_in_the_evening() -> None:
    boxes = draw_boxes(400, 0)
    sessions = list(islice(draw_sessions(boxes, 0), 1600))
    assert [each.start_s for each in sessions] == sorted(each.start_s for each in sessions)
    assert len({each.box for each in sessions[:300]}) == 300
    hours = [each.start_s % 86400 / 3600 for each in sessions]
    assert fmean(hour >= 17 for hour in hours) > fmean(5 <= hour < 12 for hour in hours)
    shares = [fmean(box.meets(requires) for box in draw_boxes(4000, 1)) for requires in REQUIREMENTS.values()]
    assert shares == pytest.approx([1.0, 0.37, 0.35, 0.2], abs=0.03)


def test_a_report_compares_with_random_seed_by_seed() -> None:
    report = run_schedule(LOAD, ("random", "venn"), lambda ended: None)
    venn = report["policies"]["venn"]
    ratios = [
        there / here for there, here in zip(report["policies"]["random"]["by_seed"], venn["by_seed"], strict=True)
    ]
    assert venn["over_random"] == pytest.approx(fmean(ratios))
    assert report["policies"]["random"]["over_random"] == 1.0
    assert set(venn["over_random_by_requirement"]) == set(REQUIREMENTS)
    assert run_schedule(LOAD, ("venn",), lambda ended: None)["policies"]["venn"]["over_random"] is None


def test_files_take_the_place_of_synthesised_boxes(tmp_path: Path) -> None:
    devices, trace = tmp_path / "devices.csv", tmp_path / "trace.csv"
    devices.write_text("memory_mb,tokens_per_s\n65536,120\n8192,20\n")
    trace.write_text("box,start_s,end_s\n1,90000,95000\n0,10,20\n")
    boxes = read_boxes(devices)
    assert boxes == [Capacity(65536, 120.0), Capacity(8192, 20.0)]
    sessions = list(islice(read_sessions(trace, boxes, 0), 4))
    assert [(each.box, each.start_s, each.end_s) for each in sessions] == [
        ("0", 10, 20), ("1", 90000, 95000), ("0", 172810, 172820), ("1", 262800, 267800)
    ]  # fmt: skip
    assert sessions[0].response_s < sessions[1].response_s


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("", "has no rows"),
        ("memory_mb\n8192\n", 'line 2 has "8192,None": give numbers'),
        ("memory_mb,tokens_per_s\n8192,fast\n", 'line 2 has "8192,fast": give numbers'),
        ("memory_mb,tokens_per_s\n8192,-1\n", 'line 2 has "8192,-1": give numbers'),
        ("memory_mb,tokens_per_s\nnan,1\n", 'line 2 has "nan,1": give numbers'),
        ("memory_mb,tokens_per_s\n8192,0\n", "0 tokens_per_s"),
        ("memory_mb,tokens_per_s\n8192,1\n", "of 1 boxes meet the requirement"),
    ],
)
def test_files_of_boxes_that_cannot_be_used_are_refused(tmp_path: Path, rows: str, said: str) -> None:
    (tmp_path / "devices.csv").write_text(rows)
    with pytest.raises(FleetError, match=said):
        replace(LOAD, devices=tmp_path / "devices.csv").draw(0)


@pytest.mark.parametrize("row", ["2,0,1", "0.5,0,1", "0,1,1", "0,0"])
def test_sessions_of_no_box_or_of_no_time_are_refused(tmp_path: Path, row: str) -> None:
    (tmp_path / "trace.csv").write_text(f"box,start_s,end_s\n{row}\n")
    with pytest.raises(FleetError, match="line 2"):
        next(read_sessions(tmp_path / "trace.csv", [BOX, BOX], 0))


def test_campaigns_that_never_end_are_refused() -> None:
    with pytest.raises(FleetError, match="1 campaigns have not ended after 400 days"):
        play([session("a", 0.0), session("b", 5e8)])
