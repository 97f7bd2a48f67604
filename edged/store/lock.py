"""Files that one process holds at a time."""

import errno
import fcntl
import os
from pathlib import Path

LOCK_FILE = "edged.lock"


class LockTaken(RuntimeError):
    """Another process holds the lock; `holder` is its process id, where it wrote that down."""

    def __init__(self, message: str, holder: str) -> None:
        super().__init__(message)
        self.holder = holder


class FolderTaken(RuntimeError):
    """Another process holds the folder; the message names both."""


class FileLock:
    """An flock on a file, held until `release` or the end of the process, however it ends.

    The file stays: removing it would let two processes lock two files of one name.
    """

    def __init__(self, path: Path, mode: int = 0o600) -> None:
        """Raises LockTaken, or OSError where the file cannot be opened or is a link."""
        try:
            # A link is not followed: root would empty whatever it leads to.
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise OSError(errno.ELOOP, f'"{path}" is a symbolic link: remove it') from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._descriptor)
            raise LockTaken(f'"{path}" is held by process {holder}', holder) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let another process have it."""
        os.close(self._descriptor)


class FolderLock(FileLock):
    """The lock of a data folder: one process uses it."""

    def __init__(self, folder: Path) -> None:
        """Raises FolderTaken, or OSError where the file cannot be opened or is a link."""
        try:
            super().__init__(folder / LOCK_FILE, 0o644)
        except LockTaken as error:
            way_out = "stop that one, or give this one another store.data_dir"
            who = f"another edged (pid {error.holder})"
            raise FolderTaken(f'data folder "{folder}" is in use by {who}: {way_out}') from None
