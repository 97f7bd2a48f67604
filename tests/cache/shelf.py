"""An offload of plain integers, for tests of the trie."""

from __future__ import annotations

import itertools


class Shelf:
    """Keeps what a page holds, which `contents` says; refuses while `busy`."""

    def __init__(self, capacity: int, contents: dict[int, object]) -> None:
        self.capacity, self.contents = capacity, contents
        self.copies: dict[int, object] = {}
        self.busy = False
        self._handles = itertools.count()

    @property
    def full(self) -> bool:
        return len(self.copies) >= self.capacity

    def save(self, page: int) -> int | None:
        if self.busy or self.full:
            return None
        handle = next(self._handles)
        self.copies[handle] = self.contents.get(page)
        return handle

    def load(self, handle: int, page: int) -> bool:
        if self.busy:
            return False
        self.contents[page] = self.copies[handle]
        return True

    def drop(self, handle: int) -> None:
        del self.copies[handle]
