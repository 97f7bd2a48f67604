"""A real daemon in a process of its own, and clients that talk to it over its Unix socket.

The processes are forked from one that has imported everything, so that a start takes a fraction of a second.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai

from tests.command import forked, write_to

START_S = 180.0


def _serve(settings: dict[str, str], log: Path, download_s: float) -> None:
    """What `edged serve` does, with settings from this environment alone."""
    for name in [name for name in os.environ if name.startswith("EDGED_")]:
        del os.environ[name]
    os.environ.update(settings)
    write_to(log)
    import torch

    from edged import assembly, daemon
    from edged.settings.load import load_settings

    torch.set_num_threads(1)
    if download_s:
        find_model = assembly.find_model
        assembly.find_model = lambda model: (time.sleep(download_s), find_model(model))[1]
    load = functools.partial(load_settings, settings.get("EDGED_CONFIG"))
    sys.exit(daemon.run_daemon(load(), load))


class LiveDaemon:
    """`edged serve` with a model, its folder, and settings such as `align__enabled="false"`.

    The model is there after `download_s` seconds, as one that comes from the hub. Other settings may come from a file,
    `config=PATH`; `environ` has variables that are no settings. Passes in idle time are off, so that learning ends.
    """

    def __init__(
        self, folder: Path, model: Path, download_s: float = 0.0, environ: dict[str, str] | None = None, **settings: Any
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.model = folder, model
        self.socket, self.data, self.log_file = folder / "edged.sock", folder / "data", folder / "log"
        ours = {
            "model__path": model,
            "api__socket": self.socket,
            "store__data_dir": self.data,
            "align__practice": False,
        }
        named = {f"EDGED_{name.upper()}": str(value) for name, value in {**ours, **settings}.items()}
        named |= environ or {}
        self.process = forked.Process(target=_serve, args=(named, self.log_file, download_s), daemon=True)
        self.process.start()

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def wait_until_ready(self) -> LiveDaemon:
        deadline = time.monotonic() + START_S
        with self.http() as http:
            while time.monotonic() < deadline:
                assert self.process.is_alive(), self.log
                try:
                    if http.get("/readyz").status_code == 200:
                        return self
                except httpx2.TransportError:
                    pass
                time.sleep(0.05)
        raise AssertionError(f"not ready after {START_S} s: {self.log}")

    def http(self, **options: Any) -> httpx2.Client:
        """Bare HTTP over the socket."""
        transport = httpx2.HTTPTransport(uds=str(self.socket))
        return httpx2.Client(transport=transport, base_url="http://edged", timeout=30.0, **options)

    def openai(self) -> openai.OpenAI:
        """The official client, as an application has it."""
        http = httpx2.Client(transport=httpx2.HTTPTransport(uds=str(self.socket)), timeout=30.0)
        return openai.OpenAI(base_url="http://edged/v1", api_key="none", http_client=http, max_retries=0)

    def async_openai(self) -> openai.AsyncOpenAI:
        """The official asyncio client, with as many connections as it likes."""
        limits = httpx2.Limits(max_connections=None)
        transport = httpx2.AsyncHTTPTransport(uds=str(self.socket), limits=limits)
        http = httpx2.AsyncClient(transport=transport, timeout=60.0)
        return openai.AsyncOpenAI(base_url="http://edged/v1", api_key="none", http_client=http, max_retries=0)

    def send(self, data: bytes, wait_for: bytes = b"") -> bytes:
        """Raw bytes on a connection that is dropped once `wait_for` was read."""
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(30)
            raw.connect(str(self.socket))
            raw.sendall(data)
            seen = b""
            while wait_for not in seen:
                piece = raw.recv(65536)
                if not piece:
                    break
                seen += piece
        return seen

    def status(self) -> dict[str, Any]:
        with self.http() as http:
            return http.get("/v1/status").json()

    def idle(self, within_s: float = 10.0) -> bool:
        """Whether all requests end in time and only shared prefixes keep pages."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            status = self.status()
            queue, pages = status["queue"], status["pages"]
            waiting = queue["waiting"] + queue["prefill"] + queue["decode"] + status["open_requests"]
            if not waiting and pages["free"] + pages["cached"] == pages["total"]:
                return True
            time.sleep(0.02)
        return False

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; returns the exit code."""
        self.signal(number)
        return self.wait()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self, within_s: float = 30.0) -> int:
        """The exit code."""
        self.process.join(within_s)
        assert self.process.exitcode is not None, f"still running after {within_s} s: {self.log}"
        return self.process.exitcode


@contextmanager
def crowd(address: Path, clients: int) -> Iterator[None]:
    """So many connections, each with a request for thousands of tokens; they close, and with them what they asked."""
    body = json.dumps({"prompt": "x", "max_tokens": 8000, "ignore_eos": True})
    request = f"POST /v1/completions HTTP/1.1\r\nHost: edged\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    with contextlib.ExitStack() as held:
        for _ in range(clients):
            client = held.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(str(address))
            client.sendall(request.encode())
        yield


@contextmanager
def running(folder: Path, model: Path, **settings: Any) -> Iterator[LiveDaemon]:
    """A daemon that is ready; it is killed if the test has not stopped it."""
    with started(folder, model, **settings) as daemon:
        yield daemon.wait_until_ready()


@contextmanager
def started(folder: Path, model: Path, **settings: Any) -> Iterator[LiveDaemon]:
    """A daemon that may still be loading."""
    daemon = LiveDaemon(folder, model, **settings)
    try:
        yield daemon
    finally:
        daemon.process.kill()
        daemon.process.join()
