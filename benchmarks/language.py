"""Two frontiers of learning: answers that follow a taste against KL, and reward accuracy against NLL of unseen text.

    tools/bench_language --model hh-lm --pairs hh-harmless.jsonl.gz [--set learning_rate=2e-4,beta=0.1]...
        [--tastes concise,refusing] [--counts 50,250] [--seeds 4] [--one-by-one] [--guard] [--thumbs SHARE] [--quick]
        [--output FILE]
    tools/bench_language --model demo --tastes formal,casual

An adapter learns the pairs of a taste under each `--set` (by default the daemon's own settings); after each of
`--counts` pairs it answers 100 prompts that no pair has, greedily and sampled. transformers and peft judge the answers:
NLL under the base model, repetition, length, and whether they follow the taste; and unseen text: reward accuracy and KL
of pairs, NLL of pairs, of neutral sentences and of prompts. The last 100 usable lines of the file are the unseen ones.
Without --pairs the demo model's own answers make the pairs. Of --thumbs of the pairs a user rates one answer alone,
good or bad: it is learned where `align.unpaired` (--set unpaired=apo) says so, and waits for ever else.
The guard and the quarantine are off, unless --guard asks for the daemon as it is. No figure is the engine's own word.
"""

from __future__ import annotations

import benchmarks.support.prepared  # noqa: F401

# isort: split
import itertools
import json
import math
import random
import statistics
import tempfile
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from benchmarks.support.command import (
    SEEDS,
    THUMBS,
    existing_file,
    finish,
    flag,
    keep,
    make_parser,
    markdown,
    model_folder,
    names,
    numbers,
    option,
    resolve,
    say,
)
from benchmarks.support.interleave import open_sides
from benchmarks.support.local_engine import LocalEngine
from benchmarks.support.machine_limits import report_header
from benchmarks.support.preference_streams import (
    DEMO_TASTES,
    FIRST_ONLINE_LINE,
    TASTES,
    DemoTaste,
    Taste,
    liking,
    rated,
    relabel,
)
from benchmarks.support.sequential_dpo import Recipe, Reference, side_of
from edged.align.feedback.pair import PairScored, TokenPair
from edged.align.language import neutral_pairs, repetition
from edged.align.metrics import RECENT_PAIRS
from edged.lab.bench.replay import load_pairs
from edged.models import demo_model_dir
from edged.settings.load import ConfigError, Settings, load_settings
from edged.text.tokenizer import Tokenizer
from examples.demo_model.dialogues import prompts

UNSEEN_PAIRS = 100
SCORED_PAIRS = 64
_ALONE = {
    "guard.held_out_share": 0.0,
    "guard.max_kl_nats": 1e9,
    "guard.max_nll_change": 1e9,
    "feedback.quarantine": False,
    "feedback.pairs_per_hour": 0,
}
Tokens = tuple[int, ...]
_ANSWER_TOKENS = 120
"""Longest answer in tokens; longer ones are cut."""
_LONGEST_S = 1800.0
"""Time limit for learning or answering."""


@dataclass(frozen=True, slots=True)
class Exam:
    """Prompts that no adapter is trained on, with the base model's own answers to them."""

    prompts: Sequence[Tokens]
    greedy: Sequence[Tokens]
    sampled: Sequence[Tokens]
    unseen: Sequence[TokenPair]
    """Pairs that no adapter is trained on, written by others, for NLL, KL and reward accuracy."""


