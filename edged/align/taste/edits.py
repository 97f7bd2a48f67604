"""Edits read as one change: what a person does to most of the answers that they correct, as a function of texts."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import SequenceMatcher
from itertools import pairwise, product
from os.path import commonprefix
from typing import Any, Literal

_LEAST, _SHARE = 3, 0.6
"""Edits that must agree: in number, and as a share of those that could."""
_LATEST = 64
_UNDONE, _NEWEST = 2, 6
"""So many of the newest edits, of so many, that take a change off again are a change of mind."""
_STRIDE = 16
"""Characters by which a growing text grows before it is edited anew."""
_MAX_CHARACTERS = 10_000
_MAX_DIFFERING = 256
"""Most tokens between an edit's common beginning and end that are compared one by one."""
_KEPT = 0.5
"""Least share of the shorter text's words that an edit keeps; what keeps less is an answer written anew."""
_MAX_RUN = 40
"""Most tokens of a phrase that is replaced, of an opening and of an ending."""
_ONE_SENTENCE_MARKS, _MAX_OPENING = "!?:…！？", 12
"""Marks of first or last sentences that are left out, and the most words of a first one."""
_MAX_SPELLING = 4
_ROUNDS = 4
_ALONE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Characters of scripts without spaces between words (Thai, Lao, Burmese, Khmer, kana, Han): each is a token."""
_LETTER = rf"(?![{_ALONE}])\w"
_TOKEN = re.compile(rf"[{_ALONE}]|(?:{_LETTER})+(?:['’-](?:{_LETTER})+)*|\s+|[^\w\s]")
_SENTENCE = re.compile(
    r"\S.*?(?:(?<![.!?…])[.!?…]++[\"')\]”’»]*(?=\s|$)|[。！？]+[」』”’）]*|(?=\n\s*\n)|$)\s*", re.DOTALL
)
_END_MARKS = ".!?…。！？"
_NO_END = re.compile(
    r"(?:^|\s)(?:\d+|[A-Za-z]|Dr|Mr|Mrs|Ms|Prof|St|No|Nr|etc|approx|ca|vs|e\.g|i\.e|z\.B|d\.h)\.\s*$", re.IGNORECASE
)
"""Ends of what is no sentence yet: the number of a list, an initial, an abbreviation."""
_ONE_EMOJI = (
    "(?:[\U0001f000-\U0001faff\u231a\u231b\u23e9-\u23fa\u2600-\u26ff\u2728\u2763\u2764\u2b50\u2b55][\ufe0f\u200d]*)+"
)
"""Not ticks and crosses, which tell something in tables."""
_EMOJI = re.compile(rf"^([ \t]*){_ONE_EMOJI}[ \t]*|(?<![ \t])[ \t]*{_ONE_EMOJI}", re.MULTILINE)
_LIST_MARK = re.compile(r"^[ \t]*(?:[-*+•–](?![ \t]*\d)|#{1,6})[ \t]+", re.MULTILINE)
_NUMBER = re.compile(r"^[ \t]*(\d{1,2})[.)][ \t]+", re.MULTILINE)
_BLOCK = re.compile(r"(```.*?(?:```|$))", re.DOTALL)
_ABBREVIATION = 24
"""The last characters of a sentence that may be one of these, in more than its length."""
_CODE = re.compile(r"(```.*?(?:```|$)|`[^`\n]*`)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Operator:
    """A change of texts, in parts that may be absent: words, sentences and case first, then both ends."""

    begins: str = ""
    ends: str = ""
    """The opening and the ending, each with the space between it and the rest."""
    small_start: bool = False
    """Whether what follows the opening begins with a small letter."""
    replaced: Mapping[str, str] = field(default_factory=dict)
    """What stands for a casefolded word or phrase; "" where it is left out."""
    no_emoji: bool = False
    no_list_marks: bool = False
    """Whether marks of lists and headings are left out."""
    no_opening: str = ""
    """The mark of first sentences that are left out: "!" for exclamations."""
    max_sentences: int = 0
    no_closing: str = ""
    """The mark of last sentences that are left out: "?" for questions."""
    end_mark: str = ""
    """The mark that ends the last sentence."""
    case: Literal["", "lower", "upper"] = ""

    def apply(self, text: str) -> str:
        """Return `text` with the change; a second time changes nothing, and an empty text stays empty."""
        if not text.strip():
            return text
        rest = text
        for _ in range(_ROUNDS):  # what a removal brings together may be a phrase to remove, or an opening
            before, rest = rest, self._changed(self._bare(self.rest(rest)))
            if rest == before:
                break
        ends = f"\n\n{self.ends.lstrip()}" if self.ends and rest.endswith("```") else self.ends
        return self.begins + rest + ends

    def shown(self, text: str) -> bool:
        """Whether `text` has the change already; an empty text has not."""
        return bool(text.strip()) and self.apply(text) == text

    def rest(self, text: str) -> str:
        """Return `text` without the opening and the ending, in whatever case and spacing, once or repeated."""
        if self.begins:
            text = re.sub(rf"^(?:\s*{_pattern(self.begins)})+", "", text, flags=re.IGNORECASE).lstrip()
        if self.ends:
            text = re.sub(rf"(?:{_pattern(self.ends)}\s*)+$", "", text, flags=re.IGNORECASE).rstrip()
        return text

    def _bare(self, text: str) -> str:
        """Return `text` without emoji, and marks of lists and headings, outside of code; one of these alone stays."""
        bare = _outside(_CODE, text, lambda part: _EMOJI.sub(r"\1", part)) if self.no_emoji else text
        if self.no_list_marks:
            bare = _outside(_BLOCK, bare, lambda part: _unnumbered(_LIST_MARK.sub("", part)))
        return bare if bare.strip() else text

    def _changed(self, text: str) -> str:
        parts = _CODE.split(text)
        if len(parts) > 1:
            # Code stays as it is, and so do the sentences around it.
            words = Operator(replaced=self.replaced, case=self.case)
            first = replace(words, small_start=self.small_start, no_opening=self.no_opening)._changed(parts[0])
            return first + "".join(part if at % 2 else words._changed(part) for at, part in enumerate(parts[1:], 1))
        text = _replace(text, self.replaced) if self.replaced else text
        sentences = _sentences(text)
        while self.no_opening and len(sentences) > 1 and _opens(sentences[0], self.no_opening):
            text = text[len(text) - len(text.lstrip()) + len(sentences.pop(0)) :]
        kept = sentences[: self.max_sentences] if self.max_sentences else sentences[:]
        while self.no_closing and len(kept) > 1 and kept[-1].rstrip().endswith(self.no_closing):
            kept.pop()
        if len(kept) < len(sentences):
            text = text[: len(text) - len(text.lstrip())] + "".join(kept).rstrip()
        if self.end_mark and text.strip():
            text = text.rstrip().rstrip(_END_MARKS) + self.end_mark
        if self.small_start and not re.match(r"I\b", text):
            text = text[:1].lower() + text[1:]
        return text.lower() if self.case == "lower" else text.upper() if self.case == "upper" else text

    @property
    def parts(self) -> dict[str, Operator]:
        """Its parts, each by a key that `without` takes."""
        told = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "replaced"}
        small = {"small_start": told.pop("small_start")}
        found = {
            f"edit:{name}:{value}": Operator(**{name: value}, **(small if name == "begins" else {}))
            for name, value in told.items()
            if value
        }
        return found | {f"edit:replaced:{old}": Operator(replaced={old: new}) for old, new in self.replaced.items()}

    def without(self, keys: Collection[str]) -> Operator | None:
        """Return the change without the parts of these keys; None where none is left."""
        kept = [part for key, part in self.parts.items() if key not in keys]
        words = {old: new for part in kept for old, new in part.replaced.items()}
        told = {
            each.name: getattr(part, each.name) for part in kept for each in fields(part) if getattr(part, each.name)
        }
        return Operator(**{**told, "replaced": words}) if kept else None

    @property
    def text(self) -> str:
        """The change in words."""
        lines = []
        if self.begins:
            lines.append(f'begins with "{_line(self.begins)}"')
        if self.ends or self.end_mark:
            lines.append(f'ends with "{_line(self.ends) or self.end_mark}"')
        for old, new in self.replaced.items():
            lines.append(f'"{new}" instead of "{old}"' if new else f'never "{old}"')
        lines += ["no emoji"] * self.no_emoji + ["no marks of lists and headings"] * self.no_list_marks
        if self.no_opening:
            lines.append(f'without short first sentences that end with "{self.no_opening}"')
        if self.max_sentences:
            lines.append(f"at most {self.max_sentences} sentence{'s' * (self.max_sentences > 1)}")
        if self.no_closing:
            lines.append(f'without a last sentence that ends with "{self.no_closing}"')
        if self.case:
            lines.append(f"{self.case} case")
        return ", ".join(lines)


def induce(edits: Sequence[tuple[str, str]]) -> Operator | None:
    """Return the change that most of the latest `edits` (original, edited) share; None where they share none.

    A part of it is in three edits at least, and in three of five of those in which it could be: an original that has
    it already tells nothing of it. Edits of more than 10,000 characters share nothing with others, and those that keep
    less than half of the words no more than a closing. After two of the newest six have taken the change off again, or
    the edits since then share another one, only what came later counts.
    """
    pairs = [(old.strip(), new.strip()) for old, new in edits[-_LATEST:] if old.strip() != new.strip()]
    found = _induce(pairs)
    if found is not None and not _is_undone(found, pairs):
        return found
    size, earlier = next((at for at, pair in enumerate(pairs) if found and _takes_off(found, *pair)), 0), found
    if found is None:
        firsts = ((size, _unanimous(pairs[:size])) for size in _halves(len(pairs)))
        size, earlier = next((each for each in firsts if each[1] is not None), (0, None))
    # Originals had the earlier change, since it was made to what was served.
    later = [(earlier.rest(old) if earlier else old, new) for old, new in pairs[size:]]
    for count in _halves(len(later)):
        found = _unanimous(later[-count:])
        if found is not None and not _is_undone(found, later):
            return found
    kept = earlier is not None and _enough(sum(earlier.shown(new) for _, new in pairs), len(pairs))
    return earlier if kept and earlier and not _is_undone(earlier, pairs) else None


def _halves(count: int) -> Iterable[int]:
    while count >= _LEAST:
        yield count
        count = max(_LEAST, count // 2) if count > _LEAST else 0


def _unanimous(pairs: Sequence[tuple[str, str]]) -> Operator | None:
    """Return the change that every one of a few edits in a row makes."""
    found = _induce(pairs)
    return found if found and all(found.shown(new) and not found.shown(old) for old, new in pairs) else None


def _takes_off(found: Operator, old: str, new: str) -> bool:
    return found.shown(old) and not found.shown(new)


def _is_undone(found: Operator, pairs: Sequence[tuple[str, str]]) -> bool:
    return sum(_takes_off(found, *pair) for pair in pairs[-_NEWEST:]) >= _UNDONE


def _induce(pairs: Sequence[tuple[str, str]]) -> Operator | None:
    kept = [edit for edit in (_compare(*pair) for pair in pairs) if edit]
    if len(kept) < max(_LEAST, _SHARE * len(pairs)):
        found = Operator(ends=_closing(pairs))
        return found if found.ends and _enough(sum(found.shown(new) for _, new in pairs), len(pairs)) else None
    found = Operator(_shared_end(kept, 1), _shared_end(kept, -1))
    bodies = [edit for edit in (_compare(found.rest(edit.old), found.rest(edit.new)) for edit in kept) if edit]
    replaced = _replacements(bodies)
    # A mark that only ever ends an answer may be replaced there alone, or everywhere: what explains more is taken.
    unmarked = {old: new for old, new in replaced.items() if not set(old) <= set(_END_MARKS)}
    ways = product((False, True), (replaced, unmarked))
    candidates = [_completed(replace(found, replaced=words), bodies, drops) for drops, words in ways]
    found = max(candidates, key=lambda one: sum(one.apply(old) == new for old, new in pairs))
    touched = [(old, new) for old, new in pairs if Operator(replaced=found.replaced).apply(old) != old]
    if sum(found.apply(old) == new for old, new in touched) < _SHARE * len(touched):
        # Words that are replaced beside others mean nothing by themselves: "C" for "F" beside another number.
        found = replace(found, replaced={})
    if found == Operator() or not _enough(sum(found.shown(new) for _, new in pairs), len(pairs)):
        return None
    once = [found.apply(old) for old, _ in pairs]
    return found if all(found.apply(text) == text for text in once) else None


def _enough(count: int, could: int) -> bool:
    """Whether so many edits agree, of those in which a part could be."""
    return count >= max(_LEAST, _SHARE * could)


def _completed(found: Operator, bodies: Sequence[_Edit], drops: bool) -> Operator:
    """An operator with what changes sentences, marks and case, once its words are replaced; `drops`: and characters."""
    changed = [(Operator(replaced=found.replaced).apply(edit.old), edit.new) for edit in bodies]
    first: dict[str, Any] = {name: drops and _left_out(name, changed) for name in ("no_emoji", "no_list_marks")}
    changed = [(Operator(**first).apply(old), new) for old, new in changed]
    first["no_opening"] = _opening_mark(changed)
    changed = [(Operator(no_opening=first["no_opening"]).apply(old), new) for old, new in changed]
    bounds = first | _sentence_bounds(changed)
    changed = [(Operator(**bounds).apply(old), new) for old, new in changed]
    upper = [new for old, new in changed if old[:1].isupper()]
    small = _enough(sum(new[:1].islower() for new in upper), len(upper))
    case, mark = _case(changed), _end_mark(changed)
    return replace(found, end_mark=mark, case=case, small_start=bool(small and found.begins and not case), **bounds)


@dataclass(frozen=True, slots=True)
class _Edit:
    """Two texts, their tokens, and the runs of tokens in which they differ but for case."""

    old: str
    new: str
    old_tokens: list[str]
    new_tokens: list[str]
    runs: list[tuple[int, int, int, int]]
    """Bounds of each in the old and the new tokens."""

    @property
    def opening(self) -> list[str]:
        """Tokens that the new text begins with, beyond what stands for as many of the old one."""
        i, j, k, n = self.runs[0]
        return self.new_tokens[:n] if i == k == 0 and n != j else []

    @property
    def ending(self) -> list[str]:
        """Tokens that the new text ends with, beyond what stands for as many of the old one."""
        i, j, k, n = self.runs[-1]
        ends = (j, n) == (len(self.old_tokens), len(self.new_tokens))
        return self.new_tokens[k:] if ends and n - k != j - i else []


def _compare(old: str, new: str) -> _Edit | None:
    if max(len(old), len(new)) > _MAX_CHARACTERS:
        return None
    old_tokens, new_tokens = _TOKEN.findall(old), _TOKEN.findall(new)
    one, two = ([token.casefold() for token in tokens] for tokens in (old_tokens, new_tokens))
    shorter = min(len(one), len(two))
    start = next((n for n in range(shorter) if one[n] != two[n]), shorter)
    stop = next((n for n in range(shorter - start) if one[-1 - n] != two[-1 - n]), shorter - start)
    middles = one[start : len(one) - stop], two[start : len(two) - stop]
    runs = [(0, len(middles[0]), 0, len(middles[1]))] if any(middles) else []
    if max(map(len, middles)) <= _MAX_DIFFERING:
        codes = SequenceMatcher(None, *middles, autojunk=False).get_opcodes()
        runs = [bounds for tag, *bounds in codes if tag != "equal"]  # type: ignore[misc]
    runs = [(start + i, start + j, start + k, start + n) for i, j, k, n in runs]
    words = [sum(map(_is_word, tokens)) for tokens in (one, two)]
    left = words[0] - sum(_is_word(token) for i, j, _, _ in runs for token in one[i:j])
    return _Edit(old, new, old_tokens, new_tokens, runs) if left and left >= _KEPT * min(words) else None


def _is_word(token: str) -> bool:
    return token[0].isalnum()


def _pattern(phrase: str) -> str:
    """A pattern of a phrase in any spacing, which does not begin or end within a word."""
    phrase = phrase.strip()
    inner = r"\s+".join(map(re.escape, phrase.split()))
    return r"(?<!\w)" * _is_word(phrase) + inner + r"(?!\w)" * _is_word(phrase[-1])


def _shared_end(edits: Sequence[_Edit], step: Literal[1, -1]) -> str:
    """The longest of the added openings (`step` 1) or endings (-1) that enough others begin, or end, with."""

    def plain(tokens: Iterable[str]) -> tuple[str, ...]:
        return tuple(token.casefold() for token in tokens if not token.isspace())[::step]

    runs = [edit.opening if step > 0 else edit.ending for edit in edits if edit.runs]
    known = [run for run in runs if 0 < len(run) <= _MAX_RUN]
    added, olds = [plain(run) for run in known], [plain(edit.old_tokens) for edit in edits]
    forms: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for run, key in zip(known, added, strict=True):
        if not set("".join(run)) <= set(_END_MARKS + " \n"):
            forms[key]["".join(run)] += 1
    for key in sorted(forms, key=len, reverse=True):
        shared = sum(one[: len(key)] == key for one in added)
        could = sum(one[: len(key)] != key for one in olds)
        if _enough(shared, could) and forms[key].total() >= max(_LEAST, shared / 2):
            return forms[key].most_common(1)[0][0]
    return ""


def _closing(pairs: Sequence[tuple[str, str]]) -> str:
    """The longest closing of two words at least, behind a sentence, that answers have that were written anew."""
    closings: set[str] = set()
    for one, other in pairwise(_TOKEN.findall(new)[-_MAX_RUN:] for _, new in pairs):
        same = len(one) - len(commonprefix([[token.casefold() for token in each[::-1]] for each in (one, other)]))
        starts = [at for at in range(max(1, same), len(one)) if one[at].isspace() and one[at - 1] in _END_MARKS]
        if starts and sum(map(_is_word, one[starts[0] :])) > 1:
            closings.add("".join(one[starts[0] :]))
    for closing in sorted(closings, key=len, reverse=True):
        could = [new.endswith(closing) for old, new in pairs if not old.endswith(closing)]
        if _enough(sum(could), len(could)):
            return closing
    return ""


def _replacements(edits: Sequence[_Edit]) -> dict[str, str]:
    """Phrases that edits replace by one and the same, and no longer contain then.

    Of words that are spelt otherwise in one and the same way, as "colour" and "honour" are, one edit each is enough.
    """
    by_key: defaultdict[str, Counter[str]] = defaultdict(Counter)
    spellings: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for edit in edits:
        new_text = _spaced(edit.new_tokens)
        gone = {(old, new) for old, new in _changes(edit) if _spaced(_TOKEN.findall(old)) not in new_text}
        for old, new in gone:
            by_key[old][new] += 1
            if old.isalpha() and new.isalpha() and (way := _spelling(old, new)):
                spellings[way].add(old)
    alike = {old: way for way, words in spellings.items() if len(words) >= _LEAST for old in words}
    texts = [(_spaced(edit.old_tokens), _spaced(edit.new_tokens)) for edit in edits]
    found: dict[str, str] = {}
    for old, ways in by_key.items():
        new, count = ways.most_common(1)[0]
        is_spelling = old in alike and _spelling(old, new) == alike[old]
        key = _spaced(_TOKEN.findall(old))
        if count >= (1 if is_spelling else _LEAST) and count >= _SHARE * sum(key in a or key in b for a, b in texts):
            found[old] = new
    keys = [_spaced(_TOKEN.findall(old)) for old in found]
    return {old: new for old, new in found.items() if not any(key in _spaced(_TOKEN.findall(new)) for key in keys)}


def _sentences(text: str) -> list[str]:
    """Cut a text into sentences, each with the space behind it."""
    found: list[str] = []
    for piece in _SENTENCE.findall(text):
        if found and _NO_END.search(found[-1].rstrip()[-_ABBREVIATION:]):
            found[-1] += piece
        else:
            found.append(piece)
    return found


def _unnumbered(text: str) -> str:
    """Return `text` without the numbers of lists: 1 at a line's start, and those that follow in turn."""
    following = 1

    def drop(found: re.Match[str]) -> str:
        nonlocal following
        number = int(found[1])
        if number not in (1, following):
            return found[0]
        following = number + 1
        return ""

    return _NUMBER.sub(drop, text)


