"""`edged bench federated`: a table for people, JSON for programs, and a sentence where something is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edged.cli.main import cli


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["bench", "federated", "schedule", *words], env={"COLUMNS": "200"})


def test_policies_are_compared_as_json_and_as_a_table() -> None:
    few = ("--workload", "low", "--jobs", "3", "--boxes", "400", "--seeds", "2", "--policies", "random,venn")
    report = json.loads(run(*few, "--json").stdout)
    assert (report["workload"], report["campaigns"], report["seeds"]) == ("low", 3, 2)
    assert "synthesised" in report["stand_ins"]
    figures = {"jct_s", "over_random", "by_seed", "delay_s", "response_s", "aborted", "over_random_by_requirement"}
    assert {name: set(row) for name, row in report["policies"].items()} == {"random": figures, "venn": figures}
    table = run(*few)
    assert table.exit_code == 0
    assert "over random" in table.stdout
    assert "stand-ins" in table.stdout


def test_files_of_boxes_are_read(tmp_path: Path) -> None:
    (tmp_path / "devices.csv").write_text("memory_mb,tokens_per_s\n" + "65536,100\n" * 40)
    (tmp_path / "trace.csv").write_text("box,start_s,end_s\n" + "".join(f"{box},0,80000\n" for box in range(40)))
    options = ("--devices", str(tmp_path / "devices.csv"), "--trace", str(tmp_path / "trace.csv"))
    done = run("--workload", "low", "--jobs", "1", "--seeds", "1", "--policies", "fifo", *options)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--policies", "vennn"), 'no policy "vennn": did you mean "venn"?'),
        (("--workload", "odd"), 'no workload "odd": known: even,'),
        (("--boxes", "5"), "boxes meet"),
        (("--seeds", "0"), "'--seeds'"),
        (("--devices", "/nowhere.csv"), "/nowhere.csv"),
        (("--devices", __file__), "give numbers of at least 0 as memory_mb,tokens_per_s"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_refused_in_a_sentence(words: tuple[str, ...], said: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output
