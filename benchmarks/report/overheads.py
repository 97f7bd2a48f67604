"""Figures from other benchmarks: prefixes and pruning (Figure 8), scheduler overhead (Table 1)."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from benchmarks.report import paper
from benchmarks.report.panels import ComparisonRow, Curve, Figure, Panel, told
from benchmarks.report.setting import Setting
from benchmarks.report.sources import QUEUED, WHOLE
from edged.scheduler.policies.registry import ROWS

_BUDGET = "tokens kept by a head"


def prefix_sharing(setting: Setting) -> Figure | None:
    """Return Figure 8a: requests by the cached share of their prompt; None if no prefix was shared."""
    tenths = [0] * 10
    for done in setting.runs.at(policy="mace"):
        tenths = [a + b for a, b in zip(tenths, done.report["prefix"]["requests_by_tenth"], strict=True)]
    if not sum(tenths[1:]):
        return None
    total = sum(tenths)
    names = [f"{10 * tenth}" for tenth in range(10)]
    row = ComparisonRow("share of a prompt that was there: mean", told(_mean_share(setting), 3), paper.PREFIX_RATIO)
    panel = Panel(
        "prefix sharing ratio",
        "at least so many %",
        "share of requests",
        {"mace": Curve(names, [n / total for n in tenths])},
        "bar",
    )
    return Figure("fig8a", "Figure 8a: prefix sharing ratio", (row,), (panel,), "All of mace's runs together.")


def _mean_share(setting: Setting) -> float | None:
    prefixes = [done.report["prefix"] for done in setting.runs.at(policy="mace")]
    prompt = sum(prefix["prompt_tokens"] for prefix in prefixes)
    return sum(prefix["hit_tokens"] for prefix in prefixes) / prompt if prompt else None


def pruning(measured: dict[str, Any]) -> Figure | None:
    """Return Figure 8b: time between tokens, and quality, against C_total, of python -m benchmarks.pruning.

    Budgets are tokens that a KV head keeps on average; "off" is the unpruned model.
    """
    if not measured:
        return None
    latencies, quality = measured["tbt"], measured["quality"]
    budgets = sorted(int(name) for name in quality if name != WHOLE)
    panels = []
    rows = []
    for batch, found in latencies.items():
        middles = {name: one["ms"] for name, one in found.items()}
        columns = ([middles[str(budget)][key] for budget in budgets] for key in ("median", "low", "high"))
        whole = [middles[WHOLE]["median"]] * len(budgets)
        curves = {"pruned": Curve(budgets, *columns), "not pruned": Curve(budgets, whole)}
        panels.append(Panel(f"time between tokens, {batch} sequences", _BUDGET, "ms", curves))
        each = ", ".join(f"{told(middles[str(budget)]['median'])} ms at {budget}" for budget in budgets)
        rows.append(
            ComparisonRow(f"TBT, {batch} sequences", f"{each}; {told(whole[0])} ms not pruned", paper.PRUNED_TBT)
        )
    for key, label in (("clpd_nats", "CLPD, nats"), ("greedy_agreement", "greedy agreement")):
        pruned = Curve(budgets, [quality[str(budget)][key] for budget in budgets])
        whole = [quality[WHOLE][key]] * len(budgets)
        panels.append(Panel(label, _BUDGET, label, {"pruned": pruned, "not pruned": Curve(budgets, whole)}))
    title = "Figure 8b: time between tokens against C_total"
    note = f"{measured['model']}, contexts of {measured['context_tokens']} tokens, on {measured['device']}."
    return Figure("fig8b", title, tuple(rows), tuple(panels), note)


def scheduler_table(measured: Sequence[dict[str, Any]]) -> Figure | None:
    """Return Table 1, of python -m benchmarks.scheduler --json for each policy; None without any."""
    known = {one["policy"]: one for one in measured}
    rows = []
    for policy, one in known.items():
        latency = paper.SCHEDULER_LATENCY_MS.get(policy)
        decision = f"{decision_ms(one):.4f} ms with {one['tasks']} live tasks"
        rows.append(ComparisonRow(f"decision, {policy}: slowest mix's median", decision, latency))
        queued_ms = queued_decision_ms(one)
        if queued_ms is not None:
            what = f"{queued_ms:.4f} ms with {one['queued']:,} queued besides"
            rows.append(ComparisonRow(f"decision, {policy}: median", what, latency))
        memory = told(memory_mb(one), 2, " MB")
        rows.append(ComparisonRow(f"memory, {policy}", memory, paper.SCHEDULER_MEMORY_MB.get(policy)))
    title, data = "Table 1: scheduler overhead", {"measured": list(known.values())}
    return Figure("table1", title, tuple(rows), note=_TABLE_1, data=data) if rows else None


_TABLE_1 = (
    "The paper's Table 1 has numbers for Ekya, AdaInf and MACE without one of its parts: priorities (PA, our "
    "mace-priority), iteration-level batching (IB, our mace-bin) and cache management (CM: 0.15 ms and 4 MB; no policy "
    "here lacks both prefix sharing and pruning). The whole is told in the text. Other policies have no number there."
)


def scheduler_command(measured: Sequence[dict[str, Any]]) -> str:
    """Return the commands of python -m benchmarks.scheduler; one line per policy unless all were measured."""
    names = list(dict.fromkeys(one["policy"] for one in measured))
    first = measured[0]
    options = {name: first.get(name) for name in ("tasks", "queued", "rounds")}
    given = " ".join(f"--{name} {value}" for name, value in options.items() if value)
    chosen = ["all"] if set(names) == set(ROWS) else names
    return "\n".join(
        f"python -m benchmarks.scheduler --policy {name} {given} --json > scheduler-{name}.json" for name in chosen
    )


def pruning_command(measured: dict[str, Any]) -> str:
    """Return the command that measured the pruning; a file without arguments gives only those that are known."""
    known = {"model": measured["model"], "pairs": "PAIRS", **measured.get("arguments", {})}
    words = ["python", "-m", "benchmarks.pruning", known.pop("model"), known.pop("pairs")]
    words += [text for name, value in known.items() for text in (f"--{name.replace('_', '-')}", f"{value}")]
    return shlex.join([*words, "--output", "pruning.json"])


def decision_ms(measured: dict[str, Any]) -> float:
    """Return the largest median decision time over the mixes of live tasks; `queued_decision_ms` is apart."""
    return max(float(mix["plan_ms_p50"]) for name, mix in measured["mixes"].items() if name != QUEUED)


def queued_decision_ms(measured: dict[str, Any]) -> float | None:
    """Return the median decision time with thousands of queued prompts; None if it was not measured."""
    mix = measured["mixes"].get(QUEUED)
    return float(mix["plan_ms_p50"]) if mix else None


def memory_mb(measured: dict[str, Any]) -> float:
    """Return the scheduler's peak memory, with the queue if that was measured."""
    return max(float(measured["memory_mb"]), float(measured.get("memory_queued_mb") or 0.0))
