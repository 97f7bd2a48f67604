"""A federation on this machine: a hub, boxes with a daemon and an agent each, and their kits, in one folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from edged.client.client import DaemonError
from edged.federated.campaign_file import parse_campaign
from edged.federated_nvflare import submission
from edged.federated_nvflare.kits import KitError
from edged.federated_nvflare.provision import FederationFile, provision
from edged.settings.access import token_hash
from examples.quickstart.daemon import TemporaryDaemon, free_port

SUBMITTER = "ann@example.org"
_LOOK_S = 0.25


class Hub(TemporaryDaemon):
    """The process of `edged federated hub`."""

    def __init__(self, folder: Path, kit: Path) -> None:
        self.kit = kit
        super().__init__(folder=folder)

    def start(self) -> subprocess.Popen[bytes]:
        """Start the hub's process."""
        return self._spawn(["-m", "edged.cli", "federated", "hub", str(self.kit)], {})


class Agent(TemporaryDaemon):
    """The process of `edged federated agent` beside one daemon, which it reaches by a token of role `federated`."""

    def __init__(self, folder: Path, kit: Path, url: str, token: str) -> None:
        self.kit, self.where = kit, {"EDGED_URL": url, "EDGED_TOKEN": token}
        super().__init__(folder=folder)

    def start(self) -> subprocess.Popen[bytes]:
        """Start the agent's process."""
        return self._spawn(["-m", "edged.cli", "federated", "agent", str(self.kit)], self.where)

    def jobs(self) -> list[int]:
        """Return the processes that it has started for jobs."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                line = path.read_bytes()
                if b"worker_process" in line and str(self.kit).encode() in line:
                    found.append(int(path.parent.name))
        return found

    def kill(self) -> None:
        """End the agent and its jobs at once, as a power cut does."""
        for process in (*self.jobs(), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()


class Box:
    """A box: a daemon that takes part in rounds, and its agent once it has joined."""

    def __init__(self, folder: Path, name: str, settings: str, *options: str) -> None:
        self.name, self.folder, self.port, self.token = name, folder, free_port(), secrets.token_hex(16)
        folder.mkdir()
        config = folder / "edged.toml"
        granted = f'{{ name = "agent", sha256 = "{token_hash(self.token)}", roles = ["federated"], users = ["*"] }}'
        config.write_text(f"{settings}\n[access]\ntokens = [{granted}]\n")
        places = ["--config", str(config), "--listen", f"127.0.0.1:{self.port}"]
        self.daemon = TemporaryDaemon(*places, *options, folder=folder)
        self.agent: Agent | None = None

    def join(self, kit: Path) -> str:
        """Join by a kit, as the operator does, and start the agent; returns what was shown."""
        url = f"http://127.0.0.1:{self.port}"
        shown = _run("federated", "join", str(kit), "--yes", EDGED_URL=url, EDGED_TOKEN=self.token)
        (self.folder / "agent").mkdir()
        self.agent = Agent(self.folder / "agent", kit, url, self.token)
        return shown

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask the daemon, as its admin."""
        with self.daemon.client() as client:
            return client.call(method, path, body)

    def teach(self, user: str, pairs: Iterable[tuple[str, str, str]]) -> None:
        """Give a user's pairs (question, liked answer, other answer) to the daemon."""
        with self.daemon.client() as client:
            for question, chosen, rejected in pairs:
                pair = {"user": user, "prompt": question, "chosen": chosen, "rejected": rejected}
                client.post("/v1/feedback", pair)

    def agree(self, user: str) -> None:
        """Have a user agree to what the box asks."""
        told = self.ask("GET", "/v1/federated")
        self.ask("PUT", f"/v1/federated/consent/{user}", {"text_sha256": told["text_sha256"]})

    def pairs_waiting(self) -> int:
        """Return how many pairs are queued."""
        return int(self.ask("GET", "/v1/status")["finetune"]["pairs_queued"])

    def stop(self) -> None:
        """Stop the agent and the daemon."""
        if self.agent is not None:
            self.agent.kill()
        self.daemon.stop()


class Federation:
    """A hub and boxes that know each other by kits of one authority."""

    def __init__(self, folder: Path, boxes: dict[str, Box]) -> None:
        self.folder, self.boxes, self.kits, self.port = folder, boxes, folder / "kits", free_port()
        hub = f"localhost:{self.port}"
        file = FederationFile(name="demo", hub=hub, boxes=tuple(boxes), submitter=SUBMITTER)
        provision(file, self.kits)
        (folder / "hub").mkdir()
        self.hub = Hub(folder / "hub", self.kits / "hub")

    def join(self) -> str:
        """Have all boxes join; returns what the last one was shown."""
        return [box.join(self.kits / name) for name, box in self.boxes.items()][-1]

    def submit(self, starts: Mapping[str, Path] = MappingProxyType({}), **campaign: Any) -> str:
        """Submit a campaign of the boxes' model, with its `starts`, once the hub answers. Raises KitError."""
        told = next(iter(self.boxes.values())).ask("GET", "/v1/federated")
        job = parse_campaign({"model": told["model"], "rank": told["rank"], "starts": [*starts], **campaign})
        return self._patiently(lambda: submission.submit(self.kits / SUBMITTER, job, starts))

    def campaigns(self) -> dict[str, dict[str, Any]]:
        """Return how far campaigns are, by name."""
        return {each["name"]: each for each in self._patiently(lambda: submission.campaigns(self.kits / SUBMITTER))}

    def wait_for(self, condition: Callable[[], object], what: str, within_s: float = 120.0) -> float:
        """Wait until a condition holds; returns the seconds. Raises DaemonError with the logs' ends."""
        started = time.monotonic()
        while not condition():
            if time.monotonic() > started + within_s:
                agents = [box.agent.log_end() for box in self.boxes.values() if box.agent is not None]
                raise DaemonError("\n".join([f"{what} did not happen in {within_s:g} s", self.hub.log_end(), *agents]))
            time.sleep(_LOOK_S)
        return time.monotonic() - started

    def stop(self) -> None:
        """Stop all processes."""
        for box in self.boxes.values():
            box.stop()
        self.hub.stop()

    @staticmethod
    def _patiently(act: Callable[[], Any], within_s: float = 60.0) -> Any:
        """Do what needs a hub that answers."""
        ends = time.monotonic() + within_s
        while True:
            try:
                return act()
            except KitError:
                if time.monotonic() > ends:
                    raise
                time.sleep(1.0)


def _run(*command: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EDGED_")}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "edged.cli", *command], capture_output=True, text=True, env={**kept, **environment}
    )
    if done.returncode:
        raise DaemonError(f"{' '.join(command)}: {done.stderr}")
    return done.stdout
