"""Figures of serving: utilisation and latencies (5, 11), throughput (10), ablations (12), iterations (13)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.report import paper
from benchmarks.report.panels import ComparisonRow, Curve, Figure, Panel, told
from benchmarks.report.setting import Setting
from edged.lab.bench.summary import ATTAINMENT, CLPD, MEAN_TBT, PAIRS, THROUGHPUT, ReportFigure

ABLATIONS = ("mace", "mace-bin", "mace-prefix", "mace-prune", "mace-priority")
STRATEGIES = {
    "ekya": paper.PERIODIC_BUSY,
    "periodic-async": paper.PERIODIC_BUSY,
    "adainf": paper.CONTINUOUS_BUSY,
    "sync": paper.CONTINUOUS_BUSY,
    "mace": paper.HYBRID_BUSY,
}
"""The paper's busy share of the strategy that each policy follows: periodic, continuous or hybrid."""
MEAN_TTFT = ReportFigure("ttft_ms.mean", "TTFT mean ms")
MEAN_LEARNING = ReportFigure("finetune.latency_ms.mean", "learned after mean ms", 0)
_LATENCIES = (("TTFT", MEAN_TTFT, "ms"), ("TBT", MEAN_TBT, "ms"), ("fine-tuning", MEAN_LEARNING, "ms"))
_PARTS = ("prefill", "decode", "finetune")


def utilisation(setting: Setting) -> Figure:
    """Return Figure 5: the busy share over time, by kind of work, and the latencies."""
    busy = {policy: _by_second(setting, policy, "busy_share") for policy in setting.policies}
    parts = {p: Curve(_PARTS, [_share(setting, p, f"{part}_share") for part in _PARTS]) for p in setting.policies}
    rows = []
    for policy, number in STRATEGIES.items():
        if policy in setting.policies:
            busy_text, finetune_text = (_percent(setting, policy, share) for share in ("busy_share", "finetune_share"))
            rows.append(ComparisonRow(f"busy (fine-tuning), {policy}", f"{busy_text} ({finetune_text})", number))
    for base in ("ekya", "periodic-async"):
        if base in setting.policies:
            for (name, metric, _), number in zip(
                _LATENCIES, (paper.BREAKDOWN_TTFT, paper.BREAKDOWN_TBT, paper.BREAKDOWN_FINETUNE), strict=True
            ):
                rows.append(ComparisonRow(f"{name}, mace to {base}", _ratio(setting, metric, base), number))
    return Figure(
        "fig5",
        "Figure 5: utilisation over time and latency breakdown",
        tuple(rows),
        (
            Panel("busy share of each second", "seconds", "share", busy),
            Panel("what for", "", "share", parts, "bar"),
            *_latency_panels(setting),
        ),
        f"At {setting.point()}. Busy is the time of forwards and fine-tune units; "
        "a packed forward's time is divided by the cost model's prices.",
    )


def breakdown(setting: Setting) -> Figure:
    """Return Figure 11: latency of prefill, decode and fine-tuning by policy."""
    rows = [
        ComparisonRow("TTFT, mace to adainf", _ratio(setting, MEAN_TTFT, "adainf"), paper.TTFT_BELOW_ADAINF),
        ComparisonRow("TBT, mace to adainf", _ratio(setting, MEAN_TBT, "adainf"), paper.TBT_BELOW_ADAINF),
    ]
    return Figure(
        "fig11",
        "Figure 11: latency breakdown",
        tuple(rows),
        _latency_panels(setting),
        f"At {setting.point()}, means. Fine-tuning is the time from a pair's submission to a version that learned it.",
    )


def throughput(setting: Setting) -> Figure:
    """Return Figure 10: output tokens per second against the retrain rate, and against the load."""
    by_retrain, by_load = (setting.curves(THROUGHPUT, axis) for axis in ("retrain_rate", "rate_per_s"))
    orin = "orin" in (setting.simulated or "")
    number = paper.THROUGHPUT_TO_ADAINF_ORIN if orin else paper.THROUGHPUT_TO_ADAINF
    rows = [
        ComparisonRow(
            f"mace to adainf, {setting.point(rate)}", _ratio(setting, THROUGHPUT, "adainf", rate_per_s=rate), number
        )
        for rate in setting.rates
    ]
    rates = ", ".join(f"{rate:.0%}" for rate in setting.retrain_rates)
    for rate in setting.rates:
        mean = setting.mean_ratio(THROUGHPUT, "mace", "adainf", rate)
        if mean is not None:
            what = f"mace to adainf, {setting.load(rate)}, mean over retrain rates of {rates}"
            rows.append(ComparisonRow(what, f"{mean:.2f}x", number if orin else None))
    return Figure(
        "fig10",
        "Figure 10: inference throughput",
        tuple(rows),
        (
            Panel(f"at {setting.load(setting.middle_rate)}", "retrain rate", "output tokens/s", by_retrain),
            Panel(f"at {setting.headline_retrain_rate:.0%} retrain rate", "requests/s", "output tokens/s", by_load),
        ),
        "A policy cannot put out more than is asked for: below saturation all curves are one.",
    )


