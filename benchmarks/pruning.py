"""Decode latency and teacher-forced quality of a model whose K/V is pruned, against C_total (MACE 4.3, Figure 8b).

    python -m benchmarks.pruning MODEL hh-harmless.jsonl.gz [--tokens 768,512,256,128,64] [--output FILE]

Each budget is the number of old tokens that a KV head keeps on the mean of the heads: C_total over the KV heads. The
pairs of the lines --first to --last are scored behind earlier dialogues of the file, so that contexts are --context
tokens long; every token goes through the executor's decode path. Latencies are of random tokens.
"""

from __future__ import annotations

import benchmarks.support.prepared  # noqa: F401

# isort: split
import math
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.command import (
    DEVICE,
    FORMAT,
    PAIRS,
    finish,
    markdown,
    model_folder,
    number,
    numbers,
    option,
    parse,
)
from benchmarks.support.interleave import Spread
from benchmarks.support.machine_limits import report_header
from benchmarks.support.teacher_forcing import ForcedDecoding
from edged.align.feedback.pair import TokenPair
from edged.cache import pruning_budget
from edged.engine.pruner import Pruner
from edged.engine.sequence import Sequence as Running
from edged.lab.bench.replay import load_pairs
from edged.settings.load import Settings
from edged.tensors.cpu_threads import apart
from edged.text.tokenizer import Tokenizer

_WARM_TOKENS = 12
"""Decoded tokens, beside one for each sequence of a batch, before measurement: sequences are observed in some of them,
and one is pruned in an iteration."""
Budget = int | None
"""Old tokens that a KV head keeps on average; None: no pruning."""


def settings_for(device: str, memory_mb: int) -> Settings:
    """Return the settings of a measurement; the budget is set by `PrunedDecoding.use`."""
    return Settings.model_validate(
        {
            "model": {"device": device, "graph_memory_mb": 0},
            "cache": {
                "memory_mb": memory_mb,
                "share_across": "none",
                "pruning": "on",
            },
            "align": {"enabled": False, "max_active_adapters": 1},
        }
    )


class PrunedDecoding(ForcedDecoding):
    """Forced decoding under one budget after the other, on one copy of the model."""

    def __init__(self, model: Path, settings: Settings) -> None:
        super().__init__(model, settings)
        if self.parts.runner.pruner is None:
            raise ValueError(f'"{model}" attends within windows that are shorter than its context: it is not pruned')
        self._pruners: dict[Budget, Pruner | None] = {None: None}

    def use(self, budget: Budget) -> None:
        """Prune sequences to `budget` from now on."""
        runner, cache = self.parts.runner, self.parts.settings.cache
        if budget not in self._pruners:
            pruning_budget.PRUNED_TOKENS = budget or 0
            self._pruners[budget] = Pruner(cache, runner.kv.stores[0], runner.pages)
        runner.pruner = self._pruners[budget]


# -- latency -----------------------------------------------------------------------------------------------------------


def measure_tbt(
    driver: PrunedDecoding, budgets: Sequence[Budget], context: int, sequences: int, rounds: int, steps: int
) -> dict[str, Any]:
    """Return milliseconds of a decode iteration of `sequences` sequences at about `context` tokens, by budget.

    The budgets take turns, `steps` iterations each in each of `rounds` rounds; observing and pruning are counted in.
    """
    vocab = driver.parts.model.shape.vocab_size
    generator = torch.Generator().manual_seed(0)
    warm = _WARM_TOKENS + sequences
    room = warm + rounds * steps
    running: dict[Budget, list[Running]] = {}
    for budget in budgets:
        driver.use(budget)
        prompts = torch.randint(3, vocab, (sequences, context - room), generator=generator).tolist()
        running[budget] = [driver.begin(prompt, room) for prompt in prompts]
        _decode(driver, running[budget], warm, generator)
    laps: dict[Budget, list[float]] = {budget: [] for budget in budgets}
    for turn in range(rounds):
        shift = turn % len(budgets)
        for budget in [*budgets[shift:], *budgets[:shift]]:
            driver.use(budget)
            laps[budget] += _decode(driver, running[budget], steps, generator)
    pages = {budget: sum(len(sequence.pages) for sequence in running[budget]) for budget in budgets}
    for budget in budgets:
        driver.use(budget)
        for sequence in running[budget]:
            driver.end(sequence)
    return {_name(budget): {"ms": Spread.of(found).as_json(), "pages": pages[budget]} for budget, found in laps.items()}


