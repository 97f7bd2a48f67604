"""Forgetting without a daemon: the files, the rows that came meanwhile, the log and the tombstone, in their order."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from sqlite_utils import Database

from edged.align.feedback.pair import VersionPublished
from edged.align.feedback.signals import record_pair
from edged.store import Store, erasure, utc_now
from edged.store.adapters import forget_reports, insert_version
from edged.store.completions import insert_completion, users_of_completion
from edged.store.data_dir import erase_folder
from edged.store.forgetting import deleted, finish_forgetting, forget_stopped
from edged.store.jobs import jobs
from edged.store.jobs.files import keep_file
from edged.store.jobs.jobs import JobRow, add_event, find_job, insert_job, keep_checkpoint, list_events
from tests.store.rows import MOMENT, completion


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "edged.db")
    yield store
    store.close()


def say(store: Store, name: str, user: str, **more: object) -> None:
    row = completion(name, f"{user} hid the brass key under the third flower pot", user=user, **more)
    store.write(lambda db: insert_completion(db, row)).result()


def make(store: Store, user: str, base: str = "base") -> Path:
    """Files of a version and its row."""
    folder = store.path.parent / "adapters" / base / user / "v000001"
    folder.mkdir(parents=True)
    (folder / "edged.json").write_text(f'{{"adapter": "{user}"}}')
    row = asdict(VersionPublished(user, 1, 0, "trained"))
    store.write(lambda db: insert_version(db, MOMENT, row)).result()
    return folder


def rows(store: Store, table: str, column: str = "adapter") -> list[str]:
    return store.read(lambda db: [row[column] for row in db.query(f"SELECT * FROM {table} ORDER BY rowid")])


def test_a_stopped_daemons_user_goes_with_files_of_all_bases_and_the_log(store: Store) -> None:
    for user in ("ann", "bob"):
        say(store, f"c-{user}", user)
        make(store, user)
    other = make(store, "ann", "other")
    told = forget_stopped(store, "ann")
    assert told is not None
    assert {table: count for table, count in told["rows_deleted"].items() if count} == {
        "adapter_versions": 1,
        "completions": 1,
    }
    assert (told["verified"], told["vacuumed"], told["searched"]["texts"]) == (True, True, 1)
    assert (told["searched"]["found"], told["searched"]["files"]) == ([], [])
    assert not other.parent.exists()
    assert [path.name for path in (store.path.parent / "adapters" / "base").iterdir()] == ["bob"]
    assert (rows(store, "completions"), rows(store, "adapter_versions")) == (["bob"], ["bob"])
    assert store.read(erasure.unfinished) == []
    assert store.log_path.stat().st_size == 0
    assert b"ann" not in store.path.read_bytes()


def test_no_pair_has_the_id_of_one_that_was_forgotten(tmp_path: Path) -> None:
    ids = list[int]()
    for user in ("ann", "bob", "ann", "ann", "bob"):
        with closing(Store(tmp_path / "edged.db")) as store:
            pair = (user, "good", f"bad {ids}", utc_now())
            ids += store.write(lambda db, pair=pair: record_pair(db, *pair, prompt="Well?")).result().pair_ids
            forget_stopped(store, "ann")
    assert ids == [1, 2, 3, 4, 5]


def test_forgetting_looks_at_no_pairs_of_others(store: Store) -> None:
    said: list[str] = []
    store.write(lambda db: db.conn.set_trace_callback(said.append)).result()
    forget_stopped(store, "ann")
    changes = [sql for sql in said if " pairs " in sql and sql.startswith(("UPDATE", "DELETE", "SELECT id"))]
    assert any("account" in sql for sql in changes)
    plans = store.read(lambda db: [row[3] for sql in changes for row in db.execute(f"EXPLAIN QUERY PLAN {sql}")])
    assert not [step for step in plans if step.startswith("SCAN pairs")]


def test_nothing_stored_is_told_and_files_alone_are_something(store: Store) -> None:
    assert forget_stopped(store, "ann") is None
    assert store.read(erasure.unfinished) == []
    folder = store.path.parent / "adapters" / "base" / "ann"
    folder.mkdir(parents=True)
    told = forget_stopped(store, "ann")
    assert told is not None
    assert not any(told["rows_deleted"].values())
    assert not folder.exists()


def test_an_interrupted_forgetting_is_finished_with_what_the_engine_wrote_since(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    say(store, "old", "ann")
    store.write(lambda db: erasure.begin_forgetting(db, "ann", "2025-02-02")).result()
    folder = make(store, "ann")
    kept = make(store, "bob")
    say(store, "new", "ann", created_at="2025-03-03")
    assert finish_forgetting(store, store.path.parent / "adapters") == []
    assert not folder.parent.exists()
    assert kept.exists()
    assert rows(store, "adapter_versions") == ["bob"]
    assert rows(store, "completions", "id") == ["new"], "what came after is new"
    assert store.read(erasure.unfinished) == []
    told = [record.getMessage() for record in caplog.records if "forgetting" in record.getMessage()]
    assert told[0] == "forgetting ann was interrupted: it is finished now"
    assert told[1].startswith("forgetting ann: a search of ")
    assert told[1].endswith("columns and all files found nothing")
    assert finish_forgetting(store, store.path.parent / "adapters") == []


def test_files_that_stay_keep_the_tombstone_and_their_user_from_being_served(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stays = make(store, "ann").parent
    goes = make(store, "ann", "other").parent
    real = erase_folder

    def erase(folder: Path) -> None:
        if folder == stays:
            raise PermissionError("not this one")
        real(folder)

    monkeypatch.setattr("edged.store.adapters.erase_folder", erase)
    told = forget_stopped(store, "ann")
    assert told is not None
    assert (told["verified"], told["searched"]["files"]) == (False, [str(stays), str(stays / "v000001" / "edged.json")])
    assert not goes.exists(), "the others are gone then"
    assert finish_forgetting(store, store.path.parent / "adapters") == ["ann"]
    assert [name for name, _ in store.read(erasure.unfinished)] == ["ann"]
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors[0].startswith("forgetting ann: its files cannot be deleted (not this one): ")
    assert errors[1].startswith("forgetting ann: the search found ")
    monkeypatch.undo()
    assert finish_forgetting(store, store.path.parent / "adapters") == []
    assert store.read(erasure.unfinished) == []


def test_whether_files_went_is_told_and_only_the_disk_may_refuse(caplog: pytest.LogCaptureFixture) -> None:
    assert deleted("ann", lambda: None)
    assert caplog.records == []

    def fails() -> None:
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        deleted("ann", fails)


def test_files_that_bear_the_name_or_name_the_adapter_are_found(tmp_path: Path) -> None:
    for name, text in {
        "ann/v1.json": "{}",
        "bob/a.json": '{"adapter": "ann"}',
        "bob/b.json": '{"adapter": "anna"}',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bob" / "a.txt").write_text('{"adapter": "ann"}')
    (tmp_path / "bob" / "c.json").mkdir()
    (tmp_path / "bob" / "d.json").write_bytes(b'\xff{"adapter": "ann"}')
    found = erasure.search_files(tmp_path, ["ann"])
    assert found[0] == str(tmp_path / "ann")
    assert sorted(found[1:]) == [str(tmp_path / "bob" / "a.json"), str(tmp_path / "bob" / "d.json")]


def test_a_completion_is_of_who_asked_and_who_answered(store: Store) -> None:
    say(store, "both", "ann", adapter="shared")
    say(store, "base", "ann", adapter=None)
    found = [store.read(lambda db, name=name: users_of_completion(db, name)) for name in ("both", "base", "none")]
    assert found == [{"ann", "shared"}, {"ann"}, set()]


def test_the_search_passes_over_versions_that_come_and_go(tmp_path: Path) -> None:
    sam = tmp_path / "base" / "sam"
    ended = threading.Event()

    def save_and_remove() -> None:
        while not ended.is_set():
            draft = sam / ".v1.draft"
            draft.mkdir(parents=True)
            (draft / "edged.json").write_text('{"adapter": "sam"}')
            shutil.rmtree(draft.rename(sam / "v1"))

    saving = threading.Thread(target=save_and_remove)
    saving.start()
    try:
        for _ in range(400):
            assert erasure.search_files(tmp_path, ["bob"]) == []
    finally:
        ended.set()
        saving.join()


def test_forgetting_an_adapter_ends_the_jobs_that_begin_with_it_and_leaves_what_is_no_file(store: Store) -> None:
    files = store.path.parent / "files"
    (files / "folder").mkdir(parents=True)
    make(store, "ann")
    row = JobRow("job", MOMENT, "bob", "base", "tiny:ann", "ann", "bobs", "dpo", {}, 1, "file", {})
    store.write(lambda db: insert_job(db, row)).result()
    draft = store.path.parent / "draft"
    draft.write_text("{}")
    kept = keep_file(store, "ann", "a.jsonl", "fine-tune", draft, "digest")
    told = forget_stopped(store, "ann")
    assert told is not None
    assert told["verified"]
    assert told["rows_deleted"]["files"] == 1
    found = store.read(lambda db: find_job(db, "job"))
    assert found is not None
    assert (found.status, found.parent, found.model) == ("failed", "", "")
    assert found.error == "the adapter that it began with was forgotten"
    assert [path.name for path in files.iterdir()] == ["folder"], f"{kept.id} is gone"


def test_what_was_made_until_a_forgetting_begins_is_told_by_it(store: Store) -> None:
    row = JobRow("job", MOMENT, "ann", "base", "tiny", "", "anns", "dpo", {}, 1, "file", {})
    store.write(lambda db: insert_job(db, row)).result()
    draft = store.path.parent / "draft"
    draft.write_text("{}")
    kept = keep_file(store, "ann", "a.jsonl", "fine-tune", draft, "digest")
    erased = store.write(lambda db: erasure.begin_forgetting(db, "ann", MOMENT)).result()
    assert (erased.file_ids, erased.jobs) == ([kept.id], [row])


def test_checkpoints_of_a_users_jobs_are_forgotten_with_the_user(store: Store) -> None:
    row = JobRow("job", MOMENT, "ann", "base", "tiny", "", "anns", "dpo", {}, 1, "file", {}, "succeeded")
    later = JobRow("later", MOMENT, "bob", "base", "tiny:anns@4", "anns@4", "bobs", "dpo", {}, 1, "file", {})

    def begin(db: Database) -> None:
        insert_job(db, row)
        insert_job(db, later)
        for step in (2, 4):
            assert keep_checkpoint(db, MOMENT, "job", step, f"anns@{step}", True)

    store.write(begin).result()
    folders = [make(store, "anns@4", base) for base in ("base", "other")]
    told = forget_stopped(store, "ann")
    assert told is not None
    assert told["verified"]
    assert told["rows_deleted"]["job_checkpoints"] == 2
    assert told["rows_deleted"]["adapter_versions"] == 1
    assert not any(folder.parent.exists() for folder in folders)
    assert store.read(erasure.unfinished) == []
    found = store.read(lambda db: find_job(db, "later"))
    assert found is not None
    assert (found.status, found.parent) == ("failed", "")


def with_checkpoints(store: Store, job: str, steps: range) -> None:
    """A job of ann's."""
    row = JobRow(job, MOMENT, "ann", "base", "tiny", "", "anns", "dpo", {}, 1, "file", {}, "succeeded")

    def begin(db: Database) -> None:
        insert_job(db, row)
        for step in steps:
            assert keep_checkpoint(db, MOMENT, job, step, f"anns@{step}", True)

    store.write(begin).result()