def ablations(setting: Setting) -> Figure | None:
    """Return Figure 12: SLO attainment against the load, CLPD, throughput and pairs learned of MACE without one part.

    None if no such policy ran.
    """
    variants = [policy for policy in ABLATIONS if policy in setting.policies]
    if len(variants) < 2:
        return None
    highest = setting.rates[-1]
    attained = setting.curves(ATTAINMENT, "rate_per_s", variants)
    panels = [Panel("SLO attainment", "requests/s", "share of first tokens in time", attained)]
    for metric, label in ((CLPD, "CLPD, nats"), (THROUGHPUT, "output tokens/s"), (PAIRS, "pairs learned")):
        values = {p: setting.median(metric, p, rate_per_s=highest) for p in variants}
        if any(value is not None for value in values.values()):
            bars = {policy: Curve([""], [value]) for policy, value in values.items()}
            panels.append(Panel(f"{label} at {setting.load(highest)}", "", label, bars, "bar"))
    return Figure("fig12", "Figure 12: MACE without one of its parts", _ablation_rows(setting, variants), tuple(panels))


def _ablation_rows(setting: Setting, variants: Sequence[str]) -> tuple[ComparisonRow, ...]:
    """Return rows with the effect of leaving out each part at the highest load."""
    highest = setting.rates[-1]
    rows = []
    for policy, name, metric, digits, number in (
        ("mace-bin", "attainment", ATTAINMENT, 3, paper.BIN_ATTAINMENT),
        ("mace-prefix", "attainment", ATTAINMENT, 3, paper.PREFIX_ATTAINMENT),
        ("mace-bin", "CLPD", CLPD, 2, paper.BIN_CLPD),
        ("mace-bin", "throughput", THROUGHPUT, 2, paper.BIN_THROUGHPUT),
        ("mace-bin", "pairs learned", PAIRS, 1, None),
        ("mace-prefix", "CLPD", CLPD, 2, paper.PREFIX_CLPD),
        ("mace-prefix", "throughput", THROUGHPUT, 2, paper.PREFIX_THROUGHPUT),
        ("mace-prefix", "pairs learned", PAIRS, 1, None),
        ("mace-prune", "CLPD", CLPD, 2, paper.PRUNE_CLPD),
        ("mace-prune", "throughput", THROUGHPUT, 2, paper.PRUNE_THROUGHPUT),
        ("mace-prune", "pairs learned", PAIRS, 1, None),
        ("mace-priority", "pairs learned", PAIRS, 1, paper.PRIORITY_PAIRS),
    ):
        if policy in variants:
            ours, whole = (setting.median(metric, variant, rate_per_s=highest) for variant in (policy, "mace"))
            rows.append(
                ComparisonRow(f"{name}, {policy} (mace)", f"{told(ours, digits)} ({told(whole, digits)})", number)
            )
    return tuple(rows)


def iterations(setting: Setting) -> Figure:
    """Return Figure 13: how many iterations the window took, and how long each was."""
    count = ReportFigure("iterations.count", "iterations", 0)
    latency = ReportFigure("iterations.mean_ms", "iteration ms", 2)
    kinds = ("serving", "finetune", "hybrid")
    by_mix = {kind: ReportFigure(f"iterations.by_mix.{kind}.mean_ms", kind, 2) for kind in kinds}
    by_policy = {policy: setting.bars(by_mix, policy) for policy in setting.policies}
    rows = [
        ComparisonRow(
            f"{policy}: iterations, mean latency",
            f"{told(setting.median(count, policy), 0)}, {told(setting.median(latency, policy), 2, ' ms')}",
            paper.ITERATIONS,
        )
        for policy in setting.policies
    ]
    return Figure(
        "fig13",
        "Figure 13: iterations and latency of each",
        tuple(rows),
        (
            Panel("iterations in the window", "retrain rate", "iterations", setting.curves(count, "retrain_rate")),
            Panel("mean latency", "retrain rate", "ms", setting.curves(latency, "retrain_rate")),
            Panel("mean latency by what is in it", "", "ms", by_policy, "bar"),
        ),
        f"By kind at {setting.point()}. Policies that answer more requests in the window need more iterations.",
    )


def _latency_panels(setting: Setting) -> tuple[Panel, ...]:
    """Return one panel for each latency, since they differ by orders of magnitude."""
    return tuple(
        Panel(name, "", unit, {policy: setting.bars({"": metric}, policy) for policy in setting.policies}, "bar")
        for name, metric, unit in _LATENCIES
    )


def _ratio(setting: Setting, metric: ReportFigure, baseline: str, **fields: Any) -> str:
    """Format mace's ratio to a baseline, with its range over seeds."""
    ratio = setting.runs.ratio(metric, "mace", baseline, **{**setting.headline, **fields})
    return "–" if ratio is None else f"{ratio.median:.2f}x ({ratio.low:.2f}–{ratio.high:.2f})"


def _by_second(setting: Setting, policy: str, share: str) -> Curve:
    """Return the mean over seeds of each second's share."""
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    for done in setting.at_headline(policy):
        for row in done.report["timeline"]:
            seconds[round(row["at_s"])].append(row[share])
    ends = sorted(seconds)
    return Curve(ends, [round(sum(seconds[end]) / len(seconds[end]), 4) for end in ends])


def _percent(setting: Setting, policy: str, share: str) -> str:
    value = _share(setting, policy, share)
    return "–" if value is None else f"{100 * value:.1f} %"


def _share(setting: Setting, policy: str, share: str) -> float | None:
    """Return the mean over all seconds and seeds."""
    values = [row[share] for done in setting.at_headline(policy) for row in done.report["timeline"]]
    return sum(values) / len(values) if values else None
