"""The pieces whose instructions are counted: scheduling decisions and the packing of a batch.

Owns their inputs, which are the same in every run. Run as a module it is the counted process.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.scheduler_loads import Mix, all_mixes
from benchmarks.support.callgrind import serve
from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.kv.store import KvStore
from edged.engine.lora.segments import NO_SLOT
from edged.scheduler.task import IterationResult

TASKS = 64
REPEATS = 20
"""Calls of a piece that are counted together; reports are per call."""
_WARM_ROUNDS = 20
_PAGE_SIZE, _CONTEXT_TOKENS = 16, 2048
_DECODES, _PROMPTS, _PROMPT_TOKENS, _SLOTS = 32, 3, 256, 4

Pieces = dict[str, Callable[[], None]]


def pieces() -> Pieces:
    """Every piece by name; each may run once, and runs its call REPEATS times."""
    found: Pieces = {}
    for name, mix in all_mixes("mace", TASKS).items():
        found |= _decisions(name, mix)
    return found | _packing()


def _decisions(name: str, mix: Mix) -> Pieces:
    """Plans and completions of successive iterations, from copies of the states before them."""
    plans: list[Mix] = []
    completions: list[tuple[Mix, IterationResult]] = []
    for number in range(_WARM_ROUNDS + REPEATS):
        warm = number < _WARM_ROUNDS
        if not warm:
            plans.append(copy.deepcopy(mix))
        result = mix.run(mix.plan())
        if not warm:
            completions.append(copy.deepcopy((mix, result)))
        mix.complete(result)
        mix.refill()

    def plan() -> None:
        for state in plans:
            state.plan()

    def complete() -> None:
        for state, result in completions:
            state.complete(result)

    return {f"plan, {name}": plan, f"complete, {name}": complete}


def _packing() -> Pieces:
    """A decode batch; and one with prompts beside it, one of them in its second chunk, under several adapters."""
    torch.set_num_threads(1)
    chance = random.Random(0)
    pages_each = _CONTEXT_TOKENS // _PAGE_SIZE
    kv = KvStore(
        (_DECODES + _PROMPTS) * pages_each, _PAGE_SIZE, 1, 3, 8, dtype=torch.float32, device=torch.device("cpu")
    )

    def segment(index: int, context: int, tokens: int, slot: int) -> Segment:
        ids = [chance.randrange(1000) for _ in range(tokens)]
        pages = np.arange(index * pages_each, (index + 1) * pages_each)
        return Segment(ids, context, pages, slot, context, samples=True)

    decodes = [segment(index, chance.randint(50, 1500), 1, NO_SLOT) for index in range(_DECODES)]
    mixed = [segment(index, chance.randint(50, 1500), 1, index % _SLOTS) for index in range(_DECODES)]
    for number in range(_PROMPTS):
        mixed.append(segment(_DECODES + number, _PROMPT_TOKENS * (number % 2), _PROMPT_TOKENS, number % _SLOTS))

    def packed(segments: list[Segment]) -> Callable[[], None]:
        pack(segments, kv, kv.keys.device)  # what is loaded late is loaded now

        def run() -> None:
            for _ in range(REPEATS):
                pack(segments, kv, kv.keys.device)

        return run

    return {f"pack, {_DECODES} decodes": packed(decodes), f"pack, {_DECODES} decodes and prompts": packed(mixed)}


if __name__ == "__main__":
    serve(pieces())