def test_a_checkpoint_whose_files_stay_is_told_and_is_all_that_is_not_forgotten(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_checkpoints(store, "job", range(2, 5))
    stays, *others = [make(store, name) for name in ("anns@2", "anns@3", "anns@4", "ann")]
    real = erase_folder

    def erase(folder: Path) -> None:
        if folder == stays.parent:
            raise PermissionError("not this one")
        real(folder)

    monkeypatch.setattr("edged.store.adapters.erase_folder", erase)
    told = forget_stopped(store, "ann")
    assert told is not None
    assert told["verified"] is False
    assert sorted(told["searched"]["files"]) == [str(stays.parent), str(stays / "edged.json")]
    assert not any(folder.parent.exists() for folder in others)
    assert [name for name, _ in store.read(erasure.unfinished)] == ["anns@2"]
    assert finish_forgetting(store, store.path.parent / "adapters") == ["anns@2"]
    monkeypatch.undo()
    assert finish_forgetting(store, store.path.parent / "adapters") == []
    assert store.read(erasure.unfinished) == []


def test_forgetting_asks_as_much_whatever_the_number_of_checkpoints(store: Store) -> None:
    asked: list[int] = []
    for steps in (range(2), range(2, 60)):
        with_checkpoints(store, f"job-{len(steps)}", steps)
        said: list[str] = []
        store.write(lambda db, said=said: db.conn.set_trace_callback(said.append)).result()
        told = forget_stopped(store, "ann")
        assert told is not None
        assert told["rows_deleted"]["job_checkpoints"] == len(steps)
        # A row's trigger is told as a comment.
        asked.append(sum(not line.startswith("--") for line in said))
    assert asked[0] == asked[1]


def test_a_checkpoint_has_a_name_that_is_free_and_a_job(store: Store) -> None:
    row = JobRow("job", MOMENT, "ann", "base", "tiny", "", "anns", "dpo", {}, 1, "file", {}, "running")
    other = JobRow("other", MOMENT, "ann", "base", "tiny", "", "anns@4", "dpo", {}, 1, "file", {})

    def keep(*about: Any) -> bool:
        return store.write(lambda db: keep_checkpoint(db, MOMENT, *about)).result()

    assert not keep("job", 2, "anns@2", True), "the job was forgotten"
    store.write(lambda db: insert_job(db, row)).result()
    store.write(lambda db: insert_job(db, other)).result()
    assert not keep("job", 2, "anns@2", False)
    assert keep("job", 2, "anns@2", True)
    assert keep("job", 2, "anns@2", False), "it is known"
    assert not keep("other", 2, "anns@2", True)
    assert not keep("job", 4, "anns@4", True), "an open job makes it"
    forget_stopped(store, "anns@2")
    assert not keep("job", 2, "anns@2", True), "it was forgotten"
    store.write(lambda db: jobs.drop_later_steps(db, "job", 0)).result()
    assert not keep("job", 2, "anns@2", True), "also where steps are taken again"
    assert store.read(lambda db: jobs.metrics_after(db, "job", 0, 9)) == []


def test_reports_of_jobs_are_deleted_in_slices(store: Store) -> None:
    for owner in ("ann", "bob"):
        row = JobRow(owner, MOMENT, owner, "base", "tiny", "", f"{owner}s", "dpo", {}, 1, "file", {}, "succeeded")
        store.write(lambda db, row=row: insert_job(db, row)).result()

        def report(db: Database, owner: str = owner) -> None:
            for number in range(1500):
                add_event(db, MOMENT, owner, f"step {number}", step=number)

        store.write(report).result()
    assert [store.write(lambda db: forget_reports(db, "ann")).result() for _ in range(3)] == [1000, 500, 0]
    assert len(store.read(lambda db: list_events(db, "bob", 2**62, 2000))) == 1500


def test_first_files_may_be_kept_at_once(tmp_path: Path) -> None:
    for turn in range(10):
        folder = tmp_path / str(turn)
        folder.mkdir()
        made = Store(folder / "edged.db")
        drafts = [folder / f"draft-{number}" for number in range(8)]
        for draft in drafts:
            draft.write_text("{}")
        gate = threading.Barrier(len(drafts))

        def keep(draft: Path, made: Store = made, gate: threading.Barrier = gate) -> str:
            gate.wait()
            return keep_file(made, "ann", "a.jsonl", "fine-tune", draft, "digest").id

        with ThreadPoolExecutor(len(drafts)) as threads:
            assert len(set(threads.map(keep, drafts))) == len(drafts)
        made.close()
