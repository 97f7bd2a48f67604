"""Checkpoints of fine-tuning jobs: versions at the ends of epochs that answer under names of their own."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from safetensors.torch import load_file

from edged.cli.feedback import send
from edged.client.client import Address, Client
from tests.api.jobs.test_jobs import GREEDY, SETTINGS, ended, preferences, upload
from tests.api.live import LiveDaemon, running
from tests.api.test_erasing import kept_by_the_disk
from tests.models import save_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    root: Path = tmp_path_factory.mktemp("checkpoints")
    save_tiny(root / "tiny")
    with running(root / "run", root / "tiny", store__keep_versions=50, **SETTINGS) as live:
        yield live


@pytest.fixture
def client(tiny: LiveDaemon) -> Iterator[openai.OpenAI]:
    with tiny.openai() as client:
        yield client


def trained(client: openai.OpenAI, suffix: str, epochs: int, **more: Any) -> Any:
    """A job of two steps an epoch that has ended."""
    how: Any = {"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 2, "n_epochs": epochs}}}
    file_id = upload(client, preferences(4))
    made = client.fine_tuning.jobs.create(
        **{"model": "tiny", "training_file": file_id, "suffix": suffix, "method": how, "seed": 3, **more}
    )
    job = ended(client, made.id)
    assert job.status == "succeeded", job.error
    return job


def kept(client: openai.OpenAI, job_id: str, **page: int) -> list[tuple[int, str]]:
    return [(each.step_number, each.fine_tuned_model_checkpoint) for each in checkpoints(client, job_id, **page)]


def checkpoints(client: openai.OpenAI, job_id: str, **page: int) -> list[Any]:
    return list(client.fine_tuning.jobs.checkpoints.list(job_id, **page))


def said(client: openai.OpenAI, model: str) -> str:
    return client.chat.completions.create(model=model, **GREEDY).choices[0].message.content or ""


def weights(data: Path, adapter: str, version: int) -> dict[str, Any]:
    (folder,) = data.glob(f"adapters/*/{adapter}/v{version:06d}")
    return load_file(folder / "adapter_model.safetensors")


def test_each_epochs_version_answers_as_it_did(client: openai.OpenAI, tiny: LiveDaemon) -> None:
    job = trained(client, "three", 3, validation_file=upload(client, preferences(3)))
    found = checkpoints(client, job.id)
    assert [each.step_number for each in found] == [6, 4, 2]
    assert [each.fine_tuned_model_checkpoint for each in found] == ["tiny:three", "tiny:three@4", "tiny:three@2"]
    assert len({each.id for each in found}) == 3
    known: dict[int, dict[str, Any]] = {}
    for event in client.fine_tuning.jobs.list_events(job.id, limit=100):
        if event.type == "metrics":
            known.setdefault(event.data["step"], {}).update(event.data)
    for each in found:
        assert each.object == "fine_tuning.job.checkpoint"
        assert each.fine_tuning_job_id == job.id
        assert job.created_at <= each.created_at <= job.finished_at
        told = known[each.step_number]
        assert each.metrics.step == each.step_number
        assert each.metrics.train_loss == told["train_loss"]
        assert each.metrics.valid_loss == told["valid_loss"]
        assert each.metrics.full_valid_loss == told.get("full_valid_loss")
    assert found[0].metrics.full_valid_loss is not None
    assert kept(client, job.id, limit=1) == kept(client, job.id), "page by page"
    page = client.fine_tuning.jobs.checkpoints.list(job.id, after=found[0].id, limit=1)
    assert ([each.id for each in page.data], page.has_more) == ([found[1].id], True)
    assert client.fine_tuning.jobs.checkpoints.list(job.id, after="ftckpt-none").data == []
    with pytest.raises(openai.NotFoundError):
        client.fine_tuning.jobs.checkpoints.list("ftjob-none")
    served = {model.id for model in client.models.list()}
    assert {"tiny:three", "tiny:three@2", "tiny:three@4"} <= served
    answers = {model: said(client, model) for model in ("tiny", "tiny:three@2", "tiny:three@4", "tiny:three")}
    assert len(set(answers.values())) > 2, "the versions differ"
    with tiny.http() as http:
        for step in (2, 4):
            assert weights(tiny.data, f"three@{step}", 1).keys() == weights(tiny.data, "three", step).keys()
            for name, tensor in weights(tiny.data, f"three@{step}", 1).items():
                assert tensor.equal(weights(tiny.data, "three", step)[name])
            assert http.post("/v1/adapters/three/rollback", json={"version": step}).status_code == 200
            assert said(client, "tiny:three") == answers[f"tiny:three@{step}"]
        assert http.get("/v1/adapters/three@2/export").content
        listed = {each["adapter"]: each["version"] for each in http.get("/v1/adapters").json()["adapters"]}
    assert listed["three@2"] == listed["three@4"] == 1


def test_the_last_three_are_kept(client: openai.OpenAI, tiny: LiveDaemon) -> None:
    job = trained(client, "five", 5)
    names = ["tiny:five", "tiny:five@8", "tiny:five@6", "tiny:five@4"]
    assert kept(client, job.id) == list(zip((10, 8, 6, 4), names, strict=True))
    assert not {model.id for model in client.models.list()} & {"tiny:five@2", "tiny:five@10"}
    assert not list(tiny.data.glob("adapters/*/five@2"))
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("tiny:five@2")
    with tiny.http() as http:
        assert http.get("/v1/adapters/five@2").status_code == 404
    with pytest.raises(openai.ConflictError, match='"five@2" is a user'):
        client.fine_tuning.jobs.create(model="tiny", training_file=job.training_file, suffix="five@2")


def test_a_name_that_is_somebodys_is_left_to_him(client: openai.OpenAI, tiny: LiveDaemon) -> None:
    client.chat.completions.create(model="tiny", user="tom@2", **GREEDY)
    before = trained(client, "tom@4", 1)
    job = trained(client, "tom", 4)
    assert kept(client, job.id) == [(8, "tiny:tom"), (6, "tiny:tom@6")]
    assert kept(client, before.id) == [(2, "tiny:tom@4")]
    told = [event.message for event in client.fine_tuning.jobs.list_events(job.id).data if event.level == "warn"]
    assert told == [
        f'Step {step} has no checkpoint: "tom@{step}" is somebody\'s: give another suffix' for step in (4, 2)
    ]
    assert client.models.retrieve("tiny:tom@4")
    with tiny.http() as http:
        assert [each["version"] for each in http.get("/v1/adapters/tom@4").json()["versions"]] == [2, 1]
    long = trained(client, "l" * 64, 2)
    assert kept(client, long.id) == [(4, f"tiny:{'l' * 64}")]
    told = [event.message for event in client.fine_tuning.jobs.list_events(long.id).data if event.level == "warn"]
    assert told[0].endswith('@2" has over 64 characters: give a shorter suffix')


def test_a_checkpoint_stays_as_it_is(client: openai.OpenAI, tiny: LiveDaemon) -> None:
    trained(client, "firm", 2)
    asked = client.chat.completions.create(model="tiny:firm@2", user="firm@2", **GREEDY)
    edit = {"completion_id": asked.id, "signal": "edit", "text": "better"}
    pair = {"user": "firm@2", "prompt": "word", "chosen": "yes", "rejected": "no"}
    with tiny.http() as http:
        for body in (edit, pair):
            told = http.post("/v1/feedback", json=body).json()
            progress = http.get(f"/v1/feedback/{told['id']}").json()
            assert (told["pair_ids"], progress["pairs"], progress["settled"]) == ([], [], True)
            reason = "firm@2 is a checkpoint of a fine-tuning job, which stays as it is: no feedback teaches it"
            assert {told["reason"], progress["reason"]} == {reason}
        with closing(Client(Address(sockets=(tiny.socket,)), 30.0)) as sender:
            imported = send(sender, "firm@2", iter([(1, pair)]), lambda *_: None)
        assert (imported.bad, imported.feedback_ids) == ([{"line": 1, "error": reason}], [])
        export = http.get("/v1/adapters/firm@2/export").content
        changes = [
            http.post("/v1/adapters/firm@2/import", content=export),
            http.post("/v1/adapters/firm@2/rollback", json={"version": 0}),
            http.post("/v1/adapters/firm@2/mend"),
            http.put("/v1/adapters/firm@2/preference", json={"text": "formal"}),
            http.post("/v1/adapters/firm@2/strike", json={"key": "short"}),
        ]
        assert [answer.status_code for answer in changes] == [409] * 5
        assert {answer.json()["error"]["code"] for answer in changes} == {"checkpoint"}
        assert [each["version"] for each in http.get("/v1/adapters/firm@2").json()["versions"]] == [1]
    assert trained(client, "next", 1, model="tiny:firm@2").fine_tuned_model == "tiny:next"


def test_forgetting_a_jobs_adapter_forgets_its_checkpoints(client: openai.OpenAI, tiny: LiveDaemon) -> None:
    job = trained(client, "gone", 5)
    client.chat.completions.create(model="tiny:gone@6", **GREEDY)
    with tiny.http() as http:
        assert http.delete("/v1/adapters/gone@8").json()["verified"]
        assert [step for step, _ in kept(client, job.id)] == [10, 6, 4], "what is left of it"
        told = client.fine_tuning.jobs.list_events(job.id).data[0]
        assert (told.type, told.message) == ("message", "The checkpoint after step 8 was forgotten")
        told = http.delete("/v1/adapters/gone").json()
        assert told["verified"]
        assert told["rows_deleted"]["job_checkpoints"] == 3
        assert told["rows_deleted"]["completions"] == 1
    assert not [model.id for model in client.models.list() if "gone" in model.id]
    assert not [path for path in tiny.data.glob("adapters/*/*") if "gone" in path.name]
    with closing(sqlite3.connect(tiny.data / "edged.db", timeout=30)) as db:
        for table in ("job_checkpoints", "adapter_versions", "completions"):
            assert db.execute(f"SELECT * FROM {table} WHERE adapter LIKE 'gone%'").fetchall() == []
        assert db.execute("SELECT * FROM forgetting").fetchall() == []
    assert trained(client, "gone", 2).fine_tuned_model == "tiny:gone"


def test_a_checkpoint_whose_files_stay_keeps_no_other_from_being_forgotten(
    client: openai.OpenAI, tiny: LiveDaemon
) -> None:
    trained(client, "stays", 3)
    (files,) = tiny.data.glob("adapters/*/stays@2")
    with tiny.http() as http:
        export = http.get("/v1/adapters/stays/export").content
        with kept_by_the_disk(files):
            told = http.delete("/v1/adapters/stays").json()
            assert told["verified"] is False
            assert str(files) in told["searched"]["files"]
            refused = http.post("/v1/adapters/stays@2/import", content=export)
            assert refused.json()["error"]["code"] == "not_forgotten_yet"
            for name in ("stays@4", "stays"):
                assert http.post(f"/v1/adapters/{name}/import", content=export).status_code == 200
        assert http.delete("/v1/adapters/stays@2").json()["verified"] is True


def test_a_job_that_ends_early_keeps_the_checkpoints_that_it_has(client: openai.OpenAI) -> None:
    how: Any = {"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 1, "n_epochs": 50}}}
    file_id = upload(client, preferences(6))
    made = client.fine_tuning.jobs.create(model="tiny", training_file=file_id, suffix="early", method=how)
    deadline = time.monotonic() + 60
    while not kept(client, made.id):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert client.fine_tuning.jobs.cancel(made.id).status == "cancelled"
    found = kept(client, made.id)
    assert found
    assert all(name == f"tiny:early@{step}" and step % 6 == 0 for step, name in found)
    assert said(client, found[0][1])
