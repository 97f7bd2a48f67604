"""The writer of adapter versions: writes them on a thread beside the engine's, after the records of what they learned.

Only the engine thread may use it.
"""

import logging
import math
from collections.abc import Callable
from concurrent.futures import Future

from edged.align.adapters.adapter import CopiedVersion, UnknownAdapter
from edged.align.adapters.adapter_cache import AdapterCache
from edged.align.feedback.pair import Record, VersionSaved
from edged.settings.live import Live
from edged.settings.load import Settings
from edged.store import StoreError
from edged.tensors.cpu_threads import one_beside
from edged.tensors.host_copy import HostCopies

log = logging.getLogger("edged.align")


class AdapterWriter:
    """A writer of a cache's unsaved versions to disk, one after the other."""

    def __init__(
        self,
        adapter_cache: AdapterCache,
        settings: Live[Settings],
        post: Callable[[Callable[[], None]], object],
        journal: Callable[[list[Record]], Future[None] | None],
    ) -> None:
        """`post` runs a function on the engine thread, or drops it once that thread has ended.

        The journal's future resolves when all records that it was given are on disk.
        """
        self._adapter_cache, self._settings, self._post, self._journal = adapter_cache, settings, post, journal
        self._thread = one_beside("edged-saver")
        self._writing = False
        """Whether a version is being written: one at a time, as its copy takes memory and delays an iteration."""
        self._awaited: list[tuple[str, int, Future[int]]] = []

    def save_due(self, now: float) -> None:
        """Start writing a version that is due, unless one is being written; records journalled so far go first."""
        if not self._writing:
            self._save_next(now)

    def _save_next(self, now: float) -> bool:
        """Start writing the next due version; returns whether one was due."""
        store = self._settings.current.store
        copied = self._adapter_cache.to_save(now, store.save_every_s)
        if copied is None:
            return False
        self._writing, self._adapter_cache.files.keep = True, store.keep_versions
        self._thread.submit(self._save, copied, self._journal([]))
        return True

    def next_save_s(self) -> float | None:
        """Time (seconds) at which the next version is due; None when all are on disk or one is being written."""
        return None if self._writing else self._adapter_cache.next_save_s(self._settings.current.store.save_every_s)

    def saved(self, adapter: str, version: int) -> Future[int]:
        """A future that has the version when it or a later one is on disk, and the journal has recorded it there.

        It raises StoreError where the version could not be written, and UnknownAdapter when the adapter is forgotten.
        """
        future: Future[int] = Future()
        if version <= self._adapter_cache.written(adapter):
            future.set_result(version)
        else:
            self._adapter_cache.save_soon(adapter)
            self._awaited.append((adapter, version, future))
        return future

    def _answer_waiting(self, adapter: str, newest: float, written: bool | None) -> None:
        """Resolve the futures of versions up to `newest` by whether they are `written`; None: the adapter is gone."""
        waiting = [item for item in self._awaited if item[0] == adapter and item[1] <= newest]
        self._awaited = [item for item in self._awaited if item not in waiting]
        for _, version, future in waiting:
            if written:
                future.set_result(version)
            elif written is None:
                future.set_exception(UnknownAdapter(adapter))
            else:
                then = "a power cut would bring the one before it back; it is tried again, and the log has the error"
                served = f"version {version} of {adapter} is served, but could not be written to disk"
                future.set_exception(StoreError(f"{served}: {then}"))

    def bring(self, copies: HostCopies) -> None:
        """Bring copies to the host on the writer's thread."""
        self._thread.submit(copies.on_host)

    def forget(self, adapter: str) -> Future[None]:
        """Remove a forgotten adapter's files; the future resolves when they are gone, or raises OSError."""
        self._answer_waiting(adapter, math.inf, None)
        # The removal runs after a version that is being written, and before any that follow.
        return self._thread.submit(self._adapter_cache.files.forget, adapter)

    def close(self) -> None:
        """Write all unsaved versions, and wait until they are on disk."""
        try:
            while self._save_next(float("inf")):
                pass
        finally:
            self._thread.shutdown(wait=True)
            for adapter, version, _ in list(self._awaited):
                written = max(self._adapter_cache.files.versions(adapter), default=0) >= version
                self._answer_waiting(adapter, version, written)

    def _save(self, copied: CopiedVersion, recorded: Future[None] | None) -> None:
        """Write a version after the records of what it learned: without them its pairs would be trained on twice.

        A version of an adapter that was forgotten meanwhile is not written.
        """
        written: bool | None = None
        try:
            if recorded is not None:
                recorded.result()
            if not self._adapter_cache.files.hidden(copied.adapter):
                path, removed = self._adapter_cache.files.save(copied.snapshot())
                # Whoever waits for the version may ask for it by its row (export) as soon as this is answered.
                row = self._journal([VersionSaved(copied.adapter, copied.version, str(path), removed)])
                if row is not None:
                    row.result()
                written = True
        except Exception as error:
            # The version stays in memory and is tried again; after a restart its pairs are learned anew.
            log.error("adapter %s version %d could not be saved: %s", copied.adapter, copied.version, error)
            written = False
        self._post(lambda: self._ended(copied.adapter, copied.version, written))

    def _ended(self, adapter: str, version: int, written: bool | None) -> None:
        """Record the end of a write, on the engine thread; `written` None: the adapter was forgotten."""
        self._writing = False
        if written is not None:
            self._adapter_cache.save_ended(adapter, version, written)
        self._answer_waiting(adapter, version, written)
