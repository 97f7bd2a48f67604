"""The SQLite file: opening, migrating, one writer thread with group commit, one read connection per thread."""

import contextlib
import json
import logging
import queue
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlite_utils import Database

from edged.runtime.durable import sync
from edged.store.data_dir import file_bytes
from edged.store.lock import FolderLock, FolderTaken
from edged.store.migrations import UnknownMigration, migrate
from edged.store.rows import first_value

T = TypeVar("T")
log = logging.getLogger(__name__)

GROUP_WRITES = 512
"""Most writes that share one commit (and so one fsync)."""
_NOT_SYNCED = (sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC)
BUSY_S = 30.0
"""How long a write waits for another program, such as `sqlite-utils`, that holds the file's write lock."""
_READS_END_S = 5.0
"""How long closing waits for reads that it has cut off."""
FOLDER_MODE = 0o750
"""Permissions of a data folder that did not exist."""
_RESTORE = "; stop edged, move the file away, then restore a copy or what `sqlite3 FILE .recover` can read"
WAL_LIMIT_BYTES = 64 * 2**20
"""The write-ahead log is cut back to this size after a checkpoint."""
REWRITE_BYTES = 64 * 2**20
"""A file up to this size that cannot give free pages back, as edged once made them, is rewritten at a start."""


class StoreError(RuntimeError):
    """The database cannot be opened, read or written; the message names the file and the way out."""


@dataclass(frozen=True, slots=True)
class _Write:
    fn: Callable[[Database], Any]
    future: Future[Any]
    alone: bool
    """Whether `fn` runs outside of any transaction."""
    queued_s: float


@dataclass(frozen=True, slots=True)
class WriteTimes:
    """The name of a write's function, the time until it had its turn, and the time that it ran."""

    job: str
    waited_s: float
    ran_s: float


