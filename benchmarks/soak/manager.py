"""systemd's part in a soak test: the notification socket, and the time of the daemon's last watchdog message."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

WATCHDOG_S = 20.0
"""Watchdog timeout: generous for an iteration while many programs compete for the cores."""


class Manager:
    """A notification socket at `path` that is read until the process ends."""

    def __init__(self, path: Path) -> None:
        self.environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": f"{WATCHDOG_S * 1e6:.0f}"}
        """Environment variables of the daemon."""
        self.status = ""
        """The daemon's last STATUS line."""
        self._fed_s = time.monotonic()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        threading.Thread(target=self._listen, name="soak-manager", daemon=True).start()

    @property
    def starved_s(self) -> float:
        """Seconds since the last watchdog message."""
        return time.monotonic() - self._fed_s

    def _listen(self) -> None:
        while True:
            for line in self._socket.recv(4096).decode().splitlines():
                name, _, value = line.partition("=")
                if name == "WATCHDOG":
                    self._fed_s = time.monotonic()
                elif name == "STATUS":
                    self.status = value
