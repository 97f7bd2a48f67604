"""Each fault of a fleet at random moments, under load, as often as EDGED_FLEET_TIMES says: tools/soak --fleet.

A home moves by load meanwhile, and one box's clock is an hour ahead.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest

from benchmarks.soak.faults import fill
from tests.cli.conftest import wait_for
from tests.fleet.conftest import TIMES, Fleet, all_come_up, ask, chance_of, run_fleet
from tests.fleet.teaching import exported, lease, pair, teach, wait_for_copy, writers

NODES = "abc"
LOST = (OSError, http.client.HTTPException)
Fault = Callable[[Fleet, "Load", random.Random], float]
seconds: defaultdict[str, list[float]] = defaultdict(list)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("soak")
    (folder / "c").mkdir()
    disk = ["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(folder / "c")]
    small = subprocess.run(disk, capture_output=True).returncode == 0

    def prepare(made: Fleet) -> None:
        made.nodes["c"].clock_s = 3600
        for node in made.nodes.values():
            node.environment["EDGED_SERVING__DRAIN_S"] = "5"

    try:
        with run_fleet(folder, prepare, takeover_s=2.0, move_min_s=0.2, policy="round-robin") as running:
            yield running
        for name, each in seconds.items():
            print(
                f"\n{name}: {len(each)} times, median {statistics.median(each):.2f} s, most {max(each):.2f} s", end=""
            )
    finally:
        if small:
            subprocess.run(["umount", "-l", str(folder / "c")], check=True)


class Load:
    """Three users who are taught, and streams of theirs and of nobody's, all the time through the ingress."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.users = fleet, [fleet.user_at(name) for name in NODES]
        self.taught: dict[str, set[int]] = {user: set() for user in self.users}
        self.unsure: dict[str, set[int]] = {user: set() for user in self.users}
        self.problems: list[str] = []
        self.cut_off = self.node_lost = False
        """Whether clients' connections may break, and users' streams may end with the error `node_lost`."""
        self._over = threading.Event()
        streams = ((self._stream, user) for user in (None, *self.users[:2]))
        self._threads = [threading.Thread(target=self._run, args=each) for each in ((self._teach,), *streams)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, act: Callable[..., None], *arguments: Any) -> None:
        number = 0
        while not self._over.wait(0.1):
            try:
                act(number, *arguments)
            except LOST as error:
                if not self.cut_off:
                    self.problems.append(f"{act.__name__}: {error!r}")
            number += 1

    def _teach(self, number: int) -> None:
        for user in self.users:
            self.unsure[user].add(number)
            self.teach(user, number, self.fleet.url)

    def teach(self, user: str, number: int, url: str) -> None:
        """Teach a pair, and note whether it was acknowledged."""
        status, answer, _ = ask(f"{url}/v1/feedback", pair(user, number))
        if status == 200:
            self.taught[user].add(number)
        elif status not in (503, 507):
            self.problems.append(f"{user} {number}: {status} {answer}")

    def _stream(self, number: int, user: str | None) -> None:
        body = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 48, "ignore_eos": True,
                "stream": True, "temperature": 0} | ({"user": user} if user else {})  # fmt: skip
        url, headers = f"{self.fleet.url}/v1/chat/completions", {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60
            ) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            self.problems.append(f"a chat of {user}: {error.code} {error.read().decode()}")
            return
        if "[DONE]" in text:
            return
        if not (self.cut_off or (user and self.node_lost and "node_lost" in text)):
            self.problems.append(f"a stream of {user} ended with {text[-300:]}")

    def check(self) -> None:
        """What was acknowledged is learned once, at the one writer of each user, and no stream was harmed."""
        assert not self.problems, self.problems[:5]
        until_s = time.monotonic() + 120.0
        while wrong := [each for user in self.users if (each := self._wrong(user))]:
            assert time.monotonic() < until_s, wrong
            time.sleep(0.2)

    def _wrong(self, user: str) -> str:
        """What is not (yet) as it should be; "" for nothing."""
        found, home = exported(self.fleet, user), ask(f"{self.fleet.url}/v1/fleet")[1]["homes"].get(user)
        if not self.taught[user] and not any(found.values()):
            return ""
        told, maybe = (Counter({pair("", each)["chosen"]: 1 for each in numbers})
                       for numbers in (self.taught[user], self.taught[user] | self.unsure[user]))  # fmt: skip
        here, writing = found.pop(home, Counter()), writers(self.fleet, user)
        status = {name: ask(f"{self.fleet.node_url(name)}/v1/status")[1] for name in NODES}
        queued = {name: each["finetune"]["pairs_queued"] for name, each in status.items()}
        if told <= here <= maybe and writing == [home] and not any((*found.values(), *queued.values())):
            return ""
        lacks = f"lacks {dict(told - here)}, has besides {dict(here - maybe)}"
        return f"{user} at {home}: {lacks}, elsewhere {found}, queued {queued}, writers {writing}"


def seconds_until(condition: Callable[[], bool]) -> float:
    began_s = time.monotonic()
    wait_for(condition)
    return time.monotonic() - began_s


def start_again(fleet: Fleet, name: str) -> None:
    fleet.nodes[name].start()
    all_come_up(fleet)


def kill_a_daemon(fleet: Fleet, load: Load, chance: random.Random) -> float:
    name, load.node_lost = chance.choice(NODES), True
    fleet.nodes[name].kill()
    down_s = seconds_until(lambda: fleet.states()[name] == "down")
    time.sleep(chance.uniform(0.0, 5.0))
    start_again(fleet, name)
    return down_s


