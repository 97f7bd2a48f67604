"""Maintenance of the database: retention, giving pages back, the write-ahead log, the query planner's statistics.

Two things hold whatever the settings say: what a signal or a pair refers to stays as long as these do, and so do pairs
that wait for training, are held out, or are replayed. The newest rows of a table stay whatever their date says, since
a box may have lived in 1970 until its clock was set.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from sqlite_utils import Database

from edged.settings.live import Live
from edged.settings.load import Settings, StoreSettings
from edged.store.application_runs import MAX_ROWS, MAX_RUNS
from edged.store.completions import UNUSED
from edged.store.data_dir import file_bytes
from edged.store.database import Store, frees_pages, vacuum
from edged.store.feedback import REPLAY_PAIRS
from edged.store.jobs.files import delete_expired_files, move_expiry
from edged.store.jobs.jobs import IS_OPEN
from edged.store.rows import first_column, first_value
from edged.store.timestamps import utc_now, utc_text

log = logging.getLogger(__name__)

SWEEP_EVERY_S = 600.0
CLOCK_IS_SET = timedelta(minutes=10)
"""How far the clock moves at least, more than time passed, where it was set."""
FIRST_SWEEP_S = 30.0
"""Seconds from the start to the first sweep."""
CHECK_LOG_EVERY_S = 10.0
OPTIMIZE_EVERY_S = 86400.0
PAUSE_S = 0.01
"""Seconds between two slices."""
SLICE_PAGES = 256
"""Most pages that are given back in one write."""
FREE_SHARE = 0.1
"""Share of the file's pages that may stay free, to be filled again."""
NIGHT_HOURS = (2, 3, 4)
"""Hours of local time in which writes may wait for the file to be rewritten."""
LONG_LOG_BYTES = 16 * 2**20
"""From this size on, the write-ahead log is emptied as soon as readers let it."""
LOG_WAIT_MS = 500
"""Longest time that writes wait for readers to let go of the log."""
KEEP_SAMPLES = 20_000
"""Iteration samples that are kept."""
_TABLES = (
    *("completions", "choices", "signals", "pairs", "alignment_metrics", "adapter_versions", "skipped_steps"),
    *("iteration_samples", "shelved_metrics", "shelved_progress", "shelved_versions", "shelved_steps"),
    "application_runs",
)