class Bench(LocalEngine):
    """An engine that learns and answers, with transformers and peft beside it as the judge of NLL and KL."""

    def __init__(self, model: Path, settings: Settings, reference: Reference) -> None:
        """Build the engine. Raises what building an engine raises."""
        self._folder = tempfile.TemporaryDirectory(prefix="edged-")
        super().__init__(model, settings, Path(self._folder.name))
        self.settings, self.reference, self.tokenizer = settings, reference, Tokenizer.load(model)
        self._numbers = itertools.count()
        self.engine.test_with(neutral_pairs(self.tokenizer))

    def close(self) -> None:
        """Stop the engine and remove its adapters."""
        super().close()
        self._folder.cleanup()

    def answers(self, asked: Sequence[Tokens], adapter: str | None, temperature: float) -> list[Tokens]:
        """Return the answers to tokenized prompts, with EOS if they end in one; equal seeds give equal answers."""
        ids = [f"exam-{next(self._numbers)}" for _ in asked]
        for seed, (request_id, prompt) in enumerate(zip(ids, asked, strict=True)):
            self.ask(request_id, prompt, _ANSWER_TOKENS, adapter, temperature=temperature, seed=seed, ignore_eos=False)
        self.wait(_LONGEST_S)
        return [tuple(event.token_id for event in self.recorder.tokens.pop(request_id, ())) for request_id in ids]

    def exam(self, asked: Sequence[Tokens], unseen: Sequence[TokenPair]) -> Exam:
        """Return an exam with the base model's answers."""
        return Exam(asked, self.answers(asked, None, 0.0), self.answers(asked, None, 1.0), unseen)

    def own_pairs(self, count: int, seed: int, fresh: bool = False) -> list[TokenPair]:
        """Return pairs of the demo model's own answers to everyday questions, two sampled ones each."""
        source = prompts(seed, fresh=fresh, with_units=True)
        asked = [tuple(self.tokenizer.render_chat([{"role": "user", "content": next(source)}])) for _ in range(count)]
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
        """Train an adapter on `pairs`, all at once or each after the one before; return the pairs' scores before
        training."""
        recorder = self.recorder
        if self.settings.align.unpaired == "off":
            pairs = [pair for pair in pairs if not pair.single]
        first = len(recorder.scores)
        for part in [[pair] for pair in pairs] if one_by_one else [list(pairs)]:
            ids = [pair.pair_id for pair in part]
            for pair_id in ids:
                recorder.outcomes.pop(pair_id, None)
            self.submit_pairs(part)
            recorder.wait_for(partial(self._settled, ids), "what was to be learned", _LONGEST_S)
        return [score for _, score in recorder.scores[first:]]

    def _settled(self, ids: Sequence[int]) -> bool:
        """Whether each of these pairs has an outcome."""
        outcomes = self.recorder.outcomes
        return all(pair_id in outcomes and outcomes[pair_id].state != "queued" for pair_id in ids)

    def measure(self, exam: Exam, adapter: str, weights: Path, taste: Taste | DemoTaste) -> dict[str, Any]:
        """Measure the answers by taste and fluency; and NLL, KL and reward accuracy of unseen pairs.

        The adapter's present weights are written to the file `weights`, in PEFT's format.
        """
        save_file(self.engine.weights(adapter).result()[1], weights)
        file = str(weights)
        unseen = relabel(exam.unseen, taste, adapter, self.tokenizer.decode)
        margins = [(c - rc) - (r - rr) for c, r, rc, rr in self.reference.score(unseen, file)]
        texts = [(pair.prompt, answer) for pair in exam.unseen for answer in (pair.chosen, pair.rejected)]
        judged = self.reference.language(texts, file, keep=True)
        tokens = sum(len(answer) for _, answer in texts)
        nll, base_nll, kl = (sum(column) / tokens for column in zip(*judged, strict=True))
        neutral = [
            (pair.prompt, text) for pair in neutral_pairs(self.tokenizer) for text in (pair.chosen, pair.rejected)
        ]
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
        """Return the relative change of the texts' NLL against the base model's."""
        policy, base, _ = map(sum, zip(*self.reference.language(texts, file, keep=True), strict=True))
        return policy / base - 1.0

    def _judge(
        self, exam: Exam, answers: Sequence[Tokens], before: Sequence[Tokens], taste: Taste | DemoTaste, file: str
    ) -> dict[str, Any]:
        """Compare answers with the base model's: shares that follow the taste, lengths, fluency, repetition."""
        said = [(p, a) for p, a in zip(exam.prompts, answers, strict=True) if a]
        tokens = sum(len(a) for _, a in said)
        rows = self.reference.language(said, file)
        report = {
            "tokens": statistics.fmean(map(len, answers)),
            "tokens_base": statistics.fmean(map(len, before)),
            "repetition": statistics.fmean(map(repetition, answers)),
            "repetition_base": statistics.fmean(map(repetition, before)),
            "base_nll": sum(row[1] for row in rows) / tokens,
            # On the policy's own sampled answers the NLLs' difference is an estimate of KL(policy || base).
            "own_kl_nats": sum(row[1] - row[0] for row in rows) / tokens,
            "texts": [self.tokenizer.decode(a) for a in answers[:3]],
        }
        if taste != "human":
            liked, liked_before = (
                [liking(taste, a, self.tokenizer.decode(a)) for a in given] for given in (answers, before)
            )
            bound = statistics.median(liked_before) if taste in ("concise", "elaborate") else 0.0
            report["follow"], report["follow_base"] = (
                sum((x > bound) + 0.5 * (x == bound and bound != 0.0) for x in given) / len(given)
                for given in (liked, liked_before)
            )
        return report


