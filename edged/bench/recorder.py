"""What an engine did during a replay, as its callbacks tell it, and the figures that follow."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from edged.align.feedback.pair import PairRetired, PairScored, Record, StepSkipped
from edged.align.metrics import RECENT_PAIRS
from edged.engine.request import Event, FinishEvent, TokenEvent

SLO_FACTOR = 5.0
"""A first token is in time within so many times its prompt's own forward latency (MACE, section 6)."""


@dataclass(slots=True)
class ReplayedAnswer:
    """One request of the replay; times are seconds of the clock that its recorder has."""

    due_s: float
    prompt_tokens: int
    token_s: list[float] = field(default_factory=list)
    """When each token was delivered."""
    finish: FinishEvent | None = None

    @property
    def ttft_s(self) -> float | None:
        """From when the trace wanted it sent, so that a late sender does not flatter the engine."""
        return self.token_s[0] - self.due_s if self.token_s else None


@dataclass(slots=True)
class SentPair:
    """One preference of the replay; times are seconds of the clock that its recorder has."""

    sent_s: float
    learnt_s: float | None = None
    """When the first version that was trained on it was published."""


class ReplayRecorder:
    """Takes the engine's events and records; the other methods may be called from any thread meanwhile."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` has the moments' seconds."""
        self.clock = clock
        self.answers: dict[str, ReplayedAnswer] = {}
        self.scores: list[PairScored] = []
        self.scored_s: list[float] = []
        """When each of `scores` came."""
        self.pairs: dict[int, SentPair] = {}
        """By pair id."""
        self.skipped_steps: list[StepSkipped] = []
        self._changed = threading.Condition()
        self.open_requests = 0
        """Submitted and not ended yet."""

    def expect(self, request_id: str, due_s: float, prompt_tokens: int) -> None:
        """A request is about to be submitted."""
        with self._changed:
            self.answers[request_id] = ReplayedAnswer(due_s, prompt_tokens)
            self.open_requests += 1

    def refuse(self, request_id: str) -> None:
        """The engine did not take it."""
        with self._changed:
            self.open_requests -= 1

    def expect_pair(self, pair_id: int) -> None:
        """A pair is about to be submitted."""
        self.pairs[pair_id] = SentPair(self.clock())

    def deliver(self, events: list[Event]) -> None:
        """The engine's callback for tokens and ends."""
        now = self.clock()
        ended = 0
        for event in events:
            answer = self.answers[event.request_id]
            if isinstance(event, TokenEvent):
                answer.token_s.append(now)
            else:
                answer.finish = event
                ended += 1
        if ended:
            with self._changed:
                self.open_requests -= ended
                self._changed.notify_all()

    def journal(self, records: list[Record]) -> None:
        """The engine's callback for the learning loop's records."""
        now = self.clock()
        for record in records:
            if isinstance(record, PairScored) and record.split == "prequential":
                # In this order, so that a reader finds a moment for each score.
                self.scored_s.append(now)
                self.scores.append(record)
            elif isinstance(record, PairRetired) and record.epochs_done and record.state != "skipped":
                pair = self.pairs[record.pair_id]
                pair.learnt_s = pair.learnt_s or now
            elif isinstance(record, StepSkipped):
                self.skipped_steps.append(record)

    def wait_until_answered(self, timeout_s: float, alive: Callable[[], bool] = lambda: True) -> bool:
        """Wait for the end of every request; False when time is up, or the engine no longer `alive`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self.open_requests and alive():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 0.5))
        return not self.open_requests

    def whole_answers(self, problem: Callable[[], str | None], timeout_s: float) -> list[ReplayedAnswer]:
        """Wait until every request is answered to its end.

        `problem` tells why the engine no longer runs. RuntimeError with it, when time is up, or when a request ended
        otherwise.
        """
        if not self.wait_until_answered(timeout_s, lambda: not problem()):
            raise RuntimeError(f"the engine: {problem() or 'no answer in time'}")
        answers = list(self.answers.values())
        ends = [answer.finish for answer in answers if answer.finish is not None]
        if bad := [end.error or end.reason for end in ends if end.reason not in ("length", "stop")]:
            raise RuntimeError(f"{len(bad)} of {len(answers)} requests failed, the first with: {bad[0]}")
        return answers


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles in milliseconds; None where there is nothing to tell."""
    if not len(seconds):
        return dict.fromkeys(("mean", "p50", "p95", "p99"))
    p50, p95, p99 = np.percentile(seconds, [50, 95, 99]) * 1e3
    return {"mean": float(np.mean(seconds) * 1e3), "p50": float(p50), "p95": float(p95), "p99": float(p99)}


