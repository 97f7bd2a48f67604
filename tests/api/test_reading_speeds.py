"""The pace that an answer is made for: the request's, the user's by the settings, or as dwell signals tell it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from edged.api.reading_speeds import LEAST
from edged.runtime.pacer import count_words
from edged.scheduler.reader import TOKENS_PER_WORD
from tests.api.live import LiveDaemon, running
from tests.models import save_tiny

WORDS_PER_S = 5.0
USERS = '{"slow": 1.5, "slow-*": 2.5}'


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    root: Path = tmp_path_factory.mktemp("speeds")
    save_tiny(root / "tiny", max_position_embeddings=512)
    settings = {"reading__words_per_s": WORDS_PER_S, "reading__users": USERS}
    with running(root / "run", root / "tiny", **settings) as live:
        yield live


def read(client: openai.OpenAI, user: str | None) -> tuple[str, float, str]:
    """Id, words a second and text of an answer to a user."""
    told, text, completion = 0.0, "", ""
    options = {"user": user} if user else {}
    messages = [{"role": "user", "content": "hello"}]
    for chunk in client.chat.completions.create(  # type: ignore[call-overload]
        model="tiny", messages=messages, max_tokens=40, stream=True, extra_body={"ignore_eos": True}, **options
    ):
        completion, text = chunk.id, text + (chunk.choices[0].delta.content or "")
        told = (chunk.model_dump().get("edged") or {}).get("tokens_per_second", told)
    return completion, told / TOKENS_PER_WORD, text


@pytest.mark.parametrize(
    ("user", "words_per_s"), [("slow", 1.5), ("slow-two", 2.5), ("somebody", WORDS_PER_S), (None, WORDS_PER_S)]
)
def test_a_user_reads_as_the_settings_say(client: openai.OpenAI, user: str | None, words_per_s: float) -> None:
    assert read(client, user)[1] == pytest.approx(words_per_s, abs=0.01)


def test_a_users_speed_is_learned_from_how_long_answers_were_looked_at(
    client: openai.OpenAI, daemon: LiveDaemon
) -> None:
    with daemon.http() as http:
        for number in range(LEAST + 2):
            completion, pace, text = read(client, "ivy")
            assert pace == pytest.approx(WORDS_PER_S, abs=0.01)
            # The first two were glanced at, and left open. Random text has characters of scripts without spaces, too.
            words_per_s = {0: 50.0, 1: 0.1}.get(number, 3.0)
            report = {"completion_id": completion, "signal": "dwell", "seconds": count_words(text) / words_per_s}
            http.post("/v1/feedback", json=report).raise_for_status()
        assert read(client, "ivy")[1] == pytest.approx(3.0, abs=0.05)
        http.delete("/v1/adapters/ivy", params={"confirm": "ivy"}).raise_for_status()
    assert read(client, "ivy")[1] == pytest.approx(WORDS_PER_S, abs=0.01)


@pytest.mark.parametrize("users", ['{"ann": 0}', '{"a b": 4}', "fast"])
def test_a_table_of_users_that_makes_no_sense_is_refused(users: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from edged.settings.load import ConfigError, load_settings

    monkeypatch.setenv("EDGED_READING__USERS", users)
    with pytest.raises(ConfigError, match="users"):
        load_settings(None)
