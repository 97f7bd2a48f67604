"""Grammars that have a model call tools, in the form of its own chat template where that writes JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from edged.text.grammar import CalledTools, Constraint, GrammarCompiler, GrammarMatcher, GrammarRefused
from edged.text.tokenizer import Tokenizer
from tests.text.test_answer_parser import codec

CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bonn"]}, "days": {"type": "integer"}}}
TOOLS: list[list[Any]] = [
    ["weather", {**CITY, "required": ["city"]}, False],
    [
        "a-b.c",
        {"type": "object", "properties": {"on": {"$ref": "#/$defs/on"}}, "$defs": {"on": {"enum": [True]}}},
        True,
    ],
    ["now", {"type": "object", "properties": {}}, False],
]
OFFERED = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}
    for name, schema, _ in TOOLS
]
ASKED = [{"role": "user", "content": "hi"}]


def model(template: str, model_type: str, ends: str, *marks: str) -> Tokenizer:
    """A tokenizer of bytes with a chat template of somebody else's."""
    tokenizer = codec(template, [ends, *marks])
    tokenizer.eos_ids = frozenset(tokenizer._tokenizer.convert_tokens_to_ids([ends]))
    tokenizer._find_form(model_type, "")
    return tokenizer


def drawn(tokenizer: Tokenizer, seed: int, most: int, must: bool, begins: str = "") -> str:
    """A text that follows the grammar and `begins` so, with tokens that are drawn at random of those that may follow.

    One that has opened a call ends a text soon, as models do.
    """
    prompt = tokenizer.render_chat(ASKED, {"tools": OFFERED})
    constraint = Constraint("text", "", "tools", calls=CalledTools(json.dumps(TOOLS), most, must))

    async def compiled() -> Any:
        return await GrammarCompiler(tokenizer).compile(constraint, tokenizer.reasoning_before(prompt))

    grammar, random = asyncio.run(compiled()), np.random.default_rng(seed)
    ids = [*prompt, *tokenizer._tokenizer.encode(begins, add_special_tokens=False)]
    matcher = GrammarMatcher(grammar, ids, len(prompt))
    for _ in range(1000):
        masks = np.zeros((1, -(-grammar.vocab // 32)), np.int32)
        matcher.fill(masks, ())
        assert not matcher.error
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
        token = int(random.choice(allowed))
        if token in grammar.end_ids:
            return tokenizer.decode_marked(ids[len(prompt) :])
        ids.append(token)
    raise AssertionError("the answer does not end")


def calls_in(tokenizer: Tokenizer, text: str, must: bool = True) -> list[tuple[str, Any]]:
    """The calls of an answer, which fit the schemas of their tools; an answer that must call has nothing else."""
    prompt = tokenizer.render_chat(ASKED, {"tools": OFFERED})
    answer = tokenizer.parsed(prompt, OFFERED, must)
    assert answer is not None
    content = answer.push(text) + answer.push(answer.closing) + answer.finish()
    assert not must or not content
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in answer.calls]
    for name, arguments in calls:
        jsonschema.validate(arguments, {each[0]: each[1] for each in TOOLS}[name])
    return calls


FORMS = [
    ("qwen3.jinja", "qwen3", "<|im_end|>", ("<|im_start|>",), '<tool_call>\n{"name": "', True),
    ("qwen3.jinja", "qwen3", "<|im_end|>", ("<think>", "</think>", "<tool_call>", "</tool_call>"), "<tool_call>", True),
    ("llama3_1.jinja", "llama", "<|eot_id|>", ("<|start_header_id|>",), '{"name": "', True),
    ("qwen3_5_nothink.jinja", "qwen3_5", "<|im_end|>", ("<|im_start|>",), "<tool_call>", False),
    ("gemma4.jinja", "gemma4", "<turn|>", ("<|channel>", "<channel|>", "<|tool_call>"), "<tool_call>", False),
    ("muse_glimmer.jinja", "none", "<|eot|>", (), "<tool_call>", False),
]


@pytest.mark.parametrize(("template", "model_type", "ends", "marks", "head", "own"), FORMS)
def test_an_answer_that_must_call_is_read_as_calls_with_valid_arguments(
    template: str, model_type: str, ends: str, marks: Any, head: str, own: bool
) -> None:
    tokenizer = model(template, model_type, ends, *marks)
    assert tokenizer.call_form.own is own
    several = 0
    for seed in range(8):
        text = drawn(tokenizer, seed, 3, True, head)
        calls = calls_in(tokenizer, text)
        assert 1 <= len(calls) <= 3
        several += len(calls) > 1
        assert len(calls_in(tokenizer, drawn(tokenizer, seed, 1, True, head))) == 1
    assert several or template == "llama3_1.jinja", "Llama's template has one call an answer"


def test_reasoning_comes_before_the_call_and_must_where_the_prompt_began_it() -> None:
    tokenizer = model("qwen3.jinja", "qwen3", "<|im_end|>")
    assert tokenizer.reasoning_before(tokenizer.render_chat(ASKED)) == ("<think>", "</think>", False)
    text = drawn(tokenizer, 1, 1, True, "<think>\nso {\n</think>\n\n<tool")
    assert len(calls_in(tokenizer, text)) == 1
    closed = tokenizer.render_chat(ASKED, {"enable_thinking": False})
    assert tokenizer.reasoning_before(closed) is None, "the template has ended it"
    begun = [*tokenizer.render_chat(ASKED), *tokenizer.encode_answer("<think>\n")]
    assert tokenizer.reasoning_before(begun) == ("<think>", "</think>", True)


def test_text_is_free_before_and_behind_calls_that_keep_to_their_schemas() -> None:
    tokenizer = model("qwen3.jinja", "qwen3", "<|im_end|>", "<|im_start|>")
    head = 'Hm. {"a"\n<tool_call>\n{"name": "'
    for seed in range(4):
        text = drawn(tokenizer, seed, 8, False, head)
        assert text.startswith("Hm.")
        calls_in(tokenizer, text, False)
    first = drawn(tokenizer, 0, 8, True, "<tool_call>\n{")
    assert drawn(tokenizer, 1, 8, False, f"{first}\nand so").startswith(f"{first}\nand so")


def test_the_tool_whose_schema_cannot_be_kept_is_named() -> None:
    tokenizer = model("qwen3.jinja", "qwen3", "<|im_end|>")
    for schema, why in (
        ({"not": {}}, '"not" cannot be kept'),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, ""),
    ):
        tools = CalledTools(json.dumps([TOOLS[0], ["odd", schema, True]]), 1, True)
        with pytest.raises(GrammarRefused, match=f'the parameters of "odd": {why}'):
            asyncio.run(GrammarCompiler(tokenizer).compile(Constraint("text", "", "tools", calls=tools)))
