"""systemd's part of a soak: the notification socket, and when the daemon last fed its watchdog."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

WATCHDOG_S = 20.0
"""So long may an iteration take where many programs want the cores, with room to spare."""


class Manager:
    """Listens at `path` until the process ends."""

    def __init__(self, path: Path) -> None:
        self.environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": f"{WATCHDOG_S * 1e6:.0f}"}
        """What a daemon has to know of it."""
        self.status = ""
        """What the daemon last said of itself."""
        self._fed_s = time.monotonic()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        threading.Thread(target=self._listen, name="soak-manager", daemon=True).start()

    @property
    def starved_s(self) -> float:
        """Seconds since the watchdog was fed."""
        return time.monotonic() - self._fed_s

    def _listen(self) -> None:
        while True:
            for line in self._socket.recv(4096).decode().splitlines():
                name, _, value = line.partition("=")
                if name == "WATCHDOG":
                    self._fed_s = time.monotonic()
                elif name == "STATUS":
                    self.status = value
