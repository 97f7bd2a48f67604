"""`edged bench fleet`: tables for people, JSON for programs, and a sentence where a name is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from edged.cli.main import cli

STAGES = ("stages", "--tasks", "60", "--seeds", "0,1", "--training-shares", "0.3", "--policies", "separate,lemix,units")
BOXES = ("--seconds", "4", "--speeds", "1,0.5")


def run(*words: str) -> str:
    result = CliRunner().invoke(cli, ["bench", "fleet", *words], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_stages_have_every_run_as_json_and_means_or_an_axis_as_a_table() -> None:
    runs = json.loads(run(*STAGES, "--loads", "0.5,1", "--json"))["runs"]
    assert len(runs) == 2 * 2 * 3
    assert {run["policy"] for run in runs} == {"separate", "lemix", "units"}
    assert "first token, s" in run(*STAGES, "--loads", "1")
    table = run(*STAGES, "--rates", "2,4", "--by", "rates", "--figure", "throughput_per_s")
    assert "tasks/s by rates" in table
    assert re.search(r"policy\W+2\.0\W+4\.0\W", table)


def test_boxes_are_simulated_alone_and_beside_each_other() -> None:
    report = json.loads(run("simulate", *BOXES, "--json"))
    assert report["requests"] == sum(node["requests"] for node in report["nodes"].values()) > 10
    compared = json.loads(run("compare", *BOXES, "--policies", "fleet,homes", "--seeds", "0", "--json"))["runs"]
    assert [each["policy"] for each in compared] == ["fleet", "homes"]
    assert compared[0] == report
    assert "learned p95, s" in run("compare", *BOXES, "--policies", "fleet", "--seeds", "0", "--jobs", "2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("stages", "--policies", "lemixx"), 'no row "lemixx": did you mean "lemix"?'),
        (("stages", "--policies", "all,lemix"), 'no row "all": known: '),
        (("simulate", "--policy", "all"), 'no row "all": known: '),
        (("stages", "--models", "gpt-5"), 'no model "gpt-5": did you mean'),
        (("stages", "--conditions", "rain"), 'no condition "rain": known: steady,'),
        (("simulate", "--policy", "flet"), 'no row "flet": did you mean "fleet"?'),
        (("simulate", "--policy", "separate", "--speeds", "1"), "separate needs two boxes"),
        (("compare", "--speeds", "1,0"), "0"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_is_unknown_is_named_with_the_way_out(words: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(cli, ["bench", "fleet", *words])
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def test_every_row_stands_in_the_document_of_policies() -> None:
    from edged.lab.simulator.fleet_runs import ROWS
    from edged.lab.simulator.stages import POLICIES

    section = (Path(__file__).parents[3] / "docs/policies.md").read_text().split("## Placement")[1].split("\n## ")[0]
    assert set(re.findall(r"`([a-z0-9-]+)`", section)) >= {*ROWS, *POLICIES}
