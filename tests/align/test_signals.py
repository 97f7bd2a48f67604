"""What users do becomes preference pairs by the documented rules, once, and bad reports are refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from edged.align.next_turn import is_correction, is_rephrase
from edged.align.signals import SIGNALS, Feedback, FeedbackError, note_next_turn, record_pair, record_signal
from edged.store import Store
from edged.store.completions import insert_completion
from edged.store.feedback import get_pairs, pairs_of, signals_of
from tests.store.rows import completion

NOW = datetime(2025, 1, 31, 12, tzinfo=UTC)


class Desk:
    """Completions and feedback of one store, in short calls."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.moment = NOW

    def answer(self, name, *texts, **more):
        row = completion(name, *texts, **more)
        self.store.write(lambda db: insert_completion(db, row, 1000)).result()
        return self.store.write(lambda db: note_next_turn(db, name, self.tick())).result()

    def tick(self):
        self.moment += timedelta(seconds=1)
        return self.moment

    def report(self, name, signal, choice=None, text=None, seconds=None, user="ada"):
        feedback = Feedback(user, name, signal, choice, text, seconds)
        return self.store.write(lambda db: record_signal(db, feedback, self.tick())).result()

    def pair(self, *args, **more):
        return self.store.write(lambda db: record_pair(db, *args, now=self.tick(), **more)).result()

    def pairs(self, result=None):
        """(chosen, rejected, source, weight) of the result's pairs, or of all."""
        if result is None:
            rows = self.store.read(lambda db: list(pairs_of(db)))
        else:
            rows = self.store.read(lambda db: get_pairs(db, result.pair_ids))
        return [(row.chosen.text, row.rejected.text, row.source, row.weight) for row in rows]

    def signals(self, name):
        return self.store.read(lambda db: signals_of(db, name))


@pytest.fixture
def desk(tmp_path):
    store = Store(tmp_path / "edged.db")
    yield Desk(store)
    store.close()


def chat(*turns):
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 5, turns, strict=False)]


# -- choices and edits -------------------------------------------------------------------------------------------------


def test_a_choice_between_candidates_prefers_it_to_every_other(desk):
    desk.answer("c", "one", "two", "three")
    result = desk.report("c", "chosen", 1)
    assert desk.pairs(result) == [("two", "one", "chosen", 1.0), ("two", "three", "chosen", 1.0)]
    assert result.reason == ""
    assert result.feedback_id.startswith("fb-")


def test_a_pair_carries_the_tokens_that_edged_generated_and_where_they_stand(desk):
    desk.answer("c", "good", "bad", prompt_ids=(7, 8, 9))
    result = desk.report("c", "chosen", 0)
    (row,) = desk.store.read(lambda db: get_pairs(db, result.pair_ids))
    assert row.prompt_ids == (7, 8, 9)
    assert row.messages == ({"role": "user", "content": "How are you?"},)
    assert (row.chosen.token_ids, row.chosen.completion_id, row.chosen.choice) == (tuple(b"good"), "c", 0)
    assert (row.rejected.token_ids, row.rejected.completion_id, row.rejected.choice) == (tuple(b"bad"), "c", 1)
    assert (row.adapter, row.state, row.signal_id) == ("ada", "queued", result.feedback_id)


def test_equal_or_empty_candidates_make_no_pair_and_the_reason_says_so(desk):
    desk.answer("c", "same", "same ", "")
    result = desk.report("c", "chosen", 0)
    assert result.pair_ids == ()
    assert "equal or empty" in result.reason


def test_an_edit_prefers_the_edited_text_to_the_original(desk):
    desk.answer("c", "Hello there, my dear friend.")
    result = desk.report("c", "edit", text="Hi.")
    assert desk.pairs(result) == [("Hi.", "Hello there, my dear friend.", "edit", 1.0)]
    (row,) = desk.store.read(lambda db: get_pairs(db, result.pair_ids))
    assert row.chosen.token_ids is None
    assert row.chosen.completion_id is None


# -- scalar ratings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("good", "bad", "source", "weight"),
    [
        ("up", "down", "thumbs", 1.0),
        ("chosen", "rejected", "thumbs", 1.0),
        ("up", "regenerate", "regenerate", 1.0),
        ("chosen", "regenerate", "regenerate", 1.0),
        ("up", "skip", "skip", 0.5),
        ("dwell", "down", "dwell", 0.5),
        ("dwell", "regenerate", "regenerate", 0.5),
        ("dwell", "skip", "skip", 0.5),
    ],
)
@pytest.mark.parametrize("good_first", [True, False])
def test_opposite_ratings_of_one_prompt_make_a_pair_in_either_order(desk, good, bad, source, weight, good_first):
    desk.answer("a", "bad answer")
    desk.answer("b", "good answer")
    reports = [("b", good), ("a", bad)] if good_first else [("a", bad), ("b", good)]
    first, second = (desk.report(name, signal, seconds=60 if signal == "dwell" else None) for name, signal in reports)
    assert first.pair_ids == ()
    assert "waits" in first.reason
    assert desk.pairs(second) == [("good answer", "bad answer", source, weight)]
    for name in ("a", "b"):
        (signal,) = desk.signals(name)
        assert signal.pair_ids == second.pair_ids
        assert signal.reason == ""


