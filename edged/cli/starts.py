"""The commands `edged starts`: the adapters that users may begin with."""

from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from edged.cli.adapters import checked_folder, packed
from edged.cli.options import asks_daemon
from edged.cli.output import make_table, moment, number
from edged.client.client import Client


@click.group()
def starts() -> None:
    """Adapters of people alike, with which new users may begin."""


@starts.command()
@click.argument("name")
@click.argument("folder", type=click.Path(path_type=Path))
@asks_daemon
def add(client: Client, name: str, folder: Path) -> Any:
    """Take the PEFT LoRA in FOLDER as the start NAME.

    It must be of the served model and of the settings' rank, alpha and target_modules.
    """
    data = client.call("PUT", _path(name), packed(checked_folder(folder)), "application/x-tar")
    return data, f'start "{name}" is kept: it is measured on neutral text, then scored on users\' pairs'


@starts.command("list")
@asks_daemon
def list_(client: Client) -> Any:
    """The starts, and with which factor of B each is used."""
    data = client.get("/v1/starts")
    rows = (
        (item["name"] + ", of all new users" * item["default"], moment(item["added_at"]), _scale(item["scale"]))
        for item in data["starts"]
    )
    shelved = ", ".join(data["shelved"])
    none = "no starts: `edged starts add NAME FOLDER` takes one"
    texts = [make_table("start", "added (UTC)", "scale", rows=rows) if data["starts"] else none]
    return data, [*texts, *([f"of another base model or form, and not used: {shelved}"] if shelved else [])]


@starts.command()
@click.argument("name")
@asks_daemon
def remove(client: Client, name: str) -> Any:
    """Remove the start NAME; users who began with it keep what they have."""
    return client.call("DELETE", _path(name)), f'start "{name}" is removed'


@starts.command()
@click.argument("user")
@asks_daemon
def scores(client: Client, user: str) -> Any:
    """What the pairs of USER say of each start, and which one was taken."""
    data = client.get(f"/v1/adapters/{quote(user, safe='')}/starts")
    rows = (
        (score["start"], f"{score['right']:g} of {score['pairs']}", number(score["loss"], 3), _scale(score["scale"]),
         score["note"]) for score in data["scores"]
    )  # fmt: skip
    begun = f"{user} began with the start {data['start']}" if data["start"] else f"{user} began with no start"
    if not data["scores"]:
        return (
            data,
            f"{begun}; no start was scored since the daemon started: that takes 4 pairs, and comes with a new one",
        )
    caption = (
        f"right: pairs of {data['pairs']} that it predicts; {user}'s own adapter was right on {data['own_right']:g}"
    )
    return data, [begun, make_table("start", "right", "loss", "scale", "", rows=rows, caption=caption)]


def _scale(scale: float | None) -> str:
    return "being measured" if scale is None else f"{scale:g}" if scale else "breaks the language"


def _path(name: str) -> str:
    return f"/v1/starts/{quote(name, safe='')}"
