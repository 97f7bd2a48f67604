"""What a soak draws, what it does to a daemon, and what it makes of what it saw."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.soak.faults import damage
from benchmarks.soak.growth import LARGEST_MIB_PER_MINUTE, Held, Said, growth
from benchmarks.soak.inject import Injector
from benchmarks.soak.manager import WATCHDOG_S, Manager
from benchmarks.soak.run import first_each_then_any, held_by_nobody, held_over_time, in_rounds, table
from benchmarks.soak.subject import Subject
from edged.engine.stats.iterations import KEPT
from edged.runtime.systemd import notify
from edged.store import Store, StoreError, utc_now

MINUTES = 20.0


def life(
    rss_mib: Callable[[np.ndarray], np.ndarray], files: Callable[[float], int] = lambda _: 20, full_after: float = 0.2
) -> list[Held]:
    """One sample a second; `rss_mib` of the share of the life that has passed. The allocator's noise is 1 MiB.

    After the share `full_after` there are as many iterations as records of them are kept.
    """
    passed = np.arange(MINUTES * 60) / (MINUTES * 60)
    noise = np.random.default_rng(0).normal(0.0, 1.0, len(passed))
    rss = 700.0 + rss_mib(passed) + noise
    return [
        Held(share * MINUTES * 60, int(mib * 2**20), said, files(share), 6, 30)
        for share, mib in zip(passed, rss, strict=True)
        for said in [Said(int(mib * 2**19), int(1000 * mib), int(KEPT * share / full_after))]
    ]


@pytest.mark.parametrize(
    ("rss_mib", "leaks"),
    [
        pytest.param(lambda passed: 0 * passed, False, id="level"),
        pytest.param(lambda passed: 60 * (1 - np.exp(-passed / 0.08)), False, id="warming up"),
        *(
            pytest.param(lambda passed, at=at: 40.0 * (passed > at), False, id=f"a step at {at:.0%} of the life")
            for at in (0.35, 0.5, 0.65, 0.75, 0.9)
        ),
        pytest.param(lambda passed: 20.0 * (passed > 0.5) + 20.0 * (passed > 0.8), False, id="two steps"),
        pytest.param(lambda passed: 2 * LARGEST_MIB_PER_MINUTE * MINUTES * passed, True, id="twice the bound"),
        pytest.param(lambda passed: 0.5 * LARGEST_MIB_PER_MINUTE * MINUTES * passed, False, id="half the bound"),
        pytest.param(
            lambda passed: 40.0 * (passed > 0.5) + 2 * LARGEST_MIB_PER_MINUTE * MINUTES * passed,
            True,
            id="a leak and a step",
        ),
        pytest.param(
            lambda passed: 2 * LARGEST_MIB_PER_MINUTE * MINUTES * np.round(passed * 10) / 10,
            True,
            id="a leak by a huge page at a time",
        ),
    ],
)
def test_a_leak_is_a_problem_and_a_step_is_none(rss_mib: Callable[[np.ndarray], np.ndarray], leaks: bool) -> None:
    assert any("resident memory" in problem for problem in growth(life(rss_mib)).problems()) == leaks


def test_what_is_in_use_is_told_beside_what_is_resident() -> None:
    """Half of each MiB is the heap's; a daemon may not answer now and then."""
    told = life(lambda passed: 6.0 * passed)
    silent = [replace(sample, said=None) if place % 3 else sample for place, sample in enumerate(told)]
    for samples in (told, silent):
        grown = growth(samples)
        assert grown.heap == pytest.approx(0.5 * 6.0 / MINUTES, rel=0.1)
        assert grown.python_blocks == pytest.approx(1000 * 6.0 / MINUTES, rel=0.1)
    over_time = held_over_time(silent[:2])
    assert over_time["heap_mib"][1] is None
    assert over_time["heap_mib"][0] == pytest.approx(0.5 * over_time["rss_mib"][0], abs=0.1)


def test_records_that_fill_are_no_leak_and_one_that_goes_on_behind_them_is() -> None:
    filling = life(lambda passed: 30.0 * np.minimum(passed / 0.45, 1.0), full_after=0.45)
    assert not growth(filling).problems()
    assert growth(filling).seconds == pytest.approx(0.55 * MINUTES * 60, rel=0.01)
    assert abs(growth(filling).slope) < 0.05 < growth([replace(sample, said=None) for sample in filling]).slope
    assert growth(life(lambda passed: 60.0 * passed, full_after=0.45)).problems()
    assert not growth(life(lambda passed: 60.0 * passed, full_after=1.1)).seconds


