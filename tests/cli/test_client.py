"""The client against peers that are absent, forbidden, or not what they should be."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from edged.cli.main import cli
from edged.client.client import Address, Client, DaemonError, NotRunning, Refused, find_address
from tests.cli.conftest import edged

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@contextlib.contextmanager
def peer(path: Path, *answers: bytes) -> Iterator[list[bytes]]:
    """A program on the socket that gives each connection one of `answers` and hangs up; yields what it received."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    listener.settimeout(60.0)
    received: list[bytes] = []

    def serve() -> None:
        for answer in answers:
            with contextlib.suppress(TimeoutError), listener.accept()[0] as connection:
                received.append(whole_request(connection))
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield received
    finally:
        thread.join(10)
        listener.close()


def test_an_export_writes_an_adapters_two_files_and_nothing_else_whatever_is_sent(tmp_path: Path) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
    strange = {"../evil": b"x", f"{tmp_path}/evil": b"x", "evil/adapter_config.json": b"x"}
    known = json.dumps({"adapter": "ann", "versions": [], "pairs_trained": 3, "pairs_seen": 4, "verdict": "too early"})
    answers = [sent(tarred({**strange, **files})), sent(known.encode())]
    answers += [sent(tarred(strange)), sent(tarred(files)[:700]), sent(b"{}")]
    outputs = [tmp_path / name for name in ("whole", "strange", "short", "none")]
    with peer(tmp_path / "s", *answers):
        command = ["adapters", "export", "ann", "--socket", str(tmp_path / "s"), "--output"]
        results = [CliRunner().invoke(cli, [*command, str(output)]) for output in outputs]
    assert [result.exit_code for result in results] == [0, 1, 1, 1]
    assert "ann version 7 is in" in results[0].output
    assert all("what the daemon sent is no adapter" in result.output for result in results[1:])
    assert {path.name: path.read_bytes() for path in outputs[0].iterdir() if path.name != "README.md"} == files
    assert "3 of 4 preference pairs learned; too early" in (outputs[0] / "README.md").read_text()
    # Nothing is in the way of another try.
    assert not any(list(output.iterdir()) for output in outputs[1:])
    assert not list(tmp_path.rglob("*evil*"))


def tarred(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def sent(body: bytes) -> bytes:
    """An export, as the daemon answers it."""
    head = f"HTTP/1.1 200 OK\r\nX-Edged-Version: 7\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def whole_request(connection: socket.socket) -> bytes:
    """One HTTP request, with its body."""
    data = b""
    while piece := connection.recv(65536):
        data += piece
        head, end, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if end and len(body) >= int(length.group(1) if length else 0):
            break
    return data


def test_an_absent_daemon_is_reported_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "edged.sock"
    for arguments in (["status"], ["ask", "hello"], ["metrics", "--json"], ["adapters", "list"], ["chat"]):
        result = edged(*arguments, EDGED_SOCKET=str(path))
        assert result.returncode == 1
        assert result.stderr == f'edged: no daemon answers on {path}: start it with "edged serve"\n'
        assert result.stdout == ""


def test_a_stale_socket_file_is_an_absent_daemon(tmp_path: Path) -> None:
    path = tmp_path / "edged.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
    with pytest.raises(NotRunning, match="no daemon answers"):
        Client(Address(sockets=(path,))).get("/healthz")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open every socket")
def test_a_forbidden_socket_says_whom_to_ask(tmp_path: Path) -> None:
    path = tmp_path / "edged.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0)
        with pytest.raises(DaemonError, match=r"no permission.*api\.socket_mode") as refused:
            Client(Address(sockets=(path,))).get("/healthz")
        assert "join" not in str(refused.value)


def test_a_socket_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120)
    with pytest.raises(DaemonError, match="longer than 107 bytes"):
        Client(Address(sockets=(path,))).get("/healthz")


def test_the_first_socket_that_answers_is_taken(tmp_path: Path) -> None:
    answer = b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{"ok": "b"}'
    with peer(tmp_path / "b", answer), Client(Address(sockets=(tmp_path / "a", tmp_path / "b"))) as client:
        assert client.get("/healthz") == {"ok": "b"}


