"""Power is shared out among what the device was busy with."""

from __future__ import annotations

import pytest

from edged.telemetry.energy import EnergyMeter


def test_a_span_is_shared_by_busy_seconds_and_the_rest_is_idle() -> None:
    meter = EnergyMeter()
    meter.add(10.0, 20.0, 1.0, 1.0, 100, 4)
    meter.add(12.0, 30.0, 2.0, 1.5, 150, 6)
    report = meter.report()
    assert report == {
        "serving_j": 25.0,
        "finetune_j": 12.5,
        "idle_j": 12.5,
        "joules_per_output_token": 0.5,
        "joules_per_pair": 6.25,
    }


def test_more_busy_seconds_than_the_span_has_are_not_more_energy() -> None:
    meter = EnergyMeter()
    meter.add(0.0, 10.0, 0.0, 0.0, 0, 0)
    meter.add(1.0, 10.0, 1.5, 0.5, 10, 0)
    report = meter.report()
    assert report is not None
    assert (report["serving_j"], report["finetune_j"], report["idle_j"]) == pytest.approx((7.5, 2.5, 0.0))
    assert report["joules_per_pair"] is None


def test_time_without_a_reading_counts_for_nothing() -> None:
    meter = EnergyMeter()
    meter.add(0.0, 10.0, 0.0, 0.0, 0, 0)
    meter.add(1.0, None, 1.0, 0.0, 10, 0)
    meter.add(2.0, 10.0, 2.0, 0.0, 20, 0)
    meter.add(3600.0, 10.0, 3.0, 0.0, 30, 0)
    assert meter.report() is None
