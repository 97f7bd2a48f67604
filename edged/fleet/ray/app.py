"""The deployments of a fleet's Ray cluster: `Node` registers its box, `Ingress` keeps an ingress running.

A replica is a stand-in: daemon and ingress are no processes of Ray's and outlive it. Ray is imported by `deploy` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp

from edged.fleet.credentials import tls_of, token_of
from edged.fleet.ray.cluster import STARTED, folder_of, writers
from edged.fleet.state_file import lock_file
from edged.settings.load import Settings, load_settings
from edged.store.data_dir import data_folder
from edged.store.lock import LOCK_FILE, FileLock, LockTaken

log = logging.getLogger("ray.serve")  # what a replica's log shows

EACH_S = 1.0
"""Seconds between two registrations, two looks at a child, and two checks of a replica's health."""
_START_AGAIN_S = 15.0
"""Seconds between two starts of a child that ends at once."""
_ANSWER_S = 2.0
_BOXES = 50
"""Replicas of `Node`; those that have no box yet wait, so that a box that joins has one without a driver's doing."""
_OF_RAY = ("RAY_", "OMP_NUM_THREADS")
"""Beginnings of variables that Ray sets for its workers, and that no child shall have."""


class _Replica:
    """A replica that does one thing over and over; it is ill only where that has ended."""

    def __init__(self) -> None:
        self.settings = load_settings(os.environ.get("EDGED_CONFIG"))
        self._tasks: list[asyncio.Task[None]] = []

    def _over_and_over(self, each: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            while True:
                await each()
                await asyncio.sleep(EACH_S)

        self._tasks.append(asyncio.get_running_loop().create_task(run()))

    async def check_health(self) -> None:
        """Raise what has ended this replica's work; of a daemon or an ingress it says nothing."""
        for task in self._tasks:
            if task.done():
                task.result()


class NodeReplica(_Replica):
    """The stand-in of one box: registers its daemon's address at each ingress, once a second.

    The daemon is the box's own edged.service, or one that this starts (`fleet.spawn`) and finds again by its lock.
    """

    async def __init__(self) -> None:  # type: ignore[misc] # Serve awaits it
        super().__init__()
        fleet, token, tls = self.settings.fleet, token_of(self.settings), tls_of(self.settings)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(ssl=tls),
            timeout=aiohttp.ClientTimeout(total=_ANSWER_S),
        )
        self._told: dict[str, str] = {}
        for ingress in fleet.ingresses:
            self._over_and_over(lambda ingress=ingress: self._register(ingress))  # type: ignore[misc]
        if fleet.spawn:
            daemon = Child(["serve"], data_folder(self.settings.store.data_dir, os.environ) / LOCK_FILE, self.settings)
            self._over_and_over(daemon.keep)

    async def _register(self, ingress: str) -> None:
        """Register at an ingress; what it answers is told when it changes."""
        name, url = self.settings.api.node, self.settings.fleet.url
        try:
            async with self._session.put(f"{ingress}/v1/fleet/nodes/{name}", json={"url": url}) as response:
                told = "" if response.status == 200 else f"{response.status} {(await response.text())[:300]}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            told = str(error) or type(error).__name__
        if self._told.get(ingress) != told:
            log.log(logging.WARNING if told else logging.INFO, "%s at %s: %s", name, ingress, told or "registered")
            self._told[ingress] = told


class IngressReplica(_Replica):
    """The keeper of an ingress on this box: starts `edged fleet serve`, and finds it again by its lock."""

    async def __init__(self) -> None:  # type: ignore[misc]
        super().__init__()
        self._over_and_over(Child(["fleet", "serve"], lock_file(self.settings), self.settings).keep)


class Child:
    """A program of edged that a replica starts and that outlives replica, raylet and cluster."""

    def __init__(self, arguments: list[str], lock: Path, settings: Settings) -> None:
        """`lock` is the file that the program holds locked while it runs."""
        self.arguments, self.lock = arguments, lock
        self._log = folder_of(settings) / STARTED / f"{'-'.join(arguments)}.log"
        self._started_s = -_START_AGAIN_S

    async def keep(self) -> None:
        """Start the program unless it runs, or was started a moment ago.

        It loads torch before it takes its lock, which takes minutes on a busy box: until then it has its log open.
        """
        if time.monotonic() - self._started_s >= _START_AGAIN_S and not self._runs():
            self._started_s = time.monotonic()
            await asyncio.to_thread(self._start)

    def _start(self) -> None:
        if writers(self._log):
            return
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RAY)}
        self._log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Forked once more, so that it is no child of a worker: Ray ends those with the worker.
        command = ["setsid", "--fork", sys.executable, "-P", "-m", "edged.cli", *self.arguments]
        with self._log.open("ab") as output:
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=kept, check=True)
        log.info("edged %s is started", " ".join(self.arguments))

    def _runs(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            try:
                FileLock(self.lock).release()
            except LockTaken:
                return True
        return False


def deploy(port: int, ingresses: int, spawn: bool) -> None:
    """Deploy the two applications on the cluster whose head is here, with so many ingresses."""
    import ray
    from ray import serve

    ray.init(f"127.0.0.1:{port}", log_to_driver=False, logging_level=logging.ERROR)
    serve.start(proxy_location="Disabled")
    gpus = 1 if spawn and ray.cluster_resources().get("GPU") else 0

    def one_a_box(kind: type, name: str, resource: str, replicas: int, gpus: int = 0) -> Any:
        deployment = serve.deployment(
            name=name,
            num_replicas=replicas,
            max_replicas_per_node=1,
            ray_actor_options={"num_cpus": 0, "num_gpus": gpus, "resources": {resource: 0.5}},
            health_check_period_s=EACH_S,
            graceful_shutdown_timeout_s=1.0,
        )(kind)
        return serve.RunTarget(deployment.bind(), name=name, route_prefix=None)

    targets = [one_a_box(NodeReplica, "Node", "edged", _BOXES, gpus)]
    targets += [one_a_box(IngressReplica, "Ingress", "ingress", ingresses)]
    # Boxes that are not there yet are waited for by the cluster, not here.
    serve.run_many(targets, wait_for_applications_running=False)


if __name__ == "__main__":
    deploy(**json.loads(sys.argv[1]))
