"""Forgetting a user to the end: the tombstone, the deletion, and the search that shows that nothing is left.

A row in `forgetting` stands from the deletion until everything is gone; a start that finds one finishes the work. What
the user did after `started_at` is new and stays.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from edged.store.adapters import forget_adapters
from edged.store.data_dir import paths_under
from edged.store.jobs.files import file_ids_of_user
from edged.store.jobs.jobs import JobRow, add_event, checkpoints_of_user, open_jobs_of_users
from edged.store.rows import NAMED, first_column, first_value

_MAX_TEXTS = 32
_MIN_CHARS = 24
"""Shortest text to search for: others may write shorter ones by themselves."""
_OTHERS = {
    "completions": "user IS NOT :name AND adapter IS NOT :name",
    "choices": "completion_id IN (SELECT id FROM completions WHERE user IS NOT :name AND adapter IS NOT :name)",
    "signals": "user != :name",
    **dict.fromkeys(("pairs", "preferences", "struck_beliefs"), "adapter != :name"),
}
"""SQL's conditions, by table, on rows of other users, who may have said the same words by themselves."""
_DATED = (
    *("completions", "signals", "pairs", "quarantine", "alignment_metrics", "adapter_versions", "skipped_steps"),
    *("shelved_metrics", "shelved_versions", "shelved_steps", "application_runs"),
    *("files", "jobs", "job_events", "job_checkpoints", "preferences", "struck_beliefs"),
    *("federated_consents", "federated_ledger"),
)
_NEW = {
    **dict.fromkeys(_DATED, "created_at >= :since"),
    "choices": "completion_id IN (SELECT id FROM completions WHERE created_at >= :since)",
    # Counts of pairs that are searched themselves.
    "queued_pairs": "EXISTS (SELECT 1 FROM pairs WHERE pairs.adapter = queued_pairs.adapter)",
}
"""SQL's conditions, by table, on rows that came after the forgetting began."""


@dataclass(frozen=True, slots=True)
class Erased:
    """The deleted data: rows by table, ids of the pairs, and some of the user's texts to search for."""

    rows: dict[str, int]
    pair_ids: set[int]
    texts: tuple[str, ...]
    file_ids: list[str]
    jobs: list[JobRow]
    """Jobs that were open until then."""
    adapters: list[str]
    """The checkpoints of the user's jobs, and last the user's."""


def begin_forgetting(db: Database, name: str, now: str) -> Erased:
    """Delete the rows of the user and of checkpoints of the user's jobs, and leave tombstones, in one transaction."""
    adapters = [*checkpoints_of_user(db, name), name]
    texts, file_ids, jobs = _texts_of(db, name), file_ids_of_user(db, name), open_jobs_of_users(db, *adapters)
    kept = db.execute("SELECT job_id, step FROM job_checkpoints WHERE adapter = ?", [name]).fetchall()
    rows, pair_ids = forget_adapters(db, *adapters)
    for job_id, step in kept:
        add_event(db, now, job_id, f"The checkpoint after step {step} was forgotten", step=step)
    db.execute("INSERT OR REPLACE INTO forgetting SELECT value, ? FROM json_each(?)", [now, json.dumps(adapters)])
    return Erased(rows, pair_ids, texts, file_ids, jobs, adapters)


def unfinished(db: Database) -> list[tuple[str, str]]:
    """(adapter, when it began) of what a crash interrupted, a user's own after the checkpoints that go with it."""
    return db.execute("SELECT adapter, started_at FROM forgetting ORDER BY started_at, rowid").fetchall()


def end_forgetting(db: Database, *names: str) -> None:
    """Delete the tombstones, when everything is gone."""
    db.execute(f"DELETE FROM forgetting WHERE adapter IN {NAMED}", {"names": json.dumps(names)})


def search(db: Database, names: Sequence[str], texts: tuple[str, ...], since: str) -> dict[str, Any]:
    """Look through every text column for the user's names, of which the last may also stand in a path, and texts.

    Keys: columns (searched), texts (searched for), found: a list of {table, column, rows, what}; said_by_others: rows
    of other people that hold one of the texts; new_rows: rows that came after `since`.
    """
    report: dict[str, Any] = {"columns": 0, "texts": len(texts), "found": [], "said_by_others": 0, "new_rows": 0}
    # As they are, and as JSON writes them.
    forms = [form for text in texts for form in (text, json.dumps(text, ensure_ascii=False)[1:-1])]
    needles = {f"t{number}": form for number, form in enumerate(forms)}
    values = {"name": names[-1], "names": json.dumps(names), "since": since, **needles}
    for table in db.tables:
        if table.name == "forgetting":
            continue
        new = _NEW.get(table.name, "0")
        for column in [column.name for column in table.columns if column.type.upper() == "TEXT"]:
            report["columns"] += 1
            named = f""""{column}" IN {NAMED} OR instr("{column}", '/' || :name || '/')"""
            said = " OR ".join(f'instr("{column}", :{needle})' for needle in needles) or "0"
            for what, match, others in (("name", named, "0"), ("text", said, _OTHERS.get(table.name, "0"))):
                hits = f'SELECT count(*) FROM "{table.name}" WHERE ({match})'
                report["new_rows"] += first_value(db, f"{hits} AND ({new})", values)
                report["said_by_others"] += first_value(db, f"{hits} AND ({others}) AND NOT ({new})", values)
                if found := first_value(db, f"{hits} AND NOT ({others}) AND NOT ({new})", values):
                    report["found"].append({"table": table.name, "column": column, "rows": found, "what": what})
    return report


def search_files(folder: Path, names: Sequence[str]) -> list[str]:
    """Paths under `folder` that bear one of the user's names, or whose JSON has one as its adapter.

    A file that cannot be read is another user's trouble, unless it lies under the name: that path is told anyway.
    """
    found, wanted = [], re.compile('"adapter": (' + "|".join(re.escape(json.dumps(name)) for name in names) + ")")
    for path in paths_under(folder):
        if path.name in names:
            found.append(str(path))
        elif path.suffix == ".json":
            with suppress(OSError):
                if wanted.search(path.read_text(errors="replace")):
                    found.append(str(path))
    return found


def _texts_of(db: Database, name: str) -> tuple[str, ...]:
    """The longest texts, of each table, that the user wrote or received."""
    own = "FROM completions WHERE user = :name OR adapter = :name"
    last_message = "SELECT json_extract(messages, '$[#-1].content') AS text"
    sources = (
        f"SELECT prompt AS text {own}",
        f"{last_message} {own}",
        f"SELECT text FROM choices WHERE completion_id IN (SELECT id {own})",
        "SELECT text FROM signals WHERE user = :name",
        "SELECT text FROM preferences WHERE adapter = :name",
        "SELECT chosen AS text FROM pairs WHERE adapter = :name",
        "SELECT rejected AS text FROM pairs WHERE adapter = :name",
        "SELECT prompt AS text FROM pairs WHERE adapter = :name",
        f"{last_message} FROM pairs WHERE adapter = :name",
    )
    texts: dict[str, None] = {}
    for source in sources:
        longest = f"""SELECT text FROM ({source}) WHERE length(text) >= {_MIN_CHARS}
                      ORDER BY length(text) DESC LIMIT {_MAX_TEXTS // len(sources)}"""
        texts.update((str(text), None) for text in first_column(db, longest, {"name": name}))
    return tuple(texts)
