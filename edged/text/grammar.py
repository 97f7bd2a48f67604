"""Grammars that answers must follow: compiled by llguidance beside the event loop, and matched token by token."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal
from urllib.parse import unquote

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from edged.text.call_form import rules_before, rules_of_calls
from edged.text.tokenizer import Tokenizer, TokenizerError, any_of

_WHITE_SPACE = "[ \n]{1,2}"
"""White space between the parts of JSON. Unbounded, small models write nothing else; without any, they close lists."""
_LARGEST = 2**53 - 1
"""The largest integer of I-JSON (RFC 7493), for integers without bounds: their digits would not end."""
_STACK_BYTES = 256 << 20
"""Stack of the thread that compiles: the compiler recurses by rules that name each other, and 8 MiB hold 800."""
_COMPILE_S = 10.0
_KEPT = 64
_LIMITS = LLParserLimits(step_max_items=4000, step_lexer_fuel=100_000, max_lexer_states=20_000, verbose_errors=False)
"""Bounds on the work and the memory of a mask."""
_SPARE_S, _TOKEN_S = 0.25, 2e-3
"""CPU time that a grammar's masks may take, at once and a token: those of ambiguous rules grow to seconds."""
NOT_FOLLOWED = "the answer cannot follow its grammar any further"
"""The beginning of the error of an answer that ends for its grammar."""
_SCHEMA_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_VALUES = {"const", "enum", "default", "examples"}
_TOLD = {"title", "description", "default", "examples", "$comment", "$schema", "$id", "$ref"}
"""Keywords whose texts are in no answer."""
_DESCRIBES = {"type", "properties", "required", "title", "description", "$defs", "definitions", "$schema", "examples"}
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")
_TERMINAL = re.compile(r'"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|//[^\n]*')
_NOT_ERASED = re.compile(r"%json|%regex|@|<")
_ROUNDS = 16
"""The most rounds in which it is looked whether a schema's references end."""
_BOUNDS = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_ENDLESS = "no answer that follows it has an end"


class GrammarRefused(ValueError):
    """Nothing can follow this constraint, or it is too much work; the message says why."""


@dataclass(frozen=True, slots=True)
class CalledTools:
    """The tools that an answer must call, or may.

    `text` is a JSON list of `[name, schema of the arguments, whether that is strict]`; an answer has at most `most`
    calls.
    """

    text: str
    most: int
    must: bool


@dataclass(frozen=True, slots=True)
class Constraint:
    """The constraint on an answer that a request's `field` asks for.

    `text` is a JSON schema ("json"), a regular expression, a JSON list of texts ("choice"), or a grammar in Lark or
    GBNF; "text" is any text. `strict` refuses a schema with a keyword that cannot be kept; otherwise `Grammar.ignored`
    names it. `calls` are what the answer must have instead, or may.
    """

    kind: Literal["json", "regex", "choice", "grammar", "text"]
    text: str
    field: str
    strict: bool = False
    calls: CalledTools | None = None

    @property
    def size(self) -> int:
        """The characters in it."""
        return len(self.text) + (len(self.calls.text) if self.calls is not None else 0)


class Grammar:
    """A compiled constraint; each answer has a matcher of its own.

    `ignored` are the keywords of the schema that have no effect.
    """

    def __init__(self, compiled: LLMatcher, tokenizer: LLTokenizer, ignored: tuple[str, ...]) -> None:
        self.compiled, self.ignored = compiled, ignored
        self.vocab, self.end_ids = tokenizer.vocab_size, frozenset(tokenizer.eos_tokens)
        self._left_s = _SPARE_S
        """CPU time that its masks may still take."""

    def spend(self, seconds: float) -> bool:
        """Count the CPU time of a token's masks; return whether all of them together took too long."""
        self._left_s = min(_SPARE_S, self._left_s + _TOKEN_S) - seconds
        return self._left_s < 0


