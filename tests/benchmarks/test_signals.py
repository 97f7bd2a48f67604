"""The simulated people of benchmarks/signals.py judge, edit and ask as its table says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.signals import means, of_missing, other, table
from benchmarks.support.person import BaseModel, Pick, repetition
from benchmarks.support.rivals import logit_biases
from benchmarks.support.tastes import ANYTHING, COOKING, DEMO, EDITS, ELSEWHERE, ENGLISH, FACTS, of_group, questions
from edged.models import find_model
from edged.settings.load import ModelSettings
from tests.benchmarks.test_commands import run

LIKED = {
    "bang": ("Sure!", "Certainly."),
    "first_person": ("I recommend tea.", "In winter, tea."),
    "please": ("Please use 2 cups.", "Use 2 cups."),
    "metric": ("It is 3 km away.", "It is 2 miles away."),
    "formal": ("Certainly. It is advisable to rest.", "Yeah, just rest!"),
    "short": ("Boil it for nine minutes.", "Boil it " + "and wait " * 10),
    "one_sentence": ("At 3.5 km, turn left.", "Turn left. Then walk."),
    "positive": ("A great idea.", "An idea."),
    "no_you": ("One may rest.", "Rest if you're tired."),
    "digits": ("Wait 9 minutes.", "Wait nine minutes."),
    "long_words": ("Photosynthesis transforms sunlight.", "It is how a leaf eats."),
    "hedging": ("It might rain.", "It will rain."),
}


@pytest.mark.parametrize(("model", "name"), [(known, name) for known in (DEMO, ENGLISH) for name in known])
def test_a_taste_tells_a_liked_answer_from_another(model: dict[str, Any], name: str) -> None:
    liked, other = LIKED[name]
    assert model[name].rule(liked)
    assert not model[name].rule(other)
    assert model[name].written


def test_half_of_the_tastes_do_not_show_in_single_words() -> None:
    for known in (DEMO, ENGLISH):
        assert len(known) == 8
        assert sum(taste.in_words for taste in known.values()) == 4


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_shows_once_it_is_made_and_leaves_the_rest(name: str) -> None:
    edit, text = EDITS[name], "You may boil Eggs. You like it."
    edited = edit.change(text)
    assert not edit.shown(text)
    assert edit.shown(edited)
    assert edit.change(edited) == edited
    if name in ("salutation", "signature"):
        assert edit.undo(edited) == text


@pytest.mark.parametrize("demo", [True, False])
def test_judging_questions_differ_from_teaching_ones_and_each_topic_has_enough(demo: bool) -> None:
    teaching, judging = questions(demo, seed=3)
    assert not {*teaching} & {*judging}
    assert len({*teaching}) == len(teaching)
    assert len({*judging}) == len(judging)
    for group, taught, judged in ((ANYTHING, 40, 6 * 24), (COOKING, 20, 2 * 24), (ELSEWHERE, 20, 2 * 24)):
        assert len(list(of_group(teaching, group))) >= taught
        assert len(list(of_group(judging, group))) >= judged
    assert questions(demo, seed=3) == (teaching, judging) != questions(demo, seed=4)


def test_facts_are_forty_with_answers_of_one_word() -> None:
    assert len({question for question, _ in FACTS}) == 40
    assert all(len(answer.split()) == 1 for _, answer in FACTS)


def test_repetition_is_the_share_of_threes_that_came_before() -> None:
    assert repetition(["a b c d e"]) == 0.0
    assert repetition(["a b c A B C"]) == pytest.approx(1 / 4)


def test_biases_are_for_what_chosen_answers_have_more_often() -> None:
    judge = BaseModel(find_model(ModelSettings(path="demo"))[0])
    picks = [Pick(f"How {at}?", "Sure, rest!", ("Well, rest.", "Well, do rest.")) for at in range(4)]
    biases = {judge.tokenizer.decode([int(token)]).strip(): bias for token, bias in logit_biases(judge, picks).items()}
    assert biases["!"] > 0 > biases["."]


def test_what_one_row_alone_measures_is_told() -> None:
    assert "system prompt 0.50; in context 0.25" in other(
        moment(0.6, rivals={"system prompt": 0.5, "in context": 0.25})
    )
    assert "median 0.40 s" in other(moment(0.6, clicks_s=[0.3, 0.4, 0.9]))


def moment(settled: float, **more: Any) -> dict[str, Any]:
    figures = {"signals": 20, "group": ANYTHING, "base": 0.2, "settled": settled, "unchosen": 0.2, "at_once": 0.6}
    language = {"kl_nats": 0.1, "neutral_nll_change": None, "repetition": [0.0, 0.01], "chosen": 1.0, "seconds": 9.0}
    return {**figures, **language, **more}


def test_gains_are_told_of_what_the_base_misses_over_tastes_and_seeds() -> None:
    runs = [
        {"row": "picks", "taste": taste, "seed": 0, "moments": [moment(settled)]}
        for taste, settled in (("bang", 0.6), ("short", 1.0))
    ]
    assert of_missing(moment(0.6), "settled") == pytest.approx(0.5)
    assert of_missing(moment(0.6, base=1.0), "settled") is None
    (mean,) = means(runs)
    assert mean["settled"] == (pytest.approx(0.75), pytest.approx(0.25))
    assert mean["at_once"] == (pytest.approx(0.5), pytest.approx(0.0))
    told = table(
        {"runs": [*runs, {"row": "edits", "taste": "x", "seed": 1, "moments": [], "error": "no"}], "means": [mean]}
    )
    assert "| picks | 20 | 2 | 0.50 ± 0.00 | 0.75 ± 0.25 | 0.00 ± 0.00 |" in told
    assert told.endswith("edits, x, seed 1: no")


@pytest.mark.slow
def test_a_person_picks_answers_of_a_daemon(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = run("signals", "--quick", "--rows", "picks", "--tastes", "bang", "--output", str(file), timeout=280)
    assert done.returncode == 0, done.stderr
    ((figures,),) = [each["moments"] for each in json.loads(file.read_text())["runs"]]
    assert figures["signals"] == 2
    assert 0.0 <= figures["settled"] <= 1.0
    # An adapter that learned hardly anything is as the base, in transformers as in the daemon.
    assert abs(figures["kl_nats"]) < 0.05
