"""The members of a fleet: the boxes of `[fleet] nodes` and those that registered, and what each last said of itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

import edged
from edged.fleet.state_file import StateFile
from edged.http.errors import ApiError
from edged.placement.homes import Homes
from edged.placement.node import NodeLoad, NodeView
from edged.settings.fleet import FleetSettings

log = logging.getLogger("edged.fleet")

State = Literal["up", "stale", "down", "draining", "refused"]


@dataclass(slots=True, eq=False)
class Member:
    """A box: its view for policies once it has reported, and why it is not up."""

    name: str
    url: str
    view: NodeView | None = None
    connected: bool = False
    problem: str = "it was not reached yet"
    since_s: float = 0.0
    """When it became what it is (monotonic clock)."""
    placed: int = 0
    open: int = 0
    """Requests that the ingress has open there."""
    relays: set[aiohttp.ClientResponse] = field(default_factory=set)
    """Answers that are read from it."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it cannot be reached."""


class Members:
    """All boxes of a fleet; they change by reload, and by boxes that register or leave.

    A box that registered stays a member whatever becomes of it, over a restart too: its feed alone says whether it is
    there.
    """

    def __init__(
        self,
        settings: FleetSettings,
        homes_file: StateFile,
        members_file: StateFile,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock, self._homes_file, self._members_file = clock, homes_file, members_file
        self.by_name: dict[str, Member] = {}
        self._registered = {name: url for name, url in members_file.read().items() if isinstance(url, str)}
        self.homes = Homes((), settings.homes)
        try:
            self.homes.restore(homes_file.read())
        except (ValueError, TypeError, AttributeError) as error:
            log.error("%s is of another version, nodes tell of homes as they come: %s", homes_file.path, error)
        self._changed = asyncio.Event()
        self.configure(settings)

    def configure(self, settings: FleetSettings) -> None:
        """Take the boxes of other settings; those whose URL is the same keep what is known of them."""
        known, now = self.by_name, self.clock()
        self.settings = settings
        listed = set(settings.nodes.values())
        joined = {name: url for name, url in self._registered.items() if url not in listed}
        nodes = settings.nodes | {name: url for name, url in joined.items() if name not in settings.nodes}
        self.homes.configure(nodes, settings.homes)
        self.by_name = {
            name: known[name] if name in known and known[name].url == url else Member(name, url, since_s=now)
            for name, url in nodes.items()
        }

    def register(self, name: str, url: str) -> bool:
        """Take in that a box is a member, on disk; returns whether that is new. Raises ApiError (409) for another's.

        A box has a new URL once it is not reached at the old one.
        """
        member = self.by_name.get(name)
        if member is not None and member.url == url:
            return False
        if member is not None and (name in self.settings.nodes or member.connected):
            raise ApiError(409, f'node "{name}" is {member.url} already: give this box another api.node', code="taken")
        if other := next((item.name for item in self.by_name.values() if item.url == url), None):
            raise ApiError(409, f'{url} is node "{other}" already: give each box a name of its own', code="taken")
        self._register({**self._registered, name: url})
        return True

    def leave(self, name: str) -> None:
        """Take in that a box is no member any more, on disk. Raises ApiError (404) for one that did not register."""
        if name not in self._registered:
            raise ApiError(404, f'no node "{name}" has registered here', code="unknown_node")
        self._register({known: url for known, url in self._registered.items() if known != name})

    def _register(self, registered: dict[str, str]) -> None:
        self._registered = registered
        self._members_file.write(registered)
        self.configure(self.settings)

    def keep_homes(self) -> bool:
        """Write homes that have changed; returns whether they are on disk."""
        if self.homes.changed:
            self.homes.changed = not self._homes_file.write(self.homes.state)
        return not self.homes.changed

    @property
    def model(self) -> str:
        """The name of the base model in the API, by the first node of the fleet that has told it; "" before."""
        told = (item for item in self.by_name.values() if item.view is not None and not self._misfit(item))
        return next((item.view.load.model for item in told if item.view is not None), "")

    def state(self, member: Member) -> State:
        """Return a box's state: "up" ones alone get new requests."""
        if not member.connected or member.view is None:
            return "refused" if member.view is not None and self._misfit(member) else "down"
        if self._misfit(member):
            return "refused"
        if member.view.load.phase != "ready":
            return "draining"
        return "up" if self.clock() - member.view.reported_s <= self.settings.stale_s else "stale"

    def reachable(self, member: Member) -> bool:
        """Whether a box answers what only it can answer."""
        return self.state(member) in ("up", "draining")

    def _misfit(self, member: Member) -> str:
        """Return why a box cannot be one of this fleet; "" where it can. Most of them say what all serve."""
        assert member.view is not None
        own, ours = member.view.load, edged.__version__
        if own.version.split(".")[:2] != ours.split(".")[:2]:
            return f"it runs edged {own.version}, and the ingress {ours}: install one version on all boxes"
        if own.node not in ("", member.name):
            return f'it calls itself "{own.node}" (api.node), and fleet.nodes "{member.name}": give it one name'
        loads = {item.name: item.view.load for item in self.by_name.values() if item.view is not None}
        served = Counter((load.fingerprint, load.dtype) for load in loads.values())
        # Of several that are served by as many, that of the first one listed.
        first = max(loads, key=lambda name: served[loads[name].fingerprint, loads[name].dtype])
        other = loads[first]
        if (own.fingerprint, own.dtype) == (other.fingerprint, other.dtype):
            return ""
        mine, theirs = (f"{load.model} {load.fingerprint} in {load.dtype}" for load in (own, other))
        return f"it serves {mine}, where {first} serves {theirs}: one model and LoRA shape make a fleet"

    def take(self, member: Member, report: Mapping[str, Any]) -> None:
        """Take a report of a box's load in."""
        load, now, before = NodeLoad.model_validate(report), self.clock(), self.state(member)
        if member.view is None:
            member.view = NodeView(member.name, load, now)
        else:
            member.view.take(load, now)
        if not member.connected:
            member.connected = True
            member.lost.clear()
        member.problem = self._misfit(member)
        if self.state(member) != before:
            member.since_s = now
        self._changed.set()

    def lose(self, member: Member, problem: str) -> None:
        """Take in that a box's connection has broken, or that none could be made."""
        if member.connected:
            member.since_s = self.clock()
        member.connected, member.problem = False, problem

    def cut(self, member: Member) -> None:
        """End all answers that are awaited from a box: it was lost, and cannot be reached again."""
        member.lost.set()
        for response in member.relays:
            response.close()

    def up(self) -> list[NodeView]:
        """The views of boxes that take new requests."""
        return [item.view for item in self.by_name.values() if item.view is not None and self.state(item) == "up"]

    async def some(self) -> list[NodeView]:
        """Return the boxes that take new requests, as soon as there is one. Raises ApiError (503) after `wait_s`."""
        try:
            async with asyncio.timeout(self.settings.wait_s):
                while not (found := self.up()):
                    self._changed.clear()
                    await self._changed.wait()
                return found
        except TimeoutError:
            states = ", ".join(f"{item.name} is {self.state(item)}" for item in self.by_name.values())
            message = f"no node takes requests ({states}): `edged fleet status` says why"
            raise ApiError(503, message, code="no_node", retry_after_s=self.settings.wait_s) from None

    def report(self, homes: bool) -> dict[str, Any]:
        """Return the fleet's status; with `homes` the users' too."""
        now, nodes = self.clock(), []
        for item in self.by_name.values():
            view, state = item.view, self.state(item)
            silent_s = now - view.reported_s - self.settings.stale_s if view is not None and state == "stale" else None
            nodes.append(
                {
                    "name": item.name,
                    "url": item.url,
                    "state": state,
                    "since_s": round(now - item.since_s if silent_s is None else silent_s, 1),
                    "requests": item.open,
                    "forecast_s": None if view is None else round(view.pass_s(view.backlog_tokens), 4),
                    "forecast_error": None if view is None else view.forecast_error,
                    "model": None if view is None else view.load.model,
                    "problem": item.problem if state in ("down", "refused") else "",
                }
            )
        placed = {item.name: item.placed for item in self.by_name.values()}
        told = {"nodes": nodes, "placed": placed, "policy": self.settings.policy}
        return told | ({"homes": self.homes.taught()} if homes else {})
