"""Answers follow their grammar to its end, whatever else happens to them, and nobody else's answer changes."""

from __future__ import annotations

import asyncio
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from edged.engine import drafts
from edged.engine.request import Request
from edged.engine.sampling.params import Sampling, SamplingRow
from edged.engine.sampling.sampler import is_plain, sample
from edged.text.grammar import NOT_FOLLOWED, Constraint, Grammar, GrammarCompiler, GrammarMatcher
from edged.text.tokenizer import Tokenizer
from tests.engine.harness import random_ids, request, running_engine, wait_idle
from tests.models import byte_tokenizer, save_tiny

TOKENIZER = Tokenizer(byte_tokenizer(), "tiny")
ENDS = {ord_: 2.0 for ord_ in TOKENIZER.encode_answer('"}]')}
"""Biases by which a model that knows no words comes to the end of texts and lists."""


def compiled(*constraints: Constraint) -> list[Grammar]:
    async def all_of() -> list[Grammar]:
        compiler = GrammarCompiler(TOKENIZER)
        return [await compiler.compile(constraint) for constraint in constraints]

    return asyncio.run(all_of())


def schema_grammar(schema: Any) -> Grammar:
    return compiled(Constraint("json", json.dumps(schema), "", strict=True))[0]


def asked_of(grammar: Grammar, count: int, **sampling: Any) -> list[Request]:
    """Requests for `count` answers to as many prompts."""
    return [asked(f"{seed}", random_ids(20, seed), grammar, seed=seed, **sampling) for seed in range(count)]


def asked(name: str, prompt: list[int], grammar: Grammar | None, tokens: int = 300, **sampling: Any) -> Request:
    options = {"temperature": 1.0, "max_tokens": tokens, "stop_token_ids": (2,), "logit_bias": ENDS, **sampling}
    return Request(name, tuple(prompt), Sampling(grammar=grammar, **options))


def answers(folder: Path, requests: list[Request], **settings: Any) -> tuple[dict[str, list[int]], dict[str, str], Any]:
    """The tokens of each answer, its finish reason, and the totals."""
    with running_engine(folder, **settings) as (engine, client):
        for each in requests:
            engine.submit(each)
        client.wait(lambda: len(client.finished) == len(requests), 120.0)
        wait_idle(engine)
        reasons = {name: event.reason for name, event in client.finished.items()}
        return {name: client.ids(name) for name in reasons}, reasons, engine.status()["totals"]


def text_of(ids: list[int]) -> str:
    return TOKENIZER.decode(ids)


