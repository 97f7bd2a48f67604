"""The adapters that jobs make are known by their owners, whichever thread reads them anew."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

from sqlite_utils import Database

from edged.api.jobs.runner import JobRunner
from edged.settings.live import Live
from edged.settings.load import Settings
from edged.store import Store
from edged.store.jobs import jobs


def test_an_older_reading_never_takes_the_place_of_a_later_one(tmp_path: Path, monkeypatch: Any) -> None:
    store = Store(tmp_path / "edged.db")
    runner = JobRunner(store, cast(Any, None), cast(Any, None), Live(Settings()), "base", "tiny", lambda: None)
    has_read, may_go_on, read = threading.Event(), threading.Event(), jobs.job_adapters

    def held(db: Database) -> jobs.JobAdapters:
        found = read(db)
        if not has_read.is_set():
            has_read.set()
            may_go_on.wait(60)
        return found

    monkeypatch.setattr("edged.store.jobs.jobs.job_adapters", held)
    earlier, later = (threading.Thread(target=runner.refresh) for _ in range(2))
    earlier.start()
    assert has_read.wait(60)
    row = jobs.JobRow("job", "2025-01-31T12:00:00.000Z", "ann", "base", "tiny", "", "ann-1", "dpo", {}, 1, "file", {})
    store.write(lambda db: jobs.insert_job(db, row)).result()
    later.start()
    later.join(0.5)
    may_go_on.set()
    for thread in (earlier, later):
        thread.join(60)
    assert runner.adapters.owners == {"ann-1": "ann"}
    store.close()