def test_an_answer_that_is_not_json_names_the_suspicion(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with (
        peer(path, b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"),
        pytest.raises(DaemonError, match="another program"),
    ):
        Client(Address(sockets=(path,))).get("/healthz")


def test_a_peer_that_does_not_speak_http_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with peer(path, b"220 mail.example ready\r\n"):
        result = edged("status", "--socket", str(path))
    assert result.returncode == 1
    assert result.stderr.startswith("edged: the connection to ")


@pytest.mark.parametrize("status", [b"200 OK", b"500 Internal Server Error"])
def test_an_answer_that_breaks_off_is_an_error_not_a_traceback(tmp_path: Path, status: bytes) -> None:
    path = tmp_path / "s"
    answer = b'HTTP/1.1 %s\r\nContent-Length: 100\r\n\r\n{"error": {' % status
    with peer(path, answer), pytest.raises(DaemonError, match=r"connection to .* broke"):
        Client(Address(sockets=(path,))).get("/healthz")


def test_a_stream_that_breaks_off_is_an_error_after_the_text_it_had(tmp_path: Path) -> None:
    event = b'data: {"id": "chatcmpl-1", "choices": [{"delta": {"content": "Hel"}}]}\n\n'
    chunk = b"%x\r\n%s\r\n" % (len(event), event)
    with peer(tmp_path / "s", HEAD + chunk), peer(tmp_path / "t", HEAD + chunk + b"0\r\n\r\n"):
        for name in ("s", "t"):
            result = edged("ask", "hi", "--socket", str(tmp_path / name))
            assert result.returncode == 1
            assert result.stdout == "Hel"
            assert "edged: the " in result.stderr


def test_an_error_inside_a_stream_is_the_daemon_s_message(tmp_path: Path) -> None:
    event = b'data: {"error": {"message": "the engine stopped", "type": "server_error"}}\n\n'
    with peer(tmp_path / "s", HEAD + b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)):
        result = edged("ask", "hi", "--socket", str(tmp_path / "s"))
    assert result.returncode == 1
    assert result.stderr.strip() == "edged: the engine stopped"


def refused(code: str) -> bytes:
    body = b'{"error": {"message": "the model is being loaded", "type": "server_error", "code": "%s"}}' % code.encode()
    return b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def test_a_request_that_starts_the_daemon_waits_for_the_model(tmp_path: Path) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    told: list[str] = []
    with peer(tmp_path / "s", refused("loading"), refused("loading"), answer) as received:
        assert Client(Address(sockets=(tmp_path / "s",)), patience_s=60.0, on_wait=told.append).get("/v1/models") == {}
    assert len(received) == 3
    assert told == ["the model is being loaded"]


@pytest.mark.parametrize(("code", "patience_s"), [("loading", 0.0), ("draining", 60.0)])
def test_no_other_refusal_is_waited_for_and_none_without_patience(tmp_path: Path, code: str, patience_s: float) -> None:
    with peer(tmp_path / "s", refused(code)), pytest.raises(Refused):
        Client(Address(sockets=(tmp_path / "s",)), patience_s=patience_s).get("/v1/models")


def test_a_kept_connection_that_was_closed_meanwhile_is_opened_again(tmp_path: Path) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    with peer(tmp_path / "s", answer, answer) as received, Client(Address(sockets=(tmp_path / "s",))) as client:
        assert client.get("/first") == {}
        assert client.get("/second") == {}
    assert [request.split()[1] for request in received] == [b"/first", b"/second"]


def test_sockets_are_looked_for_in_the_documented_order() -> None:
    environment = {"RUNTIME_DIRECTORY": "/run/a:/run/b", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert find_address(environ=environment).sockets == tuple(
        Path(folder) / "edged.sock" for folder in ("/run/a", "/run/user/7", "/run/edged")
    )
    assert find_address(environ={}).sockets == (Path("/run/edged/edged.sock"),)
    assert find_address(environ={**environment, "EDGED_SOCKET": "/x/y"}).sockets == (Path("/x/y"),)
    assert find_address("/flag", environ={"EDGED_SOCKET": "/x/y"}).sockets == (Path("/flag"),)
    assert find_address("~/s").sockets == (Path.home() / "s",)


def test_flags_win_over_the_environment(tmp_path: Path) -> None:
    assert find_address(environ={"EDGED_URL": "http://box:1", "EDGED_SOCKET": "/x"}).host == "box"
    assert find_address(url="http://flag:2", environ={"EDGED_URL": "http://box:1"}).host == "flag"
    result = edged("status", "--socket", str(tmp_path / "s"), EDGED_URL="http://127.0.0.1:1")
    assert f"no daemon answers on {tmp_path / 's'}" in result.stderr


def test_a_url_and_token_reach_a_tcp_listener() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(60.0)
        received: list[bytes] = []

        def serve() -> None:
            with contextlib.suppress(TimeoutError), listener.accept()[0] as connection:
                received.append(whole_request(connection))
                connection.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        result = edged("status", "--url", url, "--token", "secret")
        thread.join(10)
    assert b"Authorization: Bearer secret" in received[0]
    assert result.returncode == 1
    assert result.stderr == "edged: the daemon answered 401 Unauthorized\n"


def test_an_ingress_with_tls_is_asked_by_https() -> None:
    address = find_address(url="https://box", environ={})
    assert (address.port, address.tls, str(address)) == (443, True, "https://box:443")


@pytest.mark.parametrize("url", ["ws://box:1", "https://", "http://", "http://box:99999", "ftp://box"])
def test_a_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(DaemonError, match="HOST:PORT"):
        find_address(url=url)


@pytest.mark.parametrize(("end", "whole"), [(b"0\r\n\r\n", True), (b"", False)])
def test_a_document_that_breaks_off_between_two_chunks_is_not_taken_for_whole(
    tmp_path: Path, end: bytes, whole: bool
) -> None:
    path = tmp_path / "s"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def answer() -> None:
        connection, _ = listener.accept()
        connection.recv(4096)
        body = b'{"a": 1}\n{"a":'
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b"%x\r\n%s\r\n" % (len(body), body) + b"4\r\n 2}\n\r\n" + end)
        connection.close()

    threading.Thread(target=answer, daemon=True).start()
    found = []
    with contextlib.nullcontext() if whole else pytest.raises(DaemonError, match="broke"):
        for item in Client(Address(sockets=(path,)), 5.0).json_lines("/v1/feedback"):
            found.append(item)
    assert found == [{"a": 1}, {"a": 2}]
    listener.close()
