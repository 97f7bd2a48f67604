"""Forgetting a user in the data folder alone: a start finishes what was interrupted, a command needs no daemon."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from edged.store import erasure
from edged.store.adapters import forget_files, forget_learning
from edged.store.data_dir import ADAPTERS_FOLDER
from edged.store.database import Store
from edged.store.jobs.files import sweep_files
from edged.store.maintenance import checkpoint
from edged.store.timestamps import utc_now, utc_text

log = logging.getLogger(__name__)


def forget_stopped(store: Store, name: str) -> dict[str, Any] | None:
    """Erase everything of a user of a daemon that is stopped; return `report`, or None when nothing was stored."""
    adapters, now = store.path.parent / ADAPTERS_FOLDER, utc_text(utc_now())
    had_files = any(adapters.glob(f"*/{name}"))
    erased = store.write(lambda db: erasure.begin_forgetting(db, name, now)).result()
    for kept in erased.adapters[:-1]:
        _finish(store, adapters, kept, (), now)
    searched, emptied, _ = _finish(store, adapters, name, erased.texts, now)
    return report(erased, searched, emptied) if had_files or any(erased.rows.values()) else None


def finish_forgetting(store: Store, adapters: Path) -> list[str]:
    """Finish erasures that a crash, or files that could not be deleted, left undone; before any adapter is read.

    `adapters` is the adapters' folder. Returns the users whose files are still there, which must not be served.
    """
    stay = []
    for name, since in store.read(erasure.unfinished):
        log.warning("forgetting %s was interrupted: it is finished now", name)
        # The user's texts went with the rows: only the name is left to search for.
        *_, gone = _finish(store, adapters, name, (), since)
        if not gone:
            stay.append(name)
    return stay


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


def search(store: Store, adapters: Path, name: str, texts: tuple[str, ...], since: str) -> dict[str, Any]:
    """Search for what is left of a user (see `erasure.search`, with `files`), and log the result."""
    searched = store.read(lambda db: erasure.search(db, name, texts, since))
    searched["files"] = erasure.search_files(adapters, name)
    if searched["found"] or searched["files"]:
        log.error("forgetting %s: the search found %s", name, searched)
    else:
        log.info("forgetting %s: a search of %d columns and all files found nothing", name, searched["columns"])
    return searched


def _finish(
    store: Store, adapters: Path, name: str, texts: tuple[str, ...], since: str
) -> tuple[dict[str, Any], bool, bool]:
    """Delete the files, search, and end the forgetting. Returns (search, whether the log is empty, the files gone).

    The room in the database goes back to the disk with the first sweep after a start, or `edged store prune`.
    """
    gone = deleted(name, partial(forget_files, adapters, name, None))
    gone &= deleted(name, lambda: sweep_files(store))
    store.write(partial(forget_learning, adapter=name)).result()
    searched = search(store, adapters, name, texts, since)
    emptied = store.write(checkpoint, alone=True).result()
    if gone:
        # Not before the log is empty, so that a crash leaves the tombstone; then the tombstone's bytes go, too.
        store.write(lambda db: erasure.end_forgetting(db, name)).result()
        emptied &= store.write(checkpoint, alone=True).result()
    return searched, emptied, gone
