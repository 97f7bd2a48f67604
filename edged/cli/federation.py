"""The commands `edged federated` that speak to a hub: kits, hub, agent, campaigns, joining and leaving."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import click

from edged.cli.options import explain_os_errors, shown, with_client
from edged.cli.output import echo, make_table, number
from edged.client.client import Client

_FOLDER = click.Path(path_type=Path)
kit_argument = click.argument("kit", type=_FOLDER)


@click.command()
@click.argument("file", type=_FOLDER)
@click.option("--out", "-o", required=True, type=_FOLDER, metavar="FOLDER", help="Where the kits go.")
@click.option("--add", default="", metavar="BOX", help="Make the kit of one more box, by the same authority.")
def provision(file: Path, out: Path, add: str) -> None:
    """Make the kits of the federation in FILE (TOML): a folder for the hub, each box, and who submits.

    Needs `pip install 'edged[federated]'`. The folder keeps the authority's key: keep it where no box is.
    """
    from edged.federated_nvflare.provision import provision as make
    from edged.federated_nvflare.provision import read_federation

    with explain_os_errors(f"{out} cannot be written"):
        new = make(read_federation(file), out, add)
    echo(f"{out}: {', '.join(new) or 'nothing new'}")
    echo("Carry each folder to its machine by a safe way: it holds a private key.")


@click.command()
@kit_argument
@click.option("--max-boxes", default=100, type=click.IntRange(1, 10_000), help="Boxes that may be connected.")
def hub(kit: Path, max_boxes: int) -> None:
    """Run the hub of KIT, in the foreground until SIGTERM. Open campaigns go on from their files."""
    from edged.federated_nvflare.kits import exec_hub

    with explain_os_errors(f"{kit} cannot be used"):
        exec_hub(kit, max_boxes)


@click.command()
@kit_argument
@click.option("--socket", "socket_path", metavar="PATH", help="The daemon's Unix socket [EDGED_SOCKET].")
@click.option("--url", metavar="URL", help="http://HOST:PORT instead [EDGED_URL].")
@click.option("--token", envvar="EDGED_TOKEN", metavar="TOKEN", help='A token of role "federated" [EDGED_TOKEN].')
def agent(kit: Path, socket_path: str | None, url: str | None, token: str | None) -> None:
    """Have this box take part by KIT, in the foreground until SIGTERM.

    The agent needs nothing of the box but its daemon: run it in an account of its own (docs/federated.md).
    """
    from edged.federated_nvflare.kits import exec_agent

    given = {"EDGED_SOCKET": socket_path, "EDGED_URL": url, "EDGED_TOKEN": token}
    with explain_os_errors(f"{kit} cannot be used"):
        exec_agent(kit, **{name: value for name, value in given.items() if value})


@click.command()
@kit_argument
@click.option("--yes", is_flag=True, help="Agree without being asked.")
@with_client
def join(client: Client, kit: Path, yes: bool) -> None:
    """Check the kit of this box, show what will leave it, and ask. Nothing is sent: the agent does that.

    Takes a token of role "federated" with --url.
    """
    import hashlib

    from edged.federated_nvflare.box_daemon import ROUNDS
    from edged.federated_nvflare.kits import check_box_kit, join
    from edged.store.timestamps import utc_now, utc_text

    startup = check_box_kit(kit)
    text = what_leaves(startup, client.get(ROUNDS)["terms"])
    echo(text)
    if not yes:
        click.confirm("Join?", abort=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    with explain_os_errors(f"{kit} cannot be written"):
        join(kit, {"at": utc_text(utc_now()), "text_sha256": digest})
    echo(f"joined: `edged federated agent {kit}` takes part, `edged federated leave {kit}` ends that")


@click.command()
@kit_argument
def leave(kit: Path) -> None:
    """End this box's part in the federation of KIT, and its agent. What is in a sum stays there."""
    from edged.federated_nvflare.kits import leave

    with explain_os_errors(f"{kit} cannot be written"):
        if pid := leave(kit):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    echo("this box has left: its agent does not start again" + (", and the running one is ended" if pid else ""))


