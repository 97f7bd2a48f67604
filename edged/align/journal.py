"""The learning loop's records on their way from the engine thread to the database, and to the log."""

import logging
import sqlite3
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from datetime import datetime
from itertools import count
from operator import itemgetter
from typing import Any

from sqlite_utils import Database

from edged.align.feedback.outliers import ALARM_S, OutlierHistory
from edged.align.feedback.pair import (
    STEP_REASONS,
    IterationSample,
    JobStepped,
    PairRetired,
    PairScored,
    Record,
    StepSkipped,
    VersionPublished,
    VersionSaved,
    VersionTested,
)
from edged.align.starts import MAX_PAIRS, StartChoice
from edged.runtime import logs
from edged.store import Store, adapters, feedback, quarantine, utc_now, utc_text
from edged.store.jobs import jobs
from edged.store.rows import field_values, insert_row

log = logging.getLogger("edged.align")

FLUSH_SAMPLES = 50
"""Samples that are written together, so that serving alone costs one disk write every few seconds."""
_VERSION_BURST, _VERSION_EVERY_S = 3, 60.0
"""Rate limit, by adapter, of lines on trained versions: a user who keeps giving feedback makes one every second."""

_PUBLISHED = ("adapter", "version", "parent", "reason", "pairs", "loss")
"""Fields of a version that are logged."""
_TAKEN_BACK = ("rollback", "guard")
"""Prefixes of the reasons of restored versions; others are trained, imported, rebuilt or introduced."""


class Journal:
    """A queue of records from the engine thread, which the store's thread writes in order."""

    def __init__(self, store: Store, ref_model: str) -> None:
        """`ref_model` names the model that computes reference log-probabilities."""
        self._store = store
        self._ref_model = ref_model
        self._samples: list[tuple[str, IterationSample]] = []
        self._lock = threading.RLock()
        self._numbers = count()
        self._unwritten: list[tuple[int, Record]] = []
        """Numbered records that could not be stored, as on a full disk: they are tried again before all that follow."""
        self._latest: Future[None] | None = None

    def append(self, records: Sequence[Record]) -> Future[None] | None:
        """Queue `records` for the store; returns at once. Records that cannot be written are logged, kept and retried.

        The future resolves when all records appended until now are on disk, and fails where they could not be written;
        None: nothing was ever appended.
        """
        now = utc_now()
        durable = [record for record in records if not isinstance(record, IterationSample)]
        self._samples.extend((utc_text(now), record) for record in records if isinstance(record, IterationSample))
        with self._lock:
            if durable or self._unwritten or len(self._samples) >= FLUSH_SAMPLES:
                self._write(durable, now)
            return self._latest

    def flush(self) -> None:
        """Queue the samples that wait for a full batch; call it when the engine has stopped."""
        with self._lock:
            if self._samples or self._unwritten:
                self._write([], utc_now())

    def retry(self) -> None:
        """Queue the records that could not be written, if there are any."""
        if self._unwritten:
            self.flush()

    def _write(self, records: Sequence[Record], now: datetime) -> None:
        waiting, self._samples = self._samples, []
        own = [(next(self._numbers), record) for record in records]
        carried = list(own)

        def write(db: Database) -> None:
            # Only now is it known which of the writes before this one failed.
            with self._lock:
                carried[:], self._unwritten = [*self._unwritten, *own], []
            try:
                for _, record in carried:
                    self._write_record(db, record, now)
                for created_at, sample in waiting:
                    insert_row(db, "iteration_samples", {"created_at": created_at, **asdict(sample)})
            except BaseException:
                self._keep(carried)
                raise

        self._latest = self._store.write(write)
        self._latest.add_done_callback(lambda future: self._report(future, carried))

    def _write_record(self, db: Database, record: Record, now: datetime) -> None:
        try:
            with db.atomic():
                write_record(db, record, self._ref_model, now)
        except sqlite3.IntegrityError:
            log.exception("a record does not fit the database: %r", record)

    def _keep(self, records: list[tuple[int, Record]]) -> None:
        """Move these records to the next write, which has all in the order in which they were appended."""
        with self._lock:
            self._unwritten = sorted([*self._unwritten, *records], key=itemgetter(0))
        records.clear()

    def _report(self, future: Future[None], records: list[tuple[int, Record]]) -> None:
        """Log a failed write and keep its records; runs on the store's thread, before the next transaction."""
        if future.cancelled() or not (error := future.exception()):
            return
        log.error("records of the learning loop were not stored, and are tried again: %s", error)
        self._keep(records)