def test_ratings_of_candidates_of_one_completion_make_a_pair(desk):
    desk.answer("c", "one", "two")
    desk.report("c", "down", 0)
    assert desk.pairs(desk.report("c", "up", 1)) == [("two", "one", "thumbs", 1.0)]


def test_ratings_of_other_prompts_or_other_users_do_not_meet(desk):
    desk.answer("a", "one")
    desk.answer("b", "two", asked="Else?")
    desk.answer("c", "three", user="bob")
    desk.answer("d", "four", user="ada", adapter="team")
    desk.report("a", "up")
    for name, user in (("b", "ada"), ("c", "bob"), ("d", "ada")):
        assert desk.report(name, "down", user=user).pair_ids == ()


def test_a_choice_also_beats_an_answer_that_was_regenerated_before(desk):
    desk.answer("a", "old")
    desk.report("a", "regenerate")
    desk.answer("b", "one", "two")
    result = desk.report("b", "chosen", 0)
    assert desk.pairs(result) == [("one", "two", "chosen", 1.0), ("one", "old", "regenerate", 1.0)]


def test_each_regenerated_answer_loses_to_the_accepted_one(desk):
    for name in "abc":
        desk.answer(name, f"answer {name}")
    desk.report("a", "regenerate")
    desk.report("b", "regenerate")
    result = desk.report("c", "up")
    assert sorted(desk.pairs(result)) == [
        ("answer c", "answer a", "regenerate", 1.0),
        ("answer c", "answer b", "regenerate", 1.0),
    ]


def test_one_rating_makes_at_most_four_pairs_with_the_newest(desk):
    for number in range(6):
        desk.answer(f"c{number}", f"answer {number}")
        desk.report(f"c{number}", "down")
    desk.answer("best", "best")
    assert [rejected for _, rejected, _, _ in desk.pairs(desk.report("best", "up"))] == [
        f"answer {number}" for number in (5, 4, 3, 2)
    ]


def test_the_latest_rating_of_an_answer_counts(desk):
    desk.answer("a", "one")
    desk.answer("b", "two")
    desk.report("a", "up")
    desk.report("a", "down")
    assert desk.report("b", "down").pair_ids == ()
    assert desk.pairs(desk.report("b", "up")) == [("two", "one", "thumbs", 1.0)]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(6.0, ("long", "other")), (5.0, ("long", "other")), (0.5, ("other", "long")), (3.0, None)],
)
def test_dwelling_counts_by_the_answers_reading_time(desk, seconds, expected):
    words = "word " * 40  # ten seconds of reading
    desk.answer("a", words)
    desk.answer("b", "other")
    desk.answer("c", "third")
    desk.report("b", "down")
    desk.report("c", "up")
    result = desk.report("a", "dwell", seconds=seconds)
    names = {words: "long", "other": "other", "third": "other"}
    found = [(names[chosen], names[rejected]) for chosen, rejected, _, _ in desk.pairs(result)]
    assert found == ([expected] if expected else [])
    if not expected:
        assert result.reason == "3 s over 40 words say nothing either way"


def test_answers_with_equal_texts_make_no_pair(desk):
    desk.answer("a", "same")
    desk.answer("b", "same")
    desk.report("a", "up")
    assert desk.report("b", "down").pair_ids == ()


# -- once only ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signal", "more"),
    [("chosen", {}), ("edit", {"text": "new"}), ("up", {}), ("dwell", {"seconds": 9.0}), ("regenerate", {})],
)
def test_the_same_report_twice_is_one(desk, signal, more):
    desk.answer("c", "one", "two")
    desk.report("c", "down", 1)
    first = desk.report("c", signal, 0, **more)
    again = desk.report("c", signal, 0, **more)
    assert again.feedback_id == first.feedback_id
    assert again.pair_ids == first.pair_ids
    assert (first.duplicate, again.duplicate) == (False, True)
    assert len(desk.signals("c")) == 2


def test_a_repeated_report_names_the_pairs_that_arose_since(desk):
    desk.answer("a", "one")
    desk.answer("b", "two")
    assert desk.report("a", "up").pair_ids == ()
    made = desk.report("b", "down")
    assert desk.report("a", "up").pair_ids == made.pair_ids


def test_a_rating_may_be_given_again_after_it_was_changed(desk):
    desk.answer("a", "one")
    for signal in ("up", "down", "up"):
        assert not desk.report("a", signal).duplicate
    assert desk.report("a", "up").duplicate


def test_two_answers_make_a_pair_only_once_however_often_they_are_rated(desk):
    desk.answer("c", "one", "two")
    assert len(desk.report("c", "chosen", 0).pair_ids) == 1
    assert desk.report("c", "down", 1).pair_ids == ()
    assert desk.report("c", "up", 0).pair_ids == ()
    assert desk.pairs() == [("one", "two", "chosen", 1.0)]


# -- explicit pairs ----------------------------------------------------------------------------------------------------


