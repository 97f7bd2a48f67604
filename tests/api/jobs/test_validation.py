"""Files that fine-tuning jobs are validated with, by the official OpenAI client and TRL's trainers."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from datasets import Dataset
from peft import PeftConfig
from safetensors.torch import load_file, save_file
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.align.dpo.test_dpo_exact import load_weights, peft_model
from tests.api.jobs.test_jobs import SETTINGS, chats, ended, lines, preferences, upload
from tests.api.live import LiveDaemon, running
from tests.models import byte_tokenizer, save_tiny, tiny_model

TRAINERS: dict[str, Any] = {"supervised": (SFTTrainer, SFTConfig, {}), "dpo": (DPOTrainer, DPOConfig, {"beta": 0.3})}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    root: Path = tmp_path_factory.mktemp("validation")
    save_tiny(root / "tiny")
    with running(root / "run", root / "tiny", **SETTINGS) as live:
        yield live


@pytest.fixture
def client(tiny: LiveDaemon) -> Iterator[openai.OpenAI]:
    with tiny.openai() as client:
        yield client


def examples(method: str, first: int, count: int) -> list[dict[str, str]]:
    """TRL's, with answers of different lengths."""
    rows = []
    for number in range(first, first + count):
        good, bad = "yes " * (1 + number % 3), f"no {number}"
        answers = {"completion": good} if method == "supervised" else {"chosen": good, "rejected": bad}
        rows.append({"prompt": f"word {number}? ", **answers})
    return rows


def metrics(client: openai.OpenAI, job_id: str) -> list[dict[str, Any]]:
    """A job's, oldest first."""
    events = [*client.fine_tuning.jobs.list_events(job_id, limit=100)]
    return [event.data for event in reversed(events) if event.type == "metrics"]


def by_trl(method: str, rows: list[dict[str, str]], adapter: Path, folder: Path) -> float:
    """TRL's loss of an adapter over examples; its reference is the adapter that the trainer is made with."""
    trainer_class, config, more = TRAINERS[method]
    quiet: Any = {"report_to": [], "use_cpu": True, "bf16": False, "max_length": None, "eos_token": "</s>"}
    if method == "dpo":
        del quiet["eos_token"]
    args = config(output_dir=str(folder), per_device_eval_batch_size=64, disable_tqdm=True, **quiet, **more)
    data = Dataset.from_list(rows)
    form = PeftConfig.from_pretrained(adapter)
    form.inference_mode = False
    model = peft_model(tiny_model(), config=form)
    about = {"train_dataset": data, "eval_dataset": data, "processing_class": byte_tokenizer()}
    trainer = trainer_class(model, args=args, **about)
    load_weights(trainer.model, load_file(adapter / "adapter_model.safetensors"))
    return float(trainer.evaluate()["eval_loss"])


@pytest.mark.parametrize("method", TRAINERS)
def test_the_loss_of_a_validation_file_is_trls(
    client: openai.OpenAI, tiny: LiveDaemon, tmp_path: Path, method: str
) -> None:
    hyperparameters = {"batch_size": 4, "n_epochs": 2, **TRAINERS[method][2]}
    how: Any = {"type": method, method: {"hyperparameters": hyperparameters}}
    valid = examples(method, 100, 7)
    training, validation = (upload(client, lines(rows)) for rows in (examples(method, 0, 10), valid))
    made = client.fine_tuning.jobs.create(
        model="tiny", training_file=training, validation_file=validation, suffix=method, method=how
    )
    job = ended(client, made.id)
    assert (job.status, job.validation_file) == ("succeeded", validation), job.error
    steps = [each for each in metrics(client, job.id) if "train_loss" in each]
    known = [each for each in metrics(client, job.id) if "train_loss" not in each]
    assert [each["step"] for each in known] == [3, 6]
    assert all(each["valid_loss"] == each["full_valid_loss"] for each in known)
    assert max(each["valid_loss"] for each in known) < steps[0]["train_loss"], "the examples are alike"
    newest = max(tiny.data.glob(f"adapters/*/{method}/v*"))
    wanted = by_trl(method, valid, newest, tmp_path)
    assert known[1]["full_valid_loss"] == pytest.approx(wanted, rel=1e-4)
    assert job.trained_tokens == sum(each["tokens"] for each in steps)
    table = [row.split(",") for row in client.files.content(job.result_files[0]).text.splitlines()]
    assert table[0][:4] == ["step", "train_loss", "valid_loss", "full_valid_loss"]
    assert [int(row[0]) for row in table[1:]] == [1, 2, 3, 4, 5, 6]
    assert [row[2] != "" for row in table[1:]] == [False, False, True] * 2
    assert float(table[6][3]) == known[1]["full_valid_loss"]


