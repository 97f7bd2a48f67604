"""The tables `adapter_versions`, `alignment_metrics` and `skipped_steps` of adapters."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from edged.store.data_dir import erase_folder, path_in
from edged.store.feedback import last_pair_id, undo_distilled
from edged.store.jobs.files import file_ids_of_user
from edged.store.jobs.jobs import IS_OPEN
from edged.store.rows import NAMED, first_column, first_value, insert_row, update_rows

_JOBS = f"SELECT id FROM jobs WHERE owner IN {NAMED} OR adapter IN {NAMED}"
REPORTS_AT_ONCE = 1000


def insert_metric(db: Database, created_at: str, score: Mapping[str, Any]) -> None:
    """Add a pair's score by one version (keys: the columns that do not follow from others).

    A pair's first prequential score stays: later ones were measured after training on it. A pair that was forgotten
    meanwhile is passed over.
    """
    difference = score["chosen_logp"] - score["rejected_logp"]
    derived = {
        "win": difference > 0.0,
        "logp_difference": difference,
        "reward_correct": score["reward_margin"] > 0.0,
        "chosen_tokens": score.get("chosen_tokens") or None,
        "rejected_tokens": score.get("rejected_tokens") or None,
    }
    insert_row(
        db,
        "alignment_metrics",
        {"created_at": created_at, **score, **derived},
        condition="""EXISTS (SELECT 1 FROM pairs WHERE id = :pair_id)
            AND NOT (:split = 'prequential' AND EXISTS (
                SELECT 1 FROM alignment_metrics WHERE pair_id = :pair_id AND split = 'prequential'))""",
    )


def insert_version(db: Database, created_at: str, version: Mapping[str, Any]) -> None:
    """Add a version (keys: the columns); one of its number, left by a crash before it reached the disk, is replaced.

    `gain_nats` is for the practice that waits for it alone.
    """
    row = {"created_at": created_at, **version, "on_disk": 0}
    row.pop("gain_nats", None)
    insert_row(db, "adapter_versions", row, "INSERT OR REPLACE")


def update_version(db: Database, adapter: str, version: int, **columns: Any) -> None:
    """Set columns of a version's row.

    Such as `neutral_nll` and `neutral_base_nll`, NLLs of neutral text in nats per token; `problem`, why the version is
    taken back ("": it is not); `answer`, to the adapter's fixed prompt.
    """
    update_rows(db, "adapter_versions", columns, adapter=adapter, version=version)


def unanswered_versions(db: Database, most: int) -> list[tuple[str, int]]:
    """Return up to `most` adapters and their newest version, where it was tested and never answered the first pair's
    prompt, the latest tested first."""
    # Next to max() the columns are those of its row.
    sql = """SELECT adapter, max(version) FROM adapter_versions GROUP BY adapter
        HAVING tested_at IS NOT NULL AND problem = '' AND answer IS NULL
            AND adapter IN (SELECT adapter FROM pairs) ORDER BY tested_at DESC LIMIT ?"""
    return db.execute(sql, [most]).fetchall()


def last_test(db: Database, adapter: str) -> tuple[int, float]:
    """Return (newest version that passed its test, -1 for none; share of the step size that the newest version had)."""
    passed = "SELECT coalesce(max(version), -1) FROM adapter_versions WHERE adapter = ? AND problem = ''"
    newest = "SELECT step_scale FROM adapter_versions WHERE adapter = ? ORDER BY version DESC LIMIT 1"
    share = first_value(db, newest, [adapter])
    return first_value(db, passed, [adapter]), 1.0 if share is None else share


def left_by_job(db: Database, adapter: str) -> tuple[int, float | None, float | None]:
    """Return (the version that the latest job left, 0 for none; change of neutral text's NLL there, not under 0;
    highest KL to the base at a test of it or of its weights restored).

    There is none after an import, a rebuilding, or a rollback to before it.
    """
    sql = """SELECT version, max(0.0, neutral_nll / neutral_base_nll - 1.0), (
            SELECT avg(kl_nats) FROM alignment_metrics
            WHERE adapter = job.adapter AND split = 'held_out' AND version IN (
                SELECT version FROM adapter_versions
                WHERE adapter = job.adapter AND job.version IN (version, restored))
            GROUP BY version ORDER BY 1 DESC LIMIT 1)
        FROM adapter_versions AS job
        WHERE adapter = ? AND reason = 'job' AND NOT EXISTS (
            SELECT 1 FROM adapter_versions WHERE adapter = job.adapter AND version > job.version
            AND (reason = 'job' OR reason IN ('imported', 'rebuilt')
                 OR (reason LIKE 'rollback%' AND coalesce(restored, 0) < job.version)))"""
    return next(iter(db.execute(sql, [adapter])), (0, None, None))


def what_starts_are_chosen_by(
    db: Database, most: int, adapter: str | None = None
) -> Iterator[tuple[str, int, list[tuple[int, float]], list[tuple[int, str, int | None, int]]]]:
    """Yield of each adapter that has learned (or of one): its name; how many of its pairs were learned or tested; the
    latest (at most `most`) of these, oldest first, each with its first reward margin; and the versions that no step
    made, as (version, reason, restored, how many of the pairs had come before it)."""
    known = "adapter = ? AND state IN ('trained', 'learnt', 'held_out')"
    margins = """SELECT pair_id, reward_margin FROM alignment_metrics WHERE adapter = ? AND split = 'prequential'
        AND coalesce(chosen_tokens, 1) AND coalesce(rejected_tokens, 1) ORDER BY id DESC LIMIT ?"""
    made = f"""SELECT version, reason, restored, (
            SELECT count(*) FROM pairs WHERE {known} AND created_at < made.created_at) FROM adapter_versions AS made
        WHERE adapter = ? AND (restored IS NOT NULL OR reason LIKE 'start %' OR reason IN ('imported', 'rebuilt'))
        ORDER BY version"""
    names = [adapter] if adapter else first_column(db, "SELECT DISTINCT adapter FROM adapter_versions", [])
    for name in names:
        learned = first_value(db, f"SELECT count(*) FROM pairs WHERE {known}", [name])
        latest = db.execute(margins, [name, most]).fetchall()[::-1]
        yield name, learned, latest, db.execute(made, [name, name]).fetchall()


def set_version_saved(db: Database, adapter: str, version: int, path: str, removed: Sequence[int]) -> None:
    """Record that `version` is on disk under `path` and that the `removed` ones no longer are."""
    update_version(db, adapter, version, path=path, on_disk=1)
    for old in removed:
        update_version(db, adapter, old, path=None, on_disk=0)


def drop_newer(db: Database, adapter: str, version: int) -> None:
    """Forget the versions after `version`, which were lost, with their held-out scores."""
    newer = "adapter = ? AND version > ?"
    if db.execute(f"DELETE FROM adapter_versions WHERE {newer}", [adapter, version]).rowcount:
        undo_distilled(db, adapter)
    db.execute(f"DELETE FROM alignment_metrics WHERE {newer} AND split = 'held_out'", [adapter, version])


def forget_adapters(db: Database, *adapters: str) -> tuple[dict[str, int], set[int]]:
    """Delete everything of these adapters' users, on every base; returns rows per table, and the pairs' ids.

    This includes what the users said through other adapters, with the pairs that contain it, and files of the last one.
    """
    said = f"SELECT id FROM completions WHERE adapter IN {NAMED} OR user IN {NAMED}"
    signals = f"user IN {NAMED} OR completion_id IN ({said})"
    pairs = f"""adapter IN {NAMED} OR signal_id IN (SELECT id FROM signals WHERE {signals})
        OR chosen_completion_id IN ({said}) OR rejected_completion_id IN ({said})"""
    learning = ("skipped_steps", "adapter_versions", "shelved_steps", "shelved_versions")
    of_pairs = f"adapter IN {NAMED} OR pair_id IN (SELECT id FROM pairs WHERE {pairs})"
    deletions = {
        **dict.fromkeys(("alignment_metrics", "quarantine"), of_pairs),
        **dict.fromkeys((*learning, "preferences", "struck_beliefs", "leases"), f"adapter IN {NAMED}"),
        "pairs": pairs,  # and with them what is shelved of them
        "signals": signals,
        "completions": f"adapter IN {NAMED} OR user IN {NAMED}",
        **dict.fromkeys(("application_runs", "federated_consents"), f"user IN {NAMED}"),
        "job_events": f"job_id IN ({_JOBS})",
        "job_checkpoints": f"adapter IN {NAMED} OR job_id IN ({_JOBS})",
        "files": "id IN (SELECT value FROM json_each(:files))",
        "jobs": f"id IN ({_JOBS})",
    }
    named = {"names": json.dumps(adapters), "files": json.dumps(file_ids_of_user(db, adapters[-1]))}
    # What has left stays told, but not whose it was.
    db.execute(f"UPDATE federated_ledger SET user = NULL WHERE user IN {NAMED}", named)
    for table in ("pairs", "signals", "preferences", "federated_consents"):
        db.execute(f"UPDATE {table} SET account = NULL WHERE account IN {NAMED}", named)
    db.execute(f"UPDATE application_runs SET sharer = NULL WHERE sharer IN {NAMED}", named)
    ended = f"""status = CASE WHEN {IS_OPEN} THEN 'failed' ELSE status END,
        error = CASE WHEN {IS_OPEN} THEN 'the adapter that it began with was forgotten' ELSE error END,
        error_code = CASE WHEN {IS_OPEN} THEN 'invalid_model' ELSE error_code END"""
    db.execute(f"UPDATE jobs SET {ended}, parent = '', model = '' WHERE parent IN {NAMED}", named)
    pair_ids = {row[0] for row in db.execute(f"SELECT id FROM pairs WHERE {pairs}", named)}
    db.execute(f"PRAGMA user_version = {last_pair_id(db)}")
    deletes = {table: f"DELETE FROM {table} WHERE {where}" for table, where in deletions.items()}
    return {table: db.execute(delete, named).rowcount for table, delete in deletes.items()}, pair_ids


def forget_reports(db: Database, adapter: str) -> int:
    """Delete some of what a user's jobs reported, which others' writes would wait for as a whole; returns how much."""
    some = f"SELECT id FROM job_events WHERE job_id IN ({_JOBS}) LIMIT {REPORTS_AT_ONCE}"
    return db.execute(f"DELETE FROM job_events WHERE id IN ({some})", {"names": json.dumps([adapter])}).rowcount


def forget_learning(db: Database, *adapters: str) -> None:
    """Delete rows that the engine recorded after the forgetting began; the users' new feedback stays."""
    for table in ("skipped_steps", "adapter_versions"):
        db.execute(f"DELETE FROM {table} WHERE adapter IN {NAMED}", {"names": json.dumps(adapters)})


def forget_files(folder: Path, adapter: str, but: str | None) -> None:
    """Delete an adapter's files under `<folder>/<base>/<adapter>` of all bases `but` one.

    Raises OSError with the first thing that stays; the others are gone then.
    """
    problem: OSError | None = None
    path_in(folder, adapter)
    for files in folder.glob(f"*/{adapter}"):
        if files.parent.name != but:
            try:
                erase_folder(files)
            except OSError as error:
                problem = problem or error
    if problem is not None:
        raise problem
