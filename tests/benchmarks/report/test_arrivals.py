"""Each pair of a replay is judged by the version that was served when it came."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.report.arrivals import arrivals, replay_and_score
from benchmarks.report.scored import ScoredWorkload
from edged.lab.bench.compare import Axes, CompareError, compare
from edged.lab.bench.replay import ReplayPlan
from edged.settings.load import Settings
from tests.lab.bench.conftest import tiny_workload


@pytest.mark.slow
def test_each_pair_is_judged_by_the_version_that_was_served_when_it_came(workload_files: Path) -> None:
    settings = Settings.model_validate(
        {"cache": {"memory_mb": 8}, "guard": {"held_out_share": 0.0}, "align": {"learning_rate": 0.01}}
    )
    plan = ReplayPlan(
        trace=str(workload_files / "trace.jsonl"),
        pairs=workload_files / "pairs.jsonl",
        model_dir=workload_files / "model",
        settings=settings,
        retrain_rate=1.0,
        rate_per_s=3.0,
        seconds=4.0,
    )
    report = replay_and_score(plan)
    judged = report["arrivals"]["series"]
    assert report["arrivals"]["clpd_nats"] == pytest.approx(sum(row["clpd_nats"] for row in judged) / len(judged))
    assert [row["version"] for row in judged] == sorted(row["version"] for row in judged)
    # Version 1 is the untrained adapter.
    assert judged[0]["version"] == 1 < judged[-1]["version"]
    # Scored by the engine's own packed forward; some pairs are trained on before another version comes.
    engine = {(row["pair_id"], row["version"]): row["clpd_nats"] for row in report["series"]}
    both = [(row, engine[key]) for row in judged if (key := (row["pair_id"], row["version"])) in engine]
    assert any(row["version"] > 1 for row, _ in both)
    for row, clpd_nats in both:
        assert row["clpd_nats"] == pytest.approx(clpd_nats, abs=1e-3)


@pytest.mark.slow
def test_scored_runs_are_made_by_this_command(compared: Path, workload_files: Path) -> None:
    scored = tiny_workload(workload_files, ScoredWorkload).command("mace", 0.1, 2.5, 7)
    plain = tiny_workload(workload_files).command("mace", 0.1, 2.5, 7)
    assert (scored[:4], plain[:3]) == (
        ["python", "-m", "benchmarks.report.arrivals", "replay"],
        ["edged", "bench", "replay"],
    )
    assert scored[4:] == plain[3:]
    record = json.loads((compared / "mace_retrain1_rate3_seed0.json").read_text())
    assert record["command"][:4] == scored[:4]
    assert record["report"]["arrivals"]["pairs"] == record["report"]["finetune"]["pairs_sent"]


@pytest.mark.slow
def test_runs_with_and_without_scores_are_not_mixed(compared: Path, workload_files: Path, tmp_path: Path) -> None:
    none = Axes(("mace",), retrain_rates=(1.0,), seeds=(), rates_per_s=(3.0,))
    with pytest.raises(CompareError, match="has runs with score arrivals True, not None"):
        compare(tiny_workload(workload_files), none, compared)
    manifest = compare(tiny_workload(workload_files), none, tmp_path)
    with pytest.raises(CompareError, match="has runs with score arrivals None, not True"):
        compare(tiny_workload(workload_files, ScoredWorkload), none, tmp_path)
    # Before the scores had a command of their own every manifest told of them.
    manifest["workload"]["score_arrivals"] = False
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    compare(tiny_workload(workload_files), none, tmp_path)


@pytest.mark.slow
def test_the_command_compares_as_edged_bench_does_and_refuses_simulations(compared: Path, workload_files: Path) -> None:
    arguments = ["compare", str(compared), "--seconds", "2", "--seeds", "0", "--rates", "3", "--retrain-rates", "1"]
    for option in ("trace", "pairs", "model", "config"):
        arguments += [f"--{option}", getattr(tiny_workload(workload_files), option)]
    result = CliRunner().invoke(arrivals, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    assert {row["policy"] for row in json.loads(result.stdout)["rows"]} == {"fcfs", "mace"}
    result = CliRunner().invoke(arrivals, [*arguments, "--device", "orin"])
    assert (result.exit_code, "not with --device" in result.stderr) == (1, True)
