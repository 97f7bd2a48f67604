"""A real daemon in a subprocess, shared by the tests of one session, and the `edged` command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from edged.client.client import Address, Client, DaemonError
from tests.command import Command
from tests.models import save_tiny


def clean_environment(**changes: str) -> dict[str, str]:
    """The environment without edged's variables, so that a developer's own daemon is never asked."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EDGED_")}
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "140", **changes}


def edged(*arguments: str, input: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a person would."""
    return subprocess.run(
        [sys.executable, "-m", "edged.cli", *arguments],
        input=input,
        capture_output=True,
        text=True,
        timeout=60,
        env=clean_environment(**environment),
    )


@dataclass(frozen=True)
class Daemon:
    """A running daemon: `run` is the command with its socket."""

    socket: Path

    def run(
        self, *arguments: str, input: str | None = None, code: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the command against this daemon; it must end with `code` and never with a traceback."""
        result = edged(*arguments, input=input, EDGED_SOCKET=str(self.socket), **environment)
        assert result.returncode == code, result.stdout + result.stderr
        assert "Traceback" not in result.stderr
        return result

    def client(self) -> Client:
        """A connection."""
        return Client(Address(sockets=(self.socket,)), timeout_s=30.0)


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("daemon")
    model = save_tiny(folder / "tiny")
    log = folder / "log"
    place = ["--socket", str(folder / "edged.sock"), "--data-dir", str(folder / "data")]
    # Without practice, so that a user's version stays the same once his pairs are learned.
    settings = {"EDGED_CACHE__MEMORY_MB": "64", "EDGED_STORE__SAVE_EVERY_S": "0.1", "EDGED_ALIGN__PRACTICE": "false"}
    process = Command(["serve", "--model", os.path.relpath(model), *place], log, clean_environment(**settings))
    running = Daemon(folder / "edged.sock")
    try:
        wait_for(lambda: process.poll() is not None or ready(running), log)
        assert process.poll() is None, log.read_text()
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0, log.read_text()


def ready(daemon: Daemon) -> bool:
    """Whether the daemon answers requests."""
    try:
        with daemon.client() as client:
            client.get("/readyz")
    except DaemonError:
        return False
    return True


def wait_for(condition: Callable[[], bool], context: object = "", seconds: float = 60.0) -> None:
    """Wait until `condition` holds; fail with `context` when it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, context
        time.sleep(0.05)