def request_counts(answers: Sequence[ReplayedAnswer]) -> dict[str, int]:
    """How the requests ended."""
    reasons = Counter(answer.finish.reason if answer.finish else "refused" for answer in answers)
    return {
        "sent": len(answers),
        "finished": reasons["length"] + reasons["stop"],
        "refused": reasons["refused"],
        "unfinished": reasons["cancelled"],
        "failed": reasons["error"],
    }


def serving_figures(answers: Sequence[ReplayedAnswer], start_s: float, seconds: float) -> dict[str, Any]:
    """Latencies of the requests that were answered; throughput within the `seconds` from `start_s`."""
    ttft = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
    gaps = [after - before for answer in answers for before, after in pairwise(answer.token_s)]
    end_s = start_s + seconds
    tokens = sum(moment <= end_s for answer in answers for moment in answer.token_s)
    started = [answer for answer in answers if answer.token_s and answer.token_s[0] <= end_s]
    ended = [answer for answer in answers if answer.finish and answer.token_s and answer.token_s[-1] <= end_s]
    return {
        "ttft_ms": percentiles_ms(ttft),
        "tbt_ms": percentiles_ms(gaps),
        "throughput": {
            "output_tokens_per_s": tokens / seconds,
            "prompt_tokens_per_s": sum(answer.prompt_tokens for answer in started) / seconds,
            "requests_per_s": len(ended) / seconds,
        },
    }


def prefix_figures(before: dict[str, Any], after: dict[str, Any], answers: Sequence[ReplayedAnswer]) -> dict[str, Any]:
    """What was found of the prompts between two looks at the trie's counts."""
    prompt, hit = (after[name] - before[name] for name in ("prompt_tokens", "hit_tokens"))
    return {
        "prompt_tokens": prompt,
        "hit_tokens": hit,
        "hit_share": hit / prompt if prompt else 0.0,
        "requests_by_tenth": prefix_shares(answers),
    }


