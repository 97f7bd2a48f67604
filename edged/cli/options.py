"""Options that several commands share: the daemon's address, JSON output, the settings file, user, seed, policy."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from edged.cli.output import echo, print_json, print_text
from edged.client.client import Client, DaemonError, find_address

_LOADING_S = 600.0
"""Seconds that a command waits for a daemon that loads its model."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
config_option = click.option(
    "--config", "-c", envvar="EDGED_CONFIG", type=click.Path(path_type=Path), help="TOML file [EDGED_CONFIG]."
)
user_option = click.option("--user", "-u", metavar="NAME", help="Whose adapter answers; none: the base model.")
seed_option = click.option("--seed", type=click.IntRange(0), default=0)
policy_option = click.option(
    "--policy",
    metavar="NAME",
    help="Scheduling policy: mace, mace-paper, andes or flexllm; a baseline: fcfs, ekya, adainf, periodic-async, sync, "
    "temporal, temporal-dynamic or spatial; the paper's own: mace-letter; or one without a part: mace-bin, "
    "mace-prefix, mace-prune, mace-priority, andes-plain, flexllm-static, flexllm-whole or flexllm-behind. "
    "Default: as configured.",
)


@contextmanager
def explain_os_errors(what: str = "") -> Iterator[None]:
    """Turn an OSError into a DaemonError; `what` says what could not be done, such as "FILE cannot be written"."""
    try:
        yield
    except OSError as error:
        raise DaemonError(f"{what}: {error.strerror or error}" if what else str(error)) from None


def _say_waiting(message: str) -> None:
    echo(f"edged: {message}; waiting", err=True)


def with_client(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--socket`, `--url` and `--token`, and pass a connected client as the first argument."""

    @click.option("--socket", "socket_path", metavar="PATH", help="The daemon's Unix socket [EDGED_SOCKET].")
    @click.option("--url", metavar="URL", help="http://HOST:PORT instead [EDGED_URL].")
    @click.option("--token", envvar="EDGED_TOKEN", metavar="TOKEN", help="Token for --url [EDGED_TOKEN].")
    @functools.wraps(function)
    def command(*args: Any, socket_path: str | None, url: str | None, token: str | None, **kwargs: Any) -> Any:
        address = find_address(socket_path or "", url or "", token or "")
        with Client(address, patience_s=_LOADING_S, on_wait=_say_waiting) as client:
            return function(client, *args, **kwargs)

    return command


def asks_daemon(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply `with_client` and `shown`: the function gets a client, and its result is printed."""
    return shown(with_client(function))


def shown(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--json`, and print what the function returns: its data as JSON, else its text.

    The function returns (data, text) or (data, text, exit code). A text is a string, something that rich prints, a list
    of these, or a function that returns one, which is not called for --json.
    """

    @json_option
    @functools.wraps(function)
    def command(*args: Any, as_json: bool, **kwargs: Any) -> None:
        data, text, *code = function(*args, **kwargs)
        if as_json:
            print_json(data)
        else:
            print_text(text() if callable(text) else text)
        if any(code):
            sys.exit(code[0])

    return command
