"""Authentication and authorization: a request's caller, by socket credentials or token, and its `[access]` rule."""

import asyncio
import contextlib
import grp
import hmac
import ipaddress
import json
import os
import pwd
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote
from weakref import WeakKeyDictionary

from aiohttp import web
from pydantic import BaseModel, Field

from edged.http.errors import ApiError
from edged.http.sockets import over_tcp
from edged.settings.access import API_TOKEN, NO_USER_NAME, SELF, USER_NAME, AccessRule, AccessSettings, Role, token_hash
from edged.store.jobs.jobs import NO_ADAPTERS, JobAdapters

ADMIN_GROUP = "edged"
ON_BEHALF = "X-Edged-Caller"
"""Header in which an ingress of a fleet, whose role is "fleet", names the caller that it asks for."""
_UCRED = struct.Struct("3i")
"""`struct ucred` of unix(7): pid, uid, gid."""
_KEPT_S = 30.0
"""Seconds for which the names and groups of a uid are cached."""
_MAX_KEPT = 1024
"""Uids in the cache."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A local process that connects. `name` is its account, "" where its uid has none; `gids` are its groups."""

    uid: int
    name: str
    gids: frozenset[int]

    def __str__(self) -> str:
        return f'peer "{self.name}" (uid {self.uid})' if self.name else f"peer of uid {self.uid}"


class Accounts:
    """A cache of names and groups by uid, filled from the user database; entries expire after `_KEPT_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[int, tuple[float, str, frozenset[int]]] = {}

    async def peer(self, uid: int, gid: int | None = None) -> Peer:
        """The account of a uid; `gid` is the process' own group, where the kernel reports it."""
        now = self._clock()
        known = self._known.get(uid)
        if known is None or now - known[0] >= _KEPT_S:
            # In a thread, since the user database may be a remote server.
            account = await asyncio.to_thread(_account, uid)
            if len(self._known) >= _MAX_KEPT:
                self._known.clear()
            known = self._known[uid] = (now, *account)
        return Peer(uid, known[1], known[2] if gid is None else known[2] | {gid})


def _account(uid: int) -> tuple[str, frozenset[int]]:
    with contextlib.suppress(KeyError):
        entry = pwd.getpwuid(uid)
        return entry.pw_name, frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return "", frozenset()


def id_of(kind: str, name: str) -> int | None:
    """The uid of an account (kind "user") or the gid of a group (kind "group"); None when this box has none."""
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(name).pw_uid if kind == "user" else grp.getgrnam(name).gr_gid
    return None


def unix_peer(connection: socket.socket) -> tuple[int, int]:
    """The (uid, gid) that the process at the other end of a Unix socket had when it connected."""
    _, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return uid, gid


def loopback_uid(client: tuple[str, int], server: tuple[str, int], proc: Path = Path("/proc/net")) -> int | None:
    """The uid that owns the client's end of a TCP connection within this box; None when it cannot be found.

    `client` and `server` are the (address, port) of both ends as the server sees them. A socket that its process has
    closed has no owner any more, and proc(5) shows it with uid 0 and inode 0: it is never taken for root's.
    """
    for table in ("tcp", "tcp6"):
        wanted = _hexadecimal(client, table), _hexadecimal(server, table)
        try:
            lines = (proc / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if (fields[1], fields[2]) == wanted:
                return int(fields[7]) if fields[9] != "0" else None
    return None


def _hexadecimal(end: tuple[str, int], table: str) -> str:
    """An (address, port) as proc(5) writes it, ADDRESS:PORT in 32-bit words of the machine's byte order."""
    address = ipaddress.ip_address(end[0])
    packed = address.packed
    if isinstance(address, ipaddress.IPv4Address) and table == "tcp6":
        packed = ipaddress.IPv6Address(f"::ffff:{address}").packed
    words = struct.unpack(f">{len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(words)}I", packed)) + f":{end[1]:04X}"


