"""The plan of a simulation: load, pairs, device and model."""

from collections.abc import Sequence
from dataclasses import dataclass

from edged.lab.bench.load_run import LoadPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationPlan(LoadPlan):
    """A simulation's load, preference pairs, device and model.

    `device` and `model` are names of configs/devices and configs/models, or files; a .json file is a device's profile
    (`edged profile`). `pair_lengths`: tokens of (prompt, chosen, rejected) of the pairs in order of arrival; None draws
    them without end, uniformly within half of `pair_tokens`. `quote_tokens`: answers are quotations of so many tokens
    of their prompts, which drafts find; 0: answers have no text, and nothing is drafted. `best_of`: each request is one
    user's, and its answer is drawn up to so many times where that finds room.
    """

    device: str
    model: str
    pair_tokens: tuple[int, int, int] = (100, 60, 60)
    pair_lengths: Sequence[tuple[int, int, int]] | None = None
    quote_tokens: int = 0
    best_of: int = 1
