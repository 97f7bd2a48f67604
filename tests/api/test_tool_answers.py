"""Answers with calls beside edits, and what is learned and exported of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edged.align.feedback.pair_formats import export_pair, to_hh, to_trl
from edged.align.feedback.pair_tokens import tokenize_pair
from edged.align.feedback.row_shapes import FormatError
from edged.align.feedback.signals import Feedback, record_signal
from edged.align.taste.edits import Operator
from edged.align.taste.opinions import opinions_of
from edged.api.generation import ChoiceText
from edged.engine.request import FinishEvent, TokenEvent
from edged.engine.sampling.params import Sampling
from edged.store import Store, utc_now
from edged.store.completions import Choice, Completion, insert_completion
from edged.store.feedback import get_pairs
from edged.text.tokenizer import Tokenizer
from tests.api.test_tools import ASKED, CITIES, QWEN3, SAID, SCRIPT, THOUGHT, WEATHER
from tests.models import byte_tokenizer

BRIEF = Operator(begins="Dear Ann, ", ends=" Yours.")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    plain = byte_tokenizer()
    plain.chat_template = QWEN3.read_text()
    plain.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    plain.eos_token = "<|im_end|>"
    loaded = Tokenizer(plain, "made")
    loaded._find_form("llama", "")
    return loaded


def answered(tokenizer: Tokenizer, text: str, stream: bool = False, operator: Operator | None = None) -> ChoiceText:
    prompt = tokenizer.render_chat([ASKED], {"tools": [WEATHER]})
    sampling = Sampling(max_tokens=1000, stop_token_ids=(tokenizer.eos_id,))
    parsed = tokenizer.parsed(prompt, [WEATHER])
    answer = ChoiceText(0, "a-0", tokenizer, sampling, (), operator, stream, parsed)
    for token in [*tokenizer.encode_answer(text), tokenizer.eos_id]:
        answer.push(TokenEvent("a-0", token, 1))
        if stream:
            answer.take_text()
    answer.end(FinishEvent("a-0", "stop"))
    return answer


def test_an_answer_without_calls_is_edited_though_tools_are_offered(tokenizer: Tokenizer) -> None:
    for stream in (False, True):
        answer = answered(tokenizer, f"<think>\n{THOUGHT}\n</think>\n\n{SAID.strip()}", stream, BRIEF)
        assert answer.text == f"Dear Ann, {SAID.strip()} Yours."
        assert answer.reasoning == THOUGHT
        assert answer.record().token_ids == (), "its template writes it anew"


def test_an_answer_with_calls_is_not_edited(tokenizer: Tokenizer) -> None:
    answer = answered(tokenizer, SCRIPT, operator=BRIEF)
    assert (answer.text, answer.edited, answer.reason) == (SAID, False, "tool_calls")
    kept = answer.record()
    assert tokenizer.decode(kept.token_ids) == SCRIPT
    assert kept.beside is not None
    assert [each["function"]["arguments"] for each in kept.beside["tool_calls"]] == CITIES


def test_a_stream_with_calls_gets_no_ending(tokenizer: Tokenizer) -> None:
    long = "It is said that the weather there is fine, and that it stays so for a long while. " * 3
    answer = answered(tokenizer, long + SCRIPT.partition(SAID)[2], True, BRIEF)
    assert answer.text.startswith("Dear Ann, It is said")
    assert "Yours" not in answer.text
    assert len(answer.calls) == 2


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "edged.db")


def stored(store: Store, tokenizer: Tokenizer, text: str, name: str) -> None:
    choice: Choice = answered(tokenizer, text).record()
    arguments = {"tools": [WEATHER], "enable_thinking": True}
    prompt = tuple(tokenizer.render_chat([ASKED], arguments))
    about: dict[str, Any] = {"messages": (ASKED,), "template_arguments": arguments, "user": "ann", "adapter": "ann"}
    completion = Completion(name, "2025-01-01T00:00:00.000Z", "chat.completion", "m", prompt, (choice,), **about)
    store.write(lambda db: insert_completion(db, completion)).result()


def told(store: Store, name: str, signal: str, text: str | None = None) -> list[Any]:
    report = Feedback("ann", name, signal, 0, text, account="ann")
    result = store.write(lambda db: record_signal(db, report, utc_now())).result()
    return store.read(lambda db: get_pairs(db, result.pair_ids))


CALL_ALONE = SCRIPT.partition(SAID)[2].strip()


def test_a_rating_teaches_the_served_tokens_with_calls_and_reasoning(store: Store, tokenizer: Tokenizer) -> None:
    stored(store, tokenizer, SCRIPT, "c1")
    stored(store, tokenizer, CALL_ALONE, "c2")
    told(store, "c1", "up")
    (row,) = told(store, "c2", "down")
    pair, note = tokenize_pair(tokenizer, row, 2000)
    assert (tokenizer.decode(pair.chosen), tokenizer.decode(pair.rejected)) == (SCRIPT, CALL_ALONE)
    assert list(pair.prompt) == tokenizer.render_chat([ASKED], {"tools": [WEATHER]})
    assert note == ""
    assert json.loads(row.rejected.text)[0] == {"name": "weather", "arguments": CITIES[0]}
    assert row.rejected.content == ""
    assert store.read(lambda db: opinions_of(db, "ann")) == [], "a call is no matter of taste"


def test_an_edit_replaces_the_content_and_keeps_the_rest(store: Store, tokenizer: Tokenizer) -> None:
    stored(store, tokenizer, SCRIPT, "c3")
    (row,) = told(store, "c3", "edit", "I look.")
    pair, _ = tokenize_pair(tokenizer, row, 2000)
    chosen = tokenizer.decode([*pair.prompt, *pair.chosen])
    assert chosen.endswith(SCRIPT.strip().replace(SAID, "I look.\n"))
    assert tokenizer.decode([*pair.prompt, *pair.rejected]).endswith(SCRIPT)


def test_tokens_of_another_model_are_written_anew_by_its_template(store: Store, tokenizer: Tokenizer) -> None:
    stored(store, tokenizer, CALL_ALONE, "c4")
    stored(store, tokenizer, "Nothing.", "c5")
    told(store, "c4", "up")
    (row,) = told(store, "c5", "down")
    for side in (row.chosen, row.rejected):
        assert tokenizer.decode(side.token_ids or ()) == side.content or side.calls
    alien = replace(row, chosen=replace(row.chosen, token_ids=(50, 51, 52)))
    pair, _ = tokenize_pair(tokenizer, alien, 2000)
    assert CALL_ALONE in tokenizer.decode(pair.chosen)


def test_an_export_for_trl_has_tools_and_calls_and_one_for_hh_refuses_them(store: Store, tokenizer: Tokenizer) -> None:
    stored(store, tokenizer, SCRIPT, "c6")
    (row,) = told(store, "c6", "edit", "I look.")
    pair = json.loads(json.dumps(export_pair(row)))
    made = to_trl(pair)
    assert made["tools"] == [WEATHER]
    assert made["chat_template_kwargs"] == {"enable_thinking": True}
    assert made["prompt"] == [ASKED]
    for side, content in (("chosen", "I look."), ("rejected", SAID)):
        (message,) = made[side]
        assert (message["role"], message["content"], message["reasoning_content"]) == ("assistant", content, THOUGHT)
        assert [each["function"]["arguments"] for each in message["tool_calls"]] == CITIES
    with pytest.raises(FormatError, match="no tool calls"):
        to_hh(pair)
    turns = [ASKED, {"role": "assistant", "content": "", "tool_calls": []}, {"role": "tool", "content": "23"}]
    with pytest.raises(FormatError, match="no tool calls"):
        to_hh({"messages": turns, "chosen": "a", "rejected": "b"})
    assert to_trl({"messages": turns, "chosen": "a", "rejected": "b"})["prompt"][2] == turns[2]
