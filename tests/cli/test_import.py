"""`edged feedback import`: whose pairs they are, and what an import that ends early says."""

from __future__ import annotations

import json
import os
import pty
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from edged.cli.feedback import send
from edged.client.client import Client, Refused
from tests.align.feedback.test_open_webui import item
from tests.api.live import LiveDaemon, running
from tests.cli.conftest import Daemon, clean_environment, edged
from tests.cli.test_client import peer
from tests.cli.test_with_daemon import read_until
from tests.models import save_tiny

PAIR = {"prompt": "A:", "chosen": " one", "rejected": " two"}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def exported(daemon: Daemon, user: str) -> list[dict[str, Any]]:
    lines = daemon.run("feedback", "export", "--user", user).stdout.splitlines()
    return [json.loads(line) for line in lines]


def test_an_export_comes_back_whole(daemon: Daemon, tmp_path: Path) -> None:
    with daemon.client() as client:
        body = {"prompt": [70, 71, 72], "user": "kit", "n": 3, "max_tokens": 6, "seed": 1}
        answer = client.post("/v1/completions", body)
        client.post("/v1/feedback", {"completion_id": answer["id"], "signal": "chosen", "choice": 0})
        client.post("/v1/feedback", {**PAIR, "user": "kit", "weight": 0.25})
    rows = exported(daemon, "kit")
    assert any(row.get("prompt_ids") == [70, 71, 72] for row in rows)
    assert [row["weight"] for row in rows] == [1.0] * (len(rows) - 1) + [0.25]

    path = write(tmp_path / "pairs.jsonl", *({**row, "user": "lou"} for row in rows))
    result = json.loads(daemon.run("feedback", "import", str(path), "--json", "--no-wait").stdout)
    counts = {"user": None, "pairs": len(rows), "waiting_already": 0, "bad_lines": []}
    assert result == {**counts, "outcomes": None, "waits_for": None}
    kept = ("messages", "prompt", "prompt_ids", "chosen", "rejected", "weight")
    assert [{key: row.get(key) for key in kept} for row in exported(daemon, "lou")] == [
        {key: row.get(key) for key in kept} for row in rows
    ]
    assert daemon.run("feedback", "import", str(path), "--user", "mia").stdout.startswith(f"{len(rows)} pairs")
    assert len(exported(daemon, "mia")) == len(rows)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"prompt_ids": [10**6]}, "token id 1000000"),
        ({"prompt_ids": []}, "prompt_ids"),
        ({"prompt": "A:", "weight": 0}, "weight"),
        ({"prompt": "A:", "weight": 2}, "weight"),
    ],
)
def test_tokens_and_weights_that_cannot_be_are_bad_lines(
    daemon: Daemon, tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    path = write(tmp_path / "pairs", {"chosen": " one", "rejected": " two", **change})
    result = daemon.run("feedback", "import", str(path), "--user", "nia", code=1)
    assert result.stderr.startswith("line 1: ")
    assert problem in result.stderr


def test_lines_with_the_same_problem_are_told_once_with_the_format_that_is_meant(
    daemon: Daemon, tmp_path: Path
) -> None:
    path = write(
        tmp_path / "pairs",
        *({side: f"\n\nHuman: {i}\n\nAssistant: {side}" for side in ("chosen", "rejected")} for i in range(9)),
    )
    result = daemon.run("feedback", "import", str(path), "--user", "ola", code=1)
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("line 1 and 8 more lines: has neither")
    assert "--format hh" in result.stderr


def test_pairs_of_nobody_are_not_imported(daemon: Daemon, tmp_path: Path) -> None:
    path = write(tmp_path / "pairs", PAIR, {**PAIR, "user": "ned"})
    result = daemon.run("feedback", "import", str(path), code=1)
    assert result.stderr == "line 1: names no user: add one, or give --user NAME\n"
    assert len(exported(daemon, "ned")) == 1
    assert "give --user NAME" in daemon.run("feedback", "import", str(path), "--format", "trl", code=1).stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_an_import_that_breaks_off_says_how_to_go_on(tmp_path: Path, as_json: bool) -> None:
    rows = [{**PAIR, "prompt": f"{i}:"} for i in range(5)]
    path = write(tmp_path / "pairs", *rows)
    body = b'{"id": "fb-1", "duplicate": false}'
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    arguments = ("feedback", "import", str(path), "--user", "ada", "--skip", "1", *(["--json"] if as_json else []))
    with peer(tmp_path / "s", answer, b""):
        result = edged(*arguments, "--socket", str(tmp_path / "s"))
    assert result.returncode == 1
    if as_json:
        data = json.loads(result.stdout)
        assert data["pairs"] == 1
        assert (data["stopped"]["line"], data["stopped"]["skip"]) == (3, 2)
    else:
        assert result.stdout == "1 pairs imported for ada\n"
        assert "edged: the connection to " in result.stderr
        assert result.stderr.endswith("stopped after 1 pairs, at line 3; go on with --skip 2\n")


def test_an_interrupted_import_counts_what_it_did() -> None:
    class Interrupted:
        def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            if body["prompt"] == "2:":
                raise KeyboardInterrupt
            return {"id": "fb-1"}

    def rows() -> Iterator[tuple[int, dict[str, Any]]]:
        yield from ((i + 1, {**PAIR, "prompt": f"{i}:"}) for i in range(5))

    result = send(cast(Client, Interrupted()), "ada", rows(), lambda *progress: None)
    assert (len(result.feedback_ids), result.done, result.line, result.stopped) == (2, 2, 3, "interrupted")


def test_an_import_into_a_full_queue_waits_and_says_for_what() -> None:
    class Full:
        refusals = 2

        def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            if self.refusals:
                self.refusals -= 1
                raise Refused(429, {"error": {"message": "5000 pairs wait", "code": "pair_queue_full"}})
            return {"id": "fb-1"}

    said: list[tuple[Any, ...]] = []
    result = send(cast(Client, Full()), "ada", iter([(1, dict(PAIR))]), lambda *progress: said.append(progress))
    assert (result.feedback_ids, result.bad, result.stopped) == (["fb-1"], [], "")
    assert said == [(0, "5000 pairs wait"), (0, "5000 pairs wait"), (1,)]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    """A daemon that learns two pairs an hour."""
    folder = tmp_path_factory.mktemp("slow")
    model = save_tiny(folder / "tiny")
    settings = {"feedback__pairs_per_hour": 2, "guard__held_out_share": 0}
    with running(folder / "run", model, **settings) as live:
        yield live


def test_an_import_says_how_far_learning_is_until_it_is_interrupted(slow: LiveDaemon, tmp_path: Path) -> None:
    path = write(tmp_path / "pairs", *({**PAIR, "prompt": f"{i}:"} for i in range(3)))
    command = [sys.executable, "-m", "edged.cli", "feedback", "import", str(path), "--user", "ann", "--format", "trl"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command, clean_environment(EDGED_SOCKET=str(slow.socket), TERM="xterm"))
    read_until(terminal, "3 pairs imported for ann; learning: 2 of 3, waits for its hour")
    os.write(terminal, b"\x03")
    read_until(terminal, "2 of 3 have their outcome: 2 learned; the others wait for this: its hour")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_an_import_does_not_wait_for_what_never_comes(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs", PAIR)
    with running(tmp_path / "run", save_tiny(tmp_path / "tiny"), align__enabled="false") as live:
        daemon = Daemon(live.socket)
        shown = daemon.run("feedback", "import", str(path), "--user", "ann", "--format", "trl").stdout
        assert shown.splitlines()[1] == (
            "0 of 1 have their outcome; the others wait for this: learning is switched off (align.enabled = false)"
        )
        path = write(tmp_path / "more", {**PAIR, "prompt": "B:"})
        counts = json.loads(daemon.run("feedback", "import", str(path), "--user", "ann", "--json").stdout)
        assert (counts["outcomes"], "switched off" in counts["waits_for"]) == ({"queued": 1}, True)


def test_ctrl_c_ends_the_wait_for_learning_and_not_the_chat(slow: LiveDaemon) -> None:
    with slow.http() as http:
        for number in range(2):
            http.post("/v1/feedback", json={**PAIR, "user": "kim", "prompt": f"{number}?"}).raise_for_status()
    command = [sys.executable, "-m", "edged.cli", "chat", "--user", "kim", "--max-tokens", "4"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command, clean_environment(EDGED_SOCKET=str(slow.socket), TERM="xterm"))
    os.write(terminal, b"Hello\n/edit Good morning\n")
    read_until(terminal, "noted: 1 pair to learn from")
    os.write(terminal, b"\x03/new\n/quit\n")
    read_until(terminal, "a new conversation")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_what_was_read_of_other_sets_is_told(daemon: Daemon, tmp_path: Path) -> None:
    rows = [{"system": "Be short.", "question": f"Is it {i}?", "chosen": "Yes.", "rejected": "No."} for i in range(2)]
    path = write(tmp_path / "pairs", *rows)
    arguments = ("feedback", "import", str(path), "--format", "trl")
    shown = daemon.run(*arguments, "--user", "orca").stdout
    assert 'in 2 lines the prompt is "system" and "question"\n' in shown
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Is it 0?"}]
    assert exported(daemon, "orca")[0]["messages"] == asked
    as_json = json.loads(daemon.run(*arguments, "--user", "orca2", "--json").stdout)
    assert as_json["taken"] == {'the prompt is "system" and "question"': 2}


def test_a_file_that_holds_no_json_lines_is_refused_in_one_sentence(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps([PAIR, PAIR], indent=1))
    told = 'it is a JSON array (it begins with "["), not JSON lines: `jq -c ".[]" FILE` makes them'
    for skip in ([], ["--skip", "1"]):
        refused = daemon.run("feedback", "import", str(path), "--user", "ann", *skip, code=1)
        assert refused.stderr == f"edged: {path} cannot be read: {told}\n"


def test_single_ratings_and_the_thumbs_of_open_webui_are_imported(daemon: Daemon, tmp_path: Path) -> None:
    good = {"prompt": "A:", "completion": " one", "label": True}
    path = write(tmp_path / "ratings", good, {**good, "label": "yes"}, {**good, "prompt": "B:", "label": False})
    arguments = ("--user", "kto", "--format", "kto", "--json")
    result = json.loads(daemon.run("feedback", "import", str(path), *arguments, code=1).stdout)
    assert result["bad_lines"] == [{"line": 2, "error": "\"label\" is 'yes': it may be true or false"}]
    assert sum(result["outcomes"].values()) == result["pairs"] == 2
    assert [row["label"] for row in exported(daemon, "kto")] == [True, False]

    items = [item("a1", 1, 1), item("a2", -1, 2), item("a3", 1, 3, user="u-2"), {}]
    (tmp_path / "export.json").write_text(json.dumps(items))
    arguments = (str(tmp_path / "export.json"), "--format", "open-webui")
    refused = daemon.run("feedback", "import", *arguments, "--user", "ann", code=1).stderr
    assert refused.startswith("edged: the ratings are of 2 people, and --user names one: keep one by jq '[.[] | ")
    result2 = daemon.run("feedback", "import", *arguments, "--no-wait", code=1)
    assert result2.stderr == 'item 4: "data" is NoneType, not an object\n'
    assert result2.stdout == "2 pairs imported for the users that the items name, 1 bad items not learned\n"
    assert [row["chosen"] for row in exported(daemon, "u-1")] == ["The Rhine."]
    assert [row["completion"] for row in exported(daemon, "u-2")] == ["The Oder."]
