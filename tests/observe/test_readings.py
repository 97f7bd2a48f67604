"""What the status says is in the metrics, each figure under its own name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edged.governors.governors import Governors
from edged.governors.limits import EngineLimits, Use
from edged.observe.catalogue import Samples
from edged.observe.readings import device_readings, engine_readings, governor_readings
from edged.telemetry.reading import Reading
from tests.engine.harness import running_engine
from tests.engine.test_resource_limits import BIG, until
from tests.governors.settings import live
from tests.observe.test_observer import values

USE = Use(1 << 20, 1000, 800, 100, 4, 16, True, True, 1.0, 0.0, 0.0, 0, 0)


def test_pages_that_the_box_has_back_are_not_in_use(tmp_path: Path) -> None:
    with running_engine(tmp_path, **BIG) as (engine, _):
        total = engine.status()["pages"]["total"]
        engine.limit(EngineLimits(pages=total - 40))
        until(lambda: engine.status()["pages"]["retired"] == 40, "pages were not given up")
        found = values(Samples(engine_readings(engine.status())))
    pages = {dict(labels)["state"]: value for (name, labels), value in found.items() if name == "edged_pages"}
    assert pages == {"used": 0, "cached": 0, "free": total - 40, "retired": 40}


def test_fine_tuning_that_a_governor_holds_is_not_called_enabled(tmp_path: Path) -> None:
    with running_engine(tmp_path) as (engine, _):
        seen = []
        for limits in (EngineLimits(), EngineLimits(finetune_share=0.0)):
            engine.limit(limits)
            until(lambda held=not limits.finetune_share: engine.status()["finetune"]["held"] == held, "not held")  # type: ignore[misc]
            seen.append(values(Samples(engine_readings(engine.status())))["edged_finetune_enabled", ()])
    assert seen == [1, 0]


def test_what_governors_hold_and_what_was_drawn_can_be_read() -> None:
    governors = Governors(live(), lambda: USE, lambda limits: None)
    reading = Reading(0.0, memory_total_bytes=4096 << 20, memory_available_bytes=200 << 20, power_w=10.0)
    governors.hear(reading)
    hot = replace(reading, at_s=1.0, temperature_c=95.0, temperature_limit_c=100.0, memory_pressure_full_percent=7.0)
    governors.hear(hot)
    found = values(Samples(governor_readings(governors.report) | device_readings(hot.report())))
    assert found["edged_memory_governor_step", ()] == 1
    assert found["edged_power_governor_share_ratio", ()] == 0.25
    assert found["edged_energy_joules_total", (("kind", "idle"),)] == 10.0
    pressure = {labels: value for (name, labels), value in found.items() if name == "edged_memory_pressure_ratio"}
    assert pressure == {(("of", "box"), ("tasks", "full")): 0.07}


def test_a_box_whose_power_cannot_be_read_has_no_energy() -> None:
    governors = Governors(live(), lambda: USE, lambda limits: None)
    governors.hear(Reading(0.0, memory_total_bytes=4096 << 20, memory_available_bytes=3000 << 20))
    found = values(Samples(governor_readings(governors.report)))
    assert {name for name, _ in found} == {"edged_memory_governor_step", "edged_power_governor_share_ratio"}
