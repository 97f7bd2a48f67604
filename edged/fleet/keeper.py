"""The keeper of users: one writer of each adapter, copies for readers, and nothing that was acknowledged gets lost.

Each node keeps what it has acknowledged on its own disk. The keeper carries it between nodes, and may be stopped at any
moment: what a node says of its leases when it is reached again tells what is left to do.
"""

import asyncio
import contextlib
import json
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import aiohttp

from edged.fleet.ids import Ids, Origin
from edged.fleet.members import Member, Members
from edged.http.access import ON_BEHALF
from edged.http.errors import ApiError
from edged.placement.homes import Grant, Homes, rendezvous
from edged.placement.node import NodeView, RoutedRequest
from edged.placement.writers import sooner_writer
from edged.runtime import logs

log = logging.getLogger("edged.fleet")

_TICK_S = 0.25
_COPY_EVERY_S = 2.0
"""Least seconds between two copies of a user that nobody waits for."""
_COPIES_AT_ONCE = 2
_RETRY_S = 5.0
_ASK_S, _MOVE_S = 30.0, 300.0
"""Seconds that a node may take for an answer, and for a copy or the end of a step."""
_FIRST_WAY_S, _LATEST = 0.2, 0.2
"""Seconds of a copy before any was made, and the share of the latest one in their running mean."""
_TOLD = re.compile(rb"([A-Za-z0-9_.@:-]{1,64})@(\d{1,9})\b")
_TOLD_BYTES = 4096
"""First bytes of an answer in which it names a version."""


class CarryFailed(Exception):
    """Something that could not be carried between nodes; it is tried again."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a user at a node that does not write the adapter; `changes` says as of which change at home."""

    version: int
    changes: int = -1


