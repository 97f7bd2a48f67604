"""A daemon in a temporary folder, for the quickstart."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from edged.client.client import Address, Client, DaemonError

LOG_LINES = 15


def free_port() -> int:
    """Return a TCP port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


class TemporaryDaemon:
    """A process of `edged serve` on a socket in a new folder; `remove` stops it and deletes the folder.

    It serves the demo model where the options name no other.
    """

    READY_S, STOP_S = 180.0, 12.0
    """Time limits for the daemon to become ready, and to stop by itself."""

    def __init__(self, *options: str, folder: Path | None = None) -> None:
        """Start the daemon; `options` are further ones of `edged serve`."""
        self.folder = folder or Path(tempfile.mkdtemp(prefix="edged-quickstart-"))
        self.socket, self.data = self.folder / "edged.sock", self.folder / "data"
        self.log_file = self.folder / "daemon.log"
        self._options = options
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the daemon's process."""
        places = ["--socket", str(self.socket), "--data-dir", str(self.data)]
        return self._spawn(["-m", "edged.cli", "serve", "--model", "demo", *places, *self._options], {})

    def _spawn(self, arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start Python with these arguments, without this process's settings, and with its output in the log."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("EDGED_")}
        with self.log_file.open("ab") as log:
            # A session of its own: Ctrl-C reaches only this process, which stops the daemon in good order.
            return subprocess.Popen(
                [sys.executable, "-P", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**kept, **environment},
                start_new_session=True,
            )

    def client(self, timeout_s: float = 60.0) -> Client:
        """Return a new connection to the daemon."""
        return Client(Address(sockets=(self.socket,)), timeout_s)

    def becomes_ready(self) -> bool:
        """Wait until the model answers; False if the process ends or time is up."""
        end = time.monotonic() + self.READY_S
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(DaemonError), self.client() as client:
                client.get("/readyz")
                return True
            time.sleep(0.1)
        return False

    def wait_until_ready(self) -> float:
        """Wait until the model answers; return the seconds. Raises DaemonError with the end of the log if it never
        does."""
        started = time.monotonic()
        if self.becomes_ready():
            return time.monotonic() - started
        ended = self.process.poll()
        what = f"is not ready after {self.READY_S:g} s" if ended is None else f"ended with exit code {ended}"
        raise DaemonError(f"the daemon {what}; {self.log_end()}")

    @property
    def log(self) -> str:
        """The daemon's whole log."""
        return self.log_file.read_text(errors="replace")

    def log_end(self) -> str:
        """Return the last lines of the log, with an introduction."""
        return "\n".join(["its log ends with:", *self.log.splitlines()[-LOG_LINES:]])

    def stop(self) -> int:
        """Stop the daemon by SIGTERM, then SIGKILL; return the exit code, or the signal that it took."""
        self.process.terminate()
        try:
            return self.process.wait(self.STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def remove(self) -> None:
        """Stop the daemon and delete the folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
