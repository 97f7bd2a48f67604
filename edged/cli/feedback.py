"""`edged feedback`: import and export of preference pairs."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import click

from edged.cli.options import json_option, with_client
from edged.cli.output import print_json, progress_bar, show_progress
from edged.client.client import Client, DaemonError, Refused

if TYPE_CHECKING:
    from edged.align.feedback.pair_formats import Format

MOST_SHOWN = 20
"""Bad lines that are listed one by one; --json lists all."""
BUSY_WAIT_S = 0.5
ASK_S = 0.2
"""Between two questions how far learning is."""
OUTCOMES = {
    "trained": "learned",
    "learnt": "known already",
    "held_out": "kept as a test",
    "quarantined": "held (edged quarantine list)",
    "skipped": "not learned",
}


@dataclass
class ImportedLines:
    """What became of a file's lines: `bad` has (line number, what is wrong).

    `done` lines with something on them were dealt with; `stopped` says what ended it before the file's end, at `line`.
    `feedback_ids` are those of `pairs`, in their order.
    """

    pairs: int = 0
    waiting_already: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)
    done: int = 0
    line: int = 0
    stopped: str = ""
    feedback_ids: list[str] = field(default_factory=list)


@click.group()
def feedback() -> None:
    """Import and export preference pairs."""


@feedback.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--user", "-u", default="", metavar="NAME", help="Whose adapter learns from the pairs; none: each line's own user."
)
@click.option(
    "--format", "format_", type=click.Choice(["hh", "trl", "edged"]), default="edged", show_default=True,
    help="hh: HH-RLHF dialogues; trl: TRL preference rows; edged: what `edged export` writes.",
)  # fmt: skip
@click.option("--skip", type=click.IntRange(0), default=0, metavar="N", help="Leave out the first N pairs.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Stop after N pairs.")
@click.option("--no-wait", is_flag=True, help="Leave when the pairs are sent; they are learned all the same.")
@json_option
@with_client
def import_(
    client: Client, file: Path, user: str, format_: Format, skip: int, limit: int | None, no_wait: bool, as_json: bool
) -> None:
    """Learn from the preference pairs of FILE, and wait until each has its outcome.

    FILE holds JSON lines, possibly gzipped; the pairs are sent in its order. Lines that hold no pair are reported by
    number and left out; the others are kept. Exit code 1 says that there were such lines, or that it had to stop early.
    Ctrl-C while the pairs are learned ends the command alone.
    """
    from edged.align.feedback.pair_formats import count_lines, read_pairs

    if not user and format_ != "edged":
        raise DaemonError(f"lines of format {format_} name no user: give --user NAME")
    try:
        total = count_lines(file)
        rows = islice(read_pairs(file, format_), skip, None if limit is None else skip + limit)
        expected = max(0, total - skip) if limit is None else max(0, min(limit, total - skip))
        with progress_bar("importing", quiet=as_json) as show:
            result = send(client, user, rows, lambda done: show(done, expected, f"importing: {done} of {expected}"))
    except OSError as error:
        raise DaemonError(f"{file} cannot be read: {error.strerror or error}") from None
    waits = result.pairs and not (no_wait or result.stopped)
    if not as_json:
        _report(result, user)
    states, why = follow(client, result.feedback_ids, user) if waits else (None, None)
    if as_json:
        bad = [{"line": number, "error": error} for number, error in result.bad]
        data: dict[str, Any] = {"user": user or None, "pairs": result.pairs, "waiting_already": result.waiting_already}
        stopped = {"error": result.stopped, "line": result.line, "skip": skip + result.done}
        data |= {"bad_lines": bad, "outcomes": states, "waits_for": why}
        print_json({**data, **({"stopped": stopped} if result.stopped else {})})
    else:
        if states is not None:
            click.echo(_outcomes(states, why))
        if result.stopped:
            click.echo(f"edged: {result.stopped}", err=True)
            click.echo(
                f"stopped after {result.pairs} pairs, at line {result.line}; go on with --skip {skip + result.done}",
                err=True,
            )
    if result.bad or result.stopped:
        sys.exit(1)


def send(
    client: Client, user: str, rows: Iterator[tuple[int, dict[str, Any] | str]], advance: Callable[[int], None]
) -> ImportedLines:
    """Post every pair for `user`, or for its own where that is empty; one that the daemon refuses is a bad line.

    What ends it early is told in `stopped`.
    """
    result = ImportedLines()
    try:
        for result.line, pair in rows:
            _send(client, user, pair, result)
            result.done += 1
            advance(result.done)
    except DaemonError as error:
        result.stopped = str(error)
    except KeyboardInterrupt:
        result.stopped = "interrupted"
    return result


def follow(client: Client, feedback_ids: list[str], user: str) -> tuple[dict[str, int], str | None]:
    """Wait until all this feedback has its outcome: (pairs by state, what the queued ones wait for).

    It waits no longer for what does not come by itself, nor beyond Ctrl-C.
    """
    states: Counter[str] = Counter()
    why, total, waiting = None, len(feedback_ids), deque(feedback_ids)
    try:
        while waiting:
            found = client.get(f"/v1/feedback/{waiting[0]}")
            if found["settled"]:
                waiting.popleft()
                states.update([pair["state"] for pair in found["pairs"]] or ["skipped"])
                continue
            why = next(pair["waits_for"] for pair in found["pairs"] if pair["waits_for"])
            if found["blocked"]:
                break
            if sys.stderr.isatty():
                sent = f"{total} pairs imported{user and f' for {user}'}"
                line = f"{sent}; learning: {total - len(waiting)} of {total}, waits for {why}"
                show_progress(line[: shutil.get_terminal_size().columns - 1])
            time.sleep(ASK_S)
    except KeyboardInterrupt:
        client.close()
    except DaemonError as error:
        why = str(error)
    if sys.stderr.isatty():
        show_progress("")
    return {**states, **({"queued": len(waiting)} if waiting else {})}, why if waiting else None


def _outcomes(states: dict[str, int], why: str | None) -> str:
    """What became of the pairs, in one line."""
    ended = {state: count for state, count in states.items() if state != "queued"}
    said = ", ".join(f"{count} {OUTCOMES[state]}" for state, count in ended.items())
    line = f"{sum(ended.values())} of {sum(states.values())} have their outcome{': ' * bool(said)}{said}"
    return f"{line}; the others wait for this: {why}" if why else line


def _send(client: Client, user: str, pair: dict[str, Any] | str, result: ImportedLines) -> None:
    """Post one line's pair and count what became of it. Raises DaemonError when the next ones would fare no better."""
    if isinstance(pair, str):
        result.bad.append((result.line, pair))
        return
    if not (user or pair.get("user")):
        result.bad.append((result.line, "names no user: add one, or give --user NAME"))
        return
    try:
        answer = _post(client, {**pair, "user": user or pair["user"]})
    except Refused as error:
        if not 400 <= error.status < 500 or error.status in (401, 403):
            raise
        result.bad.append((result.line, str(error)))
    else:
        result.waiting_already += bool(answer.get("duplicate"))
        if not answer.get("duplicate"):
            result.pairs += 1
            result.feedback_ids.append(answer["id"])


