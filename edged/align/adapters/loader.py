"""Adapters on their way from disk into memory: read on a thread beside the engine's, so that no iteration waits."""

from __future__ import annotations

import logging
from collections.abc import Callable

from edged.align.adapters.adapter import AdapterState
from edged.align.adapters.adapter_cache import AdapterCache
from edged.tensors.cpu_threads import one_beside

log = logging.getLogger("edged.align")


class AdapterLoader:
    """Reads the states that an adapter cache has not got; used by the engine thread alone."""

    def __init__(
        self,
        adapter_cache: AdapterCache,
        on_loaded: Callable[[str, AdapterState | None], None],
        on_ended: Callable[[str, str], None],
        post: Callable[[Callable[[], None]], object],
    ) -> None:
        """`post` has the engine thread run something, or ignores it once that has ended.

        There, `on_loaded` gets an adapter's state, or None where it cannot be read, unless the adapter was forgotten
        meanwhile; then `on_ended` gets the adapter and why it cannot be read, or "".
        """
        self._adapter_cache, self._on_loaded, self._on_ended = adapter_cache, on_loaded, on_ended
        self._post = post
        self._thread = one_beside("edged-loader")
        self._tickets: dict[str, object] = {}
        """One for each adapter that is being read; `forget` takes it away."""

    @property
    def count(self) -> int:
        """Adapters that are being read."""
        return len(self._tickets)

    def fetch(self, adapter: str) -> None:
        """Have an adapter's state read, unless it is being read; the engine thread takes it in when it is there."""
        if adapter not in self._tickets:
            self._tickets[adapter] = object()
            self._thread.submit(self._load, adapter, self._tickets[adapter])

    def forget(self, adapter: str) -> None:
        """What is being read of an adapter is of the past."""
        self._tickets.pop(adapter, None)

    def close(self) -> None:
        """Read nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self, adapter: str, ticket: object) -> None:
        """On the loader's thread. Requests for an adapter that cannot be read end with the reason."""
        state, reason = None, ""
        try:
            state = self._adapter_cache.load(adapter)
        except Exception as error:
            log.error("adapter %s could not be read: %s", adapter, error)
            reason = f"adapter {adapter} could not be read: {error}"

        def take() -> None:
            # Another ticket, or none: it was forgotten meanwhile.
            if self._tickets.get(adapter) is ticket:
                del self._tickets[adapter]
                self._on_loaded(adapter, state)
            self._on_ended(adapter, reason)

        self._post(take)
