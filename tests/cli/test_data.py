"""`edged store`, `backup`, `restore` and `export` as an operator types them."""

from __future__ import annotations

import json
import shlex
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edged.settings.load import load_settings
from tests.cli.conftest import Daemon, clean_environment, edged, ready, wait_for

PAIRS = [
    {"messages": [{"role": "user", "content": f"Question {i}?"}], "chosen": f"Yes, {i}.", "rejected": "No."}
    for i in range(3)
]


@pytest.fixture
def ida(daemon: Daemon, tmp_path: Path) -> str:
    path = tmp_path / "pairs.jsonl"
    text = {"prompt": "2+2 =", "chosen": " 4", "rejected": " 5"}
    path.write_text("".join(json.dumps(pair) + "\n" for pair in [*PAIRS, text]))
    user = f"ida-{tmp_path.name}"[:64]
    daemon.run("feedback", "import", str(path), "--user", user)
    return user


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_hh_goes_out_and_comes_back(daemon: Daemon, ida: str, tmp_path: Path) -> None:
    file = tmp_path / "hh.jsonl"
    out = daemon.run("export", "--format", "hh", "--user", ida, "-o", str(file))
    assert out.stdout == f"3 pairs are in {file}\n"
    assert out.stderr == "1 pairs left out: it is not a chat\n"
    daemon.run("feedback", "import", str(file), "--format", "hh", "--user", "jan")
    found = rows(daemon.run("export", "--user", "jan").stdout)
    assert [{key: pair[key] for key in PAIRS[0]} for pair in found] == PAIRS


def test_trl_files_hold_one_kind_of_pair(daemon: Daemon, ida: str) -> None:
    chats = daemon.run("export", "--format", "trl", "--user", ida)
    assert [row["prompt"] for row in rows(chats.stdout)] == [pair["messages"] for pair in PAIRS]
    assert "1 pairs left out: about plain prompts (--texts writes these)" in chats.stderr
    texts = daemon.run("export", "--format", "trl", "--texts", "--user", ida)
    assert rows(texts.stdout) == [{"prompt": "2+2 =", "chosen": " 4", "rejected": " 5"}]


def test_an_export_begins_at_a_day(daemon: Daemon, ida: str) -> None:
    assert len(rows(daemon.run("export", "--user", ida, "--since", "2020-01-31").stdout)) == 4
    assert daemon.run("export", "--user", ida, "--since", "2999-01-31T10:00").stdout == ""
    wrong = daemon.run("export", "--since", "yesterday", code=1)
    assert 'since = "yesterday" is not a date or time such as 2025-01-31' in wrong.stderr


def test_a_running_daemon_is_backed_up_checked_and_restored(daemon: Daemon, ida: str, tmp_path: Path) -> None:
    file, folder = tmp_path / "all.tar.gz", tmp_path / "new"
    assert "verified" in daemon.run("backup", str(file)).stdout
    summary = json.loads(edged("backup", "--verify", str(file), "--json").stdout)
    assert summary["rows"]["pairs"] >= 4
    restored = json.loads(edged("restore", str(file), "--data-dir", str(folder), "--json").stdout)
    assert restored["rows"] == summary["rows"]
    assert restored["start_with"].startswith(f"edged serve --config {folder}/config.toml")
    assert restored["problem"] == ""
    again = edged("restore", str(file), "--data-dir", str(folder))
    assert again.returncode == 1
    assert "is not empty" in again.stderr
    forced = edged("restore", str(file), "--data-dir", str(folder), "--force")
    assert "what was there is in" in forced.stdout
    file.write_bytes(file.read_bytes()[:-200])
    broken = edged("backup", "--verify", str(file))
    assert broken.returncode == 1
    assert "cannot be read as a backup" in broken.stderr
    assert "Traceback" not in broken.stderr


