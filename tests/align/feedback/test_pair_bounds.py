"""A pair keeps no more of a text than can be learned: what is sent is refused beyond that, what was served is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edged.align.feedback.pair_bounds import CHARS_PER_TOKEN
from edged.align.feedback.pair_tokens import tokenize_pair
from edged.align.feedback.signals import FeedbackError
from edged.store import Store
from edged.store.completions import Choice, get_completion
from edged.store.feedback import Side, get_pairs
from edged.store.rows import column_value
from edged.text.tokenizer import Tokenizer
from tests.align.feedback.desk import Desk, chat
from tests.models import byte_tokenizer

CODEC = Tokenizer(byte_tokenizer(), "tiny")
TOKENS = 33
"""So many bytes of the first answer end within a character."""
MOST = CHARS_PER_TOKEN * TOKENS


@pytest.fixture
def desk(tmp_path):
    store = Store(tmp_path / "edged.db")
    desk = Desk(store)
    desk.max_tokens = TOKENS
    yield desk
    store.close()


def rows_of(desk, result):
    return desk.store.read(lambda db: get_pairs(db, result.pair_ids))


@pytest.mark.parametrize(
    ("field", "sent"),
    [
        ("chosen", {"chosen": "c" * (MOST + 1), "prompt": "Well?"}),
        ("rejected", {"rejected": "r" * (MOST + 1), "prompt": "Well?"}),
        ("prompt", {"prompt": "p" * (MOST + 1)}),
        ("messages", {"messages": chat("long " * MOST)}),
        ("messages", {"messages": chat("") * 1000}),
        ("prompt_ids", {"prompt_ids": [1234567] * MOST}),
    ],
)
def test_a_pair_that_is_longer_than_can_be_learned_is_refused_and_not_stored(desk, field, sent):
    texts = {"chosen": "good", "rejected": "bad", **sent}
    with pytest.raises(FeedbackError) as refused:
        desk.pair("ada", texts.pop("chosen"), texts.pop("rejected"), **texts)
    assert refused.value.kind == "too_long"
    size = len(column_value(sent[field]))
    assert f'"{field}" has {size} characters' in str(refused.value)
    assert f"align.max_pair_tokens = {TOKENS} tokens can use {MOST}" in str(refused.value)
    assert desk.pairs() == []


def test_a_pair_of_just_that_length_is_stored_whole(desk):
    chosen, rejected, prompt = ("x" * (MOST - 1) + end for end in "crp")
    (row,) = rows_of(desk, desk.pair("ada", chosen, rejected, prompt=prompt))
    assert (row.chosen.text, row.rejected.text, row.prompt) == (chosen, rejected, prompt)


@pytest.mark.parametrize("signal", ["edit", "up"])
def test_a_signals_text_has_the_same_bound(desk, signal):
    desk.answer("a", "an answer")
    with pytest.raises(FeedbackError, match=f'"text" has {MOST + 1} characters') as refused:
        desk.report("a", signal, text="x" * (MOST + 1))
    assert refused.value.kind == "too_long"
    assert desk.signals("a") == []


def served(desk, **asked):
    """A choice between two long answers that edged generated to a long prompt."""
    texts = [f"{which} é answer " * MOST for which in ("one", "another")]
    ids = [tuple(CODEC.encode_answer(text)) for text in texts]
    desk.answer("a", choices=tuple(map(Choice, (0, 1), texts, ids, ("stop", "stop"))), **asked)
    return rows_of(desk, desk.report("a", "chosen", 0))[0]


def test_a_pair_of_what_was_served_is_cut_and_the_completion_keeps_all(desk):
    question = "Where is it? " * MOST
    row = served(desk, asked=question, prompt_ids=tuple(range(100, 200)) * 10)
    sizes = (len(row.chosen.text), len(row.rejected.text), len(row.messages[-1]["content"]))
    assert max(sizes) <= MOST
    assert max(len(row.chosen.token_ids), len(row.rejected.token_ids), len(row.prompt_ids)) <= TOKENS
    assert question.endswith(row.messages[-1]["content"])
    whole = desk.store.read(lambda db: get_completion(db, "a"))
    assert whole.messages[-1]["content"] == question
    assert whole.choices[0].text == "one é answer " * MOST


@pytest.mark.parametrize("most", [16, TOKENS, TOKENS + 1, 100])
def test_what_is_learned_of_a_cut_pair_is_what_would_be_learned_of_the_whole(desk, most):
    question = "Where is it? " * MOST
    cut = served(desk, asked=question, prompt_ids=tuple(CODEC.encode_prompt(question)))
    kept = desk.store.read(lambda db: get_completion(db, "a"))
    sides = [Side(choice.text, choice.token_ids) for choice in kept.choices]
    whole = replace(cut, messages=kept.messages, prompt_ids=kept.prompt_ids, chosen=sides[0], rejected=sides[1])
    (one, note), (other, _) = (tokenize_pair(CODEC, row, most) for row in (cut, whole))
    assert one.chosen == other.chosen
    assert one.rejected == other.rejected
    if most <= TOKENS:
        assert one == other
        assert "the prompt lost its start" in note


def test_of_a_cut_answer_the_generated_tokens_are_learned_and_not_fresh_ones(desk):
    class Elsewhere(Tokenizer):
        def encode_exchange(self, before, text):
            raise AssertionError("the generated tokens were not recognized")

    row = served(desk, prompt_ids=(7, 8, 9))
    pair, _ = tokenize_pair(Elsewhere(byte_tokenizer(), "tiny"), row, TOKENS)
    assert pair.prompt == (7, 8, 9)
    assert pair.chosen == row.chosen.token_ids[: len(pair.chosen)]


def test_of_a_long_chat_the_last_messages_stay_from_a_users_on(desk):
    turns = ["first " * MOST, "answer", "second", "another answer", "third?"]
    messages = [{"role": "system", "content": "Be brief."}, *chat(*turns)]
    row = served(desk, asked=messages)
    assert row.messages == tuple(chat(*turns)[2:])
    short = [{"role": "system", "content": "Be brief."}, *chat("first", "answer", "second")]
    desk.answer("b", "yes", "no", asked=short)
    assert rows_of(desk, desk.report("b", "chosen", 0))[0].messages == tuple(short)


def test_a_next_turn_teaches_of_long_texts_what_can_be_used(desk):
    question, answer = "Where is the town hall of Paris? " * MOST, "In Texas. " * MOST
    desk.answer("a", answer, asked=question)
    wrong = "No, I meant the real one. " * MOST
    desk.answer("b", "In France.", asked=chat(question, answer, wrong))
    (signal,) = desk.signals("a")
    assert (signal.signal, len(signal.text)) == ("rephrase", MOST)
    (row,) = rows_of(desk, desk.report("b", "up"))
    assert (row.chosen.text, row.rejected.text) == ("In France.", answer[:MOST])
    assert len(column_value(row.messages)) <= MOST + 100
