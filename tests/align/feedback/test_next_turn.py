"""The next turn of a conversation tells what the user thought of the answer before it."""

from __future__ import annotations

import pytest

from edged.align.feedback.signals import is_correction, is_rephrase
from edged.store import Store
from edged.store.feedback import get_pairs
from tests.align.feedback.desk import Desk, chat


@pytest.fixture
def desk(tmp_path):
    store = Store(tmp_path / "edged.db")
    yield Desk(store)
    store.close()


def test_a_correction_in_the_next_turn_rejects_the_answer_and_the_accepted_new_one_is_chosen(desk):
    desk.answer("a", "Paris, Texas.", asked="Where is Paris?")
    marked = desk.answer("b", "In France.", asked=chat("Where is Paris?", "Paris, Texas.", "No, I meant the real one."))
    assert marked is not None
    assert marked.pair_ids == ()
    (signal,) = desk.signals("a")
    assert (signal.signal, signal.text) == ("rephrase", "No, I meant the real one.")
    result = desk.report("b", "up")
    assert desk.pairs(result) == [("In France.", "Paris, Texas.", "rephrase", 0.5)]
    (row,) = desk.store.read(lambda db: get_pairs(db, result.pair_ids))
    assert row.messages == tuple(chat("Where is Paris?"))


def test_the_answer_that_ends_a_complaint_is_the_better_one_once_the_chat_goes_on(desk):
    first = ("Where is Paris?", "In France.", "Say that casually, please.")
    desk.answer("a", "In France.", asked="Where is Paris?")
    desk.answer("b", "Over in France!", asked=chat(*first))
    again = desk.answer("c", "Sure!", asked=chat(*first, "Over in France!", "Say that more formally."))
    assert desk.pairs(again) == [], "it was complained about, too"
    result = desk.answer(
        "d", "Two million.", asked=chat(*first, "Over in France!", "Say that more formally.", "Sure!", "How big is it?")
    )
    assert desk.pairs(result) == [("Sure!", "Over in France!", "rephrase", 0.5)]


@pytest.mark.parametrize(
    "said", ["Say that in one sentence.", "Can you put that more politely?", "say it like a friend"]
)
def test_wishes_for_another_manner_are_corrections(said):
    assert is_correction(said)


@pytest.mark.parametrize(
    "said", ["Say that in German?", "Put it in the oven first?", "Can you put that into a table for me?"]
)
def test_wishes_for_something_else_are_none(said):
    assert not is_correction(said)


def test_a_rephrased_question_rejects_the_answer_and_meets_an_accepted_one_of_the_same_prompt(desk):
    desk.answer("a", "liked", asked="How tall is Mont Blanc mountain?")
    desk.report("a", "up")
    desk.answer("b", "Hm.", asked="How tall is Mont Blanc mountain?")
    marked = desk.answer(
        "c",
        "4806 m",
        asked=chat("How tall is Mont Blanc mountain?", "Hm.", "Mont Blanc mountain: what is it, how tall?"),
    )
    assert desk.pairs(marked) == [("liked", "Hm.", "rephrase", 0.5)]


def test_going_on_after_a_regenerated_answer_accepts_the_later_one(desk):
    desk.answer("a", "first try", asked="Tell me a story")
    desk.report("a", "regenerate")
    desk.answer("b", "second try", asked="Tell me a story")
    marked = desk.answer("c", "sure", asked=chat("Tell me a story", "second try", "Great, what happened next?"))
    assert desk.pairs(marked) == [("second try", "first try", "regenerate", 1.0)]
    assert [signal.signal for signal in desk.signals("b")] == ["accepted"]
    assert desk.answer("d", "ok", asked=chat("Tell me a story", "second try", "And who is she?")) is None


@pytest.mark.parametrize(
    ("asked", "user"),
    [
        (chat("Where is Paris?", "In Texas.", "And where is Rome?"), "ada"),
        (chat("Where is Paris?", "In Texas.", "No, I meant the real one."), "bob"),
        (chat("Where is Paris?", "Something else.", "No, I meant the real one."), "ada"),
        (chat("Where is Lyon?", "In Texas.", "No, I meant the real one."), "ada"),
        ([*chat("Where is Paris?", "In Texas.", "No, wrong."), {"role": "assistant", "content": "x"}], "ada"),
        ("No, I meant the real one.", "ada"),
    ],
)
def test_other_next_turns_say_nothing(desk, asked, user):
    desk.answer("a", "In Texas.", asked="Where is Paris?")
    assert desk.answer("b", "ok", asked=asked, user=user) is None
    assert desk.signals("a") == []


def test_the_next_turn_asked_twice_marks_once(desk):
    desk.answer("a", "In Texas.", asked="Where is Paris?")
    again = chat("Where is Paris?", "In Texas. ", "No, I meant the real one.")
    desk.answer("b", "x", asked=again)
    assert desk.answer("c", "y", asked=again).duplicate
    assert len(desk.signals("a")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "No, I meant the other one",
        "that's wrong",
        "That is not what I asked",
        "Wrong!",
        "no",
        "Try again please",
        "shorter, please",
        "Make it shorter",
        "please be more formal",
        "You misunderstood me",
        "not quite",
    ],
)
def test_corrections_are_recognised(text):
    assert is_correction(text)


@pytest.mark.parametrize(
    "text",
    [
        "No problem, thanks!",
        "No thanks",
        "Thanks, what about Rome?",
        "Nothing else",
        "I have another question",
        "More about the second point?",
        "Is that wrong?",
        "Longer trips are nicer, aren't they?",
        "Actually that helps a lot",
        "",
    ],
)
def test_other_messages_are_no_corrections(text):
    assert not is_correction(text)


@pytest.mark.parametrize(
    ("asked", "asks", "same"),
    [
        ("What is the capital of France?", "Which city is France's capital?", True),
        ("What is the capital of France?", "What is the capital of Germany?", False),
        ("How do I boil an egg?", "how do i boil an egg", True),
        ("Why?", "why?", True),
        ("Why?", "Why not?", False),
        ("", "", False),
        ("Tell me about cats", "Tell me about dogs", False),
    ],
)
def test_rephrased_questions_are_recognised_by_their_content_words(asked, asks, same):
    assert is_rephrase(asked, asks) is same
