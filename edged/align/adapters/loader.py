"""Adapters on their way from disk into memory: read on a thread beside the engine's, so that no iteration waits.

Owns that thread and who is being read. Must not know who asked. Used by the engine thread alone.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from edged.align.trainer import Trainer
from edged.engine.request import EngineStopping
from edged.tensors.cpu_threads import one_beside

log = logging.getLogger("edged.align")


class AdapterLoader:
    """Reads the states that the trainer's shelf has not got; the trainer takes them in when they are there."""

    def __init__(
        self,
        trainer: Trainer,
        on_fetched: Callable[[str, str, float], None],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        """`post` has the engine thread run something; `on_fetched(adapter, why not or "", now)` answers `fetch`."""
        self._trainer, self._on_fetched, self._post = trainer, on_fetched, post
        self._thread = one_beside("edged-loader")
        self._tickets: dict[str, object] = {}
        """One for each adapter that is being read; `forget` takes it away."""
        self._problems_told = 0
        self._tell_problems()

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
        loaded, problem = None, ""
        try:
            loaded = self._trainer.adapter_cache.load(adapter)
        except Exception as error:
            log.error("adapter %s could not be read: %s", adapter, error)
            problem = f"adapter {adapter} could not be read: {error}"

        def take() -> None:
            # Another ticket, or none: it was forgotten meanwhile.
            if self._tickets.get(adapter) is ticket:
                del self._tickets[adapter]
                if loaded is not None:
                    self._trainer.adopt(*loaded)
                    self._tell_problems()
                else:
                    self._trainer.set_unreadable(adapter)
            self._on_fetched(adapter, problem, time.monotonic())

        with contextlib.suppress(EngineStopping):
            self._post(take)

    def _tell_problems(self) -> None:
        problems = self._trainer.adapter_cache.problems
        for problem in problems[self._problems_told :]:
            log.warning("%s: an older version is used", problem)
        self._problems_told = len(problems)
