"""Members that Ray keeps: they register, and whatever of Ray ends, ingress and daemons answer on.

Real processes: two daemons, an ingress, a cluster of two boxes with TLS and a token. Needs edged[fleet] and openssl.
Each fault comes at a random moment as often as EDGED_FLEET_TIMES says: tools/soak --fleet.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from edged.fleet.ray.cluster import STARTED, TEMPORARY, end, writers
from examples.quickstart.daemon import free_port
from tests.cli.conftest import clean_environment, edged, wait_for
from tests.fleet.conftest import TIMES, Process, ask, chance_of
from tests.fleet.teaching import pair
from tests.models import save_tiny

pytest.importorskip("ray", reason="edged[fleet] is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TAUGHT = "taught"
again = pytest.mark.parametrize("time_of_it", range(TIMES))


def own_address() -> str:
    """The address that Ray takes where it is told loopback's."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


class Box:
    """A daemon and the process of `edged fleet init` or `join` beside it, which starts the daemon of `spawn`."""

    def __init__(self, folder: Path, name: str, model: Path, fleet: str, spawn: bool) -> None:
        self.name, self.data, self.port, self.spawn = name, folder / name, free_port(), spawn
        self.data.mkdir()
        config = folder / f"{name}.toml"
        config.write_text(
            f'[model]\npath = "{model}"\n[cache]\nmemory_mb = 32\n[align]\npractice = false\n'
            f'[store]\ndata_dir = "{self.data}"\n'
            + fleet.replace("[fleet]", f"[fleet]\nspawn = {str(spawn).lower()}")
            + f'listen = "127.0.0.1:{self.port}"\nsocket = "{folder}/{name}.sock"\n'
        )
        self.url = f"https://127.0.0.1:{self.port}"
        apart = ["--data-dir", str(folder / f"data-{name}")]
        environment = {"EDGED_API__NODE": name}
        self.daemon = Process(["serve", "-c", str(config), *apart], folder / f"{name}.log", environment)
        self._flags = ["-c", str(config), "--name", name, "--url", self.url]
        self._log = folder / f"{name}-ray.log"

    def command(self, *arguments: str) -> Process:
        """A command of `edged fleet` about this box."""
        return Process(["fleet", *arguments, *self._flags], self._log)

    def keep(self, *arguments: str) -> None:
        """Start `edged fleet init` or `join`, as the unit does."""
        self.ray = self.command(*arguments)
        self.ray.start()

    def ended(self, seconds: float = 60.0) -> int:
        """Wait until that has ended; its exit status."""
        assert self.ray.process is not None
        return self.ray.process.wait(seconds)

    def process(self, name: str) -> psutil.Process | None:
        """Ray's process of a name on this box."""
        found = writers(self.data / "ray" / TEMPORARY)
        return next((each for each in found if name in (each.name(), " ".join(each.cmdline()).strip())), None)

    def kill(self, name: str) -> None:
        """`kill -9` for one of Ray's processes on this box."""
        process = self.process(name)
        assert process is not None, name
        process.kill()

    def replica(self) -> int | None:
        """The process id of its replica that has registered; None while there is none."""
        process = self.process("ray::ServeReplica:Node:Node")
        logs = (self.data / "ray" / TEMPORARY / "session_latest/logs/serve").glob("replica_Node*.log")
        registered = any("registered" in log.read_text() for log in logs)
        return process.pid if process is not None and registered else None


class Stream(threading.Thread):
    """A client that asks the ingress for one streamed answer after the other, and teaches a pair after each.

    It counts answers that were whole, and notes those that were cut and pairs that were refused.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.whole, self.cut, self.stop = url, 0, [], False
        self.start()

    def run(self) -> None:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 300, "stream": True}
        while not self.stop:
            try:
                headers = {"Content-Type": "application/json"}
                request = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode(), headers)
                with urllib.request.urlopen(request, timeout=60) as answer:
                    text = answer.read().decode()
                assert "data: [DONE]" in text, text[-300:]
                status, taken, _ = ask(f"{self.url}/v1/feedback", pair(TAUGHT, self.whole))
                assert status == 200, taken
                self.whole += 1
            except Exception as error:
                self.cut.append(repr(error))

    def goes_on(self) -> None:
        """Wait until two answers more are whole; none was cut."""
        before = self.whole
        wait_for(lambda: self.whole >= before + 2 or bool(self.cut), "no answers")
        assert not self.cut, self.cut

    def goes_on_for(self, seconds: float) -> None:
        """Wait until two answers more are whole, and then so many seconds: until a fault's moment."""
        self.goes_on()
        time.sleep(seconds)


