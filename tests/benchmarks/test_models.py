"""Every architecture is served and trained exactly, or a start says what it is not, and why; docs/models.md has all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.models import PAGE, Row
from benchmarks.support.architectures import ARCHITECTURES
from benchmarks.support.checkout import ROOT


def examined(folder: Path, *arguments: str, timeout: float = 240) -> dict[str, Row]:
    """The rows of `python -m benchmarks.models`, which tells by its status that nothing was wrong."""
    results = folder / "rows.jsonl"
    command = [sys.executable, "-m", "benchmarks.models", *arguments, "--results", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=timeout, env=dict(os.environ))
    rows = [Row(**json.loads(line)) for line in results.read_text().splitlines()]
    assert done.returncode == 0, [row for row in rows if row.served != "yes"] or done.stderr
    return {row.name: row for row in rows}


@pytest.mark.slow
def test_models_that_ended_in_a_traceback_are_served_or_say_why_not(tmp_path: Path) -> None:
    rows = examined(tmp_path, "phimoe", "hunyuan_v1_moe", "gemma3n_text", "stored as bitnet", "qwen3_vl")
    assert (rows["phimoe"].served, rows["phimoe"].trained) == ("yes", "yes")
    assert (rows["hunyuan_v1_moe"].served, rows["hunyuan_v1_moe"].trained) == ("yes", "yes")
    assert (rows["gemma3n_text"].served, rows["gemma3n_text"].trained) == ("yes", "no")
    assert "several streams of hidden states" in rows["gemma3n_text"].reason
    assert "bitnet" in rows["stored as bitnet"].reason
    assert "is no causal language model" in rows["qwen3_vl"].reason


@pytest.mark.slow
def test_in_16_bits_a_lost_state_does_not_pass_for_rounding(tmp_path: Path) -> None:
    rows = examined(tmp_path, "falcon_h1", "llama", "phimoe", "--dtype", "bfloat16")
    assert rows["falcon_h1"].served == "refused"
    assert 'call "get_conv_state" of their cache' in rows["falcon_h1"].reason
    assert (rows["llama"].served, rows["llama"].trained) == ("yes", "yes")
    # Rounding chooses other experts, which says nothing against the model.
    assert (rows["phimoe"].served, rows["phimoe"].trained) == ("yes", "yes")


def test_the_page_tells_of_every_architecture() -> None:
    text = PAGE.read_text()
    assert len({architecture.name for architecture in ARCHITECTURES}) == len(ARCHITECTURES)
    for architecture in ARCHITECTURES:
        assert f"| {architecture.name.removeprefix('stored as ')} |" in text
        assert architecture.checkpoints in text


@pytest.mark.slow
def test_nothing_crashes_and_nothing_is_wrong_in_the_whole_list(tmp_path: Path) -> None:
    rows = examined(tmp_path, timeout=1800)
    assert len(rows) == len(ARCHITECTURES)
    assert sum(row.served == "yes" for row in rows.values()) >= 65
    for row in rows.values():
        assert row.reason or row.served == row.trained == "yes", row
