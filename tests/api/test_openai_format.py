"""The response objects' parts that cost time."""

from __future__ import annotations

import copy
from typing import Any

from edged.api.generation import TokenLogprob
from edged.api.openai_format import chat_logprobs, text_logprobs
from edged.http.json_format import dumps, dumps_piecewise
from edged.text.tokenizer import Tokenizer
from tests.models import byte_tokenizer


class Counting:
    """A tokenizer that counts how often a token is looked up."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.lookups = self.special_lists = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    @property
    def all_special_ids(self) -> list[int]:
        self.special_lists += 1
        return list(self._tokenizer.all_special_ids)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._tokenizer, memo)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        self.lookups += 1
        return str(self._tokenizer.convert_ids_to_tokens(token_id))


def test_each_token_is_looked_up_once_however_often_it_is_reported() -> None:
    tokenizer = Counting(byte_tokenizer())
    codec = Tokenizer(tokenizer, "counted")
    before = tokenizer.special_lists
    entry = TokenLogprob(70, -0.5, tuple((token, -1.0) for token in range(20)), 0)
    shown = chat_logprobs([entry] * 50, codec)["content"]
    assert tokenizer.lookups == 21
    assert tokenizer.special_lists == before
    assert len(shown) == 50
    assert shown[0] == shown[49]
    assert shown[0]["top_logprobs"][2]["token"] == "</s>"


def test_what_is_written_piecewise_is_the_same_text() -> None:
    codec = Tokenizer(byte_tokenizer(), "pieces")
    entries = [TokenLogprob(70 + i % 9, -0.5, ((71, -1.0), (72, float("-inf"))), i) for i in range(600)]
    choices = [
        {"index": 0, "logprobs": chat_logprobs(entries, codec), "text": "\u00e9\n"},
        {"index": 1, "logprobs": text_logprobs(entries, codec), "finish_reason": None},
        {"index": 2, "logprobs": [], "usage": {}},
    ]
    assert dumps_piecewise({"choices": choices, "n": 3}) == dumps({"choices": choices, "n": 3})