class AccessError(ValueError):
    """Raised for a rule that names an account or a group that this box does not have."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request and its rights.

    `users` are the users that it may act for: names, prefixes of names with "*", or "*"; `rule` names the setting that
    grants it.
    """

    label: str
    """The caller's name in messages: `peer "ann" (uid 1000)`."""
    name: str
    """The account, or the token's name; "" for an account without one."""
    tenant: str
    """Tenant of requests without a user: the account's name (`uid:NUMBER` if it is no valid user) or `token:NAME`."""
    roles: frozenset[Role]
    users: tuple[str, ...]
    rule: str
    job_adapters: JobAdapters = NO_ADAPTERS
    """Adapters of all fine-tuning jobs; those that `tenant` owns are the caller's."""
    named: tuple[str, ...] = ()
    """Users that [access] names for any caller: names, and patterns but for "*"."""
    by_fleet: bool = False
    """Whether an ingress of a fleet asks in the caller's name."""
    identity: str = "field"
    """Where a completion's user comes from: the request's field `user`, "header:NAME" or "name:USER"."""

    def may(self, role: Role) -> bool:
        """Whether the caller has a role; admins have all."""
        return role in self.roles or "admin" in self.roles

    def speaks_for(self, user: str) -> bool:
        """Whether the caller may act as a user and read that user's data; a checkpoint goes with its job's adapter.

        A job's adapter is either its owner's alone, which "*" does not stand for, or [access] names it and decides.
        """
        if self.may("admin") or any(known != "*" and matches_user(known, user) for known in self.users):
            return True
        if user in self.job_adapters.checkpoints:
            return self.speaks_for(user.rpartition("@")[0])
        owner = self.holder(user)
        return owner == self.tenant if owner else "*" in self.users

    def holder(self, user: str) -> str:
        """Return the owner of the fine-tuning job whose adapter has a user's name; "" where [access] decides on it."""
        adapter = user.rpartition("@")[0] if user in self.job_adapters.checkpoints else user
        decides = any(matches_user(known, name) for known in self.named for name in (user, adapter))
        return "" if decides else self.job_adapters.owners.get(adapter, "")

    def forwarded(self) -> str:
        """Return the caller as the header `ON_BEHALF` names it to a node of a fleet."""
        roles = [role for role in ("metrics", "train", "use") if self.may(role)]
        users = ["*"] if self.may("admin") else list(self.users)
        return json.dumps({"name": self.tenant, "roles": roles, "users": users})

    def on_behalf(self, header: str) -> "Caller":
        """Return the caller whom an ingress names in `ON_BEHALF`: never an admin, never with more than this one has.

        Raises ApiError: 403 without the role "fleet", 400 for a header that names no caller.
        """
        self.demand_role("fleet")
        try:
            told = _OnBehalf.model_validate_json(header)
        except ValueError:
            message = f"{ON_BEHALF} is no JSON object with name, roles and users: an ingress of this version sends one"
            raise ApiError(400, message, ON_BEHALF, "bad_caller") from None
        roles = frozenset[Role](role for role in told.roles if self.may(role))
        users = tuple(user for user in told.users if any(_covers(known, user) for known in self.users))
        label, tenant = f'"{told.name}" through {self.label}', f"{self.tenant}/{told.name}"
        return replace(self, label=label, name=told.name, tenant=tenant, roles=roles, users=users, by_fleet=True)

    def demand_fleet(self, field: str) -> None:
        """Raise ApiError (403) for a field that only an ingress of a fleet may send."""
        if not self.by_fleet:
            message = f'"{field}" is for an ingress of a fleet, and {self.label} is none ({self.rule}): leave it out'
            raise ApiError(403, message, field, "forbidden_role")

    def sees(self, user: str) -> bool:
        """Whether the caller may know how a user, or another tenant, is served: itself, and those it speaks for."""
        return self.may("admin") or user == self.tenant or self.speaks_for(user)

    def fairness_key(self, user: str | None, named: Collection[str] = ()) -> str:
        """Return the name under which a user's requests take turns with others.

        It is the user's own where an admin asks, or where the user is granted by name or `named` in the settings. Names
        that a pattern grants could be invented: they share the pattern's turn, those of "*" the caller's.
        """
        if user is None:
            return self.tenant
        if self.may("admin") or user in self.users or user in named:
            return user
        return next((known for known in self.users if known != "*" and matches_user(known, user)), self.tenant)

    def user_of(self, headers: Mapping[str, str], field: str | None) -> str | None:
        """Return the user of a completion, whose request names `field`.

        Raises ApiError (400) for a header that names no user, or is there twice: a proxy may have added its own.
        """
        kind, _, name = self.identity.partition(":")
        if kind == "field":
            return field
        if kind == "name":
            return name
        values = [value for key, value in headers.items() if key.lower() == name.lower()]
        if len(values) > 1:
            raise ApiError(400, f"the header {name} is there {len(values)} times: send it once", name, "bad_user")
        user = unquote(values[0]).strip() if values else ""
        if user and not USER_NAME.fullmatch(user):
            raise ApiError(400, f"the header {name}: {NO_USER_NAME.format(user[:80])}", name, "bad_user")
        return user or None

    def demand_role(self, role: Role) -> None:
        """Raise ApiError (403) unless the caller has the role."""
        if not self.may(role):
            has = ", ".join(sorted(self.roles)) or "no role"
            message = f'this needs the role "{role}", and {self.label} has {has} ({self.rule})'
            raise ApiError(403, message, code="forbidden_role")

    def demand_user(self, *users: str | None) -> None:
        """Raise ApiError (403) for the first user that the caller may not speak for, whether it exists or not."""
        for user in users:
            if user is not None and not self.speaks_for(user):
                if "*" in self.users:
                    self.demand_person(user)
                known = ", ".join(self.users) or "nobody"
                message = f'user "{user}" is not for {self.label}, who may speak for {known} ({self.rule})'
                raise ApiError(403, message, code="forbidden_user", user=user)

    def demand_person(self, user: str | None) -> None:
        """Raise ApiError (403) where a user has the name of an adapter of another's job, which would learn from them.

        An admin may use that adapter, as a model, and yet take nobody for it.
        """
        if user is not None and self.holder(user) not in ("", self.tenant):
            told = f'is the name of an adapter of a fine-tuning job of "{self.holder(user)}"'
            way_out = "give the user another name, have the adapter forgotten, or name it in [access]"
            raise ApiError(403, f'"{user}" {told}: {way_out}', code="forbidden_user", user=user)


