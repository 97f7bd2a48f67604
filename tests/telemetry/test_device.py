"""What the box tells is read once a second; what is absent is told once, with the reason."""

from __future__ import annotations

import logging
import threading
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import psutil
import pytest

from edged.telemetry import device
from edged.telemetry.cgroup import ControlGroup, pressure_percent
from edged.telemetry.device import DeviceMonitor
from edged.telemetry.host import Host
from edged.telemetry.nvml import Nvml, throttles
from edged.telemetry.reading import Reading, SourceAbsent, merged

STATUS_FIELDS = {
    "name",
    "cpu_percent",
    "cpu_count",
    "memory_total_bytes",
    "memory_available_bytes",
    "process_cpu_percent",
    "process_rss_bytes",
    "temperature_c",
}


def test_the_box_and_this_process_are_read() -> None:
    status = DeviceMonitor("cpu", [Host()]).read()
    assert status.keys() >= STATUS_FIELDS
    assert status["name"] == "cpu"
    assert status["memory_total_bytes"] == psutil.virtual_memory().total
    assert 0 < status["memory_available_bytes"] < status["memory_total_bytes"]
    assert status["process_rss_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


def test_subscribers_hear_of_every_reading_until_it_stops() -> None:
    monitor, heard, twice = DeviceMonitor("cpu", [Host()], every_s=0.01), [], threading.Event()

    def hear(reading: Reading) -> None:
        heard.append(reading)
        if len(heard) == 1:
            raise RuntimeError("a subscriber's fault ends no readings")
        twice.set()

    monitor.subscribe(hear)
    monitor.start()
    assert twice.wait(10.0)
    monitor.stop()
    assert heard[0].at_s < heard[1].at_s
    assert monitor.latest is heard[-1]


class Flaky:
    """A source that is there every third time."""

    name = "flaky"

    def __init__(self) -> None:
        self.asked = self.closed = 0

    def read(self) -> dict[str, Any]:
        self.asked += 1
        if self.asked % 3:
            raise SourceAbsent("its service sleeps")
        return {"power_w": 5.0}

    def close(self) -> None:
        self.closed += 1


def test_an_absent_source_is_told_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "TRY_AGAIN_S", 0.0)
    caplog.set_level(logging.INFO)
    source = Flaky()
    monitor = DeviceMonitor("cpu", [source])
    assert monitor.latest.power_w is None
    assert monitor.read()["absent_sources"] == {"flaky": "its service sleeps"}
    monitor._sample()
    assert monitor._sample().power_w == 5.0
    assert monitor.read()["absent_sources"] == {}
    assert [record.message for record in caplog.records] == [
        "flaky is not read: its service sleeps",
        "flaky is read again",
    ]
    assert source.closed == 2


def test_an_absent_source_is_left_alone_for_a_while() -> None:
    source = Flaky()
    monitor = DeviceMonitor("cpu", [source])
    monitor._sample()
    assert source.asked == 1


@pytest.mark.skipif(bool(find_library("nvidia-ml")), reason="NVML is here")
def test_a_box_without_an_nvidia_driver_says_so() -> None:
    source = Nvml("cpu", {})
    with pytest.raises(SourceAbsent, match="NVML Shared Library Not Found"):
        source.read()
    source.close()


def test_only_throttling_that_nobody_asked_for_counts() -> None:
    idle, application_clocks, thermal, power_cap = 0x1, 0x2, 0x20, 0x4
    assert throttles(idle | application_clocks) == ()
    assert throttles(idle | thermal | power_cap) == ("power cap", "thermal")


def test_the_sensor_nearest_to_its_limit_counts() -> None:
    cool, hot, unlimited = (60.0, 65.0), (80.0, 100.0), (90.0, None)
    assert merged(0.0, [{"heats": [hot]}, {"heats": [cool, unlimited]}]).temperature_c == 60.0
    assert merged(0.0, [{"heats": [unlimited]}, {"heats": [(20.0, None)]}, {}]).temperature_c == 90.0


def test_a_source_that_reads_what_no_reading_has_is_an_error() -> None:
    with pytest.raises(TypeError, match="'watts'"):
        merged(0.0, [{"watts": 3.0}])


def zone(folder: Path, temperature_c: float, **trips: float) -> None:
    folder.mkdir(parents=True)
    (folder / "temp").write_text(f"{temperature_c * 1e3:.0f}\n")
    for number, (kind, limit_c) in enumerate(trips.items()):
        (folder / f"trip_point_{number}_type").write_text(kind + "\n")
        (folder / f"trip_point_{number}_temp").write_text(f"{limit_c * 1e3:.0f}\n")


def test_a_thermal_zones_limit_is_where_it_slows_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "sensors_temperatures", dict, raising=False)
    zone(tmp_path / "class/thermal/thermal_zone0", 71.0, critical=104.5, passive=99.0)
    zone(tmp_path / "class/thermal/thermal_zone1", 80.0, critical=104.5, hot=102.0)
    reading = merged(0.0, [Host(sys=tmp_path).read()])
    assert (reading.temperature_c, reading.temperature_limit_c) == (80.0, 102.0)


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)


def test_a_control_groups_tightest_bound_is_what_is_available(tmp_path: Path) -> None:
    group(tmp_path / "box", max="400000000\n", current="350000000\n", stat="anon 1\ninactive_file 30000000\n")
    group(tmp_path / "box/edged", max="max\n", high="900000000\n", current="100000000\n", stat="inactive_file 0\n")
    group(tmp_path / "box/edged", pressure="some avg10=12.50 avg60=0.00 avg300=0.00 total=0\n")
    cgroup = ControlGroup(tmp_path / "box/edged", tmp_path)
    bound = cgroup.bound()
    assert bound is not None
    assert (bound.total_bytes, bound.available_bytes) == (400_000_000, 80_000_000)
    values = Host(cgroup=cgroup).read()
    assert (values["memory_total_bytes"], values["memory_available_bytes"]) == (400_000_000, 80_000_000)
    assert values["cgroup_pressure_some_percent"] == 12.5


def test_without_bounds_or_pressure_files_nothing_is_made_up(tmp_path: Path) -> None:
    group(tmp_path / "edged", max="max\n", current="100\n")
    cgroup = ControlGroup(tmp_path / "edged", tmp_path)
    assert cgroup.bound() is None
    assert cgroup.pressure() is None
    assert pressure_percent(tmp_path / "nothing", "some") is None


def test_the_own_control_group_is_found_by_proc(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/old\n0::/system.slice/edged.service\n")
    assert ControlGroup.own(tmp_path / "sys", tmp_path / "proc") is None
    group(tmp_path / "sys/system.slice/edged.service", max="1000\n", current="10\n")
    cgroup = ControlGroup.own(tmp_path / "sys", tmp_path / "proc")
    assert cgroup is not None
    assert cgroup.bound() is not None
