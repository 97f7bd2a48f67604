"""The quickstart, run as a person runs it: what it shows, and that it leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from edged.cli.quickstart.people import TASTES
from tests.cli.conftest import clean_environment, wait_for

FORMAL = "Please set the oven to 200 °C. It is advisable to wait."
CASUAL = "Just set it to 400 °F, that's it!"


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    """The quickstart with its temporary folder inside `tmp_path`."""
    return subprocess.Popen(
        [sys.executable, "-m", "edged.cli.quickstart", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(TMPDIR=str(tmp_path)),
    )


def daemons(tmp_path: Path) -> list[int]:
    """Process ids of daemons on a socket inside `tmp_path`."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "serve" in (process.info["cmdline"] or []) and str(tmp_path) in " ".join(process.info["cmdline"])
    ]


def test_the_two_users_have_opposite_tastes() -> None:
    ada, ben = TASTES
    assert ada.score(FORMAL) > 0 > ada.score(CASUAL)
    assert ben.score(CASUAL) > 0 > ben.score(FORMAL)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopping_it_leaves_neither_a_daemon_nor_a_folder(tmp_path: Path, stop: signal.Signals) -> None:
    process = start(tmp_path)
    wait_for(lambda: bool(daemons(tmp_path)), "no daemon was started")
    process.send_signal(stop)
    _, errors = process.communicate(timeout=30)
    assert process.returncode in (1, 130)
    assert "Traceback" not in errors
    assert not daemons(tmp_path)
    assert not list(tmp_path.glob("edged-quickstart-*"))


@pytest.mark.slow
def test_it_shows_both_users_learning_and_leaves_the_daemon_only_when_asked(tmp_path: Path) -> None:
    process = start(tmp_path, "--seconds", "20", "--keep")
    output, errors = process.communicate(timeout=200)
    try:
        assert process.returncode == 0, errors
        for taste in TASTES:
            assert f"{taste.user} likes {taste}" in output
        for word in ("tok/s", "TTFT", "win rate", "CLPD", "before", "after", "edged chat", "edged metrics"):
            assert word in output
        assert len(daemons(tmp_path)) == 1
        socket = re.search(r"export EDGED_SOCKET=(\S+)", output)
        assert socket is not None
        assert Path(socket.group(1)).is_socket()
    finally:
        for pid in daemons(tmp_path):
            os.kill(pid, signal.SIGTERM)
            psutil.Process(pid).wait(15)
