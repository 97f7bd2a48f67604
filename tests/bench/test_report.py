"""The report is drawn from the runs alone, and says of each claim whether they bear it out."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edged.bench.compare import Run
from edged.bench.report import paper
from edged.bench.report.canvas import Canvas
from edged.bench.report.claims import Claim, claims, scheduler_claims
from edged.bench.report.learning import smooth
from edged.bench.report.overheads import prefix_sharing, pruning
from edged.bench.report.panels import Curve, Figure, Panel
from edged.bench.report.serving import ablations, throughput
from edged.bench.report.setting import Setting
from edged.bench.summary import Done, Runs
from edged.cli.main import cli

LARGEST_DRAWING_BYTES = 100_000
MIX = {"plan_ms_p50": 0.05, "plan_ms_p95": 0.1, "complete_ms_p50": 0.05}


def done(policy: str, rate: float = 2.0, seed: int = 0, retrain_rate: float = 0.1, **figures: Any) -> Done:
    """A run that reports no more than these figures."""
    report = {
        "ttft_ms": {"p50": figures.get("ttft")},
        "tbt_ms": {"p50": figures.get("tbt")},
        "slo": {"ttft_within_factor_share": figures.get("attained")},
        "throughput": {"output_tokens_per_s": figures.get("tokens")},
        "alignment": {"clpd_nats": figures.get("clpd")},
        "series": figures.get("series", []),
        "prefix": figures.get("prefix", {}),
    }
    return Done(Run(policy, retrain_rate, rate, None, seed), report)


def setting(*runs: Done, device: str | None = None) -> Setting:
    return Setting("here", Runs({"workload": {"device": device, "seconds": 60.0}}, runs, {}))


def claim(found: list[Claim], start: str) -> Claim:
    (one,) = [claim for claim in found if claim.what.startswith(start)]
    return one


def test_the_command_draws_every_figure_of_real_runs(compared: Path, tmp_path: Path) -> None:
    scheduler = tmp_path / "scheduler.json"
    scheduler.write_text(json.dumps({"policy": "mace", "tasks": 64, "memory_mb": 0.04, "mixes": {"mixed": MIX}}))
    output = tmp_path / "report"
    arguments = ["bench", "report", str(compared), "--output", str(output), "--scheduler", str(scheduler)]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    page = (output / "README.md").read_text()
    assert "## tiny: measured" in page
    for key in ("fig2", "fig5", "fig9", "fig10", "fig11", "fig13"):
        drawing = output / f"{key}-tiny.svg"
        assert f"]({drawing.name})" in page
        assert drawing.stat().st_size < LARGEST_DRAWING_BYTES
        ElementTree.parse(drawing)
        assert json.loads((output / f"{key}-tiny.json").read_text())["panels"]
    assert "edged bench compare tiny --trace" in page
    assert str(paper.HYBRID_BUSY) in page
    assert "| TBT p50 of serving alone (fcfs) | at most 1.05x |" in page
    assert "0.0500 ms with 64 live tasks" in page
    figure = json.loads((output / "fig2-tiny.json").read_text())
    assert set(figure["panels"][1]["curves"]) == {"mace", "no retraining"}
    report = json.loads((compared / "mace_retrain1_rate3_seed0.json").read_text())["report"]
    values = [row["clpd_nats"] for row in report["arrivals"]["series"]]
    drawn = [value for value in figure["panels"][1]["curves"]["mace"]["y"] if value is not None]
    assert min(values) - 1e-4 <= min(drawn) <= max(drawn) <= max(values) + 1e-4

    before = (output / "fig2-tiny.svg").read_bytes()
    assert CliRunner().invoke(cli, arguments).exit_code == 0
    assert (output / "fig2-tiny.svg").read_bytes() == before, "the same runs give the same file"


def test_ten_policies_over_a_long_window_stay_small_enough_for_git(tmp_path: Path) -> None:
    x = [float(second) for second in range(120)]
    curves = {f"policy-{n}": Curve(x, [(n * s * 0.123) % 1.0 for s in x]) for n in range(10)}
    bars = {name: Curve(["a", "b", "c"], [0.1, 0.2, 0.3], [0.0, 0.1, 0.2], [0.2, 0.3, 0.4]) for name in curves}
    panels = (Panel("a", "x", "y", curves), *[Panel("b", "x", "y", bars, "bar")] * 4)
    drawing = Canvas(tmp_path).draw(Figure("fig", "Figure", (), panels), "fig")
    assert drawing.stat().st_size < LARGEST_DRAWING_BYTES


def test_without_matplotlib_the_error_tells_what_to_install(compared: Path, tmp_path: Path) -> None:
    program = "import sys; sys.modules['matplotlib'] = None; from edged.cli.main import main; main()"
    command = [sys.executable, "-c", program, "bench", "report", str(compared), "--output", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "pip install 'edged[report]'" in ended.stderr


@pytest.mark.parametrize("content", [None, "[]", "{"])
def test_what_is_no_comparison_is_refused_with_its_name(tmp_path: Path, compared: Path, content: str | None) -> None:
    arguments = ["bench", "report", "--output", str(tmp_path / "report")]
    if content is None:
        arguments += [str(tmp_path)]
    else:
        (tmp_path / "scheduler.json").write_text(content)
        arguments += [str(compared), "--scheduler", str(tmp_path / "scheduler.json")]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1
    assert str(tmp_path) in result.stderr


def test_a_claim_is_met_where_all_loads_bear_it_out_and_else_where_it_is_met() -> None:
    runs = [done("adainf", rate, ttft=100.0) for rate in (1.0, 2.0)]
    assert claim(claims(setting(*runs)), "TTFT p50 of AdaInf's").verdict == "not measured"
    for low, high, verdict in (
        (30.0, 37.0, "met"),
        (30.0, 38.0, "met only at 1.00 requests/s"),
        (38.0, 90.0, "not met"),
    ):
        ours = [done("mace", 1.0, ttft=low), done("mace", 2.0, ttft=high)]
        found = claim(claims(setting(*runs, *ours)), "TTFT p50 of AdaInf's")
        assert found.verdict == verdict
        assert found.ours.startswith(f"{low / 100:.2f}x at 1.00 requests/s; ")


def test_throughput_is_held_against_the_papers_number_for_the_device() -> None:
    runs = [done("adainf", tokens=100.0), done("mace", tokens=120.0)]
    assert claim(claims(setting(*runs)), "throughput of AdaInf's").verdict == "not met"
    assert claim(claims(setting(*runs, device="agx-orin-32gb")), "throughput of AdaInf's").verdict == "met"
    assert "1.12x" in str(throughput(setting(*runs, device="agx-orin-32gb")).rows[0].paper)


def test_attainment_counts_only_where_both_baselines_have_fallen() -> None:
    def found(adainf: float, mace: float) -> str:
        runs = [done("ekya", attained=0.1), done("adainf", attained=adainf), done("mace", attained=mace)]
        return claim(claims(setting(*runs)), "SLO attainment").verdict

    assert found(adainf=0.5, mace=0.96) == "met"
    assert found(adainf=0.5, mace=0.94) == "not met"
    assert found(adainf=0.6, mace=0.96) == "not shown: at no load both baselines fell so low"


def test_ablations_are_judged_at_the_highest_load() -> None:
    runs = [done("mace", rate, attained=1.0, tokens=100.0, clpd=2.0) for rate in (1.0, 2.0)]
    runs += [done("mace-bin", 1.0, attained=1.0, tokens=100.0, clpd=2.0)]
    runs += [done("mace-bin", 2.0, attained=0.1, tokens=80.0, clpd=1.0)]
    runs += [done("mace-prune", 2.0, tokens=95.0, clpd=2.5)]
    found = claims(setting(*runs))
    assert claim(found, "attainment as mace-bin").verdict == "met"
    assert claim(found, "throughput lost as mace-bin").verdict == "met"
    assert claim(found, "throughput lost as mace-prune").verdict == "not met"
    assert claim(found, "CLPD, mace-bin to mace") == Claim(
        "CLPD, mace-bin to mace", str(paper.BIN_CLPD), "2.00x: 1.000 to 2.000", "met"
    )
    assert claim(found, "CLPD, mace-prune to mace").verdict == "met"
    assert claim(found, "attainment lost as mace-prefix").verdict == "not measured"
    figure = ablations(setting(*runs))
    assert figure is not None
    assert not any("mace-prefix" in row.what for row in figure.rows)
    assert ablations(setting(done("mace", attained=1.0))) is None


def test_strategies_are_ordered_by_what_they_think_of_the_pairs() -> None:
    def series(clpd: float) -> list[dict[str, Any]]:
        return [{"at_s": 1.0, "win": True, "clpd_nats": clpd, "reward_margin": 1.0, "base_clpd_nats": 1.0}]

    for ekya, mace, verdict in ((2.0, 3.0, "met"), (3.0, 2.0, "not met"), (0.5, 3.0, "not met")):
        runs = [done("ekya", series=series(ekya)), done("mace", series=series(mace))]
        assert claim(claims(setting(*runs)), "CLPD over time").verdict == verdict
    assert claim(claims(setting(done("mace", series=series(3.0)))), "CLPD over time").verdict == "not measured"


def test_the_schedulers_overhead_is_that_of_its_slowest_mix() -> None:
    slow = {**MIX, "plan_ms_p50": 0.2}
    measured = {"policy": "mace", "tasks": 64, "memory_mb": 6.0, "mixes": {"a": MIX, "b": slow}}
    assert [found.verdict for found in scheduler_claims([measured])] == ["not met", "not met"]
    fast = {**measured, "memory_mb": 4.0, "mixes": {"a": MIX}}
    assert [found.verdict for found in scheduler_claims([fast, {"policy": "ekya"}])] == ["met", "met"]


def test_curves_over_time_are_means_over_the_window_before_each_point() -> None:
    curve = smooth([(1.0, 0.0), (2.0, 1.0), (59.0, 5.0)], seconds=60.0)
    assert (curve.x[0], curve.x[-1]) == (1.0, 60.0)
    assert curve.y[:2] == [0.0, 0.5]
    assert curve.y[30] is None
    assert curve.y[-1] == 5.0


def test_prefixes_and_pruning_are_drawn_where_there_are_some() -> None:
    prefix = {"requests_by_tenth": [6, 0, 0, 0, 0, 2, 0, 0, 0, 0], "prompt_tokens": 100, "hit_tokens": 25}
    figure = prefix_sharing(setting(done("mace", prefix=prefix)))
    assert figure is not None
    assert figure.panels[0].curves["mace"].y[5] == 0.25
    assert figure.rows[0].ours == "0.250"
    none = {**prefix, "requests_by_tenth": [8] + [0] * 9}
    assert prefix_sharing(setting(done("mace", prefix=none))) is None

    def budget(ms: float) -> dict[str, Any]:
        return {"ms": {"median": ms, "low": ms, "high": ms, "rounds": 2}, "pages": 4}

    quality = {"clpd_nats": 1.0, "greedy_agreement": 0.9}
    measured = {
        "model": "m",
        "context_tokens": 512,
        "device": "CPU",
        "tbt": {"1": {"off": budget(3.0), "64": budget(2.0)}},
    }
    drawn = pruning({**measured, "quality": {"off": quality, "64": quality}})
    assert drawn is not None
    assert drawn.rows[0].ours == "2.00 ms at 64; 3.00 ms not pruned"
    assert pruning({}) is None
