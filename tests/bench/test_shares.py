"""A second's shares are what the engine's sums gained in it."""

from __future__ import annotations

import pytest

from edged.bench.figures import Look, shares


def test_each_second_has_the_shares_of_what_ran_in_it() -> None:
    rows = shares([Look(10.0, (0.0, 0.0, 0.0)), Look(11.0, (0.1, 0.2, 0.3)), Look(13.0, (0.1, 1.2, 0.3))])
    assert [row["at_s"] for row in rows] == [1.0, 3.0]
    assert rows[0]["busy_share"] == pytest.approx(0.6)
    assert rows[1] == pytest.approx(
        {"at_s": 3.0, "busy_share": 0.5, "prefill_share": 0.0, "decode_share": 0.5, "finetune_share": 0.0}
    )


def test_an_iteration_of_several_seconds_filled_the_seconds_before_its_end() -> None:
    rows = shares([Look(0.0, (0.0, 0.0, 0.0)), Look(1.0, (0.0, 0.0, 0.0)), Look(2.0, (0.0, 0.0, 1.5))])
    assert [row["finetune_share"] for row in rows] == pytest.approx([0.5, 1.0])
