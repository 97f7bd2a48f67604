"""Prompts whose own log-probabilities are asked for, and several prompts a request, as lm_eval and langchain send."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.api.live import LiveDaemon

PATH = "/v1/completions"
IDS = [[5, 9, 30, 7, 7, 61, 12], [40] * 3, [11 + number % 80 for number in range(150)]]


def post(http: httpx2.Client, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = http.post(PATH, json=body)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def expected(daemon: LiveDaemon, ids: list[int]) -> torch.Tensor:
    """transformers' log-probabilities at each place, [tokens, vocab]."""
    model = AutoModelForCausalLM.from_pretrained(daemon.model)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("ids", IDS, ids=len)
def test_a_prompts_log_probabilities_are_the_models(daemon: LiveDaemon, http: httpx2.Client, ids: list[int]) -> None:
    tokenizer, oracle = AutoTokenizer.from_pretrained(daemon.model), expected(daemon, ids)
    for prompt in ([ids], ids, [ids]):
        # Again, where another's pages could be shared.
        answer = post(http, prompt=prompt, echo=True, logprobs=3, max_tokens=1, temperature=0)
        told = answer["choices"][0]["logprobs"]
        assert {len(entries) for entries in told.values()} == {len(ids) + 1}
        assert told["token_logprobs"][0] is None
        assert told["top_logprobs"][0] is None
        for place, token in enumerate(ids[1:]):
            assert told["token_logprobs"][place + 1] == pytest.approx(float(oracle[place, token]), abs=1e-4)
            best = oracle[place].topk(3)
            tops = sorted(told["top_logprobs"][place + 1].values(), reverse=True)
            assert tops == pytest.approx(best.values.tolist(), abs=1e-4) or len(tops) < 3, "bytes may look alike"
            assert tops[0] == pytest.approx(float(best.values[0]), abs=1e-4)
            if token == int(best.indices[0]):
                assert told["token_logprobs"][place + 1] == max(told["top_logprobs"][place + 1].values())
        assert told["token_logprobs"][-1] == max(told["top_logprobs"][-1].values()), "what was drawn is the likeliest"
        assert answer["choices"][0]["text"].startswith(tokenizer.decode(ids))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_prompt_alone_can_be_scored(http: httpx2.Client) -> None:
    whole = post(http, prompt=[IDS[0]], echo=True, logprobs=1, max_tokens=1, temperature=0)
    alone = post(http, prompt=[IDS[0]], echo=True, logprobs=1, max_tokens=0)
    assert alone["usage"]["completion_tokens"] == 0
    assert alone["choices"][0]["finish_reason"] == "length"
    for name, entries in alone["choices"][0]["logprobs"].items():
        assert entries == whole["choices"][0]["logprobs"][name][:-1]
    text = post(http, prompt="Hello there", echo=True, max_tokens=0)["choices"][0]
    assert (text["text"], text["logprobs"]) == ("Hello there", None)


def test_the_drawn_token_has_an_entry_even_where_it_ends_the_answer(http: httpx2.Client) -> None:
    ends = {"2": 100.0}
    answer = post(http, prompt=[IDS[0]], echo=True, logprobs=1, max_tokens=4, logit_bias=ends)["choices"][0]
    assert len(answer["logprobs"]["token_logprobs"]) > len(IDS[0])
    assert answer["finish_reason"] == "stop"


def test_offsets_are_where_tokens_begin_in_the_text(http: httpx2.Client) -> None:
    answer = post(http, prompt="Grün ist schön.", echo=True, logprobs=0, max_tokens=4, temperature=0)["choices"][0]
    text, told = answer["text"], answer["logprobs"]
    assert text.startswith("Grün ist schön.")
    assert len(told["tokens"]) == len(told["text_offset"])
    for offset, token in [*zip(told["text_offset"], told["tokens"], strict=True)][:-4]:
        assert text[offset:].startswith(token) or "\N{REPLACEMENT CHARACTER}" in token or token.startswith("<")


def test_several_prompts_are_answered_as_each_alone(http: httpx2.Client) -> None:
    about: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "n": 2, "logprobs": 1, "echo": True}
    for prompts in (IDS[:2], ["Hello", "What is", "Hello"]):
        answer = post(http, prompt=prompts, **about)
        each = [post(http, prompt=prompt, **about) for prompt in prompts]
        assert [choice["index"] for choice in answer["choices"]] == [*range(2 * len(prompts))]
        wanted = [choice for one in each for choice in one["choices"]]
        assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for choice in wanted]
        for kind in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert answer["usage"][kind] == sum(one["usage"][kind] for one in each)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"prompt": ["a", "b"], "stream": True}, "prompt"),
        ({"prompt": "a", "echo": True, "stream": True}, "echo"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[1], [10**6]]}, "prompt"),
        ({"prompt": "a", "max_tokens": -2}, "max_tokens"),
    ],
)
def test_what_is_wrong_is_named(http: httpx2.Client, body: dict[str, Any], param: str) -> None:
    error = post(http, 400, **body)["error"]
    assert str(error["param"]).startswith(param)
    assert json.dumps(error)
