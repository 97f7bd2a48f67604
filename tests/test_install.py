"""`tools/install` into a folder: what it writes, that it may be run again, what it keeps and what it takes away."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from edged.cli.settings import INSTALLED_DATA_DIR, INSTALLED_FILE
from edged.settings.load import load_settings
from tests.cli.conftest import edged

INSTALL = Path(__file__).parents[1] / "tools" / "install"
UNITS = Path("usr/local/lib/systemd/system")
FLEET = "try-restart edged-fleet.service edged-ray.service edged-federated.service edged-federated-hub.service"

pytestmark = pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment with an edged in it, by name."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "edged").symlink_to("/bin/true")
    return folder


def run(*arguments: object, code: int = 0, **environment: str) -> str:
    """Run the script as it is; its output and errors."""
    result = subprocess.run(
        [str(INSTALL), *map(str, arguments)], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def files(root: Path) -> dict[str, float]:
    """Every file below, with when it was written."""
    return {str(path.relative_to(root)): path.lstat().st_mtime_ns for path in root.rglob("*") if not path.is_dir()}


def test_an_installation_has_units_settings_user_and_command_and_can_be_repeated(tmp_path: Path, venv: Path) -> None:
    root = tmp_path / "root"
    run("--root", root, "--venv", venv)
    assert (root / UNITS / "edged.service").is_file()
    assert (root / UNITS / "edged.socket").is_file()
    assert os.readlink(root / "usr/local/bin/edged") == "/opt/edged/bin/edged"
    assert (root / "opt/edged/bin/edged").exists()
    user = next(line for line in (root / "etc/passwd").read_text().splitlines() if line.startswith("edged:"))
    assert user.endswith(":/var/lib/edged:/usr/sbin/nologin")
    groups = (root / "etc/group").read_text()
    assert all(f"{group}:x:" in groups for group in ("edged", "video", "render"))
    config = root / "etc/edged/edged.toml"
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    before = files(root)
    again = run("--root", root, "--venv", venv)
    assert "writing" not in again
    assert 'group "edged" becomes an ADMIN' in again
    assert files(root) == before


def test_edited_settings_are_kept_and_untouched_ones_follow_a_new_default(tmp_path: Path, venv: Path) -> None:
    root = tmp_path / "root"
    run("--root", root, "--venv", venv)
    config, default = root / "etc/edged/edged.toml", root / "usr/local/lib/edged/edged.toml"
    # As an earlier release had installed them.
    for path in (config, default):
        path.write_text("# defaults of an earlier release\n")
    run("--root", root, "--venv", venv)
    assert "[model]" in config.read_text()
    config.write_text("[model]\npath = 'mine'\n")
    assert f"keeping {config} as it was edited" in run("--root", root, "--venv", venv)
    assert config.read_text() == "[model]\npath = 'mine'\n"


def test_installed_settings_name_the_services_data_folder(tmp_path: Path, venv: Path) -> None:
    """What `edged backup` and others read when no daemon answers, on the very file that is installed."""
    root = tmp_path / "root"
    run("--root", root, "--venv", venv)
    config, unit = root / "etc/edged/edged.toml", (root / UNITS / "edged.service").read_text()
    assert load_settings(config, environ={}).store.data_dir == INSTALLED_DATA_DIR
    assert f"StateDirectory={Path(INSTALLED_DATA_DIR).name}\n" in unit
    assert f"--config {INSTALLED_FILE}\n" in unit
    assert str(config) == f"{root}{INSTALLED_FILE}"
    examined = edged("doctor", "--json", "--config", str(config), "--socket", str(tmp_path / "none"), "--within", "1")
    folder = next(item for item in json.loads(examined.stdout)["findings"] if item["name"] == "data folder")
    assert INSTALLED_DATA_DIR in folder["seen"]


def test_uninstalling_keeps_data_unless_it_is_told_otherwise(tmp_path: Path, venv: Path) -> None:
    root = tmp_path / "root"
    run("--root", root, "--venv", venv)
    data = root / "var/lib/edged/edged.db"
    data.parent.mkdir(parents=True)
    data.write_text("precious")
    assert "kept:" in run("--root", root, "--uninstall")
    left = files(root)
    assert {"etc/edged/edged.toml", "var/lib/edged/edged.db"} <= set(left)
    assert not [path for path in left if path.startswith(("usr/", "opt/"))]
    assert (venv / "bin/edged").is_symlink()
    run("--root", root, "--uninstall")
    for kept in ("edged.before-restore-20260301-040012", ".edged.restore-abcd", "edgeduser"):
        shutil.copytree(data.parent, data.parent.with_name(kept))
    if os.getuid() == 0:
        run("--root", root, "--uninstall", "--purge")
        assert [path.name for path in (root / "var/lib").iterdir()] == ["edgeduser"]
        assert not (root / "etc/edged").exists()
        assert "edged" not in (root / "etc/passwd").read_text()  # nor "edged-ray"


def test_a_dry_run_changes_nothing(tmp_path: Path, venv: Path) -> None:
    root = tmp_path / "root"
    output = run("--root", root, "--venv", venv, "--dry-run")
    assert f"would run: install -D -m 644 {INSTALL.parent.parent}/systemd/edged.service" in output
    assert "edged is installed" not in output
    assert not root.exists()


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--bogus"], 'unknown option "--bogus"', 2),
        (["--purge"], "goes with --uninstall alone", 1),
        (["--with", "rebuild,nothing"], "--with rebuild,nothing: give some of rebuild, quantized, report, fleet", 1),
        (["--with"], "--with needs a list", 1),
        (["--root"], "--root needs a folder", 1),
        (["--root", "/tmp/x", "--venv", "/no/such"], "--venv /no/such has no bin/edged", 1),
        (["--root", "/tmp/x", "--wheels", "/no/such"], "--wheels /no/such is not a folder", 1),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(arguments: list[str], message: str, code: int) -> None:
    assert message in run(*arguments, code=code)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_installing_for_real_needs_root() -> None:
    def become_nobody() -> None:
        os.setgid(65534)
        os.setuid(65534)

    try:
        result = subprocess.run([str(INSTALL)], preexec_fn=become_nobody, capture_output=True, text=True)
    except PermissionError:
        pytest.skip("nobody else may read this checkout")
    assert "needs root: sudo tools/install" in result.stderr


@pytest.mark.parametrize("version", [249, 254])
def test_a_staged_installation_does_not_ask_the_build_hosts_systemd(tmp_path: Path, venv: Path, version: int) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "systemctl").write_text(f"#!/bin/sh\necho 'systemd {version} ({version})'\n")
    (tmp_path / "bin" / "systemctl").chmod(0o755)
    run("--root", tmp_path / "root", "--venv", venv, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert (tmp_path / "root" / UNITS / "edged.service.d/backoff.conf").is_file()


@pytest.mark.parametrize("state", ["active", "activating", "inactive"])
def test_an_upgrade_that_changes_the_socket_opens_it_anew_and_starts_what_ran(
    tmp_path: Path, venv: Path, state: str
) -> None:
    root, told = tmp_path / "root", tmp_path / "told"
    run("--root", root, "--venv", venv)
    script = """
        . "$1" --root "$2"
        systemd_runs() { true; }
        systemd-tmpfiles() { true; }
        systemctl() { echo "$*" >>"$3"; [ "$1" != is-active ] || echo "$4"; }
        put_units >/dev/null
        start
    """.replace("$3", str(told)).replace("$4", state)

    def upgrade() -> list[str]:
        told.unlink(missing_ok=True)
        subprocess.run(["bash", "-c", script, "bash", str(INSTALL), str(root)], check=True)
        return [line for line in told.read_text().splitlines() if not line.startswith(("--version", "is-active"))]

    assert upgrade() == ["daemon-reload", "enable --now edged.socket", "try-restart edged.service", FLEET]
    (root / UNITS / "edged.socket").write_text("[Socket]\nSocketMode=0660\n")
    *stopped, last, fleet = upgrade()
    assert fleet == FLEET
    assert stopped == ["daemon-reload", "stop edged.socket edged.service", "enable --now edged.socket"]
    assert last == ("try-restart edged.service" if state == "inactive" else "start edged.service")
    assert "SocketMode=0666" in (root / UNITS / "edged.socket").read_text()


def test_a_jetson_without_nvidias_torch_gets_no_other_unless_it_is_told_to(tmp_path: Path) -> None:
    (tmp_path / "release").write_text("# R36 (release)")
    script = """
        set -eu
        . "$1/environment.sh"
        torch_of() { return 1; }
        make_venv "$2/venv" "$3"
    """
    command = ["bash", "-c", script, "bash", str(INSTALL.parent), str(tmp_path), sys.executable]

    def tried(**environment: str) -> subprocess.CompletedProcess[str]:
        named = {**os.environ, "TEGRA_RELEASE": str(tmp_path / "release"), **environment}
        return subprocess.run(command, capture_output=True, text=True, env=named)

    refused = tried()
    assert refused.returncode == 1
    assert f"this is a Jetson, and {sys.executable}" in refused.stderr
    assert "--cpu" in refused.stderr
    assert not (tmp_path / "venv").exists()
    assert tried(CPU_TORCH="1").returncode == 0


def test_tested_versions_are_installed_but_in_the_place_of_what_the_system_brings(tmp_path: Path) -> None:
    """As on a Jetson, whose torch was built for the numpy beside it."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        '#!/bin/sh\ncase "$*" in *--local*) ;; *) echo "numpy==1.26.4"; echo "Typing-Extensions @ file:///x";; esac\n'
    )
    python.chmod(0o755)
    source = f". {INSTALL.parent / 'environment.sh'}; constraints_for {tmp_path} 2.8.0"
    names = {
        skip: {
            line.partition("==")[0]
            for line in subprocess.check_output(["bash", "-c", skip + source], text=True).splitlines()
        }
        for skip in ("", "SKIP_CONSTRAINTS=1; ")
    }
    assert {"torch", "aiohttp"} <= names[""]
    assert not {"numpy", "typing_extensions"} & names[""]
    assert names["SKIP_CONSTRAINTS=1; "] == {"torch"}


