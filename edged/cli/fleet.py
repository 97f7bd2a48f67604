"""The commands `edged fleet`: several boxes behind one address, and their members by Ray."""

import functools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from edged.cli.options import asks_daemon, config_option, with_client
from edged.cli.output import echo, make_table, number, percent, show
from edged.cli.settings import load_settings
from edged.cli.status import watched
from edged.client.client import Client, DaemonError


@click.group()
def fleet() -> None:
    """Several boxes as one service: requests are placed, each user is taught at one of them."""


@fleet.command()
@config_option
@click.option("--node", "nodes", multiple=True, metavar="NAME=URL", help="A box; once for each.")
@click.option("--listen", metavar="HOST:PORT", help="Address of the ingress [fleet.listen].")
@click.option("--token-file", metavar="FILE", help="The nodes' token, mode 0600; needed beyond loopback.")
@click.option("--policy", metavar="NAME", help="How requests without a user are placed [fleet.policy].")
def serve(config: Path | None, nodes: tuple[str, ...], **flags: str | None) -> None:
    """Answer for several daemons at one address, in the foreground until SIGTERM or Ctrl-C.

    SIGHUP reads the settings again: nodes, policy, homes and [access] change without a restart.
    """
    from edged.fleet.serve import run_ingress
    from edged.http.access import AccessError
    from edged.http.sockets import ListenError
    from edged.settings.load import ConfigError

    named = [node.partition("=")[::2] for node in nodes]
    try:
        if twice := next((name for name, _ in named if [each for each, _ in named].count(name) > 1), None):
            raise ConfigError(f'two nodes are named "{twice}": give each a name of its own')
        given = {"nodes": dict(named) or None, **flags}
        load = partial(load_settings, config, overrides={f"fleet.{key}": value for key, value in given.items()})
        run_ingress(load(), load)
    except (AccessError, ConfigError, ListenError) as error:
        raise click.UsageError(str(error)) from None


@fleet.command()
@watched
@with_client
def status(client: Client, **how: Any) -> None:
    """The nodes of a fleet, as its ingress sees them; give its address as --url."""
    show(lambda: client.get("/v1/fleet"), _table, _line, **how)


def _about_this_box(function: Callable[..., None]) -> Callable[..., None]:
    """Add what tells of this box; the function gets its settings. What cannot be is refused: 2, what fails: 1."""

    @config_option
    @click.option("--name", metavar="NAME", help="This box's name [api.node].")
    @click.option("--url", metavar="URL", help="Its daemon, as the ingresses reach it [fleet.url].")
    @functools.wraps(function)
    def command(config: Path | None, name: str | None, url: str | None, **how: Any) -> None:
        from edged.fleet.ray.cluster import ClusterError
        from edged.settings.load import ConfigError

        given = {"EDGED_CONFIG": config and str(config.absolute()), "EDGED_API__NODE": name, "EDGED_FLEET__URL": url}
        # In the environment, which Ray hands on to replicas: they read the same settings.
        os.environ.update({variable: value for variable, value in given.items() if value})
        try:
            function(load_settings(config), **how)
        except ConfigError as error:
            raise click.UsageError(str(error)) from None
        except ClusterError as error:
            raise DaemonError(str(error)) from None

    return command


ingress_option = click.option("--ingress", is_flag=True, help="An ingress may run on this box.")


@fleet.command()
@click.option("--port", default=6379, type=click.IntRange(1, 65535), help="Where the others reach the head.")
@ingress_option
@_about_this_box
def init(settings: Any, port: int, ingress: bool) -> None:
    """Make this box the head of a cluster that keeps the fleet's members, in the foreground until SIGTERM.

    Needs `pip install 'edged[fleet]'`. The cluster's token is made where there is none; copy it to each box that joins.
    """
    from edged.fleet.ray.cluster import run

    run(settings, "", port, ingress, os.environ)


@fleet.command()
@click.argument("head", metavar="HEAD")
@ingress_option
@_about_this_box
def join(settings: Any, head: str, ingress: bool) -> None:
    """Have this box in the cluster of HEAD (HOST or HOST:PORT), in the foreground until SIGTERM.

    Its daemon registers at the ingresses. The box stays a member when this ends, until it leaves.
    """
    from edged.fleet.ray.cluster import PORT, run

    run(settings, head if ":" in head else f"{head}:{PORT}", PORT, ingress, os.environ)


@fleet.command()
@_about_this_box
def leave(settings: Any) -> None:
    """Take this box out of its cluster and its fleet; its own daemon goes on.

    What its users were taught stays on it.
    """
    from edged.fleet.ray.cluster import leave

    leave(settings)
    echo(f"{settings.api.node} has left the fleet")


@fleet.command()
@asks_daemon
def drain(client: Client) -> tuple[Any, str]:
    """Have the ingresses send this box's daemon no new requests; what runs there goes on."""
    return client.post("/v1/drain", {}), "the fleet sends nothing new here: edged fleet undrain ends that"


@fleet.command()
@asks_daemon
def undrain(client: Client) -> tuple[Any, str]:
    """End a drain."""
    return client.post("/v1/undrain", {}), "the fleet sends requests here again"


@fleet.command()
@click.argument("user")
@click.argument("node")
@with_client
def move(client: Client, user: str, node: str) -> None:
    """Have USER taught at NODE from now on: a step under way ends first. Give the ingress' address as --url."""
    moved = client.post("/v1/fleet/move", {"user": user, "node": node})
    echo(f"{moved['user']} is taught at {moved['node']}, and was at {moved['from']}")


def _table(data: dict[str, Any]) -> Any:
    titles = ("node", "state", "for (s)", "open", "placed", "first token (s)", "error", "model", "problem")
    rows = [
        (
            *(item["name"], item["state"], number(item["since_s"], 0), number(item["requests"])),
            *(number(data["placed"][item["name"]]), number(item["forecast_s"], 3), percent(item["forecast_error"])),
            *(item["model"] or "–", item["problem"]),
        )
        for item in data["nodes"]
    ]
    return make_table(*titles, rows=rows)


def _line(data: dict[str, Any]) -> str:
    return ", ".join(f"{item['name']} {item['state']}, {item['requests']} open" for item in data["nodes"])