def stop_a_daemon(fleet: Fleet, load: Load, chance: random.Random) -> float:
    name, load.node_lost = chance.choice(NODES), True
    fleet.nodes[name].send(signal.SIGTERM)
    out_s = seconds_until(lambda: fleet.states()[name] in ("draining", "down"))
    process = fleet.nodes[name].process
    assert process is not None
    assert process.wait(30) == 0
    start_again(fleet, name)
    return out_s


def halt_a_daemon(fleet: Fleet, _: Load, chance: random.Random) -> float:
    name = chance.choice(NODES)
    fleet.nodes[name].send(signal.SIGSTOP)
    try:
        stale_s = seconds_until(lambda: fleet.states()[name] == "stale")
        placed = ask(f"{fleet.url}/v1/fleet")[1]["placed"][name]
        time.sleep(max(0.0, 10.0 - stale_s))
        assert ask(f"{fleet.url}/v1/fleet")[1]["placed"][name] == placed
    finally:
        fleet.nodes[name].send(signal.SIGCONT)
    all_come_up(fleet)
    return stale_s


def kill_the_ingress(fleet: Fleet, load: Load, _: random.Random) -> float:
    user = fleet.user_at("b")
    answer, headers = fleet.chat(user)[1:]
    load.cut_off = True
    fleet.ingress.kill()
    fleet.ingress.start()
    serves_s = seconds_until(lambda: answers(fleet))
    all_come_up(fleet)
    told = ask(f"{fleet.url}/v1/feedback", {"completion_id": answer["id"], "signal": "up"})
    assert (told[0], told[2]["X-Edged-Node"]) == (200, headers["X-Edged-Node"])
    return serves_s


def answers(fleet: Fleet) -> bool:
    try:
        return fleet.chat()[0] == 200
    except LOST:
        return False


def cut_a_daemon_off(fleet: Fleet, load: Load, chance: random.Random) -> float:
    load.node_lost = True
    fleet.cable.cut()
    down_s = seconds_until(lambda: fleet.states()["a"] == "down")
    lasts_s = chance.choice((0.5, 4.0, 12.0))
    for number in range(1000, 1000 + int(lasts_s * 2)):
        load.unsure[load.users[0]].add(number)
        load.teach(load.users[0], number, fleet.node_url("a"))
        time.sleep(0.5)
    fleet.cable.join()
    all_come_up(fleet)
    return down_s


def forget_while_a_daemon_is_away(fleet: Fleet, load: Load, _: random.Random) -> float:
    user, load.node_lost = fleet.user_at("b"), True
    teach(fleet, user, 0)
    wait_for_copy(fleet, user, "b")
    away = next(name for name in "ac" if lease(fleet, name, user))
    fleet.nodes[away].kill()
    fleet.wait_for_state(away, "down")
    status, forgotten, _ = ask(f"{fleet.url}/v1/adapters/{user}", method="DELETE")
    assert (status, forgotten.get("away")) == (200, [away]), forgotten
    began_s = time.monotonic()
    start_again(fleet, away)
    up_s = time.monotonic() - began_s
    assert all(lease(fleet, name, user) is None for name in NODES)
    assert not any(exported(fleet, user).values())
    assert not list(fleet.folder.glob(f"*/adapters/*/{user}"))
    return up_s


def fill_a_disk_at_a_move(fleet: Fleet, _: Load, chance: random.Random) -> float:
    if not (fleet.folder / "c").is_mount():
        pytest.skip("nothing can be mounted here: that needs root and CAP_SYS_ADMIN")
    user, filler = fleet.user_at("b"), fleet.folder / "c" / "filler"
    for number in range(3):
        teach(fleet, user, number)
    fill(filler)
    try:
        # Some room is left: what is carried breaks off anywhere.
        os.truncate(filler, filler.stat().st_size - chance.randrange(300_000))
        refused = ask(f"{fleet.url}/v1/fleet/move", {"user": user, "node": "c"})
        assert refused[0] in (200, 503), refused
        home = ask(f"{fleet.url}/v1/fleet")[1]["homes"][user]
        status, _, headers = ask(f"{fleet.url}/v1/feedback", pair(user, 3))
        assert status == 200 or home == "c", headers
    finally:
        filler.unlink()
    freed_s = time.monotonic()
    wait_for(lambda: ask(f"{fleet.url}/v1/fleet/move", {"user": user, "node": "c"})[0] == 200)
    numbers = range(4 if status == 200 else 3)
    wait_for(lambda: exported(fleet, user)["c"] == Counter({pair("", each)["chosen"]: 1 for each in numbers}))
    return time.monotonic() - freed_s


FAULTS: dict[str, Fault] = {each.__name__: each for each in (
    kill_a_daemon, stop_a_daemon, halt_a_daemon, kill_the_ingress, cut_a_daemon_off, forget_while_a_daemon_is_away,
    fill_a_disk_at_a_move,
)}  # fmt: skip


@pytest.fixture(autouse=True)
def whole(fleet: Fleet) -> Iterator[None]:
    """Every test begins with all nodes, whatever became of the one before."""
    yield
    fleet.mend()


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("time_of_it", range(TIMES))
def test_nothing_acknowledged_is_lost_or_learned_twice(fleet: Fleet, name: str, time_of_it: int) -> None:
    chance = chance_of(name, time_of_it)
    with Load(fleet) as load:
        time.sleep(chance.uniform(0.5, 4.0))
        took_s = FAULTS[name](fleet, load, chance)
        time.sleep(1.0)
    load.check()
    seconds[name].append(took_s)
