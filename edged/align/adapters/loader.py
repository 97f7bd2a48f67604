"""The loader of adapters: reads them from disk on a thread beside the engine's, so that no iteration waits."""

import logging
from collections.abc import Callable
from concurrent.futures import Future

from edged.align.adapters.adapter import AdapterState
from edged.align.adapters.adapter_cache import AdapterCache
from edged.tensors.cpu_threads import one_beside

log = logging.getLogger("edged.align")


class AdapterLoader:
    """A reader of adapter states that are not resident in a cache; used by the engine thread alone."""

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
        """Reads under way by adapter; `forget` removes an adapter's."""

    @property
    def count(self) -> int:
        """Number of adapters that are being read."""
        return len(self._reading)

    def fetch(self, adapter: str) -> None:
        """Start reading an adapter's state, unless a read is under way; the engine thread takes the result in."""
        if adapter not in self._reading:
            self._reading[adapter] = future = self._thread.submit(self._adapter_cache.load, adapter)
            future.add_done_callback(lambda read: self._post(lambda: self._take(adapter, read)))

    def forget(self, adapter: str) -> None:
        """Discard the result of a read that is under way for an adapter."""
        self._reading.pop(adapter, None)

    def close(self) -> None:
        """Cancel the reads that have not started, and accept no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

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