def logits_after(folder: Path, prompt: list[int]) -> torch.Tensor:
    """The scores of the next token by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model-llama", dtype=torch.float32)
    with torch.no_grad():
        scores: torch.Tensor = model(torch.tensor([prompt])).logits[0, -1]
    return scores


class Schemas:
    """Schemas of all kinds that are kept to, made at random."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make(self) -> dict[str, Any]:
        shared = self._some(1)
        return {**self._object(3), "$defs": {"shared": shared}}

    def _some(self, depth: int) -> dict[str, Any]:
        kinds = [self._text, self._whole, self._number, self._value, self._plain]
        kinds += [self._object, self._list, self._either, self._reference] if depth > 1 else []
        return self._random.choice(kinds)(depth - 1)

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(["a", "b", "é \n", '"', "type", "enum", "minimum"], self._random.randint(1, 4))
        required = [name for name in names if self._random.random() < 0.8]
        properties = {name: self._some(depth) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _list(self, depth: int) -> dict[str, Any]:
        least = self._random.randint(0, 2)
        return {"type": "array", "items": self._some(depth), "minItems": least, "maxItems": least + 2}

    def _either(self, depth: int) -> dict[str, Any]:
        return {self._random.choice(["anyOf"]): [self._some(depth), self._some(depth)]}

    def _reference(self, _: int) -> dict[str, Any]:
        return {"$ref": "#/$defs/shared"}

    def _text(self, _: int) -> dict[str, Any]:
        of = [{"maxLength": 8}, {"minLength": 2, "maxLength": 5}, {"pattern": "^[a-c]{1,4}x?$"}, {"format": "date"}]
        of += [{"format": "uuid"}, {"pattern": "[0-9]+$", "maxLength": 9}, {"format": "ipv4"}]
        return {"type": "string", **self._random.choice(of)}

    def _whole(self, _: int) -> dict[str, Any]:
        of = [{}, {"minimum": -3, "maximum": 12}, {"exclusiveMinimum": 10**17}, {"multipleOf": 7}, {"maximum": 5}]
        return {"type": self._random.choice(["integer", ["integer", "null"]]), **self._random.choice(of)}

    def _number(self, _: int) -> dict[str, Any]:
        return {"type": "number", "minimum": -1, "exclusiveMaximum": self._random.choice([0, 2.5, 1e3])}

    def _value(self, _: int) -> dict[str, Any]:
        return self._random.choice(
            [{"const": {"type": "integer"}}, {"enum": ["x", 1, None, [2.5]]}, {"const": "\u2028"}]
        )

    def _plain(self, _: int) -> dict[str, Any]:
        return {"type": self._random.choice(["boolean", "null", ["boolean", "null"]])}


@pytest.mark.slow
def test_two_hundred_schemas_are_kept_to_with_preemption_and_without(tmp_path: Path) -> None:
    schemas = {f"s{seed}": Schemas(seed).make() for seed in range(200)}
    grammars = compiled(*(Constraint("json", json.dumps(each), "", strict=True) for each in schemas.values()))
    requests = [
        asked(name, random_ids(20 + seed % 40, seed), grammar, seed=seed)
        for seed, (name, grammar) in enumerate(zip(schemas, grammars, strict=True))
    ]
    roomy, reasons, totals = answers(tmp_path, requests)
    ended = {name: text_of(ids) for name, ids in roomy.items() if reasons[name] == "stop"}
    assert len(ended) > 190, [text_of(roomy[name]) for name in roomy.keys() - ended]
    for name, text in ended.items():
        value = json.loads(text)
        jsonschema.Draft202012Validator(schemas[name]).validate(value)
        json.dumps(value, ensure_ascii=False).encode()
    short, short_reasons, short_totals = answers(tmp_path, requests, cache__memory_mb=1)
    assert short_totals["preemptions"] > totals["preemptions"]
    assert (short, short_reasons) == (roomy, reasons)


PHRASE = TOKENIZER.encode_answer('{"mood": "good", "more": [')
CHAIN = {"type": "object", "properties": {"mood": {"enum": ["good", "bad"]}, "more": {"type": "array", "maxItems": 9}}}
CHAIN["properties"]["more"]["items"] = {"$ref": "#"}  # type: ignore[index]
CHAIN |= {"required": ["mood", "more"], "additionalProperties": False}


def test_drafts_change_no_answer_and_those_that_a_grammar_forbids_are_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "_LEAST_GAIN", 0.0)
    chain, letters = schema_grammar(CHAIN), compiled(Constraint("regex", "[x-z]{60}", ""))[0]
    alike = [asked(f"chain-{seed}", PHRASE * 4, chain, 150, seed=seed, logprobs=1) for seed in range(8)]
    other = [asked(f"letters-{seed}", TOKENIZER.encode_answer("xyz {} ") * 9, letters, seed=seed) for seed in range(4)]
    drafted, reasons, totals = answers(tmp_path, alike + other)
    plain, plain_reasons, none = answers(tmp_path, alike + other, serving__prompt_lookup=False)
    assert (drafted, reasons) == (plain, plain_reasons)
    assert totals["drafted_right"] > 20
    assert none["drafted_tokens"] == 0
    assert all(set(text_of(drafted[each.request_id])) <= set("xyz") for each in other)


def test_a_draft_is_cut_where_the_grammar_forbids_it_or_the_answer_ends() -> None:
    matcher = GrammarMatcher(compiled(Constraint("choice", '["abc", "abd"]', ""))[0], [], 0)
    assert matcher.allowed(TOKENIZER.encode_answer("abxab")) == 2
    assert matcher.allowed(TOKENIZER.encode_answer("zab")) == 0
    with_end = [*TOKENIZER.encode_answer("abc"), TOKENIZER.eos_id]
    assert matcher.allowed([*with_end, *with_end]) == 3
    masks = np.full((4, -(-matcher.grammar.vocab // 32)), -1, np.int32)
    matcher.fill(masks, with_end[:3])
    may = [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() for row in masks]
    assert may == [*(TOKENIZER.encode_answer(letters) for letters in ("a", "b", "cd")), [TOKENIZER.eos_id]]
    assert not matcher.error
    assert matcher.allowed(with_end) == 3, "the answer itself has not begun"


def test_neighbours_get_the_very_tokens_and_probabilities_that_they_get_without() -> None:
    grammar = schema_grammar(CHAIN)
    kinds = [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"logit_bias": {9: 3.0}}]
    of = [Sampling(**{"logprobs": 2, **kind}) for kind in kinds]  # type: ignore[arg-type]
    free = [SamplingRow(each, seed, 3) for seed, each in enumerate(of)]
    bound = [SamplingRow(each, seed, 0, matcher=GrammarMatcher(grammar, [], 0)) for seed, each in enumerate(of)]
    beside = [row for pair in zip(free, bound, strict=True) for row in pair]
    logits = torch.randn(len(beside), grammar.vocab, generator=torch.Generator().manual_seed(1)) * 4
    drawn = sample(logits.clone(), beside).read()
    without = sample(logits[::2].clone(), free).read()
    assert drawn.token_ids[::2] == without.token_ids
    assert drawn.logprobs[::2] == without.logprobs
    assert drawn.tops[::2] == without.tops
    assert {text_of([token]) for token in drawn.token_ids[1::2]} == {"{"}


@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 4}, {"top_p": 0.3}, {"min_p": 0.2}, {"repetition_penalty": 1.8}, {"temperature": 0.0}],
    ids=str,
)
def test_whatever_else_shapes_the_distribution_answers_follow_their_grammar(
    tmp_path: Path, sampling: dict[str, Any]
) -> None:
    grammar = compiled(Constraint("regex", "(ab|cd){2,6}[0-9]", ""))[0]
    texts, reasons, _ = answers(tmp_path, asked_of(grammar, 6, **sampling))
    assert set(reasons.values()) == {"stop"}
    assert all(re.fullmatch("(ab|cd){2,6}[0-9]", text_of(ids)) for ids in texts.values())


