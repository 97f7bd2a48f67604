"""A rating without an opposite one is a row of its own, once, until a pair with its answer takes its place."""

from __future__ import annotations

import pytest

from edged.align.feedback.pair import PairRetired
from edged.align.feedback.signals import FeedbackError
from edged.store import Store, feedback, quarantine
from edged.store.base_models import serve_base
from edged.store.jobs import jobs
from edged.store.jobs.jobs import JobRow
from tests.align.feedback.desk import Desk, chat, weighing
from tests.align.test_journal import append


@pytest.fixture
def desk(tmp_path):
    store = Store(tmp_path / "edged.db")
    desk = Desk(store)
    desk.unpaired, desk.account = "apo", "ada"
    yield desk
    store.close()


def states(desk):
    return [row.state for row in desk.store.read(lambda db: feedback.get_pairs(db, feedback.pair_ids_of(db)))]


def resumed(desk):
    return list(desk.store.read(feedback.open_pairs))


@pytest.mark.parametrize(
    ("signal", "sides", "source", "weight"),
    [
        ("up", ("hello", ""), "thumbs", 1.0),
        ("chosen", ("hello", ""), "thumbs", 1.0),
        ("down", ("", "hello"), "thumbs", 1.0),
        ("rejected", ("", "hello"), "thumbs", 1.0),
        ("regenerate", ("", "hello"), "regenerate", 1.0),
    ],
)
def test_a_rating_by_itself_is_a_row_with_one_answer_and_its_tokens(desk, signal, sides, source, weight):
    desk.answer("c", "hello", prompt_ids=(7, 8))
    result = desk.report("c", signal)
    assert desk.pairs(result) == [(*sides, source, weight)]
    assert result.reason.startswith("learned as a single rating; waits for an answer to the same prompt")
    (row,) = desk.store.read(lambda db: feedback.get_pairs(db, result.pair_ids))
    assert (row.prompt_ids, row.state, row.direct) == ((7, 8), "queued", False)
    assert (row.chosen.token_ids or row.rejected.token_ids) == tuple(b"hello")


def test_no_feedback_teaches_a_checkpoint_and_each_says_so(desk):
    job = JobRow("job", "2025", "ada", "base", "tiny", "", "ada", "dpo", {}, 1, "file", {}, "running")
    desk.store.write(lambda db: jobs.insert_job(db, job)).result()
    desk.store.write(lambda db: jobs.keep_checkpoint(db, "2025", "job", 2, "ada@2", True)).result()
    about = {"user": "ada", "adapter": "ada@2"}
    desk.answer("a", "one", "two", asked="How are you?", **about)
    desk.answer("b", "three", asked="How are you?", **about)
    turn = desk.answer("c", "four", asked=chat("How are you?", "three", "No, I meant the weather."), **about)
    told = [turn, desk.pair("ada@2", "good", "bad", prompt="q"), desk.report("a", "chosen", 0), desk.report("b", "up")]
    told += [desk.report("b", "down"), desk.report("a", "edit", 0, "five"), desk.report("a", "chosen", 0)]
    assert [result.duplicate for result in told] == [False] * 6 + [True]
    assert {(result.pair_ids, result.reason) for result in told} == {
        ((), "ada@2 is a checkpoint of a fine-tuning job, which stays as it is: no feedback teaches it")
    }
    assert desk.pairs() == []


def test_nothing_is_learned_of_it_where_it_weighs_nothing_or_says_nothing(desk):
    desk.answer("c", "hello"), desk.answer("e", " ")
    assert not desk.report("e", "up").pair_ids
    assert not desk.report("c", "dwell", seconds=60).pair_ids
    assert not desk.report("c", "skip").pair_ids
    desk.settings = weighing(thumbs=0.0)
    assert not desk.report("c", "up").pair_ids


def test_where_ratings_are_not_learned_one_is_kept_until_they_are(desk):
    desk.unpaired = "off"
    desk.answer("a", "one"), desk.answer("b", "two")
    kept = desk.report("a", "up")
    assert desk.pairs(kept) == [("one", "", "thumbs", 1.0)]
    assert kept.reason == "kept as a single rating; waits for an answer to the same prompt with the opposite rating"
    assert desk.report("b", "down").dropped == kept.pair_ids, "a pair has its place"


def test_ratings_of_an_account_that_does_not_teach_wait_for_an_opposite_one(desk):
    desk.answer("a", "one"), desk.answer("b", "two"), desk.answer("c", "three")
    assert desk.report("a", "down", account="kitchen").pair_ids, "the first that teaches"
    foreign = desk.report("b", "down", account="eve")
    assert (foreign.pair_ids, foreign.duplicate) == ((), False)
    assert foreign.reason.endswith(
        "that ada, an account that [access] names it for, or who taught the adapter first, gave"
    )
    assert desk.report("c", "down").pair_ids
    again = desk.report("b", "down")
    assert again.pair_ids, "what a stranger said before does not stand in its way"
    assert not again.duplicate
    assert desk.report("b", "down").duplicate


def test_a_pair_of_an_account_that_does_not_teach_leaves_the_ratings_of_those_who_do(desk):
    desk.answer("a", "one"), desk.answer("b", "two")
    rating = desk.report("a", "up").pair_ids[0]
    pair = desk.report("b", "down", account="eve")
    assert (len(pair.pair_ids), pair.dropped) == (1, ())
    assert [row.id for row in desk.store.read(lambda db: feedback.get_pairs(db, [rating])) if row.state == "queued"]