def matches_user(known: str, user: str) -> bool:
    """Whether a user is the `known` one, or begins with it where it ends with "*"."""
    return user.startswith(known[:-1]) if known.endswith("*") else user == known


def _covers(known: str, user: str) -> bool:
    """Whether the grant `known` holds for all that a name, or a pattern with "*", stands for."""
    return matches_user(known, user.removesuffix("*")) if known.endswith("*") else known == user


class _OnBehalf(BaseModel):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:@/-]{1,160}$")]
    roles: list[Literal["use", "train", "metrics"]]
    users: list[str]


class Access:
    """The `[access]` settings, resolved to uids, gids and hashes; finds the caller of each request."""

    def __init__(self, settings: AccessSettings, admin_token: str = "") -> None:
        """`admin_token` is api.token. Raises AccessError for a rule whose account or group does not exist."""
        self._operator: list[tuple[str, Caller]] = []
        if admin_token:
            self._operator = [(token_hash(admin_token), _holder(API_TOKEN, ["admin"], (), f"{API_TOKEN} is admin"))]
        self._accounts = Accounts()
        self._admin_gid = id_of("group", ADMIN_GROUP)
        self._tcp_uids: WeakKeyDictionary[asyncio.BaseTransport, int | None] = WeakKeyDictionary()
        self.configure(settings)

    def configure(self, settings: AccessSettings) -> None:
        """Replace the rules and tokens from the next request on. Raises AccessError and then changes nothing.

        api.token cannot change at run time.
        """
        self._rules = [_Rule(rule, number) for number, rule in enumerate(settings.rules)]
        self._tokens = [
            (
                token.sha256,
                _holder(token.name, token.roles, token.users, f'access.tokens, name = "{token.name}"', token.identity),
            )
            for token in settings.tokens
        ]
        self._named = tuple({user for user in settings.granted_users if user != "*"})

    @property
    def has_tokens(self) -> bool:
        """Whether TCP callers are identified by tokens."""
        return bool(self._tokens or self._operator)

    async def caller(self, request: web.Request, job_adapters: JobAdapters = NO_ADAPTERS) -> Caller:
        """Return the sender of a request, or for whom an ingress of a fleet sends it.

        Raises ApiError: 401 where the sender cannot be identified, 403 where it may not speak for another caller.
        """
        found = await self._identified(request, job_adapters)
        if ON_BEHALF in request.headers:
            found = found.on_behalf(request.headers[ON_BEHALF])
        return replace(found, job_adapters=job_adapters, named=self._named)

    async def _identified(self, request: web.Request, job_adapters: JobAdapters) -> Caller:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        if not over_tcp(request):
            uid, gid = unix_peer(transport.get_extra_info("socket"))
            return self.of_peer(await self._accounts.peer(uid, gid), job_adapters)
        if self.has_tokens:
            return self.of_token(request.headers.get("Authorization", ""))
        if transport not in self._tcp_uids:
            ends = transport.get_extra_info("peername")[:2], transport.get_extra_info("sockname")[:2]
            self._tcp_uids[transport] = await asyncio.to_thread(loopback_uid, *ends)
        owner = self._tcp_uids[transport]
        if owner is None:
            message = "nobody can tell which account of this box connects: use the Unix socket, or make a token"
            raise ApiError(401, message, code="invalid_api_key")
        return self.of_peer(await self._accounts.peer(owner), job_adapters)

    def of_peer(self, peer: Peer, job_adapters: JobAdapters = NO_ADAPTERS) -> Caller:
        """Return the caller that a local account is, by the first rule that fits it.

        An account that came after a job of another's had made an adapter of its name is not that adapter's user.
        """
        owner = job_adapters.owner(peer.name) or peer.name
        own = peer.name if USER_NAME.fullmatch(peer.name) and owner == peer.name else ""
        way_out = f'have that forgotten, or write users = ["{peer.name}"] in a rule of this account'
        told = f'; its name is that of an adapter of a fine-tuning job of "{owner}": {way_out}'
        taken = told if owner != peer.name else ""
        account = partial(Caller, str(peer), peer.name, own or f"uid:{peer.uid}")
        if peer.uid in (0, os.geteuid()):
            who = "root" if peer.uid == 0 else "the daemon's own account"
            return account(frozenset({"admin"}), ("*",), f"{who} is admin")
        for rule in self._rules:
            if rule.fits(peer):
                users = tuple(own if user == SELF else user for user in rule.users if user != SELF or own)
                told = rule.where + taken * (SELF in rule.users)
                return account(rule.roles, users, told, identity=rule.identity)
        if self._admin_gid in peer.gids:
            return account(frozenset({"admin"}), ("*",), f'members of group "{ADMIN_GROUP}" are admins')
        return account(frozenset({"use", "train"}), (own,) if own else (), "no rule of [access] names it" + taken)

    def of_token(self, shown: str) -> Caller:
        """Return the caller that holds a token; `shown` is the Authorization header. Raises ApiError (401)."""
        kind, _, secret = shown.partition(" ")
        digest = token_hash(secret.strip()) if kind.lower() == "bearer" else ""
        # Every token is compared, each in constant time, so that timing reveals nothing about any of them.
        known = [who for sha256, who in (*self._operator, *self._tokens) if hmac.compare_digest(sha256, digest)]
        if not known:
            message = 'send "Authorization: Bearer TOKEN" with a token that [access] knows (`edged token new`)'
            raise ApiError(401, message, code="invalid_api_key")
        return known[0]


