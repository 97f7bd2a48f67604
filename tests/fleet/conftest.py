"""Three real daemons with a tiny model, and a real ingress before them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from examples.quickstart.daemon import free_port
from tests.cli.conftest import clean_environment, wait_for
from tests.command import Command
from tests.models import save_tiny

TIMES = int(os.environ.get("EDGED_FLEET_TIMES", "1"))
"""How often each fault comes."""


def chance_of(name: str, time_of_it: int) -> random.Random:
    """The chance of a fault's n-th time, by EDGED_FLEET_SEED."""
    return random.Random(f"{os.environ.get('EDGED_FLEET_SEED', '0')} {name} {time_of_it}")


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


class Cable:
    """A connection to a node that can be cut: bytes go from a port of its own to the node's."""

    def __init__(self, target: int) -> None:
        self.port, self.target, self.joined = free_port(), target, False
        self._ends: list[socket.socket] = []
        self._listener: socket.socket | None = None

    def join(self) -> None:
        self.joined = True
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        threading.Thread(target=self._serve, args=[self._listener], daemon=True).start()

    def cut(self) -> None:
        assert self._listener is not None
        self.joined = False
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._ends.clear()

    def _serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    near.close()
                    continue
                self._ends += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@dataclass
class Process:
    """A program with its log."""

    arguments: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    clock_s: int = 0
    """By how much its clock is ahead."""
    process: Command | None = None

    def start(self) -> None:
        self.process = Command(self.arguments, self.log, clean_environment(**self.environment), self.clock_s)

    def send(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + " }"
    return json.dumps(value)


@dataclass
class Fleet:
    """Nodes a, b and c, and the ingress before them."""

    folder: Path
    nodes: dict[str, Process]
    ports: dict[str, int]
    ingress: Process
    port: int
    cable: Cable
    """Between the ingress and node a."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def node_url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def configure(self, **settings: Any) -> None:
        """Have the ingress follow these settings of [fleet], and no others; nobody moves by load unless they say so."""
        settings = {"move_min_s": 1e6, **settings}
        config, told = self.folder / "fleet.toml", self.ingress.log.read_text().count("settings reloaded")
        config.write_text("[fleet]\n" + "".join(f"{name} = {_toml(value)}\n" for name, value in settings.items()))
        if self.ingress.process is not None:
            self.ingress.send(signal.SIGHUP)
            wait_for(lambda: self.ingress.log.read_text().count("settings reloaded") > told)

    def mend(self) -> None:
        """Join the cable, start what has ended, and wait until all nodes are up."""
        if not self.cable.joined:
            self.cable.join()
        for process in (*self.nodes.values(), self.ingress):
            if process.process is not None and process.process.poll() is not None:
                process.start()
        all_come_up(self)

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


@pytest.fixture(scope="package")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with run_fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


def new_ingress(folder: Path, name: str, ports: dict[str, int]) -> tuple[Process, int]:
    """An ingress of nodes at these ports, which does not run yet, and its own port."""
    port = free_port()
    named = [part for node, own in ports.items() for part in ("--node", f"{node}=http://127.0.0.1:{own}")]
    config = ["--listen", f"127.0.0.1:{port}", "--config", str(folder / "fleet.toml")]
    ingress = Process(["fleet", "serve", *named, *config], folder / f"{name}.log")
    ingress.environment["EDGED_STORE__DATA_DIR"] = str(folder / name)
    return ingress, port


@contextlib.contextmanager
def run_fleet(folder: Path, prepare: Callable[[Fleet], None] = id, **settings: float | str) -> Iterator[Fleet]:
    """Nodes a, b and c, and an ingress with these settings, which reaches a by a cable; `prepare` is called first."""
    model = save_tiny(folder / "tiny")
    nodes, ports = {}, {}
    for name in "abc":
        ports[name] = free_port()
        place = ["--socket", str(folder / f"{name}.sock"), "--data-dir", str(folder / name)]
        arguments = ["serve", "--model", os.path.relpath(model), "--listen", f"127.0.0.1:{ports[name]}", *place]
        quiet = {"EDGED_ALIGN__PRACTICE": "false", "EDGED_API__NODE": name, "EDGED_CACHE__MEMORY_MB": "32"}
        quiet["EDGED_SERVING__DRAIN_S"] = "0.02"
        nodes[name] = Process(arguments, folder / f"{name}.log", quiet)
    cable = Cable(ports["a"])
    cable.join()
    running = Fleet(folder, nodes, ports, *new_ingress(folder, "ingress", ports | {"a": cable.port}), cable)
    ingress = running.ingress
    ingress.log.touch()
    running.configure(**settings)
    prepare(running)
    try:
        for process in (*nodes.values(), ingress):
            process.start()
        wait_for(lambda: all_up(running), running, seconds=300.0)
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


def all_come_up(fleet: Fleet) -> None:
    """Wait for nodes that start, which takes long where many programs run."""
    wait_for(lambda: all_up(fleet), seconds=300.0)
