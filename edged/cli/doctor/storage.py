"""Checks of edged's storage: disk, folders, database, adapters.

Must not import torch.
"""

import itertools
import json
import os
import shutil
import sqlite3
import stat
import tempfile
import time
from contextlib import closing
from pathlib import Path

from edged.cli.doctor.finding import Examination, Finding, broken, doubtful, fine, in_place_of
from edged.cli.doctor.model import tensors_of
from edged.cli.output import size
from edged.cli.settings import INSTALLED_DATA_DIR
from edged.store.data_dir import ADAPTERS_FOLDER, DATABASE_FILE, STARTS_FOLDER, paths_under, sha256_of
from edged.store.lock import LOCK_FILE

_OPERATIONS = 10_000
"""SQLite virtual machine operations between two checks of the time limit."""
_AS_OWNER = "run this as the user that edged runs as, or as root"
_LET_IN = (
    'set api.socket_mode = "0666" (under systemd, SocketMode=0666 in edged.socket): each account then speaks for '
    'itself; members of the group "edged" are admins, so that is for operators alone'
)


def disk(it: Examination) -> Finding:
    """Check the free disk space for the database, adapters and offloaded prefixes."""
    folder = _nearest(it.data_dir)
    try:
        space, files = shutil.disk_usage(folder), os.statvfs(folder)
    except OSError as error:
        return broken(f"{folder}: {error.strerror}", "mount the disk, or set store.data_dir")
    seen = f"{size(space.free)} of {size(space.total)} free at {folder}"
    way_out = "make room, or move store.data_dir to a larger disk"
    if files.f_files and not files.f_favail:
        return broken(f"{seen}, but no file can be made (no inodes)", way_out)
    if space.free < it.min_free_bytes // 10:
        return broken(seen, way_out)
    if space.free < it.min_free_bytes:
        return doubtful(f"{seen}; {size(it.min_free_bytes)} should be", way_out)
    return fine(seen)


def data_folder(it: Examination) -> Finding:
    """Check that edged can write to its data folder, and that other accounts cannot read it."""
    folder, account = it.data_dir, it.account
    if not folder.exists():
        # systemd creates the unit's StateDirectory, as root.
        with in_place_of(None if folder == Path(INSTALLED_DATA_DIR) else account):
            problem = _cannot_write(_nearest(folder))
        if problem:
            return broken(f"{folder} is not there and cannot be made: {problem}", "set store.data_dir")
        return fine(f"{folder} will be made")
    with in_place_of(account):
        problem = _cannot_write(folder) or _out_of_reach(folder)
    if problem and account is not None:
        way_out = f"`sudo chown -R {account.pw_name}: {folder} && sudo chmod -R u+rwX {folder}`"
        return broken(f"{problem} (by the service's user, {account.pw_name})", way_out)
    if problem:
        return broken(problem, f"{_AS_OWNER}; else `sudo chown -R USER {folder}`, or set store.data_dir")
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o007:
        way_out = f"`chmod o= {folder}`: what people said is in there"
        return doubtful(f"{folder} is open to everybody on this box (mode {mode:o})", way_out)
    return fine(f"{folder}, mode {mode:o}")


def socket_folder(it: Examination) -> Finding:
    """Check that the daemon can create its socket, and that this user may connect to it."""
    path = it.sockets[0]
    if path.exists():
        mode = stat.S_IMODE(path.stat().st_mode)
        seen = f"{path}, group {_group_of(path)}, mode {mode:o}"
        if not os.access(path, os.R_OK | os.W_OK):
            return doubtful(f"{seen}: this user may not use it", _LET_IN)
        # A socket that is open to all is fine: [access] limits each account to itself.
        return fine(f"{seen}, each account for itself" if mode & 0o006 == 0o006 else seen)
    if problem := _cannot_write(_nearest(path.parent)):
        way_out = "give --socket (or EDGED_SOCKET, or api.socket) a path in a folder where this user may write"
        return broken(f"{path} cannot be made: {problem}", way_out)
    return fine(f"{path} will be made")


def _out_of_reach(folder: Path) -> str:
    """Return the first file or folder of the data that is not readable and writable, in words, or ""."""
    adapters = folder / ADAPTERS_FOLDER
    files = [folder, folder / LOCK_FILE, *folder.glob(f"{DATABASE_FILE}*"), adapters]
    for part in itertools.chain(files, paths_under(adapters)):
        wanted = os.R_OK | os.W_OK | (os.X_OK if part.is_dir() else 0)
        if not os.access(part, wanted, effective_ids=True) and part.exists():
            return f"{part} may not be read and written"
    return ""


def _group_of(path: Path) -> str:
    try:
        return path.group()
    except KeyError:
        return str(path.stat().st_gid)


def _closed(folder: Path) -> bool:
    """Whether the folder exists and this user may not read it."""
    return folder.exists() and not os.access(folder, os.R_OK | os.X_OK, effective_ids=True)


def _nearest(path: Path) -> Path:
    """Return the path, or its nearest parent folder that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _cannot_write(folder: Path) -> str:
    """Return why no file can be created in a folder, or "".

    It tries: modes alone do not say for root, read-only disks and sandboxes.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except NotADirectoryError:
        return f"{folder} is not a folder"
    except OSError as error:
        return f"{folder}: {error.strerror}"


