"""Tar archives that are made while they are sent, so that they take neither room on the disk nor memory."""

import hashlib
import os
import tarfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from edged.store.timestamps import utc_now

CHUNK_BYTES = 1 << 20
END = bytes(2 * tarfile.BLOCKSIZE)


class Content:
    """A file's bytes, read once in chunks; then `facts` has their number and checksum. Reading raises OSError."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._size, self._digest = file, 0, hashlib.sha256()

    def __iter__(self) -> Iterator[bytes]:
        for chunk in chunks(self._file):
            self._size += len(chunk)
            self._digest.update(chunk)
            yield chunk

    @property
    def facts(self) -> dict[str, Any]:
        """The file's entry in a backup's manifest."""
        return {"bytes": self._size, "sha256": self._digest.hexdigest()}


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield a file's bytes in chunks. Raises OSError."""
    return iter(partial(file.read, CHUNK_BYTES), b"")


def archive(files: Iterable[IO[bytes]]) -> Iterator[bytes]:
    """Yield a tar of open files by their names; it ends with them. Raises OSError."""
    for file in files:
        yield from member(Path(file.name).name, os.fstat(file.fileno()).st_size, chunks(file))
    yield END


def member(name: str, size: int, content: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a tar member of `size` bytes: header, content, padding."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o600, int(utc_now().timestamp())
    yield info.tobuf(tarfile.PAX_FORMAT)
    yield from content
    yield bytes(-size % tarfile.BLOCKSIZE)
