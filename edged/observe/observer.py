"""Takes an engine's records in, a second's worth at a time, so that histograms know every event since start.

Must not run on the engine's thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np

from edged.engine.engine import Engine
from edged.engine.stats.counters import LatencyRing, Wait
from edged.engine.stats.iterations import MIXES, Iteration
from edged.observe.catalogue import Buckets, Samples
from edged.scheduler.task import Kind, ServiceClass

DRAIN_EVERY_S = 1.0
"""The rings hold several seconds of the fastest device's records."""
LATEST = 32
"""Iterations over which the gauges of bins are means."""
TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0)
TBT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
ITERATION_S = TBT_S
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
        return Buckets(self._bounds, tuple(self._counts.tolist()), self._total)


class _Target:
    """Waits for one sort of token, by service class."""

    def __init__(self, name: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._seen = 0
        self._histograms = {service: Histogram(bounds) for service in ServiceClass}
        self._results: Counter[tuple[ServiceClass, bool]] = Counter()

    def drain(self, waits: LatencyRing) -> int:
        """Take in what is new; returns how many were lost."""
        fresh: list[Wait] = waits.since(self._seen)
        if not fresh:
            return 0
        lost = fresh[-1][0] - self._seen - 1
        self._seen = fresh[0][0]
        for service, histogram in self._histograms.items():
            histogram.observe([seconds for _, seconds, _, whose in fresh if whose is service])
        self._results.update((service, met) for _, _, met, service in fresh)
        return lost

    def put(self, samples: Samples) -> None:
        """Show it."""
        for service, histogram in self._histograms.items():
            samples.put(f"edged_{self._name}_seconds", histogram.buckets(), service)
            for met, result in ((True, "met"), (False, "missed")):
                samples.put("edged_slo_tokens_total", self._results[service, met], self._name, service, result)


class Observer:
    """What the metrics know of one engine's past. Any thread may drain or show it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ttft, self._tbt = _Target("ttft", TTFT_S), _Target("tbt", TBT_S)
        self._iterations = {mix: Histogram(ITERATION_S) for mix in MIXES}
        self._decisions = Histogram(DECISION_S)
        self._over_budget = 0
        self._seen = 0
        self._lost: Counter[str] = Counter()

    def drain(self, engine: Engine) -> None:
        """Take in what the engine recorded since the last time."""
        with self._lock:
            self._lost["token"] += self._ttft.drain(engine.stats.ttft) + self._tbt.drain(engine.stats.tbt)
            fresh = engine.iterations(self._seen)
            if not fresh:
                return
            self._lost["iteration"] += fresh[0].number - self._seen - 1
            self._seen = fresh[-1].number
            for mix, histogram in self._iterations.items():
                histogram.observe([record.elapsed_s for record in fresh if record.mix == mix])
            self._decisions.observe([record.decision_s for record in fresh])
            self._over_budget += sum(r.budget_s is not None and r.elapsed_s > r.budget_s for r in fresh)

    def put(self, engine: Engine, samples: Samples) -> None:
        """Show it, up to now."""
        self.drain(engine)
        with self._lock:
            self._ttft.put(samples)
            self._tbt.put(samples)
            for mix, histogram in self._iterations.items():
                samples.put("edged_iteration_seconds", histogram.buckets(), mix)
            samples.put("edged_decision_seconds", self._decisions.buckets())
            samples.put("edged_iterations_over_budget_total", self._over_budget)
            for record in ("iteration", "token"):
                samples.put("edged_records_lost_total", self._lost[record], record)
        _put_bins(engine.stats.latest(LATEST), samples)


def _put_bins(latest: list[Iteration], samples: Samples) -> None:
    if not latest:
        return
    for kind in Kind:
        samples.put("edged_bin_tokens", sum(record.tokens(kind) for record in latest) / len(latest), kind)
    samples.put("edged_bin_units", sum(len(record.units) for record in latest) / len(latest))
    slacks = [record.budget_s - record.elapsed_s for record in latest if record.budget_s is not None]
    if slacks:
        samples.put("edged_iteration_slack_seconds", sum(slacks) / len(slacks))
