"""What a person gets from an adapter: generated answers, judged by the person's taste and by the base model.

One `Bench` holds an engine, which learns and answers, and transformers with peft beside it as the judge, which computes
NLL and KL: no figure is the engine's own word.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from benchmarks.sequential_dpo import Reference
from benchmarks.support.preference_streams import DemoTaste, Taste, liking, relabel
from edged.align.feedback.pair import PairRetired, PairScored, Record, TokenPair, VersionPublished
from edged.align.language import neutral_pairs, repetition
from edged.engine.engine import Engine
from edged.engine.request import Event, FinishEvent, Request, Sampling, TokenEvent
from edged.settings.load import Settings
from edged.text.tokenizer import Tokenizer
from examples.demo_model.dialogues import prompts

Tokens = tuple[int, ...]


_ANSWER_TOKENS = 120
"""Answers are cut there."""
_LONGEST_S = 1800.0
"""Learning or answering that takes longer has gone wrong."""


class RunError(RuntimeError):
    """A run did not come to its end; the message says where."""


@dataclass
class Records:
    """The engine's callbacks keep here answers by request, pairs' latest states, prequential scores and versions."""

    answers: dict[str, list[int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    scores: list[PairScored] = field(default_factory=list)
    states: dict[int, PairRetired] = field(default_factory=dict)
    versions: list[VersionPublished] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def deliver(self, events: list[Event]) -> None:
        """Take tokens and ends in."""
        with self.changed:
            for event in events:
                if isinstance(event, TokenEvent):
                    self.answers.setdefault(event.request_id, []).append(event.token_id)
                elif isinstance(event, FinishEvent):
                    self.ended.add(event.request_id)
            self.changed.notify_all()

    def take(self, records: list[Record]) -> None:
        """Take the learning loop's records in."""
        with self.changed:
            for record in records:
                if isinstance(record, PairRetired):
                    self.states[record.pair_id] = record
                elif isinstance(record, PairScored) and record.split == "prequential":
                    self.scores.append(record)
                elif isinstance(record, VersionPublished):
                    self.versions.append(record)
            self.changed.notify_all()

    def settled(self, ids: Sequence[int]) -> bool:
        """Whether each of these pairs has an outcome."""
        return all(pair in self.states and self.states[pair].state != "queued" for pair in ids)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Until `condition` holds. Raises RunError."""
        with self.changed:
            if not self.changed.wait_for(condition, _LONGEST_S):
                raise RunError(f"{what} was not done after {_LONGEST_S:g} s")


@dataclass(frozen=True, slots=True)
class Exam:
    """Prompts that no adapter learns from, with the base model's own answers to them."""

    prompts: Sequence[Tokens]
    greedy: Sequence[Tokens]
    sampled: Sequence[Tokens]
    unseen: Sequence[TokenPair]
    """Pairs that no adapter learns from: text by others, for NLL, KL and reward accuracy."""