def _decode(
    driver: ForcedDecoding, sequences: Sequence[Running], steps: int, generator: torch.Generator
) -> list[float]:
    vocab = driver.parts.model.shape.vocab_size
    laps = []
    for _ in range(steps):
        tokens = torch.randint(3, vocab, (len(sequences),), generator=generator).tolist()
        started = time.perf_counter()
        driver.step(sequences, tokens)
        laps.append((time.perf_counter() - started) * 1e3)
    return laps


# -- quality -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """An answer's tokens under one budget: their log-probabilities, and the tokens that greedy decoding would
    choose."""

    logps: list[float] = field(default_factory=list)
    greedy: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and one of its answers."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def long_cases(pairs: Sequence[TokenPair], earlier: Sequence[TokenPair], context: int) -> list[Case]:
    """Return the chosen and the rejected answer of each pair in turn, after as much of the `earlier` dialogues as makes
    prompt and answer `context` tokens. Longer pairs are left out."""
    history = [token for pair in earlier for token in (*pair.prompt, *pair.chosen)]
    cases = []
    for pair in pairs:
        room = context - len(pair.prompt) - max(len(pair.chosen), len(pair.rejected))
        if 0 <= room <= len(history):
            prompt = (*history[len(history) - room :], *pair.prompt)
            cases += [Case(prompt, pair.chosen), Case(prompt, pair.rejected)]
        history += [*pair.prompt, *pair.chosen]
    if not cases:
        raise ValueError(f"no pair fits a context of {context} tokens behind {len(history)} tokens of dialogues")
    return cases


def score(driver: PrunedDecoding, cases: Sequence[Case], budget: Budget, batch: int) -> list[Answer]:
    """Score each case's answer, decoded token by token after its prompt, `batch` of them at a time."""
    driver.use(budget)
    answers = [Answer() for _ in cases]
    order = sorted(range(len(cases)), key=lambda index: -len(cases[index].answer))
    for first in range(0, len(order), batch):
        group = order[first : first + batch]
        _score_group(driver, [cases[index] for index in group], [answers[index] for index in group])
    return answers


def _score_group(driver: PrunedDecoding, cases: Sequence[Case], answers: Sequence[Answer]) -> None:
    """Run `score` on cases that are decoded together; those with longer answers come first."""
    warm = _WARM_TOKENS + len(cases)
    forced = [(*case.prompt[-warm:], *case.answer) for case in cases]
    running = [driver.begin(case.prompt[:-warm], len(forced[0])) for case in cases]
    for step in range(len(forced[0]) - 1):
        going = sum(step + 1 < len(tokens) for tokens in forced)
        for sequence in running[going:]:
            driver.end(sequence)
        del running[going:]
        logits = driver.step(running, [tokens[step] for tokens in forced[:going]])
        if step + 1 >= warm:
            targets = torch.tensor([tokens[step + 1] for tokens in forced[:going]], device=logits.device)
            logps = logits.float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
            for answer, logp, token in zip(answers, logps.tolist(), logits.argmax(-1).tolist(), strict=False):
                answer.logps.append(logp)
                answer.greedy.append(token)
    for sequence in running:
        driver.end(sequence)


def quality(answers: Sequence[Answer], unpruned: Sequence[Answer]) -> dict[str, float]:
    """Return CLPD in nats, win rate, perplexity of the chosen answers, and the share of tokens on which greedy decoding
    agrees with that of the unpruned model. `answers` are of `long_cases`."""
    sums = [sum(answer.logps) for answer in answers]
    differences = [chosen - rejected for chosen, rejected in zip(sums[::2], sums[1::2], strict=True)]
    chosen = answers[::2]
    same = [a == b for one, other in zip(answers, unpruned, strict=True) for a, b in _both(one.greedy, other.greedy)]
    return {
        "pairs": len(differences),
        "clpd_nats": sum(differences) / len(differences),
        "win_rate": sum(difference > 0 for difference in differences) / len(differences),
        "perplexity": math.exp(-sum(sums[::2]) / sum(len(answer.logps) for answer in chosen)),
        "greedy_agreement": sum(same) / len(same),
    }


