"""Keeping checkpoints of jobs while they are forgotten, cannot be written, are needed, or have somebody's name."""

from __future__ import annotations

import json
import pwd
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edged.align.feedback.pair import JobStepped
from edged.align.jobs import JobPace, JobPlan
from edged.api.jobs.runner import JobRunner
from edged.settings.live import Live
from edged.settings.load import AlignSettings, load_settings
from edged.store import Store, StoreError, erasure
from edged.store.jobs import jobs
from edged.text.tokenizer import Tokenizer
from tests.engine.harness import running_engine
from tests.models import byte_tokenizer
from tests.store.rows import MOMENT

JOB = jobs.JobRow("job", MOMENT, "ann", "base", "tiny", "", "made", "dpo", {}, 1, "file", {}, "running")


@contextmanager
def keeper(folder: Path, users: tuple[str, ...] = ()) -> Iterator[JobRunner]:
    """The runner of a job whose adapter has a version; a token may speak for `users`."""
    token = {"name": "other", "sha256": "0" * 64, "roles": ["use"], "users": users}
    tokens = json.dumps([token] if users else [])
    settings = Live(load_settings(environ={}, overrides={"access.tokens": tokens}))
    store = Store(folder / "db" / "edged.db")
    with running_engine(folder) as (engine, _):
        weights = engine.trainer.adapter_cache.build("made").tensors()
        assert engine.import_adapter("made", weights, "imported").result(30) == 1
        store.write(lambda db: jobs.insert_job(db, JOB)).result()
        tokenizer = Tokenizer(byte_tokenizer(), "tiny")
        yield JobRunner(store, tokenizer, engine, settings, "base", "tiny", lambda: None)
    store.close()


@contextmanager
def held(
    monkeypatch: pytest.MonkeyPatch, files: Any, method: str, which: Callable[..., bool]
) -> Iterator[threading.Event]:
    """Calls of a method of a disk's wait within; the event tells of the first."""
    real, entered, may = getattr(files, method), threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        if which(*arguments):
            entered.set()
            assert may.wait(20)
        return real(*arguments)

    monkeypatch.setattr(files, method, slow)
    yield entered
    may.set()


def kept(keeping: JobRunner) -> list[str]:
    return [name for name in sorted(keeping.engine.adapters()) if "@" in name]


def forgets(keeping: JobRunner, name: str) -> Any:
    """The beginning of what the eraser does."""
    keeping.store.write(lambda db: erasure.begin_forgetting(db, name, MOMENT)).result()
    return keeping.engine.forget(name)


def test_a_checkpoint_that_is_forgotten_before_it_is_made_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with keeper(tmp_path) as keeping, ThreadPoolExecutor() as threads:
        with held(monkeypatch, keeping.engine.adapter_files, "load", lambda name, _: name == "made") as copied:
            keeps = threads.submit(keeping._keep_checkpoint, JOB, 2)
            assert copied.wait(20)
            with pytest.raises(KeyError):
                forgets(keeping, "made@2").result(20)
        keeps.result(20)
        assert kept(keeping) == []
        assert not [*tmp_path.glob("data/**/made@2")]


def test_a_checkpoint_that_is_forgotten_while_it_is_written_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with keeper(tmp_path) as keeping, ThreadPoolExecutor() as threads:
        with held(monkeypatch, keeping.engine.adapter_files, "save", lambda it: it.adapter == "made@2") as written:
            keeps = threads.submit(keeping._keep_checkpoint, JOB, 2)
            assert written.wait(20)
            gone = forgets(keeping, "made@2")
        gone.result(20)
        keeps.result(20)
        assert kept(keeping) == []
        assert not [*tmp_path.glob("data/**/made@2")]
        keeping._keep_checkpoint(JOB, 4)
        assert kept(keeping) == ["made@4"]


def test_a_checkpoint_that_was_forgotten_is_not_made_again(tmp_path: Path) -> None:
    with keeper(tmp_path) as keeping:
        keeping._keep_checkpoint(JOB, 2)
        forgets(keeping, "made@2").result(20)
        for step in (2, 4):
            keeping._keep_checkpoint(JOB, step)
        assert kept(keeping) == ["made@4"]
        (event,) = keeping.store.read(lambda db: jobs.list_events(db, "job", 2**62, 9))
        assert (event.message, event.step, event.level) == ("The checkpoint after step 2 was forgotten", 2, "info")


def test_no_step_follows_before_a_checkpoint_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with keeper(tmp_path) as keeping:
        files = keeping.engine.adapter_files
        real = files.save

        def refuses(snapshot: Any) -> Any:
            if snapshot.adapter == "made@2":
                raise OSError("no space left")
            return real(snapshot)

        monkeypatch.setattr(files, "save", refuses)
        for _ in range(2):
            with pytest.raises(StoreError, match="could not be written to disk"):
                keeping._keep_checkpoint(JOB, 2)
            assert files.versions("made@2") == []
        monkeypatch.undo()
        keeping._keep_checkpoint(JOB, 2)
        assert files.versions("made@2") == [1]


def test_a_checkpoint_that_an_open_job_begins_with_is_kept_until_that_has_ended(tmp_path: Path) -> None:
    later = replace(JOB, id="later", adapter="next", parent="made@2", status="queued")
    with keeper(tmp_path) as keeping:
        keeping._keep_checkpoint(JOB, 2)
        keeping.store.write(lambda db: jobs.insert_job(db, later)).result()
        for step in (4, 6, 8, 10):
            keeping._keep_checkpoint(JOB, step)
        assert kept(keeping) == ["made@10", "made@2", "made@6", "made@8"]
        keeping.store.write(lambda db: jobs.update_job(db, "later", status="cancelled")).result()
        keeping._keep_checkpoint(JOB, 12)
        assert kept(keeping) == ["made@10", "made@12", "made@8"]


@pytest.mark.parametrize(
    ("users", "account", "free"),
    [
        ((), "", True),
        (("made@2",), "", False),
        (("made@*",), "", False),
        (("ma*", "*"), "", True),
        ((), "made@2", False),
        ((), "made@4", True),
    ],
)
def test_no_checkpoint_takes_a_name_that_is_an_accounts_or_granted_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: tuple[str, ...], account: str, free: bool
) -> None:
    def of_name(name: str) -> Any:
        if name != account:
            raise KeyError(name)
        return pwd.struct_passwd((name, "x", 5001, 5001, "", "/", "/bin/sh"))

    with keeper(tmp_path, users) as keeping:
        monkeypatch.setattr(pwd, "getpwnam", of_name)
        keeping._keep_checkpoint(JOB, 2)
        assert kept(keeping) == (["made@2"] if free else [])


def test_a_validation_that_is_left_out_changes_no_estimated_end(tmp_path: Path) -> None:
    plan = JobPlan("job", "made", AlignSettings(), 50, 1, 2, 0)
    with keeper(tmp_path) as keeping:
        keeping._under_way.add("job")
        pace = keeping.paces["job"] = JobPace()
        keeping.on_records([JobStepped("job", "made", 50, 51, 100, seconds=2.0)])
        assert keeping._next_step(JOB, plan) is not None
        now = time.time()
        assert pace.finish_s(now) == round(now + 100)
        keeping.on_records([JobStepped("job", "made", 50, 51, 100, error="loss is nan", left_out=True)])
        assert keeping._next_step(JOB, plan) is not None
        assert pace.finish_s(now) == round(now + 100)
        keeping.on_records([JobStepped("job", "made", 51, 52, 100, seconds=2.0)])
        assert keeping._next_step(JOB, plan) is not None
        assert pace.finish_s(now) == round(now + 98)