class Cluster:
    """Boxes a (the head, with the ingress) and b."""

    def __init__(self, folder: Path) -> None:
        self.address, self.head = own_address(), free_head()
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=edged"]
        made += ["-addext", f"subjectAltName=IP:127.0.0.1,IP:{self.address}"]
        made += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")]
        subprocess.run(made, check=True, capture_output=True)
        self.port = free_port()
        fleet = (
            f'[fleet]\ningresses = ["https://127.0.0.1:{self.port}"]\nlisten = "127.0.0.1:{self.port}"\n'
            f'authority = "{folder}/certificate.pem"\n'
            f'[api]\ncertificate = "{folder}/certificate.pem"\nkey = "{folder}/key.pem"\n'
        )
        model = save_tiny(folder / "tiny")
        self.a, self.b = (Box(folder, name, model, fleet, spawn=name == "b") for name in "ab")
        self.certificate = folder / "certificate.pem"

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def start_head(self) -> None:
        self.a.keep("init", "--port", str(self.head), "--ingress")
        wait_for(self.listens, self.a.ray.log)

    def listens(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((self.address, self.head), 1).close()
            return True
        return False

    def start(self) -> None:
        """Start the head, give its token to b, and have b join."""
        self.start_head()
        (self.b.data / "ray").mkdir(exist_ok=True)
        shutil.copy(self.a.data / "ray" / "token", self.b.data / "ray" / "token")
        self.b.keep("join", f"{self.address}:{self.head}")

    def states(self) -> dict[str, str]:
        with contextlib.suppress(OSError):
            return {item["name"]: item["state"] for item in ask(f"{self.url}/v1/fleet")[1]["nodes"]}
        return {}

    def is_whole(self) -> bool:
        there = self.states() == {"a": "up", "b": "up"}
        return there and self.a.replica() is not None and self.b.replica() is not None


def free_head() -> int:
    """A port for the head such that the next one is free, too."""
    while True:
        with contextlib.suppress(OSError), socket.create_server(("", port := free_port())):
            socket.create_server(("", port + 1)).close()
            return port


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Ray's sockets need a short path.
    folder = Path(tempfile.mkdtemp(prefix="er-", dir="/tmp"))
    os.environ["SSL_CERT_FILE"] = str(folder / "certificate.pem")
    made = Cluster(folder)
    boxes = (made.a, made.b)
    try:
        made.a.daemon.start()
        made.start()
        wait_for(made.is_whole, folder, seconds=240)
        yield made
    finally:
        del os.environ["SSL_CERT_FILE"]
        for box in boxes:
            for process in (box.ray, box.daemon):
                if process.process is not None and process.process.poll() is None:
                    process.send(signal.SIGTERM)
                    process.process.wait(60)
            for part in (TEMPORARY, STARTED):
                end(box.data / "ray" / part)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def stream(cluster: Cluster) -> Iterator[Stream]:
    asking = Stream(cluster.url)
    yield asking
    asking.stop = True
    asking.join(60)
    assert not asking.cut


def learned_once(cluster: Cluster, pairs: int) -> bool:
    """Whether each of these pairs is in the feedback of one node, once, and none of them is to be learned yet."""
    found: Counter[str] = Counter()
    for box in (cluster.a, cluster.b):
        finetune = ask(f"{box.url}/v1/status")[1]["finetune"]
        if finetune["pairs_queued"] or finetune["pairs_waiting"]:
            return False
        with urllib.request.urlopen(f"{box.url}/v1/feedback?user={TAUGHT}") as answer:
            found.update(json.loads(line)["chosen"] for line in answer.read().decode().splitlines())
    return found == Counter({pair("", number)["chosen"]: 1 for number in range(pairs)})


def test_nothing_that_is_used_of_ray_is_alpha() -> None:
    from ray import serve

    for used in (serve.start, serve.deployment, serve.run_many, serve.RunTarget):
        assert "alpha" not in (used.__doc__ or "").lower(), used


ASKED = """
import json, sys, ray
from ray import serve
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
told = serve.status()
parts = {name: item for app in told.applications.values() for name, item in app.deployments.items()}
states = {name: {str(key.value if hasattr(key, "value") else key): count for key, count in item.replica_states.items()}
          for name, item in parts.items()}
print(json.dumps({"proxies": len(told.proxies), "replicas": states}))
"""


def asked(cluster: Cluster, **changes: str) -> subprocess.CompletedProcess[str]:
    """Ask the cluster for its applications, with a box's credentials."""
    folder = cluster.a.data / "ray"
    tls = {f"RAY_TLS_{name}": str(cluster.certificate) for name in ("SERVER_CERT", "CA_CERT")}
    tls |= {"RAY_USE_TLS": "1", "RAY_TLS_SERVER_KEY": str(cluster.certificate.with_name("key.pem"))}
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token"), **tls, **changes}
    command = [sys.executable, "-c", ASKED, f"{cluster.address}:{cluster.head}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=clean_environment(**own))


def test_each_box_has_one_replica_the_ingress_another_and_serve_no_proxy(cluster: Cluster) -> None:
    done = asked(cluster)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["proxies"] == 0
    assert told["replicas"]["Node"]["RUNNING"] == 2
    assert told["replicas"]["Ingress"] == {"RUNNING": 1}
    shown = edged("fleet", "status", "--url", cluster.url, "--json")
    assert {node["name"]: node["state"] for node in json.loads(shown.stdout)["nodes"]} == {"a": "up", "b": "up"}


def test_a_client_without_the_cluster_s_token_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("another\n")
    done = asked(cluster, RAY_AUTH_TOKEN_PATH=str(tmp_path / "token"))
    assert done.returncode != 0
    assert "AuthenticationError" in done.stderr


@again
def test_a_killed_ingress_is_started_again_and_knows_its_members(cluster: Cluster, time_of_it: int) -> None:
    time.sleep(chance_of("the ingress by Ray", time_of_it).uniform(0.0, 4.0))
    (before,) = writers(cluster.a.data / "ray" / STARTED)
    before.kill()
    wait_for(lambda: not before.is_running() or before.status() == psutil.STATUS_ZOMBIE)
    wait_for(lambda: cluster.states().keys() == {"a", "b"}, cluster.a.ray.log)


@again
@pytest.mark.parametrize("name", ["ServeReplica:Node:Node", "ServeReplica:Ingress:Ingress", "ServeController"])
def test_a_killed_replica_or_controller_comes_again_and_no_answer_is_cut(
    cluster: Cluster, stream: Stream, name: str, time_of_it: int
) -> None:
    stream.goes_on_for(chance_of(name, time_of_it).uniform(0.0, 4.0))
    name = f"ray::{name}"
    before = cluster.a.process(name)
    assert before is not None
    before.kill()
    stream.goes_on()
    # On a busy box Ray takes its time, and nothing waits for it.
    wait_for(lambda: (now := cluster.a.process(name)) is not None and now.pid != before.pid, name, seconds=240)
    wait_for(cluster.is_whole, cluster.states, seconds=120)
    stream.goes_on()


@again
def test_a_box_whose_raylet_is_killed_joins_again_and_finds_the_daemon_that_it_started(
    cluster: Cluster, stream: Stream, time_of_it: int
) -> None:
    stream.goes_on_for(chance_of("raylet", time_of_it).uniform(0.0, 4.0))
    (daemon,) = writers(cluster.b.data / "ray" / STARTED)
    cluster.b.kill("raylet")
    assert cluster.b.ended() == 1
    assert cluster.states() == {"a": "up", "b": "up"}
    stream.goes_on()
    cluster.b.keep("join", f"{cluster.address}:{cluster.head}")
    wait_for(cluster.is_whole, cluster.b.ray.log, seconds=120)
    assert writers(cluster.b.data / "ray" / STARTED) == [daemon]


@again
def test_a_minute_after_the_gcs_all_answer_and_the_cluster_is_whole_after_its_restart(
    cluster: Cluster, stream: Stream, time_of_it: int
) -> None:
    stream.goes_on_for(chance_of("gcs", time_of_it).uniform(0.0, 4.0))
    cluster.a.kill("gcs_server")
    since = time.monotonic()
    assert cluster.a.ended() == 1
    assert cluster.b.ended(120) == 1
    wait_for(lambda: time.monotonic() - since >= 63, seconds=70)
    assert cluster.states() == {"a": "up", "b": "up"}
    stream.goes_on()
    cluster.start()
    wait_for(cluster.is_whole, cluster.a.ray.log, seconds=120)
    stream.goes_on()


def test_a_box_that_leaves_is_no_member_and_what_ray_started_there_ends(cluster: Cluster, stream: Stream) -> None:
    stream.stop = True
    stream.join(60)
    wait_for(lambda: learned_once(cluster, stream.whole), "not each pair once")
    leave(cluster.b)
    assert cluster.states() == {"a": "up"}
    leave(cluster.a)
    assert cluster.states() == {}
    # Its own daemon goes on.
    assert ask(f"{cluster.a.url}/readyz")[0] == 200


def leave(box: Box) -> None:
    """`edged fleet leave`; nothing of Ray, and nothing that it started, is left."""
    leaving = box.command("leave")
    leaving.start()
    assert leaving.process is not None
    assert leaving.process.wait(120) == 0, leaving.log.read_text()
    assert box.ended() == 0
    # What had just been started for Ray's next task ends a moment after the raylet.
    wait_for(lambda: not writers(box.data / "ray"))
