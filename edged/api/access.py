"""Who calls, and what they may do: peers by their uid, TCP callers by their token, as `[access]` says."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from aiohttp import web

from edged.api.errors import ApiError
from edged.api.peers import Accounts, Peer, gid_of, loopback_uid, uid_of, unix_peer
from edged.api.tokens import token_hash
from edged.settings.access import API_TOKEN, SELF, USER_NAME, AccessRule, AccessSettings, AccessToken, Role

ADMIN_GROUP = "edged"
_NO_RULE = "no rule of [access] names it, so it may speak for itself"


class AccessError(ValueError):
    """A rule names an account or a group that this box does not have."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. `users` are names, beginnings of names with "*", or "*"; `rule` says where that stands."""

    label: str
    """As messages name the caller: `peer "ann" (uid 1000)`."""
    name: str
    """The account, or the token's name; "" for an account without one."""
    tenant: str
    """Whose share a request is that names no user: the account itself where that is a user, else nobody's name."""
    roles: frozenset[Role]
    users: tuple[str, ...]
    rule: str

    def may(self, role: Role) -> bool:
        """Whether the caller has a role; admins have all."""
        return role in self.roles or "admin" in self.roles

    def speaks_for(self, user: str) -> bool:
        """Whether the caller may act as a user, and read what belongs to that one."""
        return any(user.startswith(known[:-1]) if known.endswith("*") else user == known for known in self.users)

    def demand_role(self, role: Role) -> None:
        """Raises ApiError (403) unless the caller has the role."""
        if not self.may(role):
            has = ", ".join(sorted(self.roles)) or "no role"
            raise forbidden(f'this needs the role "{role}", and {self.label} has {has} ({self.rule})', "forbidden_role")

    def demand_user(self, *users: str | None) -> None:
        """Raises ApiError (403) for the first user that the caller may not speak for, whether it exists or not."""
        for user in users:
            if user is not None and not self.speaks_for(user):
                known = ", ".join(self.users) or "nobody"
                raise forbidden(
                    f'user "{user}" is not for {self.label}, who may speak for {known} ({self.rule})',
                    "forbidden_user",
                    user,
                )


class Access:
    """Finds the caller of a request; the settings are resolved to uids, gids and hashes once."""

    def __init__(self, settings: AccessSettings, admin_token: str = "") -> None:
        """`admin_token` is api.token. Raises AccessError for a rule whose account or group does not exist."""
        self._rules = [_Rule(rule, number) for number, rule in enumerate(settings.rules)]
        self._tokens = settings.tokens
        self._operator_sha256 = token_hash(admin_token) if admin_token else ""
        self._accounts = Accounts()
        self._admin_gid = gid_of(ADMIN_GROUP)
        self._tcp_uids: WeakKeyDictionary[asyncio.BaseTransport, int | None] = WeakKeyDictionary()

    def configure(self, settings: AccessSettings) -> None:
        """Go by other rules and tokens from the next request on. Raises AccessError, and nothing has changed then."""
        other = Access(settings)
        # api.token is not among those that can change.
        self._rules, self._tokens = other._rules, other._tokens

    @property
    def has_tokens(self) -> bool:
        """Whether TCP callers are known by tokens."""
        return bool(self._tokens or self._operator_sha256)

    async def caller(self, request: web.Request) -> Caller:
        """Who sent a request. Raises ApiError (401) when nobody can tell."""
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        if not over_tcp(request):
            uid, gid = unix_peer(transport.get_extra_info("socket"))
            return self.of_peer(await self._accounts.peer(uid, gid))
        if self.has_tokens:
            return self.of_token(request.headers.get("Authorization", ""))
        if transport not in self._tcp_uids:
            ends = transport.get_extra_info("peername")[:2], transport.get_extra_info("sockname")[:2]
            self._tcp_uids[transport] = await asyncio.to_thread(loopback_uid, *ends)
        owner = self._tcp_uids[transport]
        if owner is None:
            raise _unknown("nobody can tell which account of this box connects: use the Unix socket, or make a token")
        return self.of_peer(await self._accounts.peer(owner))

    def of_peer(self, peer: Peer) -> Caller:
        """What an account of this box may do."""
        own = peer.name if USER_NAME.fullmatch(peer.name) else ""
        label, tenant = str(peer), own or f"uid:{peer.uid}"
        if peer.uid in (0, os.geteuid()):
            who = "root" if peer.uid == 0 else "the daemon's own account"
            return Caller(label, peer.name, tenant, frozenset({"admin"}), ("*",), f"{who} is admin")
        for rule in self._rules:
            if rule.fits(peer):
                users = tuple(own if user == SELF else user for user in rule.users if user != SELF or own)
                return Caller(label, peer.name, tenant, rule.roles, users, rule.where)
        if self._admin_gid in peer.gids:
            return Caller(
                label, peer.name, tenant, frozenset({"admin"}), ("*",), f'members of group "{ADMIN_GROUP}" are admins'
            )
        users = (own,) if own else ()
        return Caller(label, peer.name, tenant, frozenset({"use", "train"}), users, _NO_RULE)

    def of_token(self, shown: str) -> Caller:
        """What the holder of a token may do; `shown` is the Authorization header. Raises ApiError (401)."""
        kind, _, secret = shown.partition(" ")
        digest = token_hash(secret.strip()) if kind.lower() == "bearer" else ""
        # All are looked at, and each in constant time: how long it takes says nothing about any of them.
        known = [token for token in self._tokens if hmac.compare_digest(token.sha256, digest)]
        if digest and hmac.compare_digest(self._operator_sha256, digest):
            return _OPERATOR
        if not known:
            raise _unknown('send "Authorization: Bearer TOKEN" with a token that [access] knows (`edged token new`)')
        return _holder(known[0])