def test_modules_in_the_current_folder_are_not_run(tmp_path: Path) -> None:
    """Root installs from wherever it stands, which may be a folder of somebody else's."""
    for name in ("torch", "pip", "hashlib", "sysconfig"):
        (tmp_path / f"{name}.py").write_text(f"open('ran-{name}', 'w')\n__version__ = '9.9'\n")
    script = """
        set -eu
        . "$1/environment.sh"
        recent_enough "$2/bin/python"
        torch_of "$2/bin/python" >/dev/null || true
        digest_of "$2/bin/python" "$1/install" >/dev/null
        "$2/bin/python" -m pip --version >/dev/null || true
    """
    command = ["bash", "-c", script, "bash", str(INSTALL.parent), sys.prefix]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not list(tmp_path.glob("ran-*"))


@pytest.mark.slow
def test_an_environment_of_its_own_runs_the_daemon(tmp_path: Path) -> None:
    """The real thing: a venv with edged in it, by the torch that is here already."""
    root = tmp_path / "root"
    run("--root", root, PYTHON=sys.executable)
    python, script = root / "opt/edged/bin/python", root / "opt/edged/bin/edged"
    assert script.read_text().startswith("#!/opt/edged/bin/python")
    shown = subprocess.run([python, "-m", "edged.cli", "--version"], capture_output=True, text=True, cwd=tmp_path)
    assert shown.stdout.startswith("edged, version")
    before = (root / "opt/edged/edged-stamp").stat().st_mtime_ns
    assert "installing" not in run("--root", root, PYTHON=sys.executable)
    assert (root / "opt/edged/edged-stamp").stat().st_mtime_ns == before
