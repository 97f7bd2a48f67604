"""Every route with every odd body, header and address: an answer below 500, and no traceback in the log."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator

import pytest

from edged.api.openapi import EVENTS, Route
from edged.api.routes import ROUTES
from tests.api.live import LiveDaemon, running
from tests.models import save_tiny

SETTINGS = {"api__max_body_kb": 2048, "limits__patience": 0.2}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    root = tmp_path_factory.mktemp("odd")
    with running(root / "run", save_tiny(root / "tiny"), **SETTINGS) as live:
        yield live


@pytest.fixture(autouse=True)
def nothing_failed(live: LiveDaemon) -> Iterator[None]:
    said = len(live.log)
    yield
    new = live.log[said:]
    assert "Traceback" not in new, new
    assert " failed (" not in new, new
    with live.http() as http:
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def chunked(body: bytes, size: int) -> bytes:
    pieces = (body[first : first + size] for first in range(0, len(body), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def status_of(live: LiveDaemon, method: str, path: bytes, head: bytes = b"", body: bytes = b"") -> int:
    """The status of the answer to a request, which may come before all of the body was taken."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(30)
        raw.connect(str(live.socket))
        first = b"%b %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%b\r\n" % (method.encode(), path, head)
        with contextlib.suppress(BrokenPipeError):
            raw.sendall(first + body)
        seen = b""
        while b"\r\n\r\n" not in seen and (piece := raw.recv(65536)):
            seen += piece
    assert seen.startswith(b"HTTP/1."), (method, path, head[:80], seen)
    return int(seen.split()[1])


def sized(body: bytes, kind: bytes = b"application/json") -> tuple[bytes, bytes]:
    return b"Content-Type: %b\r\nContent-Length: %d\r\n" % (kind, len(body)), body


