"""Answers in models' own forms, for every cut of the text: transformers' parser, and what of its failures is made."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS

from edged.text.answer_parser import AnswerForm, ParsedAnswer
from edged.text.tokenizer import Tokenizer, TokenizerError
from tests.models import byte_tokenizer

TEMPLATES = Path(next(iter(importlib.util.find_spec("trl").submodule_search_locations))) / "chat_templates"
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "a", "arguments": {"b": 1}}\n</tool_call>'
A = ("a", {"b": 1})
FORMS = [AnswerForm(template) for types, template in _RESPONSE_TEMPLATE_FALLBACKS.items() if "qwen3" in types]
TEXTS: dict[str, tuple[str, str, list[Any]]] = {
    "Hello": ("Hello", "", []),
    " two\n\nlines \n": (" two\n\nlines \n", "", []),
    f"<think>\nhm\n\nso\n</think>\n\nYes{CALL}": ("Yes", "hm\n\nso", [A]),
    "<think>\nhm": ("", "hm", []),
    "<think>\n\n</think>\n\nYes": ("Yes", "", []),
    f"{CALL}\n{CALL}": ("", "", [A, A]),
    f"one{CALL}two": ("onetwo", "", [A]),
    f"so{CALL}\n \n": ("so", "", [A]),
    f"so{CALL}\n{CALL} and\n": ("so and", "", [A, A]),
    "a < b <tool b": ("a < b <tool b", "", []),
    "it opens<tool_call>": ("it opens<tool_call>", "", []),
    "<think>": ("", "", []),
    "it ends <tool_ca": ("it ends <tool_ca", "", []),
    'a <tool_call>{"name": "a", "argu': ('a <tool_call>{"name": "a", "argu', "", []),
    'a <tool_call>\n{"name": "a", "arguments": {}}': ('a <tool_call>\n{"name": "a", "arguments": {}}', "", []),
    "<tool_call>no JSON</tool_call>!": ("<tool_call>no JSON</tool_call>!", "", []),
    "<tool_call>[1, 2]</tool_call>": ("<tool_call>[1, 2]</tool_call>", "", []),
    '<tool_call>{"name": "a"}</tool_call>': ('<tool_call>{"name": "a"}</tool_call>', "", []),
    '<tool_call>{"name": "", "arguments": {}}</tool_call>': (
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        "",
        [],
    ),
    f"<tool_call>{{</tool_call>{CALL}": ("<tool_call>{</tool_call>", "", [A]),
    f"<think>a</think>\n\n<tool_call>1</tool_call>{CALL}": ("<tool_call>1</tool_call>", "a", [A]),
    "it is written <|im_end|> there": ("it is written <|im_end|> there", "", []),
}


def read(form: AnswerForm, pieces: list[str], prompt: str = PROMPT) -> tuple[str, str, list[Any]]:
    answer = ParsedAnswer(form, prompt, [], re.compile("(?!)"))
    content = "".join([answer.push(piece) for piece in pieces]) + answer.finish()
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in answer.calls]
    return content, answer.reasoning, calls


def test_transformers_has_what_is_read_of_its_parser() -> None:
    # `_buffer` and `_pos` are not of its interface: where a call begins is known by them alone.
    parser = FORMS[0].parser(PROMPT, [])
    parser.feed("so <tool")
    assert parser._buffer[parser._pos :].strip() == "<tool"


@pytest.mark.parametrize("text", TEXTS)
def test_every_cut_of_an_answer_is_read_alike(text: str) -> None:
    for form in FORMS:
        assert read(form, [text]) == TEXTS[text] == read(form, list(text))
        for cut in range(len(text)):
            assert read(form, [text[:cut], text[cut:]]) == TEXTS[text], text[:cut]


@given(st.lists(st.sampled_from([*TEXTS, "<", "tool_call>", "</tool_call>", "{", " ", "\n", "</think>"])), st.data())
def test_any_answer_is_read_alike_in_any_pieces(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(FORMS[0], pieces) == read(FORMS[0], [text])


def test_what_the_prompt_has_of_the_answer_is_not_told_again() -> None:
    assert read(FORMS[0], ["hm\n</think>\n\nYes"], PROMPT + "<think>\n") == ("Yes", "hm", [])
    assert read(FORMS[0], ["Yes"], PROMPT + "<think>\n\n</think>\n\n") == ("Yes", "", [])


def codec(template: str, specials: list[str]) -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    tokenizer.chat_template = (TEMPLATES / template).read_text()
    return Tokenizer(tokenizer, "made")


@pytest.mark.parametrize(
    ("template", "model_type", "tools", "calls"),
    [
        ("qwen2_5.jinja", "qwen2", True, True),
        ("qwen3.jinja", "qwen3", True, True),
        ("qwen3_6.jinja", "qwen3_5", True, True),
        ("gemma4.jinja", "gemma4", True, True),
        ("llama3_1.jinja", "llama", True, True),
        ("gptoss.jinja", "gpt_oss", True, True),
        ("deepseek_r1_distill.jinja", "llama", False, False),
        ("deepseekv3.jinja", "deepseek_v3", False, None),
        ("phi3.jinja", "phi3", False, None),
        ("gemma3.jinja", "qwen2", False, None),
    ],
)
def test_the_form_of_a_models_answers_is_found(template: str, model_type: str, tools: bool, calls: bool | None) -> None:
    found = codec(template, [])
    found._find_form(model_type, "")
    assert found.writes_tools == tools
    assert (found.form and found.form.has_calls) == calls


@pytest.mark.parametrize(
    ("template", "model_type", "specials", "said", "wanted"),
    [
        (
            "gemma4.jinja",
            "gemma4",
            ["<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"],
            '<|channel>thought\nhm<channel|>Yes<channel|>!<|tool_call>call:a{b:<|"|>c<|"|>}<tool_call|>',
            ("Yes!", "hm", [("a", {"b": "c"})]),
        ),
        (
            "llama3_1.jinja",
            "llama",
            ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
            '{"name": "a", "parameters": {"b": "c"}}<|eot_id|>',
            ("", "", [("a", {"b": "c"})]),
        ),
    ],
)
def test_marks_that_are_special_tokens_are_read_and_not_shown(
    template: str, model_type: str, specials: list[str], said: str, wanted: Any
) -> None:
    tokenizer = codec(template, specials)
    tokenizer._find_form(model_type, "")
    prompt = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    answer = tokenizer.parsed(prompt, [])
    assert answer is not None
    ids = tokenizer._tokenizer.encode(said, add_special_tokens=False)
    content = answer.push(tokenizer.decode_marked(ids)) + answer.finish()
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in answer.calls]
    assert (content, answer.reasoning, calls) == wanted


def test_a_response_template_of_the_operators_is_used_and_must_fit(tmp_path: Path) -> None:
    file, tokenizer = tmp_path / "form.json", codec("qwen3.jinja", [])
    fields = {"tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True}}
    fields["tool_calls"]["transform"] = {"type": "function", "function": "{content}"}
    template = {"start_anchor": "<|im_start|>assistant\n", "fields": {**fields, "content": {}}}
    file.write_text(json.dumps(template))
    tokenizer._find_form("llama", str(file))
    assert tokenizer.form is not None
    for wrong, why in (
        ({**template, "start_anchor": "<|assistant|>"}, "does not read what the model's chat template writes"),
        ({"fields": []}, 'it has no "fields" that are objects'),
        ({**template, "fields": {"content": {"content": "poem"}}}, "poem"),
        ([], "cannot be used"),
    ):
        file.write_text(json.dumps(wrong))
        with pytest.raises(TokenizerError, match=re.escape(why)):
            codec("qwen3.jinja", [])._find_form("llama", str(file))
    with pytest.raises(TokenizerError, match="No such file"):
        tokenizer._find_form("llama", str(tmp_path / "none.json"))


def test_arguments_are_text_for_a_template_that_joins_them() -> None:
    tokenizer = codec("deepseekv3.jinja", [])
    call = {"id": "c", "type": "function", "function": {"name": "a", "arguments": {"b": "ö"}}}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert '{"b": "ö"}' in tokenizer.decode(tokenizer.render_chat([*turns, {"role": "tool", "content": "1"}]))
