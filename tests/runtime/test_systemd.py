"""What systemd hears of a daemon: ready, status, signs of life, reload, stop; and the sockets that it hands over.

systemd is played by real sockets: a datagram socket that receives, a listening one that is inherited.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from edged.client.client import Address, Client
from edged.runtime.systemd import notify, watchdog_s
from edged.store import Store
from tests.api.live import crowd, started
from tests.cli.conftest import clean_environment
from tests.models import save_tiny

WATCHDOG_S = 0.8
_AS_SYSTEMD = """
import os, sys
os.environ["LISTEN_PID"] = os.environ["WATCHDOG_PID"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""systemd sets these to the process that it starts: a helper that becomes the daemon knows its own id."""
_HANGING = """
import os, sys, threading, time
from edged import daemon
from edged.settings.load import load_settings
from edged.engine.engine import Engine

start = Engine.start

def start_and_hang(engine):
    start(engine)
    hang = lambda: engine.commands.post(lambda: time.sleep(3600))
    threading.Thread(target=lambda: (sys.stdin.read(), hang()), daemon=True).start()

Engine.start = start_and_hang
sys.exit(daemon.run_daemon(load_settings()))
"""
"""A daemon whose engine thread hangs once stdin is closed, as in a device call that never returns."""
_LISTENING = """
import os, sys
from edged.http.sockets import ListenError, take_addresses
from edged.settings.load import load_settings
try:
    take_addresses(load_settings().api, False, os.environ)
except ListenError as error:
    sys.exit(str(error))
"""
"""What a daemon without tokens does with the sockets that it is handed."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


class HasFileno(Protocol):
    """A socket or a file."""

    def fileno(self) -> int: ...


class Manager:
    """systemd's end of the notification socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.messages: list[dict[str, str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def wait(self, key: str, value: str = "", seconds: float = 60.0) -> dict[str, str]:
        """The next message with `key` whose value begins with `value`."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                lines = self._socket.recv(4096).decode().splitlines()
            except TimeoutError:
                break
            self.messages.append(dict(line.split("=", 1) for line in lines))
            if key in self.messages[-1] and self.messages[-1][key].startswith(value):
                return self.messages[-1]
        raise AssertionError(f"no {key}={value} within {seconds} s: {self.messages}")

    def feedings(self, seconds: float) -> int:
        """How often the watchdog is fed in that time."""
        end, count = time.monotonic() + seconds, 0
        while (left := end - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                count += b"WATCHDOG=1" in self._socket.recv(4096)
            except TimeoutError:
                break
        return count


@contextmanager
def service(
    tmp_path: Path,
    model: Path,
    manager: Manager | None,
    sockets: tuple[HasFileno, ...] = (),
    *program: str,
    **more: str,
) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon as systemd starts it: with its variables, and with `sockets` from descriptor 3 on."""

    def hand_over() -> None:
        for number, item in enumerate(sockets):
            os.dup2(item.fileno(), 3 + number, inheritable=True)

    environment = clean_environment(
        EDGED_MODEL__PATH=str(model),
        EDGED_STORE__DATA_DIR=str(tmp_path / "data"),
        RUNTIME_DIRECTORY=str(tmp_path / "run"),
        INVOCATION_ID="0" * 32,
        **({"NOTIFY_SOCKET": manager.address} if manager else {}),
        **({"LISTEN_FDS": str(len(sockets)), "LISTEN_FDNAMES": "unix:tcp"} if sockets else {}),
        **more,
    )
    process = subprocess.Popen(
        [sys.executable, "-c", _AS_SYSTEMD, *(program or ("-m", "edged.cli", "serve"))],
        env=environment,
        stdin=subprocess.PIPE,
        stderr=(tmp_path / "log").open("ab"),
        close_fds=False,
        preexec_fn=hand_over,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ask(address: str | tuple[str, int], path: str = "/readyz") -> bytes:
    """The answer's first bytes; waits for the daemon as a first request does."""
    with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as client:
        client.settimeout(60)
        client.connect(address)
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return client.recv(4096)


def test_a_message_goes_to_a_path_or_an_abstract_name_and_nobody_there_is_no_error(tmp_path: Path) -> None:
    for address in (str(tmp_path / "notify"), f"@edged-test-{os.getpid()}"):
        manager = Manager(address)
        notify("READY=1\nSTATUS=here", {"NOTIFY_SOCKET": address})
        assert manager.wait("READY", "1") == {"READY": "1", "STATUS": "here"}
    notify("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "gone")})
    notify("READY=1", {})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "2500000"}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "7"}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "8"}, None),
    ],
)
def test_the_watchdog_is_the_one_that_systemd_set_for_this_process(
    environ: dict[str, str], expected: float | None
) -> None:
    assert watchdog_s(environ, 7) == expected