def test_the_owner_of_a_job_teaches_the_adapter_that_it_makes(desk):
    desk.account = None
    job = JobRow("job-1", "2026-01-01T00:00:00.000Z", "ann", "base", "m", "", "ada", "dpo", {}, 1, "file-1", {})
    desk.store.write(lambda db: jobs.insert_job(db, job)).result()
    desk.answer("a", "one"), desk.answer("b", "two")
    assert not desk.report("a", "down", account="kitchen").pair_ids
    assert desk.report("b", "down", account="ann").pair_ids


@pytest.mark.parametrize("good_first", [True, False])
@pytest.mark.parametrize("state", ["queued", "trained", "held_out", "quarantined"])
def test_the_pair_wins_wherever_the_rating_had_come_to(desk, state, good_first):
    desk.answer("a", "one"), desk.answer("b", "two")
    reports = [("a", "up"), ("b", "down")] if good_first else [("b", "down"), ("a", "up")]
    rating = desk.report(*reports[0]).pair_ids[0]
    append(desk.store, PairRetired(rating, "ada", state, 1, int(state == "trained"), "burst: x"))
    result = desk.report(*reports[1])
    assert desk.pairs(result) == [("one", "two", "thumbs", 1.0)]
    assert result.dropped == (rating,)
    assert states(desk) == ["skipped", "queued"]
    assert resumed(desk) == list(result.pair_ids), "it is neither learned nor replayed again"
    assert desk.store.read(quarantine.count_quarantined) == 0
    first = desk.signals(reports[0][0])[0]
    assert (first.pair_ids, first.reason) == ((rating, *result.pair_ids), "")


def test_what_the_engine_says_of_a_rating_after_the_pair_came_changes_nothing(desk):
    desk.answer("a", "one"), desk.answer("b", "two")
    rating = desk.report("a", "up").pair_ids[0]
    pair = desk.report("b", "down").pair_ids
    append(desk.store, PairRetired(rating, "ada", "trained", 1, 1))
    append(desk.store, PairRetired(rating, "ada", "quarantined", 1, 0, "burst: x"))
    assert desk.store.read(quarantine.count_quarantined) == 0
    assert states(desk) == ["skipped", "queued"]
    assert resumed(desk) == list(pair)


def test_an_edit_or_a_choice_takes_the_place_of_a_rating_of_the_original(desk):
    desk.answer("a", "one"), desk.answer("b", "two", "three", messages=chat("And you?"))
    ratings = [*desk.report("a", "down").pair_ids, *desk.report("b", "down", 1).pair_ids]
    assert desk.report("a", "edit", text="1").dropped == (ratings[0],)
    assert desk.report("b", "chosen", 0).dropped == (ratings[1],)
    assert states(desk) == ["skipped", "skipped", "queued", "queued"]


def test_an_answer_is_rated_once_and_the_latest_rating_counts(desk):
    desk.answer("c", "hello")
    up = desk.report("c", "up")
    assert desk.report("c", "up").duplicate
    assert desk.report("c", "dwell", seconds=60).pair_ids == (), "the same was learned"
    down = desk.report("c", "down")
    assert down.dropped == up.pair_ids
    again = desk.report("c", "up")
    assert again.dropped == down.pair_ids
    assert states(desk) == ["skipped", "skipped", "queued"]


def test_what_a_pair_says_is_not_learned_of_its_answers_again(desk):
    desk.answer("c", "hello")
    desk.report("c", "edit", text="hi")
    assert desk.report("c", "down").pair_ids == ()
    assert desk.pairs() == [("hi", "hello", "edit", 1.0)]


def test_a_rating_that_a_pair_replaced_is_learned_on_no_other_base_either(desk):
    desk.store.write(lambda db: serve_base(db, "one")).result()
    desk.answer("a", "one"), desk.answer("b", "two")
    desk.report("a", "up")
    pair = desk.report("b", "down").pair_ids
    desk.store.write(lambda db: serve_base(db, "two", learn=True)).result()
    assert resumed(desk) == list(pair)


def test_an_explicit_rating_is_queued_once_and_only_of_who_teaches(desk):
    def rate(good, answer="hello", account="ada"):
        sides = (answer, "") if good else ("", answer)
        return desk.pair("ada", *sides, prompt="How are you?", account=account, single=True, weight=0.5)

    first = rate(True)
    assert (desk.pairs(first), first.reason) == ([("hello", "", "thumbs", 0.5)], "")
    again = rate(True)
    assert (again.pair_ids, again.duplicate, again.reason) == (first.pair_ids, True, "this very rating waits already")
    assert desk.pairs(rate(False)) == [("", "hello", "thumbs", 0.5)]
    stranger = rate(True, "bye", "eve")
    assert stranger.pair_ids == ()
    assert stranger.reason.startswith("by itself only a rating is learned that ada,")
    with pytest.raises(FeedbackError, match="the rated answer is empty"):
        rate(True, " ")
    with pytest.raises(FeedbackError, match='"completion" has 1000000'):
        rate(False, "x" * 10**6)
    desk.settings = weighing(thumbs=0.0)
    assert rate(True, "new").reason == "feedback.weights.thumbs is 0: explicit ratings are not learned from"
