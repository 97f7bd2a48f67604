"""Erasure of a user while the daemon runs, which takes the adapter out of the engine, too."""

import logging
import time
from contextlib import suppress
from functools import partial
from typing import Any

from edged.align.adapters.adapter import UnknownAdapter
from edged.api.services import Services
from edged.store import StoreError, erasure, forgetting, utc_now, utc_text
from edged.store.adapters import forget_files, forget_learning, forget_reports
from edged.store.base_models import served_base
from edged.store.data_dir import ADAPTERS_FOLDER
from edged.store.jobs.files import remove_content
from edged.store.jobs.jobs import open_jobs_of_users
from edged.store.maintenance import Maintenance

log = logging.getLogger("edged.api")


def forget_user(services: Services, name: str) -> dict[str, Any] | None:
    """Erase everything of a user; return `forgetting.report`, or None when nothing of the user was stored.

    It blocks for minutes: not for the event loop.
    """
    store, began_s, stages = services.store, time.monotonic(), services.forgetting_stages
    folder, now, learned, gone = store.path.parent / ADAPTERS_FOLDER, utc_text(utc_now()), False, list[str]()

    def stage(what: str) -> None:
        stages[name] = what
        log.info("forgetting %s: %s (after %.1f s)", name, what, time.monotonic() - began_s)

    try:
        stage("ending its jobs")
        for job in store.read(lambda db: open_jobs_of_users(db, name)):
            services.job_runner.end(job)
        stage("deleting its rows")
        reports = 0
        while count := store.write(lambda db: forget_reports(db, name)).result():
            reports += count
        erased = store.write(lambda db: erasure.begin_forgetting(db, name, now)).result()
        erased.rows["job_events"] += reports
        for job in erased.jobs:
            services.job_runner.end(job)
        services.job_runner.refresh()
        # Pairs on their way into the engine would create the adapter again.
        services.feedback_intake.settled().result()
        stage("taking it out of the engine")
        # A list: all of them are tried.
        uploads_gone = all([forgetting.deleted(name, partial(remove_content, store, file)) for file in erased.file_ids])
        for adapter in erased.adapters:
            services.reading_speeds.forget(adapter)
            services.version_answers.forget(adapter)
            services.practice.forget(adapter)
            services.preferences.change(adapter, lambda db: None).result()
            whole = uploads_gone
            with suppress(UnknownAdapter):
                whole &= forgetting.deleted(adapter, services.engine.forget(adapter, erased.pair_ids).result)
                learned = True
            whole &= forgetting.deleted(adapter, partial(forget_files, folder, adapter, store.read(served_base)))
            services.engine.block_saves(adapter, not whole)
            gone += [adapter] if whole else []
        services.tastes.renew()
        # And what the engine recorded of them meanwhile.
        store.write(lambda db: forget_learning(db, *erased.adapters)).result()
        if not learned and gone == erased.adapters and not any(erased.rows.values()):
            store.write(lambda db: erasure.end_forgetting(db, *erased.adapters)).result()
            return None
        stage("searching for what is left")
        searched = forgetting.search(store, folder, erased.adapters, erased.texts, now)
        stage("vacuuming")
        vacuumed = _vacuum(services.maintenance)
        if gone:
            # Not before the log is empty, so that a crash leaves the tombstone; then the tombstone's bytes go, too.
            store.write(lambda db: erasure.end_forgetting(db, *gone)).result()
            vacuumed &= _vacuum(services.maintenance)
    finally:
        stages.pop(name, None)
    return forgetting.report(erased, searched, vacuumed)


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
