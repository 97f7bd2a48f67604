"""The ids of answers and feedback, and the nodes that they came from."""

import re
from collections import OrderedDict
from dataclasses import dataclass

_MOST = 100_000
_ID = re.compile(rb'"id": ?"((?:chatcmpl-|cmpl-|resp_|)[A-Za-z0-9.-]{8,80})"')
_NAMED = re.compile(r"(?:(?:chat)?cmpl-|resp_)([A-Za-z0-9-]{1,32})\.[0-9a-f]+")
_HEAD = 256
"""Bytes of an answer in which its id stands."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The node of an answer; `away` is the user's home where that was not reached, so that the base answered."""

    node: str
    away: str = ""


class Ids:
    """The latest ids and their origins."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Origin] = OrderedDict()

    def learn(self, head: bytes, origin: Origin) -> None:
        """Remember the id in an answer's first bytes."""
        if found := _ID.search(head, 0, _HEAD):
            self.note(found[1].decode(), origin)

    def note(self, name: str, origin: Origin) -> None:
        """Remember where an id is known."""
        self._known[name] = origin
        while len(self._known) > _MOST:
            self._known.popitem(last=False)

    def origin(self, name: str) -> Origin | None:
        """Return where an id came from; None where only the nodes can tell."""
        return self._known.get(name)


def named_in(name: str) -> str:
    """Return the node that an answer's id names: the one that began the answer, and mostly the one that has it."""
    named = _NAMED.fullmatch(name)
    return named[1] if named else ""
