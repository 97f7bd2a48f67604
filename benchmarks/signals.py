"""What a few signals of a person do: shares of answers that the person likes, through a daemon at its defaults.

    python -m benchmarks.signals --model demo [--rows picks,edits] [--tastes bang,short] [--seeds 3] [--json]

Each row, taste and seed has a daemon of its own. A simulated person asks, and picks, edits or rates by a rule. Unseen
questions are then asked, at once and when no new version has come for a while, and the same rule judges the answers.
"Unchosen" answers are the adapter's own: an answer with log-probabilities is never the best of several. KL is of them
to the base, per token. No question is asked at two moments, since practice learns on what was asked.
"""

from __future__ import annotations

import contextlib
import random
import re
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.support import tastes
from benchmarks.support.command import finish, keep, markdown, model_folder, names, numbers, option, parse, say
from benchmarks.support.tastes import ANYTHING, COOKING, DEMO, EDITS, ELSEWHERE, ENGLISH, Rule
from edged.client.client import DaemonError, Refused
from edged.models import find_model
from edged.settings.load import ModelSettings
from examples.quickstart.daemon import TemporaryDaemon

USER = "ann"
CANDIDATES, ANSWERS = 4, 2
"""Answers that a person picks from, and answers that are judged of each question."""
BASE_QUESTIONS, TOPIC_SHARE = 48, 2 / 3
"""Questions that tell the base's share; the share of --prompts that is judged of each topic."""
QUIET_S, AT_ONCE_S = 10.0, 1.0
"""Seconds without a new version that count as settled; seconds from the last signal to "at once"."""
WRONG_SHARE = 0.2
MAX_TOKENS = {True: 96, False: 64}
"""Of an answer, for the demo model and for others, which are slow."""
SENTENCE = " Answer in one sentence."
"""Has other models than the demo end their answers."""
Figures = dict[str, Any]


class BaseModel:
    """The base in transformers, as a judge of texts."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logps(self, question: str, text: str, end: bool) -> list[float]:
        """Return the log-probability of each token of an answer, in nats, and of its end."""
        import torch

        asked = [{"role": "user", "content": question}]
        prompt = self.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        answer = self.tokenizer.encode(text, add_special_tokens=False) + [self.tokenizer.eos_token_id] * end
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            logps = logits.float().log_softmax(-1).gather(1, torch.tensor(answer)[:, None])
        return [float(each) for each in logps[:, 0]]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with its question; `logps` are the daemon's, where it was asked for them."""

    question: str
    text: str
    ended: bool
    chosen: bool
    prompt_tokens: int
    logps: list[float] | None = None


@dataclass(eq=False)
class Bench:
    """The options, the base, and what it answered to the questions of each seed and group."""

    options: Namespace
    judge: BaseModel
    base_answers: dict[tuple[Any, ...], list[Answer]] = field(default_factory=dict)

    @property
    def is_demo(self) -> bool:
        """Whether the demo model is measured."""
        return bool(self.options.model == "demo")