@contextmanager
def open_bench(model: Path, settings: Settings, recipe: Recipe) -> Iterator[Bench]:
    """Open a bench beside the reference loop of `recipe`; both are closed on exit."""
    with open_sides([side_of(recipe)]) as (side,):
        bench = Bench(model, settings, Reference(side))
        try:
            yield bench
        finally:
            bench.close()


def stream(
    pairs: Sequence[TokenPair],
    taste: Taste | DemoTaste,
    adapter: str,
    decode: Callable[[Sequence[int]], str],
    seed: int,
    thumbs: float = 0.0,
) -> list[TokenPair]:
    """Return a taste's pairs for an adapter, shuffled by the seed; ids are unique over all streams of a process.

    The share `thumbs` of them are ratings of one of the two answers, by chance.
    """
    own = relabel(pairs, taste, adapter, decode)
    random.Random(seed).shuffle(own)
    return [replace(pair, pair_id=next(_IDS)) for pair in rated(own, thumbs, seed)]


_IDS = itertools.count(1)


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the benchmark."""
    options = parsed()
    base = demo_model_dir() if options.pairs is None else options.model
    report: dict[str, Any] = {
        "model": options.model.name,
        **report_header(),
        "one_by_one": options.one_by_one,
        "guard": options.guard,
        "thumbs": options.thumbs,
        "runs": [],
    }
    defaults = settings_of("", options.guard)
    with open_bench(base, defaults, Recipe(str(base))) as bench, tempfile.TemporaryDirectory() as folder:
        learnable, exam = material(options, bench)
        for taste, seed, text in itertools.product(options.tastes, range(options.seeds), options.set or [""]):
            settings = settings_of(text, options.guard)
            bench.settings = settings
            bench.engine.configure(settings).result()
            own = learnable[: max(options.counts) * 3]
            pairs = stream(own, taste, f"{taste}-{seed}", bench.tokenizer.decode, seed, options.thumbs)
            for each in measures(bench, exam, pairs, taste, options, Path(folder) / "weights.safetensors"):
                say(json.dumps({"set": text, "seed": seed, **each}, ensure_ascii=False))
                report["runs"].append({"set": text, "seed": seed, "align": settings.align.model_dump(), **each})
            keep(options, report)
    finish(options, report, table(report["runs"]))


def parsed() -> Namespace:
    """Parse the command line."""
    given = (
        option("--model", 'a model\'s directory, or "demo"', type=model_or_demo, required=True),
        option("--pairs", "HH-RLHF dialogues: a (gzipped) JSONL file", type=existing_file),
        option("--set", "of [align]; repeatable", action="append", metavar="NAME=VALUE,..."),
        option("--tastes", "by comma (default all that the pairs' model knows)"),
        option("--counts", "pairs after which it is measured", [50, 250], type=numbers),
        SEEDS,
        flag("--one-by-one", "each pair comes when the one before is learned"),
        flag("--guard", "with guard and quarantine as by default"),
        THUMBS,
    )
    parser = make_parser(__doc__, *given, quick="few prompts")
    options = resolve(parser, *given)
    if options.pairs is None and str(options.model) != "demo":
        parser.error(f"--pairs is missing: only the demo model makes its own, {options.model} needs a file")
    known: Sequence[str] = DEMO_TASTES if options.pairs is None else TASTES
    try:
        options.tastes = names(known)(options.tastes) if options.tastes else list(known)
        for text in options.set or []:
            settings_of(text, options.guard)
    except (ArgumentTypeError, ConfigError, ValueError) as error:
        parser.error(str(error))
    return options


def model_or_demo(text: str) -> Path:
    """Parse a model's directory or the word "demo"."""
    return Path(text) if text == "demo" else model_folder(text)


