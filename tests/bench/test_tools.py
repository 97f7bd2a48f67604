"""The comparisons with transformers and TRL run to their end; how fast they are is not tested."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edged.bench.dpo import SIDES

REPOSITORY = Path(__file__).parents[2]


def run_tool(name: str, *arguments: str, report: Path) -> dict[str, Any]:
    command = [sys.executable, str(REPOSITORY / "tools" / name), *arguments, "--quick", "--output", str(report)]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=280)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    return found


@pytest.mark.slow
def test_serving_is_compared_on_equal_greedy_answers(tmp_path: Path) -> None:
    report = run_tool("bench_serving.py", "--rounds", "1", "--requests", "4", report=tmp_path / "report.json")
    assert report["equal_answers_share"] == {"transformers continuous batching": 1.0, "transformers generate": 1.0}
    assert all(ratio["median"] > 0 for ratio in report["ratios"].values())


@pytest.mark.slow
def test_dpo_is_compared_on_equal_losses(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl.gz"
    with gzip.open(pairs, "wt") as file:
        for number in range(20):
            head = f"\n\nHuman: question {number}, please\n\nAssistant:"
            file.write(json.dumps({"chosen": f"{head} yes, {number}", "rejected": f"{head} no {number} no"}) + "\n")
    report = run_tool("bench_dpo.py", str(pairs), "--steps", "1", report=tmp_path / "report.json")
    ours, *theirs = (report["losses"][name] for name in SIDES)
    for losses in theirs:
        # Only the random start of LoRA's A differs, which one step of learning hardly shows.
        assert losses == pytest.approx(ours, abs=0.02)
    assert all(peak > 0 for peak in report["peak_bytes_above_weights"].values())


@pytest.mark.slow
def test_many_adapters_share_a_batch_and_come_from_disk(tmp_path: Path) -> None:
    arguments = ("--rounds", "1", "--registered", "12", "--active", "4")
    report = run_tool("bench_adapters.py", *arguments, report=tmp_path / "report.json")
    assert set(report["batch"]["over_one_adapter"]) == {"0", "1", "16"}
    assert report["crowd"]["registered"] == 12
    assert report["crowd"]["loaded"] <= 4
    assert all(report["crowd"][kind]["ttft_ms_p50"] > 0 for kind in ("cold", "warm"))


def test_ratios_that_left_their_range_are_told() -> None:
    sys.path.insert(0, str(REPOSITORY / "tools"))
    try:
        from bench_all import verdict
    finally:
        sys.path.pop(0)
    before = {"median": 1.4, "low": 1.3, "high": 1.5}
    assert verdict({"median": 1.45, "low": 1.35, "high": 1.6}, before) == "same"
    assert verdict({"median": 1.2, "low": 1.1, "high": 1.25}, before) == "lower"
    assert verdict({"median": 1.7, "low": 1.6, "high": 1.8}, before) == "higher"
    assert verdict(before, None) == "new"