def _outside(code: re.Pattern[str], text: str, change: Callable[[str], str]) -> str:
    """Change a text outside of code; `code` has one group."""
    return "".join(part if at % 2 else change(part) for at, part in enumerate(code.split(text)))


def _spaced(tokens: Iterable[str]) -> str:
    """Casefolded tokens with bounds, so that a run of them is found as a part of a string."""
    return "\0" + "\0".join(tokens).casefold() + "\0"


def _changes(edit: _Edit) -> Iterable[tuple[str, str]]:
    for i, j, k, n in edit.runs:
        old, new = edit.old_tokens[i:j], edit.new_tokens[k:n]
        parts = [([a], [b]) for a, b in zip(old, new, strict=True)] if len(old) == len(new) else [(old, new)]
        for one, two in parts:
            key, value = "".join(one).strip().casefold(), "".join(two).strip()
            # Another number is another fact.
            fact = any(map(str.isdigit, key)) and any(map(str.isdigit, value))
            if key and key != value.casefold() and len(one) <= _MAX_RUN and not fact:
                yield key, value.lower() if one[0][:1].isupper() and value[1:].islower() else value


def _spelling(old: str, new: str) -> tuple[str, str] | None:
    """The letters in which two spellings of a word differ; None where they are two words."""
    shorter = min(len(old), len(new))
    start = next((n for n in range(shorter) if old[n] != new[n]), shorter)
    stop = next((n for n in range(shorter - start) if old[-1 - n] != new[-1 - n]), shorter - start)
    one, two = old[start : len(old) - stop], new[start : len(new) - stop]
    return (one, two) if len(one) + len(two) <= _MAX_SPELLING <= start + stop + 1 else None