def measures(
    bench: Bench, exam: Exam, pairs: Sequence[TokenPair], taste: Any, options: Namespace, weights: Path
) -> Iterator[dict[str, Any]]:
    """Yield the measures after each count of pairs that the engine learned."""
    adapter, done, scores = pairs[0].adapter, 0, []
    for count in sorted({min(count, len(pairs)) for count in options.counts}):
        scores += bench.learn(pairs[done:count], options.one_by_one)
        done, last = count, scores[-RECENT_PAIRS:]
        accuracy = sum(score.reward_margin > 0 for score in last) / len(last) if last else math.nan
        yield {"taste": taste, "pairs": count, "accuracy": accuracy, **bench.measure(exam, adapter, weights, taste)}
    if bench.settings.align.unpaired != "off" or not all(pair.single for pair in pairs):
        bench.engine.forget(adapter).result()


def material(options: Namespace, bench: Bench) -> tuple[list[TokenPair], Exam]:
    """Return (training pairs, exam); both are the same for every run."""
    if options.pairs is None:
        learnable, unseen = bench.own_pairs(max(options.counts) * 2, 1), bench.own_pairs(UNSEEN_PAIRS, 2, fresh=True)
    else:
        pairs, _ = load_pairs(options.pairs, "hh", bench.tokenizer, Settings().align.max_pair_tokens)
        unseen = pairs[-UNSEEN_PAIRS:]
        # Pairs that the base model was not trained on come first.
        learnable = sorted(pairs[:-UNSEEN_PAIRS], key=lambda pair: pair.pair_id < FIRST_ONLINE_LINE)
    unseen = unseen[:8] if options.quick else unseen
    return learnable, bench.exam([pair.prompt for pair in unseen], unseen[:SCORED_PAIRS])


def settings_of(text: str, guard: bool) -> Settings:
    """Return the defaults with `text`, such as "learning_rate=2e-4,beta=0.5", put over their section [align]."""
    items = [item.partition("=") for item in text.split(",") if item]
    if bare := [name for name, _, value in items if not value]:
        raise ValueError(f"--set {bare[0]} has no value: give NAME=VALUE")
    chosen = {f"align.{name}": value for name, _, value in items}
    alone = {"feedback.pairs_per_hour": 0} if guard else _ALONE
    return load_settings(None, environ={}, overrides={**alone, **chosen, "serving.max_queue": 4096})


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return every run's figures, as Markdown."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "accuracy, last 50": lambda run: f"{run['accuracy']:.2f}",
        "held out": lambda run: f"{run['held_out_accuracy']:.2f}",
        "NLL of unseen answers, %": lambda run: f"{100 * run['nll_change']:+.1f}",
        "of neutral text, %": lambda run: f"{100 * run['neutral_change']:+.1f}",
        "KL": lambda run: f"{run['kl_nats']:.3f}",
        "greedy answers that follow (base)": lambda run: _following(run["greedy"]),
        "sampled ones": lambda run: _following(run["sampled"]),
        "repetition (base)": lambda run: f"{run['greedy']['repetition']:.2f} ({run['greedy']['repetition_base']:.2f})",
        "their NLL under the base": lambda run: f"{run['greedy']['base_nll']:.2f}",
    }
    rows = [
        (run["taste"], run["set"] or "defaults", run["pairs"], run["seed"], *(cell(run) for cell in columns.values()))
        for run in sorted(runs, key=lambda run: (run["taste"], run["set"], run["pairs"], run["seed"]))
    ]
    return "\n".join(markdown(("taste", "settings", "pairs", "seed", *columns), rows))


def _following(part: dict[str, Any]) -> str:
    return f"{part['follow']:.2f} ({part['follow_base']:.2f})" if "follow" in part else ""


if __name__ == "__main__":
    main()