class Keeper:
    """The writers and copies of all users, as the nodes have told, and what moves them."""

    def __init__(self, members: Members, ids: Ids) -> None:
        self.members, self._ids = members, ids
        self.session: aiohttp.ClientSession | None = None
        self._changes: Counter[str] = Counter()
        """Counts changes of each user at home: versions, pairs, words."""
        self._copies: dict[str, dict[str, Copy]] = {}
        """By user and node, for nodes that know another one as the writer."""
        self._claims: dict[tuple[str, str], Grant] = {}
        """The lease of each (user, node) as that node knows it; without one a node takes itself for the writer."""
        self._unsent: set[tuple[str, str]] = set()
        """(User, node) where a node may have pairs that the writer lacks, or takes itself for the writer."""
        self._due: dict[str, float] = {}
        """Users whose copies are behind, and when the next one is to be made."""
        self._alone: set[str] = set()
        """Adapters of fine-tuning jobs, which lie on one node."""
        self._not_before: dict[tuple[str, ...], float] = {}
        self._rests: dict[str, float] = {}
        """When users who were moved by load may be so again."""
        self._way_s = _FIRST_WAY_S
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def homes(self) -> Homes:
        """The homes of all users."""
        return self.members.homes

    # -- what nodes tell -----------------------------------------------------------------------------------------------

    def listed(self, node: str, leases: Iterable[Mapping[str, Any]]) -> None:
        """Take in all adapters of a node that was reached (again)."""
        found = {item["adapter"]: item for item in leases}
        for user, item in found.items():
            if item["epoch"]:
                self.homes.grant(user, (item["epoch"], item["node"]))
        self.homes.learn(node, {user: item["version"] for user, item in found.items() if item["node"] in ("", node)})
        for copies in self._copies.values():
            copies.pop(node, None)
        for user, item in found.items():
            claim = self._claims[user, node] = item["epoch"], item["node"] or node
            if claim[1] != node:
                self._copies.setdefault(user, {})[node] = Copy(item["version"])
            if self.homes.of(user) == node:
                self._change(user)
            if item["unsent"] or claim != self._lease(user):
                self._unsent.add((user, node))
        self.members.keep_homes()

    def leased(self, node: str, user: str, lease: Grant, version: int) -> None:
        """Take in whom a node takes for a user's writer, as another ingress may have told it."""
        if lease <= self._claims.get((user, node), (-1, "")):
            return
        fresh = lease[0] > 0 and lease > self._lease(user)
        if fresh:
            self.homes.grant(user, lease)
        self._know(user, node, lease, version)
        if fresh or lease != self._lease(user):
            self._unsent.add((user, node))
            # The one that told it is about to carry the rest, or has died.
            self._not_before["pairs", user, node] = self.members.clock() + _RETRY_S
        self.members.keep_homes()

    def _know(self, user: str, node: str, lease: Grant, version: int) -> None:
        """Take in that a node has a version, of its own or as a copy, and whom it takes for the writer."""
        self._claims[user, node] = lease
        if lease[1] == node:
            self._copies.get(user, {}).pop(node, None)
            self.homes.note(node, user, version)
        else:
            self._copies.setdefault(user, {})[node] = Copy(version)

    def published(self, node: str, user: str, version: int, reason: str) -> None:
        """Take in a new version at a node."""
        if reason == "adopted" or node in self._copies.get(user, {}):
            return
        self.homes.note(node, user, version)
        self.members.keep_homes()
        self.changed(node, user)

    def changed(self, node: str, user: str) -> None:
        """Take in that something of a user changed at a node: at home copies are behind, elsewhere pairs are unsent."""
        if user not in self.homes.remembered and not self.follows(user, node):
            # Who is not known yet is at home where he is taught first, also by that node's own socket.
            self.homes.note(node, user, 0)
            self.members.keep_homes()
        if self.homes.of(user) == node:
            self._change(user)
        else:
            self._unsent.add((user, node))

    def told(self, head: bytes) -> None:
        """Take in the versions that an answer tells its user: no older one answers from then on."""
        for name, number in _TOLD.findall(head[:_TOLD_BYTES]):
            user = name.decode()
            if user in self._copies and int(number) > self.homes.newest(user):
                self._change(user)

    def _change(self, user: str) -> None:
        self._changes[user] += 1
        if user not in self._alone:
            self._due.setdefault(user, self.members.clock() + _COPY_EVERY_S)

    def _lease(self, user: str) -> Grant:
        return self.homes.leases.get(user, (0, self.homes.of(user)))

    # -- who answers ---------------------------------------------------------------------------------------------------

    def readers(self, user: str, arrival: RoutedRequest) -> tuple[list[NodeView], RoutedRequest]:
        """Return the nodes that may answer a user, and the request with the way of the adapter to each.

        Where the home is there, it and those that have, or soon get, all that it has; else those with any copy.
        """
        home, copies = self.members.by_name.get(self.homes.of(user)), self._copies.get(user, {})
        up = {view.name: view for view in self.members.up() if user not in self.homes.forgotten.get(view.name, {})}
        if home is None or home.name not in up:
            best = max((copies[name].changes for name in up if name in copies), default=None)
            return [view for name, view in up.items() if name in copies and copies[name].changes == best], arrival
        if not self._named(home) or user in self._alone:
            return [up[home.name]], arrival
        near = {name: view for name, view in up.items() if self._named(self.members.by_name[name])}
        ways = {name: self._way_s for name in near if name != home.name and not self._current(user, name)}
        return list(near.values()), replace(arrival, ways=ways)

    def follows(self, user: str | None, node: str) -> bool:
        """Whether a node has a copy of a user, so that it hands on what is said there."""
        return user is not None and node in self._copies.get(user, {})

    def _current(self, user: str, node: str) -> bool:
        copy = self._copies.get(user, {}).get(node)
        return copy is not None and copy.changes == self._changes[user]

    def _is_connected(self, name: str) -> bool:
        member = self.members.by_name.get(name)
        return member is not None and member.connected

    def _named(self, member: Member) -> bool:
        """Whether a node has a name of its own, without which no lease tells of it."""
        return member.view is not None and member.view.load.node == member.name

    def notice(self, user: str, node: str) -> dict[str, str]:
        """Return the header of answers at a node that may lack what a home that is away has taught."""
        home = self.homes.of(user)
        away = home if node != home and not self._current(user, node) else self.homes.behind.get(user)
        return {"X-Edged-Home-Away": away} if away else {}

    async def bring(self, user: str, node: str) -> bool:
        """Bring what a user's home has to a node; returns whether the node has all of it now."""
        home = self.members.by_name.get(self.homes.of(user))
        if home is None or self.members.state(home) != "up" or home.name == node or self._current(user, node):
            return True
        try:
            async with self._lock(user):
                if self.homes.of(user) != home.name:
                    # It moved while this waited.
                    return self.homes.of(user) == node
                # Of all of nothing any node has all.
                copied = await self._copy(user, home, self.members.by_name[node], self._lease(user))
            return not copied or self._current(user, node)
        except _TROUBLE as error:
            log.warning("%s is not copied to %s: %s", user, node, error)
            return False

    # -- carrying ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Carry what is to be carried, until cancelled."""
        async with asyncio.TaskGroup() as group:
            await self._carry(group)

    async def _carry(self, group: asyncio.TaskGroup) -> None:
        """Begin what is due, again and again, as tasks of a group that ends with this."""
        under_way: dict[tuple[str, ...], asyncio.Task[None]] = {}
        while True:
            await asyncio.sleep(_TICK_S)
            now = self.members.clock()
            self._not_before = {what: at_s for what, at_s in self._not_before.items() if at_s > now}
            late = [name for name, users in self.homes.forgotten.items() if users and self._is_connected(name)]
            work: dict[tuple[str, ...], Callable[[], Awaitable[None]]] = {
                **{("pairs", *item): partial(self._hand_on, *item) for item in self._unsent},
                **{("copy", user): partial(self._copy_by, user) for user in self._copies_due()},
                **{("home", user): partial(self.rehome, user) for user in self._orphans()},
                **{("move", home): partial(self._move_by_load, home, *move) for home, move in self._moves_due()},
                **({("homes",): self._keep_homes} if self.homes.changed else {}),
                **{("forget", name): partial(self.forget_before, self.members.by_name[name]) for name in late},
            }
            under_way = {what: task for what, task in under_way.items() if not task.done()}
            for what in work.keys() - under_way.keys() - self._not_before.keys():
                under_way[what] = group.create_task(self._try(what, work[what]))

    async def _try(self, what: tuple[str, ...], work: Callable[[], Awaitable[None]]) -> None:
        """Do some work; what fails is tried again in a moment."""
        try:
            await work()
        except Exception as error:
            self._not_before[what] = self.members.clock() + _RETRY_S
            if not isinstance(error, _TROUBLE):
                log.exception("what is to be carried waits: %s", " ".join(what))
            log.warning("what is to be carried waits: %s: %s", " ".join(what), error)

    async def _keep_homes(self) -> None:
        """Write homes that a disk did not take before. Raises CarryFailed."""
        if not self.members.keep_homes():
            raise CarryFailed("homes of users cannot be written: the log says why")

    def _copies_due(self) -> list[str]:
        now = self.members.clock()
        return [user for user, due_s in self._due.items() if due_s <= now][:_COPIES_AT_ONCE]

    async def _copy_by(self, user: str) -> None:
        """Keep a copy of a user, at the node that is to take over: the next one by the user's hash."""
        async with self._lock(user):
            home = self.members.by_name.get(self.homes.of(user))
            self._due.pop(user, None)
            if home is None or self.members.state(home) != "up" or not self._named(home):
                return
            ranked = rendezvous(user, self.members.by_name)
            others = [self.members.by_name[name] for name in ranked if name != home.name]
            by = next((item for item in others if self.members.state(item) == "up" and self._named(item)), None)
            if by is None or self._current(user, by.name):
                return
            changes = self._changes[user]
            try:
                copied = await self._copy(user, home, by, self._lease(user))
                unsent = any(each == user for each, _ in self._unsent)
                if not copied and user not in self._copies and changes == self._changes[user] and not unsent:
                    self._drop(user)
            except _TROUBLE:
                self._due[user] = self.members.clock() + _RETRY_S
                raise

    async def _copy(self, user: str, source: Member, target: Member, lease: Grant) -> bool:
        """Copy a user from a node to another, which holds him by this lease; False where nothing of him is there.

        A report that was on its way when he was forgotten may name him. Raises CarryFailed.
        """
        changes, began_s = self._changes[user], time.monotonic()
        for _ in range(3):
            epoch, node = lease
            async with self._ask("GET", source, f"{user}/state", timeout_s=_MOVE_S, refused=(404, 409)) as found:
                if found.status == 404:
                    return False
                if found.status == 409:
                    self._alone.add(user)
                    raise CarryFailed(f"{source.name} has it alone: {(await found.read())[:300].decode()}")
                query = f"{user}/state?node={node}&epoch={epoch}"
                async with self._ask("PUT", target, query, found.content, _MOVE_S, refused=(409,)) as taken:
                    answer = json.loads(await taken.read())
            if taken.status == 200:
                break
            code, home = answer["error"].get("code"), self.members.by_name[self.homes.of(user)]
            if code == "newer_here":
                # Of two that wrote, the one that goes on has the greater number: nobody is told of an older one.
                await self._tell_lease(home, user, int(answer["error"]["param"]))
            elif code == "newer_lease" and not epoch:
                # The target followed another home, which was never granted.
                await self._tell_lease(home, user)
                lease = self._lease(user)
            else:
                raise CarryFailed(answer["error"]["message"])
        else:
            raise CarryFailed(f"{source.name} has no newer one than {target.name}: {answer['error']['message']}")
        self._way_s += _LATEST * (time.monotonic() - began_s - self._way_s)
        self._know(user, target.name, lease, answer["version"])
        if node != target.name:
            self._copies.setdefault(user, {})[target.name] = Copy(answer["version"], changes)
        return True

    async def _tell_lease(self, member: Member, user: str, newest: int = 0) -> int:
        """Tell a node who writes a user's adapter, once that is on disk here; returns its version. Raises CarryFailed.

        The writer's version is greater than `newest` then, where that is not 0.
        """
        epoch, node = self._lease(user)
        if not epoch:
            self.homes.grant(user, (1, node))
            epoch = 1
        await self._keep_homes()
        body = {"node": node, "epoch": epoch, "newest": newest}
        async with self._ask("PUT", member, user, json.dumps(body), _MOVE_S) as told:
            version: int = json.loads(await told.read())["version"]
        self._know(user, member.name, (epoch, node), version)
        self.members.keep_homes()
        return version

    async def _hand_on(self, user: str, node: str) -> None:
        """Hand a node's pairs on to the writer, and have the node know who that is."""
        home, member = self.members.by_name.get(self.homes.of(user)), self.members.by_name.get(node)
        # A node that has not reported yet may have its name.
        if any(item is None or (item.view is not None and not self._named(item)) for item in (home, member)):
            self._unsent.discard((user, node))
            return
        assert home is not None
        assert member is not None
        if self.members.state(home) != "up" or self.members.state(member) != "up":
            return
        async with self._lock(user):
            self._unsent.discard((user, node))
            try:
                await self._settle(user, home, member)
            except BaseException:
                self._unsent.add((user, node))
                raise
        if self.homes.behind.get(user) == node:
            del self.homes.behind[user]
            self.homes.changed = True
            self.members.keep_homes()

    async def _settle(self, user: str, home: Member, member: Member) -> None:
        """Have two nodes agree on the writer, which gets the other's pairs."""
        newest = self._greater(user, home.name)
        if self._claims.get((user, member.name), (0, member.name)) != self._lease(user) and home is not member:
            newest = max(newest, await self._tell_lease(member, user))
        if newest or self._claims.get((user, home.name), (0, home.name)) != self._lease(user):
            await self._tell_lease(home, user, newest)
        if home is member:
            return
        epoch, _ = self._lease(user)
        while True:
            async with self._ask("GET", member, f"{user}/pairs") as found:
                data = await found.read()
            copied = json.loads(data)
            if not copied["pairs"]:
                return
            async with self._ask("POST", home, f"{user}/pairs", data) as taken:
                await taken.read()
            for signal in copied["signals"]:
                # What becomes of it is known there.
                self._ids.note(signal["id"], Origin(home.name))
            origins = [row["origin"] for row in copied["pairs"]]
            body = json.dumps({"origins": origins, "epoch": epoch})
            async with self._ask("PUT", member, f"{user}/pairs", body) as noted:
                await noted.read()

    def _greater(self, user: str, node: str) -> int:
        """Return the greatest version that any node has told of, 0 where it is this node's."""
        copies = self._copies.get(user, {})
        own = copies[node].version if node in copies else self.homes.version(user, node)
        newest = max([self.homes.newest(user), *(copy.version for copy in copies.values())])
        return newest if newest > own else 0

    # -- homes that change ---------------------------------------------------------------------------------------------

    def _gone(self, user: str) -> bool:
        """Whether a user's home has been away for `fleet.takeover_s`."""
        home = self.members.by_name.get(self.homes.of(user))
        away_s = self.members.settings.takeover_s
        return home is None or (not home.connected and self.members.clock() - home.since_s >= away_s)

    def _orphans(self) -> list[str]:
        """Users whose home has gone, and who have a copy at a node that is there."""
        up = {view.name for view in self.members.up()}
        if len(up) == len(self.members.by_name):
            return []
        return [user for user, copies in self._copies.items() if self._gone(user) and not up.isdisjoint(copies)]

    async def rehome(self, user: str) -> None:
        """Grant a user whose home has gone to the node with the newest copy; one who is not known to any node, to
        another."""
        if not self._gone(user):
            return
        async with self._lock(user):
            if not self._gone(user):
                return
            up = {view.name for view in self.members.up() if self._named(self.members.by_name[view.name])}
            known = {name: copy for name, copy in self._copies.get(user, {}).items() if name in up}
            former, (epoch, _) = self.homes.of(user), self._lease(user)
            if known:
                node = max(known, key=lambda name: (known[name].changes, known[name].version, name))
            elif up and user not in self.homes.remembered:
                node = next(name for name in rendezvous(user, self.members.by_name) if name in up)
            else:
                return
            if user in self.homes.remembered and not self._current(user, node):
                self.homes.behind[user] = former
            newest = self._greater(user, node)
            self.homes.grant(user, (epoch + 1, node))
            message = f"{user} is taught at {node} from now on: {former} is away"
            logs.event(log, logging.WARNING, "takeover", message, adapter=user, node=node, epoch=epoch + 1)
            self._unsent.add((user, node))
            await self._tell_lease(self.members.by_name[node], user, newest)
            self._unsent.discard((user, node))
            self._unsent |= {(user, name) for name in known if name != node}
            self._change(user)

    async def move(self, user: str, node: str) -> None:
        """Move a user's home to another node: the step under way ends first, and no pair is lost. Raises ApiError."""
        target = self.members.by_name.get(node)
        if target is None:
            known = ", ".join(self.members.by_name)
            raise ApiError(404, f'"{node[:40]}" is no node of this fleet: {known}', "node", "unknown_node")
        async with self._lock(user):
            home = self.members.by_name.get(self.homes.of(user))
            if home is target:
                return
            for member in (home, target):
                if member is None or self.members.state(member) != "up" or not self._named(member):
                    name = member.name if member is not None else self.homes.of(user)
                    way_out = "it must be up, and have its name as api.node"
                    raise ApiError(503, f'node "{name}" takes no part in a move: {way_out}', code="no_node")
            assert home is not None
            try:
                copied = await self._copy(user, home, target, self._lease(user))
                lease = (self._lease(user)[0] + 1, node)
                self.homes.grant(user, lease)
                self._unsent |= {(user, home.name), (user, node)}
                await self._tell_lease(home, user)
                if copied:
                    await self._copy(user, home, target, lease)
                else:
                    await self._tell_lease(target, user)
            except _TROUBLE as error:
                raise ApiError(503, f"{user} is not moved yet: {error}", code="not_moved") from None
            self._unsent.discard((user, node))
            self._change(user)
            self.members.keep_homes()

    def _moves_due(self) -> Iterator[tuple[str, tuple[str, int, str]]]:
        """Yield homes with the user of most pairs there who would be taught sooner elsewhere, these pairs, and where.

        A user whom `fleet.homes` names stays.
        """
        now, settings = self.members.clock(), self.members.settings
        named = [view for view in self.members.up() if self._named(self.members.by_name[view.name])]
        for view in named:
            for user, pairs in view.load.pairs_by_adapter.items():
                rests = now < self._rests.get(user, 0.0) or user in settings.homes or user in self._alone
                if rests or self.homes.of(user) != view.name:
                    continue
                node = sooner_writer(view.name, pairs, named, settings.move_min_s + self._way_s)
                if node != view.name:
                    yield view.name, (user, pairs, node)
                    break

    async def _move_by_load(self, home: str, user: str, pairs: int, node: str) -> None:
        """Move a user's pairs to where they will be learned sooner. Raises CarryFailed."""
        now, target = self.members.clock(), self.members.by_name[node].view
        self._rests = {each: until_s for each, until_s in self._rests.items() if until_s > now}
        self._rests[user] = now + self.members.settings.lease_s
        if target is not None:
            # Else all would go to one idle node until it reports them.
            target.pairs_coming += [now + self._way_s] * pairs
        try:
            await self.move(user, node)
        except ApiError as error:
            raise CarryFailed(str(error)) from None
        message = f"{user} is taught at {node} from now on: {pairs} pairs would have waited longer at {home}"
        logs.event(log, logging.INFO, "moved", message, adapter=user, node=node, pairs=pairs)

    # -- forgetting ----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def forgetting(self, user: str, caller: str) -> AsyncIterator[list[Member]]:
        """Forget a user: yields the nodes that are to do so now, and those that are away will before they are used."""
        async with self._lock(user):
            there = [item for item in self.members.by_name.values() if self.members.reachable(item)]
            for member in self.members.by_name.values():
                self.homes.forgotten.setdefault(member.name, {})[user] = caller
            self.homes.changed = True
            if not self.members.keep_homes():
                raise ApiError(503, "the disk of the ingress takes nothing: nobody is forgotten", code="store_busy")
            yield there
            self._drop(user)

    def _drop(self, user: str) -> None:
        """Know nothing of a user any more."""
        self.homes.forget(user)
        self._copies.pop(user, None)
        self._due.pop(user, None)
        self._unsent = {item for item in self._unsent if item[0] != user}
        self._claims = {item: lease for item, lease in self._claims.items() if item[0] != user}
        self.members.keep_homes()

    async def forget_at(self, member: Member, user: str, caller: str) -> tuple[int, bytes]:
        """Have a node forget a user, and take in that it has; returns its status and answer."""
        assert self.session is not None
        url, headers = f"{member.url}/v1/adapters/{user}", {ON_BEHALF: caller}
        async with self.session.delete(url, headers=headers) as answer:
            told = await answer.read()
        if answer.status in (200, 404):
            self.homes.forgotten.get(member.name, {}).pop(user, None)
            self.homes.changed = True
        return answer.status, told

    async def forget_before(self, member: Member) -> None:
        """Have a node that was away forget whom it still knows. Raises CarryFailed."""
        for user, caller in list(self.homes.forgotten.get(member.name, {}).items()):
            async with self._lock(user):
                # It may have been forgotten while this waited.
                if user not in self.homes.forgotten.get(member.name, {}):
                    continue
                status, _ = await self.forget_at(member, user, caller)
                if status not in (200, 404):
                    raise CarryFailed(f"it has not forgotten {user} yet: {status}")
        self.members.keep_homes()

    # -- asking --------------------------------------------------------------------------------------------------------

    def _lock(self, user: str) -> asyncio.Lock:
        return self._locks.setdefault(user, asyncio.Lock())

    @contextlib.asynccontextmanager
    async def _ask(
        self,
        method: str,
        member: Member,
        path: str,
        data: Any = None,
        timeout_s: float = _ASK_S,
        refused: tuple[int, ...] = (),
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask a node about leases. Raises CarryFailed for an error but those of `refused`, which the caller reads."""
        assert self.session is not None
        timeout, headers = aiohttp.ClientTimeout(total=timeout_s, sock_connect=2.0, sock_read=_ASK_S), {}
        if isinstance(data, (str, bytes)):
            headers["Content-Type"] = "application/json"
        asked = self.session.request(
            method, f"{member.url}/v1/leases/{path}", data=data, headers=headers, timeout=timeout
        )
        async with asked as answer:
            if answer.status != 200 and answer.status not in refused:
                raise CarryFailed(f"{member.name} answers {answer.status}: {(await answer.read())[:300].decode()}")
            yield answer


_TROUBLE = (CarryFailed, aiohttp.ClientError, OSError, TimeoutError)
