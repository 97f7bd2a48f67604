"""`tools/fleet-demo`: three daemons behind one address teach two users; one is killed, and both are served on.

With `--ray` no list names the boxes: each joins a cluster of Ray, which starts the ingress, too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from edged.client.client import Address, Client, DaemonError, Refused
from edged.fleet.ray.cluster import STARTED, TEMPORARY, end
from examples.quickstart.daemon import TemporaryDaemon, free_port
from examples.quickstart.lessons import CANDIDATES, DEMO, Taste

CHAT = "/v1/chat/completions"
NODES = ("box-a", "box-b", "box-c")
PICKS = 10
QUESTIONS = 12
PRACTICE_S = 20.0
"""Idle seconds in which the daemons practise what was picked."""
WAIT_S, START_S = 60.0, 120.0


class Ingress(TemporaryDaemon):
    """The process of `edged fleet serve` before three daemons."""

    def __init__(self, folder: Path, port: int, nodes: dict[str, int], homes: dict[str, str]) -> None:
        self.port = port
        listed = ", ".join(f'{name} = "http://127.0.0.1:{own}"' for name, own in nodes.items())
        placed = ", ".join(f'{user} = "{name}"' for user, name in homes.items())
        self.config = folder / "fleet.toml"
        text = f'[fleet]\nlisten = "127.0.0.1:{port}"\nnodes = {{ {listed} }}\nhomes = {{ {placed} }}\n'
        self.config.write_text(text)
        super().__init__(folder=folder)

    def start(self) -> subprocess.Popen[bytes]:
        """Start the ingress' process."""
        return self._spawn(["-m", "edged.cli", "fleet", "serve", "--config", str(self.config)], {})

    def client(self, timeout_s: float = 60.0) -> Client:
        """Return a new connection to the ingress."""
        return Client(Address(host="127.0.0.1", port=self.port), timeout_s)


class RayBox(TemporaryDaemon):
    """The process of `edged fleet init` (of the first box, with the ingress) or `join` beside one daemon."""

    STOP_S = 60.0

    def __init__(self, folder: Path, name: str, port: int, config: Path, head: int) -> None:
        self.role = ["init", "--port", str(head), "--ingress"] if name == NODES[0] else ["join", f"127.0.0.1:{head}"]
        self.box = ["--config", str(config), "--name", name, "--url", f"http://127.0.0.1:{port}"]
        super().__init__(folder=folder)

    def start(self) -> subprocess.Popen[bytes]:
        """Start Ray's processes of this box; all boxes are one machine: no TLS, and one file for the token."""
        self.log_file = self.folder / "ray.log"
        one_machine = {"RAY_USE_TLS": "0", "RAY_AUTH_TOKEN_PATH": str(self.folder.parent / "token")}
        folder = {"EDGED_STORE__DATA_DIR": str(self.folder)}
        return self._spawn(["-m", "edged.cli", "fleet", *self.role, *self.box], one_machine | folder)

    def stop(self) -> int:
        """End Ray's processes of this box, and the ingress that they started."""
        ended = super().stop()
        for part in (TEMPORARY, STARTED):
            end(self.folder.resolve() / "ray" / part)
        return ended


