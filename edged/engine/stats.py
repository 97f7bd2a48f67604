"""What the engine counted: totals, rates of the last seconds, percentiles of the latest events.

Owns the counters. Written by the engine thread, read by any: deques and integers are replaced, never iterated in place.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from edged.engine.busy import Busy
from edged.engine.iterations import Iterations
from edged.engine.waits import Wait, Waits

_RATE_SPAN_S = 10.0
_BINS = 32
"""Iterations that the status shows."""
_WAITS = 1000
"""Latest tokens over which percentiles and attainment go."""
OUTCOMES = ("stop", "length", "cancelled", "error", "refused")
"""How a request can end; "refused": the queue was full."""
_LABELS = 8192

Label = tuple[int, str, str]
"""A task's id, the request that it serves ("" for fine-tuning), and its adapter's name (several of a joint step)."""


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the sorted values lie (nearest rank); 0 when there are none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def _latencies() -> deque[float]:
    return deque(maxlen=1000)


@dataclass(slots=True)
class Totals:
    """Counts since start."""

    requests: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    finetune_tokens: int = 0
    optimizer_steps: int = 0
    pairs_trained: int = 0
    preemptions: int = 0
    iterations: int = 0
    plans_foreseen: int = 0
    """Iterations whose plan was made while the one before ran."""
    followers: int = 0
    """Times that a request waited for another to compute what their prompts share."""
    prunings: int = 0
    """Times that a sequence's K/V was pruned."""
    pruned_pages: int = 0
    """Pages that came back by that."""
    steps_skipped: int = 0
    rollbacks: int = 0
    """Versions that were taken back because somebody asked for it."""
    guard_rollbacks: int = 0
    """Versions that the guard took back."""

    def copy(self) -> Totals:
        """A snapshot."""
        return Totals(*(getattr(self, name) for name in self.__slots__))


@dataclass(slots=True)
class Stats:
    """All counters of one engine; latencies in milliseconds."""

    totals: Totals = field(default_factory=Totals)
    busy: Busy = field(default_factory=Busy)
    ttft: Waits = field(default_factory=Waits)
    tbt: Waits = field(default_factory=Waits)
    outcomes: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))
    """Requests that ended, by how."""
    labels: deque[Label] = field(default_factory=lambda: deque(maxlen=_LABELS))
    """What the latest tasks are, for those who read records of iterations."""
    iteration_ms: deque[float] = field(default_factory=_latencies)
    decision_ms: deque[float] = field(default_factory=_latencies)
    iterations: Iterations = field(default_factory=Iterations)
    _marks: deque[tuple[float, Totals]] = field(default_factory=lambda: deque(maxlen=256))

    def mark(self, now: float) -> None:
        """Remember the totals, at most ten times a second, so that rates can be told."""
        if not self._marks or now - self._marks[-1][0] >= 0.1:
            self._marks.append((now, self.totals.copy()))

    def rates(self, now: float) -> dict[str, float]:
        """Per second, over the last ten seconds at most."""
        marks = [mark for mark in list(self._marks) if now - mark[0] <= _RATE_SPAN_S]
        start, before = marks[0] if marks else (now, self.totals)
        span = max(now - start, 1e-3)

        def rate(name: str) -> float:
            return float((getattr(self.totals, name) - getattr(before, name)) / span)

        return {
            "output_tokens_per_s": rate("output_tokens"),
            "prompt_tokens_per_s": rate("prompt_tokens"),
            "finetune_tokens_per_s": rate("finetune_tokens"),
            "requests_per_s": rate("requests"),
            "pairs_per_s": rate("pairs_trained"),
        }

    def report(self, now: float) -> dict[str, Any]:
        """The parts of the status that are counted here."""

        def halves(values: list[float]) -> dict[str, float]:
            return {"p50": percentile(values, 0.5), "p95": percentile(values, 0.95)}

        def milliseconds(waits: list[Wait]) -> list[float]:
            return [seconds * 1e3 for _, seconds, _, _ in waits]

        def share(waits: list[Wait]) -> float | None:
            return sum(met for _, _, met, _ in waits) / len(waits) if waits else None

        ttft, tbt = self.ttft.latest(_WAITS), self.tbt.latest(_WAITS)
        totals = {name: getattr(self.totals, name) for name in Totals.__slots__}
        return {
            "rates": self.rates(now),
            "latency": {
                "ttft_ms": halves(milliseconds(ttft)),
                "tbt_ms": halves(milliseconds(tbt)),
                "iteration_ms": halves(list(self.iteration_ms)),
            },
            "bins": [iteration.report() for iteration in self.iterations.latest(_BINS)],
            "totals": totals,
            "outcomes": dict(self.outcomes),
            "busy": self.busy.report(),
            "slo": {"ttft_attainment": share(ttft), "tbt_attainment": share(tbt)},
        }
