"""Budgets follow MACE 4.3, and pages go only where the rule says so."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.cache import pruning_budget
from edged.cache.pruning_budget import Pressure, PruningRule, head_budgets
from edged.settings.load import ConfigError, load_settings


def budgets(norms: list[float], blocks: int, most: list[int] | int = 100, tau: float = 0.0) -> list[int]:
    limits = np.array([most] * len(norms) if isinstance(most, int) else most)
    return head_budgets(np.array([norms]), blocks, limits[None], tau)[0].tolist()


def test_budgets_by_hand() -> None:
    # Shares of 20: 10, 6, 4. Of 21: 10.5, 6.3, 4.2, whose floors leave one for the heaviest.
    assert budgets([5.0, 3.0, 2.0], 20) == [10, 6, 4]
    assert budgets([5.0, 3.0, 2.0], 21) == [11, 6, 4]
    # Floors 4, 4, 4, 4 of 4.6: the two that are left go to the first two of equals.
    assert budgets([1.0, 1.0, 1.0, 1.0], 18) == [5, 5, 4, 4]
    # A head cannot keep more than it has, nor less than its sinks.
    assert budgets([9.0, 1.0, 1.0], 12, most=[5, 8, 8]) == [5, 4, 3]
    assert budgets([98.0, 1.0, 1.0], 10) == [8, 1, 1]
    # Below tau a head keeps its sinks, which the lightest other gives up, and more only where the others are full.
    assert budgets([4.0, 0.5, 2.0], 12, tau=1.0) == [8, 1, 3]
    assert budgets([4.0, 0.5, 2.0], 12, most=[4, 9, 4], tau=1.0) == [4, 4, 4]
    # Nothing is known, or what is known is no number.
    assert budgets([0.0, 0.0], 6) == [3, 3]
    assert budgets([float("nan"), 1.0], 6) == [1, 5]
    assert budgets([float("inf"), 1.0], 6) == [1, 5]
    # Tau itself informs, and a head below it gets nothing of the rest while an informative one has room.
    assert budgets([4.0, 1.0], 10, tau=1.0) == [8, 2]
    assert budgets([3.0, 3.0, 0.1], 12, most=[3, 20, 20], tau=1.0) == [3, 8, 1]
    # 0.29 * 100 is a little less than 29 in floating point.
    assert budgets([29.0, 71.0], 100) == [29, 71]
    assert budgets([1.0] * 20, 30) == [2] * 10 + [1] * 10


@given(st.data())
def test_budgets_are_the_floors_and_a_remainder_for_the_heaviest(data: st.DataObject) -> None:
    heads = data.draw(st.integers(1, 8))
    norms = data.draw(st.lists(st.floats(0.01, 10.0), min_size=heads, max_size=heads, unique=True))
    most = data.draw(st.lists(st.integers(1, 30), min_size=heads, max_size=heads))
    blocks = data.draw(st.integers(heads, max(heads, sum(most))))
    got = budgets(norms, blocks, most)
    assert sum(got) == blocks
    assert all(1 <= share <= limit for share, limit in zip(got, most, strict=True))
    floors = [int(norm / sum(norms) * blocks + 1e-9) for norm in norms]
    if all(1 <= floor < limit for floor, limit in zip(floors, most, strict=True)):
        # The paper's case: no limit is met, and each of the heaviest gets one of the rest.
        order = sorted(range(heads), key=lambda head: -norms[head])
        rest = blocks - sum(floors)
        assert got == [floor + (head in order[:rest]) for head, floor in enumerate(floors)]


def test_blocks_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ValueError, match="5 blocks cannot be shared by 2 heads"):
        budgets([1.0, 1.0], 5, most=[2, 2])
    with pytest.raises(ValueError, match="1 blocks cannot be shared by 2 heads"):
        budgets([1.0, 1.0], 1)
    # Each layer has its own blocks: what one has too many does not help another.
    with pytest.raises(ValueError, match="5 blocks cannot be shared by 2 heads"):
        head_budgets(np.ones((2, 2)), 5, np.array([[9, 9], [2, 2]]), 0.0)


def test_pages_go_in_steps_once_the_old_ones_exceed_the_budget() -> None:
    rule = PruningRule(page_size=16, budget_pages=7, recent_tokens=32)
    returned = [rule.returned_pages(rows) for rows in range(16 * 30)]
    # A step of two pages over seven old ones, behind 32 recent tokens.
    first = next(rows for rows, pages in enumerate(returned) if pages)
    assert (first, returned[first]) == (32 + 9 * 16, 2)
    assert returned[32 + 20 * 16] == 13
    assert not rule.nears(32 + 7 * 16 - 1)
    assert rule.nears(32 + 7 * 16)
    # Pruned to its budget it is not pruned again before it has grown by the step.
    assert rule.returned_pages(first - 2 * 16 + 31) == 0
    assert rule.old_pages(32 + 24) == 1


def test_the_least_budget_has_one_page_behind_the_sinks_and_steps_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PruningRule.of(page_size=100) == PruningRule(100, 6, 128)
    monkeypatch.setattr(pruning_budget, "PRUNED_TOKENS", 1)
    monkeypatch.setattr(pruning_budget, "RECENT_TOKENS", 16)
    rule = PruningRule.of(page_size=16)
    assert rule.budget_pages == 2
    assert [rule.returned_pages(16 + 16 * pages) for pages in range(5)] == [0, 0, 0, 1, 2]


def test_pressure_begins_late_and_ends_later() -> None:
    pressure = Pressure("auto")
    seen = []
    assert (pressure.near, pressure.pressed, pressure.urgent, pressure.forced) == (False, False, False, False)
    for free in (50, 30, 29, 11, 9, 15, 19, 20, 15):
        pressure.update(free, 100, decoding=2)
        seen.append((pressure.near, pressure.pressed))
    no, near, pressed = (False, False), (True, False), (True, True)
    assert seen == [no, no, near, near, pressed, pressed, pressed, near, near]
    # Whatever the share: as many sequences may want a page soon.
    pressure.update(60, 100, decoding=30)
    assert (pressure.wanted_pages, pressure.urgent, pressure.pressed) == (60, False, False)
    pressure.update(59, 100, decoding=30)
    assert pressure.pressed
    assert pressure.urgent
    always = Pressure("on")
    always.update(100, 100, decoding=1)
    assert always.pressed
    assert always.near
    assert not always.urgent


def test_a_misspelt_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="'onn': did you mean \"on\""):
        load_settings(environ={}, overrides={"cache.pruning": "onn"})
