"""A pair's tokens are those that serving produced or would produce, with EOS once, cut where it hurts least."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.align.feedback.pair_tokens import tokenize_pair
from edged.store.feedback import PairRow, Side
from edged.text.tokenizer import NoChatTemplate, Tokenizer
from tests.models import byte_tokenizer

CODEC = Tokenizer(byte_tokenizer(), "tiny")
EOS = CODEC.eos_id
CHAT = ({"role": "user", "content": "Hi"},)


def ids(text):
    return tuple(CODEC.encode_answer(text))


def row(chosen, rejected, **more):
    sides = [side if isinstance(side, Side) else Side(side) for side in (chosen, rejected)]
    values = {"messages": None, "prompt": "Q: ", "prompt_ids": None, "state": "queued", **more}
    return PairRow(
        id=3,
        created_at="",
        adapter="ada",
        signal_id="fb",
        source="pair",
        weight=0.5,
        chosen=sides[0],
        rejected=sides[1],
        **values,
    )


def test_a_plain_pair_is_encoded_as_serving_would_with_eos_after_each_answer():
    pair, note = tokenize_pair(CODEC, row("yes", "no"), 100)
    assert pair.prompt == tuple(CODEC.encode_prompt("Q: "))
    assert pair.chosen == (*ids("yes"), EOS)
    assert pair.rejected == (*ids("no"), EOS)
    assert note == ""


def test_a_chats_prompt_goes_through_the_chat_template():
    pair, _ = tokenize_pair(CODEC, row("yes", "no", messages=CHAT, prompt=None), 100)
    assert pair.prompt == tuple(CODEC.render_chat(CHAT))
    assert CODEC.decode(pair.prompt).endswith("assistant: ")


def test_state_and_reference_are_carried_over():
    stored = row("a", "b", state="held_out", epochs_done=2, ref_chosen_logp=-1.5, ref_rejected_logp=-2.5)
    pair, _ = tokenize_pair(CODEC, stored, 100)
    assert (pair.pair_id, pair.adapter, pair.weight) == (3, "ada", 0.5)
    assert (pair.state, pair.epochs_done, pair.ref_chosen_logp, pair.ref_rejected_logp) == ("held_out", 2, -1.5, -2.5)


class MergingCodec(Tokenizer):
    """A tokenizer with more than one way to write a text, as real ones have: "yes" is one token in a fresh encoding."""

    YES = 7

    def encode_exchange(self, before, text, arguments=None, beside=None):
        return [*self.encode_prompt(before), self.YES] if text == "yes" else super().encode_exchange(before, text)


def test_generated_tokens_are_kept_where_a_fresh_encoding_differs():
    codec = MergingCodec(byte_tokenizer(), "tiny")
    generated = Side("yes", (*ids("yes"), EOS), "c", 0)
    pair, _ = tokenize_pair(codec, row(generated, "yes ", prompt_ids=(50, 51)), 100)
    assert pair.chosen == (*ids("yes"), EOS)
    assert pair.prompt == (50, 51)
    fresh, _ = tokenize_pair(codec, row("yes", "no"), 100)
    assert fresh.chosen == (MergingCodec.YES, EOS)


@pytest.mark.parametrize("ending", [(), (EOS,), (EOS, EOS)])
def test_eos_stands_once_whether_or_not_it_was_generated(ending):
    pair, _ = tokenize_pair(CODEC, row(Side("yes", ids("yes") + ending), "no", prompt_ids=(9,)), 100)
    assert pair.chosen == (*ids("yes"), EOS)


def test_any_token_that_ends_an_answer_is_replaced_by_the_one_of_training():
    codec = Tokenizer(byte_tokenizer(), "tiny", generation_eos=[0])
    assert codec.eos_ids == {0, EOS}
    pair, _ = tokenize_pair(codec, row(Side("yes", (*ids("yes"), 0)), "no"), 100)
    assert pair.chosen == (*ids("yes"), EOS)


@pytest.mark.parametrize(
    "stored",
    [ids("yes, and what a stop string hid"), ids("other"), (10**6,), (-1,)],
)
def test_tokens_that_do_not_say_the_text_are_not_used_nor_is_their_prompt(stored):
    pair, _ = tokenize_pair(CODEC, row(Side("yes", stored), "no", prompt_ids=(50, 51)), 100)
    assert pair.chosen == (*ids("yes"), EOS)
    assert pair.prompt == tuple(CODEC.encode_prompt("Q: "))


def test_the_generated_prompt_stays_when_one_answer_was_edited():
    pair, _ = tokenize_pair(CODEC, row("edited", Side("yes", ids("yes")), prompt_ids=(50, 51)), 100)
    assert pair.prompt == (50, 51)


def test_a_prompt_that_came_as_tokens_is_kept():
    pair, _ = tokenize_pair(CODEC, row("a", "b", prompt=None, prompt_ids=(50, 51)), 100)
    assert pair.prompt == (50, 51)


def test_an_over_long_prompt_loses_its_start_and_the_note_says_so():
    stored = row("yes", "no", prompt="0123456789" * 10)
    whole = tokenize_pair(CODEC, stored, 1000)[0].prompt
    pair, note = tokenize_pair(CODEC, stored, 40)
    assert pair.prompt == whole[-33:]
    assert (pair.chosen, pair.rejected) == ((*ids("yes"), EOS), (*ids("no"), EOS))
    assert note == "the prompt lost its start: 33 tokens are learned (max 40)"


def test_over_long_answers_lose_their_ends_after_the_prompt_shrank_to_a_quarter():
    pair, note = tokenize_pair(CODEC, row("c" * 100, "r" * 10, prompt="p" * 100), 40)
    assert len(pair.prompt) == 11
    assert pair.chosen == tuple(ids("c" * 18)), "an answer that was cut does not end"
    assert pair.rejected == (*ids("r" * 10), EOS)
    assert "the answers lost their ends: 28 tokens are learned (max 40); the prompt lost" in note
    both, _ = tokenize_pair(CODEC, row("c" * 100, "r" * 100, prompt="p" * 100), 40)
    assert (len(both.prompt), len(both.chosen), len(both.rejected)) == (12, 14, 14)


@given(st.integers(0, 60), st.integers(1, 60), st.integers(1, 60), st.integers(16, 80))
def test_a_pair_never_exceeds_its_room_and_keeps_what_fits(prompt, chosen, rejected, room):
    stored = row("c" * chosen, "r" * rejected, prompt=None, prompt_ids=tuple(range(50, 50 + prompt)))
    pair, note = tokenize_pair(CODEC, stored, room)
    total = len(pair.prompt) + len(pair.chosen) + len(pair.rejected)
    assert total <= room
    assert min(len(pair.prompt), len(pair.chosen), len(pair.rejected)) >= 1
    assert (pair.chosen[-1] == EOS) == (len(pair.chosen) > chosen)
    assert (pair.rejected[-1] == EOS) == (len(pair.rejected) > rejected)
    assert pair.prompt == ((EOS,) if not prompt else stored.prompt_ids[-len(pair.prompt) :])
    wanted = max(prompt, 1) + chosen + rejected + 2
    if wanted <= room:
        assert (total, "lost" in note) == (wanted, False)
    else:
        assert "lost" in note
        # A cut answer leaves the place of its EOS empty; halves are rounded down.
        assert total >= room - 3


def test_an_empty_prompt_is_stood_for_by_eos_and_the_note_says_so():
    pair, note = tokenize_pair(CODEC, row("a", "b", prompt=""), 100)
    assert pair.prompt == (EOS,)
    assert note == "the prompt has no tokens: EOS stands for it"


def test_a_chat_for_a_model_without_a_template_is_the_codecs_error():
    bare = byte_tokenizer()
    bare.chat_template = None
    with pytest.raises(NoChatTemplate):
        tokenize_pair(Tokenizer(bare, "tiny"), replace(row("a", "b"), messages=CHAT), 100)


def test_a_chats_fresh_answers_continue_the_prompt_as_the_chat_template_writes_them():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + (
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    codec = Tokenizer(tokenizer, "spaced")
    pair, _ = tokenize_pair(codec, row("yes", "no", messages=CHAT, prompt=None), 100)
    assert (pair.chosen, pair.rejected) == ((*ids(" yes"), EOS), (*ids(" no"), EOS))
    rating, _ = tokenize_pair(codec, row("", "no", messages=CHAT, prompt=None), 100)
    assert (rating.chosen, rating.rejected) == ((), (*ids(" no"), EOS))


@pytest.mark.parametrize("stored", [None, ids("hello")])
@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("messages", [None, CHAT])
def test_a_single_rating_has_its_one_answer_alone(stored, good, messages):
    said, nothing = Side("hello", stored), Side("")
    about = {"messages": messages, "prompt": None if messages else "Q: "}
    pair, note = tokenize_pair(CODEC, row(*((said, nothing) if good else (nothing, said)), **about), 100)
    assert (pair.chosen, pair.rejected) == ((*ids("hello"), EOS), ())[:: 1 if good else -1]
    assert pair.single
    assert note == ""


def test_a_long_rating_has_the_room_of_both_answers():
    pair, note = tokenize_pair(CODEC, row("y" * 200, ""), 100)
    assert (len(pair.chosen), pair.rejected) == (95, ())
    assert "the answers lost their ends" in note
