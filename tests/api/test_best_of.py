"""`best_of`: answers are chosen among several, by likelihood where asked for, by taste where a user has one."""

from __future__ import annotations

import json
import time
from statistics import fmean
from typing import Any

import httpx2
import pytest

ASKED = [{"role": "user", "content": "How are you?"}]


def chat(http: httpx2.Client, status: int = 200, **fields: Any) -> httpx2.Response:
    answer = http.post("/v1/chat/completions", json={"messages": ASKED, "max_tokens": 12, **fields})
    assert answer.status_code == status, answer.text
    return answer


def teach(http: httpx2.Client, user: str, count: int = 12) -> None:
    """Prefer answers that begin with a letter "e", which this model draws now and then, to others."""
    for number in range(count):
        pair = {"chosen": f"e fine {number}", "rejected": f"x fine {number}", "prompt": f"How {number}?"}
        answer = http.post("/v1/feedback", json={"user": user, **pair})
        assert answer.status_code == 200, answer.text


def taught(http: httpx2.Client, user: str) -> httpx2.Response:
    """An answer that was chosen by the user's taste."""
    if not http.get(f"/v1/adapters/{user}").is_success:
        teach(http, user)
    for _ in range(100):
        answer = chat(http, user=user)
        if "X-Edged-Best-Of" in answer.headers:
            return answer
    raise AssertionError("no answer was chosen")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"best_of": 2, "n": 3}, '"best_of" = 2 is less than "n" = 3: ask for as many at least'),
        ({"best_of": 17}, '"best_of" = 17 is more than limits.best_of = 16'),
        ({"best_of": 2, "stream": True}, '"best_of" over "n" cannot be streamed: an answer is chosen when all are'),
        ({"best_of": 0}, '"best_of" = 0: input should be greater than or equal to 1'),
    ],
)
def test_what_cannot_be_chosen_is_refused(http: httpx2.Client, fields: dict[str, Any], told: str) -> None:
    error = chat(http, 400, **fields).json()["error"]
    assert told in error["message"]


def test_without_a_taste_the_likeliest_answers_are_returned_and_all_are_counted(http: httpx2.Client) -> None:
    """With a seed the candidates are those of `n`."""
    known = {"seed": 5, "temperature": 1.5}
    drawn = chat(http, n=4, logprobs=True, **known).json()
    means = [fmean(each["logprob"] for each in choice["logprobs"]["content"]) for choice in drawn["choices"]]
    order = sorted(range(4), key=lambda index: means[index], reverse=True)
    texts = [drawn["choices"][index]["message"]["content"] for index in order]
    answer = chat(http, best_of=4, n=2, **known)
    found = answer.json()
    assert [choice["message"]["content"] for choice in found["choices"]] == texts[:2]
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    assert found["usage"] == {**drawn["usage"], "prompt_tokens_details": found["usage"]["prompt_tokens_details"]}
    assert found["choices"][0]["logprobs"] is None
    assert answer.headers["X-Edged-Best-Of"] == "4"


def test_answers_of_temperature_0_are_not_drawn_again(http: httpx2.Client) -> None:
    answer = chat(http, best_of=4, temperature=0, ignore_eos=True)
    assert answer.headers["X-Edged-Best-Of"] == "1"
    assert answer.json()["usage"]["completion_tokens"] == 12
    assert (
        answer.json()["choices"][0]["message"]
        == chat(http, temperature=0, ignore_eos=True).json()["choices"][0]["message"]
    )


def test_text_completions_have_it_too(http: httpx2.Client) -> None:
    body = {"prompt": "How", "max_tokens": 6, "best_of": 3, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body).json()
    assert len(answer["choices"]) == 1
    assert answer["usage"]["completion_tokens"] == 18


def test_a_user_s_answers_are_chosen_once_edged_is_sure_and_told_so(http: httpx2.Client) -> None:
    answer = taught(http, "una")
    found = answer.json()
    assert 2 <= int(answer.headers["X-Edged-Best-Of"]) <= 4
    assert "+taste@" in found["system_fingerprint"]
    assert found["usage"]["completion_tokens"] <= 12, "what was drawn beside is not the caller's"
    totals = http.get("/v1/status").json()["totals"]
    assert totals["candidates"] > 0
    assert totals["candidate_tokens"] > 0


