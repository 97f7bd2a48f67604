"""Venn Algorithm 4: which tier is drawn, and when waiting for it pays."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.federated.tiers import Tier, TierProfile


def profile(participants: int) -> TierProfile:
    """Half of the participants are slow and answer after 200 s, half are fast and answer after 80 s."""
    known = TierProfile()
    known.responses.extend([(10.0, 200.0), (40.0, 80.0)] * (participants // 2))
    return known


@given(tiers=st.integers(1, 5), speedup=st.floats(0.1, 1.5), schedule_s=st.floats(1, 1e4), response_s=st.floats(1, 1e3))
def test_waiting_pays_where_line_5_holds(tiers: int, speedup: float, schedule_s: float, response_s: float) -> None:
    tier = Tier(0.0, 1.0, speedup, response_s)
    ratio = response_s / schedule_s
    margin = 1 + ratio - (tiers + speedup * ratio)
    if abs(margin) > 1e-9:
        assert (tier.gain_s(schedule_s, tiers * schedule_s) > 0) == (margin > 0)


def test_tiers_are_even_and_their_speedup_is_of_the_95th_percentiles() -> None:
    drawn = {profile(40).draw(2, random.Random(seed)) for seed in range(20)}
    assert drawn == {Tier(float("-inf"), 40.0, 1.0, 200.0), Tier(40.0, float("inf"), 0.4, 200.0)}
    fast = next(tier for tier in drawn if tier and tier.speedup < 1)
    assert (fast.holds(40.0), fast.holds(39.9)) == (True, False)


@pytest.mark.parametrize("participants", [0, 38])
def test_a_campaign_with_few_participants_is_matched_with_any_box(participants: int) -> None:
    assert profile(participants).draw(2, random.Random(0)) is None


def test_participants_of_one_speed_are_no_tiers() -> None:
    alike = TierProfile()
    alike.responses.extend([(40.0, 80.0)] * 60)
    tiers = {alike.draw(2, random.Random(seed)) for seed in range(20)}
    assert tiers == {None, Tier(40.0, float("inf"), 1.0, 80.0)}
