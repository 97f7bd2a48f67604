"""The benchmarks' shared command line puts defaults where nothing was given and says what is wrong with what was."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.support.command import (
    MODEL,
    PAIRS,
    finish,
    flag,
    markdown,
    names,
    number,
    numbers,
    option,
    parse,
)

ROUNDS = option("--rounds", "measured rounds", 7, 2)


def given(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])


def test_a_quick_run_has_defaults_of_its_own_and_what_is_given_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounds(*arguments: str) -> int:
        given(monkeypatch, *arguments)
        found: int = parse("A benchmark.", ROUNDS, quick="two rounds").rounds
        return found

    assert rounds() == 7
    assert rounds("--quick") == 2
    assert rounds("--quick", "--rounds", "5") == 5


def test_defaults_are_told_by_the_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given(monkeypatch, "--help")
    with pytest.raises(SystemExit):
        parse("A benchmark.", ROUNDS, option("--tokens", "budgets", [8, 4], type=numbers), quick="two rounds")
    told = " ".join(capsys.readouterr().out.split())
    assert "measured rounds (default 7; quick: 2)" in told
    assert "budgets (default 8,4)" in told
    assert "two rounds: a smoke test" in told


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--rounds", "0"), "--rounds: 0 is too little: give more than 0"),
        (("--rounds", "many"), '--rounds: "many" is no whole number'),
        (("--share", "-1"), "--share: -1 is too little: give at least 0"),
        (("--tastes", "a,c"), '--tastes: "c" is unknown: known are a, b'),
        (("--model", "nowhere"), '--model: "nowhere" has no config.json'),
        (("--output", "nowhere/report.json"), 'the folder of "nowhere/report.json" does not exist'),
        (("missing.jsonl",), 'pairs: "missing.jsonl" is not a file'),
    ],
)
def test_an_option_that_cannot_be_is_told_before_anything_is_measured(
    arguments: tuple[str, ...],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text("")
    options = (ROUNDS, option("--share", "of all", 0.0, least=0), option("--tastes", "some", type=names("ab")))
    given(monkeypatch, *(arguments if len(arguments) == 1 else ("pairs.jsonl", *arguments)))
    with pytest.raises(SystemExit, match="2"):
        parse("A benchmark.", PAIRS, MODEL, *options)
    assert problem in capsys.readouterr().err


def test_numbers_may_start_elsewhere() -> None:
    assert number(float)("0.5") == 0.5
    assert number(int, 0)("0") == 0
    assert numbers("3,1") == [3, 1]


def test_a_report_is_printed_as_a_table_or_as_json_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Namespace(json=False, output=tmp_path / "report.json")
    finish(options, {"ms": 1.5}, "\n".join(markdown(("side", "ms"), [("edged", 1.5)])))
    assert capsys.readouterr().out == "| side | ms |\n| --- | --- |\n| edged | 1.5 |\n"
    assert json.loads(options.output.read_text()) == {"ms": 1.5}
    finish(Namespace(json=True, output=None), {"ms": 1.5}, "a table")
    assert json.loads(capsys.readouterr().out) == {"ms": 1.5}


def test_a_flag_is_off_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch)
    assert parse("A benchmark.", flag("--adapter", "with one")).adapter is False