class Maintenance:
    """The maintenance of one store, on a thread of its own between `start` and `stop`."""

    def __init__(self, store: Store, settings: Live[Settings]) -> None:
        self._store, self._settings = store, settings
        self._stopping = threading.Event()
        self._sweeping = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="edged-upkeep", daemon=True)
        self._deleted: Counter[str] = Counter()
        self._clock = utc_now(), time.clock_gettime(time.CLOCK_BOOTTIME)
        """A moment by the clock, and by one that nobody sets."""
        # Counting takes long in a large table: there are no numbers yet.
        self._facts = {**self._store.read(_facts_of), "rows": dict.fromkeys(_TABLES)}
        self._full = False
        self.rewrite_soon = False
        """Whether somebody was forgotten since the file was rewritten as a whole, which is then done at night."""

    def start(self) -> None:
        """Begin: rows are counted at once, the first sweep comes a while later."""
        self._thread.start()

    def stop(self) -> None:
        """End after the slice under way."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def sweep(self) -> dict[str, int]:
        """Delete what may go and give its pages back; rows deleted by table. Blocks. Raises StoreError."""
        with self._sweeping:
            deleted: Counter[str] = Counter()
            values = self._store.read(lambda db: parameters(db, self._settings.current.store, utc_now()))
            for rule in RULES:
                for count in self._apply(rule, values):
                    deleted[rule.table] += count
            deleted += Counter(files=self._delete_expired())
            self.give_back(FREE_SHARE)
            self._deleted.update(deleted)
            self._look()
            was_full, self._full = self._full, self._too_large()
            if self._full and not was_full:
                log.warning(
                    "the database is larger than store.max_database_mb = %d, and what is left in it is feedback and "
                    "the newest completions: raise that, or set store.keep_feedback_days",
                    self._settings.current.store.max_database_mb,
                )
            return dict(deleted)

    def _delete_expired(self) -> int:
        """Delete the files that have expired; a clock that was set, as after a start in 1970, takes them with it."""
        (moment, boot_s), now, now_s = self._clock, utc_now(), time.clock_gettime(time.CLOCK_BOOTTIME)
        passed = timedelta(seconds=now_s - boot_s)
        set_by = now - moment - passed
        if abs(set_by) > CLOCK_IS_SET:
            move_expiry(self._store, moment, moment + passed, set_by)
            self._clock = now, now_s
        return delete_expired_files(self._store)

    def vacuum(self) -> tuple[int, int]:
        """Rewrite the file without free pages; its bytes before and after. Writes wait for it. Raises StoreError."""
        with self._sweeping:
            before = self._store.path.stat().st_size
            self._store.write(vacuum, alone=True).result()
            self.empty_log()
            self._look()
            return before, self._store.path.stat().st_size

    def rewrite_at_night(self, hour: int) -> bool:
        """Rewrite the file where that is wanted and the `hour` is of the night; whether it was. Raises StoreError."""
        if not self.rewrite_soon or hour not in NIGHT_HOURS:
            return False
        self.rewrite_soon = False
        self.vacuum()
        return True

    def empty_log(self) -> bool:
        """Bring the write-ahead log into the file and cut it to nothing; whether readers let it. Raises StoreError.

        Readers never wait. Writes do, until those who read an older state have ended, but no longer than LOG_WAIT_MS.
        """
        return self._store.write(checkpoint, alone=True).result()

    def report(self, fresh: bool = False) -> dict[str, Any]:
        """Sizes in bytes, rows by table, the oldest completion, what was deleted since the start.

        Sizes are of now; the rest is of the last sweep, unless `fresh`, which reads the tables. Rows that were not
        counted yet are None. Raises StoreError.
        """
        if fresh:
            self._look()
        return {
            "path": str(self._store.path),
            "database_bytes": file_bytes(self._store.path),
            "log_bytes": file_bytes(self._store.log_path),
            "max_bytes": self._settings.current.store.max_database_mb << 20,
            **self._facts,
            "deleted": dict(self._deleted),
        }

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        sweep_s = time.monotonic() + FIRST_SWEEP_S
        optimize_s = sweep_s
        self._try(self._look)
        while not self._stopping.wait(CHECK_LOG_EVERY_S):
            now = time.monotonic()
            self._try(self._shorten_log)
            if now >= sweep_s:
                sweep_s = now + SWEEP_EVERY_S
                self._try(self.sweep)
            self._try(lambda: self.rewrite_at_night(time.localtime().tm_hour))
            if now >= optimize_s:
                optimize_s = now + OPTIMIZE_EVERY_S
                self._try(lambda: self._store.write(_optimize, alone=True).result())

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            # A full or failing disk may be well again the next time; nothing else depends on this.
            log.error("the database was not kept in order this time: %s", error)

    def _shorten_log(self) -> None:
        if file_bytes(self._store.log_path) > LONG_LOG_BYTES:
            self.empty_log()

    def _apply(self, rule: Rule, values: dict[str, Any]) -> Iterator[int]:
        """Delete a rule's rows slice by slice, the oldest first; how many of each slice."""
        after = -1
        while not self._stopping.is_set() and (not rule.only_while_large or self._too_large()):
            rowids = self._store.read(partial(find, rule=rule, values=values, after=after))
            if not rowids:
                return
            after = rowids[-1]
            yield self._store.write(partial(delete, rule=rule, values=values, rowids=rowids)).result()
            self._stopping.wait(PAUSE_S)

    def _too_large(self) -> bool:
        most = self._settings.current.store.max_database_mb << 20
        return bool(most) and self._store.read(used_bytes) > most

    def give_back(self, keep: float = 0.0) -> None:
        """Take free pages beyond a share to `keep` off the file, slice by slice, where it was made for that."""

        def excess(db: Database) -> int:
            pages, free = _pages(db)
            return int(free - keep * pages) if frees_pages(db) else 0

        def give_back(db: Database) -> None:
            db.execute(f"PRAGMA incremental_vacuum({SLICE_PAGES})").fetchall()

        while not self._stopping.is_set() and self._store.read(excess) > SLICE_PAGES:
            self._store.write(give_back).result()
            self._stopping.wait(PAUSE_S)

    def _look(self) -> None:
        """Count the rows, unless it is to stop meanwhile, and take the rest of the facts."""
        rows = {}
        for table in _TABLES:
            if self._stopping.is_set():
                return
            rows[table] = self._store.read(partial(first_value, sql=f"SELECT count(*) FROM {table}"))
        self._facts = {**self._store.read(_facts_of), "rows": rows}


