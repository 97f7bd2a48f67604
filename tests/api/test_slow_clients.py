"""Clients that send or read too slowly are dropped, and those beside them notice nothing."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.api.live import LiveDaemon, running
from tests.models import save_tiny

QUICK = {"limits__patience": 0.1}


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    root = tmp_path_factory.mktemp("slow")
    save_tiny(root / "tiny", max_position_embeddings=4096)
    with running(root / "run", root / "tiny", **QUICK) as live:
        yield live


@contextmanager
def connection(live: LiveDaemon) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(20)
        raw.connect(str(live.socket))
        yield raw


def everything(raw: socket.socket, end: bytes = b"") -> bytes:
    """What comes until the daemon closes, or `end` comes."""
    seen = b""
    try:
        while not (end and end in seen) and (piece := raw.recv(65536)):
            seen += piece
    except ConnectionResetError:
        pass
    return seen


@pytest.mark.parametrize("begun", [b"", b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_header_that_does_not_come_ends_the_connection(impatient: LiveDaemon, begun: bytes) -> None:
    with connection(impatient) as raw:
        raw.sendall(begun)
        assert everything(raw) == b""
    assert "a client was dropped: no header came within 1 s (limits.patience)" in impatient.log


def test_one_byte_at_a_time_does_not_make_it_longer(impatient: LiveDaemon) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"X-Slow: 1\r\n" * 1000

    def trickle(raw: socket.socket) -> None:
        for i in range(len(head)):
            raw.sendall(head[i : i + 1])
            time.sleep(0.02)

    with connection(impatient) as raw, pytest.raises((BrokenPipeError, ConnectionResetError)):
        trickle(raw)


def test_a_second_header_that_does_not_come_ends_it_too(impatient: LiveDaemon) -> None:
    with connection(impatient) as raw:
        raw.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in raw.recv(65536)
        raw.sendall(b"GET /healthz HTTP/1.1\r\n")
        assert everything(raw) == b""


def test_a_body_that_does_not_come_is_answered_with_408(impatient: LiveDaemon) -> None:
    with connection(impatient) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        # It closes ten seconds later.
        answer = everything(raw, b'"body_too_slow"')
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"body_too_slow"' in answer


def test_a_client_that_does_not_read_is_dropped_and_its_request_ends(impatient: LiveDaemon) -> None:
    body = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True, "n": 8, "logprobs": 20}
    sent = json.dumps(body).encode()
    with connection(impatient) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(sent) + sent)
        assert impatient.idle(within_s=30.0)
    assert "it did not read for 3 s (limits.patience)" in impatient.log
    assert impatient.status()["totals"]["output_tokens"] < 8 * 3000


@pytest.mark.parametrize(
    "head",
    [b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 100_000, b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n"],
    ids=["header", "line"],
)
def test_a_header_without_end_is_refused(impatient: LiveDaemon, head: bytes) -> None:
    with connection(impatient) as raw:
        with suppress(BrokenPipeError, ConnectionResetError):
            raw.sendall(head + b"\r\n\r\n")
        assert b" 400 Bad Request" in everything(raw).splitlines()[0]


def test_who_is_fast_notices_nothing_of_a_hundred_that_are_not(impatient: LiveDaemon) -> None:
    slow = [socket.socket(socket.AF_UNIX) for _ in range(100)]
    try:
        for raw in slow:
            raw.connect(str(impatient.socket))
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Le")
        with impatient.http() as http:
            body = {"prompt": "a", "max_tokens": 2}
            assert http.post("/v1/completions", json=body).status_code == 200
    finally:
        for raw in slow:
            raw.close()
