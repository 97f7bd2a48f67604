"""`edged finetune` and `edged files` with a running daemon."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.api.jobs.test_jobs import preferences
from tests.cli.conftest import Daemon, edged


def test_a_file_becomes_an_adapter_and_its_job_is_shown(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_bytes(preferences(4))
    valid = tmp_path / "valid.jsonl"
    valid.write_bytes(preferences(2))
    arguments = (
        "--suffix",
        "made",
        "--method",
        "dpo",
        "--epochs",
        "1",
        "--batch-size",
        "2",
        "--beta",
        "0.2",
        "--learning-rate-multiplier",
        "2",
        "--valid",
        str(valid),
        "--watch",
    )
    made = daemon.run("finetune", "create", str(path), *arguments)
    assert "step 2 of 2: training loss" in made.stderr
    assert "step 2 of 2: validation loss" in made.stderr
    assert made.stdout.endswith("succeeded: tiny:made answers\n")
    assert daemon.run("ask", "Hello there", "--user", "made", "--max-tokens", "4").stdout
    job = made.stdout.split()[0]
    shown = json.loads(daemon.run("finetune", "show", job, "--json").stdout)
    assert shown["method"]["dpo"]["hyperparameters"]["beta"] == 0.2
    assert shown["method"]["dpo"]["hyperparameters"]["learning_rate_multiplier"] == 2.0
    assert shown["events"][0]["message"] == "The job has successfully completed: tiny:made is ready"
    assert [each["step_number"] for each in shown["checkpoints"]] == [2]
    assert "checkpoints: tiny:made\n" in daemon.run("finetune", "show", job).stdout
    assert json.loads(daemon.run("finetune", "list", "--json").stdout)["data"][0]["id"] == job
    assert job in daemon.run("finetune", "list").stdout
    assert "nothing to cancel" in daemon.run("finetune", "cancel", job, code=1).stderr
    assert daemon.run("finetune", "watch", job).stdout == f"{job} succeeded: tiny:made answers\n"


def test_a_file_is_added_listed_and_deleted(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / 'a "file".jsonl'
    path.write_bytes(b'{"text": "a"}\n')
    added = json.loads(daemon.run("files", "add", str(path), "--json").stdout)
    assert (added["bytes"], added["filename"]) == (14, "a 'file'.jsonl")
    assert added["id"] in daemon.run("files", "list").stdout
    held = len(json.loads(daemon.run("files", "list", "--json").stdout)["data"])
    assert daemon.run("files", "show", added["id"]).stdout == "a 'file'.jsonl: 14 bytes, fine-tune\n"
    typed = daemon.run("finetune", "create", str(path), "--valid", str(tmp_path / "typo.jsonl"), code=1)
    assert "typo.jsonl cannot be read" in typed.stderr
    assert len(json.loads(daemon.run("files", "list", "--json").stdout)["data"]) == held
    failed = daemon.run("finetune", "create", added["id"], "--watch", code=1)
    assert "failed: line 1: it has none of the fields" in failed.stdout
    assert daemon.run("files", "delete", added["id"]).stdout == f"{added['id']} is deleted\n"
    assert "does not exist" in daemon.run("files", "show", added["id"], code=1).stderr
    missing = daemon.run("files", "add", str(tmp_path / "none.jsonl"), code=1).stderr
    assert missing == f"edged: {tmp_path}/none.jsonl cannot be read: No such file or directory\n"


def test_a_file_whose_name_is_not_utf_8_is_added_and_learned(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"x\xff.jsonl")
    path.write_bytes(preferences(2))
    added = json.loads(daemon.run("files", "add", str(path), "--json").stdout)
    assert added["filename"] == "x\N{REPLACEMENT CHARACTER}.jsonl"
    arguments = ("--method", "dpo", "--epochs", "1", "--suffix", "named", "--watch")
    assert daemon.run("finetune", "create", str(path), *arguments).stdout.endswith("tiny:named answers\n")
    gone = tmp_path / os.fsdecode(b"\xff\xfe.jsonl")
    assert "cannot be read" in daemon.run("files", "add", str(gone), code=1).stderr
    assert "cannot be read" in daemon.run("finetune", "create", str(gone), code=1).stderr


def test_no_text_of_a_file_reaches_the_terminal_as_a_control(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "\x9b2J\u202ename.jsonl"
    path.write_text(r'{"messages": [{"role": "\u001b]0;pwned\u0007\u009b2J\u202e", "content": "x"}]}' + "\n")
    made = daemon.run("finetune", "create", str(path), "--watch", code=1)
    assert made.stdout, made.stderr
    job = made.stdout.split()[0]
    file_id = json.loads(daemon.run("files", "list", "--json").stdout)["data"][0]["id"]
    spoken = [made.stdout, made.stderr]
    for command in (
        *(("finetune", "show", job), ("finetune", "show", job, "--json"), ("finetune", "list"), ("files", "list")),
        *(("files", "show", file_id), ("files", "list", "--json"), ("ask", "x", "--user", "\x1b[2J")),
    ):
        done = edged(*command, "--socket", str(daemon.socket))
        spoken += [done.stdout, done.stderr]
    assert any(r"\u001b]0;pwned\u0007" in text for text in spoken)
    assert not any(control in text for text in spoken for control in "\x1b\x07\x9b\u202e")