def _replace(text: str, replaced: Mapping[str, str]) -> str:
    """Replace phrases of whole tokens, the longest first; a capital stays one, and a gap closes."""
    tokens = _TOKEN.findall(text)
    plain = [token.casefold() for token in tokens]
    keys: defaultdict[str, list[tuple[list[str], str]]] = defaultdict(list)
    for old, new in sorted(replaced.items(), key=lambda item: -len(item[0])):
        key = _TOKEN.findall(old)
        keys[key[0]].append((key, new))
    out: list[str] = []
    at = 0
    while at < len(tokens):
        key, new = next(((k, v) for k, v in keys.get(plain[at], ()) if plain[at : at + len(k)] == k), ([], ""))
        if not key:
            out.append(tokens[at])
            at += 1
            continue
        big = tokens[at][:1].isupper() or (not new and not out)
        at += len(key)
        if new[:1] in tuple(",;:.!?") and out and out[-1].isspace():
            out.pop()
        if new:
            out.append(new[:1].upper() + new[1:] if big else new)
        elif at < len(tokens) and tokens[at].isspace() and (not out or out[-1].isspace()):
            at += 1
        elif out and out[-1].isspace() and (at == len(tokens) or not _is_word(tokens[at])):
            out.pop()
    return "".join(out)


def _sentence_bounds(changed: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The bound of an answer's sentences, where edits leave out the last ones."""
    lengths: Counter[int] = Counter()
    marks: Counter[str] = Counter()
    texts = [[[_plain(part) for part in _sentences(text)] for text in pair] for pair in changed]
    for before, after in texts:
        if after and len(after) < len(before) and before[: len(after)] == after:
            lengths[len(after)] += 1
            if len(after) == len(before) - 1 and before[-1][-1] != after[-1][-1]:
                marks[before[-1][-1]] += 1
    closing, count = marks.most_common(1)[0] if marks else (".", 0)
    could = sum(before[-1:] != [] and before[-1][-1] == closing for before, _ in texts)
    if closing in _ONE_SENTENCE_MARKS and _enough(count, could):
        return {"no_closing": closing}
    most, count = lengths.most_common(1)[0] if lengths else (0, 0)
    return {"max_sentences": most} if _enough(count, sum(len(before) > most for before, _ in texts)) else {}


def _opening_mark(changed: Sequence[tuple[str, str]]) -> str:
    """The mark of the first sentences that edits leave out; "" where they leave out none, or those of any mark."""
    marks: Counter[str] = Counter()
    firsts: list[str] = []
    for before, after in ([[_plain(part) for part in _sentences(text)] for text in pair] for pair in changed):
        firsts += [before[0][-1]] if len(before) > 1 else []
        if after[:1] == before[1:2] != [] and before[0][-1] != after[0][-1] and _opens(before[0], before[0][-1]):
            marks[before[0][-1]] += 1
    mark, count = marks.most_common(1)[0] if marks else ("", 0)
    return mark if mark and mark in _ONE_SENTENCE_MARKS and _enough(count, firsts.count(mark)) else ""


def _opens(sentence: str, mark: str) -> bool:
    """Whether a first sentence is one that only begins an answer, as "Sure!" does."""
    return sentence.rstrip().endswith(mark) and len(sentence.split()) <= _MAX_OPENING


def _left_out(name: str, changed: Sequence[tuple[str, str]]) -> bool:
    """Whether edits leave out characters of a kind, by the name of an operator's part."""
    operator = Operator(**{name: True})  # type: ignore[arg-type]
    told = [operator.shown(new) for old, new in changed if not operator.shown(old)]
    return _enough(sum(told), len(told))


def _line(text: str) -> str:
    return " ".join(text.split())


def _plain(text: str) -> str:
    return _line(text.casefold())


def _end_mark(changed: Sequence[tuple[str, str]]) -> str:
    """The mark at the end that edits put in the place of others."""
    marks: Counter[str] = Counter()
    olds: list[str] = []
    for texts in changed:
        (old, old_mark), (new, new_mark) = ((_plain(bare := t.rstrip(_END_MARKS)), t[len(bare) :]) for t in texts)
        olds.append(old_mark)
        if old == new and old_mark != new_mark:
            marks[new_mark] += 1
    mark, count = marks.most_common(1)[0] if marks else ("", 0)
    return mark if _enough(count, sum(old != mark for old in olds)) else ""


def _case(changed: Sequence[tuple[str, str]]) -> Literal["", "lower", "upper"]:
    ways: tuple[tuple[Literal["lower", "upper"], Callable[[str], str]], ...] = (
        ("lower", str.lower),
        ("upper", str.upper),
    )
    for case, change in ways:
        told = [new == change(new) for old, new in changed if old != change(old)]
        if _enough(sum(told), len(told)):
            return case
    return ""


class EditedText:
    """An answer that is edited while it grows: what has left is never taken back."""

    def __init__(self, operator: Operator) -> None:
        self.text = ""
        """The edited text so far."""
        self._operator = operator
        self._growing = replace(operator, ends="", end_mark="", no_closing="")
        marks = operator.end_mark or operator.no_closing
        self._waits = bool(marks or (operator.max_sentences and operator.replaced))
        """Whether the text depends on how it ends, so that nothing leaves before."""
        phrases = [_TOKEN.findall(phrase) for phrase in (*operator.replaced, operator.begins, operator.ends)]
        # The model may write an ending itself, even twice.
        self._held_tokens = 2 + 2 * max(map(len, phrases))
        self._looked = 0

    def push(self, raw: str) -> None:
        """Edit what can no longer change of an answer that has grown to `raw`."""
        # Each look reads the whole text: the longer it is, the rarer they are.
        if not self._waits and len(raw) - self._looked >= max(_STRIDE, len(raw) // 32):
            self._looked = len(raw)
            settled = _before_code("".join(_TOKEN.findall(raw)[: -self._held_tokens]).rstrip())
            # Where a phrase begins before the cut and ends behind it, the two differ.
            edited = commonprefix([self._growing.apply(settled), self._growing.apply(raw)])
            if self._knows_its_opening(settled) and edited.startswith(self.text):
                self.text = edited

    def _knows_its_opening(self, settled: str) -> bool:
        """Whether the first sentence that stays has ended, so that it is known to stay."""
        if self.text or not self._operator.no_opening:
            return True
        return len(_sentences(replace(self._growing, begins="", max_sentences=0).apply(settled))) > 1

    def end(self, raw: str, whole: bool) -> None:
        """Edit the rest of an answer that ended as `raw`; without `whole` it was cut and gets no ending."""
        edited = (self._operator if whole else self._growing).apply(raw)
        # Where the end shows that the beginning was to be edited otherwise, only the rest is.
        self.text += edited[len(self.text) :]


def _before_code(text: str) -> str:
    """Return a text up to a mark of code that is still open."""
    *closed, last = _CODE.split(text)
    return "".join(closed) + last.split("`")[0] if len(closed) % 2 == 0 else text
