"""`edged quarantine`: pairs that look poisoned; list, release, drop."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from edged.cli.options import shown, with_client
from edged.cli.output import make_table, moment, number, short
from edged.client.client import Client, DaemonError

_pairs_argument = click.argument("pairs", nargs=-1, type=click.IntRange(1))
_all_of_user_option = click.option("--user", "-u", default="", metavar="NAME", help="All pairs of this user.")


@click.group()
def quarantine() -> None:
    """Pairs that look poisoned: nothing is learned from them until somebody decides."""


@quarantine.command("list")
@click.option("--user", "-u", default="", metavar="NAME", help="Only this user's pairs.")
@shown
@with_client
def list_(client: Client, user: str) -> Any:
    """The pairs that wait for a decision, newest first."""
    data = client.get(f"/v1/quarantine?user={quote(user, safe='')}" if user else "/v1/quarantine")
    if not data["pairs"]:
        return data, "no pair is in quarantine"
    titles = ("pair", "user", "since (UTC)", "source", "loss", "better", "worse", "why")
    older = data["count"] - len(data["pairs"])
    more = f"... and {older} older ones" if older > 0 else None
    return data, lambda: [make_table(*titles, rows=map(_row, data["pairs"])), more]


@quarantine.command()
@_pairs_argument
@_all_of_user_option
@shown
@with_client
def release(client: Client, pairs: tuple[int, ...], user: str) -> Any:
    """Learn from PAIRS after all, or from all of --user.

    Released pairs are trusted: they are not judged again.
    """
    return _decide(client, pairs, user, "release")


@quarantine.command()
@_pairs_argument
@_all_of_user_option
@shown
@with_client
def drop(client: Client, pairs: tuple[int, ...], user: str) -> Any:
    """Never learn from PAIRS, or from all of --user."""
    return _decide(client, pairs, user, "drop")


def _decide(client: Client, pairs: tuple[int, ...], user: str, action: str) -> tuple[dict[str, Any], str]:
    if bool(pairs) == bool(user):
        raise DaemonError("give either the numbers of pairs (see edged quarantine list) or --user NAME")
    decided = [client.post(f"/v1/quarantine/{pair}", {"action": action}) for pair in pairs]
    if user:
        answer = client.post("/v1/quarantine", {"user": user, "action": action})
        same = {"adapter": user, "decision": answer["decision"], "left": answer["left"]}
        decided = [{"pair_id": pair, **same} for pair in answer["pair_ids"]]
    return {"decided": decided}, f"{len(decided)} pairs {'released' if action == 'release' else 'dropped'}"


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
