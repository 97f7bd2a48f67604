"""A real daemon under load gives memory to a real neighbour process, keeps answering, and takes it back afterwards.

The two share a bound, as two services in one slice do: `memory.max` in a folder that stands for their control group,
and in its `memory.current` the resident memory of both, as /proc tells it. Where no control group can be made that is
the bound; the kernel does not enforce it, so the test does: memory beyond it would be the out-of-memory killer's turn.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.api import live
from tests.api.live import LiveDaemon, started
from tests.models import save_tiny

MIB = 1 << 20
RESERVE_MIB = 64
NEIGHBOUR = """
import sys
held = []
for line in sys.stdin:
    held.append(b"x" * (int(line) << 20))
    print("taken", flush=True)
"""
GROUP = "EDGED_TEST_GROUP"


def serve_in_group(settings: dict[str, str], log: str, download_s: float) -> None:
    """`live._serve`, in a control group that is a folder, with a governor that is easily calmed."""
    from edged.governors import memory
    from edged.telemetry import device
    from edged.telemetry.cgroup import ControlGroup

    folder = Path(settings.pop(GROUP))
    device.ControlGroup.own = lambda: ControlGroup(folder, folder.parent)  # type: ignore[method-assign]
    memory._CALM_S = 1.0
    live._serve(settings, log, download_s)


class Group:
    """The bound and what counts towards it; `most` is the highest that was counted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most = folder, 0
        self.processes: list[psutil.Process] = []
        folder.mkdir()
        self.bound(1 << 40)
        self.count()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def bound(self, size: int) -> None:
        (self.folder / "memory.max").write_text(str(size))
        self.size = size

    def count(self) -> int:
        used = 0
        for process in self.processes:
            try:
                used += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        # Readers never see half of a number.
        (self.folder / "new").write_text(str(used))
        os.replace(self.folder / "new", self.folder / "memory.current")
        self.most = max(self.most, used)
        return used

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self.count()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


