"""The data folder: its place, the names of its parts, and what is in it."""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from edged.runtime.durable import sync

DATABASE_FILE = "edged.db"
ADAPTERS_FOLDER = "adapters"
STARTS_FOLDER = "starts"
FILES_FOLDER = "files"
NAME = "[A-Za-z0-9][A-Za-z0-9._@-]*"
"""Pattern of the names of users' files, base models, adapters and their files."""
SCRATCH = ".scratch-"
"""Name prefix of folders with a request's files; leftovers are removed at the next start."""


def data_folder(configured: str, environ: Mapping[str, str]) -> Path:
    """Return the folder of database and adapters: as set, else systemd's, else the user's."""
    if configured:
        return Path(configured).expanduser()
    if state := environ.get("STATE_DIRECTORY", "").split(":")[0]:
        return Path(state)
    return Path(environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "edged"


def path_in(folder: Path, *names: str) -> Path:
    """Return a path under `folder` by names that a database or a manifest holds.

    Raises FileNotFoundError where one of them is no plain name, and might lead out of the folder.
    """
    for name in names:
        if not re.fullmatch(NAME, name):
            raise FileNotFoundError(errno.ENOENT, "not a name of a file of edged", name)
    return folder.joinpath(*names)


def sha256_of(path: Path) -> str:
    """The checksum of a file, in hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_bytes(path: Path) -> int:
    """The size of a file; 0 where there is none, or a failing disk does not tell it."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def paths_under(folder: Path) -> Iterator[Path]:
    """Yield all files and folders under a folder, whose versions may come and go meanwhile."""
    # `os.walk` passes over folders that are gone, `Path.rglob` raises.
    for parent, folders, names in os.walk(folder):
        yield from (Path(parent, name) for name in (*folders, *names))


def folder_bytes(folder: Path) -> int:
    """The size of all files in a folder; 0 where there is none. A file that cannot be asked counts nothing."""
    return sum(file_bytes(Path(parent, name)) for parent, _, names in os.walk(folder) for name in names)


def erase_folder(folder: Path) -> None:
    """Remove a folder, if it is there, as far as it can be. Raises OSError with the first thing that stays."""
    try:
        shutil.rmtree(folder)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            raise
    if folder.parent.exists():
        # A power cut must not bring it back.
        sync(folder.parent)


def clear_leftovers(data_dir: Path) -> None:
    """Remove scratch folders of requests that were killed. The caller holds the folder's lock."""
    for folder in data_dir.glob(f"{SCRATCH}*"):
        shutil.rmtree(folder, ignore_errors=True)
