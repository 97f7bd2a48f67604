"""What a soak makes of what it saw."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from edged.bench.soak.inject import Injector
from edged.bench.soak.run import held_by_nobody, table
from edged.store import utc_now


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


def test_acknowledged_pairs_that_are_missing_are_in_the_table() -> None:
    growth = {"rss_mib_per_minute": 0.0, "seconds": 60.0, "files": 0, "threads": 0}
    pages = {"total": 1, "free": 1, "cached": 0, "retired": 0}
    result = {"minutes": 1, "load": 0.5, "requests_per_s": 1.0, "faults": {}, "statuses": {}, "growth": growth}
    result |= {"acknowledged": 40, "pages": pages, "problems": []}
    assert "| acknowledged pairs | 40, all there |" in table({**result, "missing": 0})
    assert "| acknowledged pairs | 40, 2 missing |" in table({**result, "missing": 2})
