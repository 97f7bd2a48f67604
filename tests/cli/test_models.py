"""`edged models`: a model of the hub is downloaded, listed, removed, and told of before it is served.

The hub is a server on this box that answers its client as the real one does.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from edged.cli.doctor.model import find
from edged.cli.main import cli
from edged.models import demo_model_dir, find_model
from edged.settings.load import ModelSettings
from tests.cli.conftest import Daemon, clean_environment, edged, ready, wait_for
from tests.hub import Hub, running_hub

NAME = "ada/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as hub:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
        monkeypatch.setenv("EDGED_SOCKET", str(tmp_path / "s"))
        use(monkeypatch, hub.url)
        yield hub


def use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Have the hub's client ask another server."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )


def run(*words: str, code: int = 0) -> Any:
    """What a command says: its JSON, or the error."""
    result = CliRunner().invoke(cli, ["models", *words, "--config", "/dev/null", *([] if code else ["--json"])])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.stderr if code else json.loads(result.stdout)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The demo model, with a file that edged does not read."""
    folder = Path(shutil.copytree(demo_model_dir(), tmp_path / "repository"))
    (folder / "README.md").write_text("A model.")
    return folder


def test_a_model_is_pulled_listed_and_removed(hub: Hub, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = hub.push(NAME, repository), hub.push(NAME, demo_model_dir(), "v2")
    assert run("list") == {"models": [], "size_bytes": 0}
    pulled = run("pull", NAME)
    read = sum(path.stat().st_size for path in demo_model_dir().iterdir())
    assert (pulled["revision"], pulled["downloaded_bytes"]) == (first, read)
    folder = Path(pulled["folder"])
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in demo_model_dir().iterdir())
    assert find(ModelSettings(path=NAME)) == (folder, None)
    assert (run("pull", NAME)["downloaded_bytes"], run("pull", f"{NAME}@v2")["revision"]) == (0, second)
    listed = {each["revision"]: (each["refs"], each["whole"]) for each in run("list")["models"]}
    assert listed == {first: (["main"], True), second: (["v2"], True)}
    assert run("remove", f"{NAME}@{second[:8]}")["removed"] == [f"{NAME}@{second}"]
    assert "`edged models list` names" in run("remove", f"{NAME}@v2", code=1)
    monkeypatch.setenv("EDGED_MODEL__PATH", NAME)
    assert "is in use: the settings name it" in run("remove", NAME, code=1)
    monkeypatch.setenv("EDGED_MODEL__PATH", "demo")
    assert run("remove", NAME) == {"removed": [f"{NAME}@{first}"], "freed_bytes": read}
    assert run("list")["models"] == []


def test_a_pinned_model_is_served_without_a_network(
    hub: Hub, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.push(NAME, repository)
    folder = Path(run("pull", NAME)["folder"])
    hub.push(NAME, demo_model_dir())
    assert find_model(ModelSettings(path=NAME))[0] != folder
    asked = len(hub.asked)
    assert find_model(ModelSettings(path=NAME, revision=commit)) == (folder, "tiny")
    assert len(hub.asked) == asked
    use(monkeypatch, "http://127.0.0.1:9")
    assert run("pull", f"{NAME}@{commit}")["downloaded_bytes"] == 0
    (folder / "tokenizer.json").unlink()
    assert {each["revision"]: each["whole"] for each in run("list")["models"]}[commit] is False
    seen = find(ModelSettings(path=NAME, revision=commit))[1]
    assert seen is not None
    assert f"`edged models pull {NAME}@{commit}`" in seen.way_out


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ada/none", "the hub has none of that name: check the name; a private one needs HF_TOKEN"),
        (f"{NAME}@v9", 'has no revision "v9": give a branch, a tag or a whole commit'),
        ("eve/closed", "is gated: accept its terms at http"),
        ("ada/a b", "no name on the hub is written so: OWNER/NAME is one"),
        ("ada/huge", "GiB are to be downloaded"),
        ("demo", '"demo" is no model of the hub'),
        ("./tiny", "is not a directory"),
    ],
)
def test_what_cannot_be_pulled_is_told_with_the_way_out(hub: Hub, name: str, told: str) -> None:
    hub.push(NAME, demo_model_dir())
    hub.push("eve/closed", demo_model_dir())
    hub.gated.add("eve/closed")
    hub.push("ada/huge", demo_model_dir())
    hub.says_larger = 1 << 50 if name == "ada/huge" else 0
    assert told in run("pull", name, code=1)


def test_a_hub_that_is_not_reached_is_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "http://127.0.0.1:9")
    assert "could not be downloaded ([Errno 111] Connection refused): check the network" in run("pull", NAME, code=1)


@pytest.mark.slow
def test_a_model_is_told_of_before_it_is_downloaded_or_served(hub: Hub, repository: Path, tmp_path: Path) -> None:
    hub.push(NAME, repository)
    told = run("check", NAME)
    assert (told["state"], told["folder"], run("list")["models"]) == ("ok", None, [])
    assert not (tmp_path / "cache").exists()
    seen = {each["name"]: each["seen"] for each in told["findings"]}
    assert seen["model"].endswith("MiB of weights to download")
    assert seen["served"].startswith("LlamaForCausalLM, 1,722,048 weights")
    assert seen["trained"] == "adapters of 28 linears"
    assert "writes no tools" in seen["tools"]
    assert told["memory"]["fits"]
    assert told["chat"] == {
        "problems": [],
        "tools": False,
        "response_template": False,
        "calls": False,
        "reasoning": False,
    }
    config = json.loads((repository / "config.json").read_text())
    (repository / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 7}))
    result = edged("models", "check", str(repository), "--json", "--config", "/dev/null")
    assert result.returncode == 2
    failed = {each["name"]: each["seen"] for each in json.loads(result.stdout)["findings"] if each["state"] == "fail"}
    assert "num_key_value_heads = 7" in failed["served"]


@pytest.mark.slow
def test_the_model_of_a_running_daemon_is_not_removed(
    hub: Hub, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.push(NAME, repository)
    run("pull", NAME)
    hub.push(NAME, demo_model_dir())
    run("pull", NAME)
    settings = {"model__path": NAME, "model__revision": commit, "store__data_dir": tmp_path / "data"}
    environment = {f"EDGED_{name.upper()}": str(value) for name, value in settings.items()}
    places = {
        "EDGED_SOCKET": str(tmp_path / "s"),
        "HF_HOME": str(tmp_path / "cache"),
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }
    command = [sys.executable, "-m", "edged.cli", "serve"]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, env=clean_environment(**environment, **places), stdout=log, stderr=log) as process,
    ):
        try:
            wait_for(lambda: ready(Daemon(tmp_path / "s")), tmp_path / "log")
            assert "is in use: the running daemon serves it" in run("remove", NAME, code=1)
            assert "in use" in run("remove", f"{NAME}@{commit}", code=1)
            assert len(run("remove", f"{NAME}@main")["removed"]) == 1
        finally:
            process.terminate()
