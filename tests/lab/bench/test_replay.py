"""A replay sends the whole trace, learns the pairs meanwhile, and reports what happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edged.cli.main import cli
from edged.lab.bench.replay import ReplayError, ReplayPlan, replay
from edged.lab.bench.traces import TraceError
from edged.settings.load import Settings
from tests.models import save_tiny


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve requests in six conversations: every second one repeats the other's first block."""
    path = tmp_path_factory.mktemp("trace") / "mooncake.jsonl"
    rows = [
        {"timestamp": 500 * n, "input_length": 1100, "output_length": 80, "hash_ids": [n // 2, 100 + n, 200 + n]}
        for n in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    head = "\n\nHuman: hi\n\nAssistant:"
    rows = [{"chosen": f"{head} good day {n}", "rejected": f"{head} yo {n}"} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "not a pair\n")
    return path


def plan(model_dir: Path, trace: Path, pairs: Path, **changes: Any) -> ReplayPlan:
    settings = Settings.model_validate({"cache": {"memory_mb": 8}, "guard": {"held_out_share": 0.0}})
    values = {"rate_per_s": 6.0, "retrain_rate": 1.0, "seconds": 2.0, "settings": settings, **changes}
    return ReplayPlan(trace=str(trace), pairs=pairs, model_dir=model_dir, **values)


def test_every_request_is_answered_and_every_pair_learnt_meanwhile(model_dir: Path, trace: Path, pairs: Path) -> None:
    report = replay(plan(model_dir, trace, pairs))
    assert report["requests"] == {"sent": 12, "finished": 12, "refused": 0, "unfinished": 0, "failed": 0}
    assert report["pairs_file"] == {"name": "pairs.jsonl", "usable": 20, "bad_lines": 1}
    assert report["finetune"]["pairs_sent"] == 12
    assert report["finetune"]["pairs_trained"] > 0
    assert report["finetune"]["steps"] > 0
    assert report["finetune"]["trained_tokens_per_s"] > 0.0
    assert 0 < report["alignment"]["pairs"] <= 12
    assert 0.0 <= report["slo"]["ttft_within_factor_share"] <= report["slo"]["ttft_within_factor_or_floor_share"] <= 1.0
    assert report["ttft_ms"]["p50"] <= report["ttft_ms"]["p99"]
    assert report["load"]["length_scale"] == pytest.approx(512 / 1180)
    json.dumps(report)


@pytest.mark.slow
def test_the_report_tells_how_learning_and_the_load_went_over_time(model_dir: Path, trace: Path, pairs: Path) -> None:
    report = replay(plan(model_dir, trace, pairs))
    assert len(report["series"]) == report["alignment"]["pairs"]
    wins = [row["win"] for row in report["series"]]
    assert sum(wins) / len(wins) == pytest.approx(report["alignment"]["win_rate"])
    assert [row["at_s"] for row in report["series"]] == sorted(row["at_s"] for row in report["series"])
    # Percentiles that too few of the pairs reached are not known.
    known = [wait for name in ("p50", "p95", "p99") if (wait := report["finetune"]["latency_ms"][name]) is not None]
    assert known == sorted(known)
    assert all(wait > 0.0 for wait in known)
    assert report["finetune"]["pairs_waiting"] < report["finetune"]["pairs_sent"]
    # The last look may come so late that it has a row of its own.
    assert {round(row["at_s"]) for row in report["timeline"]} == {1, 2}
    for part in ("prefill_share", "decode_share", "finetune_share", "busy_share"):
        assert 0.0 < sum(row[part] for row in report["timeline"]) <= 2.0
    mixes = report["iterations"]["by_mix"].values()
    assert sum(mix["count"] for mix in mixes) == report["iterations"]["count"]
    # Both are read while the engine runs, one after the other.
    assert abs(report["iterations"]["count"] - report["scheduler"]["iterations"]) <= 1
    assert sum(report["prefix"]["requests_by_tenth"]) == report["requests"]["finished"]


@pytest.mark.slow
def test_shared_prefixes_of_the_trace_hit_the_cache(model_dir: Path, trace: Path, pairs: Path) -> None:
    report = replay(plan(model_dir, trace, pairs, retrain_rate=0.0))
    # Half of the prompts start with a block (of 222 tokens after scaling) that an earlier one had.
    assert 0.1 < report["prefix"]["hit_share"] < 0.3
    assert report["finetune"]["pairs_sent"] == 0


@pytest.mark.slow
def test_without_a_rate_the_machine_is_measured_first(model_dir: Path, trace: Path, pairs: Path) -> None:
    lines: list[str] = []
    report = replay(plan(model_dir, trace, pairs, rate_per_s=None, retrain_rate=0.0, seconds=1.0), lines.append)
    assert any("burst" in line for line in lines)
    assert report["load"]["rate_per_s"] > 0
    assert report["prefix"]["hit_share"] < 0.4, "the burst must not leave the load's own prompts in the cache"


def test_what_cannot_be_replayed_is_refused_with_the_reason(model_dir: Path, trace: Path, tmp_path: Path) -> None:
    empty = tmp_path / "none.jsonl"
    empty.write_text("{}\n")
    with pytest.raises(ReplayError, match="no usable pair in 1 lines"):
        replay(plan(model_dir, trace, empty))
    with pytest.raises(TraceError, match="No such file"):
        replay(plan(model_dir, tmp_path / "absent.csv", empty))


@pytest.mark.slow
def test_the_command_prints_the_report_as_json_and_as_a_table(model_dir: Path, trace: Path, pairs: Path) -> None:
    arguments = ["bench", "replay", "--trace", str(trace), "--pairs", str(pairs), "--model", str(model_dir)]
    arguments += ["--rate", "6", "--seconds", "1", "--policy", "fcfs"]
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["policy"] == "fcfs"
    assert report["finetune"]["steps"] == 0
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert "first tokens in time" in result.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--policy", "magic"], "magic"),
        (["--trace", "absent.csv"], "absent.csv"),
        (["--model", "/absent/model"], "/absent/model"),
    ],
)
def test_the_command_names_what_is_wrong(
    model_dir: Path, trace: Path, pairs: Path, change: list[str], message: str
) -> None:
    arguments = ["bench", "replay", "--trace", str(trace), "--pairs", str(pairs), "--model", str(model_dir), *change]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("edged: ")
    assert message in result.stderr
