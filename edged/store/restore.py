"""Restoring a backup: it is checked, and put into a data folder."""

import json
import os
import re
import shutil
import sqlite3
import tarfile
import tempfile
import zlib
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sqlite_utils import Database

from edged.runtime.durable import sync
from edged.store.archive import Content
from edged.store.backup import CONFIG_FILE, FORMAT, MANIFEST, PROFILES_FOLDER, BackupError
from edged.store.data_dir import ADAPTERS_FOLDER, DATABASE_FILE, FILES_FOLDER, NAME, STARTS_FOLDER, path_in
from edged.store.lock import LOCK_FILE, FolderLock, FolderTaken
from edged.store.migrations import UnknownMigration, check_schema
from edged.store.timestamps import utc_now

_MEMBER = re.compile(
    f"{re.escape(DATABASE_FILE)}|{re.escape(CONFIG_FILE)}|{PROFILES_FOLDER}/{NAME}|{FILES_FOLDER}/{NAME}"
    f"|({ADAPTERS_FOLDER}|{STARTS_FOLDER})/{NAME}/{NAME}/v[0-9]+/{NAME}|{re.escape(MANIFEST)}"
)
_MAX_MANIFEST_BYTES = 64 << 20
_NAMES = """SELECT fingerprint FROM served_base UNION SELECT base FROM shelved_versions
    UNION SELECT base FROM shelved_progress UNION SELECT adapter FROM adapter_versions
    UNION SELECT adapter FROM shelved_versions UNION SELECT adapter FROM forgetting"""
"""SQL's names that become names of files and folders."""
_RESERVE_BYTES = 64 << 20
"""Bytes of the disk that stay free."""
_DAMAGE = (tarfile.TarError, EOFError, OSError, zlib.error)


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a whole backup: its manifest, and rows of the database by table."""

    manifest: dict[str, Any]
    rows: dict[str, int]


def verify(file: Path) -> Contents:
    """Read a backup to its end and check everything. Raises BackupError."""
    with tempfile.TemporaryDirectory(prefix="edged-") as folder:
        return _unpack(file, Path(folder), keep_all=False)


def restore(file: Path, data_dir: Path, force: bool) -> tuple[Contents, Path | None]:
    """Make `data_dir` what the backup holds; a folder with data is kept aside under the returned name with `force`.

    The folder is there whole or as it was before. Raises BackupError, also while a daemon uses the folder.
    """
    data_dir = data_dir.expanduser().resolve()
    lock = _taken(data_dir, force) if data_dir.exists() else None
    try:
        data_dir.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{data_dir.name}.restore-", dir=data_dir.parent))
    except OSError as error:
        raise BackupError(f'"{data_dir.parent}" cannot be written: {error.strerror}') from None
    try:
        contents = _unpack(file, draft, keep_all=True)
        _relocate(draft, data_dir)
        _settle(draft, data_dir if lock else None)
        return contents, _swap(draft, data_dir)
    except (OSError, ValueError, sqlite3.Error) as error:
        raise BackupError(f'{file} cannot be restored to "{data_dir}": {error}') from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if lock is not None:
            lock.release()


def _taken(data_dir: Path, force: bool) -> FolderLock:
    """The lock of a folder that may be replaced."""
    if not data_dir.is_dir():
        raise BackupError(f'"{data_dir}" is not a folder')
    if not force and any(path.name != LOCK_FILE for path in data_dir.iterdir()):
        raise BackupError(f'"{data_dir}" is not empty: give another --data-dir, or --force to keep it aside')
    try:
        return FolderLock(data_dir)
    except FolderTaken as error:
        raise BackupError(f"{error}; a backup is restored while edged is stopped") from None
    except OSError as error:
        raise BackupError(f'"{data_dir}" cannot be used: {error.strerror}') from None


def _unpack(file: Path, folder: Path, keep_all: bool) -> Contents:
    """Check the backup's members against its manifest; write all of them, or the database alone, into `folder`."""
    found: dict[str, dict[str, Any]] = {}
    manifest: dict[str, Any] | None = None
    try:
        with tarfile.open(file, "r|*") as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isreg() and not member.issparse() else None
                misplaced = manifest is not None or member.name in found or not _MEMBER.fullmatch(member.name)
                if content is None or misplaced:
                    raise BackupError(f'{file}: "{member.name}" has no place in a backup of edged')
                if member.name == MANIFEST:
                    manifest = _read_manifest(file, content)
                else:
                    target = folder / member.name if keep_all or member.name == DATABASE_FILE else None
                    if target is not None:
                        _demand_room(file, member, folder)
                    found[member.name] = _take(content, target)
    except FileNotFoundError:
        raise BackupError(f"{file} does not exist") from None
    except _DAMAGE as error:
        raise BackupError(f"{file} cannot be read as a backup: {error or type(error).__name__}") from None
    if manifest is None:
        raise BackupError(f"{file} breaks off: its manifest is missing")
    for name in sorted(found.keys() ^ manifest["files"].keys()):
        raise BackupError(f'{file}: "{name}" is {"not in its manifest" if name in found else "missing"}')
    damaged = [name for name, facts in found.items() if facts != manifest["files"][name]]
    if damaged:
        raise BackupError(f"{file}: {', '.join(damaged)} is damaged (checksum differs)")
    return Contents(manifest, _check_database(file, folder / DATABASE_FILE))


