"""A simulated person who teaches a daemon by a rule, and what the daemon then answers."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.support import tastes
from benchmarks.support.tastes import ANYTHING, COOKING, DEMO, EDITS, ELSEWHERE, ENGLISH, Rule
from edged.client.client import Client, Refused

CANDIDATES, ANSWERS = 4, 2
"""Answers that a person picks from, as many as the base gives, and answers that are judged of each question."""
AT_ONCE_S, QUIET_S = 1.0, {True: 10.0, False: 30.0}
"""Seconds from the last signal to "at once", and without a new version that count as settled: of the demo model and of
others."""
AT_MOST_CLICK_S = 20.0
"""Seconds for which an answer is waited for that is chosen by the latest pick."""
MAX_TOKENS = {True: 96, False: 64}
"""Tokens of an answer, of the demo model and of others."""
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

    def prompt(self, question: str) -> list[int]:
        """Return the tokens of a question, as a chat without a system prompt of anybody."""
        asked = [{"role": "user", "content": question}]
        return list(self.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False))

    def logps(self, question: str, text: str, end: bool) -> list[float]:
        """Return the log-probability of each token of an answer, in nats, and of its end."""
        import torch

        prompt = self.prompt(question)
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


@dataclass(frozen=True, slots=True)
class Pick:
    """A pick of one of several answers."""

    question: str
    chosen: str
    rejected: tuple[str, ...]


@dataclass(eq=False)
class Bench:
    """A model, how it is looked at, and what the base answered to the questions so far.

    `num_questions` are asked at each look; `settle_s` bounds the wait for learning, in seconds.
    """

    model: str
    judge: BaseModel
    num_questions: int
    settle_s: float
    base_answers: dict[str, list[Answer]] = field(default_factory=dict)

    @property
    def is_demo(self) -> bool:
        """Whether the demo model is measured."""
        return self.model == "demo"


class Person:
    """A user of one daemon who signals by a rule, and what the daemon then answers."""

    def __init__(self, bench: Bench, client: Client, taste: str, seed: int, name: str = "ann") -> None:
        self.bench, self.client, self.taste, self.seed, self.name = bench, client, taste, seed, name
        self.picked: list[Pick] = []
        self.random = random.Random(f"{taste} {seed}")
        self.edit = EDITS.get(taste)
        known = DEMO if bench.is_demo else ENGLISH
        self.rule: Rule = self.edit.shown if self.edit else known[taste].rule
        self.written = "" if self.edit else known[taste].written
        suffix = "" if bench.is_demo else SENTENCE
        asked = tastes.questions(bench.is_demo, seed, taste == "metric")
        teaching, judging = ([each + suffix for each in part] for part in asked)
        groups = (ANYTHING, COOKING, ELSEWHERE)
        self.unasked = {group: tastes.of_group(teaching, group) for group in groups}
        self.unseen = {group: tastes.of_group(judging, group) for group in groups}

    # -- what a person does

    def ask(self, question: str, count: int = 1, user: str | None = None, **fields: Any) -> list[Answer]:
        """Ask, and return the answers; `user` "" asks the base. `system` and `before` are what a chat has before it."""
        return self._answers(question, self._post(question, count, user, **fields))

    def pick(self, rule: Rule, group: str = ANYTHING, wrong: bool = False) -> None:
        """Pick one of four answers by a rule, or against it, or by chance where all are alike."""
        question = next(self.unasked[group])
        found = self._post(question, CANDIDATES)
        meets = [rule(choice["message"]["content"]) for choice in found["choices"]]
        choice = self.random.choice([at for at, met in enumerate(meets) if met != wrong] or range(CANDIDATES))
        texts = [each["message"]["content"] for each in found["choices"]]
        self.picked.append(Pick(question, texts[choice], tuple(text for text in texts if text != texts[choice])))
        self._signal(found, "chosen", choice=choice)

    def click_s(self) -> float:
        """Pick, and return the seconds until an answer is chosen by a taste that knows of it."""

        def taste() -> str:
            found = self._post(next(self.unasked[ANYTHING]), max_tokens=8)
            return str(found.get("system_fingerprint")).partition("taste")[2]

        before = taste()
        self.pick(self.rule)
        started = time.monotonic()
        while taste() in ("", before) and time.monotonic() - started < AT_MOST_CLICK_S:
            pass
        return time.monotonic() - started

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

    def _post(
        self,
        question: str,
        count: int = 1,
        user: str | None = None,
        system: str = "",
        before: Sequence[dict[str, str]] = (),
        **fields: Any,
    ) -> Figures:
        said = [{"role": "system", "content": system}] if system else []
        body = {"messages": [*said, *before, {"role": "user", "content": question}], "n": count, **fields}
        most, user = MAX_TOKENS[self.bench.is_demo], self.name if user is None else user
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
        self.client.post("/v1/feedback", {"completion_id": found["id"], "signal": signal, "user": self.name, **fields})

    # -- what is measured

    def adapter(self) -> Figures:
        """Return what the daemon tells of the person's adapter."""
        with contextlib.suppress(Refused):
            return self.client.get(f"/v1/adapters/{self.name}")
        return {"versions": [], "version": 0}

    def settle(self) -> float:
        """Wait until no new version comes; return the seconds that it took."""
        started = moved = time.monotonic()
        version = None
        while (now := time.monotonic()) - started < self.bench.settle_s and now - moved < QUIET_S[self.bench.is_demo]:
            if (latest := self.adapter()["version"]) != version:
                version, moved = latest, now
            time.sleep(0.5)
        return moved - started

    def moments(self, signals: int, rule: Rule | None = None, groups: Sequence[str] = (ANYTHING,)) -> Iterator[Figures]:
        """Yield the figures of groups of questions after so many signals: at once, and when all has settled."""
        rule = rule or self.rule
        time.sleep(AT_ONCE_S)
        at_once = [self.share(self.served(group), rule) for group in groups]
        settled_s = self.settle()
        for group, share in zip(groups, at_once, strict=True):
            figures = {"signals": signals, "group": group, "at_once": share, "settled_s": settled_s}
            yield figures | self.settled(group, rule)

    def settled(self, group: str, rule: Rule) -> Figures:
        """Return the figures of answers to unseen questions, served and unchosen, beside the base's."""
        served = self.served(group)
        asked = [answers[0].question for answers in served]
        # What is left beside an edit takes more answers to compare.
        own = [self.ask(question, CANDIDATES if self.edit else ANSWERS, logprobs=True) for question in asked]
        base = [self.base(question) for question in asked]
        told = self.adapter()
        reasons = [version["reason"] for version in told["versions"]]
        return {
            **{"settled": self.share(served, rule), "unchosen": self.share(own, rule)},
            **{"base": self.share(base, rule), **self.language(own, base)},
            "chosen": statistics.fmean(answer.chosen for each in served for answer in each),
            "more_prompt_tokens": own[-1][0].prompt_tokens - len(self.bench.judge.prompt(own[-1][0].question)),
            "versions": {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)},
            **{key: told.get(key) for key in ("held_out_kl_nats", "neutral_nll_change", "verdict", "liked", "beliefs")},
            "own_kl_nats": next((each["own_kl_nats"] for each in told["versions"] if each["own_kl_nats"]), None),
            "example": served[0][0].text,
        }

    def served(self, group: str) -> list[list[Answer]]:
        """Ask unseen questions as a person does, once for each answer that is judged."""
        asked = islice(self.unseen[group], self.bench.num_questions)
        return [[answer for _ in range(ANSWERS) for answer in self.ask(question)] for question in asked]

    def share(self, answers: Sequence[Sequence[Answer]], rule: Rule) -> float:
        """Return the share of answers that meet a rule; of edits, among those that ended."""
        judged = [answer for each in answers for answer in each if answer.ended or not self.edit]
        return statistics.fmean(rule(answer.text) for answer in judged) if judged else float("nan")

    def base(self, question: str) -> list[Answer]:
        """Return the base's answers to a question."""
        if question not in self.bench.base_answers:
            self.bench.base_answers[question] = self.ask(question, CANDIDATES, user="")
        return self.bench.base_answers[question]

    def language(self, own: Sequence[Sequence[Answer]], base: Sequence[Sequence[Answer]]) -> Figures:
        """Return the KL of unchosen answers, in nats a token, their repetition beside the base's, and of edits the
        NLL of the rest, in nats a token, beside the base's."""
        theirs, ours = ([answer for each in side for answer in each] for side in (base, own))
        ratios: list[float] = []
        for answer in ours:
            logps = self.bench.judge.logps(answer.question, answer.text, False) if answer.text else []
            # An answer that tokenizes otherwise than it was drawn has no ratio by token.
            if answer.logps and len(logps) == len(answer.logps):
                ratios += [adapted - plain for adapted, plain in zip(answer.logps, logps, strict=True)]
        figures: Figures = {"kl_nats": statistics.fmean(ratios) if ratios else None}
        figures["repetition"] = [repetition([each.text for each in side]) for side in (theirs, ours)]
        if self.edit:
            figures["rest_nll"] = [self.rest_nll(side) for side in (theirs, ours)]
        return figures

    def rest_nll(self, answers: Sequence[Answer]) -> float | None:
        """Return the NLL under the base, in nats a token, of answers without what the edit adds."""
        assert self.edit is not None
        logps: list[float] = []
        for answer in answers:
            # The base's answers are edited first: the rest of lower case is lower case.
            if answer.ended and (rest := self.edit.undo(self.edit.change(answer.text))):
                logps += self.bench.judge.logps(answer.question, rest, True)
        return -statistics.fmean(logps) if logps else None


def repetition(texts: Sequence[str]) -> float:
    """Return the share of three successive words that came before in the same text."""
    seen = total = 0
    for text in texts:
        words = text.lower().split()
        threes = list(zip(words, words[1:], words[2:], strict=False))
        seen, total = seen + len(threes) - len(set(threes)), total + len(threes)
    return seen / max(1, total)
