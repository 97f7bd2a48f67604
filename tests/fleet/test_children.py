"""Programs that a replica of Ray keeps running. Ray itself is not needed."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

from edged.fleet.ray import app
from edged.fleet.ray.cluster import STARTED, folder_of, writers
from edged.fleet.state_file import lock_file
from edged.settings.load import load_settings
from examples.quickstart.daemon import free_port
from tests.cli.conftest import wait_for


def test_a_program_that_has_not_its_lock_yet_is_not_started_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_START_AGAIN_S", 0.0)
    config = tmp_path / "edged.toml"
    config.write_text(
        f'[store]\ndata_dir = "{tmp_path}"\n[fleet]\nlisten = "127.0.0.1:{free_port()}"\n'
        'nodes = { a = "http://127.0.0.1:9" }\n'
    )
    monkeypatch.setenv("EDGED_CONFIG", str(config))
    settings = load_settings(config)
    child = app.Child(["fleet", "serve"], lock_file(settings), settings)
    log = folder_of(settings) / STARTED / "fleet-serve.log"

    def kept() -> bool:
        asyncio.run(child.keep())
        return bool(writers(log))

    def start() -> None:
        # One that finds its port taken ends, and is started again.
        wait_for(kept, log)

    try:
        for _ in range(3):
            start()
        assert len(writers(log)) == 1
        wait_for(lambda: "answers on" in log.read_text(), log)
        start()
        assert log.read_text().count("answers on") == len(writers(log)) == 1
    finally:
        for process in writers(log):
            process.send_signal(signal.SIGTERM)
        psutil.wait_procs(writers(log), 10)
