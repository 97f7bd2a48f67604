"""The commands `edged feedback`, `edged export` and `edged quarantine`: preferences in, out and under review."""

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
from typing import Any
from urllib.parse import quote, urlencode

import click

from edged.cli.options import asks_daemon, explain_os_errors, json_option, with_client
from edged.cli.output import echo, make_table, moment, number, print_json, progress_bar, short, show_progress
from edged.client.client import Client, DaemonError, Refused
from edged.runtime.printable import printable

MAX_SHOWN = 20
"""Most problems of lines that are listed; --json lists all."""
BUSY_WAIT_S = 0.5
"""Delay before a pair is sent again after status 429."""
ASK_S = 0.2
"""Interval at which outcomes are polled."""
OUTCOMES = {
    "trained": "learned",
    "learnt": "converged",
    "held_out": "kept as a test",
    "quarantined": "held (edged quarantine list)",
    "skipped": "not learned",
}


@dataclass
class ImportedLines:
    """The outcome of an import, line by line: `bad` has {"line", "error"}, `feedback_ids` those of the accepted pairs.

    `stopped` is the reason why it ended before the end of the file, at `line`; else "". `taken` counts lines by what
    was read of them in other fields than the format's.
    """

    feedback_ids: list[str] = field(default_factory=list)
    waiting_already: int = 0
    bad: list[dict[str, Any]] = field(default_factory=list)
    line: int = 0
    stopped: str = ""
    taken: Counter[str] = field(default_factory=Counter)

    @property
    def done(self) -> int:
        """Number of non-empty lines that were processed."""
        return len(self.feedback_ids) + self.waiting_already + len(self.bad)


@click.group()
def feedback() -> None:
    """Import and export preference pairs and ratings."""