class Person:
    """A user of one daemon who signals by a rule, and what the daemon then answers."""

    def __init__(self, bench: Bench, daemon: TemporaryDaemon, row: str, taste: str, seed: int) -> None:
        self.bench, self.client, self.taste, self.seed = bench, daemon.client(600.0), taste, seed
        self.random = random.Random(f"{row} {taste} {seed}")
        self.edit = EDITS.get(taste)
        with_units = taste == "metric"
        self.suffix = "" if bench.is_demo else SENTENCE
        known = DEMO if bench.is_demo else ENGLISH
        self.rule: Rule = self.edit.shown if self.edit else known[taste].rule
        self.written = "" if self.edit else known[taste].written
        teaching, self.judging = tastes.questions(bench.is_demo, seed, with_units)
        groups = (ANYTHING, COOKING, ELSEWHERE)
        self.unasked = {group: tastes.of_group(teaching, group) for group in groups}
        self.unseen = {group: tastes.of_group(self.judging, group) for group in groups}

    # -- what a person does

    def ask(self, question: str, count: int = 1, user: str = USER, system: str = "", **fields: Any) -> list[Answer]:
        """Ask, and return the answers."""
        return self._answers(question, self._post(question, count, user, system, **fields))

    def pick(self, rule: Rule, group: str = ANYTHING, wrong: float = 0.0) -> None:
        """Pick one of four answers by a rule, or by chance where all are alike, and wrongly at times."""
        found = self._post(next(self.unasked[group]), CANDIDATES)
        meets = [rule(choice["message"]["content"]) for choice in found["choices"]]
        wanted = not self.random.random() < wrong
        choice = self.random.choice([at for at, met in enumerate(meets) if met == wanted] or range(CANDIDATES))
        self._signal(found, "chosen", choice=choice)

    def rate(self) -> None:
        """Rate an answer by the rule."""
        found = self._post(next(self.unasked[ANYTHING]))
        self._signal(found, "up" if self.rule(found["choices"][0]["message"]["content"]) else "down")

    def correct(self) -> None:
        """Edit the next answer that ended and that is not yet as wanted."""
        assert self.edit is not None
        for _ in range(CANDIDATES):
            found = self._post(next(self.unasked[ANYTHING]))
            text = found["choices"][0]["message"]["content"]
            if found["choices"][0]["finish_reason"] == "stop" and not self.edit.shown(text):
                return self._signal(found, "edit", text=self.edit.change(text))

    def _post(self, question: str, count: int = 1, user: str = USER, system: str = "", **fields: Any) -> Figures:
        said = [{"role": "system", "content": system}] if system else []
        body = {"messages": [*said, {"role": "user", "content": question + self.suffix}], "n": count, **fields}
        most = MAX_TOKENS[self.bench.is_demo]
        named = {"user": user} if user else {}
        return self.client.post("/v1/chat/completions", {"max_tokens": most, **body, **named})

    def _answers(self, question: str, found: Figures) -> list[Answer]:
        chosen, tokens = "taste" in (found.get("system_fingerprint") or ""), found["usage"]["prompt_tokens"]
        answers = []
        for choice in found["choices"]:
            told = choice.get("logprobs")
            logps = [each["logprob"] for each in told["content"]] if told else None
            ended = choice["finish_reason"] == "stop"
            answers.append(Answer(question, choice["message"]["content"] or "", ended, chosen, tokens, logps))
        return answers

    def _signal(self, found: Figures, signal: str, **fields: Any) -> None:
        self.client.post("/v1/feedback", {"completion_id": found["id"], "signal": signal, "user": USER, **fields})

    # -- what is measured

    def adapter(self) -> Figures:
        """Return what the daemon tells of the person's adapter."""
        with contextlib.suppress(Refused):
            return self.client.get(f"/v1/adapters/{USER}")
        return {"versions": [], "version": 0}

    def settle(self) -> float:
        """Wait until no new version comes; return the seconds that it took."""
        started = moved = time.monotonic()
        version = None
        while (now := time.monotonic()) - started < self.bench.options.settle and now - moved < QUIET_S:
            if (latest := self.adapter()["version"]) != version:
                version, moved = latest, now
            time.sleep(0.5)
        return moved - started

    def moment(self, signals: int, rule: Rule | None = None, group: str = ANYTHING, at_once: bool = True) -> Figures:
        """Return the figures after so many signals, judged by a rule: at once, settled, unchosen, and the base's."""
        rule = rule or self.rule
        count = self.bench.options.prompts if group == ANYTHING else int(TOPIC_SHARE * self.bench.options.prompts)
        figures: Figures = {"signals": signals, "group": group}
        if at_once:
            time.sleep(AT_ONCE_S)
            figures["at_once"] = self.share([self.served(group) for _ in range(count)], rule)
            figures["settled_s"] = self.settle()
        served, own = [], []
        for _ in range(count):
            question = next(self.unseen[group])
            own.append(self.ask(question, ANSWERS, logprobs=True))
            served.append([answer for _ in range(ANSWERS) for answer in self.ask(question)])
        base = self.base(group)
        figures |= {"settled": self.share(served, rule), "unchosen": self.share(own, rule)}
        figures |= {"base": self.share([base], rule), **self.language(own, base)}
        figures["chosen"] = statistics.fmean(answer.chosen for answers in served for answer in answers)
        figures["prompt_tokens"] = [_prompt_tokens([base]), _prompt_tokens(served)]
        told = self.adapter()
        reasons = [version["reason"] for version in told["versions"]]
        figures["versions"] = {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}
        for key in ("held_out_kl_nats", "neutral_nll_change", "verdict", "liked"):
            figures[key] = told.get(key)
        figures["own_kl_nats"] = next((v["own_kl_nats"] for v in told["versions"] if v["own_kl_nats"]), None)
        figures["example"] = served[0][0].text
        return figures

    def served(self, group: str) -> list[Answer]:
        """Ask an unseen question as a person does, once for each answer that is judged."""
        question = next(self.unseen[group])
        return [answer for _ in range(ANSWERS) for answer in self.ask(question)]

    def share(self, answers: Sequence[Sequence[Answer]], rule: Rule) -> float:
        """Return the share of answers that meet a rule; of edits, among those that ended."""
        judged = [answer for each in answers for answer in each if answer.ended or not self.edit]
        return statistics.fmean(rule(answer.text) for answer in judged) if judged else float("nan")

    def base(self, group: str) -> list[Answer]:
        """Return the base's answers to unseen questions of a group."""
        key = (self.seed, group, self.taste == "metric")
        if key not in self.bench.base_answers:
            asked = list(tastes.of_group(self.judging, group))[:BASE_QUESTIONS]
            asked = asked[: 2 * self.bench.options.prompts]
            self.bench.base_answers[key] = [each for text in asked for each in self.ask(text, ANSWERS, user="")]
        return self.bench.base_answers[key]

    def language(self, own: Sequence[Sequence[Answer]], base: Sequence[Answer]) -> Figures:
        """Return the KL of unchosen answers, in nats a token, their repetition beside the base's, and of edits the
        NLL of the rest, in nats a token, beside the base's."""
        answers = [answer for each in own for answer in each]
        ratios: list[float] = []
        for answer in answers:
            logps = self.bench.judge.logps(answer.question + self.suffix, answer.text, False) if answer.text else []
            # An answer that tokenizes otherwise than it was drawn has no ratio by token.
            if answer.logps and len(logps) == len(answer.logps):
                ratios += [ours - theirs for ours, theirs in zip(answer.logps, logps, strict=True)]
        figures: Figures = {"kl_nats": statistics.fmean(ratios) if ratios else None}
        figures["repetition"] = [repetition([each.text for each in side]) for side in (base, answers)]
        if self.edit:
            figures["rest_nll"] = [self.rest_nll(side) for side in (base, answers)]
        return figures

    def rest_nll(self, answers: Sequence[Answer]) -> float | None:
        """Return the NLL under the base, in nats a token, of answers without what the edit adds."""
        assert self.edit is not None
        logps: list[float] = []
        for answer in answers:
            # The base's answers are edited first: the rest of lower case is lower case.
            if answer.ended and (rest := self.edit.undo(self.edit.change(answer.text))):
                logps += self.bench.judge.logps(answer.question + self.suffix, rest, True)
        return -statistics.fmean(logps) if logps else None