def test_an_explicit_pair_is_queued_for_its_user(desk):
    result = desk.pair("ada", "yes", "no", messages=chat("Well?"))
    assert desk.pairs(result) == [("yes", "no", "pair", 1.0)]
    (row,) = desk.store.read(lambda db: get_pairs(db, result.pair_ids))
    assert (row.adapter, row.messages, row.prompt, row.prompt_ids) == ("ada", tuple(chat("Well?")), None, None)
    other = desk.pair("ada", "yes", "no", prompt="Well? ")
    assert desk.store.read(lambda db: get_pairs(db, other.pair_ids))[0].prompt == "Well? "


def test_an_explicit_pair_counts_again_only_after_it_was_trained_on(desk):
    first = desk.pair("ada", "yes", "no", prompt="Well?")
    again = desk.pair("ada", "yes", "no", prompt="Well?")
    assert (again.feedback_id, again.pair_ids, again.duplicate) == (first.feedback_id, first.pair_ids, True)
    for state, duplicate in (("held_out", True), ("trained", False)):
        desk.store.write(lambda db, s=state: db.execute("UPDATE pairs SET state = ?", [s])).result()
        assert desk.pair("ada", "yes", "no", prompt="Well?").duplicate is duplicate
    assert not desk.pair("bob", "yes", "no", prompt="Well?").duplicate
    assert not desk.pair("ada", "no", "yes", prompt="Well?").duplicate


@pytest.mark.parametrize(
    ("chosen", "rejected", "more", "kind"),
    [
        ("same", " same\n", {"prompt": "Well?"}, "equal_sides"),
        ("", "no", {"prompt": "Well?"}, "empty_side"),
        ("yes", " \n", {"prompt": "Well?"}, "empty_side"),
        ("yes", "no", {"prompt": ""}, "empty_side"),
        ("yes", "no", {"messages": []}, "empty_side"),
        ("yes", "no", {}, "empty_side"),
    ],
)
def test_an_explicit_pair_that_teaches_nothing_is_refused(desk, chosen, rejected, more, kind):
    with pytest.raises(FeedbackError) as error:
        desk.pair("ada", chosen, rejected, **more)
    assert error.value.kind == kind
    assert desk.pairs() == []


@pytest.mark.parametrize("user", [None, ""])
def test_an_explicit_pair_without_a_user_is_refused(desk, user):
    with pytest.raises(FeedbackError, match="names no user") as error:
        desk.pair(user, "yes", "no", prompt="Well?")
    assert error.value.kind == "wrong_user"


# -- bad reports -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("report", "kind", "message"),
    [
        (("nowhere", "up"), "unknown_completion", '"nowhere" is not known'),
        (("two", "up"), "bad_choice", "choice is missing.*has 0, 1"),
        (("two", "up", 2), "bad_choice", "choice 2 does not exist.*has 0, 1"),
        (("two", "up", -1), "bad_choice", "choice -1 does not exist"),
        (("one", "like"), "bad_signal", '"like" is not known: use one of chosen, '),
        (("one", "rephrase"), "bad_signal", '"rephrase" is not known'),
        (("one", "edit"), "bad_signal", "needs the edited answer"),
        (("one", "dwell"), "bad_signal", "needs `seconds`"),
        (("one", "dwell", 0, None, -1.0), "bad_signal", "seconds = -1.0"),
        (("one", "dwell", 0, None, float("nan")), "bad_signal", "seconds = nan"),
        (("one", "edit", 0, "an answer "), "equal_sides", "are equal"),
        (("one", "edit", 0, " "), "empty_side", "chosen answer is empty"),
        (("empty", "edit", 0, "new"), "empty_side", "rejected answer is empty"),
        (("empty", "chosen"), "empty_side", "chosen answer is empty"),
        (("nobody", "up", 0, None, None, None), "wrong_user", "without a user"),
        (("one", "up", 0, None, None, "bob"), "wrong_user", 'not one of user "bob"'),
    ],
)
def test_a_bad_report_is_refused_with_its_kind_and_leaves_nothing(desk, report, kind, message):
    desk.answer("one", "an answer")
    desk.answer("two", "a", "b")
    desk.answer("empty", "")
    desk.answer("nobody", "x", user=None)
    with pytest.raises(FeedbackError, match=message) as error:
        desk.report(*report)
    assert error.value.kind == kind
    assert desk.pairs() == []
    assert desk.store.read(lambda db: db.execute("SELECT count(*) FROM signals").fetchone()) == (0,)


@pytest.mark.parametrize("signal", SIGNALS)
def test_every_signal_is_taken(desk, signal):
    desk.answer("c", "an answer")
    assert not desk.report("c", signal, text="better", seconds=3.0).duplicate


def test_the_user_may_be_left_to_the_completion_or_be_the_adapter(desk):
    desk.answer("c", "one", "two", user="ada", adapter="team")
    assert not desk.report("c", "up", 0, user=None).duplicate
    result = desk.report("c", "down", 1, user="team")
    assert desk.store.read(lambda db: get_pairs(db, result.pair_ids))[0].adapter == "team"


# -- the next turn -----------------------------------------------------------------------------------------------------


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