class GrammarMatcher:
    """The state of one answer's grammar, which follows the answer's tokens where they are kept."""

    def __init__(self, grammar: Grammar, token_ids: list[int], prompt_tokens: int) -> None:
        """`token_ids` are the prompt's and the answer's so far, to which others will be appended."""
        self.grammar, self._matcher = grammar, grammar.compiled.deep_copy()
        self._token_ids, self._known = token_ids, prompt_tokens
        self.error = ""
        """The reason for which the answer cannot go on."""

    def _follow(self) -> LLMatcher:
        """Take in the tokens that were appended since the last call."""
        if fresh := self._token_ids[self._known :]:
            self._known += len(fresh)
            self._matcher.consume_tokens(fresh)
        return self._matcher

    def allowed(self, draft: Sequence[int]) -> int:
        """Return how many of the tokens of a draft may follow, before one that ends the answer."""
        ends = (at for at, token in enumerate(draft) if token in self.grammar.end_ids)
        return self._follow().validate_tokens([*draft[: next(ends, len(draft))]])

    def fill(self, masks: np.ndarray, draft: Sequence[int]) -> None:
        """Set the mask of the next token, and of the one after each token of `draft`, which must be allowed.

        `masks` is int32 [1 + draft, words of 32 tokens], the lowest bit first; a mask that fails sets `error`.
        """
        began_s, matcher, to = time.thread_time(), self._follow(), masks.ctypes.data
        for token in (*draft, None):
            matcher.unsafe_compute_mask_ptr(to, masks.strides[0])
            to += masks.strides[0]
            if token is not None:
                matcher.consume_token(token)
        if draft:
            matcher.rollback(len(draft))
        slow = self.grammar.spend(time.thread_time() - began_s)
        if matcher.is_error():
            self.error = f"{NOT_FOLLOWED}: {_reason(matcher.get_error())}"
        elif slow:
            self.error = f"{NOT_FOLLOWED}: a token takes longer than {_TOKEN_S * 1e3:g} ms; make it less ambiguous"