@pytest.mark.slow
def test_a_restored_folder_is_served_with_its_own_model_by_the_command_that_is_printed(
    daemon: Daemon, ida: str, tmp_path: Path
) -> None:
    def saved() -> bool:
        with daemon.client() as client:
            return any(version["on_disk"] for version in client.get(f"/v1/adapters/{ida}")["versions"])

    wait_for(saved)
    file, folder, tiny = tmp_path / "all.tar", tmp_path / "the new one", daemon.socket.parent / "tiny"
    daemon.run("backup", str(file))
    command = (
        edged("restore", str(file), "--data-dir", str(folder)).stdout.splitlines()[-1].removeprefix("start with: ")
    )
    assert command == f"edged serve --config '{folder}/config.toml' --data-dir '{folder}'"
    assert load_settings(folder / "config.toml", environ={}).model.path == str(tiny)
    again = Daemon(tmp_path / "s")
    arguments = [*shlex.split(command)[1:], "--socket", str(again.socket)]
    process = subprocess.Popen([sys.executable, "-m", "edged.cli", *arguments], env=clean_environment())
    try:
        wait_for(lambda: process.poll() is not None or ready(again))
        assert ida in again.run("adapters", "list").stdout
    finally:
        process.terminate()
        assert process.wait(15) == 0
    # Of a folder whose settings are not known, or name a model that this box does not have.
    for model, reason in (("demo", "adapters were learned on tiny"), ("/x/tiny", '"/x/tiny" is not a directory on')):
        source = ("--data-dir", str(folder), "--config", "/dev/null")
        assert edged("backup", str(file), *source, EDGED_MODEL__PATH=model).returncode == 0
        restored = edged("restore", str(file), "--data-dir", str(tmp_path / Path(model).name))
        assert reason in restored.stdout.splitlines()[-1]


def test_a_stopped_daemons_folder_is_backed_up(daemon: Daemon, ida: str, tmp_path: Path) -> None:
    first, second, folder = tmp_path / "first.tar", tmp_path / "second.tar", tmp_path / "stopped"
    daemon.run("backup", str(first))
    edged("restore", str(first), "--data-dir", str(folder))
    nowhere = {"EDGED_SOCKET": str(tmp_path / "none.sock")}
    result = edged("backup", str(second), "--json", EDGED_STORE__DATA_DIR=str(folder), **nowhere)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["rows"]["pairs"] >= 4
    nothing = edged("backup", str(second), EDGED_STORE__DATA_DIR=str(tmp_path / "empty"), **nowhere)
    assert nothing.returncode == 1
    assert "no daemon answers" in nothing.stderr
    assert "nothing to back up" in nothing.stderr


def test_a_folder_in_use_is_not_read_behind_the_daemons_back(daemon: Daemon, tmp_path: Path) -> None:
    data = daemon.socket.parent / "data"
    result = edged("backup", str(tmp_path / "x.tar"), "--data-dir", str(data))
    assert result.returncode == 1
    assert "in use by another edged" in result.stderr
    refused = edged("restore", str(tmp_path / "x.tar"), "--data-dir", str(data), "--force")
    assert "in use by another edged" in refused.stderr


def test_the_store_is_shown_pruned_and_rewritten(daemon: Daemon, ida: str) -> None:
    data = json.loads(daemon.run("store", "status", "--json").stdout)
    assert data["rows"]["pairs"] >= 4
    assert "completions" in daemon.run("store", "status").stdout
    assert json.loads(daemon.run("store", "prune", "--json").stdout)["deleted"] == {}
    assert "deleted: nothing" in daemon.run("store", "prune").stdout
    assert json.loads(daemon.run("store", "vacuum", "--json").stdout)["bytes_after"] > 0
    assert "database" in daemon.run("status", "--all").stdout


