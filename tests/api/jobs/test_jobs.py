"""Fine-tuning by file, with the official OpenAI client."""

from __future__ import annotations

import contextlib
import getpass
import json
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.live import LiveDaemon, running
from tests.api.test_import import archive, export_of, other_form, send
from tests.models import save_tiny

SETTINGS = {"store__save_every_s": 0.1, "align__rank": 4, "jobs__learning_rate": 0.01}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    root: Path = tmp_path_factory.mktemp("jobs")
    save_tiny(root / "tiny")
    with running(root / "run", root / "tiny", **SETTINGS) as live:
        yield live


@pytest.fixture
def client(tiny: LiveDaemon) -> Iterator[openai.OpenAI]:
    with tiny.openai() as client:
        yield client


def preferences(count: int) -> bytes:
    """OpenAI's preferences."""
    rows = [
        {
            "input": {"messages": [{"role": "user", "content": f"word {number}?"}]},
            "preferred_output": [{"role": "assistant", "content": "yes " * (1 + number % 3)}],
            "non_preferred_output": [{"role": "assistant", "content": f"no {number}"}],
        }
        for number in range(count)
    ]
    return lines(rows)


def chats(count: int) -> bytes:
    """OpenAI's chats of two turns."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"word {number}?"},
                {"role": "assistant", "content": "which one"},
                {"role": "user", "content": "that"},
                {"role": "assistant", "content": "yes"},
            ]
        }
        for number in range(count)
    ]
    return lines(rows)


def lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def upload(client: openai.OpenAI, content: bytes) -> str:
    return client.files.create(file=("examples.jsonl", content), purpose="fine-tune").id


def ended(client: openai.OpenAI, job_id: str, within_s: float = 60.0) -> Any:
    deadline = time.monotonic() + within_s
    while (job := client.fine_tuning.jobs.retrieve(job_id)).status in ("validating_files", "queued", "running"):
        assert time.monotonic() < deadline, client.fine_tuning.jobs.list_events(job_id).data[:3]
        time.sleep(0.05)
    return job


def test_preferences_become_an_adapter_that_answers(client: openai.OpenAI) -> None:
    file_id = upload(client, preferences(7))
    method: Any = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2, "batch_size": 2, "n_epochs": 2}}}
    made = client.fine_tuning.jobs.create(
        model="tiny", training_file=file_id, suffix="polite", method=method, seed=5, metadata={"for": "test"}
    )
    assert made.status in ("validating_files", "queued", "running")
    assert made.fine_tuned_model is None
    job = ended(client, made.id)
    assert (job.status, job.fine_tuned_model, job.error) == ("succeeded", "tiny:polite", None)
    assert (job.seed, job.training_file, job.metadata) == (5, file_id, {"for": "test"})
    assert job.method.dpo.hyperparameters.beta == 0.2
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=3))
    assert events[0].message == "The job has successfully completed: tiny:polite is ready"
    metrics = [event.data for event in reversed(events) if event.type == "metrics"]
    assert [each["step"] for each in metrics] == list(range(1, 9))
    assert metrics[0]["train_loss"] == pytest.approx(0.693, abs=0.01)
    assert metrics[-1]["train_loss"] < metrics[0]["train_loss"]
    assert job.trained_tokens == sum(each["tokens"] for each in metrics)
    table = client.files.content(job.result_files[0]).text.splitlines()
    assert table[0] == "step,train_loss,valid_loss,full_valid_loss,learning_rate,tokens,tokens_per_s"
    assert len(table) == 9
    assert "tiny:polite" in [model.id for model in client.models.list()]
    answers = {model: client.chat.completions.create(model=model, **GREEDY) for model in ("tiny", "tiny:polite")}
    assert answers["tiny"].choices[0].message.content != answers["tiny:polite"].choices[0].message.content
    assert [each.id for each in client.fine_tuning.jobs.list()] == [job.id]


def test_chats_are_learned_turn_by_turn_on_another_adapter(client: openai.OpenAI) -> None:
    first = client.fine_tuning.jobs.create(model="tiny", training_file=upload(client, chats(3)), suffix="first", seed=1)
    assert ended(client, first.id).fine_tuned_model == "tiny:first"
    file_id = upload(client, chats(4))
    hyperparameters: Any = {"n_epochs": 1, "batch_size": 4}
    made = client.fine_tuning.jobs.create(
        model="tiny:first", training_file=file_id, suffix="second", hyperparameters=hyperparameters
    )
    job = ended(client, made.id)
    assert (job.status, job.model, job.fine_tuned_model) == ("succeeded", "tiny:first", "tiny:second")
    assert job.method.type == "supervised"
    losses = {}
    for name in (first.id, made.id):
        events = client.fine_tuning.jobs.list_events(name, limit=100).data
        losses[name] = [event.data["train_loss"] for event in events if event.type == "metrics"]
    assert len(losses[made.id]) == 1
    assert losses[made.id][0] < losses[first.id][-1] / 2, "it goes on where the other ended"


def test_a_job_that_begins_with_a_dora_adapter_makes_one(
    client: openai.OpenAI, tiny: LiveDaemon, tmp_path: Path
) -> None:
    other_form("dora", tmp_path)
    how: Any = {"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 4, "n_epochs": 2}}}
    with tiny.http() as http:
        assert send(http, archive(tmp_path), "dot").json()["version"] == 1
        begun, _ = export_of(http, "dot")
        made = client.fine_tuning.jobs.create(
            model="tiny:dot", training_file=upload(client, preferences(4)), suffix="dotted", method=how
        )
        job = ended(client, made.id)
        assert (job.status, job.fine_tuned_model) == ("succeeded", "tiny:dotted"), job.error
        learned = {name: export_of(http, name) for name in ("dotted@1", "dotted")}
    for weights, config in learned.values():
        assert config["use_dora"] is True
        assert weights.keys() == begun.keys()
    both = zip(begun.items(), *(weights.values() for weights, _ in learned.values()), strict=True)
    for (name, before), kept, result in both:
        if "lora_A" not in name:
            assert not before.equal(kept), name
            assert not kept.equal(result), name


def test_single_ratings_are_learned(client: openai.OpenAI) -> None:
    rows = [
        {"prompt": f"word {n}?", "completion": "yes " if n % 2 else f"no {n}", "label": n % 2 == 1} for n in range(8)
    ]
    method: Any = {"type": "kto", "kto": {"hyperparameters": {"n_epochs": 12}}}
    made = client.fine_tuning.jobs.create(
        model="tiny", training_file=upload(client, lines(rows)), suffix="rated", method=method
    )
    job = ended(client, made.id)
    assert (job.status, job.fine_tuned_model) == ("succeeded", "tiny:rated"), job.error
    assert job.method.kto["hyperparameters"]["batch_size"] == 8
    events = client.fine_tuning.jobs.list_events(job.id, limit=100).data
    losses = [event.data["train_loss"] for event in reversed(events) if event.type == "metrics"]
    assert losses[0] == pytest.approx(0.5, abs=0.01)
    assert losses[-1] < 0.4
    wrong = client.fine_tuning.jobs.create(model="tiny", training_file=upload(client, lines(rows)))
    assert '"label" is of a file of ratings, which kto learns' in ended(client, wrong.id).error.message
    bad = lines([*rows, {**rows[0], "label": 1}])
    wrong = client.fine_tuning.jobs.create(model="tiny", training_file=upload(client, bad), method=method)
    assert ended(client, wrong.id).error.message == 'line 9: "label" is 1: it may be true or false'


def test_a_cancelled_job_keeps_its_last_version(client: openai.OpenAI) -> None:
    method: Any = {"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 1, "n_epochs": 50}}}
    file_id = upload(client, preferences(50))
    made = client.fine_tuning.jobs.create(model="tiny", training_file=file_id, suffix="halfway", method=method)
    waiting = client.fine_tuning.jobs.create(model="tiny", training_file=file_id, suffix="later", method=method)
    with pytest.raises(openai.ConflictError, match=f'needed by job "{made.id}"'):
        client.files.delete(file_id)
    with pytest.raises(openai.ConflictError, match="give another suffix"):
        client.fine_tuning.jobs.create(model="tiny", training_file=file_id, suffix="later", method=method)
    deadline = time.monotonic() + 60
    while not (steps := [e for e in client.fine_tuning.jobs.list_events(made.id).data if e.type == "metrics"]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    while (estimated := client.fine_tuning.jobs.retrieve(made.id).estimated_finish) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert estimated >= made.created_at
    assert client.fine_tuning.jobs.cancel(waiting.id).status == "cancelled"
    job = client.fine_tuning.jobs.cancel(made.id)
    assert (job.status, job.fine_tuned_model, job.estimated_finish) == ("cancelled", None, None)
    assert job.trained_tokens is not None
    assert job.trained_tokens >= steps[-1].data["tokens"]
    assert client.chat.completions.create(model="tiny:halfway", **GREEDY).choices
    with pytest.raises(openai.BadRequestError, match="nothing to cancel"):
        client.fine_tuning.jobs.cancel(made.id)
    assert client.files.delete(file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file_id)


def test_files_are_listed_read_and_refused(client: openai.OpenAI, tiny: LiveDaemon) -> None:
    content = preferences(2)
    made = client.files.create(file=("a.jsonl", content), purpose="fine-tune")
    assert made.expires_at is None
    assert (made.bytes, made.filename, made.purpose, made.status) == (len(content), "a.jsonl", "fine-tune", "processed")
    assert client.files.content(made.id).read() == content
    assert client.files.retrieve(made.id) == made
    newest = upload(client, content)
    ids = [file.id for file in client.files.list(limit=1)]
    assert ids[:2] == [newest, made.id], "pages follow each other"
    with pytest.raises(openai.BadRequestError, match='edged takes "fine-tune"'):
        client.files.create(file=("a.jsonl", content), purpose="vision")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.fine_tuning.jobs.create(model="tiny", training_file="file-none")
    with tiny.http() as http:
        assert http.post("/v1/files", json={}).status_code == 400
        assert http.post("/v1/files", data={"purpose": "fine-tune"}, files={}).status_code == 400
    assert not list(tiny.data.glob(".scratch-*"))


BAD = [
    (b'{"messages": []}\n', 'line 1: "messages" has 0 messages: it may have 1 to 1024'),
    (chats(1) + b"{\n" + b"\xff\n", "line 2: not JSON: .*; line 3: not UTF-8"),
    (
        chats(1) + b'{"prompt": "a", "completion": "b"}\n',
        r'line 2: .* format \("completion"\) than line 1 \("messages"\)',
    ),
    (preferences(1), 'line 1: "input" is of a file of preferences, which dpo learns'),
    (lines([{"messages": [{"role": "user", "content": "a"}]}]), "there is no assistant turn"),
    (
        lines([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0.5}]}]),
        '"weight" of message 2 is 0.5: it may be 0 or 1',
    ),
    (b'{"text": "a"}\n' * 25, "line 20: it has none of the fields .*; and 5 more$"),
    (b'{"prompt": "a", "completion": "\\ud800"}\n', "half a surrogate pair"),
    (b"\n\n", "it has no examples"),
    (lines([{"messages": [], "tools": [{}]}]), '"tools" is not supported'),
]


@pytest.mark.parametrize(("content", "told"), BAD)
def test_a_bad_file_fails_its_job_with_the_lines(client: openai.OpenAI, content: bytes, told: str) -> None:
    job = ended(client, client.fine_tuning.jobs.create(model="tiny", training_file=upload(client, content)).id)
    assert (job.status, job.error.code, job.error.param) == ("failed", "invalid_training_file", "training_file")
    assert re.search(told, job.error.message), job.error.message
    assert client.fine_tuning.jobs.list_events(job.id).data[0].level == "error"


def test_a_job_tells_what_it_read_of_other_sets(client: openai.OpenAI) -> None:
    rows = [{"system": "s", "question": f"word {number}", "chosen": "yes", "rejected": "no"} for number in range(3)]
    made = client.fine_tuning.jobs.create(
        model="tiny", training_file=upload(client, lines(rows)), method={"type": "dpo"}, suffix="orca"
    )
    job = ended(client, made.id)
    assert job.status == "succeeded", job.error
    told = [event.message for event in client.fine_tuning.jobs.list_events(made.id).data]
    assert 'Training file, 3 examples: the prompt is "system" and "question"' in told


def test_a_file_that_holds_no_json_lines_fails_its_job_by_one_sentence(client: openai.OpenAI) -> None:
    content = json.dumps([{"prompt": "a", "completion": "b"}] * 30, indent=1).encode()
    job = ended(client, client.fine_tuning.jobs.create(model="tiny", training_file=upload(client, content)).id)
    told = 'it is a JSON array (it begins with "["), not JSON lines: `jq -c ".[]" FILE` makes them'
    assert job.error.message == told


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": "other"}, "does not exist"),
    ({"model": "tiny:nobody"}, "has learned nothing"),
    ({"suffix": "no/name"}, "cannot name an adapter"),
    ({"method": {"type": "reinforcement"}}, 'method "reinforcement" is not supported: use supervised, dpo'),
    ({"validation_file": "file-a"}, 'file "file-a" does not exist'),
    ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, "integrations are not supported"),
    ({"hyperparameters": {"n_epochs": 0}}, "n_epochs"),
]


@pytest.mark.parametrize(("changes", "told"), REFUSED)
def test_a_job_that_cannot_be_is_refused(client: openai.OpenAI, changes: dict[str, Any], told: str) -> None:
    file_id = upload(client, chats(1))
    with pytest.raises(openai.APIStatusError, match=told):
        client.fine_tuning.jobs.create(**{"model": "tiny", "training_file": file_id, **changes})


def test_forgetting_a_user_ends_jobs_and_deletes_files(client: openai.OpenAI, tiny: LiveDaemon) -> None:
    method: Any = {"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 1, "n_epochs": 50}}}
    made = client.fine_tuning.jobs.create(
        model="tiny", training_file=upload(client, preferences(50)), suffix="gone", method=method
    )
    owner = getpass.getuser()
    with tiny.http() as http:
        forgotten = http.delete("/v1/adapters/gone").json()
        assert forgotten["rows_deleted"]["jobs"] == 1
        assert forgotten["verified"]
        with pytest.raises(openai.NotFoundError):
            client.fine_tuning.jobs.retrieve(made.id)
        assert http.delete(f"/v1/adapters/{owner}").json()["verified"]
    assert client.files.list().data == []
    assert not list((tiny.data / "files").glob("*"))


def test_a_persons_own_pairs_wait_for_the_end_of_the_job_and_are_learned_once(
    client: openai.OpenAI, tiny: LiveDaemon
) -> None:
    method: Any = {"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 4, "n_epochs": 8}}}
    file_id = upload(client, preferences(40))
    made = client.fine_tuning.jobs.create(model="tiny", training_file=file_id, suffix="shared", method=method)
    before, told = tiny.status()["finetune"]["pairs_trained"], []
    with tiny.http() as http:
        for number in range(5):
            pair = {"user": "shared", "prompt": f"word {number}", "chosen": "yes", "rejected": f"no {number}"}
            told.append(http.post("/v1/feedback", json=pair).json()["id"])
        waiting = http.get(f"/v1/feedback/{told[0]}").json()["pairs"][0]
        story = http.get("/v1/adapters/shared/story").json()
        assert client.fine_tuning.jobs.retrieve(made.id).status != "succeeded"
        assert f"fine-tuning job {made.id}" in waiting["waits_for"]
        assert f"fine-tuning job {made.id}" in story["waits"][0]["text"]
        job = ended(client, made.id)
        assert job.status == "succeeded", job.error
        steps = [e.data["step"] for e in client.fine_tuning.jobs.list_events(job.id, limit=100).data if e.data]
        assert steps == list(range(80, 0, -1)), "no pair has taken one of the job's steps"
        deadline = time.monotonic() + 60
        while not all(
            (pairs := [http.get(f"/v1/feedback/{name}").json() for name in told])[n]["settled"] for n in range(5)
        ):
            assert time.monotonic() < deadline, pairs
            time.sleep(0.05)
    states = [pair["state"] for progress in pairs for pair in progress["pairs"]]
    time.sleep(0.5)  # for a pair that would be learned again
    learned = states.count("trained") + states.count("learnt")
    assert tiny.status()["finetune"]["pairs_trained"] - before == learned > 0, states


def test_a_paused_job_stands_still_and_goes_on(client: openai.OpenAI, tiny: LiveDaemon) -> None:
    method: Any = {"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 2, "n_epochs": 4}}}
    made = client.fine_tuning.jobs.create(
        model="tiny", training_file=upload(client, preferences(40)), suffix="paused", method=method
    )
    assert client.fine_tuning.jobs.pause(made.id).status == "queued"
    with tiny.http() as http:
        assert http.post("/v1/adapters/paused/mend").json()["error"]["code"] == "job_runs"
    steps = len(client.fine_tuning.jobs.list_events(made.id, limit=100).data)
    time.sleep(0.3)
    assert len(client.fine_tuning.jobs.list_events(made.id, limit=100).data) == steps
    for _ in range(3):
        client.fine_tuning.jobs.resume(made.id)
    assert ended(client, made.id).status == "succeeded"
    told = [event.message for event in client.fine_tuning.jobs.list_events(made.id, limit=100).data]
    assert told.count("The job goes on") == 1
    metrics = [e.data["step"] for e in client.fine_tuning.jobs.list_events(made.id, limit=100).data if e.data]
    assert metrics == list(range(80, 0, -1))


@pytest.mark.slow
def test_a_job_waits_while_its_file_cannot_be_read(client: openai.OpenAI, tiny: LiveDaemon) -> None:
    file_id = upload(client, chats(1))
    path, kept = tiny.data / "files" / file_id, tiny.data / "kept"
    path.rename(kept)
    path.mkdir()
    made = client.fine_tuning.jobs.create(model="tiny", training_file=file_id, suffix="unread")
    deadline = time.monotonic() + 60
    while not client.fine_tuning.jobs.list_events(made.id).data:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.5)
    assert client.fine_tuning.jobs.retrieve(made.id).status == "validating_files"
    path.rmdir()
    kept.rename(path)
    assert ended(client, made.id).status == "succeeded"


def test_a_name_of_somebody_who_has_asked_is_no_suffix(client: openai.OpenAI) -> None:
    client.chat.completions.create(model="tiny:dora", user="eva", **GREEDY)
    file_id = upload(client, chats(1))
    for name in ("dora", "eva"):
        with pytest.raises(openai.ConflictError, match=f'"{name}" is a user of whom answers or pairs are stored'):
            client.fine_tuning.jobs.create(model="tiny", training_file=file_id, suffix=name)


def test_a_result_file_is_deleted_with_its_mention(client: openai.OpenAI) -> None:
    made = client.fine_tuning.jobs.create(model="tiny", training_file=upload(client, chats(1)), suffix="told")
    (file_id,) = ended(client, made.id).result_files
    with pytest.raises(openai.BadRequestError, match='of purpose "fine-tune-results"'):
        client.fine_tuning.jobs.create(model="tiny", training_file=file_id)
    assert client.files.delete(file_id).deleted
    assert client.fine_tuning.jobs.retrieve(made.id).result_files == []


def test_a_job_whose_end_is_not_stored_at_first_leaves_one_file(client: openai.OpenAI, tiny: LiveDaemon) -> None:
    before = len(client.files.list(purpose="fine-tune-results").data)
    with contextlib.closing(sqlite3.connect(tiny.data / "edged.db", timeout=30, isolation_level=None)) as db:
        refused = "NEW.status IN ('succeeded', 'failed')"
        db.execute(f"CREATE TRIGGER no_end BEFORE UPDATE ON jobs WHEN {refused} BEGIN SELECT RAISE(ABORT, 'no'); END")
        try:
            made = client.fine_tuning.jobs.create(model="tiny", training_file=upload(client, chats(1)), suffix="twice")
            deadline = time.monotonic() + 60
            while "fine-tuning jobs wait" not in tiny.log:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert len(client.files.list(purpose="fine-tune-results").data) == before
        finally:
            db.execute("DROP TRIGGER no_end")
    assert len(ended(client, made.id).result_files) == 1
    assert len(client.files.list(purpose="fine-tune-results").data) == before + 1


def test_a_job_whose_metrics_find_no_file_has_succeeded_all_the_same(client: openai.OpenAI, tiny: LiveDaemon) -> None:
    method: Any = {"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 64, "n_epochs": 1}}}
    made = client.fine_tuning.jobs.create(
        model="tiny", training_file=upload(client, preferences(192)), suffix="untold", method=method
    )
    deadline = time.monotonic() + 60
    while not [e for e in client.fine_tuning.jobs.list_events(made.id).data if e.type == "metrics"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    # All steps were fed with the first one.
    folder = tiny.data / "files"
    folder.rename(tiny.data / "elsewhere")
    folder.touch()
    try:
        job = ended(client, made.id)
    finally:
        folder.unlink()
        (tiny.data / "elsewhere").rename(folder)
    assert (job.status, job.result_files) == ("succeeded", [])


FORM = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}'


@pytest.mark.slow
def test_what_a_job_left_stays_on_disk_over_a_restart_and_can_be_gone_back_to(tmp_path: Path) -> None:
    settings = {**SETTINGS, "store__save_every_s": 0.01, "store__keep_versions": 1, "guard__held_out_share": 0}
    folder, model = tmp_path / "run", save_tiny(tmp_path / "tiny")
    with running(folder, model, **settings) as live, live.openai() as client:
        made = client.fine_tuning.jobs.create(model="tiny", training_file=upload(client, chats(2)), suffix="made")
        assert ended(client, made.id).status == "succeeded"
        said = client.chat.completions.create(model="tiny:made", **GREEDY).choices[0].message.content
        live.stop()
    with running(folder, model, **settings) as live, live.http() as http, live.openai() as client:

        def versions() -> list[dict[str, Any]]:
            """Newest first."""
            return http.get("/v1/adapters/made").json()["versions"]

        left = versions()[0]["version"]
        for number in range(4):
            pair = {"user": "made", "prompt": f"{number}?", "chosen": f"yes {number}", "rejected": f"no {number}"}
            http.post("/v1/feedback", json=pair).raise_for_status()
            deadline = time.monotonic() + 60
            while not ((newest := versions()[0])["version"] == left + number + 1 and newest["on_disk"]):
                assert time.monotonic() < deadline, live.log
                time.sleep(0.02)
        on_disk = [each["version"] for each in versions() if each["on_disk"]]
        assert (left in on_disk, left + 1 in on_disk) == (True, False)
        http.post("/v1/adapters/made/rollback", json={"version": left}).raise_for_status()
        assert versions()[0]["restored"] == left
        assert client.chat.completions.create(model="tiny:made", **GREEDY).choices[0].message.content == said


@pytest.mark.parametrize(
    "form",
    [
        b"",
        FORM,
        FORM + FILE,
        FORM + FILE + b"\r\n--b",
        FORM * 20 + FILE + b"\r\n--b--\r\n",
        b"--b\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n1\r\n--b--\r\n",
        b"--b\r\nContent-Type: multipart/mixed; boundary=c\r\n\r\n--c\r\n\r\n1\r\n--c--\r\n--b--\r\n",
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + b"x" * 5000 + b"\r\n--b--\r\n",
        b"\xff\xfe\r\n" * 10,
    ],
)
def test_a_form_that_is_none_is_refused_and_leaves_nothing(tiny: LiveDaemon, form: bytes) -> None:
    with tiny.http() as http:
        answer = http.post("/v1/files", content=form, headers={"Content-Type": "multipart/form-data; boundary=b"})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/files?after=%ED%A0%80",
        "/v1/files?purpose=%ED%A0%80",
        "/v1/files?limit=0",
        "/v1/files/%ED%A0%80",
        "/v1/files/%FF/content",
        "/v1/fine_tuning/jobs?after=%C3%A9",
        "/v1/fine_tuning/jobs?metadata[%ED%A0%80]=%FF",
        "/v1/fine_tuning/jobs/%C3%A9/events",
    ],
)
def test_no_question_about_files_and_jobs_is_an_error_of_the_daemon(tiny: LiveDaemon, path: str) -> None:
    with tiny.http() as http:
        assert http.get(path).status_code in (200, 400, 404)
        body = {"model": "tiny", "training_file": "\ud800", "metadata": {"\ud800": "\udfff"}}
        answer = http.post("/v1/fine_tuning/jobs", content=json.dumps(body))
        assert answer.status_code in (400, 404), answer.text
