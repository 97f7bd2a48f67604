"""The observer: it takes an engine's records in once a second, so that histograms know every event since start.

Must not run on the engine's thread.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from itertools import product
from statistics import mean
from typing import Any

import numpy as np

from edged.engine.engine import Engine
from edged.engine.stats.counters import LatencyRing
from edged.engine.stats.iterations import MIXES, Iteration
from edged.observe.catalogue import Buckets
from edged.scheduler.task import Kind, ServiceClass

DRAIN_EVERY_S = 1.0
"""The rings hold several seconds of the fastest device's records."""
LATEST = 32
"""Iterations over which the gauges of bins are means."""
TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0)
TBT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
QOE = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.999)
DECISION_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025)


class Histogram:
    """Counts of values per bucket, since start."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._edges = bounds, np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._total = 0.0

    def observe(self, values: Sequence[float]) -> None:
        """Count `values`; one that equals a bound is in its bucket, as Prometheus has it."""
        if values:
            array = np.array(values)
            self._counts += np.bincount(np.searchsorted(self._edges, array), minlength=len(self._counts))
            self._total += float(array.sum())

    def buckets(self) -> Buckets:
        """The present state."""
        bounds = (*map(repr, self._bounds), "+Inf")
        return list(zip(bounds, self._counts.cumsum().tolist(), strict=True)), self._total


class Observer:
    """Metrics accumulated from one engine's records. Any thread may call its methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._histograms: dict[str, dict[Any, Histogram]] = {
            "edged_ttft_seconds": {service: Histogram(TTFT_S) for service in ServiceClass},
            "edged_tbt_seconds": {service: Histogram(TBT_S) for service in ServiceClass},
            "edged_qoe_ratio": {service: Histogram(QOE) for service in ServiceClass},
            "edged_iteration_seconds": {mix: Histogram(TBT_S) for mix in MIXES},
            "edged_decision_seconds": {(): Histogram(DECISION_S)},
        }
        self._results = Counter(dict.fromkeys(product(("ttft", "tbt"), ServiceClass, ("met", "missed")), 0))
        """Tokens by target, class and result."""
        self._over_budget = 0
        self._seen = {"ttft": 0, "tbt": 0, "qoe": 0, "iteration": 0}
        """Numbers of the latest records that were taken in."""
        self._lost = {"iteration": 0, "token": 0}

    def drain(self, engine: Engine) -> None:
        """Take in what the engine recorded since the last time."""
        with self._lock:
            self._drain_waits("ttft", engine.stats.ttft)
            self._drain_waits("tbt", engine.stats.tbt)
            ends = engine.stats.qoe.since(self._seen["qoe"])
            self._seen["qoe"] = ends[0][0] if ends else self._seen["qoe"]
            for service, histogram in self._histograms["edged_qoe_ratio"].items():
                histogram.observe([qoe for _, qoe, _, whose in ends if whose is service])
            fresh = engine.iterations(self._seen["iteration"])
            if not fresh:
                return
            self._lost["iteration"] += fresh[0].number - self._seen["iteration"] - 1
            self._seen["iteration"] = fresh[-1].number
            for mix, histogram in self._histograms["edged_iteration_seconds"].items():
                histogram.observe([record.elapsed_s for record in fresh if record.mix == mix])
            self._histograms["edged_decision_seconds"][()].observe([record.decision_s for record in fresh])
            self._over_budget += sum(r.budget_s is not None and r.elapsed_s > r.budget_s for r in fresh)

    def _drain_waits(self, target: str, waits: LatencyRing) -> None:
        fresh = waits.since(self._seen[target])
        if not fresh:
            return
        self._lost["token"] += fresh[-1][0] - self._seen[target] - 1
        self._seen[target] = fresh[0][0]
        for service, histogram in self._histograms[f"edged_{target}_seconds"].items():
            histogram.observe([seconds for _, seconds, _, whose in fresh if whose is service])
        self._results.update((target, service, "met" if met else "missed") for _, _, met, service in fresh)

    def readings(self, engine: Engine) -> dict[str, Any]:
        """The metrics of the past, up to now, by name and label."""
        self.drain(engine)
        with self._lock:
            return {
                **{
                    name: {label: histogram.buckets() for label, histogram in histograms.items()}
                    for name, histograms in self._histograms.items()
                },
                "edged_slo_tokens_total": dict(self._results),
                "edged_iterations_over_budget_total": self._over_budget,
                "edged_records_lost_total": dict(self._lost),
                **_bins(engine.stats.latest(LATEST)),
            }


def _bins(latest: list[Iteration]) -> dict[str, Any]:
    if not latest:
        return {}
    slacks = [record.budget_s - record.elapsed_s for record in latest if record.budget_s is not None]
    return {
        "edged_bin_tokens": {kind: mean(record.num_tokens(kind) for record in latest) for kind in Kind},
        "edged_bin_units": mean(len(record.units) for record in latest),
        "edged_iteration_slack_seconds": mean(slacks) if slacks else None,
    }
