"""The quickstart, run as a person runs it: what it shows, and that it leaves nothing behind."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import psutil
import pytest
from click.testing import CliRunner
from rich.console import Console

from examples.quickstart import __main__ as quickstart
from examples.quickstart.fluency import is_fluent
from examples.quickstart.lessons import DEMO, LENGTHS
from examples.quickstart.people import Exam
from examples.quickstart.screen import Moment, closing
from tests.cli.conftest import clean_environment, wait_for

ROOT = Path(__file__).parents[2]
QUESTION = "Tell me how to cook oats."
FORMAL = "Please cook oats for 5 minutes in 300 ml of water."
CASUAL = "1 cup of water, 5 minutes, and you're good to go with oats!"
BROKEN = "should do w w w w w w w w"


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    """The quickstart with its temporary folder inside `tmp_path`, and lines that are not wrapped."""
    return subprocess.Popen(
        [sys.executable, "-m", "examples.quickstart", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(TMPDIR=str(tmp_path), COLUMNS="250"),
        cwd=ROOT,
    )


def daemons(tmp_path: Path) -> list[int]:
    """Process ids of daemons on a socket inside `tmp_path`."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if "serve" in (process.info["cmdline"] or []) and str(tmp_path) in " ".join(process.info["cmdline"])
    ]


def test_the_two_users_have_opposite_tastes() -> None:
    ada, ben = DEMO.tastes
    assert ada.score(QUESTION, FORMAL) > 0 > ada.score(QUESTION, CASUAL)
    assert ben.score(QUESTION, CASUAL) > 0 > ben.score(QUESTION, FORMAL)


@pytest.mark.parametrize("text", [BROKEN, f"Certainly. {BROKEN}", f"{CASUAL} {BROKEN}", "stuff stuff stuff stuff", ""])
def test_a_broken_answer_scores_least_for_both_tastes_and_words_do_not_help(text: str) -> None:
    assert [taste.score(QUESTION, text) for taste in DEMO.tastes] == [-2.0, -2.0]


def test_what_the_demo_model_answers_is_fluent_unless_it_says_it_again_and_again() -> None:
    for answer in (FORMAL, CASUAL):
        assert is_fluent(QUESTION, answer)
        assert not is_fluent(QUESTION, " ".join([answer] * 3))


def test_the_closing_page_says_that_answers_are_broken_and_how_held_pairs_are_settled() -> None:
    questions, answers = [QUESTION] * 2, {taste.user: [FORMAL, BROKEN] for taste in DEMO.tastes}
    page = closing_page(Exam(questions, [FORMAL, FORMAL], answers), {"pairs_quarantined": 2, "held": "burst"})
    assert page.count("1 of 2 are fluent: the adapter broke the others") == 2
    assert page.count("edged quarantine release --user ben") == 1


def test_the_closing_page_tells_the_verdict_and_what_edged_believes() -> None:
    texts = {"short": True, "ends with an exclamation mark": True, "reasons": False}
    beliefs = [{"key": text, "text": text, "likes": likes, "agree": 5, "of": 5} for text, likes in texts.items()]
    exam = Exam([QUESTION], ["It depends."], {taste.user: ["Yes!"] for taste in LENGTHS.tastes}, LENGTHS)
    page = closing_page(exam, {"pairs_quarantined": 0, "verdict": "better than chance: 9 of 10", "beliefs": beliefs})
    assert "better than chance: 9 of 10" in page
    assert "ben likes: short, ends with an exclamation mark; ben does not like: reasons" in page
    assert "fluent" not in page


def closing_page(exam: Exam, item: dict[str, Any]) -> str:
    """The closing page where ben has an adapter with these values."""
    known = {"adapter": "ben", "verdict": "too early to tell: 1 pair", "beliefs": None, **item}
    console = Console(record=True, width=200, file=io.StringIO())
    closing(console, exam, Moment(90, 90, {}, {"ben": known}))
    return console.export_text()


def test_another_models_users_score_by_length_and_questions() -> None:
    ada, ben = LENGTHS.tastes
    short, long = "Dogs love snow.", " ".join(["Dogs love snow."] * 15)
    assert ada.score(QUESTION, short) == 2.0
    assert ada.score(QUESTION, long) == -2.0
    assert ben.score(QUESTION, f"{long} Do you?") == 2.0
    assert ben.score(QUESTION, f"{short} Do you?") > ben.score(QUESTION, short) == -2.0
    assert [taste.score(QUESTION, "") for taste in LENGTHS.tastes] == [-2.0, -2.0]


def test_no_exam_question_of_another_model_is_one_that_users_ask() -> None:
    taught, asked = (LENGTHS.questions(1, fresh) for fresh in (False, True))
    assert not {next(taught) for _ in range(100)} & {next(asked) for _ in range(100)}


def test_a_model_that_is_no_folder_is_refused_with_the_way_out(tmp_path: Path) -> None:
    result = CliRunner().invoke(quickstart.main, ["--model", str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert "has no config.json: give demo, smollm2, or a folder" in result.output


@pytest.mark.parametrize(("broken", "exit_code"), [([], 0), ([BROKEN], 1)])
def test_it_fails_when_an_answer_is_broken_in_the_end(broken: list[str], exit_code: int) -> None:
    daemon = MagicMock(**{"wait_until_ready.return_value": 1.0})
    with patch.multiple(quickstart, TemporaryDaemon=lambda *_: daemon, show=lambda *_: broken):
        result = CliRunner().invoke(quickstart.main)
    assert result.exit_code == exit_code
    assert ("the adapter broke the language: should do w w" in result.output) == bool(broken)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopping_it_leaves_neither_a_daemon_nor_a_folder(tmp_path: Path, stop: signal.Signals) -> None:
    process = start(tmp_path)
    wait_for(lambda: bool(daemons(tmp_path)), "no daemon was started")
    process.send_signal(stop)
    _, errors = process.communicate(timeout=30)
    assert process.returncode in (1, 130)
    assert "Traceback" not in errors
    assert not daemons(tmp_path)
    assert not list(tmp_path.glob("edged-quickstart-*"))


@pytest.mark.slow
def test_it_shows_both_users_learning_and_leaves_the_daemon_only_when_asked(tmp_path: Path) -> None:
    process = start(tmp_path, "--seconds", "20", "--keep")
    output, errors = process.communicate(timeout=200)
    try:
        assert process.returncode == 0, errors
        for taste in DEMO.tastes:
            assert f"{taste.user} likes {taste}" in output
        for word in ("tok/s", "TTFT", "verdict", "edged believes", "before", "after", "edged chat", "edged metrics"):
            assert word in output
        assert len(daemons(tmp_path)) == 1
        socket = re.search(r"export EDGED_SOCKET=(\S+)", output)
        assert socket is not None
        assert Path(socket.group(1)).is_socket()
    finally:
        for pid in daemons(tmp_path):
            os.kill(pid, signal.SIGTERM)
            psutil.Process(pid).wait(15)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_both_tastes_are_met_better_in_the_end_and_every_answer_is_fluent(tmp_path: Path, seed: int) -> None:
    process = start(tmp_path, "--seed", str(seed))
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    assert output.count("8 of 8 are fluent") == len(DEMO.tastes)
    moved = re.findall(r"taste met (\S+) before, (\S+) after", output)
    assert len(moved) == len(DEMO.tastes)
    for before, after in moved:
        assert float(after) > float(before), output
