"""Forgetting a user in the data folder alone: a start finishes what was interrupted, a command needs no daemon."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from edged.store import erasure
from edged.store.adapters import forget_files, forget_learning
from edged.store.data_dir import ADAPTERS_FOLDER, path_in
from edged.store.database import Store
from edged.store.jobs.files import sweep_files
from edged.store.maintenance import checkpoint
from edged.store.timestamps import utc_now, utc_text

log = logging.getLogger(__name__)


def forget_stopped(store: Store, name: str) -> dict[str, Any] | None:
    """Erase everything of a user of a daemon that is stopped; return `report`, or None when nothing was stored."""
    adapters, now = store.path.parent / ADAPTERS_FOLDER, utc_text(utc_now())
    had_files = any(path_in(base, name).exists() for base in adapters.glob("*"))
    erased = store.write(lambda db: erasure.begin_forgetting(db, name, now)).result()
    searched, emptied, _ = _finish(store, adapters, erased.adapters, erased.texts, now)
    return report(erased, searched, emptied) if had_files or any(erased.rows.values()) else None


def finish_forgetting(store: Store, adapters: Path) -> list[str]:
    """Finish erasures that a crash, or files that could not be deleted, left undone; before any adapter is read.

    `adapters` is the adapters' folder. Returns those whose files are still there, which must not be served.
    """
    begun = store.read(erasure.unfinished)
    if not begun:
        return []
    names = [name for name, _ in begun]
    log.warning("forgetting %s was interrupted: it is finished now", ", ".join(names))
    # The users' texts went with the rows: only names are left to search for.
    *_, gone = _finish(store, adapters, names, (), begun[0][1])
    return [name for name in names if name not in gone]


def report(erased: erasure.Erased, searched: dict[str, Any], vacuumed: bool) -> dict[str, Any]:
    """Return what an erasure did. Keys: rows_deleted (by table), searched (see `search`), verified, vacuumed."""
    verified = not (searched["found"] or searched["files"])
    return {"rows_deleted": erased.rows, "searched": searched, "verified": verified, "vacuumed": vacuumed}


def deleted(name: str, delete: Callable[[], object]) -> bool:
    """Call `delete`, and return whether the files could be deleted; if not, the log has the reason."""
    try:
        delete()
    except OSError as error:
        meanwhile = "nobody is answered with them, and the next start tries again; let the daemon's user write there"
        log.error("forgetting %s: its files cannot be deleted (%s): %s", name, error, meanwhile)
        return False
    return True


def search(store: Store, adapters: Path, names: list[str], texts: tuple[str, ...], since: str) -> dict[str, Any]:
    """Search for what is left of a user (see `erasure.search`, with `files`), and log the result."""
    searched = store.read(lambda db: erasure.search(db, names, texts, since))
    searched["files"] = erasure.search_files(adapters, names)
    if searched["found"] or searched["files"]:
        log.error("forgetting %s: the search found %s", names[-1], searched)
    else:
        log.info("forgetting %s: a search of %d columns and all files found nothing", names[-1], searched["columns"])
    return searched


def _finish(
    store: Store, adapters: Path, names: list[str], texts: tuple[str, ...], since: str
) -> tuple[dict[str, Any], bool, list[str]]:
    """Delete the files of these names, search, and end the forgetting of those that are gone.

    Returns (search, whether the log is empty, the names whose files are gone). The room in the database goes back to
    the disk with the first sweep after a start, or `edged store prune`.
    """
    swept = deleted(names[-1], lambda: sweep_files(store))
    gone = [name for name in names if deleted(name, partial(forget_files, adapters, name, None)) and swept]
    store.write(lambda db: forget_learning(db, *names)).result()
    searched = search(store, adapters, names, texts, since)
    emptied = store.write(checkpoint, alone=True).result()
    if gone:
        # Not before the log is empty, so that a crash leaves the tombstone; then the tombstone's bytes go, too.
        store.write(lambda db: erasure.end_forgetting(db, *gone)).result()
        emptied &= store.write(checkpoint, alone=True).result()
    return searched, emptied, gone