class Demo:
    """The three daemons, their ingress, and two users of opposite tastes whose homes are two of the daemons."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="edged-fleet-"))
        self.daemons: dict[str, TemporaryDaemon] = {}
        self.ports = {name: free_port() for name in NODES}
        for name, port in self.ports.items():
            own = self.folder / name
            own.mkdir()
            self.daemons[name] = TemporaryDaemon("--listen", f"127.0.0.1:{port}", folder=own)
        self.homes = {taste.user: name for taste, name in zip(DEMO.tastes, NODES, strict=False)}
        self.port = free_port()
        self.others: list[TemporaryDaemon] = []
        """The ingress, or the boxes' parts of a cluster, the head first."""
        self.client = Client(Address(host="127.0.0.1", port=self.port), timeout_s=60.0)

    def lead(self) -> None:
        """Start an ingress that has a list of the daemons."""
        self.others.append(Ingress(self.folder, self.port, self.ports, self.homes))

    def join(self) -> None:
        """Have each box join a cluster of Ray, the first one as its head. Raises DaemonError."""
        config, head = self.folder / "fleet.toml", free_port()
        placed = ", ".join(f'{user} = "{name}"' for user, name in self.homes.items())
        where = f'listen = "127.0.0.1:{self.port}"\ningresses = ["http://127.0.0.1:{self.port}"]\n'
        config.write_text(f"[fleet]\n{where}homes = {{ {placed} }}\n")
        for name, port in self.ports.items():
            self.others.append(RayBox(self.folder / name, name, port, config, head))
            if name == NODES[0]:
                self._await_head(head)

    def _await_head(self, port: int) -> None:
        ends = time.monotonic() + START_S
        while time.monotonic() < ends and self.others[0].process.poll() is None:
            with contextlib.suppress(OSError):
                return socket.create_connection(("127.0.0.1", port), 1.0).close()
            time.sleep(0.2)
        raise DaemonError(f"the head did not start; {self.others[0].log_end()}")

    def wait_for(self, name: str, state: str, within_s: float = WAIT_S) -> float:
        """Wait until the ingress sees a node in a state; returns the seconds. Raises DaemonError."""
        started = time.monotonic()
        while time.monotonic() < started + within_s:
            with contextlib.suppress(DaemonError):
                nodes = self.client.get("/v1/fleet")["nodes"]
                if any(node["name"] == name and node["state"] == state for node in nodes):
                    return time.monotonic() - started
            time.sleep(0.05)
        raise DaemonError(f"{name} was not {state} within {within_s:g} s; {self.others[0].log_end()}")

    def ask(self, user: str, question: str, count: int = 1) -> dict[str, Any]:
        """Ask a question for a user through the ingress."""
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": DEMO.max_tokens, "n": count}
        return self.client.post(CHAT, {**body, "user": user})

    def teach(self, taste: Taste) -> int:
        """Pick the best of some answers to ten questions; returns how many picks there were."""
        questions, picks = DEMO.questions(7, False), 0
        while picks < PICKS:
            question = next(questions)
            answer = self.ask(taste.user, question, CANDIDATES)
            scores = [taste.score(question, choice["message"]["content"]) for choice in answer["choices"]]
            if max(scores) > min(scores):
                signal = {"completion_id": answer["id"], "signal": "chosen", "choice": scores.index(max(scores))}
                self.client.post("/v1/feedback", signal)
                picks += 1
        return picks

    def exam(self, taste: Taste) -> tuple[int, str]:
        """Return how many of some new questions' answers a user likes, and the last of them."""
        fresh, liked, text = DEMO.questions(11, True), 0, ""
        for question in (next(fresh) for _ in range(QUESTIONS)):
            text = self.ask(taste.user, question)["choices"][0]["message"]["content"]
            liked += taste.score(question, text) > 0.0
        return liked, text

    def remove(self) -> None:
        """Stop everything and delete the folder."""
        for process in (*reversed(self.others), *self.daemons.values()):
            process.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--ray", is_flag=True, help="Boxes join by Ray, which starts the ingress; needs edged[fleet].")
def main(ray: bool) -> None:
    """Start three daemons and an ingress in a temporary folder, have two users teach them, kill a box, and go on."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    if ray and importlib.util.find_spec("ray") is None:
        raise click.UsageError("Ray is not installed: pip install 'edged[fleet]'")
    started, demo = time.monotonic(), Demo()
    try:
        demo.join() if ray else demo.lead()
        show(demo)
        click.echo(f"done in {time.monotonic() - started:.0f} s")
    except DaemonError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        demo.remove()


def show(demo: Demo) -> None:
    """Run the demonstration. Raises DaemonError where a box or the ingress fails."""
    for name in NODES:
        demo.wait_for(name, "up", START_S)
    click.echo(f"three boxes answer at http://127.0.0.1:{demo.port}/v1")
    before = {taste.user: demo.exam(taste)[0] for taste in DEMO.tastes}
    for taste in DEMO.tastes:
        picks = demo.teach(taste)
        click.echo(f"{taste.user} likes {taste.likes}, and is taught at {demo.homes[taste.user]}: {picks} picks")
    time.sleep(PRACTICE_S)
    for taste in DEMO.tastes:
        liked, text = demo.exam(taste)
        was = before[taste.user]
        click.echo(f"  {taste.user}: of {QUESTIONS} answers liked {was} before, {liked} now, such as: {text}")
    lost, other = DEMO.tastes[0], DEMO.tastes[1]
    home = demo.homes[lost.user]
    demo.daemons[home].process.kill()
    demo.daemons[home].process.wait()
    click.echo(f"{home} is killed: it is out after {demo.wait_for(home, 'down'):.2f} s")
    for taste, how in ((lost, "by the base of another box"), (other, "as before")):
        liked, text = demo.exam(taste)
        click.echo(f"  {taste.user} is served on, {how}: {liked} of {QUESTIONS} liked, such as: {text}")
    pair = {"user": lost.user, "prompt": "Hello", "chosen": "Good day.", "rejected": "hey"}
    try:
        demo.client.post("/v1/feedback", pair)
    except Refused as refused:
        click.echo(f"  teaching {lost.user} waits: {refused}")
    demo.daemons[home].process = demo.daemons[home].start()
    click.echo(
        f"{home} is started again: it is in after {demo.wait_for(home, 'up'):.1f} s, with all that it was taught"
    )
    liked, text = demo.exam(lost)
    click.echo(f"  {lost.user}: {liked} of {QUESTIONS} liked, such as: {text}")
    demo.client.post("/v1/feedback", pair)


if __name__ == "__main__":
    main()