def test_a_user_is_forgotten_in_the_folder_of_a_stopped_daemon(daemon: Daemon, ida: str, tmp_path: Path) -> None:
    file, folder = tmp_path / "all.tar", tmp_path / "stopped"
    with daemon.client() as client:
        wait_for(lambda: any(item["on_disk"] for item in client.get(f"/v1/adapters/{ida}")["versions"]))
    daemon.run("backup", str(file))
    edged("restore", str(file), "--data-dir", str(folder))
    forget, nowhere = ("adapters", "forget", "--yes", ida), {"EDGED_SOCKET": str(tmp_path / "none.sock")}
    asked = edged(*forget, **nowhere)
    assert asked.returncode == 1
    assert "no daemon answers" in asked.stderr
    assert "of one that is stopped, name the folder: --data-dir DIR" in asked.stderr
    done = edged(*forget, "--data-dir", str(folder), **nowhere)
    assert done.returncode == 0, done.stderr
    assert f"{ida} is forgotten" in done.stdout
    assert "nothing was found" in done.stdout
    assert ida.encode() not in b"".join(path.read_bytes() for path in folder.glob("edged.db*"))
    assert not list((folder / "adapters").glob(f"*/{ida}"))
    for name in (ida, "*", ".."):
        again = edged(*forget[:-1], name, "--data-dir", str(folder), **nowhere)
        assert again.returncode == 1
        assert f'nothing of "{name}" is stored in {folder}' in again.stderr
    assert list((folder / "adapters").glob("*")), "the others' are there"


@pytest.mark.slow
def test_a_stopped_daemons_database_is_pruned(daemon: Daemon, ida: str, tmp_path: Path) -> None:
    file, folder, kept = tmp_path / "all.tar", tmp_path / "stopped", tmp_path / "kept.toml"
    daemon.run("backup", str(file))
    edged("restore", str(file), "--data-dir", str(folder))
    with sqlite3.connect(folder / "edged.db") as db:
        columns = "created_at, prefill_tokens, decode_tokens, finetune_tokens, finetune_units, latency_ms"
        many = (
            f"INSERT INTO iteration_samples ({columns}, predicted_ms, free_pages) VALUES ('2020', 0, 0, 0, 0, 0, 0, 0)"
        )
        for _ in range(21_100):
            db.execute(many)
    data = json.loads(edged("store", "prune", "--json", "--data-dir", str(folder), "--config", str(kept)).stdout)
    assert data["deleted"]["iteration_samples"] >= 1099
    empty = edged("store", "prune", "--data-dir", str(tmp_path))
    assert (empty.returncode, "has no edged.db" in empty.stderr) == (1, True)


@pytest.mark.parametrize("command", [("adapters", "forget", "--yes", "ida"), ("store", "prune")])
def test_a_folder_in_use_is_not_changed_behind_the_daemons_back(daemon: Daemon, command: tuple[str, ...]) -> None:
    result = edged(*command, "--data-dir", str(daemon.socket.parent / "data"))
    assert result.returncode == 1
    assert "in use by another edged" in result.stderr
    assert "Traceback" not in result.stderr


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""The environment of a program that writes text as ASCII."""


def test_files_and_pipes_are_utf8_whatever_the_locale(daemon: Daemon, tmp_path: Path) -> None:
    pair = {"prompt": "Grüße, ", "chosen": "wie schön ☀", "rejected": "naja 😐"}
    source, target = tmp_path / "pairs.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(pair, ensure_ascii=False) + "\n", encoding="utf-8")
    taken = daemon.run("feedback", "import", str(source), "--user", "uta", "--json", **ASCII)
    assert json.loads(taken.stdout)["pairs"] == 1
    daemon.run("export", "--user", "uta", "--format", "trl", "--texts", "-o", str(target), **ASCII)
    piped = daemon.run("export", "--user", "uta", "--format", "trl", "--texts", **ASCII)
    assert rows(target.read_text("utf-8")) == rows(piped.stdout) == [pair]
    question = ("ask", "--json", "--max-tokens", "1", "-")
    used = [json.loads(daemon.run(*question, input="Grüße", **locale).stdout)["usage"] for locale in (ASCII, {})]
    assert used[0]["prompt_tokens"] == used[1]["prompt_tokens"]
