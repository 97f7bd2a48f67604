"""JSON from outside is parsed as the standard library does, or refused before it takes long."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.runtime import bounded_json

TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('\\"[]{},:'))
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
)


@given(VALUES, st.booleans())
def test_a_value_is_what_the_standard_library_reads(value: Any, ascii_only: bool) -> None:
    assert bounded_json.loads(json.dumps(value, ensure_ascii=ascii_only)) == value


@pytest.mark.parametrize(("text", "wanted"), [("512.0", 512), ("-1.0", -1), ("1e3", 1000), ("0.5", 0.5)])
def test_a_float_without_a_fraction_is_an_integer(text: str, wanted: float) -> None:
    value = bounded_json.loads(text)
    assert (value, type(value)) == (wanted, type(wanted))


@pytest.mark.parametrize(
    "text",
    [
        "[" + "[]," * 40_000 + "[]]",
        "[" + "{}," * 40_000 + "{}]",
        "{" + ",".join(f'"{number}":0' for number in range(40_000)) + "}",
        "[" + "0," * 300_000 + "0]",
        "[" + "1.5," * 40_000 + "0]",
        "[" + "1e5," * 40_000 + "0]",
        "[" + '"",' * 300_000 + '""]',
        "[" + '"\\\\",[],"\\"",' * 40_000 + "0]",
    ],
    ids=["lists", "objects", "keys", "numbers", "fractions", "powers", "texts", "lists between escapes"],
)
def test_a_text_of_too_many_parts_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.delattr(json, "loads")
    with pytest.raises(ValueError, match=r"^more than 32768 objects, lists and keys, or 262144 values"):
        bounded_json.loads(text)


@pytest.mark.parametrize(
    "value",
    [
        "[]{},:" * 200_000,
        '\\"[],' * 100_000,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a, b: c"}]}] * 1024},
        {"prompt": [*range(200_000)]},
    ],
    ids=["marks in a text", "escapes in a text", "a long chat", "tokens"],
)
def test_what_people_send_is_not_too_much(value: Any) -> None:
    assert bounded_json.loads(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "^not JSON: "),
        ("[" * 30_000, "^not JSON: "),
        ("9" * 4301, "^not JSON: .*4301 digits"),
        ('["\\ud83d", "\\ude00"]', "^half a surrogate pair"),
        ('{"\\uDC80": 0}', "^half a surrogate pair"),
    ],
)
def test_the_problem_is_told(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        bounded_json.loads(text)


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert bounded_json.loads('"\\ud83d\\ude00 \\\\ud800"') == "\N{GRINNING FACE} \\ud800"