def _both(one: Sequence[int], other: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(one, other, strict=True)


def measure_quality(
    driver: PrunedDecoding, cases: Sequence[Case], budgets: Sequence[Budget], batch: int
) -> dict[str, dict[str, float]]:
    """Return `quality` by budget; the unpruned model is always measured."""
    unpruned = score(driver, cases, None, batch)
    found = {_name(None): quality(unpruned, unpruned)}
    for budget in budgets:
        if budget is not None:
            found[_name(budget)] = quality(score(driver, cases, budget, batch), unpruned)
    return found


def _name(budget: Budget) -> str:
    return "off" if budget is None else str(budget)


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the benchmark."""
    options = parse(
        __doc__,
        option("model", "a model's directory", type=model_folder),
        PAIRS,
        FORMAT,
        option("--first", "first line that is scored, from 0", 1400, least=0),
        option("--last", "last line that is scored (default 1899; quick: the fourth)", type=number(int)),
        option("--tokens", "budgets", [768, 512, 256, 128, 64], [128, 32], type=numbers),
        option("--recent", "latest tokens, always kept", 128),
        option("--context", "tokens (default: what the model has positions for)", type=number(int)),
        option("--batch", "sequences that are decoded together", 16, 2),
        option("--rounds", "of latencies, 16 iterations each", 10, 2),
        option("--memory-mb", "K/V pages", 1024),
        DEVICE,
        quick="two budgets, few pairs and rounds",
    )
    if options.last is None:
        options.last = options.first + 3 if options.quick else 1899
    report = run(options)
    finish(options, report, table(report))


def run(options: Namespace) -> dict[str, Any]:
    """Measure and summarise."""
    header = report_header(options.device)
    budgets: list[Budget] = [None, *options.tokens]
    settings = settings_for(options.device, options.memory_mb)
    pruning_budget.RECENT_TOKENS = options.recent
    driver = apart(lambda: PrunedDecoding(options.model, settings))
    context = options.context or driver.parts.max_context_tokens
    lines, _ = load_pairs(options.pairs, options.format, Tokenizer.load(options.model), context)
    pairs = [pair for pair in lines if options.first <= pair.pair_id - 1 <= options.last]
    cases = long_cases(pairs, [pair for pair in lines if pair.pair_id - 1 < options.first], context)
    report: dict[str, Any] = {
        "model": options.model.name,
        **header,
        "arguments": arguments(options),
        "context_tokens": context,
        "recent_tokens": options.recent,
        "kv_heads": driver.parts.model.shape.attention[0].kv_heads,
        "tbt": {},
    }
    for count in sorted({1, options.batch}):
        timed = partial(measure_tbt, driver, budgets, context, count, options.rounds, 16)
        report["tbt"][str(count)] = apart(timed)
    report["quality"] = apart(lambda: measure_quality(driver, cases, budgets, options.batch))
    return report


def arguments(options: Namespace) -> dict[str, str | int]:
    """Return the arguments of this run, files by their names: enough to type its command again."""
    given = {name: value for name, value in vars(options).items() if name not in ("quick", "output", "json")}
    given |= {"tokens": ",".join(map(str, options.tokens))}
    return {
        name: value.name if isinstance(value, Path) else value for name, value in given.items() if value is not None
    }


def table(report: dict[str, Any]) -> str:
    """Return the report as a Markdown table."""
    batches = list(report["tbt"])
    columns = [column for n in batches for column in (f"TBT, {n} sequences (ms)", "pages")]
    rows = []
    for name, quality in report["quality"].items():
        found = [report["tbt"][batch][name] for batch in batches]
        cells = [cell for one in found for cell in (Spread.read(one["ms"]).text(), one["pages"])]
        shown = (f"{quality['clpd_nats']:.2f}", f"{quality['win_rate']:.3f}", f"{quality['perplexity']:.2f}")
        rows.append((name, *cells, *shown, f"{quality['greedy_agreement']:.3f}"))
    lines = [
        f"{report['model']}, contexts of {report['context_tokens']} tokens, of which the latest "
        f"{report['recent_tokens']} are kept; {report['quality']['off']['pairs']:.0f} pairs; {report['device']}",
        "",
        *markdown(
            ("old tokens kept per head", *columns, "CLPD (nats)", "win rate", "perplexity", "greedy agreement"), rows
        ),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
