"""`edged trace` writes a file that ui.perfetto.dev opens, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Daemon, edged
from tests.cli.test_client import peer
from tests.observe.test_trace import check_format


def test_the_last_seconds_are_in_the_file(daemon: Daemon, tmp_path: Path) -> None:
    with daemon.client() as client:
        client.post("/v1/completions", {"prompt": "hi", "max_tokens": 5})
    file = tmp_path / "trace.json"
    result = json.loads(daemon.run("trace", "--seconds", "60", "-o", str(file), "--json").stdout)
    document = json.loads(file.read_text())
    check_format(document["traceEvents"])
    assert result["events"] == len(document["traceEvents"])
    assert result["iterations"] == document["otherData"]["iterations"] >= 5
    assert list(tmp_path.iterdir()) == [file]


def test_the_next_seconds_are_recorded_with_progress(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    result = daemon.run("trace", "--record", "--seconds", "0.2", "-o", str(file))
    assert "recording: " in result.stderr
    assert "ui.perfetto.dev" in result.stdout
    assert "traceEvents" in json.loads(file.read_text())


def test_a_trace_of_nothing_says_so(tmp_path: Path) -> None:
    answer = b'{"otherData": {"iterations": 0}, "traceEvents": [\n]}'
    with peer(tmp_path / "s", b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer):
        told = edged("trace", "-o", str(tmp_path / "trace.json"), "--socket", str(tmp_path / "s"))
    assert "nothing was served or learned within" in told.stdout


def test_a_file_that_cannot_be_written_and_a_broken_answer_leave_nothing(daemon: Daemon, tmp_path: Path) -> None:
    result = daemon.run("trace", "-o", "/proc/nowhere/trace.json", code=1)
    assert result.stderr.startswith("edged: /proc/nowhere/trace.json cannot be written: ")
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n" + b'{"otherData": {}, "traceEvents": [\n{"ph": "X"}'
    with peer(tmp_path / "s", answer):
        broken = edged("trace", "-o", str(tmp_path / "trace.json"), "--socket", str(tmp_path / "s"))
    assert broken.returncode == 1
    assert "Traceback" not in broken.stderr
    assert not list(tmp_path.glob("*trace*"))