FORM = b"multipart/form-data; boundary=XbX"
NAMED = b'--XbX\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n\r\n{}\r\n--XbX--\r\n'
BODIES: dict[str, tuple[bytes, bytes]] = {
    "none": (b"", b""),
    "empty": sized(b""),
    "an empty object": sized(b"{}"),
    "chunks": (b"Transfer-Encoding: chunked\r\n", chunked(b'{"a": "' + b"x" * 100_000 + b'"}', 8192)),
    "chunks of a byte": (b"Transfer-Encoding: chunked\r\n", chunked(b" " * 100_000, 1)),
    "chunks that say a lot": (b"Transfer-Encoding: chunked\r\n", (b"1;" + b"a" * 200 + b"\r\n \r\n") * 2000),
    "deep": sized(b"[" * 100_000),
    "deep objects": sized(b'{"a":' * 900 + b"0" + b"}" * 900),
    "no JSON": sized(b"\r\n--a=b&c; {"),
    "not UTF-8": sized(b'{"prompt": "\xff\xfe", "user": "\xc3"}'),
    "UTF-16": sized('{"prompt": "a"}'.encode("utf-16")),
    "half a surrogate pair": sized(b'{"\\udc80": "\\ud800", "user": "\\ud800", "model": "\\udfff"}'),
    "a million lists": sized(b'{"messages": [' + b"[]," * 340_000 + b"[]]}"),
    "many keys": sized(b'{"metadata": {' + b",".join(b'"%x": "a"' % n for n in range(30_000)) + b"}}"),
    "long numbers": sized(b'{"n": ' + b"9" * 5000 + b', "seed": 1e400, "top_p": -0.0}'),
    "a zero byte": sized(b'{"prompt": "\\u0000", "user": "\\u0000", "completion_id": "\\u0000", "signal": "up"}'),
    "another type": sized(b"a=b", b"application/x-www-form-urlencoded"),
    "a type that is none": sized(b"{}", b"\xff;;=/"),
    "gzip": sized(b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xab\xae\x05\x00\x43\xbf\xa6\xa3\x02\x00\x00\x00"),
    "packed": (b"Content-Encoding: gzip\r\nContent-Length: 20\r\n", b"\x1f\x8b\x08\x00" + bytes(16)),
    "an empty form": sized(b"--XbX--\r\n", FORM),
    "a form's preamble": sized(b"\n" * 100_000 + b"--XbX--\r\n", FORM),
    "a form of headers": sized(b"--XbX\r\n" + b"a:b\r\n" * 20_000, FORM),
    "a form of parts": sized(b"--XbX\r\n\r\n\r\n" * 20_000 + b"--XbX--\r\n", FORM),
    "a name that is not UTF-8": sized(NAMED % b"x\xff.jsonl", FORM),
    "a name in a code of Python's": sized(NAMED.replace(b'filename="%b"', b"filename*=punycode''%%ff-"), FORM),
    "a form in a form": sized(NAMED.replace(b"\r\n\r\n{}", b"\r\nContent-Type: %b\r\n\r\n{}" % FORM) % b"a", FORM),
    "a form without a boundary": sized(b"--XbX--\r\n", b"multipart/form-data; boundary=\xff"),
}


def address(route: Route, name: str = "nothing-of-that-name") -> bytes:
    return re.sub(r"{[^}]*}", name, route.path).encode()


def is_endless(route: Route) -> bool:
    return EVENTS in route.media and route.method == "GET"


@pytest.mark.parametrize("what", BODIES)
def test_every_route_answers_every_odd_body(live: LiveDaemon, what: str) -> None:
    for route in ROUTES:
        status = status_of(live, route.method, address(route), *BODIES[what])
        assert status < 500, (route.method, route.path, status)


@pytest.mark.parametrize("value", [b"a\xff\xfeb", b"\xc3\xa9", b"\xed\xa0\x80", b"", b"," * 5000, b"=?utf-8?q?=ff?="])
def test_every_route_answers_every_odd_header(live: LiveDaemon, value: bytes) -> None:
    names = ("Authorization", "X-Request-Id", "Origin", "Sec-Fetch-Site", "X-Edged-Run", "X-Edged-Application",
             "X-Session-Id", "traceparent", "Last-Event-ID", "Accept", "Accept-Encoding", "If-None-Match", "Cookie",
             "Expect", "User-Agent", "Range", "If-Modified-Since")  # fmt: skip
    for route in ROUTES:
        for name in names if not is_endless(route) else ():
            head, body = sized(b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}')
            given = (head, body) if route.body else (b"", b"")
            status = status_of(
                live, route.method, address(route), b"%b: %b\r\n%b" % (name.encode(), value, given[0]), given[1]
            )
            assert status < 500, (route.method, route.path, name, status)


@pytest.mark.parametrize(
    "text", [b"\xff", b"%ff", b"%ed%a0%80", b"%00", b"%c2%b2", b"%0d%0a", b"1e9", b"%2e%2e", b"-1"]
)
def test_every_route_answers_every_odd_address(live: LiveDaemon, text: bytes) -> None:
    for route in ROUTES:
        names = [
            "user",
            "since",
            "limit",
            "after",
            "order",
            "purpose",
            "seconds",
            "versions",
            "metadata[a]",
            *route.query,
        ]
        path = re.sub(rb"{[^}]*}", lambda _: text, route.path.encode())
        asked = [path] * (b"{" in route.path.encode()) + [b"%b?%b=%b" % (path, name.encode(), text) for name in names]
        for each in asked if not is_endless(route) else [b"%b?backlog=%b&events=%b" % (path, text, text)]:
            assert status_of(live, route.method, each) < 500, (route.method, each)


def test_a_header_that_is_not_utf_8_is_read_as_latin_1(live: LiveDaemon) -> None:
    head, body = sized(b'{"prompt": "a", "max_tokens": 1}')
    for name in (b"Zo\xeb", "Zoë".encode()):
        assert status_of(live, "POST", b"/v1/completions", b"X-Session-Id: %b\r\n%b" % (name, head), body) == 200


@pytest.mark.parametrize("path", [b"/healthz", b"/v1/models", b"/nothing", b"/v1/store/vacuum"])
@pytest.mark.parametrize(("head", "body"), [BODIES["chunks"], BODIES["chunks of a byte"], sized(b" " * 65)])
def test_a_body_where_none_is_taken_is_refused_from_its_header(
    live: LiveDaemon, path: bytes, head: bytes, body: bytes
) -> None:
    """None of the body is sent: whoever waits for it would wait for ever."""
    asked = b"POST %b HTTP/1.1\r\nHost: x\r\n%b\r\n" % (path, head)
    answer = live.send(asked, b"}}")
    assert answer.split()[1] in (b"400", b"404", b"405"), answer
    assert b"Connection: close" in answer


def test_where_none_is_taken_an_empty_object_is_none_and_the_connection_stays(live: LiveDaemon) -> None:
    asked = b"POST /v1/store/prune HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    answer = live.send(asked + b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b'"ok"')
    assert answer.count(b"HTTP/1.1 200 OK") == 2


@pytest.mark.parametrize(("size", "status"), [(1, 400), (8, 400), (64, 200), (8192, 200)])
def test_chunks_of_a_few_bytes_are_refused(live: LiveDaemon, size: int, status: int) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1, "ignored": "x\r\n" * 40_000}).encode()
    head = b"Transfer-Encoding: chunked\r\n"
    assert status_of(live, "POST", b"/v1/completions", head, chunked(body, size)) == status


def test_an_upload_of_short_lines_and_long_chunks_is_taken(live: LiveDaemon) -> None:
    content = b"\r\n" * 400_000
    form = NAMED.replace(b"{}", content) % b"a.jsonl"
    head = b"Transfer-Encoding: chunked\r\nContent-Type: %b\r\n" % FORM
    answer = status_of(live, "POST", b"/v1/files", head, chunked(form, 1 << 16))
    assert answer == 400, "it has no purpose, which only a form that was read can tell"


def test_the_rest_of_a_refused_body_is_dropped_while_the_answer_is_read(live: LiveDaemon) -> None:
    body = b'{"prompt": "' + b"x" * (8 << 20)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (len(body) + 2)
    answer = live.send(head + body, b"}}")
    assert b" 413 " in answer
    assert b"body_too_large" in answer