def _prompt_tokens(answers: Sequence[Sequence[Answer]]) -> float:
    return statistics.fmean(answer.prompt_tokens for each in answers for answer in each)


def repetition(texts: Sequence[str]) -> float:
    """Return the share of three successive words that came before in the same text."""
    seen = total = 0
    for text in texts:
        words = text.lower().split()
        threes = list(zip(words, words[1:], words[2:], strict=False))
        seen, total = seen + len(threes) - len(set(threes)), total + len(threes)
    return seen / max(1, total)


# -- rows --------------------------------------------------------------------------------------------------------------


def picks(person: Person, counts: Sequence[int], wrong: float = 0.0) -> Iterator[Figures]:
    """Yield the figures after so many picks."""
    for done, count in zip([0, *counts], counts, strict=False):
        for _ in range(count - done):
            person.pick(person.rule, wrong=wrong)
        yield person.moment(count)


def last_picks(person: Person, counts: Sequence[int], wrong: float = 0.0) -> Iterator[Figures]:
    """Yield the figures after the last pick alone."""
    return picks(person, counts[-1:], wrong)


def edits(person: Person, counts: Sequence[int]) -> Iterator[Figures]:
    """Yield the figures after edits."""
    for _ in range(counts[-1]):
        person.correct()
    yield person.moment(counts[-1])


