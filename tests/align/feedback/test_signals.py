"""What users do becomes preference pairs by the documented rules, once, and bad reports are refused."""

from __future__ import annotations

import pytest

from edged.align.feedback.signals import SIGNALS, FeedbackError
from edged.store import Store
from edged.store.feedback import get_pairs, signals_of
from tests.align.feedback.desk import Desk, chat, weighing


@pytest.fixture
def desk(tmp_path):
    store = Store(tmp_path / "edged.db")
    yield Desk(store)
    store.close()


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


def test_unrated_answers_do_not_hide_a_rated_one_that_is_older(desk):
    desk.answer("old", "old")
    desk.report("old", "down")
    for number in range(40):
        desk.answer(f"c{number}", f"answer {number}")
    assert desk.pairs(desk.report("c39", "up")) == [("answer 39", "old", "thumbs", 1.0)]


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
        (("two", "up"), "bad_choice", "choice is missing.*has choices 0, 1"),
        (("two", "up", 2), "bad_choice", "choice 2 does not exist.*has choices 0, 1"),
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


def test_each_source_weighs_what_the_settings_say(desk):
    desk.settings = weighing(chosen=0.9, edit=0.8, thumbs=0.7, skip=0.1)
    desk.answer("a", "One.", "Two.")
    assert [weight for *_, weight in desk.pairs(desk.report("a", "chosen", 0))] == [0.9]
    assert [weight for *_, weight in desk.pairs(desk.report("a", "edit", 0, text="Won."))] == [0.8]
    desk.answer("b", "Three.")
    desk.answer("c", "Four.")
    desk.report("b", "skip")
    sources = {(source, weight) for *_, source, weight in desk.pairs(desk.report("c", "up"))}
    assert ("skip", 0.1) in sources, "the lower of both"


def test_what_weighs_nothing_is_stored_and_makes_no_pair(desk):
    desk.settings = weighing(edit=0.0, pair=0.0, chosen=0.0)
    desk.answer("a", "One.", "Two.")
    for result in (
        desk.report("a", "edit", 0, text="Won."),
        desk.report("a", "chosen", 0),
        desk.pair("ada", "good", "bad", prompt="Well?"),
    ):
        assert result.pair_ids == ()
        assert "0" in result.reason
    assert desk.pairs() == []
    assert {signal.signal for signal in desk.signals("a")} == {"edit", "chosen"}


def test_an_explicit_pair_weighs_its_own_times_the_setting(desk):
    desk.settings = weighing(pair=0.5)
    (pair,) = desk.pairs(desk.pair("ada", "good", "bad", prompt="Well?", weight=0.5))
    assert pair[-1] == 0.25


def test_a_choice_is_direct_where_the_users_account_or_the_one_that_taught_first_made_it(desk):
    desk.answer("a", "One.", "Two.")
    desk.answer("b", "Three.", "Four.")
    desk.answer("c", "Five.", "Six.")
    for name, account in (("a", "app"), ("b", "other"), ("c", "ada")):
        desk.report(name, "chosen", 0, account=account)
    desk.pair("ada", "good", "bad", prompt="Well?", account="ada")
    found = desk.store.read(lambda db: get_pairs(db, [1, 2, 3, 4]))
    assert [(pair.account, pair.direct) for pair in found] == [
        ("app", True),
        ("other", False),
        ("ada", True),
        ("ada", False),
    ]


# -- however often -----------------------------------------------------------------------------------------------------


def test_what_is_reported_again_and_again_is_one_row_and_the_latest_counts(desk):
    desk.answer("c", "an answer", prompt="hi")
    desk.answer("other", "another answer", prompt="hi")
    first = desk.report("c", "dwell", seconds=0.5)
    ids = {desk.report("c", "dwell", seconds=1.0 + i).feedback_id for i in range(50)}
    ids |= {desk.report("c", ("up", "down")[i % 2]).feedback_id for i in range(100)}
    assert first.feedback_id in ids
    assert len(ids) == 3
    signals = desk.store.read(lambda db: signals_of(db, ["c"]))
    assert [(signal.signal, signal.seconds) for signal in signals] == [("dwell", 50.0), ("up", None), ("down", None)]
    pair = desk.report("other", "up")
    assert [pair[:2] for pair in desk.pairs(pair)] == [("another answer", "an answer")], "down came last"


def test_what_taught_something_stays_and_an_answer_takes_so_many_signals(desk):
    desk.answer("c", "an answer")
    taught = [desk.report("c", "edit", text=f"a better answer {i}") for i in range(64)]
    assert all(len(result.pair_ids) == 1 for result in taught)
    with pytest.raises(
        FeedbackError, match='choice 0 of completion "c" has 64 signals of this account: no more are taken'
    ):
        desk.report("c", "edit", text="the best answer")
    assert len(desk.store.read(lambda db: signals_of(db, ["c"]))) == 64
