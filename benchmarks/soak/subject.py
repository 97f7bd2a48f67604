"""The daemon under test in a soak: its process, its folder, its faults, and its resources."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.soak.growth import Held, Said
from benchmarks.soak.manager import Manager
from benchmarks.support.checkout import ROOT
from edged.client.client import DaemonError
from examples.quickstart.daemon import TemporaryDaemon

MARKER = 5
"""Token with NaN activations if three of it stand in a row; answers are biased against it."""
_SETTINGS = {
    "STORE__SAVE_EVERY_S": "1",
    "ALIGN__REPLAY_SHARE": "0",
    "GUARD__HELD_OUT_SHARE": "0",
    "FEEDBACK__PAIRS_PER_HOUR": "0",
    "SERVING__ON_UPDATE": "pin",
    "API__LISTEN": "127.0.0.1:0",
    "CACHE__MEMORY_MB": "24",
    "ALIGN__MAX_LOADED_ADAPTERS": "6",
    "LOG__FORMAT": "human",
}


class Subject(TemporaryDaemon):
    """A daemon with the demo model in `folder`, on a small disk of its own if one can be mounted."""

    READY_S, STOP_S = 120.0, 60.0

    def __init__(self, folder: Path) -> None:
        self._orders = folder / "orders.sock"
        data = folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        self.manager = Manager(folder / "notify.sock")
        mount = ["mount", "-t", "tmpfs", "-o", "size=384m", "tmpfs", str(data)]
        self.small_disk = subprocess.run(mount, capture_output=True).returncode == 0
        super().__init__(folder=folder)

    def start(self) -> subprocess.Popen[bytes]:
        """Start a process with fault injection."""
        self._orders.unlink(missing_ok=True)
        places = {"API__SOCKET": str(self.socket), "STORE__DATA_DIR": str(self.data)}
        settings = {f"EDGED_{name}": value for name, value in {**_SETTINGS, **places}.items()}
        arguments = [
            "-m",
            "benchmarks.support.child",
            "benchmarks.soak.inject",
            "edged",
            str(self._orders),
            str(MARKER),
        ]
        return self._spawn(arguments, {**settings, **self.manager.environment, "PYTHONPATH": str(ROOT)})

    def status(self) -> dict[str, Any]:
        """Return `GET /v1/status`."""
        with self.client() as client:
            found: dict[str, Any] = client.get("/v1/status")
            return found

    def order(self, **fault: Any) -> None:
        """Order a fault."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as orders:
            orders.sendto(json.dumps(fault).encode(), str(self._orders))

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait()

    def restart(self) -> None:
        """Start a new process after the previous one ended."""
        self.process = self.start()
        self.wait_until_ready()

    def refused_start(self) -> tuple[int | None, str]:
        """Start a process that must refuse to start; return its exit code and log. None: it ran, and was killed."""
        before = len(self.log)
        self.process = self.start()
        if self.becomes_ready() or self.process.poll() is None:
            self.kill()
            return None, self.log[before:]
        return self.process.returncode, self.log[before:]

    def read_only(self, on: bool) -> None:
        """Make the small disk read-only, or writable again."""
        options = f"remount,{'ro' if on else 'rw'}"
        subprocess.run(["mount", "-o", options, str(self.data)], check=True, capture_output=True)

    def second_daemon(self) -> int:
        """Run another daemon on the same folder; return its exit code."""
        environment = {**os.environ, "EDGED_STORE__DATA_DIR": str(self.data), "EDGED_API__SOCKET": f"{self.socket}2"}
        command = [sys.executable, "-P", "-m", "edged.cli", "serve"]
        return subprocess.run(command, env=environment, capture_output=True, timeout=self.READY_S).returncode

    @property
    def tcp_port(self) -> int:
        """The daemon's listening port."""
        connections = psutil.Process(self.process.pid).net_connections("tcp")
        return next(item.laddr.port for item in connections if item.status == psutil.CONN_LISTEN)

    def held(self) -> Held:
        """Return a sample of the process's resources."""
        process, at_s = psutil.Process(self.process.pid), time.monotonic()
        kinds = []
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                kinds.append(os.readlink(descriptor).startswith("socket:"))
        sockets = sum(kinds)
        rss, threads = process.memory_info().rss, process.num_threads()
        return Held(at_s, rss, self._said(), len(kinds) - sockets, sockets, threads)

    def _said(self) -> Said | None:
        """Return the daemon's own metrics; None if it does not answer."""
        try:
            with self.client() as client:
                text = b"\n".join(client.lines("/metrics")).decode()
        except DaemonError:
            # A thousand connections or a full disk may keep the daemon from answering.
            return None
        found: dict[tuple[str, str], int] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in ("edged_heap_bytes", "edged_python_blocks", "edged_iteration_seconds_count"):
                    key = sample.name, sample.labels.get("state", "")
                    found[key] = found.get(key, 0) + int(sample.value)
        if ("edged_python_blocks", "") not in found:
            return None
        heap, iterations = ("edged_heap_bytes", "in_use"), ("edged_iteration_seconds_count", "")
        return Said(found.get(heap, 0), found["edged_python_blocks", ""], found.get(iterations, 0))

    @property
    def data_bytes(self) -> int:
        """Bytes of the files in the data folder."""
        return sum(file.stat().st_size for file in self.data.rglob("*") if file.is_file())

    def remove(self) -> None:
        """Kill the daemon if it runs, and remove its folder."""
        if self.process.poll() is None:
            self.kill()
        if self.small_disk:
            subprocess.run(["umount", "-l", str(self.data)], check=False)
        super().remove()