def test_a_service_takes_systemds_sockets_tells_of_its_life_and_leaves_the_sockets(tmp_path: Path, model: Path) -> None:
    path, manager = tmp_path / "systemd.sock", Manager(f"@edged-life-{os.getpid()}")
    with socket.socket(socket.AF_UNIX) as unix, socket.socket(socket.AF_INET) as tcp:
        unix.bind(str(path))
        tcp.bind(("127.0.0.1", 0))
        for item in (unix, tcp):
            item.listen()
        with service(tmp_path, model, manager, (unix, tcp)) as daemon:
            # A client that came before the daemon: its request waits in the socket's queue.
            assert ask(str(path)).startswith(b"HTTP/1.1 ")
            assert int(manager.wait("STATUS", f"loading {model}")["EXTEND_TIMEOUT_USEC"]) > 0
            assert "serves tiny" in manager.wait("READY", "1")["STATUS"]
            assert ask(str(path)).startswith(b"HTTP/1.1 200")
            assert ask(tcp.getsockname()).startswith(b"HTTP/1.1 200")
            assert not (tmp_path / "run").exists()
            daemon.terminate()
            assert int(manager.wait("STOPPING", "1")["EXTEND_TIMEOUT_USEC"]) > 8e6
            assert daemon.wait(30) == 0
        assert path.is_socket()
        # systemd still listens: the next request waits there for the next daemon.
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_database_that_opens_slowly_is_waited_for_and_a_stop_is_not(tmp_path: Path, model: Path) -> None:
    database, manager = tmp_path / "data" / "edged.db", Manager(f"@edged-opening-{os.getpid()}")
    Store(database).close()
    environ = {"NOTIFY_SOCKET": manager.address}
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        # Opening waits for the lock, as it would for a slow disk.
        other.execute("BEGIN EXCLUSIVE")
        with started(tmp_path, model, environ=environ) as daemon:
            assert int(manager.wait("STATUS", f"opening {database}")["EXTEND_TIMEOUT_USEC"]) > 0
            assert daemon.stop() == 0
        with started(tmp_path, model, environ=environ):
            manager.wait("STATUS", f"opening {database}")
            other.execute("COMMIT")
            manager.wait("READY", "1")


def test_what_systemd_hands_over_must_be_a_socket_that_listens(tmp_path: Path, model: Path) -> None:
    with (tmp_path / "file").open("w") as file, service(tmp_path, model, None, (file,), "-c", _LISTENING) as daemon:
        assert daemon.wait(60) == 1
    assert "systemd's socket unix (descriptor 3) cannot be used" in (tmp_path / "log").read_text()
    (tmp_path / "log").unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(str(tmp_path / "datagrams"))
        with service(tmp_path, model, None, (datagrams,), "-c", _LISTENING) as daemon:
            assert daemon.wait(60) == 1
    assert "use ListenStream= with Accept=no" in (tmp_path / "log").read_text()


def test_a_tcp_socket_of_systemds_beyond_loopback_needs_a_token(tmp_path: Path, model: Path) -> None:
    with socket.socket(socket.AF_INET) as tcp:
        tcp.bind(("0.0.0.0", 0))
        tcp.listen()
        with service(tmp_path, model, None, (tcp,), "-c", _LISTENING) as daemon:
            assert daemon.wait(60) == 1
    assert "set api.token" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_an_idle_engine_feeds_the_watchdog_and_a_hung_one_starves_it(tmp_path: Path, model: Path) -> None:
    manager = Manager(str(tmp_path / "notify"))
    timed = {"WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6)), "EDGED_API__SOCKET": str(tmp_path / "s")}
    with service(tmp_path, model, manager, (), "-c", _HANGING, **timed) as daemon:
        manager.wait("READY", "1")
        assert manager.feedings(4 * WATCHDOG_S) >= 4
        assert daemon.stdin is not None
        daemon.stdin.close()
        manager.wait("STATUS", "no sign of life from the engine")
        # The event loop is well: requests are answered, and the watchdog is starved all the same.
        assert ask(str(tmp_path / "s"), "/healthz").startswith(b"HTTP/1.1 200")
        assert manager.feedings(2 * WATCHDOG_S) == 0
    assert '"event": "engine_hung"' in (tmp_path / "log").read_text()


def test_systemd_hears_of_requests_that_wait_and_of_those_that_were_refused(tmp_path: Path) -> None:
    model, manager = save_tiny(tmp_path / "tiny", max_position_embeddings=8192), Manager(str(tmp_path / "notify"))
    environ = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "2000000"}
    with started(tmp_path, model, environ=environ, serving__max_sequences=1, serving__max_queue=4) as daemon:
        manager.wait("READY", "1")
        with crowd(daemon.socket, 12):
            manager.wait("STATUS", "serves tiny: 1 requests running, 4 waiting, 7 refused since start")


