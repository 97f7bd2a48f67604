"""The members of a fleet: the boxes of `[fleet] nodes`, whether each is there, and what it last said of its load."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

import edged
from edged.fleet.homes_file import HomesFile
from edged.http.errors import ApiError
from edged.placement.homes import Homes
from edged.placement.node import NodeLoad, NodeView
from edged.settings.fleet import FleetSettings

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
    """All boxes of a fleet; they change by reload alone."""

    def __init__(
        self, settings: FleetSettings, homes_file: HomesFile, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock, self._homes_file = clock, homes_file
        self.by_name: dict[str, Member] = {}
        self.homes = Homes(settings.nodes, settings.homes, homes_file.read())
        self._changed = asyncio.Event()
        self.configure(settings)

    def configure(self, settings: FleetSettings) -> None:
        """Take the boxes of other settings; those whose URL is the same keep what is known of them."""
        known, now = self.by_name, self.clock()
        self.settings = settings
        self.homes.configure(settings.nodes, settings.homes)
        self.by_name = {
            name: known[name] if name in known and known[name].url == url else Member(name, url, since_s=now)
            for name, url in settings.nodes.items()
        }

    def keep_homes(self) -> None:
        """Write homes that have changed."""
        self._homes_file.write(self.homes)

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
        load, now = NodeLoad.model_validate(report), self.clock()
        if member.view is None:
            member.view = NodeView(member.name, load, now)
        else:
            member.view.take(load, now)
        if not member.connected:
            member.connected, member.since_s = True, now
            member.lost.clear()
        member.problem = self._misfit(member)
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
            nodes.append(
                {
                    "name": item.name,
                    "url": item.url,
                    "state": state,
                    "since_s": round(now - item.since_s, 1),
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
