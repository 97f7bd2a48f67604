"""All that a tokenizer gives is a token of the model: texts with others are refused by name, whatever the route."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AddedToken, PreTrainedTokenizerFast

from edged.align.feedback.pair_tokens import demand_rows, tokenize_pair
from edged.align.language import neutral_pairs
from edged.store.feedback import PairRow, Side
from edged.text.tokenizer import Detokenizer, Tokenizer, TokenizerError
from tests.models import CHAT_TEMPLATE, VOCAB, byte_tokenizer, save_tiny

EXTRA = ("smiley", "frown", "pout")
"""Tokens that were added: ids VOCAB, VOCAB + 1 and VOCAB + 2."""


def extended(special: bool = False, template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(word, special=special, normalized=False) for word in EXTRA])
    tokenizer.chat_template = template
    return tokenizer


def with_rows(rows: int, **changes: Any) -> Tokenizer:
    return Tokenizer(extended(**changes), "extended", vocab_size=rows)


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def stored(prompt: str, chosen: str) -> PairRow:
    sides = (Side(chosen), Side("no"))
    return PairRow(1, "", "a", "", "pair", 1.0, None, prompt, None, *sides, state="queued")


ROUTES: dict[str, Callable[[Tokenizer, str], Any]] = {
    "prompt": lambda tokenizer, text: tokenizer.encode_prompt(text),
    "answer": lambda tokenizer, text: tokenizer.encode_answer(text),
    "chat": lambda tokenizer, text: tokenizer.render_chat(chat(text)),
    "reply": lambda tokenizer, text: tokenizer.encode_exchange(chat("a"), text),
    "stored prompt": lambda tokenizer, text: tokenize_pair(tokenizer, stored(text, "a"), 10_000)[0].prompt,
    "stored answer": lambda tokenizer, text: tokenize_pair(tokenizer, stored("a", text), 10_000)[0].chosen,
    "pair": lambda tokenizer, text: demand_rows(tokenizer, {"messages": chat("a"), "chosen": text}),
    "pair's chat": lambda tokenizer, text: demand_rows(tokenizer, {"messages": chat(text), "chosen": "a"}),
    "pair's prompt": lambda tokenizer, text: demand_rows(tokenizer, {"prompt": text, "rejected": "a"}),
}
TEXTS = st.lists(st.sampled_from([*EXTRA, " ", "a", "é", "</s>", "smile"]), max_size=6).map("".join)


@pytest.mark.parametrize("route", ROUTES)
@given(text=TEXTS, rows=st.integers(VOCAB, VOCAB + len(EXTRA) + 2))
def test_no_route_gives_a_token_without_a_row(route: str, text: str, rows: int) -> None:
    tokenizer, largest = with_rows(rows), max((VOCAB + i for i, word in enumerate(EXTRA) if word in text), default=0)
    if largest >= rows:
        named = f'token id {largest} \\("{EXTRA[largest - VOCAB]}"\\) is not one of this model\'s {rows}'
        with pytest.raises(TokenizerError, match=named):
            ROUTES[route](tokenizer, text)
    else:
        assert all(token < rows for token in ROUTES[route](tokenizer, text) or ())


@pytest.mark.parametrize("route", ["prompt", "stored prompt", "pair's prompt"])
def test_a_token_that_stands_for_an_image_is_refused_and_its_name_in_a_message_is_text(route: str) -> None:
    tokenizer = Tokenizer(extended(special=True), "wrapper", placeholders=[VOCAB + 1])
    assert tokenizer.problems() == []
    with pytest.raises(
        TokenizerError, match=rf'token id {VOCAB + 1} \("frown"\) stands for an image, a video or a sou'
    ):
        ROUTES[route](tokenizer, "a frown")
    for text in ROUTES.keys() - {"prompt", "stored prompt", "pair's prompt"}:
        assert VOCAB + 1 not in (ROUTES[text](tokenizer, "a frown") or ())


@pytest.mark.parametrize("rows", [VOCAB + 2, VOCAB + 3, VOCAB + 4])
def test_ids_are_held_against_the_models_rows(rows: int) -> None:
    tokenizer = with_rows(rows)
    tokenizer.check([])
    tokenizer.check([rows - 1, 0])
    with pytest.raises(TokenizerError, match=f"token id {rows}.* is not one of this model's {rows}"):
        tokenizer.check([1, rows])


def test_a_padded_vocabulary_is_fine_and_its_padding_has_no_text() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), "padded", vocab_size=VOCAB + 61)
    assert tokenizer.problems() == []
    padding = VOCAB + 60
    assert tokenizer.decode([*tokenizer.encode_answer("ab"), padding]) == "ab"
    assert tokenizer.token_text(padding) == ""
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in (padding, *tokenizer.encode_answer("é"), padding)]
    assert "".join(pieces) + detokenizer.finish() == "é"


class Strict(PreTrainedTokenizerFast):
    """As tokenizers in Python are: ids that they have not are an error."""

    def _decode(self, token_ids: Any, **options: Any) -> Any:
        assert max(token_ids, default=0) < VOCAB
        return super()._decode(token_ids, **options)

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        assert ids < VOCAB
        return super().convert_ids_to_tokens(ids, skip_special_tokens)


def test_padding_is_not_decoded_by_a_tokenizer_that_would_raise() -> None:
    strict = byte_tokenizer()
    strict.__class__ = Strict
    tokenizer = Tokenizer(strict, "strict", vocab_size=VOCAB + 5)
    assert tokenizer.decode([VOCAB, *tokenizer.encode_answer("a"), VOCAB + 4]) == "a"
    assert tokenizer.token_text(VOCAB + 4) == ""


def test_what_does_not_fit_is_told_once_with_its_tokens(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    extended().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 128009, -1]}')
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.eos_ids) == (VOCAB, 2, {2})
    rows, ends = tokenizer.problems()
    assert rows.endswith(f'are refused: {VOCAB} "smiley", {VOCAB + 1} "frown", {VOCAB + 2} "pout"')
    assert ends == f"end tokens that are not among the model's {VOCAB} end no answer: -1, 128009"


def test_of_many_tokens_without_a_row_the_first_are_told() -> None:
    (told,) = Tokenizer(byte_tokenizer(), "small", [2], vocab_size=VOCAB - 200).problems()[:1]
    assert told.endswith("and 195 more")


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% if %}", "chats are refused: the model's chat template refuses these messages: "),
        ("{{ raise_exception('no') }}", "chats are refused: the model's chat template refuses these messages: no"),
        ("{{ nothing.at.all }}", "chats are refused: the model's chat template refuses these messages: "),
        ("pout{{ messages[0]['content'] }}", f'chats are refused: token id {VOCAB + 2} \\("pout"\\) is not one of'),
        (
            "{% if messages[-1].role == 'assistant' %}{{ raise_exception('user') }}{% endif %}",
            "answers in chats are not learned: the model's chat template refuses these messages: user",
        ),
    ],
)
def test_a_chat_template_that_refuses_every_chat_is_told(template: str, told: str) -> None:
    (_, *problems) = with_rows(VOCAB + 2, template=template).problems()
    assert any(problem.startswith(told.replace("\\", "")) for problem in problems), problems


def test_a_bos_without_a_row_is_told() -> None:
    tokenizer = extended(special=True)
    tokenizer.bos_token = "smiley"
    problems = Tokenizer(tokenizer, "bos", vocab_size=VOCAB).problems()
    assert any(problem.startswith(f'chats are refused: token id {VOCAB} ("smiley")') for problem in problems)


@pytest.mark.parametrize(
    ("own", "configured", "eos_id", "eos_ids"),
    [
        ("</s>", [], 2, {2}),
        ("</s>", [1, 0], 2, {0, 1, 2}),
        (None, [1, 0], 1, {0, 1}),
        (None, [-1, VOCAB, 1, 0], 1, {0, 1}),
        ("smiley", [1, 0], 1, {0, 1}),
    ],
)
def test_answers_end_in_training_with_the_tokenizers_end_or_the_first_configured_one(
    own: str | None, configured: list[int], eos_id: int, eos_ids: set[int]
) -> None:
    tokenizer = extended()
    tokenizer.eos_token = own
    made = Tokenizer(tokenizer, "ends", configured, VOCAB)
    assert (made.eos_id, made.eos_ids) == (eos_id, eos_ids)


def test_a_model_without_any_end_token_of_its_own_is_refused() -> None:
    tokenizer = extended()
    tokenizer.eos_token = "smiley"
    with pytest.raises(TokenizerError, match=rf"no end-of-sequence token among its {VOCAB} tokens \(\[-1, {VOCAB}\]"):
        Tokenizer(tokenizer, "endless", [-1], VOCAB)


def test_the_neutral_text_leaves_out_what_the_model_cannot_read() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["grandmother"])
    assert len(neutral_pairs(Tokenizer(tokenizer, "a", vocab_size=VOCAB))) == 3
    assert len(neutral_pairs(Tokenizer(tokenizer, "a"))) == 4


def test_an_answer_cut_within_a_token_keeps_its_own_ids_where_its_text_cannot_be_encoded() -> None:
    tokenizer = with_rows(VOCAB)
    ids = [token for letter in "a smiley" for token in tokenizer.encode_answer(letter)]
    assert tokenizer.ids_of_text(ids, "a smiley") == ids
    assert tokenizer.ids_of_text(ids[:-1], "a smiley") == ids[:-1]
