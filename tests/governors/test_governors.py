"""Readings in, limits and one log line for each step out."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from edged.governors.governors import Governors
from edged.governors.limits import EngineLimits, Use
from edged.telemetry.reading import Reading
from tests.governors.settings import live

MIB = 1 << 20
USE = Use(MIB, 1000, 800, 100, 4, 16, True, True, 1.3, 0.0, 0.0, 0, 0)
ROOMY = Reading(0.0, memory_total_bytes=4096 * MIB, memory_available_bytes=3000 * MIB)


class Engine:
    """What governors need of one."""

    def __init__(self) -> None:
        self.use, self.limits = USE, []  # type: ignore[var-annotated]

    def governors(self, minute: int = 720, **settings: Any) -> Governors:
        self.settings = live(**settings)
        return Governors(self.settings, lambda: self.use, self.limits.append, lambda: minute)


def test_limits_are_told_when_they_change_and_each_step_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = Engine()
    governors = engine.governors()
    governors.hear(ROOMY)
    governors.hear(replace(ROOMY, at_s=1.0))
    assert engine.limits == []
    governors.hear(replace(ROOMY, at_s=2.0, memory_available_bytes=200 * MIB))
    assert engine.limits == [EngineLimits(pages=800 - 56 - 32)]
    governors.hear(replace(ROOMY, at_s=3.0, temperature_c=95.0, temperature_limit_c=100.0))
    assert engine.limits[-1].finetune_share == 0.25
    assert [record.getMessage() for record in caplog.records] == [
        "memory governor: step 1 of 4, was 0; it holds caches: 200 MiB are available, 256 MiB are to be",
        "power governor: fine-tuning gets 25 % of the time, had 100 %: 95 °C of at most 100 °C",
    ]
    assert [(vars(record)["event"], vars(record)["fields"]) for record in caplog.records] == [
        ("memory_governor", {"step": 1, "before": 0, "holds": ["caches"]}),
        ("power_governor", {"finetune_share": 0.25, "before": 1.0}),
    ]
    report = governors.report
    assert report["memory"]["holds"] == ["caches"]
    assert report["memory"]["kv_budget_bytes"] == 712 * MIB
    assert report["power"]["reasons"] == ["95 °C of at most 100 °C"]


def test_the_stricter_of_two_governors_counts() -> None:
    engine = Engine()
    governors = engine.governors(quiet_hours="11:00-13:00")
    governors.hear(ROOMY)
    assert engine.limits == [EngineLimits(finetune_share=0.0)]


def test_throttling_is_told_with_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    engine = Engine()
    governors = engine.governors()
    governors.hear(replace(ROOMY, throttle_reasons=("thermal",)))
    assert [record.getMessage() for record in caplog.records] == [
        "the device is throttled (thermal): iterations take 1.30 times as long as usual"
    ]
    assert governors.report["power"]["drift_by_throttling"] == 1.3
    engine.use = replace(USE, drift=1.0)
    governors.hear(replace(ROOMY, at_s=1.0, throttle_reasons=("thermal",)))
    assert governors.report["power"]["drift_by_throttling"] is None


def test_governors_that_are_off_hold_nothing_but_still_count_energy() -> None:
    engine = Engine()
    governors = engine.governors(enabled=False)
    governors.hear(replace(ROOMY, at_s=0.0, memory_available_bytes=0, power_w=10.0))
    engine.use = replace(USE, serving_s=0.5, output_tokens=10)
    governors.hear(replace(ROOMY, at_s=1.0, memory_available_bytes=0, power_w=10.0))
    report = governors.report
    assert engine.limits == []
    assert (report["enabled"], report["memory"]["step"]) == (False, 0)
    assert report["energy"]["joules_per_output_token"] == pytest.approx(0.5)


def test_governors_that_are_switched_off_forget_what_they_held() -> None:
    engine = Engine()
    governors = engine.governors()
    short = replace(
        ROOMY,
        memory_available_bytes=100 * MIB,
        cgroup_pressure_some_percent=99.0,
        temperature_c=99.0,
        temperature_limit_c=100.0,
    )
    for second in range(20):
        governors.hear(replace(short, at_s=float(second)))
    assert governors.report["memory"]["step"] == 4
    engine.settings.current = live(enabled=False).current
    governors.hear(replace(ROOMY, at_s=20.0))
    report = governors.report
    assert (report["memory"]["holds"], report["memory"]["reason"], report["power"]["reasons"]) == ([], "", [])
    assert engine.limits[-1] == EngineLimits()
    engine.settings.current = live().current
    governors.hear(replace(ROOMY, at_s=21.0))
    assert governors.report["memory"]["step"] == 0
    assert engine.limits[-1] == EngineLimits()
