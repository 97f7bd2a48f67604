"""Checks of jobs' files: owners take turns, and what a check keeps is in the owner's quota."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from edged.align.feedback.examples import BadFile, ExampleFile
from tests.api.accounts import ANN, BOB, open_folder, root_only
from tests.api.jobs.test_accounts import speaking, until
from tests.api.jobs.test_jobs import SETTINGS, chats, ended, lines, upload
from tests.api.live import running
from tests.models import save_tiny

LINE = b'{"prompt":"a","completion":"b"}\n'


@root_only
@pytest.mark.slow
def test_a_small_file_is_not_checked_after_anothers_large_one() -> None:
    settings: dict[str, Any] = {**SETTINGS, "api__socket_mode": "0666"}
    with open_folder() as folder:
        save_tiny(folder / "tiny")
        live = running(folder / "run", folder / "tiny", **settings)
        with live as daemon, speaking(daemon, ANN) as ann, speaking(daemon, BOB) as bob:
            large = ann.fine_tuning.jobs.create(model="tiny", training_file=upload(ann, LINE * (1 << 20)))
            until(lambda: len(ann.fine_tuning.jobs.list_events(large.id).data) > 1)
            small = bob.fine_tuning.jobs.create(model="tiny", training_file=upload(bob, chats(1)))
            assert ended(bob, small.id).status == "succeeded"
            assert ann.fine_tuning.jobs.retrieve(large.id).status == "validating_files"


@pytest.mark.slow
def test_the_index_of_a_jobs_file_is_in_its_owners_quota(tmp_path: Path) -> None:
    live = running(tmp_path / "run", save_tiny(tmp_path / "tiny"), jobs__files_mb=1, **SETTINGS)
    with live as daemon, daemon.openai() as client:
        file_id = upload(client, LINE * (900 << 5))
        made = client.fine_tuning.jobs.create(model="tiny", training_file=file_id)
        failed = ended(client, made.id)
        assert (failed.status, failed.error.code, failed.error.param) == ("failed", "storage_full", "training_file")
        assert "1382400 bytes of you are stored, and jobs.files_mb = 1" in failed.error.message
        client.files.delete(file_id)
        file_id = upload(client, LINE * (600 << 5))
        made = client.fine_tuning.jobs.create(model="tiny", training_file=file_id)
        until(lambda: client.fine_tuning.jobs.retrieve(made.id).status != "validating_files")
        with pytest.raises(openai.APIStatusError, match="larger than 126976 bytes"):
            upload(client, LINE * (200 << 5))
        client.fine_tuning.jobs.cancel(made.id)
        assert upload(client, LINE * (200 << 5)), "its index is gone with the job"


def toggle(client: openai.OpenAI, job_id: str, times: int) -> None:
    for _ in range(times):
        client.fine_tuning.jobs.pause(job_id)
        client.fine_tuning.jobs.resume(job_id)


@root_only
def test_a_job_that_is_paused_and_resumed_without_end_leaves_few_rows() -> None:
    with open_folder() as folder:
        save_tiny(folder / "tiny")
        live = running(folder / "run", folder / "tiny", api__socket_mode="0666", **SETTINGS)
        with live as daemon, speaking(daemon, ANN) as ann:
            made = ann.fine_tuning.jobs.create(model="tiny", training_file=upload(ann, LINE * (1 << 18)))
            with pytest.raises(openai.RateLimitError, match="30 changes of jobs a minute"):
                toggle(ann, made.id, 120)
            told = [event.message for event in ann.fine_tuning.jobs.list_events(made.id, limit=100)]
            assert told.count("The job is paused") == told.count("The job goes on") == 1
            assert ann.fine_tuning.jobs.cancel(made.id).status == "cancelled"


def test_a_check_goes_on_where_it_was_left(tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_bytes(lines([{"prompt": f"word {number}", "completion": "b"} for number in range(10)]) + b"{\n")
    asked = iter(range(1000))
    found = ExampleFile(path, tmp_path, "supervised", lambda: next(asked) == 4)
    assert (found.complete, len(found)) == (False, 4)
    found.go_on(lambda: next(asked) == 8)
    assert (found.complete, len(found)) == (False, 7)
    with pytest.raises(BadFile, match=r"^line 11: "):
        found.go_on(lambda: False)
    path.write_bytes(path.read_bytes()[:-2])
    whole = ExampleFile(path, tmp_path, "supervised", lambda: True)
    whole.go_on(lambda: False)
    assert whole.complete
    assert [json.loads(json.dumps(pairs))[0]["prompt"] for _, pairs in whole.read([0, 9])] == ["word 0", "word 9"]