class GrammarCompiler:
    """Compiles constraints in a thread of its own, and keeps the latest grammars."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Begin to read the tokenizer's tokens, which takes about a second for 100,000."""
        self._thread, self._kept = ThreadPoolExecutor(1, "edged-grammar"), OrderedDict[bytes, Grammar]()
        before = threading.stack_size(_STACK_BYTES)
        self._text = tokenizer
        self._tokenizer = self._thread.submit(tokenizer.for_grammars)
        threading.stack_size(before)

    async def compile(self, constraint: Constraint, reasoning: tuple[str, str, bool] | None = None) -> Grammar:
        """Return the constraint's grammar, or raise GrammarRefused.

        `reasoning` comes before what follows the constraint: its two marks, and whether the prompt has begun it.
        """
        calls = constraint.calls and [constraint.calls.text, constraint.calls.most, constraint.calls.must]
        about = json.dumps([constraint.kind, constraint.strict, constraint.text, calls, reasoning])
        key = hashlib.sha256(about.encode()).digest()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        try:
            compiled = asyncio.wrap_future(self._thread.submit(self._compile, constraint, reasoning))
            grammar = self._kept[key] = await asyncio.wait_for(compiled, _COMPILE_S)
        except TimeoutError:
            raise GrammarRefused(f"it is not compiled after {_COMPILE_S:g} s: make it smaller, or try again") from None
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return grammar

    def _compile(self, constraint: Constraint, reasoning: tuple[str, str, bool] | None) -> Grammar:
        try:
            tokenizer = self._tokenizer.result()
        except TokenizerError as error:
            raise GrammarRefused(str(error)) from None
        ignored: list[str] = []
        grammar, ends = "", True
        try:
            if constraint.kind in ("json", "choice", "regex"):
                self._demand_plain(constraint.text if constraint.kind == "regex" else json.loads(constraint.text))
            if constraint.kind == "json":
                schema, ignored = bounded_schema(json.loads(constraint.text), constraint.strict)
                grammar, ends = LLMatcher.grammar_from_json_schema(schema), _schema_ends(schema)
            elif constraint.kind != "text":
                grammar = grammar_from(constraint.kind, constraint.text)
                ends = constraint.kind != "grammar" or _rules_end(grammar, tokenizer)
            calls = ""
            if constraint.calls is not None:
                calls, dropped = self._rules_of_calls(constraint.calls, tokenizer, bool(grammar))
                ignored += dropped
            if calls or reasoning is not None:
                grammar = _joined(rules_before(reasoning, self._write), calls, grammar)
        except RecursionError:
            raise GrammarRefused("it is nested too deeply") from None
        except ValueError as error:
            raise GrammarRefused(_reason(str(error))) from None
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            # The first mask is the costliest: copies know it. It shows what is too complex, and what has no answer.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarRefused(_reason(matcher.get_error()))
        if not ends or (matcher.is_stopped() and not matcher.is_accepting()):
            raise GrammarRefused(_ENDLESS)
        ignored += [name for warning in matcher.get_grammar_warnings() for name in _keywords(warning)]
        return Grammar(matcher, tokenizer, tuple(dict.fromkeys(ignored)))

    @cached_property
    def _special(self) -> dict[str, int]:
        """Tokens that are no text to llguidance, by name: those of chat templates too, such as Qwen's `<think>`."""
        tokenizer = self._tokenizer.result()
        found = filter(tokenizer.is_special_token, range(tokenizer.vocab_size))
        return {tokenizer.decode_bytes([token]).decode("utf-8", "replace"): token for token in found}

    @cached_property
    def _special_name(self) -> re.Pattern[str]:
        return re.compile(f"({any_of(filter(None, self._special)) or '(?!)'})")

    def _demand_plain(self, schema: Any) -> None:
        """Raise GrammarRefused for a text of a schema, or of a list or a pattern, that names a special token.

        llguidance takes what must come next for that token, which ends the answer or breaks its grammar.
        """
        if found := next(filter(None, map(self._special_name.search, _texts(schema))), None):
            told = f'"{found[0]}" is a special token of this model, and no answer has its name as text'
            raise GrammarRefused(f"{told}: write it in other words")

    def _write(self, text: str) -> str:
        """Return a text as Lark has it, with special tokens by number."""
        parts = filter(None, self._special_name.split(text))
        made = [f"<[{self._special[part]}]>" if part in self._special else json.dumps(part) for part in parts]
        return " ".join(made) or '""'

    def _rules_of_calls(self, calls: CalledTools, tokenizer: LLTokenizer, alone: bool) -> tuple[str, list[str]]:
        """Return the Lark rules of an answer's calls, `alone` or with text, and keywords of their schemas left out."""
        tools, ignored = [], []
        for name, parameters, strict in json.loads(calls.text):
            self._demand_plain(parameters)
            schema, dropped = bounded_schema(_closed(parameters), strict)
            grammar = LLMatcher.grammar_from_json_schema(schema)
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
            if matcher.is_error() or not _schema_ends(schema):
                told = _reason(matcher.get_error()) if matcher.is_error() else _ENDLESS
                raise GrammarRefused(f'the parameters of "{name[:80]}": {told}')
            tools.append((name, schema))
            ignored += dropped
        form = self._text.call_form
        rules = rules_of_calls(form, tools, calls.most, calls.must or alone, self._write)
        return rules, ignored


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call's arguments, an object; where it names some and no rule for others, it has no others.

    Small models make up further ones without end.
    """
    named, needed = parameters.get("properties"), parameters.get("required") or ()
    if isinstance(named, dict) and not parameters.keys() - _DESCRIBES and named.keys() >= {*map(str, needed)}:
        parameters = {**parameters, "additionalProperties": False}
    return {**parameters, "type": "object"}


def _joined(before: str, calls: str, answer: str) -> str:
    """Return the grammar of calls or of an `answer`, either of which may be none, behind what comes `before` it."""
    bodies = [*["calls"] * bool(calls), *["@answer"] * bool(answer)]
    rules = [f"start: before ({' | '.join(bodies)})", before, calls, "TEXT: /(.|\\n)*/"]
    grammars: list[dict[str, Any]] = [{"name": "start", "lark_grammar": "\n".join(rules)}]
    if answer:
        parts = json.loads(answer)["grammars"] if answer.lstrip().startswith("{") else [{"lark_grammar": answer}]
        grammars += [{**parts[0], "name": "answer"}, *parts[1:]]
    return json.dumps({"grammars": grammars})


def bounded_schema(schema: dict[str, Any], strict: bool) -> tuple[dict[str, Any], list[str]]:
    """Return a JSON schema whose answers end, with llguidance's options in it, and the keywords that were left out.

    Integers without bounds get those of I-JSON, and white space is bounded. Unless `strict`, patterns that look around
    are left out, `oneOf` is read as `anyOf`, and unknown keywords are ignored.
    """
    dropped: list[str] = []

    def bounded(part: Any, named: bool = False) -> Any:
        """Return a part of the schema, or, `named`, an object of parts by name."""
        if isinstance(part, list):
            return [bounded(each) for each in part]
        if not isinstance(part, dict):
            return part
        if named:
            return {name: bounded(each) for name, each in part.items()}
        made = {key: value if key in _VALUES else bounded(value, key in _SCHEMA_MAPS) for key, value in part.items()}
        if not strict and isinstance(pattern := part.get("pattern"), str) and _LOOKS_AROUND.search(pattern):
            dropped.append("pattern")
            del made["pattern"]
        types = part.get("type")
        if types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types):
            given = [value for key in _BOUNDS for bound in key if isinstance(value := part.get(bound), int | float)]
            if all(abs(value) <= _LARGEST for value in given):
                least, most = ((inclusive in part or other in part) for inclusive, other in _BOUNDS)
                made |= ({} if least else {"minimum": -_LARGEST}) | ({} if most else {"maximum": _LARGEST})
        return made

    options = {"whitespace_pattern": _WHITE_SPACE, "lenient": not strict, "coerce_one_of": not strict}
    return {**bounded(schema), "x-guidance": options}, dropped


def _texts(part: Any, named: bool = False) -> Iterator[str]:
    """Yield the texts of a schema, or, `named`, of an object of schemas by name, that an answer may have."""
    if isinstance(part, str):
        yield re.sub(r"\\(.)", r"\1", part)
    elif isinstance(part, list):
        for each in part:
            yield from _texts(each)
    elif isinstance(part, dict):
        for key, value in part.items():
            if named or key not in _TOLD:
                yield key
                yield from _texts(value, not named and key in _SCHEMA_MAPS)


def _schema_ends(schema: dict[str, Any]) -> bool:
    """Whether a finite value may follow a schema; true, too, where that is not easily seen."""
    targets = {reference: _target(schema, reference) for reference in _references(schema)}
    ending = {reference for reference, target in targets.items() if target is None}

    def ends(part: Any) -> bool:
        if not isinstance(part, dict) or "const" in part or "enum" in part:
            return True
        several = [part[key] for key in ("anyOf", "oneOf") if isinstance(part.get(key), list)]
        needed = [part["allOf"]] if isinstance(part.get("allOf"), list) else []
        properties, items = part.get("properties"), part.get("items")
        if part.get("type") == "object" and isinstance(properties, dict) and isinstance(part.get("required"), list):
            needed.append([properties.get(str(name)) for name in part["required"]])
        if part.get("type") == "array" and part.get("minItems") and "prefixItems" not in part:
            needed.append([items])
        reference = part.get("$ref")
        return (
            (reference not in targets or reference in ending)
            and all(any(map(ends, each)) for each in several)
            and all(all(map(ends, each)) for each in needed)
        )

    for _ in range(_ROUNDS):
        before = len(ending)
        # The innermost are mostly the last.
        for each in reversed(targets):
            if each not in ending and ends(targets[each]):
                ending.add(each)
        if len(ending) == before:
            return ends(schema)
    return True


def _references(part: Any) -> Iterator[str]:
    """Yield the references to parts of the same schema."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            yield value
        yield from _references(value)


