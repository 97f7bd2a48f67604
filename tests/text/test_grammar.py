"""Constraints are compiled into grammars whose answers end, or refused with the reason."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from edged.text import grammar as module
from edged.text.grammar import Constraint, Grammar, GrammarCompiler, GrammarRefused, bounded_schema
from edged.text.tokenizer import Tokenizer, TokenizerError
from tests.models import byte_tokenizer

MOST = 2**53 - 1
BOUNDS = {"minimum": -MOST, "maximum": MOST}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}


def compiled(kind: Any, text: Any, strict: bool = True) -> Grammar:
    constraint = Constraint(kind, text if isinstance(text, str) else json.dumps(text), "", strict)

    async def compile_it() -> Grammar:
        return await GrammarCompiler(Tokenizer(byte_tokenizer(), "tiny")).compile(constraint)

    return asyncio.run(compile_it())


@pytest.mark.parametrize(
    ("schema", "bounded"),
    [
        ({"type": "integer"}, {"type": "integer", **BOUNDS}),
        ({"type": ["integer", "null"], "minimum": 3}, {"type": ["integer", "null"], "minimum": 3, "maximum": MOST}),
        ({"type": "integer", "exclusiveMaximum": 3}, {"type": "integer", "exclusiveMaximum": 3, "minimum": -MOST}),
        ({"type": "integer", "minimum": 10**17}, {"type": "integer", "minimum": 10**17}),
        ({"type": ["integer", "number"]}, {"type": ["integer", "number"]}),
        ({"const": {"type": "integer"}}, {"const": {"type": "integer"}}),
        ({"enum": [{"type": "integer"}]}, {"enum": [{"type": "integer"}]}),
        (
            {"properties": {"enum": {"type": "integer"}, "type": {"items": [{"type": "integer"}]}}},
            {"properties": {"enum": {"type": "integer", **BOUNDS}, "type": {"items": [{"type": "integer", **BOUNDS}]}}},
        ),
    ],
    ids=str,
)
def test_integers_without_bounds_get_those_of_i_json(schema: dict[str, Any], bounded: dict[str, Any]) -> None:
    found, dropped = bounded_schema(schema, strict=True)
    del found["x-guidance"]
    assert (found, dropped) == (bounded, [])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", {"$ref": "#"}),
        ("json", {"$ref": "#/$defs/node", "$defs": {"node": NODE}}),
        ("json", {"anyOf": [{"$ref": "#/$defs/node"}, {"allOf": [{"$ref": "#"}]}], "$defs": {"node": NODE}}),
        ("json", {"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
        ("json", {"enum": []}),
        ("json", {"type": "integer", "minimum": 2, "maximum": 1}),
        ("grammar", "start: start"),
        ("grammar", 'start: ("a" | /b/) start // "c" |'),
        ("grammar", 'start: x "a" | y\nx: "b" y\ny: /c/ x'),
        ("grammar", 'root ::= [a-z]+ root | "x" root'),
        ("regex", "[^\\x00-\\U0010FFFF]"),
    ],
    ids=str,
)
def test_what_has_no_answer_that_ends_is_refused(kind: str, text: Any) -> None:
    with pytest.raises(GrammarRefused, match=r"has an end|Unsatisfiable"):
        compiled(kind, text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}], "$defs": {"node": NODE}}),
        ("json", {"type": "array", "items": {"$ref": "#"}}),
        ("json", {"type": "object", "properties": {"a": {"$ref": "#"}}}),
        ("json", {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "boolean"}}}),
        ("json", {"$ref": "#here", "$defs": {"a": {"$anchor": "here", "type": "boolean"}}}),
        ("json", {}),
        ("grammar", 'start: "a" start | "b"'),
        ("grammar", 'start: "a" start?'),
        ("grammar", 'start: %json {"type": "integer"}'),
        ("grammar", 'start: A "//" /x/ // "\nA: "a".."z"'),
        ("grammar", 'root ::= "(" root ")" | [0-9]{1,3}'),
        ("regex", ""),
        ("choice", ["a", "ab", ""]),
    ],
    ids=str,
)
def test_what_may_end_is_compiled(kind: str, text: Any) -> None:
    assert compiled(kind, text).ignored == ()


def test_a_pattern_that_looks_around_is_left_out_and_told_unless_strict() -> None:
    decimal = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}]}
    assert compiled("json", decimal, strict=False).ignored == ("pattern",)
    with pytest.raises(GrammarRefused, match='"pattern": look-around'):
        compiled("json", decimal)


def test_what_is_asked_for_again_is_not_compiled_again_and_kinds_are_told_apart() -> None:
    async def compile_all() -> list[Grammar]:
        compiler = GrammarCompiler(Tokenizer(byte_tokenizer(), "tiny"))
        asked = [("regex", '["a"]'), ("choice", '["a"]'), ("regex", '["a"]')]
        return [await compiler.compile(Constraint(kind, text, "")) for kind, text in asked]  # type: ignore[arg-type]

    first, other, again = asyncio.run(compile_all())
    assert first is again
    assert first is not other


def test_a_grammar_that_takes_too_long_to_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COMPILE_S", 0.0)
    with pytest.raises(GrammarRefused, match="not compiled after 0 s"):
        compiled("regex", "a")


def test_a_tokenizer_that_cannot_be_matched_refuses_grammars_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Tokenizer) -> None:
        raise TokenizerError("its tokens cannot be matched")

    monkeypatch.setattr(Tokenizer, "for_grammars", fails)
    with pytest.raises(GrammarRefused, match="its tokens cannot be matched"):
        compiled("regex", "a")
