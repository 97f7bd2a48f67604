"""Dashboard, alert rules and documentation speak of the metrics that there are, and of all of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from edged.observe.catalogue import CATALOGUE
from tests.tree.documents import metrics_table

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "configs" / "grafana" / "edged.json").read_text())
RULES_FILE = ROOT / "configs" / "prometheus" / "alerts.yml"
RULES = [rule for group in yaml.safe_load(RULES_FILE.read_text())["groups"] for rule in group["rules"]]
DOCUMENT = (ROOT / "docs" / "metrics.md").read_text()
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")

SERIES = {
    name
    for metric in CATALOGUE
    for name in (
        [f"{metric.name}_{part}" for part in ("bucket", "count", "sum")]
        if metric.kind == "histogram"
        else [metric.name]
    )
}


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\bedged_\w+", expression))


def expressions() -> list[tuple[str, str]]:
    """(panel or place, PromQL) of the whole dashboard."""
    found = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    found += [(item["name"], item["expr"]) for item in DASHBOARD["annotations"]["list"]]
    return found + [
        (item["name"], item["definition"]) for item in DASHBOARD["templating"]["list"] if "definition" in item
    ]


def test_the_dashboard_and_the_rules_ask_only_for_what_is_exposed() -> None:
    asked = [*expressions(), *((rule["alert"], rule["expr"]) for rule in RULES)]
    for where, expression in asked:
        names = metrics_in(expression)
        assert names <= SERIES, f"{where}: {sorted(names - SERIES)}"
        assert names or expression.startswith("up{"), where


def test_the_dashboard_shows_every_metric() -> None:
    shown = {name for _, expression in expressions() for name in metrics_in(expression)}
    for metric in CATALOGUE:
        assert any(name == metric.name or name.startswith(f"{metric.name}_") for name in shown), metric.name


def test_the_labels_that_expressions_select_exist() -> None:
    labels = {metric.name: set(metric.labels) for metric in CATALOGUE}
    asked = [*expressions(), *((rule["alert"], rule["expr"]) for rule in RULES)]
    for where, expression in asked:
        for name, selector in re.findall(r"\b(edged_\w+)\{([^}]*)\}", expression):
            base = name if name in labels else re.sub(r"_(bucket|count|sum)$", "", name)
            used = set(re.findall(r"(\w+)\s*[=!]~?", selector))
            assert used <= labels[base] | {"instance", "job", "le"}, f"{where}: {name}{{{selector}}}"


def test_panels_have_titles_descriptions_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"]
        assert panel["type"] == "row" or panel["description"]
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


def test_the_documentation_lists_every_metric() -> None:
    assert metrics_table() in DOCUMENT, "write it anew: python -m tests.tree.documents"


def test_the_documentation_says_what_to_do_about_every_alert() -> None:
    part = DOCUMENT.partition("\n## Alerts\n")[2]
    assert re.findall(r"^### (\w+)$", part, re.MULTILINE) == [rule["alert"] for rule in RULES]


def run(*command: str, folder: Path) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    run("promtool", "check", "rules", str(RULES_FILE), folder=ROOT)


@needs_promtool
def test_promtool_accepts_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    rules = []
    for index, (_, expression) in enumerate(expressions()):
        if not expression.startswith("label_values("):
            plain = expression.replace("$__rate_interval", "5m").replace("$instance", ".*")
            rules.append({"record": f"panel:{index}", "expr": plain})
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    run("promtool", "check", "rules", "rules.yml", folder=tmp_path)


HEALTHY = {
    'up{job="edged"}': "1x120",
    "edged_ready": "1x120",
    "edged_degraded": "0x120",
    "edged_queue_limit_requests": "1024x120",
    'edged_queue_requests{stage="waiting"}': "3x120",
    'edged_iteration_seconds_count{mix="serving"}': "0+600x120",
    'edged_requests_total{outcome="stop"}': "0+100x120",
    'edged_requests_total{outcome="error"}': "0x120",
    'edged_requests_total{outcome="refused"}': "0x120",
    'edged_tokens_total{kind="output"}': "0+600x120",
    **{
        f'edged_slo_tokens_total{{target="{target}", class="interactive", result="{result}"}}': f"0+{rate}x120"
        for target in ("ttft", "tbt")
        for result, rate in (("met", 98), ("missed", 2))
    },
    'edged_prediction_error_ratio{kind="all"}': "0.1x120",
    "edged_device_drift_ratio": "1.02x120",
    'edged_pages{state="used"}': "700x120",
    'edged_pages{state="cached"}': "200x120",
    'edged_pages{state="free"}': "100x120",
    'edged_pages{state="retired"}': "0x120",
    "edged_preemptions_total": "0x120",
    "edged_temperature_celsius": "60x120",
    "edged_pairs_pending": "8x120",
    "edged_finetune_enabled": "1x120",
    "edged_optimizer_steps_total": "0+2x120",
    "edged_quarantine_alarms": "0x120",
    "edged_memory_governor_step": "1x120",
    "edged_power_governor_share_ratio": "0.5x120",
    'edged_rollbacks_total{cause="guard"}': "0x120",
    'edged_rollbacks_total{cause="operator"}': "0+1x120",
    "edged_steps_skipped_total": "0x120",
    "edged_store_errors_total": "0x120",
    'edged_disk_bytes{state="free"}': "5e10x120",
    'edged_disk_bytes{state="used"}': "5e10x120",
    'edged_memory_bytes{state="available"}': "4e9x120",
    'edged_memory_bytes{state="used"}': "4e9x120",
    'edged_records_lost_total{record="token"}': "0x120",
}
"""A box on which nothing is wrong, one value a minute for two hours."""

FIRST_TOKENS = 'edged_slo_tokens_total{target="ttft", class="interactive", result="missed"}'
LATER_TOKENS = 'edged_slo_tokens_total{target="tbt", class="interactive", result="missed"}'
HELD = {"edged_finetune_enabled": "0x120", "edged_optimizer_steps_total": "40x120"}
AILMENTS: list[tuple[str, dict[str, str]]] = [
    ("EdgedDown", {'up{job="edged"}': "0x120"}),
    ("EdgedNotReady", {"edged_ready": "0x120"}),
    ("EdgedStuck", {'edged_iteration_seconds_count{mix="serving"}': "600x120"}),
    ("EdgedFirstTokensLate", {FIRST_TOKENS: "0+20x120"}),
    ("EdgedTokensLate", {LATER_TOKENS: "0+20x120"}),
    ("EdgedQueueFull", {'edged_requests_total{outcome="refused"}': "0+10x120"}),
    ("EdgedQueueFull", {'edged_queue_requests{stage="waiting"}': "1000x120"}),
    ("EdgedRequestsFail", {'edged_requests_total{outcome="error"}': "0+2x120"}),
    ("EdgedPredictionsOff", {'edged_prediction_error_ratio{kind="all"}': "0.7x120"}),
    ("EdgedDeviceSlow", {"edged_device_drift_ratio": "1.8x120"}),
    (
        "EdgedPagesExhausted",
        {
            'edged_pages{state="cached"}': "0x120",
            'edged_pages{state="free"}': "10x120",
            "edged_preemptions_total": "0+1x120",
        },
    ),
    ("EdgedDegraded", {"edged_degraded": "0x100 2x20"}),
    ("EdgedHot", {"edged_temperature_celsius": "93x120"}),
    ("EdgedHot", {"edged_temperature_celsius": "82x120", "edged_temperature_limit_celsius": "85x120"}),
    ("EdgedFinetuneStarved", {"edged_optimizer_steps_total": "40x120"}),
    ("EdgedFinetuneHeld", {**HELD, "edged_memory_governor_step": " ".join(["3 2x48"] * 33)}),
    ("EdgedFinetuneHeld", {**HELD, "edged_power_governor_share_ratio": "0x120"}),
    ("EdgedFeedbackQuarantined", {"edged_quarantine_alarms": "0x110 1x10"}),
    ("EdgedLanguageStrays", {'edged_adapter_kl_nats{adapter="ann"}': "0.8x120"}),
    ("EdgedLanguageStrays", {'edged_adapter_neutral_nll_change_ratio{adapter="ann"}': "0.07x120"}),
    ("EdgedAdapterRolledBack", {'edged_rollbacks_total{cause="guard"}': "0x110 1x10"}),
    ("EdgedStepsSkipped", {"edged_steps_skipped_total": "0+1x120"}),
    ("EdgedDatabaseErrors", {"edged_store_errors_total": "0x110 1x10"}),
    ("EdgedDiskNearlyFull", {'edged_disk_bytes{state="free"}': "5e8x120"}),
    ("EdgedDiskNearlyFull", {'edged_disk_bytes{state="used"}': "5e12x120"}),
    ("EdgedMemoryShort", {'edged_memory_bytes{state="available"}': "1e8x120"}),
    ("EdgedRecordsLost", {'edged_records_lost_total{record="token"}': "0x110 9x10"}),
]
LONG = {"EdgedFinetuneHeld": 1600}
"""Alerts that take longer than two hours, in minutes."""
HARMLESS = [
    {},
    # Nothing to do is no fault.
    {
        'edged_queue_requests{stage="waiting"}': "0x120",
        'edged_iteration_seconds_count{mix="serving"}': "600x120",
        'edged_tokens_total{kind="output"}': "5x120",
        'edged_prediction_error_ratio{kind="all"}': "0.7x120",
        "edged_pairs_pending": "0x120",
        "edged_optimizer_steps_total": "40x120",
    },
    # What passes by itself.
    {"edged_degraded": "0x60 1x8 0x52"},
    # Full of cached prefixes is what a cache is for.
    {'edged_pages{state="cached"}': "890x120", 'edged_pages{state="used"}': "100x120"},
    # Few pages are free of all that there are, but most of those that the box has left to edged.
    {
        'edged_pages{state="used"}': "30x120",
        'edged_pages{state="cached"}': "0x120",
        'edged_pages{state="free"}': "40x120",
        'edged_pages{state="retired"}': "930x120",
        "edged_preemptions_total": "0+1x120",
    },
    {"edged_temperature_celsius": "93x120", "edged_temperature_limit_celsius": "105x120"},
    {**HELD, "edged_memory_governor_step": "4x120"},
]  # fmt: skip


def alert_test(changes: dict[str, str], *firing: str) -> dict[str, Any]:
    """promtool's test that after two hours, or as long as an alert takes, just these alerts fire."""
    minutes = max((LONG.get(name, 120) for name in firing), default=120)
    series = {name: values.replace("x120", f"x{minutes}") for name, values in {**HEALTHY, **changes}.items()}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minutes - 1}m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing],
            }
        ],
    }


@pytest.mark.slow
@needs_promtool
def test_each_alert_fires_for_its_ailment_alone_and_none_for_a_healthy_box(tmp_path: Path) -> None:
    assert {name for name, _ in AILMENTS} == {rule["alert"] for rule in RULES}
    tests = [alert_test(changes, name) for name, changes in AILMENTS] + [alert_test(item) for item in HARMLESS]
    shutil.copy(RULES_FILE, tmp_path / "alerts.yml")
    document = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "test.yml").write_text(json.dumps(document))
    run("promtool", "test", "rules", "test.yml", folder=tmp_path)