@click.command()
@click.option(
    "--format", "format_", type=click.Choice(["jsonl", "trl", "hh"]), default="jsonl", show_default=True,
    help="jsonl: all that is known of a pair, for `edged feedback import`; trl: TRL's preference rows; hh: HH-RLHF.",
)  # fmt: skip
@click.option("--user", "-u", default="", metavar="NAME", help="Only this user's pairs.")
@click.option("--since", default="", metavar="DATE", help="Only pairs from this day or moment (ISO, UTC) on.")
@click.option("--texts", is_flag=True, help="trl: the pairs about plain prompts; else those about chats.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="File to write instead of stdout.")
@with_client
def export(client: Client, format_: str, user: str, since: str, texts: bool, output: Path | None) -> None:
    """Write the collected pairs as JSON lines.

    A file for TRL holds pairs of one kind, as it is read as a table. What a format cannot say is left out and counted.
    """
    asked = urlencode({name: value for name, value in (("user", user), ("since", since)) if value})
    left_out: Counter[str] = Counter()
    rows = _converted(client.json_lines(f"/v1/feedback?{asked}"), format_, texts, left_out)
    try:
        with nullcontext(sys.stdout) if output is None else output.open("w") as file:
            count = sum(bool(file.write(json.dumps(row, ensure_ascii=False) + "\n")) for row in rows)
    except OSError as error:
        raise DaemonError(f"{output or 'stdout'} cannot be written: {error.strerror}") from None
    for reason, times in left_out.items():
        click.echo(f"{times} pairs left out: {reason}", err=True)
    if output is not None:
        click.echo(f"{count} pairs are in {output}")


feedback.add_command(export)


def _converted(
    rows: Iterator[dict[str, Any]], format_: str, texts: bool, left_out: Counter[str]
) -> Iterator[dict[str, Any]]:
    """The pairs in that format; why others have none is counted."""
    from edged.align.feedback.pair_formats import FormatError, to_hh, to_trl

    for pair in rows:
        if format_ == "jsonl":
            yield pair
        elif format_ == "trl" and ("messages" in pair) == texts:
            left_out["about chats" if texts else "about plain prompts (--texts writes these)"] += 1
        else:
            try:
                yield to_trl(pair) if format_ == "trl" else to_hh(pair)
            except FormatError as error:
                left_out[str(error)] += 1


def _post(client: Client, pair: dict[str, Any]) -> dict[str, Any]:
    """Send one pair, waiting while the daemon is too busy to take it."""
    while True:
        try:
            return client.post("/v1/feedback", pair)
        except Refused as error:
            if error.status != 429:
                raise
            time.sleep(BUSY_WAIT_S)


def _report(result: ImportedLines, user: str) -> None:
    for number, error in result.bad[:MOST_SHOWN]:
        click.echo(f"line {number}: {error}", err=True)
    if len(result.bad) > MOST_SHOWN:
        click.echo(f"... and {len(result.bad) - MOST_SHOWN} more bad lines (--json lists all)", err=True)
    parts = [f"{result.pairs} pairs imported for {user or 'the users that the lines name'}"]
    if result.waiting_already:
        parts.append(f"{result.waiting_already} wait for training already")
    if result.bad:
        parts.append(f"{len(result.bad)} bad lines left out")
    click.echo(", ".join(parts))
