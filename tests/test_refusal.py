"""A start that is refused says so where it is read, and under systemd is tried again ever less often."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from edged.refusal import start_succeeded
from tests.cli.conftest import edged
from tests.models import save_tiny
from tests.test_service_manager import Manager, service

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


@pytest.mark.parametrize(("before", "wait_s"), [("2", 10), ("40", 300)])
@pytest.mark.parametrize("wrong", ["model", "settings"])
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


def test_a_start_that_serves_makes_the_next_refusal_the_first(tmp_path: Path, manager: Manager) -> None:
    (tmp_path / "run" / COUNT).write_text("7")
    with service(tmp_path, save_tiny(tmp_path / "tiny"), manager):
        manager.wait("READY", "1")
        assert not (tmp_path / "run" / COUNT).exists()
    start_succeeded({"RUNTIME_DIRECTORY": str(tmp_path / "run")})
    start_succeeded({})
