"""A second's shares are what the engine's sums gained in it."""

from __future__ import annotations

import pytest

from edged.lab.bench.figures import COUNTED, Look, shares


def look(at_s: float, *sums: float, counts: tuple[int, int, int] = (0, 0, 0)) -> Look:
    return at_s, dict(zip(("prefill_s", "decode_s", "finetune_s", *COUNTED), (*sums, *counts), strict=True))


def test_each_second_has_the_shares_of_what_ran_in_it() -> None:
    first, second = look(10.0, 0.0, 0.0, 0.0), look(11.0, 0.1, 0.2, 0.3, counts=(3, 40, 100))
    rows = shares([first, second, look(13.0, 0.1, 1.2, 0.3, counts=(3, 60, 400))])
    assert [row["at_s"] for row in rows] == [1.0, 3.0]
    assert rows[0]["busy_share"] == pytest.approx(0.6)
    assert [rows[0][f"{name}_per_s"] for name in COUNTED] == [3.0, 40.0, 100.0]
    counted = {"requests_per_s": 0.0, "output_tokens_per_s": 10.0, "trained_tokens_per_s": 150.0}
    assert rows[1] == pytest.approx(
        {"at_s": 3.0, "busy_share": 0.5, "prefill_share": 0.0, "decode_share": 0.5, "finetune_share": 0.0, **counted}
    )


def test_an_iteration_of_several_seconds_filled_the_seconds_before_its_end() -> None:
    rows = shares([look(0.0, 0.0, 0.0, 0.0), look(1.0, 0.0, 0.0, 0.0), look(2.0, 0.0, 0.0, 1.5)])
    assert [row["finetune_share"] for row in rows] == pytest.approx([0.5, 1.0])
