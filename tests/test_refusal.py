"""A start that is refused says so where it is read, and under systemd is tried again ever less often."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edged.refusal import start_succeeded
from tests.cli.conftest import edged
from tests.models import save_tiny
from tests.runtime.test_systemd import Manager, ask, service

COUNT = "refused-starts"


@pytest.fixture
def manager(tmp_path: Path) -> Manager:
    (tmp_path / "run").mkdir()
    return Manager(f"@edged-{os.getpid()}-{tmp_path.name}")


def test_wrong_settings_are_an_event_of_the_log_under_systemd_and_a_sentence_elsewhere(tmp_path: Path) -> None:
    refused = edged("serve", EDGED_CACHE__PAGE_SISE="16", INVOCATION_ID="0" * 32)
    line = json.loads(refused.stderr)
    assert (refused.returncode, line["event"], line["level"]) == (1, "start_refused", "error")
    assert 'did you mean "page_size"?' in line["message"]
    plain = edged("serve", "--config", str(tmp_path / "none.toml"))
    assert (plain.returncode, plain.stderr.startswith('edged: config file "')) == (1, True)


def test_the_first_refusal_ends_at_once_and_is_remembered(tmp_path: Path, manager: Manager) -> None:
    with service(tmp_path, tmp_path / "no-model", manager) as daemon:
        assert daemon.wait(60) == 1
    assert (tmp_path / "run" / COUNT).read_text() == "1"
    assert '"event": "start_refused"' in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("before", "wait_s", "wrong"),
    [
        ("2", 10, "model"),
        ("40", 300, "settings"),
        pytest.param("2", 10, "settings", marks=pytest.mark.slow),
        pytest.param("40", 300, "model", marks=pytest.mark.slow),
    ],
)
def test_later_refusals_wait_longer_and_systemd_is_told(
    tmp_path: Path, manager: Manager, before: str, wait_s: int, wrong: str
) -> None:
    (tmp_path / "run" / COUNT).write_text(before)
    settings = {"EDGED_CACHE__PAGE_SISE": "16"} if wrong == "settings" else {}
    with service(tmp_path, tmp_path / "no-model", manager, **settings) as daemon:
        told = manager.wait("STATUS", f"start refused, tried again in {wait_s} s: ")
        assert int(told["EXTEND_TIMEOUT_USEC"]) > wait_s * 1e6
        # As `systemctl restart` does, once the operator has mended it.
        daemon.terminate()
        assert daemon.wait(60) == -signal.SIGTERM
    assert (tmp_path / "run" / COUNT).read_text() == str(int(before) + 1)


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """systemd's sockets: a Unix and a TCP one."""
    with socket.socket(socket.AF_UNIX) as unix, socket.socket(socket.AF_INET) as tcp:
        unix.bind(str(tmp_path / "systemd.sock"))
        tcp.bind(("127.0.0.1", 0))
        for item in (unix, tcp):
            item.listen()
        yield unix, tcp


def error_in(answer: bytes) -> dict[str, Any]:
    """The error of a 503 that says when to come again."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert 0 < int(head.split(b"Retry-After: ")[1].split(b"\r\n")[0]) <= 300
    error: dict[str, Any] = json.loads(body)["error"]
    assert (error["type"], error["param"], error["code"]) == ("server_error", None, "start_refused")
    return error


@pytest.mark.parametrize("wrong", ["model", "settings"])
def test_clients_are_told_of_a_refusal_on_systemds_sockets_and_strangers_no_details(
    tmp_path: Path, manager: Manager, listening: tuple[socket.socket, socket.socket], wrong: str
) -> None:
    (tmp_path / "run" / COUNT).write_text("40")
    settings = {"EDGED_CACHE__PAGE_SISE": "16"} if wrong == "settings" else {}
    reason = 'did you mean "page_size"?' if wrong == "settings" else f'"{tmp_path / "no-model"}'
    path, address = str(tmp_path / "systemd.sock"), listening[1].getsockname()
    with service(tmp_path, tmp_path / "no-model", manager, listening, **settings) as daemon:
        manager.wait("STATUS", "start refused")
        shown = edged("status", "--socket", path)
        assert (shown.returncode, reason in shown.stderr) == (1, True)
        assert reason in error_in(ask(path, "/no/such/url"))["message"]
        told = error_in(ask(address))["message"]
        assert told == "edged could not start: whoever runs this box finds the reason in its log"
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"no HTTP\r\n\r\n")
            assert stranger.recv(4096).startswith(b"HTTP/1.0 400 ")
            # A client that says nothing holds up nobody, nor the stop.
            with socket.create_connection(address):
                assert error_in(ask(path))
                daemon.terminate()
                assert daemon.wait(60) == -signal.SIGTERM
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_secrets_are_blanked_out_of_the_status_too(tmp_path: Path, manager: Manager) -> None:
    (tmp_path / "run" / COUNT).write_text("2")
    with service(tmp_path, tmp_path / "open-sesame", manager, BOX_TOKEN="open-sesame"):
        assert f'"{tmp_path}/***"' in manager.wait("STATUS", "start refused")["STATUS"]


@pytest.mark.parametrize(
    ("text", "environment", "said"),
    [
        ("[api]\ntoken = 271828182845\n", {}, 'setting "api.token": it must be text'),
        ("[[api]]\ntoken = '271828182845'\n", {}, 'setting "api": it must be a table'),
        ("[[api]]\ntoken = '271828182845'\n", {"EDGED_API__LISTEN": "127.0.0.1:1"}, '"api" is not a section'),
        ("[[access]]\ntokens = ['271828182845']\n", {}, 'setting "access": it must be a table'),
    ],
)
def test_what_was_meant_to_be_a_token_is_told_nobody(
    tmp_path: Path, text: str, environment: dict[str, str], said: str
) -> None:
    (tmp_path / "edged.toml").write_text(text)
    refused = edged("serve", "--config", str(tmp_path / "edged.toml"), **environment)
    assert said in refused.stderr
    assert "271828182845" not in refused.stderr


@pytest.mark.slow
def test_a_start_that_serves_makes_the_next_refusal_the_first(tmp_path: Path, manager: Manager) -> None:
    (tmp_path / "run" / COUNT).write_text("7")
    with service(tmp_path, save_tiny(tmp_path / "tiny"), manager):
        manager.wait("READY", "1")
        assert not (tmp_path / "run" / COUNT).exists()
    start_succeeded({"RUNTIME_DIRECTORY": str(tmp_path / "run")})
    start_succeeded({})