def database(it: Examination) -> Finding:
    """Check the database with SQLite's quick_check, on a read-only connection, and its schema version."""
    from edged.store.migrations import MIGRATIONS, UnknownMigration, known_of

    path = it.data_dir / DATABASE_FILE
    if _closed(it.data_dir):
        return doubtful(f"{it.data_dir} may not be read by this user", _AS_OWNER)
    if not path.exists():
        return fine("none yet: the first start makes it")
    restore = "restore a backup or what `sqlite3 FILE .recover` can read"
    way_out = f"stop edged, move the file away, and {restore}; adapters on disk stay good"
    try:
        with closing(_open_to_read(path)) as connection:
            end = time.monotonic() + it.left_s(3.0)
            connection.set_progress_handler(lambda: time.monotonic() > end, _OPERATIONS)
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            applied = {name for (name,) in connection.execute("SELECT name FROM migrations")}
    except sqlite3.DatabaseError as error:
        if not isinstance(error, sqlite3.OperationalError) or "interrupted" not in str(error):
            return broken(f"{path}: {error}", way_out)
        seen = f"{size(path.stat().st_size)}: not checked to its end within some seconds"
        return doubtful(seen, f"`sqlite3 -readonly {path} 'PRAGMA quick_check'` takes its time")
    if verdict != "ok":
        return broken(f"{path}: {verdict}", way_out)
    try:
        missing = len(MIGRATIONS) - len(known_of(applied))
    except UnknownMigration as error:
        return broken(f"{path} {error.seen}", error.way_out)
    update = f"; the next start brings it up to date ({missing} migrations)"
    schema = update if missing else f", schema {MIGRATIONS[-1].__name__}"
    return fine(f"{size(path.stat().st_size)}, whole{schema}")


def _open_to_read(path: Path) -> sqlite3.Connection:
    uri = path.absolute().as_uri()
    connection = sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=1.0)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        # In a read-only folder the shared-memory file of the write-ahead log cannot be created.
        connection.close()
        connection = sqlite3.connect(f"{uri}?immutable=1", uri=True)
    return connection


def adapters(it: Examination) -> Finding:
    """Check the newest version of every adapter on disk: files complete, readable, and with the right checksums."""
    if _closed(it.data_dir):
        return doubtful(f"{it.data_dir} may not be read by this user", _AS_OWNER)
    versions = sorted((it.data_dir / ADAPTERS_FOLDER).glob("*/*/v[0-9]*"))
    newest = {version.parent: version for version in versions}.values()
    end = time.monotonic() + it.left_s(2.0)
    damaged, summed = [], 0
    for folder in newest:
        sums = time.monotonic() < end
        summed += sums
        if problem := _damage(folder, sums):
            damaged.append(f"{folder.parent.name} {folder.name}: {problem}")
    if damaged:
        way_out = "nothing need be done: the version before it is served, and its pairs are learned again"
        return doubtful(f"{len(damaged)} of {len(newest)} damaged: " + "; ".join(damaged[:3]), way_out)
    if not newest:
        return fine("none yet")
    checked = "" if summed == len(newest) else f" ({summed} with checksums, for want of time)"
    return fine(f"{len(newest)} on disk, whole{checked}")


def starts(it: Examination) -> Finding | None:
    """Check that starts.default names a start that is on disk, of whatever base model."""
    default = it.settings.starts.default
    if not default:
        return None
    if _closed(it.data_dir):
        return doubtful(f"{it.data_dir} may not be read by this user", _AS_OWNER)
    known = sorted({version.parent.name for version in (it.data_dir / STARTS_FOLDER).glob("*/*/v[0-9]*")})
    if default in known:
        return fine(f"users without pairs begin with {default}")
    seen = f'starts.default = "{default}" names no start: known are {", ".join(known) or "none"}'
    return doubtful(seen, f'`edged starts add {default} FOLDER`, or set starts.default = ""')


def language(it: Examination) -> Finding | None:
    """Check for adapters whose latest held-out test exceeds guard.max_kl_nats (mean KL to the base per token)."""
    path, guard = it.data_dir / DATABASE_FILE, it.settings.guard
    if not path.exists() or _closed(it.data_dir):
        return None
    with closing(_open_to_read(path)) as connection:
        rows = connection.execute(
            """SELECT adapter, version, avg(kl_nats) FROM alignment_metrics AS m
               WHERE split = 'held_out' AND version = (SELECT max(version) FROM adapter_versions AS v
                   WHERE adapter = m.adapter AND EXISTS (SELECT 1 FROM alignment_metrics
                       WHERE adapter = v.adapter AND version = v.version AND split = 'held_out'))
               AND NOT EXISTS (SELECT 1 FROM adapter_versions AS later
                   WHERE adapter = m.adapter AND later.version > m.version AND reason LIKE 'guard%')
               GROUP BY adapter HAVING avg(kl_nats) > ? ORDER BY 3 DESC""",
            [guard.max_kl_nats],
        ).fetchall()
    if not rows:
        return fine(f"no tested adapter is beyond {guard.max_kl_nats:g} nats a token of the base")
    shown = ", ".join(f"{name} (version {version}: KL {kl:.1f} nats a token)" for name, version, kl in rows[:3])
    way_out = f"`edged adapters mend {rows[0][0]}`: the newest whole version is served, or its pairs are learned anew"
    return doubtful(f"{len(rows)} adapters broke the language: {shown}", way_out)


def _damage(folder: Path, sums: bool) -> str:
    """Return what is wrong with an adapter version's files, or ""; `sums` verifies checksums, too."""
    try:
        expected: dict[str, str] = json.loads((folder / "edged.json").read_text("utf-8"))["sha256"]
        for name, checksum in expected.items():
            if name.endswith(".safetensors"):
                tensors_of(folder / name)
            if sums and sha256_of(folder / name) != checksum:
                return f"{name} is not as it was written"
    except (OSError, ValueError, KeyError) as error:
        return str(error) or type(error).__name__
    return ""
