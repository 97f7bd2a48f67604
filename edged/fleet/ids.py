"""The ids of answers and feedback, and the nodes that they came from."""

import re
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

_MOST = 100_000
_ID = re.compile(rb'"id": ?"((?:chatcmpl-|cmpl-|)[A-Za-z0-9.-]{8,80})"')
_NAMED = re.compile(r"(?:chat)?cmpl-([A-Za-z0-9-]{1,32})\.[0-9a-f]+")
_HEAD = 256
"""Bytes of an answer in which its id stands."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The node of an answer; `away` is the user's home where that was not reached, so that the base answered."""

    node: str
    away: str = ""


class Ids:
    """The latest ids and their origins; where `api.node` is set at a node its answers' ids say it themselves."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Origin] = OrderedDict()

    def learn(self, head: bytes, origin: Origin) -> None:
        """Remember the id in an answer's first bytes."""
        if found := _ID.search(head, 0, _HEAD):
            self._known[found[1].decode()] = origin
            while len(self._known) > _MOST:
                self._known.popitem(last=False)

    def origin(self, name: str, nodes: Collection[str]) -> Origin | None:
        """Return where an id came from; None where only the nodes can tell."""
        named = _NAMED.fullmatch(name)
        return self._known.get(name) or (Origin(named[1]) if named and named[1] in nodes else None)
