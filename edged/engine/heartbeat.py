"""What the engine thread does when it has nothing to do, and when it last did something."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from edged.runtime.process import give_back_memory

_GIVE_BACK_AFTER_S = 30.0
"""Idle seconds after which free heap memory is returned to the system."""


class Heartbeat:
    """Used by the engine thread alone, but for `last_sign_s`. All times are of the monotonic clock."""

    def __init__(self) -> None:
        self._idle_since_s: float | None = None
        """When the engine ran out of work; -inf once its free memory was given back."""
        self._sign_s = time.monotonic()
        self._waiting = False

    @property
    def last_sign_s(self) -> float:
        """When the thread last went on; now, while it waits for something to do."""
        return time.monotonic() if self._waiting else self._sign_s

    def sign(self) -> None:
        """The thread goes on: a device call has returned."""
        self._sign_s = time.monotonic()

    def work(self) -> None:
        """There is work again."""
        self._idle_since_s = None

    def wait_s(self, due_s: Iterable[float | None]) -> float | None:
        """How long to wait, at most until the first of `due_s`; None: for a command. Free memory goes back in time."""
        now = time.monotonic()
        if self._idle_since_s is None:
            self._idle_since_s = now
        keep_until = self._idle_since_s + _GIVE_BACK_AFTER_S
        if now >= keep_until > 0:
            give_back_memory()
            self._idle_since_s = -math.inf
        waits = [max(0.0, then - now) for then in due_s if then is not None and then < math.inf]
        if keep_until > now:
            waits.append(keep_until - now)
        return min(waits, default=None)

    def __enter__(self) -> None:
        """The thread waits for a command from here on."""
        self._waiting = True

    def __exit__(self, *_: object) -> None:
        self.sign()
        self._waiting = False
