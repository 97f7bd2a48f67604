"""Upper bounds of prefix sharing: the share of a trace's prompts that came before, and the speed-up that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.support.machine_limits import Machine, Sizes, decode, prefill
from edged.lab.bench.traces import TraceRow, scaled_lengths

_CONVERSATION_BLOCK = 1
"""Index of the block that identifies a conversation: Mooncake's first block is the same in all 12,031 requests."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The bounds of a load with an infinite prefix cache: its hits, and the speed-ups over no cache.

    `prefill_speedup`: floor of computing all prompts over that of what was not seen before. `speedup`: the same with
    the decoding of the recorded answers added to both: `all_s` over `unseen_s`. `first_token_s` and
    `unseen_first_token_s` are the medians of the prompts' floors, whole and without what was seen before.
    """

    requests: int
    mean_prompt_tokens: float
    mean_output_tokens: float
    hit_share: float
    prefill_speedup: float
    speedup: float
    all_s: float
    unseen_s: float
    first_token_s: float
    unseen_first_token_s: float


def unbounded_hits(rows: Sequence[TraceRow], block_tokens: int) -> list[int]:
    """Return, for each request in order, the prompt tokens that an infinite prefix cache would hit.

    Whole blocks count, and a prompt's last token is never a hit, since its logits are needed.
    """
    seen: set[int] = set()
    hits = []
    for row in rows:
        known = next((index for index, block in enumerate(row.blocks) if block not in seen), len(row.blocks))
        hits.append(min(known * block_tokens, row.prompt_tokens - 1))
        seen.update(row.blocks)
    return hits


def conversation_of(row: TraceRow) -> int | None:
    """Return the id of a request's conversation; None if the prompt is too short.

    It is the first block after the one that all requests share.
    """
    return row.blocks[_CONVERSATION_BLOCK] if len(row.blocks) > _CONVERSATION_BLOCK else None


def whole_conversations(rows: Sequence[TraceRow], turns: int, requests: int) -> list[TraceRow]:
    """Return the first conversations of at least `turns` requests, each whole; those that would exceed `requests` are
    skipped.

    They are in order of arrival, so that conversations interleave as they were recorded. Raises ValueError if there are
    none.
    """
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        conversation = conversation_of(row)
        if conversation is not None:
            groups.setdefault(conversation, []).append(index)
    chosen: list[int] = []
    for group in groups.values():
        if len(group) >= turns and len(chosen) + len(group) <= requests:
            chosen += group
    if not chosen:
        raise ValueError(
            f"no conversation of at least {turns} requests fits {requests} requests: ask for more requests or fewer "
            "turns"
        )
    return [rows[index] for index in sorted(chosen)]


def scaled(rows: Sequence[TraceRow], scale: float, block_tokens: int, context_tokens: int) -> list[TraceRow]:
    """Return the rows with the lengths that `scale_rows` gives them, and the blocks (of `block_tokens`) that are
    whole."""
    found = []
    for row in rows:
        prompt, output = scaled_lengths(row, scale, context_tokens)
        whole = row.blocks[: prompt // block_tokens]
        found.append(replace(row, prompt_tokens=prompt, output_tokens=output, blocks=whole))
    return found


def bound(rows: Sequence[TraceRow], block_tokens: int, sizes: Sizes, machine: Machine, concurrency: int) -> Bound:
    """Return the bound of `rows`, at the floors of a model on a machine that decodes `concurrency` answers at once."""
    hits = unbounded_hits(rows, block_tokens)
    prompt_tokens = sum(row.prompt_tokens for row in rows)
    output_tokens = sum(row.output_tokens for row in rows)
    whole = [prefill(sizes, row.prompt_tokens).floor_s(machine) for row in rows]
    unseen = [
        prefill(sizes, row.prompt_tokens - hit, context=hit).floor_s(machine)
        for row, hit in zip(rows, hits, strict=True)
    ]
    context = round((prompt_tokens + output_tokens / 2) / len(rows))
    decode_s = output_tokens / concurrency * decode(sizes, concurrency, context).floor_s(machine)
    return Bound(
        requests=len(rows),
        mean_prompt_tokens=prompt_tokens / len(rows),
        mean_output_tokens=output_tokens / len(rows),
        hit_share=sum(hits) / prompt_tokens,
        prefill_speedup=sum(whole) / sum(unseen),
        speedup=(sum(whole) + decode_s) / (sum(unseen) + decode_s),
        all_s=sum(whole) + decode_s,
        unseen_s=sum(unseen) + decode_s,
        first_token_s=median(whole),
        unseen_first_token_s=median(unseen),
    )
