"""Figures of what other benchmarks measured: prefixes and pruning (Figure 8), scheduler overhead (Table 1).

Owns the reading of those benchmarks' JSON. What is absent, or another benchmark's, is left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edged.bench.compare import CompareError
from edged.bench.report import paper
from edged.bench.report.panels import Curve, Figure, Panel, Row, told
from edged.bench.report.setting import Setting


def read_json(path: Path) -> dict[str, Any]:
    """Raises CompareError when it is no JSON object."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CompareError(f'"{path}" cannot be read: {error}') from None
    if not isinstance(value, dict):
        raise CompareError(f'"{path}" holds no JSON object: give what a benchmark wrote')
    return value


def prefix_sharing(setting: Setting) -> Figure | None:
    """Figure 8a: requests by the share of their prompt that another had computed; None where nothing was shared."""
    tenths = [0] * 10
    for done in setting.runs.at(policy="mace"):
        tenths = [a + b for a, b in zip(tenths, done.report["prefix"]["requests_by_tenth"], strict=True)]
    if not sum(tenths[1:]):
        return None
    total = sum(tenths)
    names = [f"{10 * tenth}" for tenth in range(10)]
    row = Row("share of a prompt that was there: mean", told(_mean_share(setting), 3), paper.PREFIX_RATIO)
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
    """Figure 8b: time between tokens against C_total, of tools/bench_pruning.py; None where it has no such rows.

    Its rows have "c_total_tokens" (None: not pruned) and "tbt_ms", and maybe "clpd_nats".
    """
    rows = [row for row in measured.get("rows", ()) if "c_total_tokens" in row and "tbt_ms" in row]
    pruned = sorted((row for row in rows if row["c_total_tokens"]), key=lambda row: row["c_total_tokens"])
    if not pruned:
        return None
    x = [row["c_total_tokens"] for row in pruned]
    tbt = {"pruned": Curve(x, [row["tbt_ms"] for row in pruned])}
    whole = next((row for row in rows if not row["c_total_tokens"]), None)
    if whole is not None:
        tbt["not pruned"] = Curve(x, [whole["tbt_ms"]] * len(x))
    panels = [Panel("time between tokens", "C_total, tokens", "ms", tbt)]
    if all("clpd_nats" in row for row in pruned):
        clpd = {"pruned": Curve(x, [row["clpd_nats"] for row in pruned])}
        panels.append(Panel("CLPD", "C_total, tokens", "nats", clpd))
    text = ", ".join(f"{row['tbt_ms']:.2f} ms at {row['c_total_tokens']}" for row in pruned)
    base = f"; {whole['tbt_ms']:.2f} ms not pruned" if whole is not None else ""
    return Figure(
        "fig8b",
        "Figure 8b: time between tokens against C_total",
        (Row("TBT", text + base, paper.PRUNED_TBT),),
        tuple(panels),
    )


def scheduler_table(measured: Sequence[dict[str, Any]]) -> Figure | None:
    """Table 1, of tools/bench_scheduler.py --json for each policy; None without any."""
    known = {one["policy"]: one for one in measured if "mixes" in one and "policy" in one}
    rows = []
    for policy, one in known.items():
        name = policy if policy in paper.SCHEDULER_LATENCY_MS else "mace"
        decision = f"{decision_ms(one):.4f} ms with {one['tasks']} live tasks"
        rows.append(Row(f"decision, {policy}: slowest mix's median", decision, paper.SCHEDULER_LATENCY_MS[name]))
        memory = told(one["memory_mb"], 2, " MB")
        rows.append(Row(f"memory, {policy}", memory, paper.SCHEDULER_MEMORY_MB[name]))
    title = "Table 1: scheduler overhead"
    return Figure("table1", title, tuple(rows), data={"measured": list(known.values())}) if rows else None


def decision_ms(measured: dict[str, Any]) -> float:
    """The median decision of the mix in which it takes longest."""
    return max(float(mix["plan_ms_p50"]) for mix in measured["mixes"].values())