def test_temperature_0_takes_the_likeliest_of_what_is_allowed_and_log_probabilities_are_the_models(
    tmp_path: Path,
) -> None:
    letters = TOKENIZER.encode_answer("aeiouxyz")
    grammar = compiled(Constraint("regex", "[aeiouxyz]", ""))[0]
    requests = asked_of(grammar, 8, temperature=0.0, logprobs=1, logit_bias={})
    with running_engine(tmp_path) as (engine, client):
        for each in requests:
            engine.submit(each)
        client.wait(lambda: len(client.finished) == len(requests))
    for each in requests:
        scores = logits_after(tmp_path, list(each.prompt_ids))
        first = client.tokens[each.request_id][0]
        assert first.token_id == letters[int(scores[letters].argmax())]
        assert first.logprob == pytest.approx(float(scores.log_softmax(-1)[first.token_id]), abs=1e-4)
        assert first.top is not None
        assert first.top[0][0] == int(scores.argmax()), "alternatives are the model's, allowed or not"


def test_an_answer_that_another_node_began_goes_on_where_its_grammar_is(tmp_path: Path) -> None:
    requests = asked_of(schema_grammar(CHAIN), 4)
    whole, reasons, _ = answers(tmp_path, requests)
    assert set(reasons.values()) == {"stop"}
    begun = [replace(each, resumed_ids=tuple(whole[each.request_id][:9])) for each in requests]
    rest, reasons, _ = answers(tmp_path, begun)
    assert rest == {name: ids[9:] for name, ids in whole.items()}
    assert set(reasons.values()) == {"stop"}


def test_every_end_token_may_end_an_answer_and_none_that_pads_the_vocabulary_is_drawn(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model-llama", vocab_size=300, eos_token_id=[2, 0])
    tokenizer = Tokenizer.load(tmp_path / "model-llama")
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (300, {0, 2})

    async def compile_it() -> Grammar:
        return await GrammarCompiler(tokenizer).compile(Constraint("regex", "[a-z]{1,20}", ""))

    about = {"temperature": 2.0, "stop_token_ids": (0, 2), "logit_bias": {0: 3.0, 2: 3.0}}
    texts, reasons, _ = answers(tmp_path, asked_of(asyncio.run(compile_it()), 40, **about))
    assert set(reasons.values()) == {"stop"}
    assert {ids[-1] for ids in texts.values()} == {0, 2}
    assert all(re.fullmatch("[a-z]{1,20}", text_of(ids)) for ids in texts.values())


def test_a_grammar_that_takes_too_long_ends_its_own_answer_with_an_error(tmp_path: Path) -> None:
    (grammar,) = compiled(Constraint("grammar", 'start: (x y)*\nx: x x | "a"\ny: y y | "a"', ""))
    with running_engine(tmp_path) as (engine, client):
        engine.submit(asked("slow", random_ids(20, 1), grammar, 400, logit_bias={2: -100.0}))
        engine.submit(request("other", random_ids(20, 2), 60))
        client.wait(lambda: len(client.finished) == 2)
        assert client.finished["slow"].reason == "error"
        assert client.finished["slow"].error.startswith(NOT_FOLLOWED)
        assert client.finished["other"].reason == "length"
        assert 10 < len(client.ids("slow")) < 300
        wait_idle(engine)
        pages = engine.status()["pages"]
        assert pages["free"] + pages["cached"] == pages["total"]


def test_an_answer_that_follows_a_grammar_leaves_captured_sampling() -> None:
    (grammar,) = compiled(Constraint("regex", "a", ""))
    row = SamplingRow(Sampling(grammar=grammar), seed=1, step=0, matcher=GrammarMatcher(grammar, [], 0))
    assert not is_plain(row)
