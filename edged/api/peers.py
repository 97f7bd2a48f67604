"""Who is at the other end of a connection: the kernel's word for it."""

from __future__ import annotations

import asyncio
import grp
import ipaddress
import os
import pwd
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_UCRED = struct.Struct("3i")
"""`struct ucred` of unix(7): pid, uid, gid."""
_KEPT_S = 30.0
"""For how long names and groups of a uid are believed."""
_MOST_KEPT = 1024


@dataclass(frozen=True, slots=True)
class Peer:
    """A process of this box. `name` is its account, "" where its uid has none; `gids` are the account's groups."""

    uid: int
    name: str
    gids: frozenset[int]

    def __str__(self) -> str:
        return f'peer "{self.name}" (uid {self.uid})' if self.name else f"peer of uid {self.uid}"


class Accounts:
    """Names and groups by uid, from the user database, remembered for a short time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[int, tuple[float, str, frozenset[int]]] = {}

    async def peer(self, uid: int, gid: int | None = None) -> Peer:
        """The account of a uid; `gid` is the process' own group, where the kernel told it."""
        now = self._clock()
        known = self._known.get(uid)
        if known is None or now - known[0] >= _KEPT_S:
            # The user database may be a server elsewhere.
            account = await asyncio.to_thread(_account, uid)
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            known = self._known[uid] = (now, *account)
        return Peer(uid, known[1], known[2] if gid is None else known[2] | {gid})


def _account(uid: int) -> tuple[str, frozenset[int]]:
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return "", frozenset()
    return entry.pw_name, frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid))


def uid_of(name: str) -> int | None:
    """The uid of an account; None when there is none."""
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def gid_of(name: str) -> int | None:
    """The gid of a group; None when there is none."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def unix_peer(connection: socket.socket) -> tuple[int, int]:
    """(uid, gid) that the process at the other end of a Unix socket had when it connected."""
    _, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return uid, gid


def loopback_uid(client: tuple[str, int], server: tuple[str, int], proc: Path = Path("/proc/net")) -> int | None:
    """The uid that owns the client's end of a TCP connection within this box; None when nobody can tell.

    `client` and `server` are the (address, port) of both ends as the server sees them. A socket that its process has
    closed belongs to nobody any more, and proc(5) shows it with uid 0 and inode 0: it is never taken for root's.
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
    """ADDRESS:PORT as proc(5) writes it: 32-bit words in the machine's byte order."""
    address = ipaddress.ip_address(end[0])
    packed = address.packed
    if isinstance(address, ipaddress.IPv4Address) and table == "tcp6":
        packed = ipaddress.IPv6Address(f"::ffff:{address}").packed
    words = struct.unpack(f">{len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(words)}I", packed)) + f":{end[1]:04X}"