def _demand_room(file: Path, member: tarfile.TarInfo, folder: Path) -> None:
    """Raise BackupError where a member unpacks to more than the disk has room for: a small file may say any size."""
    free = shutil.disk_usage(folder).free - _RESERVE_BYTES
    if member.size > free:
        way_out = f'"{folder.parent}" has room for {max(0, free)}: make room there, or look at where the backup is from'
        raise BackupError(f'{file}: "{member.name}" unpacks to {member.size} bytes, and {way_out}')


def _read_manifest(file: Path, content: IO[bytes]) -> dict[str, Any]:
    try:
        manifest = json.loads(content.read(_MAX_MANIFEST_BYTES))
        known = manifest["format"] == FORMAT and isinstance(manifest["files"], dict)
    except (ValueError, KeyError, TypeError):
        raise BackupError(f"{file}: its manifest cannot be read") from None
    if not known:
        raise BackupError(f"{file} is of another format ({manifest['format']}): a newer edged made it")
    return dict(manifest)


def _take(content: IO[bytes], target: Path | None) -> dict[str, Any]:
    """Read a member to its end, into `target` where there is one; its size and hash."""
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
    read = Content(content)
    with open(os.devnull if target is None else target, "wb" if target is None else "xb") as out:
        out.writelines(read)
    return read.facts


def _check_database(file: Path, path: Path) -> dict[str, int]:
    """Rows by table of a database that SQLite and this edged accept. Raises BackupError."""
    if not path.is_file():
        raise BackupError(f"{file} holds no {DATABASE_FILE}")
    try:
        with closing(sqlite3.connect(path)) as connection:
            # What a changed schema would have SQLite run is not run.
            connection.execute("PRAGMA trusted_schema = OFF")
            db = Database(connection, execute_plugins=False)
            check_schema(db)
            later = {"files": "id", "preferences": "adapter"}
            more = (f" UNION SELECT {column} FROM {table}" for table, column in later.items() if db[table].exists())
            for (name,) in connection.execute(_NAMES + "".join(more)):
                path_in(path, str(name))
            problems = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
            broken = connection.execute("PRAGMA foreign_key_check").fetchone()
            if problems != "ok" or broken:
                raise BackupError(f"{file}: its database is damaged ({problems if problems != 'ok' else broken})")
            return {table.name: table.count for table in db.tables}
    except UnknownMigration as error:
        raise BackupError(f"{file}: its database {error}") from None
    except FileNotFoundError as error:
        told = f'has the name "{ascii(error.filename)[1:-1][:80]}", which could lead out of the data folder'
        raise BackupError(f"{file}: its database {told}: it was changed") from None
    except sqlite3.Error as error:
        raise BackupError(f"{file}: its database cannot be read: {error}") from None


def _relocate(draft: Path, data_dir: Path) -> None:
    """Update the database to the versions that are there, and to their paths in `data_dir`."""
    with closing(sqlite3.connect(draft / DATABASE_FILE)) as connection, connection:
        bases = {"adapter_versions": "(SELECT fingerprint FROM served_base)", "shelved_versions": "base"}
        for table, base in bases.items():
            rows = connection.execute(f"SELECT rowid, {base}, adapter, version FROM {table}").fetchall()
            for rowid, fingerprint, adapter, version in rows:
                place = Path(ADAPTERS_FOLDER, fingerprint or "", adapter, f"v{version:06d}")
                there = bool(fingerprint) and (draft / place).is_dir()
                connection.execute(
                    f"UPDATE {table} SET path = ?, on_disk = ? WHERE rowid = ?",
                    [str(data_dir / place) if there else None, int(there), rowid],
                )
        served = "SELECT fingerprint FROM served_base UNION SELECT base FROM shelved_progress"
        for (fingerprint,) in connection.execute(served):
            # A base without a version there is known by its folder as well.
            (draft / ADAPTERS_FOLDER / Path(fingerprint).name).mkdir(parents=True, exist_ok=True)


def _settle(draft: Path, before: Path | None) -> None:
    """Give the draft the owner and mode of the folder before, and sync everything to the disk."""
    status = before.stat() if before is not None else None
    draft.chmod(0o750 if status is None else status.st_mode & 0o777)
    for path in [draft, *draft.rglob("*")]:
        if status is not None and os.geteuid() == 0:
            os.chown(path, status.st_uid, status.st_gid)
        sync(path)


def _swap(draft: Path, data_dir: Path) -> Path | None:
    """Put the draft in the folder's place; where the folder went, when it held anything."""
    aside = None
    if data_dir.exists():
        moment = utc_now().strftime("%Y%m%d-%H%M%S")
        aside = data_dir.with_name(f"{data_dir.name}.before-restore-{moment}")
        os.rename(data_dir, aside)
    try:
        os.rename(draft, data_dir)
    except OSError:
        if aside is not None:
            os.rename(aside, data_dir)
        raise
    sync(data_dir.parent)
    if aside is not None and all(path.name == LOCK_FILE for path in aside.iterdir()):
        shutil.rmtree(aside)
        aside = None
    return aside
