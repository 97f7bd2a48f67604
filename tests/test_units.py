"""The systemd units: what systemd-analyze says of them, and that every setting in them is one that the code knows."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from edged.cli.settings import INSTALLED_DATA_DIR, INSTALLED_MODELS

UNITS = Path(__file__).parents[1] / "systemd"
FEDERATED = ("edged-federated.service", "edged-federated-hub.service")
SERVICES = ("edged.service", "edged-fleet.service", "edged-ray.service", *FEDERATED)
MAX_EXPOSURE = 2.5

analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def directives(unit: str) -> list[tuple[str, str]]:
    """Name and value of every setting of a unit file, in order."""
    lines = (line for line in (UNITS / unit).read_text().splitlines() if line and line[0] not in "#[")
    return [(name, value) for name, _, value in (line.partition("=") for line in lines)]


@analyze
def test_the_units_are_verified(tmp_path: Path) -> None:
    """The daemon's program is not at its place on this machine: another one stands for it."""
    for name in (*SERVICES, "edged.socket"):
        (tmp_path / name).write_text((UNITS / name).read_text().replace("/opt/edged/bin/edged", "/bin/true"))
    files = [str(tmp_path / name) for name in (*SERVICES, "edged.socket")]
    result = subprocess.run(["systemd-analyze", "verify", *files], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@analyze
@pytest.mark.parametrize("name", SERVICES)
def test_the_sandbox_leaves_little_exposed(name: str) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(UNITS / name)]
    result = subprocess.run(command, capture_output=True, text=True)
    found = re.search(rf"Overall exposure level for {name}: ([\d.]+)", result.stdout)
    assert found is not None, result.stdout + result.stderr
    assert float(found[1]) <= MAX_EXPOSURE


@pytest.mark.parametrize(
    "hole", ["ProcSubset", "PrivateUsers", "PrivateDevices", "PrivateNetwork", "MemoryDenyWriteExecute"]
)
@pytest.mark.parametrize("name", SERVICES)
def test_every_hole_that_stays_open_says_why(name: str, hole: str) -> None:
    text = (UNITS / name).read_text()
    if dict(directives(name))[hole] == "yes":
        return
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


def test_whoever_has_a_cluster_s_token_reads_nothing_of_the_daemon_and_reaches_no_other_box() -> None:
    for name in ("edged-ray.service", "edged-fleet.service"):
        unit = dict(directives(name))
        assert (unit["User"], unit["IPAddressDeny"], unit["IPAddressAllow"]) == ("edged-ray", "any", "localhost")
        closed = {path.lstrip("-") for path in unit["InaccessiblePaths"].split()}
        assert {INSTALLED_DATA_DIR, "/etc/edged/edged.toml"} <= closed
    assert "m edged-ray" not in (UNITS / "edged.sysusers").read_text()


def test_the_daemon_needs_neither_ray_nor_an_ingress_and_what_ray_started_outlives_its_unit() -> None:
    for name in ("edged.service", "edged.socket"):
        assert "edged-ray" not in (UNITS / name).read_text()
        assert "edged-fleet" not in (UNITS / name).read_text()
    assert dict(directives("edged-ray.service"))["KillMode"] == "process"


@pytest.mark.parametrize("name", FEDERATED)
def test_a_federation_has_accounts_of_its_own_without_data_and_without_a_gpu(name: str) -> None:
    unit = dict(directives(name))
    assert unit["User"] == unit["Group"] == unit["StateDirectory"]
    others = {dict(directives(other))["User"] for other in SERVICES if other != name}
    assert unit["User"] not in others
    assert f"m {unit['User']}" not in (UNITS / "edged.sysusers").read_text()
    closed = {path.lstrip("-") for path in unit["InaccessiblePaths"].split()}
    assert {INSTALLED_DATA_DIR, "/etc/edged"} <= closed
    assert (unit["PrivateDevices"], unit["IPAddressDeny"], unit["IPAddressAllow"]) == ("yes", "any", "localhost")


def test_a_box_takes_part_only_after_its_operator_has_joined() -> None:
    for name in ("edged.service", "edged.socket"):
        assert "edged-federated" not in (UNITS / name).read_text()
    unit = dict(directives("edged-federated.service"))
    assert unit["ConditionPathExists"] == f"{unit['ExecStart'].split()[3]}/joined.json"