class Bench:
    """An engine, the judge and the pairs."""

    def __init__(self, model: Path, settings: Settings, reference: Reference) -> None:
        """Raises what building an engine raises."""
        self.settings, self.reference, self.codec = settings, reference, Tokenizer.load(model)
        self.records = Records()
        self._folder = tempfile.TemporaryDirectory(prefix="edged-")
        self._numbers = itertools.count()
        self.engine = Engine.build(settings, model, self.records.deliver, self.records.take, Path(self._folder.name))
        self.engine.start()
        self.engine.test_with(neutral_pairs(self.codec))

    def close(self) -> None:
        """Stop the engine and remove its adapters."""
        self.engine.stop(0.0)
        self._folder.cleanup()

    def answers(self, asked: Sequence[Tokens], adapter: str | None, temperature: float) -> list[Tokens]:
        """The answers to prompts in tokens, EOS included where there is one; those of equal seeds are equal."""
        ids = [f"exam-{next(self._numbers)}" for _ in asked]
        for seed, (request_id, prompt) in enumerate(zip(ids, asked, strict=True)):
            sampling = Sampling(max_tokens=_ANSWER_TOKENS, temperature=temperature, seed=seed)
            self.engine.submit(Request(request_id, prompt, sampling, adapter))
        self.records.wait(lambda: self.records.ended.issuperset(ids), "an exam")
        return [tuple(self.records.answers.pop(request_id, ())) for request_id in ids]

    def exam(self, asked: Sequence[Tokens], unseen: Sequence[TokenPair]) -> Exam:
        """The base model's part of an exam."""
        return Exam(asked, self.answers(asked, None, 0.0), self.answers(asked, None, 1.0), unseen)

    def own_pairs(self, count: int, seed: int, fresh: bool = False) -> list[TokenPair]:
        """Pairs of the demo model's own answers to questions of daily life, two sampled ones each."""
        source = prompts(seed, fresh=fresh, with_units=True)
        asked = [tuple(self.codec.render_chat([{"role": "user", "content": next(source)}])) for _ in range(count)]
        both: list[list[Tokens]] = []
        for first in range(0, count, 256):
            part = asked[first : first + 256]
            both += [self.answers([p for p in part for _ in range(2)], None, 1.0)[side::2] for side in (0, 1)]
        chosen, rejected = (list(itertools.chain(*both[side::2])) for side in (0, 1))
        return [
            TokenPair(first, "", *parts)
            for first, parts in enumerate(zip(asked, chosen, rejected, strict=True), 1)
            if parts[1] and parts[2]
        ]

    # -- one adapter -------------------------------------------------------------------------------------------------

    def learn(self, pairs: Sequence[TokenPair], one_by_one: bool) -> list[PairScored]:
        """Have an adapter learn `pairs`, all at once or each when the one before is learned; their scores before."""
        first = len(self.records.scores)
        states = self.records.states
        for part in [[pair] for pair in pairs] if one_by_one else [list(pairs)]:
            ids = [pair.pair_id for pair in part]
            for pair_id in ids:
                states.pop(pair_id, None)
            self.engine.submit_pairs(part)
            self.records.wait(partial(self.records.settled, ids), "learning")
        return self.records.scores[first:]

    def measure(self, exam: Exam, adapter: str, weights: Path, taste: Taste | DemoTaste) -> dict[str, Any]:
        """What a person gets: answers by taste and fluency; and NLL, KL and reward accuracy of unseen pairs.

        The adapter's present weights are written to the file `weights`, in PEFT's format.
        """
        save_file(self.engine.weights(adapter).result()[1], weights)
        file = str(weights)
        unseen = relabel(exam.unseen, taste, adapter, self.codec.decode)
        margins = [(c - rc) - (r - rr) for c, r, rc, rr in self.reference.score(unseen, file)]
        texts = [(pair.prompt, answer) for pair in exam.unseen for answer in (pair.chosen, pair.rejected)]
        judged = self.reference.language(texts, file, keep=True)
        tokens = sum(len(answer) for _, answer in texts)
        nll, base_nll, kl = (sum(column) / tokens for column in zip(*judged, strict=True))
        neutral = [(pair.prompt, text) for pair in neutral_pairs(self.codec) for text in (pair.chosen, pair.rejected)]
        asked = [(pair.prompt[:1], pair.prompt[1:]) for pair in exam.unseen]
        found = {
            "neutral_change": self._nll_change(neutral, file),
            "prompts_change": self._nll_change(asked, file),
            "held_out_accuracy": sum(margin > 0 for margin in margins) / len(margins),
            "nll": nll,
            "base_nll": base_nll,
            "nll_change": nll / base_nll - 1.0,
            "kl_nats": kl,
        }
        for kind, temperature, before in (("greedy", 0.0, exam.greedy), ("sampled", 1.0, exam.sampled)):
            found[kind] = self._judge(exam, self.answers(exam.prompts, adapter, temperature), before, taste, file)
        return found

    def _nll_change(self, texts: Sequence[tuple[Tokens, Tokens]], file: str) -> float:
        """Relative change of the NLL of texts against the base model's."""
        policy, base, _ = map(sum, zip(*self.reference.language(texts, file, keep=True), strict=True))
        return policy / base - 1.0

    def _judge(
        self, exam: Exam, answers: Sequence[Tokens], before: Sequence[Tokens], taste: Taste | DemoTaste, file: str
    ) -> dict[str, Any]:
        """Answers of one kind beside the base model's: shares that follow the taste, lengths, fluency, repetition."""
        said = [(p, a) for p, a in zip(exam.prompts, answers, strict=True) if a]
        tokens = sum(len(a) for _, a in said)
        rows = self.reference.language(said, file)
        report = {
            "tokens": statistics.fmean(map(len, answers)),
            "tokens_base": statistics.fmean(map(len, before)),
            "repetition": statistics.fmean(map(repetition, answers)),
            "repetition_base": statistics.fmean(map(repetition, before)),
            "base_nll": sum(row[1] for row in rows) / tokens,
            # Of its own sampled answers the difference of both NLLs is an estimate of KL(policy || base).
            "own_kl_nats": sum(row[1] - row[0] for row in rows) / tokens,
            "texts": [self.codec.decode(a) for a in answers[:3]],
        }
        if taste != "human":
            liked, liked_before = (
                [liking(taste, a, self.codec.decode(a)) for a in given] for given in (answers, before)
            )
            bound = statistics.median(liked_before) if taste in ("concise", "elaborate") else 0.0
            report["follow"], report["follow_base"] = (
                sum((x > bound) + 0.5 * (x == bound and bound != 0.0) for x in given) / len(given)
                for given in (liked, liked_before)
            )
        return report


def stream(
    pairs: Sequence[TokenPair],
    taste: Taste | DemoTaste,
    adapter: str,
    decode: Callable[[Sequence[int]], str],
    seed: int,
) -> list[TokenPair]:
    """A taste's pairs for an adapter in an order of the seed's; ids are unique over all streams of a process."""
    own = relabel(pairs, taste, adapter, decode)
    random.Random(seed).shuffle(own)
    return [replace(pair, pair_id=next(_IDS)) for pair in own]


_IDS = itertools.count(1)
