"""Where the prefix trie puts pages that it must give up: the interface."""

from __future__ import annotations

from typing import Protocol


class Spill(Protocol):
    """Keeps copies of pages under handles. The trie decides which copies are given up when it is full."""

    @property
    def full(self) -> bool:
        """Whether `save` finds no room until a handle is dropped."""

    def save(self, page: int) -> int | None:
        """A handle of a copy of `page`, which may be overwritten from now on; None when it cannot be taken now."""

    def load(self, handle: int, page: int) -> bool:
        """Copy back into `page`, which the caller has allocated; False when that cannot be done now, or at all."""

    def drop(self, handle: int) -> None:
        """Forget a copy."""
