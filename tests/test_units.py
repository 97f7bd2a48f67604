"""The systemd units: what systemd-analyze says of them, and that every setting in them is one that the code knows."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from edged.cli.settings import INSTALLED_DATA_DIR, INSTALLED_MODELS

UNITS = Path(__file__).parents[1] / "systemd"
MAX_EXPOSURE = 2.5

analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def directives(unit: str) -> list[tuple[str, str]]:
    """Name and value of every setting of a unit file, in order."""
    lines = (line for line in (UNITS / unit).read_text().splitlines() if line and line[0] not in "#[")
    return [(name, value) for name, _, value in (line.partition("=") for line in lines)]


@analyze
def test_the_units_are_verified(tmp_path: Path) -> None:
    """The daemon's program is not at its place on this machine: another one stands for it."""
    for name in ("edged.service", "edged.socket"):
        (tmp_path / name).write_text((UNITS / name).read_text().replace("/opt/edged/bin/edged", "/bin/true"))
    files = [str(tmp_path / name) for name in ("edged.service", "edged.socket")]
    result = subprocess.run(["systemd-analyze", "verify", *files], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@analyze
def test_the_sandbox_leaves_little_exposed() -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(UNITS / "edged.service")]
    result = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"Overall exposure level for edged.service: ([\d.]+)", result.stdout)
    assert found is not None, result.stdout + result.stderr
    assert float(found[1]) <= MAX_EXPOSURE


@pytest.mark.parametrize(
    "hole", ["ProcSubset", "PrivateUsers", "PrivateDevices", "PrivateNetwork", "MemoryDenyWriteExecute"]
)
def test_every_hole_that_stays_open_says_why(hole: str) -> None:
    text = (UNITS / "edged.service").read_text()
    before = text[: text.index(f"\n{hole}=")]
    # The paragraph that the setting is in begins with the reason.
    assert "# Open:" in before[before.rindex("\n\n") :] or "# Open:" in before[-400:]


def test_the_socket_is_everybodys_and_outlives_the_service() -> None:
    socket, service = dict(directives("edged.socket")), dict(directives("edged.service"))
    assert (socket["SocketGroup"], socket["SocketMode"]) == ("edged", "0666")
    folder = Path(socket["ListenStream"]).parent
    assert folder == Path("/run") / service["RuntimeDirectory"]
    assert service["RuntimeDirectoryPreserve"] == "yes"
    # Everybody reaches the socket, where [access] guards, and nothing else of the daemon's.
    assert (service["UMask"], service["StateDirectoryMode"], service["CacheDirectoryMode"]) == ("0077", "0700", "0700")


def test_commands_look_for_models_where_the_service_downloads_them() -> None:
    service = dict(directives("edged.service"))
    variables = dict(variable.split("=") for variable in service["Environment"].split())
    assert variables["HF_HOME"].replace("%C", "/var/cache") == INSTALLED_MODELS
    assert f"/var/lib/{service['StateDirectory']}" == INSTALLED_DATA_DIR


def test_settings_of_newer_systemds_are_apart() -> None:
    names = {name for name, _ in directives("edged.service")}
    assert not names & {"RestartSteps", "RestartMaxDelaySec"}
    assert {"RestartSteps", "RestartMaxDelaySec"} <= {name for name, _ in directives("backoff.conf")}
