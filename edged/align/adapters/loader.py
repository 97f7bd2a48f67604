"""The loader of adapters: reads them from disk on a thread beside the engine's, so that no iteration waits."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from edged.align.adapters.adapter import AdapterState
from edged.align.adapters.adapter_cache import AdapterCache
from edged.tensors.cpu_threads import one_beside

log = logging.getLogger("edged.align")


OnRead = Callable[[Future[Any] | None], None]
"""What the engine thread does with a finished read; None: the adapter was forgotten meanwhile."""


class AdapterLoader:
    """A reader of adapter states for a cache; used by the engine thread alone."""

    def __init__(
        self,
        adapter_cache: AdapterCache,
        on_loaded: Callable[[str, AdapterState | None], None],
        on_ended: Callable[[str, str], None],
        post: Callable[[Callable[[], None]], object],
    ) -> None:
        """`post` runs a function on the engine thread, or drops it once that thread has ended.

        On the engine thread, `on_loaded` gets an adapter's state, or None where it cannot be read, unless the adapter
        was forgotten meanwhile; then `on_ended` gets the adapter and the reason why it cannot be read, or "".
        """
        self._adapter_cache, self._on_loaded, self._on_ended = adapter_cache, on_loaded, on_ended
        self._post = post
        self._thread = one_beside("edged-loader")
        self._reading: dict[str, Future[AdapterState]] = {}
        """Reads of states that are not resident, by adapter; `forget` removes an adapter's."""
        self._replacing: dict[Future[Any], tuple[str, OnRead]] = {}
        """Reads of what takes a version's place: adapters, and what is done with the results."""

    @property
    def count(self) -> int:
        """Number of adapters that are being read."""
        return len(self._reading)

    def fetch(self, adapter: str) -> None:
        """Start reading an adapter's state, unless a read is under way; the engine thread takes the result in."""
        if adapter not in self._reading and not self._adapter_cache.is_withdrawn(adapter):
            self._reading[adapter] = future = self._thread.submit(self._adapter_cache.load, adapter)
            future.add_done_callback(lambda read: self._post(lambda: self._take(adapter, read)))

    def read(self, adapter: str, work: Callable[[], Any], on_read: OnRead) -> None:
        """Do `work`, which reads what takes the place of an adapter's version, after all reads before it.

        The engine thread then has its future for `take`, and requests that waited for the adapter go on.
        """
        read = self._thread.submit(work)
        self._replacing[read] = adapter, on_read
        read.add_done_callback(lambda _: self._post(partial(self._replace, read)))

    def forget(self, adapter: str) -> None:
        """Discard the results of reads that are under way for an adapter."""
        self._reading.pop(adapter, None)
        for read, (name, on_read) in list(self._replacing.items()):
            if name == adapter:
                self._replacing[read] = adapter, lambda _: None
                on_read(None)

    def close(self) -> None:
        """Accept no more reads; those of what takes a version's place are finished: somebody waits, or it must go."""
        for fetch in self._reading.values():
            fetch.cancel()
        self._thread.shutdown(wait=bool(self._replacing))
        for read in list(self._replacing):
            self._replace(read)

    def _replace(self, read: Future[Any]) -> None:
        """Take in, on the engine thread, what takes a version's place, unless the adapter was forgotten meanwhile."""
        found = self._replacing.pop(read, None)
        if found is not None:
            adapter, on_read = found
            on_read(read)
            self._on_ended(adapter, "")

    def _take(self, adapter: str, read: Future[AdapterState]) -> None:
        """Take in a finished read, on the engine thread; requests for an unreadable adapter end with the reason."""
        if read.cancelled():
            return
        error = read.exception()
        reason = f"adapter {adapter} could not be read: {error}" if error is not None else ""
        if reason:
            log.error("%s", reason)
        # Where another read or none is registered, the adapter was forgotten meanwhile.
        if self._reading.get(adapter) is read:
            del self._reading[adapter]
            self._on_loaded(adapter, None if reason else read.result())
        self._on_ended(adapter, reason)
