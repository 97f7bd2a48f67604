"""An adapter's story in sentences: what it learned when and from which signals, what its tests say, what was undone."""

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from sqlite_utils import Database

from edged.align.feedback.pair import START_REASON, STEP_REASONS
from edged.align.metrics import versions, wilson

PAUSE_S = 3600.0
"""Steps with less time between them are told in one sentence."""
_VERSIONS, _EVENTS = 2000, 30
"""Numbers of latest versions that are read, and of latest events that are told."""
_SOURCES = {
    **{"chosen": "pick", "edit": "edit", "thumbs": "rating", "regenerate": "answer asked for again", "skip": "skip"},
    **{"rephrase": "rephrasing", "dwell": "reading time", "pair": "explicit pair"},
}
"""The stored `source` of a pair in a word."""
_MADE = {
    "practised": "practised on answers of its own",
    "job": "learned a fine-tuning job's file",
    "imported": "was imported",
    "rebuilt": "was trained anew with TRL",
    "introduced": "is the untrained adapter, which somebody asked for",
}
"""Reasons of versions that nothing new was learned for, in words."""


def events(db: Database, adapter: str) -> list[dict[str, Any]]:
    """An adapter's latest events, oldest first, at most 30.

    Keys: at (ISO time), kind ("learned", "restored", "made", "skipped", "decided"), text (a sentence), version and
    first_version (those that it is about, None where there are none), pairs, sources (pairs by signal), held_out (None,
    or the test of the newest tested version: correct, pairs, interval, kl_nats, neutral_nll_change).
    """
    told = sorted([*_chapters(db, adapter), *_skipped(db, adapter), *_decided(db, adapter)], key=lambda it: it["at"])
    return told[-_EVENTS:]


def count(number: float, noun: str) -> str:
    """Format a number of things: 1 pair, 2 pairs."""
    return f"{number:.0f} {noun}{'s' * (number != 1)}"


def _chapters(db: Database, adapter: str) -> Iterator[dict[str, Any]]:
    """Yield an event for each run of steps, and for each version that no step made."""
    rows = versions(db, adapter, _VERSIONS)[::-1]
    credited = _sources(db, adapter, rows[0]["version"] if rows else 0)
    chapter: list[dict[str, Any]] = []
    before: dict[str, Any] | None = None
    for row, after in pairwise([*rows, None]):
        assert row is not None
        chapter.append(row)
        alike = after is not None and row["reason"] == after["reason"] and row["reason"] in STEP_REASONS
        if after is not None and alike and _seconds(row, after) < PAUSE_S:
            continue
        tests = [_test(each) for each in chapter if each["held_out_pairs"]]
        before = before or next(iter(tests[:-1]), None)
        sources = sum((credited.get(each["version"], Counter()) for each in chapter), Counter[str]())
        yield _event(chapter, sources, next(iter(tests[::-1]), None), before)
        before, chapter = next(iter(tests[::-1]), before), []


def _event(
    chapter: Sequence[dict[str, Any]],
    sources: Counter[str],
    tested: dict[str, Any] | None,
    before: dict[str, Any] | None,
) -> dict[str, Any]:
    """Build the event of versions that were made alike; `before` is the test before theirs."""
    first, last = chapter[0], chapter[-1]
    name = f"version {last['version']}" if len(chapter) == 1 else f"versions {first['version']} to {last['version']}"
    kind, reason = "learned", str(last["reason"])
    pairs = sources.total() or sum(row["pairs"] for row in chapter)
    if last["restored"] is not None:
        kind, restored = "restored", f"version {last['restored']}" if last["restored"] else "the untrained adapter"
        why = "as was asked for"
        if reason.startswith("guard: "):
            of = f"version {last['parent']} was taken back ({reason.removeprefix('guard: ')})"
            why = f"since {of}; what the versions between had learned is learned again"
        text = f"{name} is {restored} again, {why}"
    elif reason in _MADE:
        kind, text = "made", f"{name} {_MADE[reason]}"
    elif reason.startswith(START_REASON):
        kind, start = "made", reason.removeprefix(START_REASON)
        text = f'{name} begins anew with the start "{start}"; what was learned before is learned again on it'
    else:
        kinds = ", ".join(count(number, _SOURCES.get(source, source)) for source, number in sources.most_common())
        text = f"{name} learned {count(pairs, 'pair')} ({kinds or 'which were queued again, or are deleted'})"
        text += "".join(f"; {what}" for what in [reason.removeprefix("trained").removeprefix(": ")] if what)
    text = f"{text[0].upper()}{text[1:]}. {_tested(tested, before)}".rstrip()
    about = {"first_version": first["version"], "version": last["version"], "pairs": pairs, "sources": dict(sources)}
    return {"at": last["created_at"], "kind": kind, "text": text, **about, "held_out": tested}


