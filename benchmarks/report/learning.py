"""Figures of learning: win rate and CLPD over time (Figure 2) and against the retrain rate (Figure 9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.report import paper
from benchmarks.report.panels import ComparisonRow, Curve, Figure, Panel, told
from benchmarks.report.setting import Setting
from edged.lab.bench.summary import CLPD, WIN_RATE, Done, ReportFigure

_STEPS, _WINDOW_SHARE = 60, 0.2
"""Number of points of a curve, and the share of the window before a point over whose pairs it is a mean."""
REWARD_ACCURACY = ReportFigure("alignment.reward_accuracy", "reward accuracy", 3)
PERIODIC = ("ekya", "periodic-async")
CONTINUOUS = ("mace", "sync", "adainf")
UNTRAINED = "no retraining"
NOT_MEASURED = "not measured"

Value = Callable[[dict[str, Any]], float]
"""A metric of a scored pair's row."""
Pair = tuple[float, float]
"""(time of scoring in seconds, metric) of a pair."""


def over_time(setting: Setting) -> Figure | None:
    """Return Figure 2, at the highest retrain rate; None if no run scored pairs (simulations do not)."""
    point = {"rate_per_s": setting.middle_rate, "retrain_rate": setting.retrain_rates[-1]}
    runs = {policy: setting.runs.at(policy=policy, **point) for policy in setting.policies}
    runs = {policy: done for policy, done in runs.items() if any(scored(one.report) for one in done)}
    if not runs:
        return None
    seconds = float(setting.runs.manifest["workload"]["seconds"])
    panels = []
    for title, value, base in (("win rate", win, base_win), ("CLPD, nats", clpd, base_clpd)):
        curves = {
            policy: smooth(pairs(done, scored, value), seconds) for policy, done in runs.items() if policy != "fcfs"
        }
        curves[UNTRAINED] = smooth(untrained(runs, value, base), seconds)
        panels.append(Panel(title, "seconds", title, curves))
    accuracy = {
        policy: smooth(points, seconds)
        for policy, done in runs.items()
        if (points := pairs(done, trained, lambda row: float(row["reward_margin"] > 0)))
    }
    if accuracy:
        panels.append(Panel("reward accuracy, as trained", "seconds", "reward accuracy", accuracy))
    return Figure(
        "fig2",
        "Figure 2: win rate and CLPD over time by strategy",
        _gains(runs),
        tuple(panels),
        "Each pair is judged by the version that was served when it came."
        if all(judged(done) for done in runs.values())
        else "Each pair is judged when its step begins, which hides how late that was: run benchmarks.report.arrivals.",
        {"point": point},
    )


def scored(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pairs scored by the version served at their arrival, if the run has these; else scored before
    training."""
    return report["arrivals"]["series"] if "arrivals" in report else report["series"]


def judged(done: Sequence[Done]) -> bool:
    """Whether all runs scored pairs at their arrival: otherwise policies cannot be compared."""
    return bool(done) and all("arrivals" in one.report for one in done)


def trained(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pairs scored before training, with the base model's CLPD."""
    series: list[dict[str, Any]] = report["series"]
    return series


def pairs(
    done: Sequence[Done],
    rows: Callable[[dict[str, Any]], list[dict[str, Any]]],
    value: Value,
) -> list[Pair]:
    """Return a metric of each pair of several runs, in order of time."""
    return sorted((row["at_s"], value(row)) for one in done for row in rows(one.report))


def smooth(points: Sequence[Pair], seconds: float) -> Curve:
    """Return means over a sliding window; None if no pair is in it."""
    ends = [seconds * step / _STEPS for step in range(1, _STEPS + 1)]
    width = seconds * _WINDOW_SHARE
    windows = [[value for at_s, value in points if end - width < at_s <= end] for end in ends]
    means = [round(sum(values) / len(values), 5) if values else None for values in windows]
    return Curve([round(end, 3) for end in ends], means)


def mean(points: Sequence[Pair]) -> float | None:
    """Return the mean over all pairs."""
    return sum(value for _, value in points) / len(points) if points else None


def untrained(runs: dict[str, list[Done]], value: Value, base: Value) -> list[Pair]:
    """Return the base model's metric: of each pair at its arrival if fcfs ran, else of the pairs that were trained
    on."""
    alone = pairs(runs.get("fcfs", ()), scored, value)
    return alone or pairs([one for done in runs.values() for one in done], trained, base)


def win(row: dict[str, Any]) -> float:
    """Return 1 if the chosen answer was likelier than the rejected one, else 0."""
    return float(row["win"])


def base_win(row: dict[str, Any]) -> float:
    """Return `win` of the base model."""
    return float(row["base_clpd_nats"] > 0.0)


def clpd(row: dict[str, Any]) -> float:
    """Return the contrastive log-probability difference (section 3.1 of the paper)."""
    return float(row["clpd_nats"])


def base_clpd(row: dict[str, Any]) -> float:
    """Return `clpd` of the base model."""
    return float(row["base_clpd_nats"])


def _gains(runs: dict[str, list[Done]]) -> tuple[ComparisonRow, ...]:
    """Return rows with each strategy's mean and the base model's on the same stream of pairs."""
    rows = []
    for title, value, base, periodic, continuous in (
        ("win rate", win, base_win, paper.PERIODIC_WIN_RATE, paper.CONTINUOUS_WIN_RATE),
        ("CLPD", clpd, base_clpd, paper.PERIODIC_CLPD, paper.CONTINUOUS_CLPD),
    ):
        without = mean(untrained(runs, value, base))
        for policy in (*PERIODIC, *CONTINUOUS):
            if policy in runs:
                ours = mean(pairs(runs[policy], scored, value))
                told_gain = against(ours, without) if judged(runs[policy]) else NOT_MEASURED
                rows.append(
                    ComparisonRow(f"{title}, {policy}", told_gain, periodic if policy in PERIODIC else continuous)
                )
    return tuple(rows)


def against(ours: float | None, base: float | None) -> str:
    """Format a gain over a base: as a ratio if the base is positive, with both numbers."""
    if ours is None or base is None:
        return "–"
    ratio = f"{ours / base:.2f}x: " if base > 0.0 else ""
    return f"{ratio}{told(base, 3)} to {told(ours, 3)}"


def against_retrain_rate(setting: Setting) -> Figure | None:
    """Return Figure 9; None if no run scored pairs."""
    metrics = {"win rate": WIN_RATE, "CLPD, nats": CLPD, "reward accuracy, as trained": REWARD_ACCURACY}
    panels = []
    for title, metric in metrics.items():
        found = setting.curves(metric, "retrain_rate").items()
        curves = {policy: curve for policy, curve in found if any(y is not None for y in curve.y)}
        if curves:
            panels.append(Panel(title, "retrain rate", title, curves))
    if not panels:
        return None
    rows = []
    for title, metric, number in (
        ("win rate", WIN_RATE, paper.WIN_RATE_TO_ADAINF),
        ("CLPD", CLPD, paper.CLPD_TO_ADAINF),
    ):
        for rate in setting.retrain_rates:
            ours = setting.median(metric, "mace", retrain_rate=rate)
            theirs = setting.median(metric, "adainf", retrain_rate=rate)
            point = {**setting.headline, "retrain_rate": rate}
            runs = [done for policy in ("mace", "adainf") for done in setting.runs.at(policy=policy, **point)]
            gain = against(ours, theirs) if judged(runs) else NOT_MEASURED
            rows.append(ComparisonRow(f"{title} at {rate:.0%}, adainf to mace", gain, number))
    return Figure("fig9", "Figure 9: accuracy against retrain rate", tuple(rows), tuple(panels))
