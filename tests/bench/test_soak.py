"""What a soak makes of what it saw."""

from __future__ import annotations

from edged.bench.soak.run import held_by_nobody


def test_pages_that_the_box_has_back_are_not_missing() -> None:
    assert held_by_nobody({"total": 100, "free": 20, "cached": 30, "retired": 50}) == 0
    assert held_by_nobody({"total": 100, "free": 20, "cached": 30, "retired": 49}) == 1