def _test(row: dict[str, Any]) -> dict[str, Any]:
    """A version's held-out test, with the 95 % interval of its share of right pairs."""
    correct, pairs = row["held_out_reward_accuracy"] * row["held_out_pairs"], row["held_out_pairs"]
    language = {key: row[key] for key in ("kl_nats", "neutral_nll_change")}
    return {"correct": correct, "pairs": pairs, "interval": wilson(correct, pairs), **language}


def _tested(test: dict[str, Any] | None, before: dict[str, Any] | None) -> str:
    """Put a test beside the one before it, "" for none."""

    def right(it: dict[str, Any]) -> str:
        low, high = (100 * end for end in it["interval"])
        return f"{it['correct']:.0f} of {count(it['pairs'], 'held-out pair')} right ({low:.0f} to {high:.0f} %)"

    if test is None:
        return ""
    kl, change = test["kl_nats"], test["neutral_nll_change"]
    language = [f"KL {kl:.2f} nats/token"] if kl is not None else []
    language += [f"neutral text {100 * change:+.1f} %"] if change is not None else []
    parts = (right(test), f"before {right(before)}" if before else "", ", ".join(language))
    return f"Its test: {'; '.join(filter(None, parts))}."


def _sources(db: Database, adapter: str, since: int) -> dict[int, Counter[str]]:
    """Pairs by the signal that they came from, for each version from `since` on that learned them last."""
    sql = """SELECT trained_version, source, count(*) FROM pairs WHERE adapter = ? AND trained_version >= ?
                 AND state IN ('queued', 'trained', 'learnt') GROUP BY 1, 2"""
    found: dict[int, Counter[str]] = {}
    for version, source, number in db.execute(sql, [adapter, since]):
        found.setdefault(version, Counter())[source] += number
    return found


def _seconds(row: dict[str, Any], after: dict[str, Any]) -> float:
    begun, ended = (datetime.fromisoformat(each["created_at"]) for each in (row, after))
    return (ended - begun).total_seconds()


def _skipped(db: Database, adapter: str) -> Iterator[dict[str, Any]]:
    sql = f"""SELECT created_at, version, json_array_length(pair_ids), reason FROM skipped_steps WHERE adapter = ?
              ORDER BY id DESC LIMIT {_EVENTS}"""
    for at, version, pairs, reason in db.execute(sql, [adapter]):
        text = f"A step of {count(pairs, 'pair')} was not taken: {reason}."
        yield _other(at, "skipped", text, pairs, version)


def _decided(db: Database, adapter: str) -> Iterator[dict[str, Any]]:
    """Yield an event for held pairs that were decided about together, to the minute."""
    sql = f"""SELECT max(decided_at), decision, count(*), min(reason) FROM quarantine
              WHERE adapter = ? AND decided_at > created_at
              GROUP BY decision, substr(decided_at, 1, 16) ORDER BY 1 DESC LIMIT {_EVENTS}"""
    for at, decision, pairs, reason in db.execute(sql, [adapter]):
        text = f"{count(pairs, 'pair')}, held because of {reason}, {'were' if pairs > 1 else 'was'} {decision}."
        yield _other(at, "decided", text, pairs)


def _other(at: str, kind: str, text: str, pairs: int, version: int | None = None) -> dict[str, Any]:
    about = {"at": at, "kind": kind, "text": text, "pairs": pairs}
    return {**about, "first_version": version, "version": version, "sources": {}, "held_out": None}
