"""The commands `edged applications` (list, show, forget)."""

from typing import Any
from urllib.parse import quote

import click

from edged.cli.options import asks_daemon
from edged.cli.output import make_table, number
from edged.client.client import Client


@click.group()
def applications() -> None:
    """Runs of applications: calls that belong together, their cost and time."""


@applications.command("list")
@asks_daemon
def list_(client: Client) -> Any:
    """Types of applications by user, with medians over their latest runs."""
    data = client.get("/v1/applications")
    keys = ("runs", "open", "calls_p50", "cost_p50", "predicted_p50", "seconds_p50", "late_s_max")
    titles = ("application", "user", "runs", "open", "calls", "cost", "predicted", "s", "latest by (s)")
    rows = ((item["application"], item["user"], *(number(item[key]) for key in keys)) for item in data["applications"])
    return data, lambda: make_table(*titles, rows=rows) if data["applications"] else "no run of an application ended"


@applications.command()
@click.argument("application")
@asks_daemon
def show(client: Client, application: str) -> Any:
    """The latest runs of a type."""
    data = client.get(_path(application))
    keys = ("calls", "prompt_tokens", "answer_tokens", "cost", "predicted", "seconds", "late_s")
    titles = ("run", "user", "calls", "prompt", "answer", "cost", "predicted", "s", "late by (s)")
    rows = ((item["run"], item["user"], *(number(item[key]) for key in keys)) for item in data["runs"])
    return data, lambda: make_table(*titles, rows=rows)


@applications.command()
@click.argument("application")
@asks_daemon
def forget(client: Client, application: str) -> Any:
    """Forget a type's ended runs, and what was learned of its demand."""
    data = client.call("DELETE", _path(application))
    return data, lambda: f"{data['runs']} runs of {application} are forgotten"


def _path(application: str) -> str:
    return f"/v1/applications/{quote(application, safe='')}"