@click.command()
@click.argument("file", type=_FOLDER)
@click.option("--kit", required=True, type=_FOLDER, help="The submitter's kit.")
@click.option("--start", "starts", multiple=True, metavar="NAME=FOLDER", help="A start that it names; repeated.")
def submit(file: Path, kit: Path, starts: tuple[str, ...]) -> None:
    """Submit the campaign in FILE to the hub."""
    from edged.federated.campaign_file import read_campaign
    from edged.federated_nvflare.submission import submit

    campaign = read_campaign(file)
    given = (each.partition("=") for each in starts)
    submit(kit, campaign, {name: Path(folder) for name, _, folder in given})
    echo(f'"{campaign.name}" is submitted: a round begins when {campaign.campaign(0.0).asked} boxes say that they can')


@click.command()
@click.option("--kit", required=True, type=_FOLDER, help="The submitter's kit.")
@shown
def jobs(kit: Path) -> Any:
    """List the campaigns at the hub, how far they are, and how many boxes have their start."""
    from edged.federated_nvflare.submission import campaigns

    data = campaigns(kit)
    rows = [
        (each["name"], each["state"], f"{each['rounds_complete']} of {each['rounds']}", number(each["records"]),
         number(each["boxes_with_start"])) for each in data
    ]  # fmt: skip
    none = "no campaigns: `edged federated submit FILE` brings one"
    titles = ("campaign", "state", "rounds", "records", "boxes with its start")
    return data, make_table(*titles, rows=rows) if data else none


@click.command()
@click.argument("name")
@click.option("--kit", required=True, type=_FOLDER, help="The submitter's kit.")
def cancel(name: str, kit: Path) -> None:
    """End the campaign NAME; boxes drop the round under way."""
    from edged.federated_nvflare.submission import cancel

    cancel(kit, name)
    echo(f'"{name}" is cancelled')


def what_leaves(startup: dict[str, Any], terms: dict[str, Any]) -> str:
    """Return what the operator of a box agrees to: the kit's hub, and the daemon's own floors."""
    server, name = startup["servers"][0]["service"]["target"], startup["client"]["fqsn"]
    noise = (
        f"Noise of {terms['noise']:g} times the clip is in each sum of {terms['min_participants']} or more. Under some "
        "100 people that drowns all; from some 300 on a start is worth it."
        if terms["noise"]
        else "NO noise is added: nothing guarantees that nobody learns about a person from a record. Join only people "
        "whom your users trust."
    )
    lines = (
        f'This box, "{name}", would send to the hub at {server}:',
        f'- its name "{name}", its address, and a sign of life every ten seconds (NVFlare\'s)',
        "- whether it may take part now: the fingerprint of its base model and LoRA's form; its memory, speed and "
        "number of people, as powers of two",
        f"- for each round a record: how one half of an adapter moved, clipped to {terms['clip']:g}; the number of "
        "pairs, and on how many held-out ones it was right where there is no noise; of several starts the name of that "
        "which fits its pairs",
        noise,
        (
            "A record is encrypted, and the hub adds up what it cannot read. A hub in league with one box can read it."
            if terms["aggregation"] == "sum"
            else "Campaigns may ask for records that are not encrypted (single): whoever runs the hub sees each one."
        ),
        "No text, name, pair or own adapter leaves. `edged federated ledger` shows each record that did.",
        "It would take from the hub: starts, which are checked as an import is, then by the guard.",
        "NVFlare's processes talk to each other unencrypted on this box (loopback).",
        "A start is worth it from some ten people of one taste on: docs/federated.md has the table.",
    )
    return "\n".join(lines)


COMMANDS = (provision, hub, agent, join, leave, submit, jobs, cancel)
