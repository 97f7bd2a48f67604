"""Erasure of a user: rows, adapter and files are deleted, and a search verifies that nothing is left."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from edged.align.adapters.adapter import UnknownAdapter
from edged.api.services import Services
from edged.store import Store, StoreError, erasure, utc_now, utc_text
from edged.store.adapters import forget_files, forget_learning
from edged.store.base_models import served_base
from edged.store.data_dir import ADAPTERS_FOLDER
from edged.store.maintenance import Maintenance, checkpoint

log = logging.getLogger("edged.api")


def forget_user(services: Services, name: str) -> dict[str, Any] | None:
    """Erase everything of a user; return a report, or None when nothing of the user was stored.

    The report's keys: rows_deleted (by table), searched (see `edged.store.erasure.search`, with `files`),
    verified, vacuumed. It blocks for minutes: not for the event loop.
    """
    store, began_s, stages = services.store, time.monotonic(), services.forgetting_stages
    folder, now, learned = store.path.parent / ADAPTERS_FOLDER, utc_text(utc_now()), True

    def stage(what: str) -> None:
        stages[name] = what
        log.info("forgetting %s: %s (after %.1f s)", name, what, time.monotonic() - began_s)

    try:
        stage("deleting its rows")
        erased = store.write(lambda db: erasure.begin_forgetting(db, name, now)).result()
        services.reading_speeds.forget(name)
        # Pairs on their way into the engine would create the adapter again.
        services.feedback_intake.settled().result()
        stage("taking it out of the engine")
        try:
            gone = _deleted(name, services.engine.forget(name, erased.pair_ids).result)
        except UnknownAdapter:
            learned, gone = False, True
        gone &= _deleted(name, lambda: forget_files(folder, name, store.read(served_base)))
        services.engine.hold_back(name, not gone)
        # And what the engine recorded of it meanwhile.
        store.write(lambda db: forget_learning(db, name)).result()
        if not learned and gone and not any(erased.rows.values()):
            store.write(lambda db: erasure.end_forgetting(db, name)).result()
            return None
        stage("searching for what is left")
        searched = _search(store, folder, name, erased.texts, now)
        stage("vacuuming")
        vacuumed = _vacuum(services.maintenance)
        if gone:
            # Not before the log is empty, so that a crash leaves the tombstone; then the tombstone's bytes go, too.
            store.write(lambda db: erasure.end_forgetting(db, name)).result()
            vacuumed &= _vacuum(services.maintenance)
    finally:
        stages.pop(name, None)
    verified = not (searched["found"] or searched["files"])
    return {"rows_deleted": erased.rows, "searched": searched, "verified": verified, "vacuumed": vacuumed}


def finish_forgetting(store: Store, adapters: Path) -> list[str]:
    """Finish erasures that a crash, or files that could not be deleted, left undone; before any adapter is read.

    `adapters` is the adapters' folder. Returns the users whose files are still there, which must not be served.
    """
    stay = []
    for name, since in store.read(erasure.unfinished):
        log.warning("forgetting %s was interrupted: it is finished now", name)
        gone = _deleted(name, partial(forget_files, adapters, name, None))
        store.write(partial(forget_learning, adapter=name)).result()
        # The user's texts went with the rows: only the name is left to search for.
        _search(store, adapters, name, (), since)
        # The first sweep gives the room back.
        store.write(checkpoint, alone=True).result()
        if gone:
            store.write(partial(erasure.end_forgetting, name=name)).result()
            store.write(checkpoint, alone=True).result()
        else:
            stay.append(name)
    return stay


def _deleted(name: str, delete: Callable[[], object]) -> bool:
    """Call `delete`, and return whether the files could be deleted; if not, the log has the reason."""
    try:
        delete()
    except OSError as error:
        meanwhile = "nobody is answered with them, and the next start tries again; let the daemon's user write there"
        log.error("forgetting %s: its files cannot be deleted (%s): %s", name, error, meanwhile)
        return False
    return True


def _search(store: Store, adapters: Path, name: str, texts: tuple[str, ...], since: str) -> dict[str, Any]:
    """Search for what is left of a user (see `edged.store.erasure.search`, with `files`), and log the result."""
    searched = store.read(lambda db: erasure.search(db, name, texts, since))
    searched["files"] = erasure.search_files(adapters, name)
    if searched["found"] or searched["files"]:
        log.error("forgetting %s: the search found %s", name, searched)
    else:
        log.info("forgetting %s: a search of %d columns and all files found nothing", name, searched["columns"])
    return searched


def _vacuum(maintenance: Maintenance) -> bool:
    """Give the room of what was deleted back in slices and empty the write-ahead log; returns whether both were done.

    SQLite has overwritten the deleted bytes. Nobody waits for the whole file to be rewritten: that comes at night.
    """
    maintenance.rewrite_soon = True
    try:
        maintenance.give_back()
        if not maintenance.empty_log():
            raise StoreError("another program reads the database: its write-ahead log could not be emptied")
    except StoreError as error:
        log.warning("the database keeps the room of what was deleted: %s", error)
        return False
    return True