class Neighbour:
    """A process that takes memory when told, and keeps it until it ends."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def take(self, mib: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{mib}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "taken\n"

    def leave(self) -> None:
        self.process.kill()
        self.process.wait()


class Load:
    """Users who ask one after the other, each time something new; their errors and their answers are counted."""

    def __init__(self, daemon: LiveDaemon) -> None:
        self.answered, self.errors = 0, []  # type: ignore[var-annotated]
        self._daemon, self._stop = daemon, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(user,), daemon=True) for user in range(4)]
        for thread in self._threads:
            thread.start()

    def _ask(self, user: int) -> None:
        with self._daemon.http() as http:
            turn = 0
            while not self._stop.is_set():
                turn += 1
                body = {"prompt": f"{user}:{turn} " + "tell me of the sea " * 18, "max_tokens": 8, "ignore_eos": True}
                response = http.post("/v1/completions", json=body)
                self.answered += 1
                if response.status_code != 200 or response.json()["usage"]["completion_tokens"] != 8:
                    self.errors.append(response.text)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30.0)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    made = Group(tmp_path / "slice")
    yield made
    made.close()


@pytest.fixture
def cache_mib() -> int:
    return 160


@pytest.fixture
def daemon(tmp_path: Path, group: Group, cache_mib: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveDaemon]:
    model = save_tiny(tmp_path / "tiny", num_key_value_heads=8, num_attention_heads=8, head_dim=64)
    settings: dict[str, Any] = {
        "cache__memory_mb": cache_mib,
        "governor__memory_reserve_mb": RESERVE_MIB,
        "serving__max_sequences": 32,
        "guard__held_out_share": 0.0,
        "align__rank": 2,
        "store__save_every_s": 0.1,
    }
    original = live._forked.Process

    def process(target: Any, args: tuple[Any, ...], daemon: bool) -> Any:
        return original(target=serve_in_group, args=({**args[0], GROUP: str(group.folder)}, *args[1:]), daemon=daemon)

    monkeypatch.setattr(live._forked, "Process", process)
    with started(tmp_path / "run", model, **settings) as running:
        group.processes.append(psutil.Process(running.process.pid))
        yield running.wait_until_ready()


def until(condition: Any, what: Any, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.1)


def teach(daemon: LiveDaemon, first: int, count: int) -> None:
    with daemon.http() as http:
        for n in range(first, first + count):
            body = {"user": "ada", "prompt": f"{n}: ", "chosen": f"yes {n}", "rejected": f"never {n}"}
            assert http.post("/v1/feedback", json=body).status_code == 200


@pytest.mark.parametrize("cache_mib", [40])
@pytest.mark.slow
def test_caches_make_room_for_a_neighbour_and_grow_again(daemon: LiveDaemon, group: Group) -> None:
    """The first step and the way back, in a few seconds."""

    def governor() -> dict[str, Any]:
        return dict(daemon.status()["governors"]["memory"])

    def ask(first: int) -> None:
        with daemon.http() as http:
            for turn in range(first, first + 10):
                body = {"prompt": f"{turn} " + "tell me of the sea " * 22, "max_tokens": 8, "ignore_eos": True}
                answer = http.post("/v1/completions", json=body)
                assert answer.json()["usage"]["completion_tokens"] == 8

    ask(0)
    until(lambda: governor()["kv_resident_bytes"] > 24 * MIB, governor)
    full, neighbour = governor(), Neighbour()
    assert full["step"] == 0
    try:
        group.processes.append(psutil.Process(neighbour.process.pid))
        group.bound(group.count() + (RESERVE_MIB + 40) * MIB)
        neighbour.take(48)
        until(lambda: "step 1 of 4, was 0; it holds caches" in daemon.log, governor)
        until(lambda: governor()["kv_resident_bytes"] < full["kv_resident_bytes"] - 6 * MIB, governor)
        ask(10)
        neighbour.leave()
        until(lambda: governor()["step"] == 0, governor)
    finally:
        neighbour.leave()
    assert governor()["holds"] == []
    held = governor()["kv_resident_bytes"]
    ask(20)
    until(lambda: governor()["kv_resident_bytes"] > held, governor)
    assert daemon.stop() == 0


@pytest.mark.slow
def test_a_neighbour_gets_memory_and_gives_it_back_while_everyone_is_answered(daemon: LiveDaemon, group: Group) -> None:
    load, neighbour = Load(daemon), Neighbour()
    try:
        group.processes.append(psutil.Process(neighbour.process.pid))
        until(lambda: daemon.status()["governors"]["memory"]["kv_resident_bytes"] > 150 * MIB, "the cache fills")
        teach(daemon, 0, 4)
        until(lambda: daemon.status()["finetune"]["pairs_trained"] == 4, "it learns while there is memory")
        before = rss(daemon)
        group.bound(group.count() + (RESERVE_MIB + 60) * MIB)
        crowd(daemon, neighbour)
        # All that could be given was given, in order, and was worth something.
        steps = [f"step {n} of 4, was {n - 1}" for n in (1, 2, 3, 4)]
        told = [step for line in daemon.log.splitlines() for step in steps if step in line]
        assert list(dict.fromkeys(told)) == steps
        held = daemon.status()
        assert held["governors"]["memory"]["holds"] == ["caches", "pruning", "fine-tuning", "admission"]
        assert held["pages"]["retired"] > held["pages"]["total"] // 2
        assert before - rss(daemon) > 70 * MIB
        assert group.most < group.size, "the out-of-memory killer would have come"
        # Nobody learns, everybody is answered.
        teach(daemon, 4, 4)
        answered = load.answered
        until(lambda: load.answered > answered + 8, "nobody is answered")
        assert daemon.status()["finetune"]["pairs_trained"] == 4
        neighbour.leave()
        until(lambda: daemon.status()["governors"]["memory"]["step"] == 0, lambda: daemon.status()["governors"])
        until(lambda: daemon.status()["finetune"]["pairs_trained"] == 8, "it learns again")
        grown = held["governors"]["memory"]["kv_resident_bytes"] + 50 * MIB
        until(lambda: daemon.status()["governors"]["memory"]["kv_resident_bytes"] > grown, "the cache grows")
    finally:
        neighbour.leave()
        load.close()
    assert load.errors == []
    assert daemon.stop() == 0


def rss(daemon: LiveDaemon) -> int:
    return psutil.Process(daemon.process.pid).memory_info().rss


def crowd(daemon: LiveDaemon, neighbour: Neighbour) -> None:
    """The neighbour takes what is free, a little at a time, until everything is held back."""
    deadline = time.monotonic() + 120.0
    while (status := daemon.status())["governors"]["memory"]["step"] < 4:
        assert time.monotonic() < deadline, status["governors"]
        if status["device"]["memory_available_bytes"] > RESERVE_MIB // 2 * MIB:
            neighbour.take(6)
        time.sleep(0.2)
