"""Best-fit packing: MACE's Algorithm 1 as a pure function."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from edged.scheduler.task import Task


@dataclass(frozen=True, slots=True)
class Item:
    """A task that asks for a place: `pages` and `latency_s` that it would take.

    `patient` is False when it must not be overtaken any more: if the first bin cannot take it, packing ends.
    """

    task: Task
    pages: int
    latency_s: float
    patient: bool = True


@dataclass(slots=True)
class Bin:
    """An iteration's room. Latencies of tasks in one packed forward add up, so the `max_latency` of the paper's
    score is what the members leave of the iteration's length: best fit then closes the gaps of both dimensions."""

    free_pages: int
    free_s: float
    occupied: bool = False
    """Whether anything is in it; the first bin starts with the decodes and the prompts under way."""
    items: list[Item] = field(default_factory=list)

    def put(self, item: Item) -> None:
        """Take the item in."""
        self.occupied = True
        self.items.append(item)
        self.free_pages -= item.pages
        self.free_s -= item.latency_s


@dataclass(frozen=True, slots=True)
class Packing:
    """Constants of Algorithm 1: lambda1, lambda2, tau_mem (share of all pages) and tau_task."""

    lambda_memory: float = 1.0
    lambda_latency: float = 1.0
    tau_memory: float = 0.95
    tau_tasks: int = 256

    def score(self, room: Bin, item: Item, total_pages: int, length_s: float) -> float:
        """The gap that `item` would leave in `room`, each dimension as a share of a whole bin (MACE 4.2)."""
        return (
            self.lambda_memory * abs(room.free_pages - item.pages) / total_pages
            + self.lambda_latency * abs(room.free_s - item.latency_s) / length_s
        )

    def best_fit(
        self, items: Iterable[Item], first: Bin, total_pages: int, length_s: float, later_pages: int
    ) -> list[Bin]:
        """Algorithm 1: each item into the fitting bin with the least score, else into a new bin; the first bin runs.

        `first` is the coming iteration's bin with what its decodes left; the others stand for later iterations, which
        start with `later_pages` and `length_s`. It ends when the first bin is full (`tau_memory` of `total_pages`, or
        its whole length) or `tau_tasks` items were looked at.
        """
        bins = [first]
        full = total_pages * (1.0 - self.tau_memory)
        for count, item in enumerate(items):
            if count >= self.tau_tasks or first.free_s <= 0.0 or (first.occupied and first.free_pages <= full):
                break
            if first.free_pages < item.pages and not item.patient:
                break
            best, least = None, float("inf")
            for room in bins:
                if room.free_pages >= item.pages:
                    score = self.score(room, item, total_pages, length_s)
                    if score < least:
                        best, least = room, score
            if best is None:
                best = Bin(later_pages, length_s)
                bins.append(best)
            best.put(item)
        return bins
