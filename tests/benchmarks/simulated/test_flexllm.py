"""FlexLLM's figures: boxes of their own beside co-serving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.simulated import flexllm
from benchmarks.simulated.flexllm import Run, main, simulated

LOAD = {"device": "agx-orin-32gb-maxn", "model": "mistral-3b", "trace": "poisson", "arrivals": "poisson"}


def figures(strategy: str, rate_per_s: float) -> dict[str, Any]:
    row: dict[str, Any] = simulated(Run(strategy, rate_per_s, 0), **LOAD, slo_ms=90.0, seconds=15.0, step_pairs=4)
    return row


def test_boxes_of_their_own_serve_at_a_higher_rate_and_learn_by_their_number() -> None:
    alone = figures("fcfs", 0.8)
    apart = {strategy: figures(strategy, rate) for strategy, rate in (("separate-2:2", 0.4), ("separate-1:3", 0.2))}
    for row, serving in zip(apart.values(), (2, 1), strict=True):
        assert row["in_time"] == alone["in_time"]
        assert row["output_tokens_per_s"] == pytest.approx(alone["output_tokens_per_s"] * serving / 4)
    two, three = (row["trained_tokens_per_s"] for row in apart.values())
    assert three == pytest.approx(1.5 * two)
    assert two > 0


def test_what_a_file_has_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flexllm, "STRATEGIES", ("fcfs",))
    path = tmp_path / "out.json"
    command = [LOAD["device"], LOAD["model"], "--trace", "poisson", "--seconds", "5", "--slo-ms", "90", "--jobs", "1"]
    command += ["--seeds", "0", "--output", str(path)]
    done = CliRunner().invoke(main, [*command, "--rates", "0.5"])
    assert done.exit_code == 0, done.output
    first = json.loads(path.read_text())
    first["runs"][0]["in_time"] = 0.125
    path.write_text(json.dumps(first))
    done = CliRunner().invoke(main, [*command, "--rates", "0.5,1"])
    assert done.exit_code == 0, done.output
    again = json.loads(path.read_text())["runs"]
    assert [row["rate_per_s"] for row in again] == [0.5, 1.0]
    assert again[0]["in_time"] == 0.125
    other = CliRunner().invoke(main, [*command, "--rates", "0.5", "--slo-ms", "50"])
    assert other.exit_code == 1
    assert "runs of another load" in other.output
