"""kill -9 in the middle of fine-tuning jobs: each goes on where its newest version is, bit for bit.

No epoch's validation is lost or told twice.
"""

from __future__ import annotations

import random
import signal
import time
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
    "scheduler__idle_quantum_ms": 60_000.0,
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


def weights(data: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of the newest version, and the optimizer's."""
    newest = max(data.glob("adapters/*/made/v*"))
    return load_file(newest / "adapter_model.safetensors"), load_file(newest / "optimizer.safetensors")


def killed(folder: Path, times: int, examples: int, seed: int) -> None:
    model, chance = save_tiny(folder / "tiny"), random.Random(seed)
    with running(folder / "whole", model, **SETTINGS) as daemon:
        job_id = begin(daemon, examples)
        with daemon.openai() as client:
            job = ended(client, job_id, 250)
            steps, validated = reported(client, job_id)
        assert daemon.stop() == 0
    assert len(validated) == 3
    with running(folder / "cut", model, **SETTINGS) as daemon:
        job_id = begin(daemon, examples)
        time.sleep(chance.uniform(0.3, 0.8))
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    for _ in range(times - 1):
        with running(folder / "cut", model, **SETTINGS) as daemon:
            time.sleep(chance.uniform(0.0, 0.8))
            assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        assert integrity(folder / "cut" / "data" / "edged.db") == "ok"
    with running(folder / "cut", model, **SETTINGS) as daemon:
        with daemon.openai() as client:
            again = ended(client, job_id, 250)
            assert again.trained_tokens == job.trained_tokens, "no step is counted twice"
            assert reported(client, job_id) == (steps, validated)
        assert daemon.stop() == 0
    assert steps == list(range(1, len(steps) + 1))
    for one, other in zip(weights(folder / "whole" / "data"), weights(folder / "cut" / "data"), strict=True):
        assert one.keys() == other.keys()
        assert all(one[name].equal(other[name]) for name in one)


def test_a_job_that_is_killed_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    killed(tmp_path, 2, examples=30, seed=1)


@pytest.mark.slow
def test_a_job_that_is_killed_twenty_times_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    killed(tmp_path, 20, examples=200, seed=2)