def write_record(db: Database, record: Record, ref_model: str, now: datetime) -> None:
    """Store one record; `ref_model` is kept with reference log-probabilities."""
    created_at = utc_text(now)
    match record:
        case PairScored():
            adapters.insert_metric(db, created_at, asdict(record))
            feedback.set_reference(db, record.pair_id, record.ref_chosen_logp, record.ref_rejected_logp, ref_model)
        case PairRetired():
            # A pair that is learned without a step of its own is credited to the version that knew it.
            of_it = record.state == "learnt" or (record.epochs_done > 0 and record.state in ("queued", "trained"))
            learned = record.version or None if of_it else None
            feedback.set_pair_state(db, record.pair_id, record.state, record.epochs_done, learned, record.reason)
            if record.state == "quarantined":
                quarantine.insert_quarantined(db, record.pair_id, created_at, record.adapter, record.reason)
        case VersionPublished():
            adapters.insert_version(db, created_at, asdict(record))
            if record.taken_back and record.restored is not None:
                if record.reason.startswith("guard: held-out"):
                    # Training on these pairs again would cost as much accuracy again: they wait for a decision.
                    for pair_id in feedback.third_party_since(db, record.adapter, record.restored):
                        feedback.set_pair_state(db, pair_id, "quarantined", 0, None, record.reason)
                        quarantine.insert_quarantined(db, pair_id, created_at, record.adapter, record.reason)
                feedback.requeue_taken_back(db, record.adapter, record.restored)
            elif record.is_start:
                feedback.requeue_taken_back(db, record.adapter, 0)
        case VersionTested():
            nlls = {"neutral_nll": record.neutral_nll, "neutral_base_nll": record.neutral_base_nll}
            outcome = {"tested_at": created_at, "problem": record.problem}
            adapters.update_version(db, record.adapter, record.version, **nlls, **outcome)
        case VersionSaved():
            adapters.set_version_saved(db, record.adapter, record.version, record.path, record.removed)
        case StepSkipped():
            insert_row(db, "skipped_steps", {"created_at": created_at, **asdict(record)})
        case JobStepped() if not record.validated:
            jobs.record_step(db, created_at, asdict(record))
            if not record.error:
                # No test judges a job's versions: one that it leaves counts as passed, also after a restart.
                adapters.update_version(db, record.adapter, record.version, problem="")
        case IterationSample():
            raise TypeError("iteration samples are written in company: give them to Journal.append")


def requeue_lost(db: Database, adapter: str, newest_valid_version: int) -> int:
    """Remove versions that are not on disk from the database; returns the number of pairs queued again.

    `newest_valid_version` is the one that the adapter resumes with, 0 for none. Run it inside `Store.write`.
    """
    count = feedback.requeue_newer(db, adapter, newest_valid_version)
    adapters.drop_newer(db, adapter, newest_valid_version)
    return count


def load_choices(db: Database, adapter: str | None = None) -> dict[str, StartChoice]:
    """Load what is known of each user's choice of a start (or of one user's), as it stood when the daemon ended."""
    choices: dict[str, StartChoice] = {}
    for name, learned, margins, made in adapters.what_starts_are_chosen_by(db, MAX_PAIRS, adapter):
        choice = choices[name] = StartChoice(learned, dict(margins))
        for version, reason, restored, known in made:
            choice.take_version(version, reason, restored, known)
    return choices


def load_pasts(db: Database, now: datetime, adapter: str | None = None) -> dict[str, OutlierHistory]:
    """Load each adapter's outlier history (or that of one) for a restart; alarms last ALARM_S from their burst."""
    made = "SELECT adapter FROM adapter_versions WHERE reason = 'job'"
    # Checkpoints learn nothing, and no test judges them.
    names = db.execute(f"SELECT adapter FROM pairs UNION {made} EXCEPT SELECT adapter FROM job_checkpoints").fetchall()
    return {name: _past(db, name, now) for (name,) in names if adapter in (None, name)}


def _past(db: Database, adapter: str, now: datetime) -> OutlierHistory:
    losses, norms, contrary = quarantine.usual(db, adapter)
    begun = quarantine.burst_since(db, adapter)
    # A clock that went backwards makes no alarm longer than it was.
    gone_s = max(0.0, (now - datetime.fromisoformat(begun)).total_seconds()) if begun else ALARM_S
    guard = (*adapters.last_test(db, adapter), *adapters.left_by_job(db, adapter))
    return OutlierHistory(losses, norms, max(0.0, ALARM_S - gone_s), *guard, contrary)


class LogEvents:
    """The logger of one engine's records."""

    def __init__(self) -> None:
        self._trained = logs.Sparing(_VERSION_BURST, _VERSION_EVERY_S)

    def on_records(self, records: Sequence[Record]) -> None:
        """Log the records that are worth a line; may be called on any thread."""
        for record in records:
            match record:
                case VersionPublished():
                    self._published(record)
                case StepSkipped():
                    message = f"{len(record.pair_ids)} pairs of {record.adapter} were not learned: {record.reason}"
                    fields = {**field_values(record), "pair_ids": list(record.pair_ids)}
                    logs.event(log, logging.WARNING, "step_skipped", message, **fields)
                case VersionSaved(adapter, version):
                    message = f"version {version} of {adapter} is on disk"
                    logs.event(log, logging.DEBUG, "saved", message, adapter=adapter, version=version)

    def _published(self, record: VersionPublished) -> None:
        level, name, left_out = logging.INFO, "version", 0
        if record.reason in STEP_REASONS:
            missed = self._trained.left_out(record.adapter)
            if missed is None:
                return
            left_out = missed
        elif record.reason.startswith(_TAKEN_BACK):
            level, name = logging.WARNING, "rollback"
        elif record.reason.startswith("trained: "):
            level, name = logging.WARNING, "preferences_changed"
        message = f"{record.adapter} is served by version {record.version}: {record.reason}"
        fields: dict[str, Any] = {field: getattr(record, field) for field in _PUBLISHED}
        fields["step_s"] = round(record.step_s, 3)
        if left_out:
            message, fields["left_out"] = f"{message} ({left_out} versions before it are not told)", left_out
        logs.event(log, level, name, message, **fields)
