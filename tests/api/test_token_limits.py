"""Tokens that the model has no row for: whoever sends one gets an error that names it, and nobody else notices."""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.api.jobs.test_jobs import ended, lines, upload
from tests.api.live import LiveDaemon, running
from tests.api.test_bad_input import refused
from tests.models import VOCAB, byte_tokenizer, save_tiny

CHAT, TEXT, FEEDBACK = "/v1/chat/completions", "/v1/completions", "/v1/feedback"
NAMED = f'token id {VOCAB} ("smiley") is not one of this model\'s {VOCAB} tokens'
BEYOND = f"token id {VOCAB}"


def extended(folder: Path) -> Path:
    """A model whose tokenizer has one more token than its embedding, and end tokens of another model."""
    save_tiny(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["smiley"])
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 128009, -1]}')
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    root = tmp_path_factory.mktemp("limits")
    with running(root / "run", extended(root / "tiny"), store__save_every_s=0.1, align__rank=4) as live:
        yield live


@pytest.fixture
def http(small: LiveDaemon) -> Iterator[httpx2.Client]:
    with small.http() as http:
        yield http


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


BODIES: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"prompt": "a smiley"}, NAMED),
    (TEXT, {"prompt": [1, VOCAB]}, BEYOND),
    (TEXT, {"prompt": "a", "stop_token_ids": [VOCAB]}, BEYOND),
    (TEXT, {"prompt": "a", "logit_bias": {str(VOCAB): 1}}, BEYOND),
    (TEXT, {"prompt": "a", "stop_token_ids": [VOCAB], "min_tokens": 1}, BEYOND),
    (CHAT, {"messages": user("a smiley")}, NAMED),
    (CHAT, {"messages": user("</s> smiley")}, NAMED),
    (CHAT, {"messages": [{"role": "system", "content": "smiley"}, *user("a")]}, NAMED),
    (CHAT, {"messages": user("a"), "stop_token_ids": [10**9]}, "token id 1000000000"),
    (FEEDBACK, {"user": "u", "prompt": "smiley", "chosen": "a", "rejected": "b"}, NAMED),
    (FEEDBACK, {"user": "u", "prompt": "a", "chosen": "smiley", "rejected": "b"}, NAMED),
    (FEEDBACK, {"user": "u", "prompt": "a", "chosen": "a", "rejected": "smiley"}, NAMED),
    (FEEDBACK, {"user": "u", "messages": user("smiley"), "chosen": "a", "rejected": "b"}, NAMED),
    (FEEDBACK, {"user": "u", "prompt_ids": [VOCAB], "chosen": "a", "rejected": "b"}, BEYOND),
]


@pytest.mark.parametrize(("path", "body", "told"), BODIES)
def test_a_token_that_the_model_has_not_is_refused_by_name(
    http: httpx2.Client, path: str, body: dict[str, Any], told: str
) -> None:
    error = refused(http.post(path, json={**body, **({"max_tokens": 2} if path != FEEDBACK else {})}), 400)
    assert error["message"].startswith(told)


def test_an_edit_with_such_a_token_is_refused(http: httpx2.Client) -> None:
    answer = http.post(TEXT, json={"prompt": "a", "max_tokens": 2, "ignore_eos": True, "user": "u"}).json()
    body = {"completion_id": answer["id"], "signal": "edit", "text": "smiley"}
    assert NAMED in refused(http.post(FEEDBACK, json=body), 400)["message"]


def test_a_bystanders_stream_goes_on_beside_them(small: LiveDaemon) -> None:
    with small.openai() as client:
        stream = client.completions.create(model="tiny", prompt="b", max_tokens=120, stream=True)

        def abuse() -> None:
            for _ in range(4):
                with pytest.raises(openai.BadRequestError, match="smiley"):
                    client.completions.create(model="tiny", prompt="a smiley", max_tokens=2)

        beside = threading.Thread(target=abuse)
        beside.start()
        reasons = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
        beside.join()
    assert reasons[-1] in ("stop", "length")
    assert "iteration failed" not in small.log


@pytest.mark.parametrize("n", [1, 2])
def test_end_tokens_beyond_the_vocabulary_are_not_forbidden_before_min_tokens(small: LiveDaemon, n: int) -> None:
    with small.openai() as client:
        more = {"min_tokens": 3}
        answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=5, n=n, extra_body=more)
    assert all(choice.finish_reason in ("stop", "length") for choice in answer.choices)
    assert answer.usage is not None
    assert answer.usage.completion_tokens >= 3 * n


def test_a_line_of_a_job_with_such_a_token_is_told_by_number(small: LiveDaemon) -> None:
    rows = [{"prompt": "a", "chosen": "yes", "rejected": word} for word in ("no", "smiley")]
    with small.openai() as client:
        job = client.fine_tuning.jobs.create(
            model="tiny", training_file=upload(client, lines(rows)), method={"type": "dpo"}
        )
        job = ended(client, job.id)
    assert job.status == "failed"
    assert job.error.message == f"line 2: {NAMED}"


def test_the_start_says_which_tokens_have_no_row(small: LiveDaemon) -> None:
    assert re.search(rf'model "tiny": tokens .* have no row .* of {VOCAB}: .*: {VOCAB} "smiley"', small.log)
    assert f"end tokens that are not among the model's {VOCAB} end no answer: -1, 128009" in small.log


def test_a_stored_pair_with_such_a_token_is_skipped_with_the_reason(tmp_path: Path) -> None:
    save_tiny(tmp_path / "tiny")
    settings = {"store__save_every_s": 0.1, "align__rank": 4}
    with running(tmp_path / "run", tmp_path / "tiny", align__enabled=False, **settings) as live, live.http() as http:
        for chosen in ("smiley", "fine"):
            body = {"user": "u", "prompt": "a", "chosen": chosen, "rejected": "no"}
            assert http.post(FEEDBACK, json=body).status_code == 200
        assert live.stop() == 0
    extended(tmp_path / "tiny")
    with running(tmp_path / "run", tmp_path / "tiny", store__new_base="learn", **settings) as live:
        database, deadline = sqlite3.connect(live.data / "edged.db"), time.monotonic() + 30.0
        while time.monotonic() < deadline and database.execute("SELECT 1 FROM pairs WHERE state = 'queued'").fetchone():
            time.sleep(0.05)
        found = database.execute("SELECT chosen, state, note FROM pairs")
        states = {chosen: (state, note) for chosen, state, note in found}
        assert live.process.is_alive()
    assert states["smiley"] == ("skipped", NAMED)
    assert states["fine"][0] in ("trained", "held_out")
