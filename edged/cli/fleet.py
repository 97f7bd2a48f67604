"""The commands `edged fleet` (serve, status): several boxes behind one address."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from edged.cli.options import config_option, with_client
from edged.cli.output import make_table, number, percent, show
from edged.cli.settings import load_settings
from edged.cli.status import watched
from edged.client.client import Client


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
