"""The report is drawn from the runs alone, and says of each claim whether they bear it out."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest
from click.testing import CliRunner

from benchmarks.report import paper
from benchmarks.report.__main__ import report as report_command
from benchmarks.report.canvas import Canvas, _bars, _lines
from benchmarks.report.claims import Claim, claims, pruning_claim, scheduler_claims
from benchmarks.report.learning import against_retrain_rate, over_time, smooth
from benchmarks.report.overheads import (
    prefix_sharing,
    pruning,
    pruning_command,
    scheduler_command,
    scheduler_table,
)
from benchmarks.report.page import without_folders
from benchmarks.report.panels import Curve, Figure, Panel
from benchmarks.report.serving import ablations, throughput
from benchmarks.report.setting import Setting
from edged.lab.bench.compare import Run
from edged.lab.bench.summary import Done, Runs
from edged.scheduler.policies.registry import ROWS

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
        "finetune": {"pairs_trained": figures.get("pairs")},
        "series": figures.get("series", []),
        "prefix": figures.get("prefix", {}),
        **({"arrivals": figures["arrivals"]} if "arrivals" in figures else {}),
        **({"requests": figures["requests"]} if "requests" in figures else {}),
        "model": {"name": "m"},
    }
    return Done(Run(policy, retrain_rate, rate, None, seed), report)


def setting(*runs: Done, device: str | None = None) -> Setting:
    return Setting("here", Runs({"workload": {"device": device, "seconds": 60.0}}, runs, {}))


def claim(found: list[Claim], start: str) -> Claim:
    (one,) = [claim for claim in found if claim.what.startswith(start)]
    return one


@pytest.mark.slow
def test_the_command_draws_every_figure_of_real_runs(compared: Path, tmp_path: Path) -> None:
    scheduler = tmp_path / "scheduler.json"
    # As --policy all prints them.
    scheduler.write_text(json.dumps([{"policy": "mace", "tasks": 64, "memory_mb": 0.04, "mixes": {"mixed": MIX}}]))
    output = tmp_path / "report"
    arguments = [str(compared), "--output", str(output), "--scheduler", str(scheduler)]
    result = CliRunner().invoke(report_command, arguments)
    assert result.exit_code == 0, result.output
    page = (output / "README.md").read_text()
    assert "## tiny: measured" in page
    for key in ("fig2", "fig5", "fig9", "fig10", "fig11", "fig13"):
        drawing = output / f"{key}-tiny.svg"
        assert f"]({drawing.name})" in page
        assert drawing.stat().st_size < LARGEST_DRAWING_BYTES
        ElementTree.parse(drawing)
        assert json.loads((output / f"{key}-tiny.json").read_text())["panels"]
    assert "| pairs learned |" in page
    assert "python -m benchmarks.scheduler --policy mace --tasks 64 --json > scheduler-mace.json" in page
    command = "python -m benchmarks.report.arrivals compare tiny --trace trace.jsonl --pairs pairs.jsonl --format hh"
    assert page.count(command) == 1, "all figures of a folder are of one comparison"
    assert "Not measured by these runs: TTFT p50 of AdaInf's; TTFT p50 of Ekya's; " in page
    assert "| not measured |" not in page.split("### Figure")[0], "what runs do not tell has no row of its own"
    for written in (page, *(path.read_text() for path in output.glob("*.json"))):
        assert str(compared.parent) not in written
        assert "/tmp" not in written
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
    assert CliRunner().invoke(report_command, arguments).exit_code == 0
    assert (output / "fig2-tiny.svg").read_bytes() == before, "the same runs give the same file"


def test_ten_policies_over_a_long_window_stay_small_enough_for_git(tmp_path: Path) -> None:
    x = [float(second) for second in range(120)]
    curves = {f"policy-{n}": Curve(x, [(n * s * 0.123) % 1.0 for s in x]) for n in range(10)}
    bars = {name: Curve(["a", "b", "c"], [0.1, 0.2, 0.3], [0.0, 0.1, 0.2], [0.2, 0.3, 0.4]) for name in curves}
    panels = (Panel("a", "x", "y", curves), *[Panel("b", "x", "y", bars, "bar")] * 4)
    drawing = Canvas(tmp_path).draw(Figure("fig", "Figure", (), panels), "fig")
    assert drawing.stat().st_size < LARGEST_DRAWING_BYTES


@pytest.mark.slow
def test_without_matplotlib_the_error_tells_what_to_install(compared: Path, tmp_path: Path) -> None:
    program = "import sys; sys.modules['matplotlib'] = None; from benchmarks.report.__main__ import report; report()"
    command = [sys.executable, "-c", program, str(compared), "--output", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "pip install 'edged[report]'" in ended.stderr


@pytest.mark.parametrize("content", [None, "[]", "{", '{"policy": "mace"}', "[3]"])
@pytest.mark.slow
def test_what_is_no_comparison_is_refused_with_its_name(tmp_path: Path, compared: Path, content: str | None) -> None:
    arguments = ["--output", str(tmp_path / "report")]
    if content is None:
        arguments += [str(tmp_path)]
    else:
        (tmp_path / "scheduler.json").write_text(content)
        arguments += [str(compared), "--scheduler", str(tmp_path / "scheduler.json")]
    result = CliRunner().invoke(report_command, arguments)
    assert result.exit_code == 1
    assert str(tmp_path) in result.stderr


@pytest.mark.parametrize("content", ["{}", '{"tbt": {}, "quality": {}}', '{"policy": "mace", "mixes": {}}'])
@pytest.mark.slow
def test_a_pruning_file_of_another_benchmark_is_an_error(tmp_path: Path, compared: Path, content: str) -> None:
    file = tmp_path / "pruning.json"
    file.write_text(content)
    arguments = [str(compared), "--output", str(tmp_path / "report"), "--pruning", str(file)]
    result = CliRunner().invoke(report_command, arguments)
    assert result.exit_code == 1
    assert "is not what python -m benchmarks.pruning" in result.stderr


@pytest.mark.slow
def test_damaged_runs_are_errors_with_their_names(tmp_path: Path, compared: Path) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(compared, folder)
    run = next(folder.glob("mace_*.json"))
    record = json.loads(run.read_text())
    arguments = [str(folder), "--output", str(tmp_path / "report")]

    def refused(content: str) -> str:
        run.write_text(content)
        result = CliRunner().invoke(report_command, arguments)
        assert (result.exit_code, run.name in result.stderr) == (1, True)
        return result.stderr

    assert "cannot be read" in refused("{")
    assert "does not hold a run" in refused(json.dumps({"report": {}}))
    del record["report"]["timeline"]
    assert 'without "timeline"' in refused(json.dumps(record))
    (folder / "manifest.json").write_text("{}")
    result = CliRunner().invoke(report_command, arguments)
    assert (result.exit_code, 'no "workload"' in result.stderr) == (1, True)


@pytest.mark.slow
def test_folders_of_one_name_are_refused(tmp_path: Path, compared: Path) -> None:
    folder = tmp_path / compared.name
    shutil.copytree(compared, folder)
    result = CliRunner().invoke(report_command, [str(compared), str(folder), "-o", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert str(compared) in result.stderr
    assert str(folder) in result.stderr


def test_absolute_paths_are_told_by_their_last_names() -> None:
    told = 'trace "/a/b.c/d.csv" of 3.0 requests/s, see [it](fig.svg), MACE/Bin, https://a.b/c and /data/x'
    wanted = 'trace "d.csv" of 3.0 requests/s, see [it](fig.svg), MACE/Bin, https://a.b/c and x'
    assert without_folders(told) == wanted


@pytest.mark.slow
def test_runs_that_the_command_implies_and_nobody_made_are_named(compared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(compared, folder)
    arguments = [str(folder), "--output", str(tmp_path / "report")]
    assert CliRunner().invoke(report_command, arguments).exit_code == 0
    page = tmp_path / "report" / "README.md"
    assert "runs, of which" not in page.read_text()
    manifest = json.loads((folder / "manifest.json").read_text())
    record = json.loads((folder / manifest["runs"][0]["file"]).read_text())
    other = {**record["run"], "seed": 7}
    manifest["runs"].append({**other, "file": "other.json"})
    (folder / "other.json").write_text(json.dumps({**record, "run": other}))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert CliRunner().invoke(report_command, arguments).exit_code == 0
    told = "That is 4 runs, of which 3 were made. Missing are 1 of seed 7 at 100% retrain rate."
    assert told in page.read_text()


def test_what_was_not_measured_has_no_bar(tmp_path: Path) -> None:
    curves = {"mace": Curve(["a", "b"], [1.0, None], [0.5, None], [1.5, None]), "ekya": Curve(["a", "b"], [None, None])}
    sheet = matplotlib.figure.Figure()
    axes = sheet.subplots()
    _bars(axes, Panel("p", "", "y", curves, "bar"))
    assert [bar.get_height() for bar in axes.patches] == [1.0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b"]


def test_an_only_point_has_wide_axes_and_its_range() -> None:
    curves = {"mace": Curve([0.1], [5.0], [4.0], [7.0]), "ekya": Curve([0.1], [None], [None], [None])}
    axes = matplotlib.figure.Figure().subplots()
    _lines(axes, Panel("p", "retrain rate", "y", curves))
    assert axes.get_xlim() == (0.0, 0.2)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.1"]
    ranges = [segment for collection in axes.collections for segment in collection.get_segments()]
    assert [segment.tolist() for segment in ranges] == [[[0.1, 4.0], [0.1, 7.0]]]


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


def test_a_claim_is_met_where_every_seed_meets_it_and_shows_their_range() -> None:
    def found(*mace: float) -> Claim:
        runs = [done("adainf", seed=seed, ttft=100.0) for seed in range(len(mace))]
        runs += [done("mace", seed=seed, ttft=ttft) for seed, ttft in enumerate(mace)]
        return claim(claims(setting(*runs)), "TTFT p50 of AdaInf's")

    assert found(30.0, 31.0, 36.0).verdict == "met"
    one_off = found(30.0, 31.0, 38.0)
    assert (one_off.verdict, one_off.ours) == ("not met", "0.31x (0.30x–0.38x) at 2.00 requests/s")


def test_throughput_is_held_against_the_papers_number_for_the_device() -> None:
    runs = [done(name, tokens=tokens) for name, tokens in (("adainf", 100.0), ("mace", 120.0))]
    assert claim(claims(setting(*runs)), "throughput of AdaInf's").verdict == "not met"
    orin = setting(*runs, device="agx-orin-32gb")
    assert claim(claims(orin), "throughput of AdaInf's").verdict == "not shown: an average needs several retrain rates"
    assert "1.12x" in str(throughput(orin).rows[0].paper)


@pytest.mark.parametrize(("at_half", "mean", "verdict"), [(1.4, "1.20x", "met"), (1.0, "1.00x", "not met")])
def test_the_orins_throughput_is_judged_by_its_mean_over_retrain_rates(at_half: float, mean: str, verdict: str) -> None:
    runs = [done("adainf", retrain_rate=rate, tokens=100.0, pairs=20.0) for rate in (0.1, 0.5)]
    runs += [done("mace", retrain_rate=0.1, tokens=100.0, pairs=5.0)]
    runs += [done("mace", retrain_rate=0.5, tokens=100.0 * at_half, pairs=5.5)]
    orin = setting(*runs, device="agx-orin-32gb")
    found = claim(claims(orin), "throughput of AdaInf's")
    assert found.ours == f"mean over 10%, 50%: {mean} at 2.00 requests/s / 10% alone: 1.00x at 2.00 requests/s"
    assert found.verdict == verdict
    assert found.learned == "mace 5 / 5.5, adainf 20 / 20 at 2.00 requests/s"
    row = throughput(orin).rows[-1]
    assert (row.what, row.ours) == ("mace to adainf, 2.00 requests/s, mean over retrain rates of 10%, 50%", mean)


def test_beside_each_comparison_stands_how_many_pairs_were_learned() -> None:
    runs = [done("mace", rate, ttft=30.0, tokens=10.0, attained=1.0, pairs=5.5) for rate in (1.0, 2.0)]
    runs += [done("ekya", rate, ttft=100.0, attained=0.1, pairs=17.0) for rate in (1.0, 2.0)]
    runs += [done("mace-bin", 2.0, tokens=8.0, pairs=18.0), done("adainf", 2.0, attained=0.1)]
    found = claims(setting(*runs))
    both = "mace 5.5, ekya 17 at 1.00 requests/s; mace 5.5, ekya 17 at 2.00 requests/s"
    assert claim(found, "TTFT p50 of Ekya's").learned == both
    assert claim(found, "SLO attainment").learned.endswith("mace 5.5, ekya 17, adainf – at 2.00 requests/s")
    assert claim(found, "throughput lost as mace-bin").learned == "mace 5.5, mace-bin 18 at 2.00 requests/s"
    assert claim(found, "CLPD not pruned").learned == "–"


def test_attainment_counts_only_where_both_baselines_have_fallen() -> None:
    def found(adainf: float, mace: float) -> str:
        runs = [done("ekya", attained=0.1), done("adainf", attained=adainf), done("mace", attained=mace)]
        return claim(claims(setting(*runs)), "SLO attainment").verdict

    assert found(adainf=0.5, mace=0.96) == "met"
    assert found(adainf=0.5, mace=0.94) == "not met"
    assert found(adainf=0.6, mace=0.96) == "not shown: at no load both baselines fell so low"
    one = [done("ekya", attained=0.1), done("mace", attained=0.96)]
    assert claim(claims(setting(*one)), "SLO attainment").verdict == "not measured"


def test_requests_without_an_answer_are_told_beside_latencies() -> None:
    counts = {"sent": 10, "finished": 10}
    runs = [done("mace", ttft=30.0, requests=counts), done("ekya", ttft=100.0, requests={**counts, "finished": 6})]
    told = claim(claims(setting(*runs)), "TTFT p50 of Ekya's").ours
    assert told == "0.30x at 2.00 requests/s (unanswered: mace 0%, ekya 40% at 2.00 requests/s)"


def test_ablations_are_judged_at_the_highest_load() -> None:
    runs = [done("mace", rate, attained=1.0, tokens=100.0, clpd=2.0) for rate in (1.0, 2.0)]
    runs += [done("mace-bin", 1.0, attained=1.0, tokens=100.0, clpd=2.0)]
    runs += [done("mace-bin", 2.0, attained=0.1, tokens=80.0, clpd=1.0)]
    runs += [done("mace-prune", 2.0, tokens=95.0, clpd=2.5)]
    one_seed = claim(claims(setting(*runs)), "CLPD, mace-bin to mace")
    assert one_seed.verdict == "not shown: one seed tells no spread"
    runs += [done("mace", 2.0, 1, attained=1.0, tokens=100.0, clpd=2.0)]
    runs += [done("mace-bin", 2.0, 1, attained=0.1, tokens=80.0, clpd=1.0)]
    runs += [done("mace-prefix", 2.0, seed, tokens=99.0, clpd=clpd) for seed, clpd in ((0, 1.0), (1, 2.0))]
    found = claims(setting(*runs))
    assert claim(found, "attainment as mace-bin").verdict == "met"
    assert claim(found, "throughput lost as mace-bin").verdict == "met"
    assert claim(found, "throughput lost as mace-prune").verdict == "not met"
    assert claim(found, "CLPD, mace-bin to mace") == Claim(
        "CLPD, mace-bin to mace", str(paper.BIN_CLPD), "2.00x: 1.000 to 2.000", "met"
    )
    assert claim(found, "CLPD, mace-prefix to mace").verdict == "within the spread"
    assert claim(found, "attainment lost as mace-prefix").verdict == "not measured"
    figure = ablations(setting(*runs))
    assert figure is not None
    assert not any("mace-priority" in row.what for row in figure.rows)
    assert "pairs learned at 2.00 requests/s" not in [panel.title for panel in figure.panels]
    learned = ablations(setting(done("mace", 2.0, pairs=8.0), done("mace-priority", 2.0, pairs=3.0)))
    assert learned is not None
    assert [(row.what, row.ours) for row in learned.rows] == [("pairs learned, mace-priority (mace)", "3.0 (8.0)")]
    assert [list(curve.y) for curve in learned.panels[-1].curves.values()] == [[8.0], [3.0]]
    assert ablations(setting(done("mace", attained=1.0))) is None


def test_what_pruning_gives_up_is_told_by_its_own_benchmark() -> None:
    runs = setting(done("mace", clpd=2.0), done("mace-prune", clpd=2.5))
    assert pruning_claim(runs, {}).verdict == "not measured"
    for pruned, verdict in ((0.9, "met"), (1.1, "not met")):
        quality = {"off": {"clpd_nats": 1.0}, "64": {"clpd_nats": pruned}}
        assert pruning_claim(runs, {"model": "m", "quality": quality}).verdict == verdict
        assert pruning_claim(runs, {"model": "other", "quality": quality}).verdict == "not measured"


def test_strategies_are_ordered_by_what_they_think_of_the_pairs() -> None:
    def series(clpd: float) -> list[dict[str, Any]]:
        return [{"at_s": 1.0, "win": True, "clpd_nats": clpd, "reward_margin": 1.0, "base_clpd_nats": 1.0}]

    for ekya, mace, verdict in ((2.0, 3.0, "met"), (3.0, 2.0, "not met"), (0.5, 3.0, "not met")):
        judged = [
            done(name, series=series(x), arrivals={"series": series(x)}) for name, x in (("ekya", ekya), ("mace", mace))
        ]
        assert claim(claims(setting(*judged)), "CLPD over time").verdict == verdict
        own = [done("ekya", series=series(ekya)), done("mace", series=series(mace))]
        assert claim(claims(setting(*own)), "CLPD over time").verdict == "not measured"
        drawn = over_time(setting(*own))
        assert drawn is not None
        assert {row.ours for row in drawn.rows} == {"not measured"}
        both = against_retrain_rate(setting(done("mace", clpd=2.0), done("adainf", clpd=1.0)))
        assert both is not None
        assert {row.ours for row in both.rows} == {"not measured"}
    assert claim(claims(setting(done("mace", series=series(3.0)))), "CLPD over time").verdict == "not measured"


def test_the_schedulers_overhead_is_that_of_its_slowest_mix() -> None:
    slow = {**MIX, "plan_ms_p50": 0.2}
    measured = {"policy": "mace", "tasks": 64, "memory_mb": 6.0, "mixes": {"a": MIX, "b": slow}}
    assert [found.verdict for found in scheduler_claims([measured])] == ["not met", "not measured", "not met"]
    fast = {**measured, "memory_mb": 4.0, "mixes": {"a": MIX}}
    assert [found.verdict for found in scheduler_claims([fast, {"policy": "ekya"}])] == ["met", "not measured", "met"]


def test_a_long_queue_has_a_limit_of_its_own_for_decisions_and_counts_for_memory() -> None:
    def verdicts(queued_ms: float, queued_mb: float, queued: int = 4096) -> list[str]:
        mixes = {"mixed": MIX, "queued": {**MIX, "plan_ms_p50": queued_ms}}
        memory = {"memory_mb": 1.0, "memory_queued_mb": queued_mb}
        measured = {"policy": "mace", "tasks": 64, "queued": queued, **memory, "mixes": mixes}
        return [found.verdict for found in scheduler_claims([measured])]

    assert verdicts(0.9, 4.0) == ["met", "met", "met"]
    assert verdicts(1.1, 6.0) == ["met", "not met", "not met"]
    assert verdicts(0.9, 4.0, queued=10) == ["met", "not measured", "met"]


def test_each_policy_stands_beside_its_own_number_of_the_paper_or_none() -> None:
    names = ("mace", "ekya", "sync", "periodic-async", "mace-priority", "mace-prefix")
    measured = [{"policy": name, "tasks": 64, "memory_mb": 1.0, "mixes": {"a": MIX}} for name in names]
    table = scheduler_table(measured)
    assert table is not None
    told = {row.what.split(", ")[1].split(":")[0]: row.paper for row in table.rows if row.what.startswith("decision")}
    assert {name: number and number.value for name, number in told.items()} == {
        "mace": 0.15, "ekya": 0.03, "sync": None, "periodic-async": None, "mace-priority": 0.11, "mace-prefix": None
    }  # fmt: skip


def test_other_benchmarks_stand_with_the_command_that_was_typed() -> None:
    every = [{"policy": name, "tasks": 64, "queued": 4096, "rounds": 400} for name in ROWS]
    given = "--tasks 64 --queued 4096 --rounds 400 --json"
    assert scheduler_command(every) == f"python -m benchmarks.scheduler --policy all {given} > scheduler-all.json"
    second = scheduler_command(every[:2]).splitlines()[1]
    assert second.startswith(f"python -m benchmarks.scheduler --policy {every[1]['policy']} ")
    typed = {"model": "m", "pairs": "p.jsonl", "last": 1425, "memory_mb": 64}
    tool = "python -m benchmarks.pruning m"
    command = f"{tool} p.jsonl --last 1425 --memory-mb 64 --output pruning.json"
    assert pruning_command({"model": "m", "arguments": typed}) == command
    assert pruning_command({"model": "m"}) == f"{tool} PAIRS --output pruning.json"


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
