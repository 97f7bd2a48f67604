"""What a box tells the hub of itself, and what the hub believes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edged.federated.signature import Capacity
from edged.federated_nvflare.capacity import capacity_token, read_capacity

CAPACITY = Capacity(4096, 32.0, 2, "ab" * 32)


def test_the_hub_reads_what_a_box_says_and_no_two_tokens_are_the_same() -> None:
    assert read_capacity(capacity_token(CAPACITY)) == CAPACITY
    assert capacity_token(CAPACITY) != capacity_token(CAPACITY)


@pytest.mark.parametrize(
    "change",
    [
        {"memory_mb": 4097},
        {"memory_mb": -4},
        {"memory_mb": 1 << 60},
        {"tokens_per_s": float("nan")},
        {"participants": [1]},
        {"participants": "2"},
        {"model": "gpt"},
        {"model": None},
    ],
)
def test_a_box_that_says_anything_else_is_no_box(change: dict[str, Any]) -> None:
    assert read_capacity(json.dumps({**CAPACITY._asdict(), **change})) is None


@pytest.mark.parametrize("token", ["", "{}", "[]", "7", "resource manager raised an exception; see site log"])
def test_a_token_of_another_kind_is_no_box(token: str) -> None:
    assert read_capacity(token) is None
