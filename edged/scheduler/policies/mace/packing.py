"""Best-fit packing: MACE's Algorithm 1 as a pure function."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from edged.scheduler.policies.options import PackingOptions
from edged.scheduler.task import PREFILL, Task


@dataclass(slots=True)
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
    """The room of an iteration. Latencies of tasks in one packed forward add up, so the `max_latency` of the paper's
    score is what the members leave of the iteration's length: best fit then closes the gaps of both dimensions."""

    free_pages: int
    free_s: float
    occupied: bool = False
    """Whether anything is in it: the first bin starts with the decodes and the prompts under way."""
    promised_pages: int = 0
    """Pages that those under way will need, which are not free either: what nobody holds yet does not fill a bin."""
    items: list[Item] = field(default_factory=list)

    def put(self, item: Item) -> None:
        """Take the item in."""
        self.occupied = True
        self.items.append(item)
        self.free_pages -= item.pages
        self.free_s -= item.latency_s


def best_fit(
    options: PackingOptions, items: Iterable[Item], first: Bin, total_pages: int, length_s: float
) -> list[Bin]:
    """Put each item into the fitting bin with the least score, else into a new one (Algorithm 1); the first bin runs.

    The score is the gap that the item would leave, each dimension as a share of a whole bin (MACE 4.2). `first` is the
    coming iteration's bin with what its decodes left; the others stand for later iterations, which start with
    `total_pages` and `length_s`. It ends when the first bin is full (`tau_memory` of `total_pages` held, or its whole
    length) or `tau_tasks` items were looked at.
    """
    bins = [first]
    full = total_pages * (1.0 - options.tau_memory) - first.promised_pages

    asking = islice(items, options.tau_tasks)
    # An item that nobody looks at is not made.
    while first.free_s > 0.0 and not (first.occupied and first.free_pages <= full) and (item := next(asking, None)):
        if first.free_pages >= item.pages:
            if len(bins) == 1:
                first.put(item)
                continue
        elif not item.patient:
            break
        best, least = None, math.inf
        for room in bins:
            if room.free_pages >= item.pages:
                pages, seconds = abs(room.free_pages - item.pages), abs(room.free_s - item.latency_s)
                score = options.lambda_memory * pages / total_pages + options.lambda_latency * seconds / length_s
                if score < least:
                    best, least = room, score
        if best is None:
            bins.append(best := Bin(total_pages, length_s))
        best.put(item)
    return bins


def in_order(options: PackingOptions, items: Iterable[Item], first: Bin) -> list[Item]:
    """Put items into the first bin in their order, until it is full or a prompt does not fit, which none overtakes.

    A step that does not fit is left out: no prompt waits for it.
    """
    asking = islice(items, options.tau_tasks)
    while first.free_s > 0.0 and (item := next(asking, None)):
        if item.pages <= first.free_pages:
            first.put(item)
        elif item.task.kind is PREFILL:
            break
    return first.items
