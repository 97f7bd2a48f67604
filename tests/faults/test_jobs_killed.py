"""kill -9 in the middle of fine-tuning jobs: each goes on where its newest version is, bit for bit.

No epoch's validation is lost or told twice, and each epoch's checkpoint is there.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.api.jobs.test_jobs import ended, preferences, upload
from tests.api.live import LiveDaemon, running
from tests.faults.test_disk import integrity
from tests.models import save_tiny

SETTINGS = {
    "store__save_every_s": 0.1,
    "align__rank": 4,
    "jobs__learning_rate": 0.01,
    # The forward of a group is always one piece: products of other numbers of rows round otherwise.
    "scheduler__options__idle_quantum_ms": 60_000.0,
    "model__threads": 1,
}


def begin(daemon: LiveDaemon, examples: int) -> str:
    hyperparameters = {"batch_size": 2, "n_epochs": 3}
    method: Any = {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}
    with daemon.openai() as client:
        training, validation = (upload(client, preferences(count)) for count in (examples, 9))
        return client.fine_tuning.jobs.create(
            model="tiny", training_file=training, validation_file=validation, suffix="made", method=method, seed=3
        ).id


def reported(client: Any, job_id: str) -> tuple[list[int], list[tuple[int, float]]]:
    """The steps of a job whose training loss was told, in the order of their numbers, and those of validation."""
    told = [event.data for event in client.fine_tuning.jobs.list_events(job_id) if event.type == "metrics"]
    steps = sorted(each["step"] for each in told if "train_loss" in each)
    return steps, sorted((each["step"], each["valid_loss"]) for each in told if "valid_loss" in each)


def weights(data: Path) -> list[dict[str, Any]]:
    """Those of the newest version, the optimizer's, and the checkpoints'."""
    newest = max(data.glob("adapters/*/made/v*"))
    files = [newest / "adapter_model.safetensors", newest / "optimizer.safetensors"]
    files += sorted(data.glob("adapters/*/made@*/v000001/adapter_model.safetensors"))
    return [load_file(file) for file in files]


def checkpoints(client: Any, job_id: str) -> list[tuple[int, str, Any]]:
    found = client.fine_tuning.jobs.checkpoints.list(job_id)
    return [(each.step_number, each.fine_tuned_model_checkpoint, each.metrics) for each in found]


def waits(times: int, seed: int) -> Iterator[Callable[[Path], None]]:
    """Moments at which a daemon with a data folder is killed."""
    chance = random.Random(seed)
    yield lambda _: time.sleep(chance.uniform(0.3, 0.8))
    for _ in range(times - 1):
        yield lambda _: time.sleep(chance.uniform(0.0, 0.8))


def killed(folder: Path, moments: Iterator[Callable[[Path], None]], examples: int) -> None:
    model = save_tiny(folder / "tiny")
    with running(folder / "whole", model, **SETTINGS) as daemon:
        job_id = begin(daemon, examples)
        with daemon.openai() as client:
            job = ended(client, job_id, 250)
            steps, validated = reported(client, job_id)
            kept = checkpoints(client, job_id)
        assert daemon.stop() == 0
    assert (len(validated), len(kept)) == (3, 3)
    with running(folder / "cut", model, **SETTINGS) as daemon:
        job_id = begin(daemon, examples)
        next(moments)(daemon.data)
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    for wait in moments:
        with running(folder / "cut", model, **SETTINGS) as daemon:
            wait(daemon.data)
            assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        assert integrity(folder / "cut" / "data" / "edged.db") == "ok"
    with running(folder / "cut", model, **SETTINGS) as daemon:
        with daemon.openai() as client:
            again = ended(client, job_id, 250)
            assert again.trained_tokens == job.trained_tokens, "no step is counted twice"
            assert reported(client, job_id) == (steps, validated)
            assert checkpoints(client, job_id) == kept
        assert daemon.stop() == 0
    assert steps == list(range(1, len(steps) + 1))
    whole, cut = (weights(folder / name / "data") for name in ("whole", "cut"))
    assert len(whole) == 4
    for one, other in zip(whole, cut, strict=True):
        assert one.keys() == other.keys()
        assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.slow
def test_a_job_that_is_killed_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    killed(tmp_path, waits(2, seed=1), examples=30)


@pytest.mark.slow
def test_a_job_that_is_killed_twenty_times_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    killed(tmp_path, waits(20, seed=2), examples=200)


def until(condition: Callable[[Path], Any]) -> Callable[[Path], None]:
    def wait(data: Path) -> None:
        deadline = time.monotonic() + 60
        while not condition(data):
            assert time.monotonic() < deadline

    return wait


def noted(step: int) -> Callable[[Path], Any]:
    """Whether the row of a checkpoint is there."""

    def found(data: Path) -> Any:
        with contextlib.closing(sqlite3.connect(data / "edged.db", timeout=30)) as db:
            return db.execute("SELECT 1 FROM job_checkpoints WHERE step = ?", [step]).fetchone()

    return found


@pytest.mark.slow
def test_a_checkpoint_survives_a_kill_while_it_is_made_and_before_the_next_step(tmp_path: Path) -> None:
    moments = [until(noted(10)), until(lambda data: [*data.glob("adapters/*/made@10/v*")]), until(noted(20))]
    killed(tmp_path, iter(moments), examples=20)
