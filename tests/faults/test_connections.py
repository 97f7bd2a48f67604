"""Clients that come in thousands, read slowly or never, and a second daemon: the others are served as before."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.api.live import LiveDaemon, running, started
from tests.faults.test_disk import PROMPT, greedy, until
from tests.models import save_tiny

CONNECTIONS = 1000


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    root = tmp_path_factory.mktemp("connections")
    with running(root / "run", save_tiny(root / "tiny"), serving__max_queue=2048) as live:
        yield live
        assert "Traceback" not in live.log


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * CONNECTIONS + 500
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this user may open {hard} files, {wanted} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(daemon: LiveDaemon) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(60)
    raw.connect(str(daemon.socket))
    return raw


def ask(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data


def answer(raw: socket.socket) -> dict[str, object]:
    """The JSON of one response that has a length."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += raw.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    while len(body) < length:
        body += raw.recv(65536)
    return dict(json.loads(body))


def test_a_thousand_connections_idle_and_active_are_served_and_given_back(daemon: LiveDaemon, many_files: None) -> None:
    with daemon.http() as http:
        wanted = greedy(http)
        process = psutil.Process(daemon.process.pid)
        files, threads = process.num_fds(), process.num_threads()
        open_ones = [connect(daemon) for _ in range(CONNECTIONS)]
        for raw in open_ones[::10]:
            raw.sendall(ask(PROMPT))
        texts = {str(answer(raw)["choices"][0]["text"]) for raw in open_ones[::10]}  # type: ignore[index]
        assert texts == {wanted}
        assert process.num_fds() >= CONNECTIONS
        assert greedy(http) == wanted
        for raw in open_ones:
            raw.close()
        until(lambda: process.num_fds() <= files + 8, process.num_fds)
        assert process.num_threads() <= threads + 2
        assert daemon.idle()


def test_the_bound_of_open_files_is_raised_as_far_as_it_may_be(daemon: LiveDaemon) -> None:
    assert daemon.process.pid is not None
    soft, hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
    assert soft >= (65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536))


def test_a_low_bound_is_raised_and_a_high_one_left(tmp_path: Path) -> None:
    program = (
        "import resource; from edged.runtime.process import allow_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512)); allow_files()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)); allow_files(100)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.split("\n")[:2] == ["(512, 512)", "(512, 512)"]


def test_without_free_file_descriptors_new_clients_wait_and_the_log_says_it_once(
    daemon: LiveDaemon, many_files: None
) -> None:
    assert daemon.process.pid is not None
    process = psutil.Process(daemon.process.pid)
    with daemon.http() as http:
        wanted = greedy(http)
        soft, hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (process.num_fds() + 10, hard))
        waiting = [connect(daemon) for _ in range(40)]
        try:
            until(lambda: "no file descriptor is free" in daemon.log, lambda: daemon.log)
            assert greedy(http) == wanted
            time.sleep(1.2)
        finally:
            resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        for raw in waiting:
            raw.sendall(ask(PROMPT))
        assert all(answer(raw)["choices"][0]["text"] == wanted for raw in waiting)  # type: ignore[index]
        for raw in waiting:
            raw.close()
    assert daemon.log.count("no file descriptor is free") == 1


def test_a_client_that_reads_a_byte_now_and_then_holds_up_nobody(daemon: LiveDaemon) -> None:
    with daemon.http() as http, socket.socket(socket.AF_UNIX) as slow:
        wanted = greedy(http)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.settimeout(60)
        slow.connect(str(daemon.socket))
        slow.sendall(ask({**PROMPT, "max_tokens": 400, "stream": True}))
        seen = b""
        for _ in range(5):
            seen += slow.recv(1)
            assert greedy(http) == wanted
            time.sleep(0.1)
        until(lambda: not daemon.status()["queue"]["decode"], daemon.status)
        while b"[DONE]" not in seen:
            seen += slow.recv(65536)
        parts = [line for line in seen.split(b"\n") if line.startswith(b"data: {")]
        text = "".join(json.loads(part[6:])["choices"][0]["text"] for part in parts)
        assert text.startswith(wanted)
    assert daemon.idle()


def test_a_second_daemon_on_the_same_socket_or_folder_is_refused_and_the_first_goes_on(
    daemon: LiveDaemon, tmp_path: Path
) -> None:
    with started(tmp_path, daemon.model, api__socket=daemon.socket) as second:
        assert second.wait() == 1
        assert "is served by another edged" in second.log
    with started(tmp_path, daemon.model, store__data_dir=daemon.data) as third:
        assert third.wait() == 1
        assert "is in use by another edged" in third.log
    with daemon.http() as http:
        assert greedy(http)


def test_clients_that_vanish_in_the_middle_leave_nothing_behind(daemon: LiveDaemon) -> None:
    def vanish(after: int) -> None:
        with connect(daemon) as raw:
            raw.sendall(ask({**PROMPT, "max_tokens": 300, "stream": True})[:after])

    threads = [threading.Thread(target=vanish, args=(after,)) for after in (0, 10, 60, 90, 10_000) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert daemon.idle()


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"GET /v1/trace?seconds=" + b"1" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", "longer than 8190 bytes"),
        (
            b"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: " + b"1" * 9000 + b"\r\n\r\n",
            "longer than 8190 bytes",
        ),
        (b"GET /v1/status HTTP/1.1\r\nno header\r\n\r\n", "it is no HTTP"),
    ],
)
def test_what_is_no_http_is_answered_as_every_mistake_is(daemon: LiveDaemon, sent: bytes, told: str) -> None:
    with connect(daemon) as raw:
        raw.sendall(sent)
        error = answer(raw)["error"]
    assert isinstance(error, dict)
    assert error["code"] == "bad_http"
    assert told in error["message"]
    assert "Traceback" not in daemon.log
    assert "1111" not in daemon.log
