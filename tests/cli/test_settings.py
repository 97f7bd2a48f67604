"""Commands that read a daemon's files find the installed daemon's settings and data when nothing else is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edged.cli import settings
from edged.cli.doctor import service
from edged.cli.doctor.examine import CHECKS, settings_to_look_with
from edged.cli.doctor.finding import Examination
from edged.cli.main import cli
from edged.cli.settings import INSTALLED_DATA_DIR, settings_of
from edged.models import demo_model_dir
from edged.settings.load import load_settings
from edged.store import Store
from tests.cli.conftest import clean_environment


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of an installed daemon, elsewhere than on a real box; its data are in `data` beside it."""
    file = tmp_path / "edged.toml"
    file.write_text(f'[store]\ndata_dir = "{tmp_path / "data"}"\n[align]\nrank = 8\n')
    monkeypatch.setattr(settings, "INSTALLED_FILE", file)
    for name in [name for name in os.environ if name.startswith("EDGED_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EDGED_SOCKET", "/nonexistent/edged.sock")
    # Also put back afterwards, whatever a command of the installed daemon's makes of it.
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    return file


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def test_a_backup_without_a_daemon_is_of_the_installed_ones_data(installed: Path, tmp_path: Path) -> None:
    Store(tmp_path / "data" / "edged.db").close()
    made = run("backup", str(tmp_path / "b.tar"), "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.output)["data_dir"] == str(tmp_path / "data")


def test_the_doctor_looks_at_the_installed_daemons_database(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data" / "edged.db").write_text("no database at all, and long enough to be read as one" * 20)
    found = {item["name"]: item for item in json.loads(run("doctor", "--json", "--within", "1").output)["findings"]}
    assert found["settings"]["seen"] == str(installed)
    assert found["database"]["state"] == "fail"
    assert str(tmp_path / "data") in found["database"]["seen"]


_INSTALLED_ELSEWHERE = """
import pathlib, sys
from edged.cli import main, settings
settings.INSTALLED_FILE, settings.INSTALLED_MODELS = pathlib.Path(sys.argv.pop(1)), sys.argv.pop(1)
main.main()
"""


@pytest.mark.parametrize("theirs", [False, True])
def test_a_model_that_the_service_downloaded_is_found_unless_hf_home_names_another_folder(
    installed: Path, tmp_path: Path, theirs: bool
) -> None:
    installed.write_text(f'[model]\npath = "ada/tiny"\n[store]\ndata_dir = "{tmp_path / "data"}"\n')
    cached = tmp_path / "cache" / "hub" / "models--ada--tiny"
    shutil.copytree(demo_model_dir(), cached / "snapshots" / "f00d")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("f00d")
    environment = clean_environment(HF_HOME=str(tmp_path / "theirs"))
    if not theirs:
        del environment["HF_HOME"]
    command = (sys.executable, "-c", _INSTALLED_ELSEWHERE, str(installed), str(tmp_path / "cache"))
    options = ("doctor", "--json", "--within", "1", "--socket", str(tmp_path / "s"))
    result = subprocess.run([*command, *options], capture_output=True, text=True, env=environment)
    found = {item["name"]: item["seen"] for item in json.loads(result.stdout)["findings"]}
    assert ("was not downloaded yet" if theirs else str(cached / "snapshots" / "f00d")) in found["model"]


def test_what_is_named_wins_over_what_is_installed(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.toml"
    other.write_text("[align]\nrank = 4\n")
    assert "rank = 8" in run("config", "show").output
    assert "rank = 4" in run("config", "show", "--config", str(other)).output
    monkeypatch.setenv("EDGED_CONFIG", str(other))
    assert "rank = 4" in run("config", "show").output


def test_edited_settings_without_a_folder_mean_the_services(installed: Path) -> None:
    installed.write_text("[align]\nrank = 8\n")
    assert settings_of(None).store.data_dir == INSTALLED_DATA_DIR
    assert settings_of(installed).store.data_dir == INSTALLED_DATA_DIR
    assert settings_of(None, {"store.data_dir": "mine"}).store.data_dir == "mine"


def test_where_nothing_is_installed_the_defaults_hold(installed: Path) -> None:
    installed.unlink()
    assert settings_of(None) == load_settings(None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_root_looks_at_the_installed_daemons_data_as_its_user(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "edged.service").write_text("[Service]\nUser=nobody\n")
    monkeypatch.setattr(service, "_FOLDERS", (str(tmp_path),))
    (tmp_path / "data").mkdir(mode=0o700)

    def seen(*options: str) -> str:
        found = json.loads(run("doctor", "--json", "--within", "1", *options).output)["findings"]
        return next(item["state"] + item["seen"] for item in found if item["name"] == "data folder")

    assert seen().startswith("fail")
    assert "the service's user, nobody" in seen()
    other = tmp_path / "other.toml"
    other.write_text(installed.read_text())
    assert seen("--config", str(other)).startswith("ok")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_settings_and_data_that_this_user_may_not_read_are_said_to_be_there(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed files are their user's alone: the defaults and an empty folder must not pass for them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        data = Path(folder, "edged")
        data.mkdir(mode=0o700)
        monkeypatch.setattr(settings, "INSTALLED_DATA_DIR", str(data))
        installed.chmod(0o600)
        os.seteuid(65534)
        try:
            refused = run("backup", str(data / "b.tar"))
            looked_with, finding = settings_to_look_with(None)
            it = Examination(looked_with, Path(looked_with.store.data_dir), (data / "edged.sock",), 0, 5.0)
            checks = [check for check in CHECKS if check.name in ("database", "adapters")]
            found = [check.finding(it) for check in checks]
        finally:
            os.seteuid(0)
    assert (refused.exit_code, "run this with sudo" in refused.output) == (1, True)
    assert [(item.name, item.state) for item in found if item] == [("database", "warn"), ("adapters", "warn")]
    assert (finding.state, finding.way_out) == ("warn", "`sudo edged doctor`")
    assert found[0] is not None
    assert f"{data} may not be read by this user" in found[0].seen
