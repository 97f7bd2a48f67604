"""Fine-tuning by file, with the official OpenAI client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.live import LiveDaemon, running
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
    assert table[0] == "step,train_loss,learning_rate,tokens,tokens_per_s"
    assert len(table) == 9
    assert "tiny:polite" in [model.id for model in client.models.list()]
    answers = {model: client.chat.completions.create(model=model, **GREEDY) for model in ("tiny", "tiny:polite")}
    assert answers["tiny"].choices[0].message.content != answers["tiny:polite"].choices[0].message.content
    assert [each.id for each in client.fine_tuning.jobs.list()] == [job.id]
