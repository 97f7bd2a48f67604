"""Adapters that are made to break: the guard takes them back before many answers are bad, and accuses no user."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edged.client.client import Client
from examples.demo_model.dialogues import prompts
from examples.quickstart.daemon import TemporaryDaemon

CHAT = "/v1/chat/completions"
MAX_BAD = 10


@contextmanager
def daemon(folder: Path, settings: str = "") -> Iterator[TemporaryDaemon]:
    config = folder / "edged.toml"
    config.write_text(f"[feedback]\npairs_per_hour = 0\n{settings}")
    running = TemporaryDaemon("--config", str(config))
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.remove()


def pairs_by_length(client: Client, count: int) -> list[dict[str, Any]]:
    """Ann prefers the shorter of two answers of the base model."""
    asked, found = prompts(7, with_units=True), []
    while len(found) < count:
        messages = [{"role": "user", "content": next(asked)}]
        choices = client.post(CHAT, {"messages": messages, "max_tokens": 64, "n": 2})["choices"]
        texts = sorted((choice["message"]["content"] for choice in choices), key=len)
        if texts[0].strip() and texts[0] != texts[1]:
            found.append({"user": "ann", "messages": messages, "chosen": texts[0], "rejected": texts[1]})
    return found


class Reader(threading.Thread):
    """Asks ann's adapter over and over, and remembers which version answered."""

    def __init__(self, running: TemporaryDaemon) -> None:
        super().__init__()
        self.versions: list[int] = []
        self._running, self._stop_now = running, threading.Event()

    def run(self) -> None:
        asked = prompts(99, with_units=True)
        with self._running.client() as client:
            while not self._stop_now.wait(0.2):
                body = {"messages": [{"role": "user", "content": next(asked)}], "max_tokens": 32, "user": "ann"}
                told = client.post(CHAT, body)["system_fingerprint"]
                self.versions.append(int(told.partition("@")[2] or 0))

    def end(self) -> None:
        self._stop_now.set()
        self.join()


def taught(running: TemporaryDaemon, pairs: list[dict[str, Any]], pause_s: float) -> tuple[dict[str, Any], list[int]]:
    """Ann's adapter after all pairs, and the versions that answered meanwhile."""
    reader = Reader(running)
    reader.start()
    try:
        with running.client() as client:
            for pair in pairs:
                client.post("/v1/feedback", pair)
                time.sleep(pause_s)
            settled = 0
            while settled < 10:
                busy = client.get("/v1/status")["queue"]["finetune"]
                settled = 0 if busy else settled + 1
                time.sleep(0.2)
            return client.get("/v1/adapters/ann?limit=5000"), reader.versions
    finally:
        reader.end()


def bad_answers(adapter: dict[str, Any], versions: list[int]) -> int:
    broken = {each["version"] for each in adapter["versions"] if each["problem"]}
    return sum(version in broken for version in versions)


# Which version breaks and how many answers it gives meanwhile depends on how fast steps and questions take turns.
@pytest.mark.slow
def test_an_adapter_that_an_absurd_step_size_breaks_is_taken_back_and_learns_on_with_smaller_steps(
    tmp_path: Path,
) -> None:
    with daemon(tmp_path, "[align]\nlearning_rate = 0.05\n") as running:
        with running.client() as client:
            pairs = pairs_by_length(client, 30)
        adapter, versions = taught(running, pairs, 0.2)
    taken_back = [each for each in adapter["versions"] if each["reason"].startswith("guard: ")]
    assert taken_back, "a step size of 0.05 breaks the demo model"
    assert bad_answers(adapter, versions) <= MAX_BAD
    assert adapter["pairs_quarantined"] == adapter["pairs_skipped"] == adapter["pairs_queued"] == 0
    assert adapter["pairs_trained"] + adapter["pairs_held_out"] == 30, "nothing is lost"
    assert not adapter["versions"][0]["problem"], "what is served passed its test, or is a version that did"
    first = min(each["version"] for each in taken_back)
    assert any(each["reason"] == "trained" and each["version"] > first for each in adapter["versions"]), "it learns on"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["contradictory", "many", "one repeated"])
def test_at_the_defaults_odd_feedback_breaks_nothing(kind: str, tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        with running.client() as client:
            pairs = pairs_by_length(client, 1 if kind == "one repeated" else 250)
        if kind == "contradictory":
            pairs += [{**pair, "chosen": pair["rejected"], "rejected": pair["chosen"]} for pair in pairs]
        elif kind == "many":
            extra = [" Please.", " Thanks.", " Now.", " Today.", " Quickly.", " Hello!", " Hm."]
            asked = [(pair, word) for word in extra for pair in pairs]
            pairs += [
                {**pair, "messages": [{"role": "user", "content": pair["messages"][0]["content"] + word}]}
                for pair, word in asked
            ]
        else:
            pairs *= 500
        adapter, versions = taught(running, pairs, 0.05 if kind == "one repeated" else 0.0)
    assert bad_answers(adapter, versions) <= MAX_BAD
    assert adapter["pairs_skipped"] == 0
    assert adapter["held_out_kl_nats"] is None or adapter["held_out_kl_nats"] <= 0.5
    assert adapter["neutral_nll_change"] <= 0.1
    assert adapter["answer_repetition_recent"] <= 0.1
