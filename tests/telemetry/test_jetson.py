"""A Jetson is read through jetson-stats' own client, from a service that answers with a recording."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edged.governors.power import throttling
from edged.telemetry.jetson import Jetson, is_jetson
from edged.telemetry.reading import SourceAbsent, merged

HERE = Path(__file__).parent


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    method = multiprocessing.get_start_method(allow_none=True)
    import jtop.service

    multiprocessing.set_start_method(method, force=True)
    socket = tmp_path / "jtop.sock"
    monkeypatch.setattr(jtop.service, "JTOP_PIPE", str(socket))
    command = [sys.executable, str(HERE / "jtop_service.py"), str(socket), str(HERE / "jtop_orin.json")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "answers\n"
    yield process
    process.kill()
    process.wait()


def test_an_orin_is_read_in_our_units(service: subprocess.Popen[str]) -> None:
    source = Jetson()
    try:
        reading = merged(0.0, [source.read()])
    finally:
        source.close()
    assert reading.gpu_percent == 97.4
    assert (reading.gpu_clock_hz, reading.gpu_clock_max_hz) == (828.75e6, 1300.5e6)
    assert reading.power_w == pytest.approx(27.859)
    assert reading.power_rails_w == pytest.approx({"VDD_CPU_CV": 3.986, "VDD_GPU_SOC": 17.911, "VIN_SYS_5V0": 5.962})
    assert reading.power_mode == "MODE_50W"
    assert reading.fan_percent == 62.7
    # Not the sensor that is off, nor the disk's, though that one is the hottest.
    assert (reading.temperature_c, reading.temperature_limit_c) == (79.5, None)
    assert throttling(reading) == ("829 of 1300 MHz though busy",)


def test_reading_leaves_how_processes_are_started_as_it_was(service: subprocess.Popen[str]) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    source = Jetson()
    source.read()
    source.close()
    assert multiprocessing.get_start_method(allow_none=True) == before


def test_a_service_that_ends_is_told_and_found_again(service: subprocess.Popen[str], tmp_path: Path) -> None:
    source = Jetson(interval_s=0.1)
    source.read()
    service.kill()
    service.wait()
    with pytest.raises(SourceAbsent):
        read_for_ever(source)
    source.close()
    (tmp_path / "jtop.sock").unlink(missing_ok=True)
    with pytest.raises(SourceAbsent, match=r"jtop.service is not active.*install-service"):
        source.read()


def read_for_ever(source: Jetson) -> None:
    while True:
        source.read()


def test_a_jetson_is_known_by_its_release_file_or_its_device_tree(tmp_path: Path) -> None:
    assert not is_jetson(tmp_path)
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/device-tree/compatible").write_bytes(b"nvidia,p3737-0000+p3701-0005\0nvidia,tegra234\0")
    assert is_jetson(tmp_path)
