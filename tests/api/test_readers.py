"""Readers of streamed answers, over a real daemon: who is one, what an answer says of them, what is refused."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest

from edged.scheduler.reader import TOKENS_PER_WORD
from tests.api.live import LiveDaemon

HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}


def experienced(client: openai.OpenAI, qoe: Any = ..., **options: Any) -> list[dict[str, Any]]:
    """What the chunks of a streamed answer say of its readers."""
    extra = {"ignore_eos": True} | ({} if qoe is ... else {"qoe": qoe})
    chunks = list(client.chat.completions.create(**HELLO, **options, stream=True, extra_body=extra))
    said = [(chunk.choices[0].finish_reason, chunk.model_dump().get("edged")) for chunk in chunks]
    assert all(edged is None for reason, edged in said if reason is None)
    return [edged for reason, edged in said if reason and edged]


def test_a_stream_ends_with_its_readers_experience(client: openai.OpenAI) -> None:
    (edged,) = experienced(client, {"words_per_minute": 200, "ttft_ms": 600_000})
    pace = round(TOKENS_PER_WORD * 200 / 60, 2)
    assert edged == {"qoe": 1.0, "qoe_paper": 1.0, "stall_ms": pytest.approx(0.0, abs=0.1), "tokens_per_second": pace}


def test_who_expects_the_first_token_at_once_has_waited(client: openai.OpenAI) -> None:
    (edged,) = experienced(client, {"tokens_per_second": 200, "ttft_ms": 0})
    assert 0.0 <= edged["qoe"] <= 1.0
    assert edged["stall_ms"] >= 0.0


def test_several_choices_have_one_reader_each_says_so(client: openai.OpenAI) -> None:
    assert len(experienced(client, {"speech": "en"}, n=2)) == 2


@pytest.mark.parametrize(
    "options", [{"qoe": None}, {"logprobs": True}, {"service_tier": "flex"}], ids=["denied", "logprobs", "flex"]
)
def test_who_is_not_read_to_has_no_experience(client: openai.OpenAI, options: dict[str, Any]) -> None:
    assert experienced(client, **options) == []


def said(client: openai.OpenAI, qoe: dict[str, Any]) -> list[str]:
    """The texts of a stream's chunks."""
    extra = {"ignore_eos": True, "qoe": qoe}
    chunks = client.chat.completions.create(**HELLO, temperature=0.0, stream=True, extra_body=extra)
    return [text for chunk in chunks if (text := chunk.choices[0].delta.content)]


@pytest.mark.parametrize("qoe", [{}, {"speech": "en"}, {"tokens_per_second": 200}])
def test_a_smooth_stream_has_the_same_text_word_by_word_and_the_rest_at_its_end(
    client: openai.OpenAI, qoe: dict[str, Any]
) -> None:
    smooth = said(client, {**qoe, "deliver": "smooth"})
    assert "".join(smooth) == "".join(said(client, {**qoe, "deliver": "as_made"}))
    if "speech" in qoe:
        # One word every 0.4 s.
        assert [len(text.split()) for text in smooth[:-1]] == [1] * (len(smooth) - 1)


@pytest.mark.parametrize("options", [{"logprobs": True}, {"service_tier": "flex"}])
def test_only_who_is_read_to_can_have_it_smooth(client: openai.OpenAI, options: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="smooth"):
        experienced(client, {"deliver": "smooth"}, **options)


@pytest.mark.parametrize(
    ("qoe", "named"),
    [
        ({"tokens_per_second": 0.4}, "tokens_per_second"),
        ({"tokens_per_second": 201}, "tokens_per_second"),
        ({"tokens_per_second": 5, "speech": "en"}, "one pace"),
        ({"speech": "tlh"}, "tlh"),
        ({"ttft_ms": -1}, "ttft_ms"),
        ({"deliver": "backwards"}, "deliver"),
        ("fast", "qoe"),
    ],
)
def test_a_pace_that_makes_no_sense_is_refused(client: openai.OpenAI, qoe: Any, named: str) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        experienced(client, qoe)


def test_the_status_tells_how_readers_were_served(client: openai.OpenAI, daemon: LiveDaemon) -> None:
    experienced(client, {"ttft_ms": 600_000})
    readers = daemon.status()["readers"]
    assert 0.0 <= readers["qoe_p5"] <= 1.0
    assert 0.0 < readers["qoe_mean"] <= 1.0
    assert 0.0 < readers["qoe_95_share"] <= 1.0


def test_the_status_tells_whose_readers_were_served_how_until_they_are_forgotten(
    client: openai.OpenAI, daemon: LiveDaemon, http: httpx2.Client
) -> None:
    told = [experienced(client, {"ttft_ms": ttft_ms}, user="quinn")[0]["qoe"] for ttft_ms in (600_000, 0)]
    read = daemon.status()["readers"]["users"]["quinn"]
    assert read == {"answers": 2, "qoe_mean": pytest.approx(sum(told) / 2, abs=1e-3)}
    assert http.delete("/v1/adapters/quinn").status_code == 200
    assert "quinn" not in daemon.status()["readers"]["users"]


def test_an_answer_that_is_read_while_its_user_is_forgotten_tells_nothing_of_them(
    client: openai.OpenAI, daemon: LiveDaemon, http: httpx2.Client
) -> None:
    experienced(client, {"ttft_ms": 0}, user="rose")
    extra = {"ignore_eos": True, "qoe": {"ttft_ms": 0}}
    with client.chat.completions.create(
        **HELLO | {"max_tokens": 400}, user="rose", stream=True, extra_body=extra
    ) as chunks:
        next(iter(chunks))
        assert http.delete("/v1/adapters/rose").status_code == 200
        assert list(chunks)[-1].choices[0].finish_reason
    assert "rose" not in daemon.status()["readers"]["users"]


def test_what_readers_experienced_is_in_the_metrics(client: openai.OpenAI, http: httpx2.Client) -> None:
    def counted(name: str) -> float:
        lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    before, stalled_s = counted("edged_qoe_ratio_count"), counted("edged_stall_seconds_total")
    experienced(client, {"tokens_per_second": 200, "ttft_ms": 0})
    assert counted("edged_qoe_ratio_count") == before + 1
    assert counted("edged_stall_seconds_total") >= stalled_s
