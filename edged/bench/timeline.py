"""A device's load by the second: which share of each it worked, and what for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

EVERY_S = 1.0
PARTS = ("prefill", "decode", "finetune")
Sums = tuple[float, ...]
"""Seconds of each of PARTS since some start."""


@dataclass(frozen=True, slots=True)
class Look:
    """The sums at one moment."""

    at_s: float
    sums: Sums

    @classmethod
    def of(cls, at_s: float, busy: dict[str, Any]) -> Look:
        """From the status' "busy" then."""
        return cls(at_s, tuple(busy[f"{part}_s"] for part in PARTS))


def shares(looks: list[Look]) -> list[dict[str, float]]:
    """Rows {"at_s", "busy_share", "prefill_share", "decode_share", "finetune_share"} between the looks.

    An engine counts an iteration when it ends: what a span has beyond its own length ran in the spans before it, and is
    counted there.
    """
    spans = [after.at_s - before.at_s for before, after in pairwise(looks)]
    work = [[b - a for a, b in zip(before.sums, after.sums, strict=True)] for before, after in pairwise(looks)]
    for index in range(len(work) - 1, -1, -1):
        total = sum(work[index])
        if total <= spans[index]:
            continue
        kept = spans[index] / total
        if index:
            work[index - 1] = [a + b * (1.0 - kept) for a, b in zip(work[index - 1], work[index], strict=True)]
        work[index] = [part * kept for part in work[index]]
    rows = []
    for look, span, parts in zip(looks[1:], spans, work, strict=True):
        if span > 0.05 * EVERY_S:
            row = {f"{name}_share": part / span for name, part in zip(PARTS, parts, strict=True)}
            rows.append({"at_s": look.at_s - looks[0].at_s, "busy_share": sum(parts) / span, **row})
    return rows
