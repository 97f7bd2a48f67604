"""An answer that may go on at another node: what its client has of it, as the node tells beside each chunk."""

import json
import re
import secrets
from dataclasses import dataclass, field

from aiohttp import web

from edged.http.json_format import Json, dumps

_TOLD = re.compile(rb'^: (\{"index":.*\})\n', re.MULTILINE)
"""The comment behind a chunk; see `openai_format.chunk_event`."""
_HEAD = re.compile(rb'"id":"([^"]+)","object":"[^"]+","created(?:_at)?":(\d+)')
_GIVEN_UP = re.compile(rb'^data: \{"error":.*"code":"cancelled"\}\}\n\n', re.MULTILINE)
"""The event by which a daemon that stops ends an answer."""


@dataclass(slots=True)
class ResumableAnswer:
    """A chat or completion on its way to a client: its request's body, and its number of choices.

    That is 0 where no other node may go on: for a response, and for a body that a node refuses in its own words.
    """

    body: bytes
    choices: int
    seed: int = field(default_factory=lambda: secrets.randbits(62))
    response: web.StreamResponse | None = None
    """The client's response, once it has begun."""
    node: str = ""
    """The node that gives it, or gave it last."""
    ended: bool = False
    """Whether the client has all of it."""
    _rest: bytes = b""
    """The beginning of an event whose end has not come."""
    _begun: Json = field(default_factory=dict)
    _told: dict[int, Json] = field(default_factory=dict)

    def begin(self, response: web.StreamResponse, node: str) -> None:
        """Take the client's response, to which a node gives the answer, or its rest."""
        self.response, self.node, self._rest = response, node, b""

    @property
    def data(self) -> bytes:
        """The request for a node: to give the answer, or to go on with it."""
        if not self.choices:
            return self.body
        resume: Json = {"seed": self.seed}
        if self._told:
            resume["begun"] = self._begun | {"choices": [self._told.get(index) for index in range(self.choices)]}
        return self.body.rstrip()[:-1] + f',"resume":{dumps(resume)}}}'.encode()

    @property
    def may_go_on(self) -> bool:
        """Whether another node could go on with it: the client has nothing, or the node has told what it has."""
        return bool(self._told) or not self._begun

    def take(self, piece: bytes) -> bytes:
        """Return what a client gets of a node's bytes: whole events, without what they tell of them.

        Raises ConnectionAbortedError where the node says that it gives the answer up, and it may go on elsewhere.
        """
        events, end, self._rest = (self._rest + piece).rpartition(b"\n\n")
        events += end
        if not self._begun and (head := _HEAD.search(events)):
            self._begun = {"id": head[1].decode(), "created": int(head[2])}
        self.ended = self.ended or events.endswith(b"data: [DONE]\n\n")
        if self._told and _GIVEN_UP.search(events):
            raise ConnectionAbortedError("the node stops")
        return _TOLD.sub(self._note, events)

    def _note(self, told: re.Match[bytes]) -> bytes:
        new = json.loads(told[1])
        index, version, self._begun["prompt"] = new.pop("index"), new.pop("version"), new.pop("prompt")
        self._begun["version"] = max(version, self._begun.get("version", 0))
        known = self._told.setdefault(index, {"token_ids": []})
        known["token_ids"] += new.pop("token_ids")
        known |= new
        return b""
