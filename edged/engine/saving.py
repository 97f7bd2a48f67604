"""Versions on their way to disk: written on a thread beside the engine's, once it is on record what they have learnt.

Owns that thread, when a version is due, and the end of a forgotten adapter's files. Must not know what a version is of.
Used by the engine thread alone.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future

from edged.align.adapter import Snapshot
from edged.align.pair import Record, VersionSaved
from edged.align.shelf import Shelf
from edged.config import StoreSettings
from edged.engine.request import EngineStopping
from edged.engine.threads import one_beside

log = logging.getLogger("edged.align")


class Saver:
    """Writes what the shelf has and the disk has not, one version after the other."""

    def __init__(
        self,
        shelf: Shelf,
        store: StoreSettings,
        post: Callable[[Callable[[], None]], None],
        journal: Callable[[list[Record]], Future[None] | None],
    ) -> None:
        """`post` has the engine thread run something; the journal's future resolves when all it was given is there."""
        self._shelf, self._store, self._post, self._journal = shelf, store, post, journal
        self._thread = one_beside("edged-saver")

    def configure(self, store: StoreSettings) -> None:
        """Write and keep versions by other settings."""
        self._store = store
        self._shelf.files.keep = store.keep_versions

    def save_due(self, now: float) -> None:
        """Have the versions that are due written; what was journalled so far is on record before they are."""
        for snapshot in self._shelf.to_save(now, self._store.save_every_s):
            self._thread.submit(self._save, snapshot, self._journal([]))

    def next_save_s(self) -> float | None:
        """When the next version is due; None when all are on disk or on their way."""
        return self._shelf.next_save_s(self._store.save_every_s)

    def forget(self, adapter: str) -> Future[None]:
        """Remove a forgotten adapter's files; the future resolves when they are gone."""
        # Behind those that are being written, and before any that follow.
        return self._thread.submit(self._shelf.files.forget, adapter)

    def close(self) -> None:
        """Wait until everything is written."""
        self._thread.shutdown(wait=True)

    def _save(self, snapshot: Snapshot, recorded: Future[None] | None) -> None:
        """Write a version once it is `recorded` what it has learnt: a version without that would be taught it twice.

        Nothing of an adapter that was forgotten meanwhile.
        """
        try:
            if recorded is not None:
                recorded.result()
            if self._shelf.files.hidden(snapshot.adapter):
                return
            path, removed = self._shelf.files.save(snapshot)
        except Exception as error:
            # The version stays in memory and is tried again; after a restart its pairs are learnt anew.
            log.error("adapter %s version %d could not be saved: %s", snapshot.adapter, snapshot.version, error)
            self._ended(snapshot, False)
            return
        self._ended(snapshot, True)
        self._journal([VersionSaved(snapshot.adapter, snapshot.version, str(path), removed)])

    def _ended(self, snapshot: Snapshot, written: bool) -> None:
        with contextlib.suppress(EngineStopping):
            self._post(lambda: self._shelf.save_ended(snapshot.adapter, snapshot.version, written))
