"""Signatures: which requirements a box meets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Capacity(NamedTuple):
    """The capacity of a box, in classes, or what a campaign asks for at least; `model` names base and LoRA form."""

    memory_mb: int = 0
    tokens_per_s: float = 0.0
    participants: int = 0
    model: str = ""

    def meets(self, asked: Capacity) -> bool:
        """Tell whether a box that has this may take part where `asked` is required."""
        return (
            self.model == asked.model
            and self.memory_mb >= asked.memory_mb
            and self.tokens_per_s >= asked.tokens_per_s
            and self.participants >= asked.participants
        )


def signature(box: Capacity, asked: Iterable[Capacity]) -> int:
    """Return a mask whose bit i is set where the box meets the i-th requirement. Equal masks are one atom."""
    return sum(1 << bit for bit, requirement in enumerate(asked) if box.meets(requirement))
