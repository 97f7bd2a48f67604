"""A backup: one tar of the database, the adapters' newest whole versions, uploaded files, profiles and settings.

The adapters are taken before the database: what a version had learned is then in the database too, and what the
database has beyond it is learned again after a restore, as after a crash. What the database does not name any more was
forgotten meanwhile, and is left out. Versions are never changed in place, so that
hard links are copies. The manifest is the tar's last member: a file that breaks off has none.
"""

import gzip
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import edged
from edged.runtime.durable import sync
from edged.store.archive import END, Content, member
from edged.store.data_dir import (
    ADAPTERS_FOLDER,
    DATABASE_FILE,
    FILES_FOLDER,
    SCRATCH,
    STARTS_FOLDER,
    path_in,
    sha256_of,
)
from edged.store.timestamps import utc_now, utc_text

FORMAT = 1
MANIFEST = "manifest.json"
CONFIG_FILE = "config.toml"
PROFILES_FOLDER = "profiles"
VERSION_MANIFEST = "edged.json"
_COPY_PAGES = 1024
"""Pages of the database that are copied at a time."""


class BackupError(RuntimeError):
    """A backup cannot be made, read or restored; the message names the file and the reason."""


@contextmanager
def staged(data_dir: Path, config: str, settle: Callable[[], None], all_versions: bool = False) -> Iterator[Path]:
    """Stage the parts of a backup in a folder that lasts as long as the context. Blocks the caller alone.

    `config` is the settings' text. `settle` returns when all records of the adapters until then are in the
    database. Raises BackupError.
    """
    database = data_dir / DATABASE_FILE
    if not database.is_file():
        raise BackupError(f'data folder "{data_dir}" has no {DATABASE_FILE}: there is nothing to back up')
    free, needed = shutil.disk_usage(data_dir).free, database.stat().st_size
    if free < needed:
        sizes = f"has {free >> 20} MiB of room, a copy of the database needs {needed >> 20} MiB"
        raise BackupError(f'data folder "{data_dir}" {sizes}: make room on the disk')
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}backup-", dir=data_dir))
    except OSError as error:
        raise BackupError(f'data folder "{data_dir}" cannot be written: {error.strerror}') from None
    try:
        _link_adapters(data_dir / ADAPTERS_FOLDER, folder / ADAPTERS_FOLDER, all_versions)
        _link_adapters(data_dir / STARTS_FOLDER, folder / STARTS_FOLDER, all_versions)
        settle()
        copy_database(database, folder / DATABASE_FILE)
        _drop_unnamed(folder)
        if (data_dir / FILES_FOLDER).is_dir():
            _link_files(data_dir / FILES_FOLDER, folder)
        if (data_dir / PROFILES_FOLDER).is_dir():
            shutil.copytree(data_dir / PROFILES_FOLDER, folder / PROFILES_FOLDER)
        (folder / CONFIG_FILE).write_text(config, "utf-8")
        yield folder
    except (OSError, sqlite3.Error) as error:
        raise BackupError(f'data folder "{data_dir}" cannot be copied: {error}') from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def copy_database(source: Path, target: Path) -> None:
    """Copy one consistent state by SQLite's backup API, some pages at a time; writers go on. Raises sqlite3.Error."""
    reader, writer = sqlite3.connect(source, isolation_level=None), sqlite3.connect(target, isolation_level=None)
    try:
        # Without a transaction of its own the copy would begin anew with every commit of the daemon.
        reader.execute("BEGIN")
        reader.execute("SELECT 1 FROM sqlite_schema").fetchone()
        reader.backup(writer, pages=_COPY_PAGES)
        # One file, without a log beside it.
        writer.execute("PRAGMA journal_mode = DELETE").fetchall()
    finally:
        writer.close()
        reader.close()


def _link_adapters(source: Path, target: Path, all_versions: bool) -> None:
    """Link every adapter's newest whole version (or all whole ones) of every base."""
    for adapter in sorted(source.glob("*/*")):
        for version in sorted(adapter.glob("v[0-9]*"), reverse=True):
            copy = target / version.relative_to(source)
            # One that goes while it is copied is not whole: there are newer ones.
            with suppress(OSError, shutil.Error):
                shutil.copytree(version, copy, copy_function=_link)
            if not is_whole(copy):
                shutil.rmtree(copy, ignore_errors=True)
            elif not all_versions:
                break


def _drop_unnamed(folder: Path) -> None:
    """Remove versions that the copied database does not name: their user was forgotten after they were linked."""
    with closing(sqlite3.connect(folder / DATABASE_FILE)) as connection:
        named = set(
            connection.execute(
                """SELECT fingerprint, adapter, version FROM adapter_versions, served_base
                   UNION SELECT base, adapter, version FROM shelved_versions"""
            )
        )
    for version in (folder / ADAPTERS_FOLDER).glob("*/*/v*"):
        if (version.parent.parent.name, version.parent.name, int(version.name[1:])) not in named:
            shutil.rmtree(version)


def _link_files(source: Path, folder: Path) -> None:
    """Link the uploaded files that the copied database names; one that was deleted since then is left out."""
    (folder / FILES_FOLDER).mkdir()
    with closing(sqlite3.connect(folder / DATABASE_FILE)) as connection:
        for (file_id,) in connection.execute("SELECT id FROM files"):
            with suppress(FileNotFoundError):
                _link(str(path_in(source, file_id)), str(folder / FILES_FOLDER / file_id))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def is_whole(version: Path) -> bool:
    """Whether an adapter version's files are those that its manifest names."""
    try:
        sums = json.loads((version / VERSION_MANIFEST).read_text("utf-8"))["sha256"]
        return all(sha256_of(version / name) == value for name, value in sums.items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def stream(folder: Path, data_dir: Path) -> Iterator[bytes]:
    """Yield the tar of a staged folder in chunks; the manifest is made on the way. Raises OSError."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        with path.open("rb") as file:
            content = Content(file)
            yield from member(name, path.stat().st_size, content)
        files[name] = content.facts
    versions = sorted(path.relative_to(folder / ADAPTERS_FOLDER).parts for path in folder.glob("adapters/*/*/v*"))
    manifest = {
        "format": FORMAT,
        "edged": edged.__version__,
        "created_at": utc_text(utc_now()),
        "data_dir": str(data_dir),
        "adapters": [{"base": base, "adapter": name, "version": int(v[1:])} for base, name, v in versions],
        "files": files,
    }
    text = json.dumps(manifest, indent=1).encode()
    yield from member(MANIFEST, len(text), [text])
    yield END


def write_file(chunks: Iterable[bytes], path: Path) -> int:
    """Write a backup so that it is there whole or not at all; a name that ends in .gz compresses it. Returns its bytes.

    Raises OSError, and what `chunks` raises.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        draft.unlink(missing_ok=True)
        # Somebody else's file, or a link to one, is not written to.
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            zipped = path.suffix == ".gz"
            packing: Any = gzip.GzipFile(fileobj=file, mode="wb", filename="") if zipped else nullcontext(file)
            with packing as packed:
                packed.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    sync(path.parent)
    return path.stat().st_size
