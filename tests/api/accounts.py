"""Clients that are other accounts of this box, as the kernel sees them.

Who connects is told by the effective uid of that moment, so that no other process is needed: a test that runs as root
changes it for the connection alone.
"""

from __future__ import annotations

import http.client
import json
import os
import pwd
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can connect as another account")
ANN, BOB = "nobody", "daemon"
"""Two accounts that every Linux has."""


@contextmanager
def account(name: str) -> Iterator[None]:
    """Be another account."""
    entry = pwd.getpwnam(name)
    os.setegid(entry.pw_gid)
    os.seteuid(entry.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that other accounts can reach; pytest's own are closed to them."""
    folder = Path(tempfile.mkdtemp(prefix="edged-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class Answer:
    """Status, headers and body of a response."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.data = response.status, response.headers, response.read()

    @property
    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.data))

    @property
    def code(self) -> str | None:
        """The error's code; None where there is no error."""
        return self.json.get("error", {}).get("code")

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.data.splitlines()]


class Client:
    """One account's way to the daemon: a connection per request, over a Unix socket's path or a TCP port."""

    def __init__(self, name: str, address: Path | int) -> None:
        self.name, self.address = name, address

    def connected(self) -> socket.socket:
        with account(self.name):
            if isinstance(self.address, int):
                return socket.create_connection(("127.0.0.1", self.address), timeout=60)
            raw = socket.socket(socket.AF_UNIX)
            raw.settimeout(60)
            raw.connect(str(self.address))
            return raw

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = self.connected()
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body)
            connection.request(method, path, data, headers)
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.call("GET", path)

    def post(self, path: str, body: Any) -> Answer:
        return self.call("POST", path, body)

    def ask(self, **fields: Any) -> Answer:
        """A short completion."""
        return self.post("/v1/completions", {"prompt": "hello", "max_tokens": 4, "ignore_eos": True, **fields})