class _Rule:
    """One of `access.rules`, its accounts and groups resolved to uids and gids."""

    def __init__(self, rule: AccessRule, number: int) -> None:
        self.where = f"access.rules[{number}]"
        self.roles = frozenset(rule.roles)
        self.users = ["*"] if "admin" in rule.roles else rule.users
        self.identity = rule.identity
        self._uids, self._gids = set[int](), set[int]()
        for peer in rule.peers:
            kind, _, name = peer.partition(":")
            found = int(name) if kind in ("uid", "gid") else id_of(kind, name)
            if found is None:
                way_out = f'create it, correct the name, or write "{"uid" if kind == "user" else "gid"}:NUMBER"'
                raise AccessError(f'{self.where}.peers names "{peer}", and this box has no such {kind}: {way_out}')
            (self._uids if kind in ("user", "uid") else self._gids).add(found)

    def fits(self, peer: Peer) -> bool:
        return peer.uid in self._uids or not self._gids.isdisjoint(peer.gids)


def _holder(name: str, roles: Sequence[Role], users: Sequence[str], rule: str, identity: str = "field") -> Caller:
    """The caller that holds a token."""
    spoken_for = ("*",) if "admin" in roles else tuple(users)
    return Caller(f'token "{name}"', name, f"token:{name}", frozenset(roles), spoken_for, rule, identity=identity)


CALLER: str = "caller"
"""The key under which a request keeps its Caller."""


def caller_of(request: web.Request) -> Caller:
    """The caller of a request that passed authentication."""
    caller: Caller = request[CALLER]
    return caller