def test_a_hangup_reloads_and_says_so(tmp_path: Path, model: Path) -> None:
    manager, config = Manager(str(tmp_path / "notify")), tmp_path / "edged.toml"
    config.write_text("[serving]\nmax_queue = 7\n")
    with started(tmp_path, model, environ={"NOTIFY_SOCKET": manager.address}, config=config) as daemon:
        manager.wait("READY", "1")
        config.write_text("[serving]\nmax_queue = 9\n")
        daemon.signal(signal.SIGHUP)
        reloading = manager.wait("RELOADING", "1")
        assert int(reloading["MONOTONIC_USEC"]) > 0
        manager.wait("READY", "1")
        assert daemon.process.is_alive()
    assert "serving.max_queue = 9" in daemon.log


@pytest.mark.slow
def test_a_daemon_with_nothing_to_do_learns_saves_and_leaves_its_socket_to_systemd(tmp_path: Path, model: Path) -> None:
    path, manager = tmp_path / "systemd.sock", Manager(f"@edged-idle-{os.getpid()}")
    settings = {"SERVING__EXIT_WHEN_IDLE_S": "0.5", "ALIGN__ACCUMULATE_S": "3", "ALIGN__PRACTICE": "false"}
    with socket.socket(socket.AF_UNIX) as unix, Client(Address(sockets=(path,)), timeout_s=60.0) as client:
        unix.bind(str(path))
        unix.listen()
        named = {f"EDGED_{name}": value for name, value in settings.items()}
        with service(tmp_path, model, manager, (unix,), **named) as daemon:
            # The first answer is 503, and what follows has the daemon wait for one who is there.
            manager.wait("READY", "1")
            pair = {"chosen": "good day", "rejected": "go away"}
            client.post("/v1/feedback", {"user": "ann", "prompt": "hello", **pair})
            manager.wait("STOPPING", "1")
            assert daemon.wait(60) == 0
        with closing(sqlite3.connect(tmp_path / "data" / "edged.db")) as db:
            assert db.execute("SELECT state FROM pairs").fetchall() == [("trained",)]
        assert list((tmp_path / "data" / "adapters").glob("*/ann/v*"))
        assert '"event": "idle_exit"' in (tmp_path / "log").read_text()
        with socket.socket(socket.AF_UNIX) as late:
            late.connect(str(path))
            late.sendall(b"GET ")
            accepted, _ = unix.accept()
            with accepted:
                assert accepted.recv(4) == b"GET "


@pytest.mark.slow
def test_every_request_is_answered_while_daemons_leave_and_are_started_again(tmp_path: Path, model: Path) -> None:
    path, asked, ended = tmp_path / "systemd.sock", 12, threading.Event()
    answers: list[bytes] = []
    starts = 0
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
        unix.listen()

        def ask_now_and_then() -> None:
            # Pauses about as long as a daemon waits: requests come before, in and after the moment of leaving.
            for number in range(asked):
                answers.append(ask(str(path), "/healthz"))
                time.sleep(0.8 + 0.05 * number)
            ended.set()

        client = threading.Thread(target=ask_now_and_then)
        client.start()
        while not ended.is_set():
            # As systemd does: a socket that is readable starts the daemon.
            if select.select([unix], [], [], 0.1)[0]:
                starts += 1
                with service(tmp_path, model, None, (unix,), EDGED_SERVING__EXIT_WHEN_IDLE_S="0.2") as daemon:
                    assert daemon.wait(120) == 0
        client.join()
    assert [answer[:12] for answer in answers] == [b"HTTP/1.1 200"] * asked
    assert starts > 1


def test_a_daemon_with_a_socket_of_its_own_does_not_leave(tmp_path: Path, model: Path) -> None:
    with started(tmp_path, model, serving__exit_when_idle_s=0.1) as daemon:
        daemon.wait_until_ready()
        assert "systemd's sockets alone start edged again" in daemon.log
        time.sleep(2.5)
        assert daemon.process.is_alive()
