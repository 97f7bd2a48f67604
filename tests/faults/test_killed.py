"""kill -9 under load: what was acknowledged is there, whole versions are served, pairs are trained exactly once."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import threading
from pathlib import Path

import httpx2
import pytest

from tests.api.live import LiveDaemon, running
from tests.faults.test_disk import check_trained_once, greedy, integrity, teach, until
from tests.models import save_tiny

SETTINGS = {
    "store__save_every_s": 0.1,
    "align__replay_share": 0,
    "align__practice": False,
    "align__micro_batch_pairs": 2,
    "guard__held_out_share": 0,
    "feedback__pairs_per_hour": 0,
}


class Load:
    """Answers and feedback without pause, until the daemon is gone."""

    def __init__(self, daemon: LiveDaemon, first: int, wanted: str) -> None:
        self.acknowledged: set[int] = set()
        self.wrong: list[str] = []
        self.refused: list[str] = []
        self._daemon, self._next, self._wanted = daemon, first, wanted
        self._threads = [threading.Thread(target=self._teach), *(threading.Thread(target=self._ask) for _ in range(2))]
        for thread in self._threads:
            thread.start()

    def end(self) -> int:
        """Wait until it noticed; the number of the next pair."""
        for thread in self._threads:
            thread.join()
        return self._next

    def _teach(self) -> None:
        with self._daemon.http() as http:
            while True:
                number, self._next = self._next, self._next + 1
                try:
                    response = teach(http, number)
                except httpx2.TransportError:
                    return
                if response.status_code == 200:
                    self.acknowledged.add(number)
                else:
                    self.refused.append(response.text)

    def _ask(self) -> None:
        with self._daemon.http() as http:
            while True:
                try:
                    answer = greedy(http)
                except httpx2.TransportError:
                    return
                if answer != self._wanted:
                    self.wrong.append(answer)


def newest_whole(data: Path) -> int:
    """The number of sam's newest version whose files are what its manifest says; 0: none."""
    return max((int(folder.name[1:]) for folder in data.glob("adapters/*/sam/v*") if is_whole(folder)), default=0)


def is_whole(folder: Path) -> bool:
    try:
        sums = json.loads((folder / "edged.json").read_text())["sha256"]
        return all(hashlib.sha256((folder / name).read_bytes()).hexdigest() == value for name, value in sums.items())
    except (OSError, ValueError):
        return False


def kill_again_and_again(folder: Path, times: int, seed: int) -> None:
    model, chance, data = save_tiny(folder / "tiny"), random.Random(seed), folder / "data"
    acknowledged: set[int] = set()
    number, wanted, versions = 0, "", 0
    for _ in range(times):
        with running(folder, model, **SETTINGS) as daemon:
            with daemon.http() as http:
                wanted = wanted or greedy(http)
                assert greedy(http) == wanted
                if versions:
                    # It goes on learning, so that it may be further already, but never behind.
                    assert http.get("/v1/adapters/sam").json()["version"] >= versions
            load = Load(daemon, number, wanted)
            moment = threading.Event()
            moment.wait(chance.uniform(0.05, 1.5))
            assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
            number = load.end()
            acknowledged |= load.acknowledged
            assert not load.wrong
            assert not load.refused
        assert integrity(data / "edged.db") == "ok"
        versions = newest_whole(data)
        assert len(list(data.glob("**/*.draft"))) <= 1
    with running(folder, model, **{**SETTINGS, "align__enabled": "false"}) as daemon, daemon.http() as http:
        assert http.get("/v1/adapters/sam").json()["version"] == versions
        assert greedy(http) == wanted
        daemon.stop()
    with running(folder, model, **SETTINGS) as daemon, daemon.http() as http:
        until(lambda: http.get("/v1/adapters/sam").json()["pairs_queued"] == 0, lambda: daemon.log, within_s=120)
        assert daemon.stop() == 0
    check_trained_once(data, acknowledged)


def test_four_kills_lose_nothing_and_teach_nothing_twice(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 4, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills_lose_nothing_and_teach_nothing_twice(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 50, seed=2)
