"""Named features of a text: words, how it begins and ends, length, marks, case, and small lists of related words.

Must not import torch.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from zlib import crc32

import numpy as np

_MAX_WORDS = 600
"""The first words of a text that are features by themselves."""
_WORD = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]"
    r"|[^\W\d_](?:[^\W_]|[\u0300-\u036f\u0900-\u0dff]|['’](?=\w))*|\d+"
)
"""A word; a character alone in scripts that put no spaces between words."""
_OTHER = re.compile(r"[^\w \r\t]|[\d_]")
_SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]++[\"')\]]*+(?=\s|$)|[。！？]+|\n+")
_LIST_LINE = re.compile(r"^[^\S\n]*(?:[-*•]|\d+[.)])\s", re.MULTILINE)
_MAX_CHARS = 12_000
"""Characters of a text that are looked at: of a longer one its beginning and its end."""
_LISTS = json.loads(files(__package__).joinpath("words.json").read_text("utf-8"))
_MARKS: dict[str, str] = _LISTS["marks"]
_SAME_MARK: dict[str, str] = _LISTS["same_marks"]
_KIND_OF: dict[str, list[str]] = {}
for _kind, _words in _LISTS["kinds"].items():
    for _word in _words.split():
        _KIND_OF.setdefault(_word, []).append(_kind)
_STARTS = {
    "a command": frozenset(_LISTS["commands"].split()),
    "a greeting": frozenset(_LISTS["kinds"]["greeting"].split()),
}
_LENGTHS = (5, 10, 15, 20, 25, 30, 40, 60, 100, 200)
SCALES = {
    "word": 0.35, "pair": 0.3, "start": 0.6, "start2": 0.4, "last": 0.4, "opens": 1.0, "end": 1.0, "has": 0.8,
    "rate": 0.5, "kind": 0.8, "kindrate": 0.6, "short": 0.5, "length": 0.8, "sentences": 0.8, "shape": 0.4,
    "layout": 0.8, "pace": 0.6,
}  # fmt: skip
"""The prior's standard deviation of a feature's weight, by the kind of feature (the part of its name before ":")."""
_OF_TEXT = frozenset({"word", "pair", "start", "start2", "last", "end", "has", "rate"})
"""Kinds that name the very text that they are about."""
_WHOLE = frozenset({"last", "end", "short", "length", "sentences", "pace"})
"""Kinds that only a whole text has, not its beginning."""


@dataclass(frozen=True, slots=True)
class Features:
    """The features of one text: `names`, their `hashes`, and `values` in units of their prior's standard deviation.

    The first `num_words` are its words.
    """

    names: tuple[str, ...]
    hashes: np.ndarray
    values: np.ndarray
    num_words: int


@lru_cache(maxsize=2048)
def features(text: str, ended: bool = True) -> Features:
    """Return the features of `text`; `ended` False: of a beginning, whose end and length mean nothing.

    They are kept for the next fit: `features.cache_clear()` drops them where a user's texts are erased.
    """
    named = extract(text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS // 2] + text[-_MAX_CHARS // 2 :])
    if not ended:
        named = {name: value for name, value in named.items() if kind_of(name) not in _WHOLE}
    hashes = np.array([crc32(name.encode("utf-8", "replace")) for name in named], np.int64)
    values = np.array([value * SCALES[kind_of(name)] for name, value in named.items()])
    return Features(tuple(named), hashes, values, sum(name.startswith("word:") for name in named))


def kind_of(name: str) -> str:
    """Return the kind of a feature: the part of its name before ":"."""
    return name.partition(":")[0]


def subject_of(name: str) -> str:
    """Return what a feature is about, which near-duplicates share: "!" of "end:!", "has:!" and "rate:!"."""
    if name == "opens:exclamation":
        return "!"
    kind, _, rest = name.partition(":")
    if kind in ("short", "length"):
        return "length"
    return rest if kind in _OF_TEXT else f"{kind.removesuffix('rate')}:{rest}"


def extract(text: str) -> dict[str, float]:
    """Return the features of `text` by name, before their scales."""
    out: dict[str, float] = {}
    text = text.strip()
    words = _WORD.findall(text)
    lower = [word.lower().replace("’", "'") for word in words]
    count = len(words)
    if not count and not text:
        return {"shape:empty": 1.0}
    norm = min(1.0, (25 / max(count, 1)) ** 0.5)
    for word in dict.fromkeys(lower[:_MAX_WORDS]):
        out[f"word:{word}"] = norm
    for one, two in dict.fromkeys(pairwise(lower[:_MAX_WORDS])):
        out[f"pair:{one} {two}"] = norm
    _of_place(text, lower, out)
    _of_marks(text, count, out)
    _of_kinds(lower, out)
    _of_length(text, count, out)
    _of_shape(text, words, out)
    return out


def _of_place(text: str, lower: list[str], out: dict[str, float]) -> None:
    if lower:
        out[f"start:{lower[0]}"] = 1.0
        out[f"last:{lower[-1]}"] = 1.0
        out[f"start2:{' '.join(lower[:2])}"] = 1.0
        for name, openers in _STARTS.items():
            if lower[0] in openers:
                out[f"opens:{name}"] = 1.0
    last = _SAME_MARK.get(text[-1], text[-1])
    category = unicodedata.category(last)[0]
    out["end:" + ({"L": "letter", "N": "digit", "M": "letter"}.get(category) or last)] = 1.0
    first_end = _SENTENCE_END.search(text)
    if first_end and "!" in first_end[0]:
        out["opens:exclamation"] = 1.0


def _of_marks(text: str, count: int, out: dict[str, float]) -> None:
    found: Counter[str] = Counter()
    for char, times in Counter(_OTHER.findall(text)).items():
        name = _SAME_MARK.get(char, char)
        category = unicodedata.category(char)
        if name in _MARKS:
            found[name] += times
        elif char.isdigit():
            found["digit"] += times
        elif char == "\n":
            found["line break"] += times
        elif category == "So" and ord(char) > 0x2000:
            found[char] += times
            found["emoji"] += times
        elif category[0] in "PS" and name != ".":
            found[name] += times
    for name, times in found.items():
        out[f"has:{name}"] = 1.0
        out[f"rate:{name}"] = math.log1p(times) + 10 * min(times / max(count, 10), 0.3)


def _of_kinds(lower: list[str], out: dict[str, float]) -> None:
    found = Counter(kind for word in lower for kind in _KIND_OF.get(word, ()))
    found.update({"contractions": sum("'" in word for word in lower)})
    for kind, times in (+found).items():
        out[f"kind:{kind}"] = 1.0
        out[f"kindrate:{kind}"] = math.log1p(times) + 5 * times / max(len(lower), 10)


def _of_length(text: str, count: int, out: dict[str, float]) -> None:
    out["length:long"] = math.log1p(count or len(text)) - 3.0
    for most in _LENGTHS:
        if count <= most:
            out[f"short:{most}"] = 1.0
    sentences = sum(1 for part in _SENTENCE_END.split(text) if part and part.strip())
    out[f"sentences:{min(sentences, 6)}"] = 1.0
    out["pace:long sentences"] = 2 * math.log((count + 1) / (sentences + 1)) - 4.6


def _of_shape(text: str, words: list[str], out: dict[str, float]) -> None:
    letters = [word for word in words if word[0].isalpha()]
    if letters:
        size = sum(map(len, letters)) / len(letters)
        out["shape:long words"] = 2 * (size - 4.3)
        out["shape:very long words"] = 5 * sum(len(word) >= 8 for word in letters) / len(letters) - 0.5
        if text == text.lower() != text.upper():
            out["shape:lower case"] = 1.0
        elif text == text.upper() != text.lower():
            out["shape:upper case"] = 1.0
        if text[0].isalpha() and text[0] == text[0].lower() != text[0].upper():
            out["shape:starts small"] = 1.0
        capitals = sum(word[0].isupper() for word in letters)
        out["shape:capitals"] = 4 * capitals / len(letters) - 0.5
    layout = {
        "layout:list": len(_LIST_LINE.findall(text)) >= 2,
        "layout:bold": "**" in text,
        "pace:one paragraph": "\n" not in text,
    }
    out.update({name: 1.0 for name, shown in layout.items() if shown})


def describe(name: str) -> str:
    """Return a feature in words, as a person reads it."""
    kind, _, rest = name.partition(":")
    mark = _MARKS.get(rest, "" if kind in ("end", "has", "rate") and not rest.isalpha() and " " not in rest else rest)
    if form := _LISTS["texts"].get(name) or _LISTS["forms"].get(kind):
        return str(form.format(rest))
    if kind == "end":
        return f"ends with {'an' if mark[:1] in set('aeiou') else 'a'} {mark}" if mark else f'ends with "{rest}"'
    if kind in ("has", "rate"):
        return f"{mark}{'es' if mark[-1] == 'h' else 's'}" if mark else f'"{rest}"'
    return rest
