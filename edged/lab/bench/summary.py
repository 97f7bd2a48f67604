"""Summary of a comparison's runs over their seeds: medians with their range, and ratios to a baseline's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edged.lab.bench.compare import CompareError, Run, read_manifest, read_object

BASELINES = ("adainf", "fcfs")
"""MACE's strongest baseline, and serving alone."""


@dataclass(frozen=True, slots=True)
class ReportFigure:
    """A figure of a report: its path in the JSON, and its title in a table."""

    path: str
    title: str
    digits: int = 1
    rather: str = ""
    """Path of a better measurement of the same figure, used if the run made it."""

    def of(self, report: dict[str, Any]) -> float | None:
        """Return the figure's value; None if the report lacks it."""
        for path in filter(None, (self.rather, self.path)):
            value: Any = report
            for key in path.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                return float(value)
        return None


TTFT = ReportFigure("ttft_ms.p50", "TTFT p50 ms")
TTFT_P95 = ReportFigure("ttft_ms.p95", "TTFT p95 ms")
TBT = ReportFigure("tbt_ms.p50", "TBT p50 ms", 2)
MEAN_TBT = ReportFigure("tbt_ms.mean", "TBT mean ms", 2)
TBT_P95 = ReportFigure("tbt_ms.p95", "TBT p95 ms", 2)
ATTAINMENT = ReportFigure("slo.ttft_within_factor_share", "first tokens in time", 3)
REQUESTS_IN_TIME = ReportFigure("slo.requests_in_time_share", "requests in time", 3)
THROUGHPUT = ReportFigure("throughput.output_tokens_per_s", "output tokens/s")
PAIRS = ReportFigure("finetune.pairs_trained", "pairs trained", 0)
LEARNING = ReportFigure("finetune.latency_ms.p50", "learned after p50 ms", 0)
CLPD = ReportFigure("alignment.clpd_nats", "CLPD nats", 3, rather="arrivals.clpd_nats")
WIN_RATE = ReportFigure("alignment.win_rate", "win rate", 3, rather="arrivals.win_rate")
METRICS = (
    TTFT,
    TTFT_P95,
    TBT,
    MEAN_TBT,
    TBT_P95,
    ReportFigure("tbt_ms.p99", "TBT p99 ms", 2),
    ATTAINMENT,
    REQUESTS_IN_TIME,
    THROUGHPUT,
    PAIRS,
    ReportFigure("finetune.trained_tokens_per_s", "trained tokens/s"),
    LEARNING,
    CLPD,
    WIN_RATE,
)


@dataclass(frozen=True, slots=True)
class Middle:
    """Median and range over seeds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Middle | None:
        """Summarise the known values; None if no run has one."""
        known = [value for value in values if value is not None]
        return cls(statistics.median(known), min(known), max(known)) if known else None


@dataclass(frozen=True, slots=True)
class Done:
    """A run with its report."""

    run: Run
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a comparison's folder; `failed` maps the file of a run to its error."""

    manifest: dict[str, Any]
    done: Sequence[Done]
    failed: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> Runs:
        """Read a comparison's folder. Raises CompareError when it is no such folder, or a file in it is damaged."""
        manifest = read_manifest(folder)
        done, failed = [], {}
        for row in manifest["runs"]:
            path = folder / str(row.get("file", ""))
            if not path.is_file():
                continue
            record = read_object(path)
            if "error" in record:
                failed[path.name] = str(record["error"])
            else:
                done.append(_done(path, record))
        return cls(manifest, done, failed)

    def axis(self, name: str) -> list[Any]:
        """Return all distinct values of a field of Run: policies in the order of the runs, the others sorted."""
        values = list(dict.fromkeys(getattr(done.run, name) for done in self.done))
        return values if name == "policy" else sorted(values)

    def at(self, **fields: Any) -> list[Done]:
        """Return the runs with these values, by seed."""
        chosen = [done for done in self.done if all(getattr(done.run, key) == value for key, value in fields.items())]
        return sorted(chosen, key=lambda done: done.run.seed)

    def middle(self, metric: ReportFigure, **fields: Any) -> Middle | None:
        """Return a figure's median and range over the seeds of one point."""
        return Middle.of([metric.of(done.report) for done in self.at(**fields)])

    def ratio(self, metric: ReportFigure, policy: str, baseline: str, **fields: Any) -> Middle | None:
        """Return a figure's ratio to the baseline's run of the same seed, which ran at about the same time."""
        theirs = {done.run.seed: metric.of(done.report) for done in self.at(policy=baseline, **fields)}
        ratios = []
        for done in self.at(policy=policy, **fields):
            ours, other = metric.of(done.report), theirs.get(done.run.seed)
            if ours is not None and other:
                ratios.append(ours / other)
        return Middle.of(ratios)


def _done(path: Path, record: dict[str, Any]) -> Done:
    """Return the run of a record. Raises CompareError when the record holds none."""
    try:
        run = Run(**record["run"])
    except (KeyError, TypeError):
        run = None
    if run is None or not isinstance(record.get("report"), dict):
        raise CompareError(f'"{path}" does not hold a run and its report: remove it, and the comparison repeats it')
    return Done(run, record["report"])


def summarise(runs: Runs) -> list[dict[str, Any]]:
    """Return a row per request rate, retrain rate and policy: each metric's median and range, and its ratio to
    baselines."""
    points = {(one.run.rate_per_s, one.run.retrain_rate, one.run.load, one.run.policy) for one in runs.done}
    order = runs.axis("policy").index
    rows = []
    for rate, retrain_rate, load, policy in sorted(points, key=lambda at: (*at[:2], at[2] or 0.0, order(at[3]))):
        point = {"rate_per_s": rate, "retrain_rate": retrain_rate, "load": load}
        metrics = {}
        for metric in METRICS:
            values = {"value": runs.middle(metric, policy=policy, **point)}
            values |= {f"to_{base}": runs.ratio(metric, policy, base, **point) for base in BASELINES}
            metrics[metric.path] = {name: middle and asdict(middle) for name, middle in values.items()}
        count = len(runs.at(policy=policy, **point))
        rows.append({**point, "policy": policy, "runs": count, "metrics": metrics})
    return rows