class Store:
    """One SQLite database (WAL, synchronous=FULL, foreign keys on) in a folder that only this process uses.

    `write` may be called from any thread and never blocks; `read` runs on the calling thread.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file at `path` and bring its schema up to date. Raises StoreError."""
        self.path = Path(path)
        self.errors = 0
        """Reads and writes that failed since start."""
        self.failed = ""
        """The reason why an open store writes nothing any more: a sync to the disk failed. "" when all is well."""
        self._mark = self.path.with_name(f"{self.path.name}.suspect")
        self.log_path = self.path.with_name(f"{self.path.name}-wal")
        """SQLite's write-ahead log."""
        try:
            # The folder holds what users said: other accounts of this box may not read it.
            self.path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            self._lock = FolderLock(self.path.parent)
        except FolderTaken as error:
            raise StoreError(str(error)) from None
        except OSError as error:
            raise StoreError(f'data folder "{self.path.parent}" cannot be used: {error.strerror or error}') from error
        try:
            self._writer = self._open()
        except StoreError:
            self._lock.release()
            raise
        self.on_writes: Callable[[Sequence[WriteTimes], float], object] = lambda times, commit_s: None
        """Called on the writer thread after each group of writes, with the seconds that its commit took beside them."""
        self._times: list[WriteTimes] = []
        """Those of the present group."""
        self._writes: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._gate = threading.Condition()
        self._closed, self._reads = False, 0
        self.problem = ""
        """The reason why the latest transaction failed, or the damage; "" when all is well."""
        self._local = threading.local()
        self._readers: weakref.WeakSet[Database] = weakref.WeakSet()
        self._thread = threading.Thread(target=self._write_loop, name="edged-store", daemon=True)
        self._thread.start()

    def write(self, fn: Callable[[Database], T], alone: bool = False) -> Future[T]:
        """Run `fn` in a transaction on the writer thread; the future resolves after the commit reached the disk.

        Writes run in the order of the calls; one that waits for another program's lock may be cancelled. An exception
        of `fn` undoes what `fn` wrote, and nothing else, and is the future's exception; SQLite's own errors become
        StoreError. With `alone`, `fn` runs outside of any transaction, as VACUUM needs it. Raises StoreError when the
        store is closed.
        """
        future: Future[T] = Future()
        with self._gate:
            self._refuse_if_closed()
            self._writes.put(_Write(fn, future, alone, time.monotonic()))
        return future

    def read(self, fn: Callable[[Database], T]) -> T:
        """`fn` of a read-only connection that sees one consistent state.

        Raises StoreError on SQLite's errors, and when the store is closed or closes meanwhile.
        """
        with self._gate:
            self._refuse_if_closed()
            self._reads += 1
        try:
            db = self._reader()
            with db.atomic():
                return fn(db)
        except sqlite3.Error as error:
            explained = self._explained(error)
            if "malformed" in str(error):
                self._failed(str(explained))
            raise explained from error
        except json.JSONDecodeError as error:
            raise StoreError(f'database "{self.path}": a row is damaged ({error}){_RESTORE}') from error
        finally:
            with self._gate:
                self._reads -= 1
                self._gate.notify_all()

    @property
    def suspect(self) -> str:
        """The reason why the disk is not to be trusted, with the way out; "" once the mark is removed."""
        if not self._mark.exists():
            return ""
        return (
            f'the disk failed under the database (see "{self._mark}"): no feedback is taken until somebody has looked '
            f"at it (dmesg, edged doctor; edged restore takes a backup), and has removed that file"
        )

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StoreError(f'database "{self.path}" is closed')

    def _refuse_if_failed(self) -> None:
        if self.failed:
            raise StoreError(self.failed)

    def close(self) -> None:
        """Commit everything that was queued, then close; reads that still run are cut off. Calling it again does
        nothing."""
        with self._gate:
            if self._closed:
                return
            self._closed = True
            self._writes.put(None)
        self._thread.join()
        readers = list(self._readers)
        # A connection that is closed while another thread reads from it takes the process down.
        for reader in readers:
            with contextlib.suppress(sqlite3.ProgrammingError):
                reader.conn.interrupt()
        with self._gate:
            idle = self._gate.wait_for(lambda: not self._reads, _READS_END_S)
        for reader in readers if idle else []:
            reader.close()
        self._writer.close()
        self._lock.release()

    def _open(self) -> Database:
        """The writer's connection to a migrated file."""
        created = not self.path.exists()
        # A clean end leaves no log behind: this file saw a power cut, or something like it.
        torn = not created and file_bytes(self.log_path) > 0
        try:
            db = self._connect()
            if torn and (found := first_value(db, "PRAGMA quick_check(1)")) != "ok":
                raise StoreError(f'database "{self.path}" is damaged ({" ".join(found.split())}){_RESTORE}')
            with db.ensure_autocommit_on():
                # Of a file without tables; others keep what they have until they are rewritten.
                db.execute("PRAGMA auto_vacuum = INCREMENTAL")
                db.execute("PRAGMA journal_mode = WAL").fetchall()
                db.execute("PRAGMA synchronous = FULL")
                # What is deleted is overwritten: forgetting someone must not leave their words in free pages.
                db.execute("PRAGMA secure_delete = ON").fetchall()
                db.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}").fetchall()
            # A migration may make a table anew, and no row that refers to it must go along: foreign keys come after.
            migrate(db)
            if not frees_pages(db) and self.path.stat().st_size <= REWRITE_BYTES:
                vacuum(db)
            with db.ensure_autocommit_on():
                db.execute("PRAGMA foreign_keys = ON")
        except UnknownMigration as error:
            raise StoreError(f'database "{self.path}" {error}') from None
        except sqlite3.Error as error:
            raise self._explained(error) from error
        if created:
            sync(self.path.parent)
        return db

    def _connect(self) -> Database:
        # Plugins belong to the sqlite-utils command; the daemon runs no code that it did not ship with.
        connection = sqlite3.connect(self.path, timeout=BUSY_S, check_same_thread=False)
        return Database(connection, execute_plugins=False)

    def _reader(self) -> Database:
        """The calling thread's connection; it goes with the thread."""
        self._refuse_if_closed()
        db: Database | None = getattr(self._local, "db", None)
        if db is None:
            db = self._connect()
            db.execute("PRAGMA query_only = ON")
            self._local.db = db
            self._readers.add(db)
        return db

    def _write_loop(self) -> None:
        """Commit waiting writes together and resolve their futures; later ones share the next commit."""
        while True:
            group = [self._writes.get()]
            # Nothing may follow the store's end, or a write that runs alone.
            while (last := group[-1]) and not last.alone and len(group) < GROUP_WRITES and not self._writes.empty():
                group.append(self._writes.get())
            writes = [write for write in group if write is not None]
            began_s = time.monotonic()
            try:
                if together := [write for write in writes if not write.alone]:
                    self._commit(together)
                for write in writes:
                    if write.alone:
                        self._run_alone(write)
                if times := self._times:
                    self._times = []
                    self.on_writes(times, time.monotonic() - began_s - sum(each.ran_s for each in times))
            except BaseException as error:
                self._give_up(writes, error)
            if group[-1] is None:
                return

    def _give_up(self, writes: list[_Write], error: BaseException) -> None:
        """Answer what waits, and all that follows, with the reason why nothing is written: the daemon ends by it."""
        log.critical("the writer of %s failed", self.path, exc_info=error)
        self.failed = f'database "{self.path}": its writer failed ({error!r}); edged ends, and starts anew'
        for write in writes:
            if not write.future.done():
                with contextlib.suppress(BaseException):
                    write.future.set_exception(StoreError(self.failed))

    def _run_alone(self, write: _Write) -> None:
        if not write.future.set_running_or_notify_cancel():
            return
        try:
            self._refuse_if_failed()
            with self._writer.ensure_autocommit_on():
                result = self._run(write)
        except BaseException as error:
            write.future.set_exception(self._explained(error))
        else:
            write.future.set_result(result)

    def _run(self, write: _Write) -> Any:
        began_s = time.monotonic()
        try:
            return write.fn(self._writer)
        finally:
            ended_s = time.monotonic()
            self._times.append(WriteTimes(_name_of(write.fn), began_s - write.queued_s, ended_s - began_s))

    def _commit(self, writes: list[_Write]) -> None:
        """Run `writes` in one transaction and answer their futures."""
        results: list[tuple[_Write, Any]] = []
        failures: list[tuple[_Write, BaseException]] = []
        connection = self._writer.conn
        try:
            self._refuse_if_failed()
            connection.execute("BEGIN IMMEDIATE")
            # Until another program has let the file go, a write may be cancelled.
            writes = [write for write in writes if write.future.set_running_or_notify_cancel()]
            for write in writes:
                try:
                    with self._writer.atomic():
                        result = self._run(write)
                except BaseException as error:
                    # A full disk or a failing one ends the whole transaction: then nobody's write stands.
                    if not connection.in_transaction:
                        raise
                    failures.append((write, error))
                else:
                    results.append((write, result))
            connection.execute("COMMIT")
            if results and self.problem and "malformed" not in self.problem:
                log.warning("database %s can be written again", self.path)
                self.problem = ""
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):
                self._writer.rollback()
            self._failed(str(self._explained(error)))
            waiting = [each for each in writes if each.future.running() or each.future.set_running_or_notify_cancel()]
            results, failures = [], [(write, error) for write in waiting]
        for write, result in results:
            write.future.set_result(result)
        for write, failure in failures:
            write.future.set_exception(self._explained(failure))

    def _failed(self, problem: str) -> None:
        """Log a problem once, however many writes it meets."""
        if problem != self.problem:
            log.error("%s", problem)
            self.problem = problem

    def _explained(self, error: BaseException) -> BaseException:
        """An error as callers get it: SQLite's are counted, and name the file and, where there is one, the way out."""
        if not isinstance(error, sqlite3.Error):
            return error
        self.errors += 1
        text = str(error)
        if getattr(error, "sqlite_errorcode", None) in _NOT_SYNCED:
            self._distrust(text)
        way_out = ""
        if "not a database" in text or "malformed" in text:
            way_out = f": the file is damaged{_RESTORE}"
        elif "locked" in text:
            way_out = f": another program kept it locked for {BUSY_S:.0f} s; close that program"
        elif "full" in text:
            way_out = ": make room on the disk"
        elif "unable to open" in text or "readonly" in text:
            way_out = ": check that this user may write to the file and its folder"
        return StoreError(f'database "{self.path}": {text}{way_out}')

    def _distrust(self, reason: str) -> None:
        """Mark the disk as failed after a failed sync, which is not retried: the kernel may have dropped the pages."""
        self.failed = (
            f'database "{self.path}": the disk did not keep what was written ({reason}); edged ends, and takes no '
            f'feedback when it is started again, until "{self._mark}" is removed: see dmesg for what the disk has'
        )
        with contextlib.suppress(OSError):
            self._mark.write_text(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {reason}\n", "utf-8")
            sync(self._mark)
            sync(self._mark.parent)


def _name_of(fn: Callable[..., Any]) -> str:
    """The module and name of a function, also of one that a `partial` calls."""
    while isinstance(fn, partial):
        fn = fn.func
    return f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__name__)}"


def frees_pages(db: Database) -> bool:
    """Whether the file can give free pages back slice by slice (auto_vacuum = INCREMENTAL)."""
    return bool(first_value(db, "PRAGMA auto_vacuum") == 2)


def vacuum(db: Database) -> None:
    """Rewrite the whole file without free pages, so that it can give back later ones; outside of transactions."""
    db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    db.execute("VACUUM")
