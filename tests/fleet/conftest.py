"""Three real daemons with a tiny model, and a real ingress before them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from examples.quickstart.daemon import free_port
from tests.cli.conftest import clean_environment, wait_for
from tests.models import save_tiny


def ask(url: str, body: dict[str, Any] | None = None, method: str | None = None) -> tuple[int, Any, dict[str, str]]:
    """Status, JSON (or text) and headers of a request; a body makes it a POST."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text, status, headers = answer.read().decode(), answer.status, dict(answer.headers)
    except urllib.error.HTTPError as error:
        text, status, headers = error.read().decode(), error.code, dict(error.headers)
    return status, json.loads(text) if text.startswith(("{", "[")) else text, headers


@dataclass
class Process:
    """A program with its log."""

    arguments: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "edged.cli", *self.arguments]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=clean_environment(**self.environment))

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)


@dataclass
class Fleet:
    """Nodes a, b and c, and the ingress before them."""

    folder: Path
    nodes: dict[str, Process]
    ports: dict[str, int]
    ingress: Process
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def node_url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def states(self) -> dict[str, str]:
        return {item["name"]: item["state"] for item in ask(f"{self.url}/v1/fleet")[1]["nodes"]}

    def wait_for_state(self, name: str, state: str) -> None:
        wait_for(lambda: self.states()[name] == state, f"{name} is not {state}")

    def user_at(self, name: str) -> str:
        """A user who has not been here before and whose home is `name`."""
        from edged.placement.homes import rendezvous

        while True:
            self.users = getattr(self, "users", 0) + 1
            user = f"user{self.users}"
            if rendezvous(user, self.nodes)[0] == name:
                return user

    def chat(self, user: str | None = None, url: str = "", **more: Any) -> tuple[int, Any, dict[str, str]]:
        body = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 8, **more}
        return ask((url or self.url) + "/v1/chat/completions", body | ({"user": user} if user else {}))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    model = save_tiny(folder / "tiny")
    nodes, ports = {}, {}
    for name in "abc":
        ports[name] = free_port()
        place = ["--socket", str(folder / f"{name}.sock"), "--data-dir", str(folder / name)]
        arguments = ["serve", "--model", os.path.relpath(model), "--listen", f"127.0.0.1:{ports[name]}", *place]
        quiet = {"EDGED_ALIGN__PRACTICE": "false", "EDGED_API__NODE": name, "EDGED_CACHE__MEMORY_MB": "32"}
        nodes[name] = Process(arguments, folder / f"{name}.log", quiet)
    port = free_port()
    named = [part for name in nodes for part in ("--node", f"{name}=http://127.0.0.1:{ports[name]}")]
    ingress = Process(["fleet", "serve", *named, "--listen", f"127.0.0.1:{port}"], folder / "ingress.log")
    ingress.environment["EDGED_STORE__DATA_DIR"] = str(folder / "ingress")
    running = Fleet(folder, nodes, ports, ingress, port)
    try:
        for process in (*nodes.values(), ingress):
            process.start()
        wait_for(lambda: all_up(running), running, seconds=120.0)
        yield running
    finally:
        for process in (*nodes.values(), ingress):
            if process.process is not None and process.process.poll() is None:
                process.send(signal.SIGCONT)
                process.send(signal.SIGTERM)
        for process in (*nodes.values(), ingress):
            if process.process is not None:
                process.process.wait(30)
    for process in (*nodes.values(), ingress):
        assert "Traceback" not in process.log.read_text(), process.log


def all_up(fleet: Fleet, names: str = "abc") -> bool:
    try:
        return {state for name, state in fleet.states().items() if name in names} == {"up"}
    except OSError:
        return False
