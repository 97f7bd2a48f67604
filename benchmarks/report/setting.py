"""A comparison's folder for the report: its runs, and the points at which figures are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report.panels import Curve
from edged.lab.bench.compare import MANIFEST, CompareError
from edged.lab.bench.summary import Done, Middle, ReportFigure, Runs

HEADLINE_RETRAIN_RATE = 0.1
"""Retrain rate at which the paper compares throughput (section 6.2)."""

_NEEDED = (
    *("model.name", "model.dtype", "model.device", "load.trace", "load.mean_prompt_tokens", "load.mean_output_tokens"),
    *("series", "timeline", "prefix.requests_by_tenth", "prefix.prompt_tokens", "prefix.hit_tokens", "requests.sent"),
)
"""Fields that a run's report must have; figures read them by name, beside the metrics, which may be missing."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The runs of a comparison on one machine, measured or simulated."""

    name: str
    runs: Runs

    @classmethod
    def read(cls, folder: Path) -> Setting:
        """Read a comparison's folder. Raises CompareError when it is no such folder, or a report lacks a field of
        `_NEEDED`."""
        runs = Runs.read(folder)
        for key in ("device", "seconds", "trace", "model"):
            if key not in runs.manifest["workload"]:
                raise CompareError(f'"{folder}": its {MANIFEST} does not tell the workload\'s "{key}"')
        for done in runs.done:
            for path in _NEEDED:
                if not _has(done.report, path):
                    raise CompareError(
                        f'"{folder / done.run.file}" has a report without "{path}", as of another version of edged: '
                        "remove it, and the comparison repeats it"
                    )
        return cls(folder.resolve().name, runs)

    @property
    def simulated(self) -> str | None:
        """The name of the simulated device; None for a real machine."""
        device: str | None = self.runs.manifest["workload"]["device"]
        return device

    @property
    def policies(self) -> list[str]:
        """Policies in the order of their first run."""
        return sorted(self.runs.axis("policy"), key=lambda policy: (policy != "mace", policy))

    @property
    def rates(self) -> list[float]:
        """Request rates per second, ascending."""
        return self.runs.axis("rate_per_s")

    @property
    def retrain_rates(self) -> list[float]:
        """Retrain rates in pairs per request, ascending."""
        return self.runs.axis("retrain_rate")

    @property
    def middle_rate(self) -> float:
        """Request rate of figures that do not vary the load."""
        return self.rates[len(self.rates) // 2]

    @property
    def headline_retrain_rate(self) -> float:
        """The retrain rate nearest to the paper's 10 %."""
        return min(self.retrain_rates, key=lambda rate: abs(rate - HEADLINE_RETRAIN_RATE))

    @property
    def headline(self) -> dict[str, Any]:
        """The point of figures that vary neither load nor retrain rate."""
        return {"rate_per_s": self.middle_rate, "retrain_rate": self.headline_retrain_rate}

    def point(self, rate_per_s: float | None = None) -> str:
        """Format a load at the headline's retrain rate in words."""
        rate = self.middle_rate if rate_per_s is None else rate_per_s
        return f"{self.load(rate)}, {self.headline_retrain_rate:.0%} retrain rate"

    def load(self, rate_per_s: float) -> str:
        """Format a request rate in words, as a share of the capacity if it was given so."""
        shares = {done.run.load for done in self.runs.at(rate_per_s=rate_per_s)}
        share = next(iter(shares), None)
        return f"{rate_per_s:.2f} requests/s" if share is None else f"{share:.0%} load"

    def median(self, metric: ReportFigure, policy: str, **fields: Any) -> float | None:
        """Return the median over seeds at a point, by default the headline's."""
        middle = self.runs.middle(metric, policy=policy, **{**self.headline, **fields})
        return middle.median if middle else None

    def mean_ratio(self, metric: ReportFigure, policy: str, baseline: str, rate_per_s: float) -> float | None:
        """Return the mean of the median ratios over all retrain rates; None if there are fewer than two, or a ratio is
        missing."""
        points = [{"rate_per_s": rate_per_s, "retrain_rate": rate} for rate in self.retrain_rates]
        found = [self.runs.ratio(metric, policy, baseline, **point) for point in points]
        ratios = [ratio.median for ratio in found if ratio is not None]
        return sum(ratios) / len(ratios) if len(ratios) == len(points) > 1 else None

    def curve(self, metric: ReportFigure, policy: str, axis: str) -> Curve:
        """Return a metric over `axis` (a field of Run), with the headline's values on the other axes."""
        values = self.runs.axis(axis)
        middles = [self.runs.middle(metric, policy=policy, **{**self.headline, axis: value}) for value in values]
        return Curve(values, *(column(middles, name) for name in ("median", "low", "high")))

    def curves(self, metric: ReportFigure, axis: str, policies: Sequence[str] = ()) -> dict[str, Curve]:
        """Return `curve` of the given policies, or of all."""
        return {policy: self.curve(metric, policy, axis) for policy in policies or self.policies}

    def bars(self, metrics: dict[str, ReportFigure], policy: str) -> Curve:
        """Return metrics at the headline, by the name of their bar."""
        middles = [self.runs.middle(metric, policy=policy, **self.headline) for metric in metrics.values()]
        return Curve(list(metrics), *(column(middles, name) for name in ("median", "low", "high")))

    def at_headline(self, policy: str) -> list[Done]:
        """Return a policy's runs at the headline, by seed."""
        return self.runs.at(policy=policy, **self.headline)


def _has(report: Any, path: str) -> bool:
    for key in path.split("."):
        if not isinstance(report, dict) or key not in report:
            return False
        report = report[key]
    return True


def column(middles: list[Middle | None], name: str) -> list[float | None]:
    """Return one of median, low and high of each."""
    return [None if middle is None else getattr(middle, name) for middle in middles]