def _target(schema: Any, reference: str) -> Any:
    """Return the part that a reference points at, or None."""
    part = schema
    for name in unquote(reference).split("/")[1:]:
        part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, dict) else None
    return part if reference[1:2] in ("", "/") else None


def _rules_end(grammar: str, tokenizer: LLTokenizer) -> bool:
    """Whether a finite text follows a grammar's rules; true, too, where that is not easily seen.

    Some does if and only if the empty text follows the rules in which every terminal is empty.
    """
    erased = _TERMINAL.sub(lambda found: "" if found[0].startswith("//") else '""', grammar)
    if _NOT_ERASED.search(erased):
        return True
    matcher = LLMatcher(tokenizer, erased, log_level=0, limits=_LIMITS)
    return matcher.is_error() or matcher.is_accepting()


def _keywords(message: str) -> list[str]:
    """Return the keywords of a schema that a message of the compiler says it cannot keep."""
    if found := re.match(r"Unimplemented keys: (\[.*\])", message):
        return [str(name) for name in json.loads(found[1])]
    known = {"oneOf": "oneOf", "Unknown format": "format"}
    return [keyword for begins, keyword in known.items() if message.startswith(begins)]


def _reason(message: str) -> str:
    """Return the reason for which a grammar is refused, from a message of the compiler."""
    if keywords := _keywords(message):
        named = ", ".join(f'"{name}"' for name in keywords)
        return f'{named} cannot be kept: leave it out, or send "strict": false'
    if "NoExtension" in message:
        return _ENDLESS
    # A regular expression's error is below a drawing of it.
    if found := re.search(r"^error: (.+)$", message, re.MULTILINE):
        what = '"pattern"' if message.startswith("regex") else "a regular expression"
        return f"{what}: {found[1]}"
    return message.strip().partition("\n")[0][:200]