class _Rule:
    """One of `access.rules`, in numbers."""

    def __init__(self, rule: AccessRule, number: int) -> None:
        self.where = f"access.rules[{number}]"
        self.roles = frozenset(rule.roles)
        self.users = ["*"] if "admin" in rule.roles else rule.users
        self._uids, self._gids = set[int](), set[int]()
        for peer in rule.peers:
            kind, _, name = peer.partition(":")
            found = int(name) if kind in ("uid", "gid") else (uid_of if kind == "user" else gid_of)(name)
            if found is None:
                raise AccessError(
                    f'{self.where}.peers names "{peer}", and this box has no such {kind}: create it, correct the name, '
                    f'or write "{"uid" if kind == "user" else "gid"}:NUMBER"'
                )
            (self._uids if kind in ("user", "uid") else self._gids).add(found)

    def fits(self, peer: Peer) -> bool:
        return peer.uid in self._uids or not self._gids.isdisjoint(peer.gids)


_OPERATOR = Caller(
    f'token "{API_TOKEN}"', API_TOKEN, f"token:{API_TOKEN}", frozenset({"admin"}), ("*",), f"{API_TOKEN} is admin"
)
"""The holder of api.token."""


def _holder(token: AccessToken) -> Caller:
    users: Sequence[str] = ("*",) if "admin" in token.roles else token.users
    where = f'access.tokens, name = "{token.name}"'
    return Caller(
        f'token "{token.name}"', token.name, f"token:{token.name}", frozenset(token.roles), tuple(users), where
    )


def over_tcp(request: web.Request) -> bool:
    """Whether a request came over TCP."""
    connection = request.transport.get_extra_info("socket") if request.transport else None
    return connection is None or connection.family != socket.AF_UNIX


CALLER: str = "caller"
"""Where a request keeps its Caller."""


def caller_of(request: web.Request) -> Caller:
    """Who sent a request."""
    caller: Caller = request[CALLER]
    return caller


def is_loopback(name: str) -> bool:
    """Whether a host's name is this box's own."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def forbidden(message: str, code: str, user: str | None = None) -> ApiError:
    """The refusal of a caller who may not; `user` is for whom it wanted to speak."""
    return ApiError(403, message, code=code, user=user)


def _unknown(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")
