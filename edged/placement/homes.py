"""Homes: the node where a user is taught, the one writer of that user's adapter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any


def rendezvous(key: str, names: Iterable[str]) -> list[str]:
    """Rank nodes for a key by the highest random weight (Thaler and Ravishankar, 1998).

    A node that is added or removed moves no key between the others. The weights are SHA-256's, the same on every box.
    """
    return sorted(names, key=lambda name: hashlib.sha256(f"{key}\0{name}".encode()).digest())


Grant = tuple[int, str]
"""(epoch, node) of a home that was granted: of two of one user the larger one holds."""


class Homes:
    """The home of each user: where it was granted, else where the settings say, else where an adapter of the name is or
    was, else by hash.

    The hash is over all nodes of the fleet, whether they are there or not: a node that is away keeps its users.
    """

    def __init__(self, names: Iterable[str], named: Mapping[str, str]) -> None:
        """`named` has the homes of users that the settings fix."""
        self._known: dict[str, dict[str, int]] = {}
        self.remembered: dict[str, str] = {}
        """The home of each user that is or was taught, also where its node has not told of it yet."""
        self.leases: dict[str, Grant] = {}
        """Homes that were granted: such a user has, or had, another home before."""
        self.behind: dict[str, str] = {}
        """Users who were granted a home without all that their former one has, and that former one."""
        self.forgotten: dict[str, dict[str, str]] = {}
        """By node, the users whom it is still to forget, and who asked for that, as `Caller.forwarded` tells it."""
        self.changed = False
        """Whether anything is other than it was when this was last set."""
        self.configure(names, named)

    @property
    def state(self) -> dict[str, Any]:
        """State that a restart must not change, as JSON keeps it."""
        return {name: getattr(self, name) for name in ("remembered", "leases", "behind", "forgotten")}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take `state` in. Raises ValueError, TypeError or AttributeError for what is none."""
        self.leases = {user: (int(epoch), str(node)) for user, (epoch, node) in state.get("leases", {}).items()}
        self.remembered, self.behind = dict(state.get("remembered", {})), dict(state.get("behind", {}))
        self.forgotten = {node: dict(users) for node, users in state.get("forgotten", {}).items()}

    def configure(self, names: Iterable[str], named: Mapping[str, str]) -> None:
        """Take other nodes and homes; what nodes that stay were known to have is still known."""
        self._names, self._named = tuple(names), dict(named)
        for gone in {node for nodes in self._known.values() for node in nodes} - {*self._names}:
            self.learn(gone, {})

    def learn(self, node: str, adapters: Mapping[str, int]) -> None:
        """Take in which adapters a node has, with their versions; others that it was known to have are gone."""
        for name in [name for name, nodes in self._known.items() if node in nodes and name not in adapters]:
            del self._known[name][node]
            if not self._known[name]:
                del self._known[name]
        for name in [name for name, home in self.remembered.items() if home == node and name not in adapters]:
            self._remember(name, self._newest(name))
        for name, version in adapters.items():
            self.note(node, name, version)

    def note(self, node: str, adapter: str, version: int) -> None:
        """Take in a version of an adapter at a node."""
        self._known.setdefault(adapter, {})[node] = version
        self._remember(adapter, self._newest(adapter))

    def grant(self, user: str, lease: Grant) -> None:
        """Take in a home that was granted, unless a larger lease is known."""
        if lease > self.leases.get(user, (0, "")):
            self.leases[user], self.changed = lease, True
            self._remember(user, lease[1])

    def version(self, user: str, node: str) -> int:
        """Return the version of a user that a node has told of, as its writer; 0 for none."""
        return self._known.get(user, {}).get(node, 0)

    def newest(self, user: str) -> int:
        """Return the greatest version that nodes have told of; 0 for none."""
        return max(self._known.get(user, {}).values(), default=0)

    def forget(self, user: str) -> None:
        """Forget a user, who was forgotten where he was taught."""
        for known in (self._known, self.leases, self.behind):
            known.pop(user, None)
        self._remember(user, None)

    def _remember(self, user: str, home: str | None) -> None:
        if user in self.leases:
            home = self.leases[user][1]
        if self.remembered.get(user) != home:
            self.changed = True
            self.remembered.pop(user, None)
            if home is not None:
                self.remembered[user] = home

    def _newest(self, user: str) -> str | None:
        """The node with a user's newest version, of those that have told of one."""
        known = self._known.get(user)
        return min(known, key=lambda node: (-known[node], node)) if known else None

    def of(self, user: str) -> str:
        """Return a user's home. Of several nodes that have the adapter it is the one with the newest version."""
        if user in self.leases and self.leases[user][1] in self._names:
            return self.leases[user][1]
        if user in self._named:
            return self._named[user]
        home = self._newest(user) or self.remembered.get(user)
        return home if home in self._names else rendezvous(user, self._names)[0]

    def taught(self) -> dict[str, str]:
        """Return the home of each user that is known by an adapter or named."""
        return {user: self.of(user) for user in sorted({*self._known, *self._named, *self.remembered})}
