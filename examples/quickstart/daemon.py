"""A daemon of our own in a temporary folder, for the quickstart."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from edged.client.client import Address, Client, DaemonError

READY_S = 90.0
STOP_S = 12.0
LOG_LINES = 15


class TemporaryDaemon:
    """`edged serve` with the demo model on a socket in a new folder; `remove` ends both."""

    def __init__(self, *options: str) -> None:
        """`options` are further ones of `edged serve`."""
        self.folder = Path(tempfile.mkdtemp(prefix="edged-quickstart-"))
        self.socket = self.folder / "edged.sock"
        self.log = self.folder / "daemon.log"
        command = [
            sys.executable,
            "-P",
            "-m",
            "edged.cli",
            "serve",
            "--model",
            "demo",
            "--socket",
            str(self.socket),
            *options,
        ]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EDGED_")}
        with self.log.open("w") as log:
            # A session of its own: Ctrl-C reaches us alone, and we stop the daemon in good order.
            self.process = subprocess.Popen(
                [*command, "--data-dir", str(self.folder / "data")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def client(self, timeout_s: float = 60.0) -> Client:
        """A new connection to it."""
        return Client(Address(sockets=(self.socket,)), timeout_s)

    def wait_until_ready(self) -> float:
        """Seconds until the model answers. Raises DaemonError with the end of the log when it never will."""
        started = time.monotonic()
        while time.monotonic() - started < READY_S and self.process.poll() is None:
            with contextlib.suppress(DaemonError), self.client() as client:
                client.get("/readyz")
                return time.monotonic() - started
            time.sleep(0.1)
        ended = self.process.poll()
        what = f"is not ready after {READY_S:g} s" if ended is None else f"ended with exit code {ended}"
        raise DaemonError(f"the daemon {what}; {self.log_end()}")

    def log_end(self) -> str:
        """The last lines of the log, introduced."""
        return "\n".join(["its log ends with:", *self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]])

    def remove(self) -> None:
        """Stop the daemon (SIGTERM, then SIGKILL) and delete the folder."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