def test_a_part_of_a_large_file_is_validated_at_an_epochs_end_and_all_of_it_at_the_jobs(client: openai.OpenAI) -> None:
    training, validation = upload(client, preferences(8)), upload(client, preferences(300))
    how: Any = {"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 8, "n_epochs": 2}}}
    made = client.fine_tuning.jobs.create(
        model="tiny", training_file=training, validation_file=validation, suffix="large", method=how
    )
    assert ended(client, made.id).status == "succeeded"
    first, last = (each for each in metrics(client, made.id) if "valid_loss" in each)
    assert "full_valid_loss" not in first
    assert last["full_valid_loss"] != last["valid_loss"]
    assert last["full_valid_loss"] == pytest.approx(last["valid_loss"], rel=0.1)
    told = [event.message for event in client.fine_tuning.jobs.list_events(made.id).data]
    assert f"step 2 of 2: validation loss {last['valid_loss']:.4f}, full validation loss" in told[1]


def test_a_part_is_as_many_examples_as_it_says_whatever_the_batch(client: openai.OpenAI) -> None:
    training, validation = upload(client, preferences(4)), upload(client, preferences(131))
    how: Any = {"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 130, "n_epochs": 1}}}
    made = client.fine_tuning.jobs.create(
        model="tiny", training_file=training, validation_file=validation, suffix="whole", method=how
    )
    assert ended(client, made.id).status == "succeeded"
    (known,) = (each for each in metrics(client, made.id) if "valid_loss" in each)
    assert known["valid_loss"] == known["full_valid_loss"]


def test_examples_that_cannot_be_rendered_are_left_out_and_what_was_trained_stays(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    for path in (model / "tokenizer_config.json", model / "chat_template.jinja"):
        if path.suffix == ".json":
            path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": None}))
        else:
            path.unlink(missing_ok=True)
    with running(tmp_path / "run", model, **SETTINGS) as live, live.openai() as client:
        training = upload(client, lines(examples("supervised", 0, 4)))
        made = client.fine_tuning.jobs.create(
            model="tiny", training_file=training, validation_file=upload(client, chats(3)), suffix="plain"
        )
        assert ended(client, made.id).status == "succeeded"
        assert all("valid_loss" not in each for each in metrics(client, made.id))
        warnings = [each for each in client.fine_tuning.jobs.list_events(made.id).data if each.level == "warn"]
    (told,) = (each.message for each in warnings)
    assert told.startswith("validation file, line ")
    assert told.endswith("further examples that are left out are not told")


def test_a_validation_whose_loss_is_not_finite_is_left_out_and_training_goes_on(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    weights = load_file(model / "model.safetensors")
    (bad,) = byte_tokenizer().encode("~", add_special_tokens=False)
    weights["model.embed_tokens.weight"][bad] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    how: Any = {"type": "supervised", "supervised": {"hyperparameters": {"batch_size": 2, "n_epochs": 2}}}
    rows = [{"prompt": "word ~?", "completion": "yes"}, *examples("supervised", 10, 3)]
    with running(tmp_path / "run", model, **SETTINGS) as live, live.openai() as client:
        files = {"training_file": lines(examples("supervised", 0, 4)), "validation_file": lines(rows)}
        given: Any = {name: upload(client, content) for name, content in files.items()}
        made = client.fine_tuning.jobs.create(model="tiny", suffix="spoilt", method=how, **given)
        job = ended(client, made.id)
        assert job.status == "succeeded", job.error
        assert [each["step"] for each in metrics(client, made.id)] == [1, 2, 3, 4]
        assert all("valid_loss" not in each for each in metrics(client, made.id))
        told = [each.message for each in client.fine_tuning.jobs.list_events(made.id).data if each.level == "warn"]
        kept = [each.step_number for each in client.fine_tuning.jobs.checkpoints.list(made.id)]
    assert told == [f"The validation after step {step} is left out: loss is nan" for step in (4, 2)]
    assert kept == [4, 2]


def test_the_estimated_end_counts_the_validation_that_is_left(client: openai.OpenAI) -> None:
    training, validation = upload(client, preferences(1)), upload(client, preferences(3000))
    how: Any = {"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 1, "n_epochs": 1}}}
    made = client.fine_tuning.jobs.create(
        model="tiny", training_file=training, validation_file=validation, suffix="ending", method=how
    )
    deadline = time.monotonic() + 60
    while (estimated := client.fine_tuning.jobs.retrieve(made.id).estimated_finish) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert estimated > time.time() + 2, "its only step was taken, and most of 3000 batches are left"
    client.fine_tuning.jobs.cancel(made.id)


def test_a_loss_is_told_once_though_the_jobs_end_is_stored_late(client: openai.OpenAI, tiny: LiveDaemon) -> None:
    training, validation = upload(client, preferences(4)), upload(client, preferences(3))
    how: Any = {"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 4, "n_epochs": 1}}}
    with contextlib.closing(sqlite3.connect(tiny.data / "edged.db", timeout=30, isolation_level=None)) as db:
        refused = "NEW.status = 'succeeded'"
        db.execute(f"CREATE TRIGGER no_end BEFORE UPDATE ON jobs WHEN {refused} BEGIN SELECT RAISE(ABORT, 'no'); END")
        try:
            made = client.fine_tuning.jobs.create(
                model="tiny", training_file=training, validation_file=validation, suffix="late", method=how
            )
            deadline = time.monotonic() + 60
            while "fine-tuning jobs wait" not in tiny.log:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            db.execute("DROP TRIGGER no_end")
    job = ended(client, made.id)
    assert [("valid_loss" in each, each["step"]) for each in metrics(client, made.id)] == [(False, 1), (True, 1)]
    assert job.trained_tokens == metrics(client, made.id)[0]["trained_tokens"]
    goes_on = [
        e for e in client.fine_tuning.jobs.list_events(made.id) if e.message.startswith("Fine-tuning job goes on")
    ]
    assert goes_on, "it was begun again after its last step"


def test_a_validation_file_that_cannot_be_is_refused(client: openai.OpenAI) -> None:
    training = upload(client, chats(2))
    refused = [("file-none", "does not exist"), (training, "same content"), (upload(client, chats(2)), "same content")]
    for file_id, told in refused:
        with pytest.raises(openai.APIStatusError, match=told) as error:
            client.fine_tuning.jobs.create(model="tiny", training_file=training, validation_file=file_id)
        assert error.value.param == "validation_file"
    bad = upload(client, preferences(1))
    made = client.fine_tuning.jobs.create(model="tiny", training_file=training, validation_file=bad)
    job = ended(client, made.id)
    assert (job.error.code, job.error.param) == ("invalid_validation_file", "validation_file")
    assert job.error.message.startswith('line 1: "input" is of a file of preferences, which dpo learns')


def test_a_file_that_has_expired_is_deleted_once_no_job_needs_it(client: openai.OpenAI, tiny: LiveDaemon) -> None:
    expires: Any = {"anchor": "created_at", "seconds": 3600}
    made = [
        client.files.create(file=("a.jsonl", preferences(count)), purpose="fine-tune", expires_after=expires)
        for count in (50, 2, 3)
    ]
    assert all(file.expires_at == file.created_at + 3600 for file in made)
    how: Any = {"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 1, "n_epochs": 50}}}
    job = client.fine_tuning.jobs.create(
        model="tiny", training_file=made[0].id, validation_file=made[1].id, suffix="needs", method=how
    )
    with contextlib.closing(sqlite3.connect(tiny.data / "edged.db", timeout=30, isolation_level=None)) as db:
        db.execute("UPDATE files SET expires_at = created_at WHERE id IN (?, ?)", [file.id for file in made[:2]])
    with pytest.raises(openai.ConflictError, match=f'needed by job "{job.id}"'):
        client.files.delete(made[1].id)
    with tiny.http() as http:
        assert "files" not in http.post("/v1/store/prune").json()["deleted"]
        assert client.fine_tuning.jobs.cancel(job.id).validation_file == made[1].id
        assert http.post("/v1/store/prune").json()["deleted"]["files"] == 2
    left = {file.id for file in client.files.list()}
    assert left & {file.id for file in made} == {made[2].id}
    assert {path.name for path in (tiny.data / "files").iterdir()} == left


@pytest.mark.parametrize(
    ("expires", "told"),
    [
        ({"anchor": "created_at"}, r'expires_after\[seconds\] = "": it may be 3600 to 2592000'),
        ({"anchor": "created_at", "seconds": 3599}, r'expires_after\[seconds\] = "3599"'),
        ({"anchor": "created_at", "seconds": 2_592_001}, r'expires_after\[seconds\] = "2592001"'),
        ({"anchor": "created_at", "seconds": 4000.5}, r'expires_after\[seconds\] = "4000.5"'),
        (
            {"anchor": "last_used_at", "seconds": 3600},
            r'expires_after\[anchor\] = "last_used_at": it may be "created_at"',
        ),
        ({"seconds": 3600}, r'expires_after\[anchor\] = ""'),
    ],
)
def test_a_file_does_not_expire_at_any_time(client: openai.OpenAI, expires: Any, told: str) -> None:
    before = {file.id for file in client.files.list()}
    with pytest.raises(openai.BadRequestError, match=told) as error:
        client.files.create(file=("a.jsonl", chats(1)), purpose="fine-tune", expires_after=expires)
    assert error.value.param in told.replace("\\", "")
    assert {file.id for file in client.files.list()} == before
