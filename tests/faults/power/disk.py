"""A disk that forgets what was not synced: folders as they can be after the power failed, from a log of system calls.

`disklog.c`, preloaded into a process, writes down what it does below a folder. What the disk may have kept of that at
any moment is narrower than POSIX allows, and wider than any one file system: a file's content is durable when the file
was synced, and an entry of a folder when the folder was. Of what came later each block of a file may be there or not;
of the changes of a folder, some of the first ones are.
"""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

_RECORD = struct.Struct("<IIqQQQq")
_BLOCK = 4096


class Call(IntEnum):
    """As `disklog.c` numbers them."""

    CREATE = 1
    WRITE = 2
    TRUNCATE = 3
    FSYNC = 4
    RENAME = 5
    UNLINK = 6
    MKDIR = 7
    SEEN = 8
    UNKNOWN = 9


@dataclass(frozen=True, slots=True)
class Record:
    """One call that has ended. Names are of the entry in the folder `parent`; a rename has two, and two parents."""

    call: Call
    at_s: float
    """On the monotonic clock."""
    node: int
    parent: int
    other: int
    offset: int
    payload: bytes

    @property
    def name(self) -> str:
        """The entry's name; a rename's former one."""
        return self.payload.decode().partition("/")[0]


def build_library(folder: Path, name: str = "disklog") -> Path:
    """The library to preload, of a file in C beside this one."""
    library = folder / f"{name}.so"
    source = Path(__file__).with_name(f"{name}.c")
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)
    return library


def read_log(file: Path) -> list[Record]:
    """All whole records of a log. ValueError where it has a call that is not followed."""
    data, at, records = file.read_bytes(), 0, []
    while at + _RECORD.size <= len(data):
        kind, length, nanoseconds, node, parent, other, offset = _RECORD.unpack_from(data, at)
        payload = data[at + _RECORD.size : at + _RECORD.size + length]
        if len(payload) < length:
            break
        if kind == Call.UNKNOWN:
            raise ValueError(f"the log has a call that is not followed: {payload.decode()}")
        records.append(Record(Call(kind), nanoseconds / 1e9, node, parent, other, offset, payload))
        at += _RECORD.size + length
    return records


@dataclass(slots=True, eq=False)
class _File:
    synced: bytearray = field(default_factory=bytearray)
    now: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """(offset, data) of writes since the latest sync; (size, None) of truncations."""

    def change(self, offset: int, data: bytes | None) -> None:
        self.pending.append((offset, data))
        _change(self.now, offset, data)

    def sync(self) -> None:
        self.synced, self.pending = bytearray(self.now), []

    def kept(self, chance: random.Random) -> bytearray:
        content, share = bytearray(self.synced), chance.choice((0.0, 0.5, 1.0))
        for offset, data in self.pending:
            if data is None:
                if chance.random() < share:
                    _change(content, offset, None)
                continue
            for first in range(0, len(data), _BLOCK):
                if chance.random() < share:
                    _change(content, offset + first, data[first : first + _BLOCK])
        return content


def _change(content: bytearray, offset: int, data: bytes | None) -> None:
    end = offset if data is None else offset + len(data)
    if end > len(content):
        content.extend(bytes(end - len(content)))
    if data is None:
        del content[offset:]
    else:
        content[offset:end] = data


@dataclass(slots=True, eq=False)
class _Folder:
    synced: dict[str, _File | _Folder] = field(default_factory=dict)
    now: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[Callable[[dict[str, _File | _Folder]], object]] = field(default_factory=list)

    def change(self, change: Callable[[dict[str, _File | _Folder]], object]) -> None:
        self.pending.append(change)
        change(self.now)

    def sync(self) -> None:
        self.synced, self.pending = dict(self.now), []

    def kept(self, chance: random.Random) -> dict[str, _File | _Folder]:
        entries = dict(self.synced)
        for change in self.pending[: chance.randint(0, len(self.pending))]:
            change(entries)
        return entries


class Disk:
    """The folder `root` while a log is played; it must have been empty, and synced, when the log began."""

    def __init__(self, root_node: int) -> None:
        self._root = _Folder()
        self._nodes: dict[int, _File | _Folder] = {root_node: self._root}

    def play(self, record: Record) -> None:
        """Take in the next call."""
        call, name = record.call, record.name if record.call in _NAMED else ""
        if call in (Call.CREATE, Call.MKDIR):
            made: _File | _Folder = _File() if call is Call.CREATE else _Folder()
            self._nodes[record.node] = made
            self._folder(record.parent).change(lambda entries: entries.__setitem__(name, made))
        elif call is Call.UNLINK:
            self._folder(record.parent).change(lambda entries: entries.pop(name, None))
        elif call is Call.RENAME:
            new, moved = record.payload.decode().partition("/")[2], self._nodes[record.node]
            if record.other != record.parent:
                self._folder(record.other).change(lambda entries: entries.__setitem__(new, moved))
                self._folder(record.parent).change(lambda entries: entries.pop(name, None))
            else:
                self._rename(record.parent, name, new, moved)
        elif call is Call.SEEN:
            node, entries = self._nodes.get(record.node), self._folder(record.parent).now
            old = next((known for known, entry in entries.items() if entry is node), None)
            if node is not None and old not in (None, name):
                self._rename(record.parent, old, name, node)
        elif call is Call.FSYNC:
            self._nodes[record.node].sync()
        else:
            file = self._nodes[record.node]
            assert isinstance(file, _File)
            file.change(record.offset, record.payload if call is Call.WRITE else None)

    def _rename(self, folder: int, old: str, new: str, moved: _File | _Folder) -> None:
        def rename(entries: dict[str, _File | _Folder]) -> None:
            entries.pop(old, None)
            entries[new] = moved

        self._folder(folder).change(rename)

    def _folder(self, node: int) -> _Folder:
        folder = self._nodes[node]
        assert isinstance(folder, _Folder)
        return folder

    def write_now(self, target: Path) -> None:
        """The folder as the process saw it."""
        _write(self._root, target, lambda folder: folder.now, lambda file: file.now)

    def write_kept(self, target: Path, chance: random.Random) -> None:
        """The folder as the disk may have it when the power fails now."""
        _write(self._root, target, lambda folder: folder.kept(chance), lambda file: file.kept(chance))


_NAMED = (Call.CREATE, Call.MKDIR, Call.UNLINK, Call.RENAME, Call.SEEN)


def _write(
    folder: _Folder,
    target: Path,
    entries: Callable[[_Folder], dict[str, _File | _Folder]],
    content: Callable[[_File], bytearray],
) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name, entry in entries(folder).items():
        if isinstance(entry, _Folder):
            _write(entry, target / name, entries, content)
        elif not name.endswith("-shm"):
            # Memory that processes share: it is made anew when nobody has the database open.
            (target / name).write_bytes(content(entry))


def paths_of(records: list[Record], root_node: int) -> Iterator[str]:
    """For each record, the path of what it is about at that moment, from the root."""
    names = {root_node: ""}
    for record in records:
        if record.call in (Call.CREATE, Call.MKDIR, Call.SEEN) and record.parent in names:
            names[record.node] = f"{names[record.parent]}/{record.name}"
        elif record.call is Call.RENAME:
            old = names[record.node]
            new = f"{names[record.other]}/{record.payload.decode().partition('/')[2]}"
            names |= {
                n: new + path[len(old) :] for n, path in names.items() if path == old or path.startswith(old + "/")
            }
        yield names.get(record.node, "?")