@feedback.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--user", "-u", metavar="NAME", help="Whose adapter learns from the pairs; none: each line's own user.")
@click.option(
    "--format", "format_", type=click.Choice(["hh", "trl", "kto", "openai", "open-webui", "edged"]), default="edged",
    help="hh: HH-RLHF dialogues; trl: TRL preference rows, and those of other sets; kto: single ratings, TRL's"
    " unpaired preference rows; openai: OpenAI's preference examples; open-webui: the feedback that an admin of"
    " Open WebUI exports as JSON; edged: what `edged export` writes.",
)  # fmt: skip
@click.option(
    "--skip", type=click.IntRange(0), default=0, metavar="N", help="Leave out the first N pairs.", show_default=False
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Stop after N pairs.")
@click.option("--no-wait", is_flag=True, help="Leave when the pairs are sent; they are learned all the same.")
@json_option
@with_client
def import_(client: Client, file: Path, user: str | None, format_: Any, as_json: bool, **how: Any) -> None:
    """Learn from the preference pairs and single ratings of FILE, and wait until each has its outcome.

    FILE holds JSON lines, possibly gzipped, which are sent in its order; Open WebUI's export is one JSON array, whose
    oldest ratings come first. Lines or items that teach nothing are reported by number; the others are learned. Exit
    code 1 says that there were such lines, or that it had to stop early.
    Ctrl-C while the pairs are learned ends the command alone.
    """
    from edged.align.feedback.pair_formats import count_lines, read_pairs

    skip, limit = how["skip"], how["limit"]
    if not user and format_ not in ("edged", "open-webui"):
        raise DaemonError(f"lines of format {format_} name no user: give --user NAME")
    taken = Counter[str]()
    with explain_os_errors(f"{file} cannot be read"):
        found = read_pairs(file, format_, taken)
        if format_ == "open-webui":
            whole = list(found)
            _demand_one_person(whole, user)
            found, lines = iter(whole), len(whole)
        else:
            lines = count_lines(file)
        total = max(0, lines - skip)
        expected = total if limit is None else min(limit, total)
        rows = islice(found, skip, None if limit is None else skip + limit)
        with progress_bar("importing", quiet=as_json) as show:

            def advance(done: int, waits_for: str = "") -> None:
                why = f"; waits: {short(waits_for)}" if waits_for else ""
                show(done, expected, f"importing: {done} of {expected}{why}")

            result = send(client, user, rows, advance)
            result.taken = taken
    one = "item" if format_ == "open-webui" else "line"
    if not as_json:
        _report(result, user, one)
    waits = result.feedback_ids and not (how["no_wait"] or result.stopped)
    states, why = follow(client, result.feedback_ids, user) if waits else (None, None)
    pairs, go_on = len(result.feedback_ids), skip + result.done
    if as_json:
        data: dict[str, Any] = {"user": user or None, "pairs": pairs, "waiting_already": result.waiting_already}
        data |= {"bad_lines": result.bad, "outcomes": states, "waits_for": why}
        stopped = {"stopped": {"error": result.stopped, "line": result.line, "skip": go_on}} if result.stopped else {}
        print_json({**data, **({"taken": result.taken} if result.taken else {}), **stopped})
    elif result.stopped:
        where = f"stopped after {pairs} pairs, at {one} {result.line}; go on with --skip {go_on}"
        echo(f"edged: {result.stopped}\n{where}", err=True)
    elif states is not None:
        echo(_outcomes(states, why))
    if result.bad or result.stopped:
        sys.exit(1)


def _demand_one_person(rows: list[tuple[int, dict[str, Any] | str]], user: str | None) -> None:
    """Raise DaemonError where ratings of several people would teach one user."""
    people = Counter(row["user"] for _, row in rows if isinstance(row, dict))
    if user and len(people) > 1:
        told = ", ".join(f"{person} ({count})" for person, count in people.most_common(MAX_SHOWN))
        way_out = f"""keep one by jq '[.[] | select(.user_id == "{next(iter(people))}")]' FILE"""
        raise DaemonError(f"the ratings are of {len(people)} people, and --user names one: {way_out}; there are {told}")


def send(
    client: Client, user: str | None, rows: Iterator[tuple[int, dict[str, Any] | str]], advance: Callable[..., None]
) -> ImportedLines:
    """Post every pair for `user`, or for the pair's own user without one.

    A line whose pair is refused, or teaches nothing, counts as bad. Calls `advance(done)` after each line, and
    `advance(done, reason)` while the daemon takes no more.
    A DaemonError or Ctrl-C ends it early, with the reason in `stopped`.
    """
    result = ImportedLines()
    try:
        for result.line, pair in rows:
            if problem := _send(client, user, pair, result, advance):
                result.bad.append({"line": result.line, "error": problem})
            advance(result.done)
    except DaemonError as error:
        result.stopped = str(error)
    except KeyboardInterrupt:
        result.stopped = "interrupted"
    return result


def _send(
    client: Client, user: str | None, pair: dict[str, Any] | str, result: ImportedLines, advance: Callable[..., None]
) -> str:
    """Post one line's pair and count it in `result`; returns what is wrong with it, or why it teaches nothing, or "".

    Retries while the daemon takes no more (429). Raises DaemonError for errors that would meet the next pairs, too.
    """
    if isinstance(pair, str):
        return pair
    if not (user or pair.get("user")):
        return "names no user: add one, or give --user NAME"
    while True:
        try:
            body = {**pair, "user": user or pair["user"]} | ({} if "label" in pair else {"imported": True})
            answer = client.post("/v1/feedback", body)
            break
        except Refused as error:
            if not 400 <= error.status < 500 or error.status in (401, 403):
                raise
            if error.status != 429:
                return str(error)
            advance(result.done, str(error))
            time.sleep(BUSY_WAIT_S)
    if answer.get("duplicate"):
        result.waiting_already += 1
    elif answer.get("pair_ids") == []:
        return str(answer["reason"])
    else:
        result.feedback_ids.append(answer["id"])
    return ""


def follow(client: Client, feedback_ids: list[str], user: str | None) -> tuple[dict[str, int], str | None]:
    """Wait until all this feedback is settled; returns (pairs by state, what the queued ones wait for).

    Stops early at feedback that is blocked, on Ctrl-C, and on a DaemonError.
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
                sent = f"{total} pairs imported for {user}" if user else f"{total} pairs imported"
                line = f"{sent}; learning: {total - len(waiting)} of {total}, waits for {why}"
                show_progress(line[: shutil.get_terminal_size().columns - 1])
            time.sleep(ASK_S)
    except KeyboardInterrupt:
        client.close()
    except DaemonError as error:
        why = str(error)
    show_progress("")
    return {**states, **({"queued": len(waiting)} if waiting else {})}, why if waiting else None


def _outcomes(states: dict[str, int], why: str | None) -> str:
    """Return the pairs' outcomes in one line."""
    ended = {state: count for state, count in states.items() if state != "queued"}
    said = ", ".join(f"{count} {OUTCOMES[state]}" for state, count in ended.items())
    line = f"{sum(ended.values())} of {sum(states.values())} have their outcome{': ' * bool(said)}{said}"
    return f"{line}; the others wait for this: {why}" if why else line


@click.command()
@click.option(
    "--format", "format_", type=click.Choice(["jsonl", "trl", "openai", "hh"]), default="jsonl",
    help="jsonl: all that is known of a pair, for `edged feedback import`; trl: TRL's preference rows; openai:"
    " OpenAI's preference examples; hh: HH-RLHF.",
)  # fmt: skip
@click.option("--user", "-u", metavar="NAME", help="Only this user's pairs.")
@click.option("--since", metavar="DATE", help="Only pairs from this day or moment (ISO, UTC) on.")
@click.option("--texts", is_flag=True, help="trl: the pairs about plain prompts; else those about chats.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="File to write instead of stdout.")
@with_client
def export(client: Client, format_: str, texts: bool, output: Path | None, **only: str | None) -> None:
    """Write the collected pairs as JSON lines.

    A file for TRL holds pairs of one kind, as it is read as a table. What a format cannot say is left out and counted.
    """
    asked = urlencode({name: value for name, value in only.items() if value})
    left_out: Counter[str] = Counter()
    rows = _converted(client.json_lines(f"/v1/feedback?{asked}"), format_, texts, left_out)
    written = explain_os_errors(f"{output or 'stdout'} cannot be written")
    with written, nullcontext(sys.stdout) if output is None else output.open("w", encoding="utf-8") as file:
        count = sum(bool(file.write(printable(json.dumps(row, ensure_ascii=False)) + "\n")) for row in rows)
    for reason, times in left_out.items():
        echo(f"{times} pairs left out: {reason}", err=True)
    if output is not None:
        echo(f"{count} pairs are in {output}")


feedback.add_command(export)


def _converted(
    rows: Iterator[dict[str, Any]], format_: str, texts: bool, left_out: Counter[str]
) -> Iterator[dict[str, Any]]:
    """Yield the pairs in the given format; those that it cannot express are counted by reason in `left_out`."""
    from edged.align.feedback.pair_formats import to_hh, to_openai, to_trl
    from edged.align.feedback.row_shapes import FormatError

    convert: dict[str, Callable[[dict[str, Any]], dict[str, Any]]]
    convert = {"jsonl": dict, "trl": to_trl, "openai": to_openai, "hh": to_hh}
    for pair in rows:
        if format_ == "trl" and ("messages" in pair) == texts:
            left_out["about chats" if texts else "about plain prompts (--texts writes these)"] += 1
            continue
        try:
            yield convert[format_](pair)
        except FormatError as error:
            left_out[str(error)] += 1


def _report(result: ImportedLines, user: str | None, one: str) -> None:
    lines: dict[str, list[int]] = {}
    for bad in result.bad:
        lines.setdefault(bad["error"], []).append(bad["line"])
    for error, found in islice(lines.items(), MAX_SHOWN):
        others = f" and {len(found) - 1} more {one}s" if len(found) > 1 else ""
        echo(f"{one} {found[0]}{others}: {error}", err=True)
    if len(lines) > MAX_SHOWN:
        echo(f"... and {len(lines) - MAX_SHOWN} more problems (--json lists all)", err=True)
    parts = [f"{len(result.feedback_ids)} pairs imported for {user or f'the users that the {one}s name'}"]
    if result.waiting_already:
        parts.append(f"{result.waiting_already} wait for training already")
    if result.bad:
        parts.append(f"{len(result.bad)} bad {one}s not learned")
    echo(", ".join(parts))
    for told, count in result.taken.most_common():
        echo(f"in {count} lines {told}")


_pairs_argument = click.argument("pairs", nargs=-1, type=click.IntRange(1))
_all_of_user_option = click.option("--user", "-u", metavar="NAME", help="All pairs of this user.")


@click.group()
def quarantine() -> None:
    """Pairs that look poisoned: nothing is learned from them until somebody decides."""


@quarantine.command("list")
@click.option("--user", "-u", metavar="NAME", help="Only this user's pairs.")
@asks_daemon
def list_(client: Client, user: str | None) -> Any:
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
@asks_daemon
def release(client: Client, pairs: tuple[int, ...], user: str | None) -> Any:
    """Learn from PAIRS after all, or from all of --user.

    Released pairs are trusted: they are not judged again.
    """
    return _decide(client, pairs, user, "release")


@quarantine.command()
@_pairs_argument
@_all_of_user_option
@asks_daemon
def drop(client: Client, pairs: tuple[int, ...], user: str | None) -> Any:
    """Never learn from PAIRS, or from all of --user."""
    return _decide(client, pairs, user, "drop")


def _decide(client: Client, pairs: tuple[int, ...], user: str | None, action: str) -> tuple[dict[str, Any], str]:
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
