"""Forgetting a user: rows, what the engine learned, files, and then the search that shows that nothing is left.

Owns the order of the work, and its end after a crash. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

from edged.align.versions import UnknownAdapter
from edged.api.services import Services
from edged.store import Store, StoreError, utc_now, utc_text
from edged.store.adapters import forget_files, forget_learning
from edged.store.bases import served_base
from edged.store.erasing import (
    begin_forgetting,
    empty_log,
    end_forgetting,
    erase_bytes,
    search,
    search_files,
    unfinished,
)

log = logging.getLogger("edged.api")


async def forget_user(services: Services, name: str) -> dict[str, Any] | None:
    """Erase everything of a user; what was done and what a search found. None when nothing was known of them.

    Keys: rows_deleted (by table), searched (see `edged.store.erasing.search`, with `files`), verified, vacuumed.
    """
    store, began_s, learned = services.store, time.monotonic(), True
    now = utc_text(utc_now())
    stages = services.forgetting_stages

    def stage(what: str) -> None:
        stages[name] = what
        log.info("forgetting %s: %s (after %.1f s)", name, what, time.monotonic() - began_s)

    try:
        stage("deleting its rows")
        erased = await asyncio.wrap_future(store.write(lambda db: begin_forgetting(db, name, now)))
        # Pairs that were read before would make the adapter anew.
        await asyncio.wrap_future(services.teacher.settled())
        stage("taking it out of the engine")
        try:
            await asyncio.wrap_future(services.engine.forget(name, erased.pair_ids))
        except UnknownAdapter:
            learned = False
        base = await asyncio.to_thread(store.read, served_base)
        folder = store.path.parent / "adapters"
        await asyncio.to_thread(forget_files, folder, name, base)
        # And what the engine had to say of it meanwhile.
        await asyncio.wrap_future(store.write(lambda db: forget_learning(db, name)))
        if not learned and not any(erased.rows.values()):
            await asyncio.wrap_future(store.write(lambda db: end_forgetting(db, name)))
            return None
        stage("searching for what is left")
        searched = await asyncio.to_thread(store.read, lambda db: search(db, name, erased.texts, now))
        searched["files"] = await asyncio.to_thread(search_files, folder, name)
        stage("vacuuming")
        vacuumed = await asyncio.to_thread(_vacuum, store, name)
    finally:
        stages.pop(name, None)
    verified = not (searched["found"] or searched["files"])
    if not verified:
        log.error("forgetting %s: the search found %s", name, searched)
    return {"rows_deleted": erased.rows, "searched": searched, "verified": verified, "vacuumed": vacuumed}


def finish_forgetting(store: Store, adapters: Path) -> list[str]:
    """End what a crash interrupted, before any adapter is read; returns the users. `adapters` is their folder."""
    names = store.read(unfinished)
    for name, _ in names:
        log.warning("forgetting %s was interrupted: it is finished now", name)
        forget_files(adapters, name, None)
        store.write(partial(forget_learning, adapter=name)).result()
        _vacuum(store, name)
    return [name for name, _ in names]


def _vacuum(store: Store, name: str) -> bool:
    """Erase the bytes, then the tombstone and its bytes; whether room was given back as well.

    Without room for a second copy of the file (or while another program reads) what was deleted is overwritten all the
    same; only its room, or the log, stays until next time.
    """
    try:
        store.write_alone(erase_bytes).result()
        vacuumed = True
    except (StoreError, RuntimeError) as error:
        log.warning("the database keeps the room of what was deleted: %s", error)
        vacuumed = False
    store.write(lambda db: end_forgetting(db, name)).result()
    try:
        store.write_alone(empty_log).result()
    except (StoreError, RuntimeError) as error:
        log.warning("%s", error)
        vacuumed = False
    return vacuumed
