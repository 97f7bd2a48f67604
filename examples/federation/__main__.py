"""`tools/federation-demo`: three boxes teach two starts over a hub, one is killed in a round, and a new user gains."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import click

from edged.client.client import DaemonError
from edged.federated_nvflare.kits import KitError
from examples.demo_model.dialogues import formality, prompts, style_pairs
from examples.federation.federation import Box, Federation

NAMES = ("box-a", "box-b", "box-c")
TASTES = {"formal": True, "casual": False}
PAIRS, OWN = 24, 8
"""Pairs of a person who takes part, and those of a new user."""
QUESTIONS = 12
READY_S = 120.0
SETTINGS = f"""
[federated]
enabled = true
when = "always"
min_pairs = {PAIRS // 2}
min_participants = 2
min_interval_h = 0
[align]
practice = false
learning_rate = 3e-4
[cache]
memory_mb = 64
"""


class Demo:
    """The federation, and who is taught what."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="edged-federation-"))
        self.boxes = {name: Box(self.folder / name, name, SETTINGS) for name in NAMES}
        self.federation = Federation(self.folder, self.boxes)

    def teach(self) -> None:
        """Have two people of each box give pairs, and wait until these are learned."""
        for number, (name, box) in enumerate(self.boxes.items()):
            for taste, is_formal in TASTES.items():
                box.teach(f"{taste}-{name}", islice(style_pairs(number, is_formal), PAIRS))
        for box in self.boxes.values():
            self.federation.wait_for(lambda box=box: not box.pairs_waiting(), "learning")  # type: ignore[misc]

    def exam(self, box: Box, user: str) -> int:
        """Return how many of a user's new questions are answered casually."""
        fresh = prompts(11, True, True)
        answers = []
        for question in islice(fresh, QUESTIONS):
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": 64, "temperature": 0.0}
            answers.append(box.ask("POST", "/v1/chat/completions", {**body, "user": user}))
        return sum(formality(answer["choices"][0]["message"]["content"]) < 0 for answer in answers)

    def begin(self, box: Box, user: str) -> int:
        """Have a new user of the casual taste give a few pairs; returns how many answers are casual then."""
        box.teach(user, islice(style_pairs(99, False), OWN))
        self.federation.wait_for(lambda: not box.pairs_waiting(), "learning")
        return self.exam(box, user)

    def remove(self) -> None:
        """Stop everything and delete the folder."""
        self.federation.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def show(demo: Demo) -> None:
    """Run the demonstration. Raises DaemonError, KitError where a part fails."""
    federation, boxes = demo.federation, demo.boxes
    for box in boxes.values():
        box.daemon.wait_until_ready()
    click.echo("Three boxes serve the demo model. A hub waits for them. Each joins, after its operator was shown:\n")
    click.echo("  " + federation.join().strip().replace("\n", "\n  ") + "\n")
    demo.teach()
    click.echo(f"On each box one person likes formal answers, one casual ones: {PAIRS} pairs each, which stay there.")
    before = demo.begin(boxes["box-c"], "olga")
    click.echo(f"olga is new, and likes casual answers: after {OWN} pairs {before} of {QUESTIONS} are.")
    for taste in TASTES:
        federation.submit(name=taste, demand=3, min_response=0.6, overcommit=1.0, deadline_s=40)
    click.echo("Two campaigns are submitted. Nobody has agreed, so no box says that it can: no round begins.")
    for number, taste in enumerate(TASTES, 1):
        for name, box in boxes.items():
            box.agree(f"{taste}-{name}")
        click.echo(f"Those who like {taste} answers agree.")
        began = time.monotonic()
        if number == 1:
            _lose_a_box(federation, boxes["box-b"], began)
        federation.wait_for(lambda number=number: _complete(federation) >= number, "a round's end")  # type: ignore[misc]
        click.echo(f"  The round is complete after {time.monotonic() - began:.0f} s: a start is made of the records.")
    waited = federation.wait_for(lambda: _given(federation) >= len(NAMES) * len(TASTES), "handing out")
    click.echo(f"All boxes were given both starts {waited:.0f} s later. What left box-a, by its ledger:")
    for line in boxes["box-a"].ask("GET", "/v1/federated/ledger")["ledger"]:
        click.echo(f"  a record of {line['bytes']} bytes for {line['campaign']}, SHA-256 {line['sha256'][:16]}…")
    demo.begin(boxes["box-a"], "nora")
    scores = "/v1/adapters/nora/starts"
    federation.wait_for(lambda: boxes["box-a"].ask("GET", scores)["start"], "the choice of a start")
    federation.wait_for(lambda: not boxes["box-a"].pairs_waiting(), "learning")
    start, after = boxes["box-a"].ask("GET", scores)["start"], demo.exam(boxes["box-a"], "nora")
    click.echo(f"nora is new on box-a, with olga's {OWN} pairs: her box chose the start {start!r} by them.")
    click.echo(f"  {after} of {QUESTIONS} answers are casual; without a start they were {before}.")


def _lose_a_box(federation: Federation, box: Box, began_s: float) -> None:
    """Kill a box's agent in a round, and start it again."""
    agent = box.agent
    assert agent is not None
    federation.wait_for(agent.jobs, "a round")
    agent.kill()
    click.echo(f"  A round began after {time.monotonic() - began_s:.0f} s. {box.name}'s agent is killed in it.")
    federation.wait_for(lambda: _complete(federation) >= 1, "a round's end")
    agent.process = agent.start()
    click.echo(f"  {box.name}'s agent is started again.")


def _complete(federation: Federation) -> int:
    return sum(each["rounds_complete"] for each in federation.campaigns().values())


def _given(federation: Federation) -> int:
    return sum(each["boxes_with_start"] for each in federation.campaigns().values())


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Start a hub and three boxes in a temporary folder, and have them teach two starts together."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    if importlib.util.find_spec("nvflare") is None:
        raise click.UsageError("NVFlare is not installed: pip install 'edged[federated]'")
    started, demo = time.monotonic(), Demo()
    try:
        show(demo)
        click.echo(f"done in {time.monotonic() - started:.0f} s")
    except (DaemonError, KitError) as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        demo.remove()


if __name__ == "__main__":
    main()
