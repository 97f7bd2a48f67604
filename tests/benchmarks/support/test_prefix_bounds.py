"""What had been seen before is counted as a person would, and bounds what a cache can bring."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.support.machine_limits import Machine, Sizes
from benchmarks.support.prefix_bounds import bound, conversation_of, scaled, unbounded_hits, whole_conversations
from edged.lab.bench.traces import PromptIds, TraceRow, scale_rows

SIZES = Sizes(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=256, itemsize=4)
COMPUTES = Machine(bytes_per_s=1e18, operations_per_s=1e9)
"""Reading is free here: only operations count."""


def conversations(seed: int, count: int = 40) -> list[TraceRow]:
    """Random prompts that start like each other now and then, in blocks of 512 tokens."""
    chance = random.Random(seed)
    rows: list[TraceRow] = []
    fresh = iter(range(1, 10_000))
    for number in range(count):
        known = chance.choice(rows).blocks if rows and chance.random() < 0.6 else (0,)
        blocks = (*known[: chance.randint(1, len(known))], *(next(fresh) for _ in range(chance.randint(1, 4))))
        rows.append(TraceRow(float(number), 512 * len(blocks) - chance.randint(0, 511), chance.randint(1, 300), blocks))
    return rows


def equal_start(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


@pytest.mark.parametrize("seed", range(5))
def test_hits_are_the_longest_start_that_any_earlier_prompt_had(seed: int) -> None:
    rows = conversations(seed)
    prompts = [
        arrival.prompt_ids
        for arrival in scale_rows(rows, PromptIds(10**6, range(50_000)), scale=1 / 64, block_tokens=512)
    ]
    small = scaled(rows, 1 / 64, 8, 10**6)
    assert [len(prompt) for prompt in prompts] == [row.prompt_tokens for row in small]
    expected = []
    for number, prompt in enumerate(prompts):
        common = [equal_start(prompt, other) for other in prompts[:number]]
        # Whole blocks alone can be found again.
        expected.append(min(max((n // 8 * 8 for n in common), default=0), len(prompt) - 1))
    assert unbounded_hits(small, 8) == expected
    assert sum(expected) > 0


def test_without_anything_seen_before_nothing_is_gained() -> None:
    rows = [TraceRow(0.0, 1024, 50, (2 * n, 2 * n + 1)) for n in range(5)]
    found = bound(rows, 512, SIZES, COMPUTES, 4)
    assert (found.hit_share, found.prefill_speedup, found.speedup) == (0.0, 1.0, 1.0)


def test_the_speedup_follows_the_share_and_is_less_with_answers() -> None:
    prompt = TraceRow(0.0, 512 * 8, 1, tuple(range(8)))
    rows = [replace(prompt, blocks=(*prompt.blocks[:6], 100 + 2 * n, 101 + 2 * n)) for n in range(100)]
    found = bound(rows, 512, replace(SIZES, heads=0), COMPUTES, 4)
    assert found.hit_share == pytest.approx(0.99 * 6 / 8)
    # Without attention a token costs the same wherever it stands.
    assert found.prefill_speedup == pytest.approx(1 / (1 - found.hit_share), rel=0.01)
    longer = bound([replace(row, output_tokens=2000) for row in rows], 512, replace(SIZES, heads=0), COMPUTES, 4)
    assert longer.prefill_speedup == pytest.approx(found.prefill_speedup)
    assert 1.0 < longer.speedup < 0.7 * found.speedup


def test_conversations_are_taken_whole_and_in_order() -> None:
    talks = [1, 2, 1, 3, 2, 1, 3, 4, 3, 3]
    rows = [TraceRow(float(at), 1500, 1, (0, talk, 100 + at)) for at, talk in enumerate(talks)]
    rows.append(TraceRow(10.0, 400, 1, (0,)))

    def chosen(turns: int, requests: int) -> list[int | None]:
        return [conversation_of(row) for row in whole_conversations(rows, turns, requests)]

    assert chosen(2, 100) == [1, 2, 1, 3, 2, 1, 3, 3, 3]
    assert chosen(3, 100) == [1, 1, 3, 1, 3, 3, 3]
    assert chosen(3, 4) == [1, 1, 1]
    assert conversation_of(rows[-1]) is None
    with pytest.raises(ValueError, match="at least 5 requests"):
        whole_conversations(rows, 5, 100)