def prefix_shares(answers: Sequence[ReplayedAnswer]) -> list[int]:
    """Requests by the share of their prompt that was there already: from 0 to below 0.1, ..., from 0.9 to 1."""
    ends = [answer.finish for answer in answers if answer.finish and answer.finish.prompt_tokens]
    tenths = Counter(min(9, 10 * end.cached_tokens // end.prompt_tokens) for end in ends)
    return [tenths[tenth] for tenth in range(10)]


def learning_latency(pairs: Sequence[SentPair]) -> dict[str, float | None]:
    """From a pair's submission until a version has learnt it, in milliseconds; pairs that none has learnt are out."""
    return percentiles_ms([pair.learnt_s - pair.sent_s for pair in pairs if pair.learnt_s is not None])


def score_series(scores: Sequence[PairScored], moments_s: Sequence[float], start_s: float) -> list[dict[str, Any]]:
    """Each scored pair as it came, with what the base model without an adapter says of it."""
    return [
        {
            "at_s": round(moment_s - start_s, 3),
            "pair_id": score.pair_id,
            "version": score.version,
            "win": score.chosen_logp > score.rejected_logp,
            "clpd_nats": score.chosen_logp - score.rejected_logp,
            "reward_margin": score.reward_margin,
            "base_clpd_nats": score.ref_chosen_logp - score.ref_rejected_logp,
        }
        for score, moment_s in zip(scores, moments_s, strict=False)
    ]


def iteration_figures(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Number and mean latency of the iterations between two looks at the engine's `busy`, by what was in them."""
    counts = {mix: after["iterations"][mix] - count for mix, count in before["iterations"].items()}
    seconds = {mix: after["iteration_s"][mix] - spent for mix, spent in before["iteration_s"].items()}

    def row(count: int, spent_s: float) -> dict[str, float | int | None]:
        return {"count": count, "mean_ms": spent_s / count * 1e3 if count else None}

    return {
        **row(sum(counts.values()), sum(seconds.values())),
        "by_mix": {mix: row(count, seconds[mix]) for mix, count in counts.items()},
    }


def slo_figures(
    answers: Sequence[ReplayedAnswer], prompts: Sequence[int], alone_s: Callable[[float], float], floor_s: float
) -> dict[str, Any]:
    """First tokens in time; `prompts` are the load's lengths, `alone_s` the TTFT of a lone prompt by its length."""
    return {
        "ttft_factor": SLO_FACTOR,
        "ttft_within_factor_share": attainment(answers, lambda n: SLO_FACTOR * alone_s(n)),
        "ttft_floor_ms": floor_s * 1e3,
        "ttft_within_factor_or_floor_share": attainment(answers, lambda n: max(floor_s, SLO_FACTOR * alone_s(n))),
        "forward_ms_of_mean_prompt": alone_s(sum(prompts) / len(prompts)) * 1e3,
    }


def attainment(answers: Sequence[ReplayedAnswer], target_s: Callable[[int], float]) -> float | None:
    """Share of all requests, answered or not, whose first token came within the target of their prompt length."""
    if not answers:
        return None
    met = sum(answer.ttft_s is not None and answer.ttft_s <= target_s(answer.prompt_tokens) for answer in answers)
    return met / len(answers)


def alignment_figures(scores: Sequence[PairScored]) -> dict[str, float | int | None]:
    """Means over the pairs as they came, each scored before it was trained on; `_recent` is the last 50."""
    figures: dict[str, float | int | None] = {"pairs": len(scores)}
    for suffix, chosen in (("", scores), ("_recent", scores[-RECENT_PAIRS:])):
        columns: dict[str, list[float]] = {
            "win_rate": [float(score.chosen_logp > score.rejected_logp) for score in chosen],
            "clpd_nats": [score.chosen_logp - score.rejected_logp for score in chosen],
            "reward_accuracy": [float(score.reward_margin > 0) for score in chosen],
            "reward_margin": [score.reward_margin for score in chosen],
            "loss": [score.loss for score in chosen],
        }
        figures |= {name + suffix: float(np.mean(values)) if values else None for name, values in columns.items()}
    return figures


# -- where time went ---------------------------------------------------------------------------------------------------

EVERY_S = 1.0
_PARTS = ("prefill", "decode", "finetune")
Sums = tuple[float, ...]
"""Seconds of each of _PARTS since some start."""


@dataclass(frozen=True, slots=True)
class Look:
    """The sums at one moment."""

    at_s: float
    sums: Sums

    @classmethod
    def of(cls, at_s: float, busy: dict[str, Any]) -> Look:
        """From the status' "busy" then."""
        return cls(at_s, tuple(busy[f"{part}_s"] for part in _PARTS))


def shares(looks: list[Look]) -> list[dict[str, float]]:
    """Rows {"at_s", "busy_share", "prefill_share", "decode_share", "finetune_share"} between the looks.

    An engine counts an iteration when it ends: what a span has beyond its own length ran in the spans before it, and is
    counted there.
    """
    spans = [after.at_s - before.at_s for before, after in pairwise(looks)]
    work = [[b - a for a, b in zip(before.sums, after.sums, strict=True)] for before, after in pairwise(looks)]
    for index in range(len(work) - 1, -1, -1):
        total = sum(work[index])
        if total <= spans[index]:
            continue
        kept = spans[index] / total
        if index:
            work[index - 1] = [a + b * (1.0 - kept) for a, b in zip(work[index - 1], work[index], strict=True)]
        work[index] = [part * kept for part in work[index]]
    rows = []
    for look, span, parts in zip(looks[1:], spans, work, strict=True):
        if span > 0.05 * EVERY_S:
            row = {f"{name}_share": part / span for name, part in zip(_PARTS, parts, strict=True)}
            rows.append({"at_s": look.at_s - looks[0].at_s, "busy_share": sum(parts) / span, **row})
    return rows
