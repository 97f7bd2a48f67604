"""The base of fair orders: their settings, the order inside a flow, and turns at fine-tuning."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from edged.scheduler.fairness.training import TrainingTurns
from edged.scheduler.policies.base import Order
from edged.settings.load import FairnessSettings

MAX_SHOWN = 32
"""Runs or users that a report names."""


class FairOrder(Order):
    """An order among users or applications, over that of a policy's row."""

    strict = True
    state_is_of: ClassVar[tuple[str, ...]] = ()
    """The settings that the state depends on, besides the policy."""
    training: TrainingTurns

    def __init__(self, fairness: FairnessSettings, row_order: Order) -> None:
        self.fairness = fairness
        self.key = row_order.key

    def follows(self, settings: FairnessSettings) -> bool:
        """Whether these settings want this order, with its state."""
        names = ("policy", *self.state_is_of)
        return all(getattr(self.fairness, name) == getattr(settings, name) for name in names)

    def weight(self, user: str) -> float:
        """Return a user's weight."""
        return self.fairness.weight(user)

    def next_steps(self, adapters: Collection[str], most: int) -> list[str]:
        """Return the ready adapters that were trained least."""
        return self.training.next_steps(adapters, most)

    def report(self) -> dict[str, Any]:
        """Return whose turn it is, as the status shows it."""
        raise NotImplementedError
