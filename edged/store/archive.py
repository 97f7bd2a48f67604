"""Tar archives that are made while they are sent, so that they take neither room on the disk nor memory."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from edged.store.timestamps import utc_now

CHUNK_BYTES = 1 << 20
END = bytes(2 * tarfile.BLOCKSIZE)


def header(name: str, size: int) -> bytes:
    """What stands before a file of `size` bytes."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o600, int(utc_now().timestamp())
    return info.tobuf(tarfile.PAX_FORMAT)


def padding(size: int) -> bytes:
    """What stands behind it."""
    return bytes(-size % tarfile.BLOCKSIZE)


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    """A file's bytes. Raises OSError."""
    return iter(partial(file.read, CHUNK_BYTES), b"")


def archive(files: Iterable[IO[bytes]]) -> Iterator[bytes]:
    """Open files one after the other, each under its own name without a folder. Raises OSError."""
    for file in files:
        size = os.fstat(file.fileno()).st_size
        yield header(Path(file.name).name, size)
        yield from chunks(file)
        yield padding(size)
    yield END