@pytest.mark.parametrize("fields", [{"n": 2}, {"seed": 1}, {"temperature": 0}, {"logprobs": True}, {"best_of": 1}])
def test_what_asks_for_the_model_s_own_answer_gets_it(http: httpx2.Client, fields: dict[str, Any]) -> None:
    taught(http, "una")
    answer = chat(http, user="una", **fields)
    assert "taste" not in answer.json()["system_fingerprint"]
    assert answer.headers.get("X-Edged-Best-Of") in (None, "1")


def test_others_are_served_as_before(http: httpx2.Client) -> None:
    taught(http, "una")
    assert "X-Edged-Best-Of" not in chat(http, user="vic").headers


def streamed(http: httpx2.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": ASKED, "stream": True, "stream_options": {"include_usage": True}, **fields}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stream_is_chosen_by_blocks_and_is_one_answer(http: httpx2.Client) -> None:
    taught(http, "wim")
    for _ in range(20):
        chunks = streamed(http, user="wim", max_tokens=100, ignore_eos=True)
        ends = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["finish_reason"]]
        assert [end["choices"][0]["finish_reason"] for end in ends] == ["length"]
        assert chunks[-1]["usage"]["completion_tokens"] == 100
        if ends[0].get("edged", {}).get("best_of", 1) > 1:
            break
    else:
        raise AssertionError("no stream was chosen")
    assert "+taste@" in chunks[-1]["system_fingerprint"]
    assert 0 <= ends[0]["edged"]["qoe"] <= 1
    # What was served is what is stored: feedback on it finds the very text.
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
    rated = http.post("/v1/feedback", json={"completion_id": chunks[0]["id"], "signal": "edit", "text": f"{text}!"})
    assert rated.status_code == 200
    exported = [json.loads(line) for line in http.get("/v1/feedback?user=wim").text.splitlines()]
    assert exported[-1]["rejected"] == text


def test_a_chosen_stream_ends_at_a_stop_string(http: httpx2.Client) -> None:
    taught(http, "wim")
    whole = "".join(
        chunk["choices"][0]["delta"].get("content", "")
        for chunk in streamed(http, user="wim", max_tokens=60, ignore_eos=True, stop=["e"])
        if chunk["choices"]
    )
    assert "e" not in whole


def test_a_client_that_leaves_in_the_middle_of_a_block_leaves_nothing_running(http: httpx2.Client) -> None:
    taught(http, "wim")
    body = {"messages": ASKED, "stream": True, "user": "wim", "max_tokens": 400, "ignore_eos": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())
    for _ in range(200):
        status = http.get("/v1/status").json()
        if not (status["open_requests"] or status["queue"]["decode"] or status["queue"]["waiting"]):
            break
    else:
        raise AssertionError(status["queue"])


def test_after_a_signal_against_the_others_some_of_several_answers_are_the_base_s(http: httpx2.Client) -> None:
    asked = [{"role": "user", "content": "How are you today, and how is everybody at home? " * 8}]
    teach(http, "mia")
    against = {"chosen": "x fine now", "rejected": "e fine now", "prompt": "How now?", "user": "mia"}

    def drawn(**fields: Any) -> httpx2.Response:
        body = {"messages": asked, "max_tokens": 4, "n": 4, "user": "mia", **fields}
        return http.post("/v1/chat/completions", json=body)

    deadline = time.monotonic() + 60
    while "X-Edged-Base-Choices" in drawn().headers:
        assert time.monotonic() < deadline, "its signals agree"
    assert http.post("/v1/feedback", json=against).status_code == 200
    while (answer := drawn()).headers.get("X-Edged-Base-Choices") != "2, 3":
        assert time.monotonic() < deadline, "its last signal is against the others"
    assert len({choice["message"]["content"] for choice in answer.json()["choices"]}) > 1
    for fields in ({"n": 2}, {"seed": 1}, {"temperature": 0}, {"logprobs": True}, {"user": "somebody"}):
        assert "X-Edged-Base-Choices" not in drawn(**fields).headers