def checkpoint(db: Database) -> bool:
    """Empty the write-ahead log, outside of transactions; False when somebody read all of LOG_WAIT_MS."""
    patience = first_value(db, "PRAGMA busy_timeout")
    db.execute(f"PRAGMA busy_timeout = {LOG_WAIT_MS}").fetchall()
    try:
        return not first_value(db, "PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        db.execute(f"PRAGMA busy_timeout = {patience}").fetchall()


def _optimize(db: Database) -> None:
    db.execute("PRAGMA analysis_limit = 400").fetchall()
    db.execute("PRAGMA optimize").fetchall()


def _facts_of(db: Database) -> dict[str, Any]:
    """The facts that are known without reading tables."""
    return {
        "used_bytes": used_bytes(db),
        "gives_pages_back": frees_pages(db),
        "oldest_completion": first_value(db, "SELECT created_at FROM completions ORDER BY rowid LIMIT 1"),
        "looked_at": utc_text(utc_now()),
    }


SLICE_ROWS = 64
"""Most rows that are deleted in one write."""
NEWEST = 1000
"""Completions and samples that neither age nor size takes."""

_DONE = """pairs.created_at < :feedback_cutoff AND pairs.state IN ('trained', 'learnt', 'skipped')
    AND pairs.id < (SELECT value FROM json_each(:replayed_from) WHERE key = pairs.adapter)"""

_ENDED = f"job_id NOT IN (SELECT id FROM jobs WHERE {IS_OPEN})"


@dataclass(frozen=True, slots=True)
class Rule:
    """Rows of `table` for which the SQL condition `gone` holds may go; its parameters are `parameters`' keys."""

    table: str
    gone: str
    only_while_large: bool = False
    """They go, the oldest first, while the file is larger than it may be."""


RULES = (
    Rule(
        "completions",
        f"(rowid <= :completions_over OR (rowid <= :completions_old AND created_at < :cutoff)) AND {UNUSED}",
    ),
    Rule("iteration_samples", "id <= :samples_over OR (id <= :samples_old AND created_at < :cutoff)"),
    Rule(
        "alignment_metrics",
        """split = 'held_out' AND created_at < :cutoff AND version < (
               SELECT max(version) FROM alignment_metrics AS newer
               WHERE newer.adapter = alignment_metrics.adapter AND newer.split = 'held_out')""",
    ),
    Rule("shelved_metrics", "split = 'held_out' AND created_at < :cutoff"),
    Rule(
        "adapter_versions",
        """on_disk = 0 AND created_at < :cutoff AND version < (
               SELECT max(version) FROM adapter_versions AS newer WHERE newer.adapter = adapter_versions.adapter)""",
    ),
    Rule("shelved_versions", "on_disk = 0 AND created_at < :cutoff"),
    Rule("skipped_steps", "created_at < :cutoff"),
    Rule("shelved_steps", "created_at < :cutoff"),
    Rule("job_events", f"created_at < :cutoff AND {_ENDED}"),
    Rule(
        "application_runs",
        f"""created_at < :cutoff OR id <= :runs_over OR id <= (
               SELECT id FROM application_runs AS newer WHERE newer.application = application_runs.application
               AND coalesce(newer.sharer, newer.user) = coalesce(application_runs.sharer, application_runs.user)
               ORDER BY id DESC LIMIT 1 OFFSET {MAX_RUNS})""",
    ),
    # In this order: scores refer to pairs, and pairs to signals.
    Rule("alignment_metrics", f"pair_id IN (SELECT id FROM pairs WHERE {_DONE})"),
    Rule("pairs", f"{_DONE} AND NOT EXISTS (SELECT 1 FROM alignment_metrics WHERE pair_id = pairs.id)"),
    Rule(
        "signals",
        """created_at < :feedback_cutoff AND NOT EXISTS (SELECT 1 FROM pairs WHERE signal_id = signals.id)
           AND NOT EXISTS (SELECT 1 FROM pairs WHERE chosen_completion_id = signals.completion_id)
           AND NOT EXISTS (SELECT 1 FROM pairs WHERE rejected_completion_id = signals.completion_id)""",
    ),
    Rule("job_events", _ENDED, only_while_large=True),
    Rule("completions", f"rowid <= :completions_old AND {UNUSED}", only_while_large=True),
    Rule("iteration_samples", "id <= :samples_old", only_while_large=True),
)


def parameters(db: Database, settings: StoreSettings, now: datetime) -> dict[str, Any]:
    """The rules' parameters for the present state."""
    replayed = db.execute(
        """SELECT adapter, min(id) FROM (
               SELECT adapter, id, row_number() OVER (PARTITION BY adapter ORDER BY id DESC) AS age
               FROM pairs WHERE state IN ('trained', 'learnt')) WHERE age <= ? GROUP BY adapter""",
        [REPLAY_PAIRS],
    )
    return {
        "completions_over": _before_newest(db, "completions", settings.keep_completions),
        "completions_old": _before_newest(db, "completions", min(NEWEST, settings.keep_completions)),
        "runs_over": _before_newest(db, "application_runs", MAX_ROWS),
        "samples_over": _before_newest(db, "iteration_samples", KEEP_SAMPLES),
        "samples_old": _before_newest(db, "iteration_samples", min(NEWEST, KEEP_SAMPLES)),
        "cutoff": _cutoff(now, settings.keep_days),
        "feedback_cutoff": _cutoff(now, settings.keep_feedback_days),
        "replayed_from": json.dumps(dict(replayed.fetchall())),
    }


def _before_newest(db: Database, table: str, count: int) -> int:
    """The rowid up to which a table's rows are older than its newest `count`; -1 where there are no more."""
    rowid = first_value(db, f"SELECT rowid FROM {table} ORDER BY rowid DESC LIMIT 1 OFFSET ?", [count])
    return -1 if rowid is None else rowid


def _cutoff(now: datetime, days: float) -> str:
    """Rows from before this moment are old; "" is before every one."""
    try:
        return utc_text(now - timedelta(days=days)) if days else ""
    except OverflowError:
        return ""


def find(db: Database, rule: Rule, values: dict[str, Any], after: int) -> list[int]:
    """Rowids beyond `after` of the next rows that may go, at most SLICE_ROWS. Takes long: not for the writer thread."""
    sql = f"SELECT rowid FROM {rule.table} WHERE rowid > :after AND ({rule.gone}) ORDER BY rowid LIMIT {SLICE_ROWS}"
    return first_column(db, sql, {**values, "after": after})


def delete(db: Database, rule: Rule, values: dict[str, Any], rowids: list[int]) -> int:
    """Delete those of the rows that may still go; returns how many."""
    return db.execute(
        f"DELETE FROM {rule.table} WHERE rowid IN (SELECT value FROM json_each(:rowids)) AND ({rule.gone})",
        {**values, "rowids": json.dumps(rowids)},
    ).rowcount


def used_bytes(db: Database) -> int:
    """Bytes of the file's pages that hold something."""
    pages, free = _pages(db)
    return int((pages - free) * first_value(db, "PRAGMA page_size"))


def _pages(db: Database) -> tuple[int, int]:
    """(pages of the file, those of them that are free)."""
    return first_value(db, "PRAGMA page_count"), first_value(db, "PRAGMA freelist_count")