def test_files_that_stay_open_are_a_problem() -> None:
    level = life(lambda passed: 0 * passed, files=lambda passed: 20 + int(40 * passed))
    assert growth(level).problems() == ["files grow by 23"]


def test_a_life_of_a_few_minutes_says_nothing_of_memory() -> None:
    grows = life(lambda passed: 1000 * passed)
    assert growth(grows[:10]).problems() == []
    assert growth(grows[: 9 * 60]).problems() == []
    assert len(growth(grows).problems()) == 1


def test_what_ends_the_process_is_drawn_first_each_once() -> None:
    hard, soft = {"kill", "cut", "flip"}, {"clock", "crowd"}
    drawn = list(islice(first_each_then_any(hard, hard | soft, random.Random(1)), 40))
    assert set(drawn[:3]) == hard
    assert set(drawn[3:]) == hard | soft


def test_each_is_drawn_once_before_any_comes_twice() -> None:
    drawn = list(islice(in_rounds({"a", "b", "c"}, random.Random(1)), 9))
    assert [set(drawn[start : start + 3]) for start in (0, 3, 6)] == [{"a", "b", "c"}] * 3


def test_damaged_pages_are_found_at_the_next_start(tmp_path: Path) -> None:
    store = Store(tmp_path / "edged.db")
    store.write(lambda db: db["notes"].insert_all({"text": "x" * 500} for _ in range(200))).result()
    store.close()
    Store(tmp_path / "edged.db").close()
    damage(tmp_path / "edged.db", random.Random(1))
    with pytest.raises(StoreError, match="is damaged"):
        Store(tmp_path / "edged.db")


def test_the_manager_knows_when_the_watchdog_was_fed_and_what_was_said(tmp_path: Path) -> None:
    manager = Manager(tmp_path / "notify")
    assert float(manager.environment["WATCHDOG_USEC"]) == WATCHDOG_S * 1e6
    begun = time.monotonic()
    notify("WATCHDOG=1\nSTATUS=serves demo", manager.environment)
    while manager.status != "serves demo" and time.monotonic() < begun + 10:
        time.sleep(0.01)
    assert manager.status == "serves demo"
    assert manager.starved_s <= time.monotonic() - begun


def test_pages_that_the_box_has_back_are_not_missing() -> None:
    assert held_by_nobody({"total": 100, "free": 20, "cached": 30, "retired": 50}) == 0
    assert held_by_nobody({"total": 100, "free": 20, "cached": 30, "retired": 49}) == 1


def test_the_clock_of_the_database_goes_back_as_often_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", time.time)
    injector, begun = Injector(marker=7), utc_now()
    clocks = set()
    for _ in range(3):
        injector.obey({"fault": "clock", "seconds": 3600})
        clocks.add(time.time)
    assert timedelta(hours=2.9) < begun - utc_now() < timedelta(hours=3.1)
    assert len(clocks) == 1


def test_memory_that_nobody_missed_does_not_run_short_longer() -> None:
    injector, layer = Injector(marker=7), torch.nn.Identity()
    layer.register_forward_pre_hook(injector._allocate, with_kwargs=True)
    for times in (3, 1, 2):
        injector.obey({"fault": "memory", "where": "finetune", "times": times})
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            layer(torch.zeros(1, 4, 8))
    layer(torch.zeros(1, 4, 8))


def test_acknowledged_pairs_that_are_missing_are_in_the_table() -> None:
    grown = asdict(growth([]))
    pages = {"total": 1, "free": 1, "cached": 0, "retired": 0}
    result = {"minutes": 1, "load": 0.5, "requests_per_s": 1.0, "faults": {}, "statuses": {}, "growth": grown}
    result |= {"acknowledged": 40, "pages": pages, "problems": []}
    assert "| acknowledged pairs | 40, all there |" in table({**result, "missing": 0})
    assert "| acknowledged pairs | 40, 2 missing |" in table({**result, "missing": 2})


@pytest.mark.slow
def test_the_daemon_of_a_soak_serves_and_stops(tmp_path: Path) -> None:
    subject = Subject(tmp_path)
    try:
        subject.wait_until_ready()
        assert subject.stop() == 0
    finally:
        subject.remove()
