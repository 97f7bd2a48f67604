"""The installed service: its unit files, and the account that it runs as."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SERVICE, SOCKET = "edged.service", "edged.socket"
_FOLDERS = (
    *("etc/systemd/system", "run/systemd/system", "usr/local/lib/systemd/system"),
    *("usr/lib/systemd/system", "lib/systemd/system"),
)


def unit_file(root: Path, name: str) -> Path | None:
    """The unit file that systemd takes; None where there is none."""
    return next((path for folder in _FOLDERS if (path := root / folder / name).is_file()), None)


@dataclass(frozen=True, slots=True)
class Account:
    """One of the user database."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    """All of them."""


def service_account(root: Path) -> Account | None:
    """Whom the service's unit names as its user; None without a unit, and where the account is root or not there."""
    unit = unit_file(root, SERVICE)
    lines = unit.read_text(errors="replace").splitlines() if unit is not None else []
    names = [line.partition("=")[2].strip() for line in lines if line.startswith("User=")]
    try:
        entry = pwd.getpwnam(names[-1] if names else "root")
    except KeyError:
        return None
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, groups) if entry.pw_uid != 0 else None


@contextmanager
def in_place_of(account: Account | None) -> Iterator[None]:
    """With the account's rights to files and sockets, which only root can take; None: with one's own.

    Root itself may write everywhere: what it tries says nothing of the service. All threads change with it.
    """
    if account is None:
        yield
        return
    group, groups = os.getegid(), os.getgroups()
    os.setgroups(account.groups)
    os.setegid(account.gid)
    os.seteuid(account.uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)
