"""One process per data folder."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

LOCK_FILE = "edged.lock"


class FolderTaken(RuntimeError):
    """Another process holds the folder; the message names both."""


class FolderLock:
    """An flock on `<folder>/edged.lock`, held until `release` or the end of the process, however it ends.

    The file stays: removing it would let two processes lock two files of one name.
    """

    def __init__(self, folder: Path) -> None:
        """Raises FolderTaken, or OSError where the file cannot be opened or is a link."""
        self._descriptor = _opened(folder / LOCK_FILE)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._descriptor)
            raise FolderTaken(
                f'data folder "{folder}" is in use by another edged (pid {holder}): '
                "stop that one, or give this one another store.data_dir"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let another process have the folder."""
        os.close(self._descriptor)


def _opened(path: Path) -> int:
    """The file, made if need be. A link is not followed: root would empty whatever it leads to."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, f'"{path}" is a symbolic link: remove it') from None