def thumbs(person: Person, counts: Sequence[int]) -> Iterator[Figures]:
    """Yield the figures after ratings of single answers."""
    for _ in range(counts[-1]):
        person.rate()
    yield person.moment(counts[-1])


def change(person: Person, counts: Sequence[int]) -> Iterator[Figures]:
    """Yield the figures after picks one way, and after half as many and as many the other way, by which they are
    judged."""

    def other(text: str) -> bool:
        return not person.rule(text)

    for _ in range(counts[-1]):
        person.pick(person.rule)
    person.settle()
    for done, count in ((0, counts[-1] // 2), (counts[-1] // 2, counts[-1])):
        for _ in range(count - done):
            person.pick(other)
        yield person.moment(count, other)


Row = Callable[[Person, Sequence[int]], Iterator[Figures]]
ROWS: dict[str, tuple[Row, str]] = {
    "picks": (picks, ""),
    "training": (last_picks, '[serving]\nbest_of = "off"\n'),
    "edits": (edits, ""),
    "thumbs": (thumbs, ""),
    "change": (change, ""),
    "wrong": (partial(last_picks, wrong=WRONG_SHARE), ""),
}
"""What a person does in each row, and the settings that are not the defaults."""


def measure(bench: Bench, row: str, taste: str, seed: int) -> Figures:
    """Return the figures of one person with a daemon."""
    play, settings = ROWS[row]
    folder = Path(tempfile.mkdtemp(prefix="edged-signals-"))
    config = folder / "edged.toml"
    config.write_text(settings)
    daemon = TemporaryDaemon("--model", str(bench.options.model), "--config", str(config), folder=folder)
    started = time.monotonic()
    run: Figures = {"row": row, "taste": taste, "seed": seed, "moments": []}
    try:
        daemon.wait_until_ready()
        for figures in play(Person(bench, daemon, row, taste, seed), bench.options.signals):
            run["moments"].append({**figures, "seconds": time.monotonic() - started})
            say(f"{row}, {taste}, seed {seed}: {' '.join(map(str, cells(run, run['moments'][-1])[3:]))}")
    except DaemonError as error:
        run["error"] = str(error)
        say(f"{row}, {taste}, seed {seed}: {error}")
    finally:
        run["problems"] = [line for line in daemon.log.splitlines() if re.search("Error|Traceback|WARN", line)][-20:]
        daemon.remove()
    return run


# -- the table ---------------------------------------------------------------------------------------------------------

COLUMNS = (
    *("row", "taste", "seed", "signals", "base", "at once", "settled", "unchosen"),
    *("of missing: at once", "settled", "unchosen", "KL", "neutral", "repetition", "rest", "chosen", "s"),
)
SHARES = ("at_once", "settled", "unchosen")


def of_missing(moment: Figures, key: str) -> float | None:
    """Return a share's gain over the base, of what the base misses."""
    share, base = moment.get(key), moment["base"]
    return None if share is None or base >= 1.0 else (share - base) / (1.0 - base)


def rest_change(moment: Figures) -> float | None:
    """Return the change of the NLL of what an edit leaves, beside the base's."""
    base, own = moment.get("rest_nll") or (None, None)
    return own / base - 1.0 if base and own else None


def number(value: float | None, form: str = ".2f") -> str:
    """Format a figure; empty where there is none."""
    return "" if value is None else format(value, form)


def cells(run: Figures, moment: Figures) -> list[str]:
    """Return the cells of a moment's row."""
    row = run["row"] if moment["group"] == ANYTHING else f"{run['row']}: {moment['group']}"
    shares = [number(moment.get(key)) for key in ("base", *SHARES)]
    gains = [number(of_missing(moment, key)) for key in SHARES]
    before, after = moment["repetition"]
    language = [
        number(moment["kl_nats"], ".3f"),
        number(moment["neutral_nll_change"], "+.1%"),
        f"{before:.2f} {after:.2f}",
    ]
    last = [number(rest_change(moment), "+.0%"), number(moment["chosen"]), number(moment["seconds"], ".0f")]
    return [row, run["taste"], str(run["seed"]), str(moment["signals"]), *shares, *gains, *language, *last]


def means(runs: Sequence[Figures]) -> list[Figures]:
    """Return for each row, group and number of signals the means over tastes and seeds, with standard errors."""
    groups: dict[tuple[str, str, int], list[Figures]] = {}
    for run in runs:
        for moment in run["moments"]:
            groups.setdefault((run["row"], moment["group"], moment["signals"]), []).append(moment)
    found = []
    for (row, group, signals), moments in groups.items():
        mean: Figures = {"row": row, "group": group, "signals": signals, "runs": len(moments)}
        for key in SHARES:
            gains = [gain for moment in moments if (gain := of_missing(moment, key)) is not None]
            if gains:
                error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else None
                mean[key] = {"of_missing": statistics.fmean(gains), "standard_error": error}
        for key, values in (
            ("kl_nats", [moment["kl_nats"] for moment in moments]),
            ("rest_nll_change", [rest_change(moment) for moment in moments]),
            ("neutral_nll_change", [moment["neutral_nll_change"] for moment in moments]),
        ):
            known = [value for value in values if value is not None]
            mean[key] = statistics.fmean(known) if known else None
        found.append(mean)
    return found


def table(report: Figures) -> str:
    """Return a Markdown table of every moment, and one of the means."""
    moments = [cells(run, moment) for run in report["runs"] for moment in run["moments"]]
    rows = []
    for mean in report["means"]:
        gains = [
            f"{number(mean[key]['of_missing'])} ± {number(mean[key]['standard_error'])}" if key in mean else ""
            for key in SHARES
        ]
        language = (mean["kl_nats"], ".3f"), (mean["neutral_nll_change"], "+.1%"), (mean["rest_nll_change"], "+.0%")
        where = mean["row"] if mean["group"] == ANYTHING else f"{mean['row']}: {mean['group']}"
        rows.append([where, mean["signals"], mean["runs"], *gains, *(number(*each) for each in language)])
    heads = ("row", "signals", "runs", "of missing: at once", "settled", "unchosen", "KL", "neutral", "rest")
    failed = [
        f"{run['row']}, {run['taste']}, seed {run['seed']}: {run['error']}" for run in report["runs"] if "error" in run
    ]
    return "\n".join([*markdown(COLUMNS, moments), "", *markdown(heads, rows), *failed])


def cases(options: Namespace) -> Iterator[tuple[str, str, int]]:
    """Yield each row, taste and seed to measure; an edit is the taste of its row."""
    known = DEMO if options.model == "demo" else ENGLISH
    for row in options.rows:
        for taste in EDITS if row == "edits" else known:
            if not options.tastes or taste in options.tastes:
                yield from ((row, taste, seed) for seed in range(options.seeds))


def main() -> None:
    """Run the benchmark."""
    options = parse(
        __doc__,
        option("--model", '"demo" or a model\'s directory', "demo", type=_model),
        option("--rows", "by comma", list(ROWS), ["picks", "edits"], type=names(ROWS)),
        option("--tastes", "or edits, by comma; all unless told", [], ["bang", "lower_case"], type=names(_KNOWN)),
        option(
            "--signals",
            "counts at which picks are looked at, by comma; the last is of all rows",
            [5, 10, 20],
            [2],
            type=numbers,
        ),
        option("--prompts", "unseen questions at each moment", 24, 3),
        option("--settle", "seconds to wait for learning, at most", 40.0, 3.0),
        option("--seeds", "of questions and persons, from seed 0 on", 1),
        quick="two signals, one taste",
    )
    folder = find_model(ModelSettings(path=str(options.model)))[0]
    bench = Bench(options, BaseModel(folder))
    report: Figures = {"model": str(options.model), "signals": options.signals, "runs": [], "means": []}
    for row, taste, seed in cases(options):
        report["runs"].append(measure(bench, row, taste, seed))
        report["means"] = means(report["runs"])
        keep(options, report)
    finish(options, report, table(report))


_KNOWN = sorted({*DEMO, *ENGLISH, *EDITS})


def _model(text: str) -> str | Path:
    return text if text == "demo" else model_folder(text)


if __name__ == "__main__":
    main()
