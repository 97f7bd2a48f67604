"""`edged quarantine`: pairs that look poisoned; list, release, drop."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from edged.cli.options import json_option, with_client
from edged.cli.output import make_console, moment, number, print_json, short
from edged.client.client import Client, DaemonError


@click.group()
def quarantine() -> None:
    """Pairs that look poisoned: nothing is learned from them until somebody decides."""


@quarantine.command("list")
@click.option("--user", "-u", default="", metavar="NAME", help="Only this user's pairs.")
@json_option
@with_client
def list_(client: Client, user: str, as_json: bool) -> None:
    """The pairs that wait for a decision, newest first."""
    data = _fetch(client, user)
    if as_json:
        return print_json(data)
    if not data["pairs"]:
        return click.echo("no pair is in quarantine")
    from rich.table import Table

    table = Table("pair", "user", "since (UTC)", "source", "loss", "better", "worse", "why")
    for item in data["pairs"]:
        table.add_row(*_row(item))
    make_console().print(table)
    if data["count"] > len(data["pairs"]):
        click.echo(f"... and {data['count'] - len(data['pairs'])} older ones")
    return None


@quarantine.command()
@click.argument("pairs", nargs=-1, type=click.IntRange(1))
@click.option("--user", "-u", default="", metavar="NAME", help="All pairs of this user.")
@json_option
@with_client
def release(client: Client, pairs: tuple[int, ...], user: str, as_json: bool) -> None:
    """Learn from PAIRS after all, or from all of --user.

    Released pairs are trusted: they are not judged again.
    """
    _decide(client, pairs, user, "release", as_json)


@quarantine.command()
@click.argument("pairs", nargs=-1, type=click.IntRange(1))
@click.option("--user", "-u", default="", metavar="NAME", help="All pairs of this user.")
@json_option
@with_client
def drop(client: Client, pairs: tuple[int, ...], user: str, as_json: bool) -> None:
    """Never learn from PAIRS, or from all of --user."""
    _decide(client, pairs, user, "drop", as_json)


def _decide(client: Client, pairs: tuple[int, ...], user: str, action: str, as_json: bool) -> None:
    if bool(pairs) == bool(user):
        raise DaemonError("give either the numbers of pairs (see edged quarantine list) or --user NAME")
    decided = [client.post(f"/v1/quarantine/{pair}", {"action": action}) for pair in pairs]
    if user:
        answer = client.post("/v1/quarantine", {"user": user, "action": action})
        same = {"adapter": user, "decision": answer["decision"], "left": answer["left"]}
        decided = [{"pair_id": pair, **same} for pair in answer["pair_ids"]]
    if as_json:
        return print_json({"decided": decided})
    return click.echo(f"{len(decided)} pairs {'released' if action == 'release' else 'dropped'}")


def _fetch(client: Client, user: str) -> dict[str, Any]:
    return client.get(f"/v1/quarantine?user={quote(user, safe='')}" if user else "/v1/quarantine")


def _row(item: dict[str, Any]) -> list[str]:
    return [
        str(item["pair_id"]),
        item["adapter"],
        moment(item["quarantined_at"]),
        item["source"],
        number(item["loss"], 2),
        short(item["chosen"]),
        short(item["rejected"]),
        item["reason"],
    ]
