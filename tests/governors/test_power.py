"""Fine-tuning's share of the time under heat, throttling, power modes, battery and quiet hours."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from edged.governors.power import LEVELS, Hysteresis, PowerGovernor, throttling, within
from edged.settings.load import GovernorSettings, minutes_of
from edged.telemetry.reading import Reading
from tests.governors.settings import live


def shares(governor: PowerGovernor, seconds: int, start: float = 0.0, minute: int = 720, **values: Any) -> list[float]:
    return [governor.update(Reading(start + n, **values), start + n, minute) for n in range(seconds)]


def test_fine_tuning_falls_as_the_limit_nears_and_pauses_before_it() -> None:
    governor = PowerGovernor(live())
    fell = [shares(governor, 1, n, temperature_c=n, temperature_limit_c=100.0)[0] for n in range(85, 100)]
    assert fell == [1.0] * 6 + [0.5] * 4 + [0.25] * 3 + [0.0] * 2
    assert governor.reasons == ["99 °C of at most 100 °C"]


def test_it_comes_back_level_by_level_and_not_while_it_hovers() -> None:
    governor = PowerGovernor(live())
    shares(governor, 1, 0, temperature_c=98.5, temperature_limit_c=100.0)
    assert set(shares(governor, 300, 1, temperature_c=96.5, temperature_limit_c=100.0)) == {0.0}
    risen = shares(governor, 120, 301, temperature_c=60.0, temperature_limit_c=100.0)
    assert risen == sorted(risen)
    assert [risen.count(level) for level in (0.25, 0.5)] == [30, 30]
    assert risen[-1] == 1.0


def test_the_setting_is_the_limit_where_it_is_given() -> None:
    governor = PowerGovernor(live(temperature_limit_c=70.0))
    assert shares(governor, 1, temperature_c=69.0, temperature_limit_c=100.0) == [0.0]


def test_throttled_clocks_halve_it_at_once() -> None:
    governor = PowerGovernor(live())
    assert shares(governor, 1, throttle_reasons=("thermal",)) == [0.5]
    assert governor.throttled == ("thermal",)
    assert shares(governor, 20, 1.0, throttle_reasons=())[-1] == 0.5
    assert shares(governor, 31, 21.0, throttle_reasons=())[-1] == 1.0


def test_a_busy_gpu_below_its_clock_is_throttled_and_an_idle_one_is_not() -> None:
    slow = {"gpu_clock_hz": 8e8, "gpu_clock_max_hz": 13e8}
    assert throttling(Reading(0.0, gpu_percent=99.0, **slow)) == ("800 of 1300 MHz though busy",)
    assert throttling(Reading(0.0, gpu_percent=10.0, **slow)) == ()


def test_a_lower_power_mode_counts_against_the_best_that_was_seen() -> None:
    governor = PowerGovernor(live())
    assert shares(governor, 1, gpu_clock_max_hz=13e8, power_mode="MAXN") == [1.0]
    assert shares(governor, 1, 1.0, gpu_clock_max_hz=8e8, power_mode="MODE_30W") == [0.5]
    assert governor.reasons == ["power mode MODE_30W: 62% of full speed"]
    assert shares(governor, 1, 2.0, gpu_clock_max_hz=4e8, power_mode="MODE_15W") == [0.25]


def test_a_power_cap_below_the_default_is_a_lower_mode() -> None:
    governor = PowerGovernor(live())
    assert shares(governor, 1, power_limit_w=100.0, power_limit_default_w=200.0) == [0.25]


@pytest.mark.parametrize(("rule", "share"), [("pause", 0.0), ("slow", 0.5), ("ignore", 1.0)])
def test_on_battery_it_does_as_it_is_told(rule: str, share: float) -> None:
    governor = PowerGovernor(live(on_battery=rule))
    assert shares(governor, 1, on_battery=True) == [share]
    assert shares(governor, 1, 1.0, on_battery=False) == [1.0]


def test_quiet_hours_may_go_past_midnight() -> None:
    governor = PowerGovernor(live(quiet_hours="22:00-06:00"))
    at = {hour: shares(governor, 1, hour, minute=60 * hour)[0] for hour in (5, 6, 12, 21, 22, 23, 0)}
    assert at == {5: 0.0, 6: 1.0, 12: 1.0, 21: 1.0, 22: 0.0, 23: 0.0, 0: 0.0}


@pytest.mark.parametrize("hours", ["22-6", "25:00-06:00", "22:00", "06:00-06:00", "22:00-06:60"])
def test_hours_that_are_none_are_refused(hours: str) -> None:
    with pytest.raises(ValidationError, match="22:00-06:00"):
        GovernorSettings(quiet_hours=hours)


@given(st.integers(0, 1439), st.integers(0, 1439), st.integers(0, 1439))
def test_every_minute_is_in_hours_or_in_the_rest_of_the_day(first: int, end: int, minute: int) -> None:
    if first != end:
        assert within((first, end), minute) != within((end, first), minute)
        text = f"{first // 60:02}:{first % 60:02}-{end // 60:02}:{end % 60:02}"
        assert minutes_of(text) == (first, end)


@given(st.lists(st.sampled_from(LEVELS), min_size=1, max_size=200))
def test_a_ladder_never_stands_above_what_is_wanted_and_rises_one_level_in_its_time(wanted: list[float]) -> None:
    ladder, rises, before = Hysteresis(), [], 1.0
    for now, level in enumerate(wanted):
        after = ladder.follow(level, level, float(now))
        assert after <= level
        if after > before:
            assert LEVELS.index(before) - LEVELS.index(after) == 1
            rises.append(now)
        before = after
    assert all(later - earlier >= 30 for earlier, later in itertools.pairwise(rises))
