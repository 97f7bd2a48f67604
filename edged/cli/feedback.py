"""`edged feedback`: import and export of preference pairs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from edged.cli.client import Client, DaemonError, Refused
from edged.cli.options import json_option, with_client
from edged.cli.output import print_json

if TYPE_CHECKING:
    from edged.align.formats import Format

MOST_SHOWN = 20
"""Bad lines that are listed one by one; --json lists all."""
BUSY_WAIT_S = 0.5


@dataclass
class Imported:
    """What became of a file's lines: `bad` has (line number, what is wrong)."""

    pairs: int = 0
    waiting_already: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)


@click.group()
def feedback() -> None:
    """Import and export preference pairs."""


@feedback.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--user", "-u", required=True, metavar="NAME", help="Whose adapter learns from the pairs.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["hh", "trl", "edged"]),
    default="edged",
    show_default=True,
    help="hh: HH-RLHF dialogues; trl: TRL preference rows; edged: what `edged feedback export` writes.",
)
@click.option("--skip", type=click.IntRange(0), default=0, metavar="N", help="Leave out the first N pairs.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Stop after N pairs.")
@json_option
@with_client
def import_(
    client: Client, file: Path, user: str, format_: Format, skip: int, limit: int | None, as_json: bool
) -> None:
    """Learn from the preference pairs of FILE.

    FILE holds JSON lines, possibly gzipped; the pairs are sent in its order. Lines that hold no pair are reported by
    number and left out; the others are kept. Exit code 1 says that there were such lines.
    """
    from edged.align.formats import count_lines, read_pairs

    try:
        total = count_lines(file)
        rows = islice(read_pairs(file, format_), skip, None if limit is None else skip + limit)
        expected = max(0, total - skip) if limit is None else max(0, min(limit, total - skip))
        with _progress(expected, quiet=as_json) as advance:
            result = send(client, user, rows, advance)
    except OSError as error:
        raise DaemonError(f"{file} cannot be read: {error.strerror or error}") from None
    if as_json:
        bad = [{"line": number, "error": error} for number, error in result.bad]
        print_json({"user": user, "pairs": result.pairs, "waiting_already": result.waiting_already, "bad_lines": bad})
    else:
        _report(result, user)
    if result.bad:
        sys.exit(1)


def send(
    client: Client, user: str, rows: Iterator[tuple[int, dict[str, Any] | str]], advance: Callable[[], None]
) -> Imported:
    """Post every pair; one that the daemon refuses as input counts as a bad line. Raises DaemonError otherwise."""
    result = Imported()
    for number, pair in rows:
        if isinstance(pair, str):
            result.bad.append((number, pair))
        else:
            try:
                answer = _post(client, {**pair, "user": user})
                if answer.get("duplicate"):
                    result.waiting_already += 1
                else:
                    result.pairs += 1
            except Refused as error:
                if not 400 <= error.status < 500 or error.status in (401, 403):
                    raise
                result.bad.append((number, str(error)))
        advance()
    return result


@feedback.command()
@click.option("--user", "-u", default="", metavar="NAME", help="Only this user's pairs.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="File to write instead of stdout.")
@with_client
def export(client: Client, user: str, output: Path | None) -> None:
    """Write the collected pairs as JSON lines."""
    rows = client.json_lines(f"/v1/feedback?user={quote(user, safe='')}" if user else "/v1/feedback")
    if output is None:
        for row in rows:
            click.echo(json.dumps(row, ensure_ascii=False))
        return
    count = 0
    try:
        with output.open("w") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
    except OSError as error:
        raise DaemonError(f"{output} cannot be written: {error.strerror}") from None
    click.echo(f"{count} pairs are in {output}")


def _post(client: Client, pair: dict[str, Any]) -> dict[str, Any]:
    """Send one pair, waiting while the daemon is too busy to take it."""
    while True:
        try:
            return client.post("/v1/feedback", pair)
        except Refused as error:
            if error.status != 429:
                raise
            time.sleep(BUSY_WAIT_S)


@contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal's stderr; nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("importing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("import", total=total)
        yield lambda: progress.advance(task)


def _report(result: Imported, user: str) -> None:
    for number, error in result.bad[:MOST_SHOWN]:
        click.echo(f"line {number}: {error}", err=True)
    if len(result.bad) > MOST_SHOWN:
        click.echo(f"... and {len(result.bad) - MOST_SHOWN} more bad lines (--json lists all)", err=True)
    parts = [f"{result.pairs} pairs imported for {user}"]
    if result.waiting_already:
        parts.append(f"{result.waiting_already} wait for training already")
    if result.bad:
        parts.append(f"{len(result.bad)} bad lines left out")
    click.echo(", ".join(parts))
