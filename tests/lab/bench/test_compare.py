"""A comparison does each run in a process of its own, keeps what it did, and says what came of it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from edged.cli.main import cli
from edged.lab.bench.compare import MANIFEST, Axes, CompareError, Run, compare
from edged.lab.bench.summary import METRICS, Done, Middle, Runs, summarise
from edged.lab.cli.bench import tables
from edged.scheduler.policies.registry import ROWS
from tests.lab.bench.conftest import tiny_workload

POLICIES = ("fcfs", "mace")


def test_policies_take_turns_and_who_begins_changes() -> None:
    axes = Axes(("a", "b", "c"), retrain_rates=(0.1, 0.5), seeds=(0, 1), rates_per_s=(2.0,))
    runs = list(axes.runs(None))
    assert "".join(run.policy for run in runs) == "abc" + "bca" + "cab" + "abc"
    assert [(run.seed, run.retrain_rate) for run in runs[::3]] == [(0, 0.1), (0, 0.5), (1, 0.1), (1, 0.5)]
    assert len({run.file for run in runs}) == len(runs)


def test_loads_are_shares_of_the_capacity() -> None:
    axes = Axes(("a",), retrain_rates=(0.1,), seeds=(0,), rates_per_s=(3.0,), loads=(0.5, 1.2))
    assert [(run.rate_per_s, run.load) for run in axes.runs(10.0)] == [(3.0, None), (5.0, 0.5), (12.0, 1.2)]


def test_a_simulated_run_has_a_device_and_no_pairs(workload_files: Path) -> None:
    measured = tiny_workload(workload_files).command("mace", 0.1, 2.5, 7)
    assert measured[:3] == ["edged", "bench", "replay"]
    assert {"--pairs", "--format"} < set(measured)
    assert "--device" not in measured
    simulated = tiny_workload(workload_files, pairs=None, device="orin").command("mace", 0.1, None, 7)
    assert simulated[:5] == ["edged", "bench", "simulate", "--device", "orin"]
    assert not {"--pairs", "--format", "--rate"} & set(simulated)


@pytest.mark.slow
def test_a_failed_run_is_kept_with_its_error_and_tried_again_until_it_is_there(
    workload_files: Path, tmp_path: Path
) -> None:
    trace, folder = tmp_path / "trace.jsonl", tmp_path / "runs"
    workload = tiny_workload(workload_files, trace=str(trace), seconds=1.0)
    axes = Axes(POLICIES, retrain_rates=(0.5,), seeds=(0,), rates_per_s=(6.0,))
    compare(workload, axes, folder)
    runs = Runs.read(folder)
    assert len(runs.failed) == 2
    assert all("trace.jsonl" in error for error in runs.failed.values())

    trace.write_text((workload_files / "trace.jsonl").read_text())
    lines: list[str] = []
    compare(workload, replace(axes, policies=("mace",)), folder, lines.append)
    runs = Runs.read(folder)
    assert [done.report["policy"] for done in runs.done] == ["mace"]
    assert list(runs.failed) == ["fcfs_retrain0.5_rate6_seed0.json"]
    assert any("0 of 1 runs, about" in line for line in lines)
    record = json.loads((folder / "mace_retrain0.5_rate6_seed0.json").read_text())
    assert record["command"][:3] == ["edged", "bench", "replay"]
    assert record["wall_s"] > 1.0

    lines.clear()
    compare(workload, replace(axes, policies=("mace",)), folder, lines.append)
    assert lines == [], "what is there is not run again"
    assert len(json.loads((folder / MANIFEST).read_text())["runs"]) == 2


def test_a_folder_takes_runs_of_one_workload_only(workload_files: Path, tmp_path: Path) -> None:
    axes = Axes(("mace",), retrain_rates=(0.5,), seeds=(), rates_per_s=(6.0,))
    compare(tiny_workload(workload_files), axes, tmp_path)
    with pytest.raises(CompareError, match=r"has runs with seconds 2\.0, not 3\.0"):
        compare(tiny_workload(workload_files, seconds=3.0), axes, tmp_path)


def test_runs_of_another_version_or_of_other_files_are_not_mixed(workload_files: Path, tmp_path: Path) -> None:
    axes = Axes(("mace",), retrain_rates=(0.5,), seeds=(), rates_per_s=(6.0,))
    pairs, folder = tmp_path / "pairs.jsonl", tmp_path / "runs"
    pairs.write_text((workload_files / "pairs.jsonl").read_text())
    workload = tiny_workload(workload_files, pairs=str(pairs))
    manifest = compare(workload, axes, folder)
    assert compare(workload, axes, folder) == manifest

    def refused(told: str, **changes: object) -> None:
        (folder / MANIFEST).write_text(json.dumps({**manifest, **changes}))
        with pytest.raises(CompareError, match=told):
            compare(workload, axes, folder)

    refused("has runs with torch version '1.0', not", versions={**manifest["versions"], "torch": "1.0"})
    refused("has runs with edged version '0', not", versions={**manifest["versions"], "edged": "0"})
    refused("tells no versions", versions=None)
    (folder / MANIFEST).write_text("{")
    with pytest.raises(CompareError, match="cannot be read"):
        compare(workload, axes, folder)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    pairs.write_text("")
    with pytest.raises(CompareError, match="has runs with a pairs file of bytes"):
        compare(workload, axes, folder)


def test_figures_are_medians_over_seeds_and_ratios_are_taken_seed_by_seed() -> None:
    def done(policy: str, seed: int, tbt_ms: float | None) -> Done:
        return Done(Run(policy, 0.1, 2.0, None, seed), {"tbt_ms": {"p50": tbt_ms}})

    runs = Runs(
        {},
        [done("fcfs", seed, tbt) for seed, tbt in enumerate((10.0, 20.0, 40.0))]
        + [done("mace", seed, tbt) for seed, tbt in enumerate((11.0, 24.0, 36.0))]
        + [done("mace", 3, None)],
        {},
    )
    fcfs, mace = summarise(runs)
    assert mace["metrics"]["tbt_ms.p50"]["value"] == {"median": 24.0, "low": 11.0, "high": 36.0}
    assert mace["metrics"]["tbt_ms.p50"]["to_fcfs"] == {"median": 1.1, "low": 0.9, "high": 1.2}
    assert mace["metrics"]["tbt_ms.p50"]["to_adainf"] is None
    assert mace["metrics"]["ttft_ms.p50"]["value"] is None
    assert (fcfs["runs"], mace["runs"]) == (3, 4)
    assert Middle.of([]) is None
    assert len({metric.path for metric in METRICS}) == len(METRICS)


def test_the_names_of_all_policies_are_whole_on_a_terminal() -> None:
    runs = [Done(Run(policy, 0.1, 2.0, None, 0), {"tbt_ms": {"p50": 1234.5, "mean": 2345.6}}) for policy in ROWS]
    console = Console(width=120, file=io.StringIO())
    for part in tables(summarise(Runs({}, runs, {}))):
        console.print(part)
    printed = console.file.getvalue()
    shown = [cell.strip() for line in printed.splitlines() if line.startswith("┃") for cell in line.split("┃")]
    assert [name for name in shown if name] == list(ROWS)
    assert printed.count("1,234.50") == len(ROWS)


@pytest.mark.slow
def test_the_command_measures_the_capacity_and_prints_a_row_for_each_policy(
    workload_files: Path, tmp_path: Path
) -> None:
    arguments = ["bench", "compare", str(tmp_path / "runs"), "--seconds", "1", "--seeds", "0", "--policies", "fcfs"]
    for option in ("trace", "pairs", "model", "config"):
        arguments += [f"--{option}", getattr(tiny_workload(workload_files), option)]
    result = CliRunner().invoke(cli, [*arguments, "--loads", "0.2", "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    (row,) = printed["rows"]
    assert row["load"] == 0.2
    assert row["rate_per_s"] == pytest.approx(0.2 * printed["capacity_per_s"])
    assert row["metrics"]["ttft_ms.p50"]["to_fcfs"]["median"] == 1.0
    result = CliRunner().invoke(cli, [*arguments, "--loads", "0.2"])
    assert result.exit_code == 0, result.output
    assert "1.00x" in result.stdout
    assert "below: ratio to fcfs at the same seeds" in result.stdout

    result = CliRunner().invoke(cli, [*arguments, "--policies", "fcfs,magic"])
    assert (result.exit_code, "magic" in result.stderr) == (1, True)
    result = CliRunner().invoke(cli, [*arguments, "--device", "orin"])
    assert (result.exit_code, "or --device to simulate" in result.stderr) == (1, True)
    result = CliRunner().invoke(cli, [*arguments, "--jobs", "2"])
    assert (result.exit_code, "--jobs is for simulations" in result.stderr) == (1, True)
