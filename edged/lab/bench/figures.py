"""The figures of a report, computed from a recorder and from readings of an engine's cumulative counters."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from edged.align.feedback.pair import PairScored
from edged.align.metrics import RECENT_PAIRS
from edged.profiler.recorder import ReplayedAnswer, SentPair
from edged.scheduler.reader import GOOD_QOE
from edged.settings.load import SchedulerSettings

SLO_FACTOR = 5.0
"""Factor of the TTFT target: a first token is in time within this many times its prompt's own forward (MACE, section
6)."""
EVERY_S = 1.0
_PARTS = ("prefill", "decode", "finetune")
COUNTED = ("requests", "output_tokens", "trained_tokens")
"""Counts of the status' "totals" that the timeline tells by second."""
Look = tuple[float, dict[str, Any]]
"""A reading: (time in seconds, the engine's cumulative times and counts: the status' "busy" and `COUNTED`)."""


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """Return mean and percentiles in milliseconds; None for each if there are no values."""
    if not len(seconds):
        return dict.fromkeys(("mean", "p50", "p95", "p99"))
    p50, p95, p99 = np.percentile(seconds, [50, 95, 99]) * 1e3
    return {"mean": float(np.mean(seconds) * 1e3), "p50": float(p50), "p95": float(p95), "p99": float(p99)}


def request_counts(answers: Sequence[ReplayedAnswer]) -> dict[str, int]:
    """Count the requests by how they ended."""
    reasons = Counter(answer.finish.reason if answer.finish else "refused" for answer in answers)
    return {
        "sent": len(answers),
        "finished": reasons["length"] + reasons["stop"],
        "refused": reasons["refused"],
        "unfinished": reasons["cancelled"],
        "failed": reasons["error"],
    }


def serving_figures(answers: Sequence[ReplayedAnswer], start_s: float, seconds: float) -> dict[str, Any]:
    """Return latencies of the requests that were answered, and throughput within the `seconds` from `start_s`."""
    ttft = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
    gaps = [after - before for answer in answers for before, after in pairwise(answer.token_s)]
    end_s = start_s + seconds
    num_tokens = sum(moment <= end_s for answer in answers for moment in answer.token_s)
    started = [answer for answer in answers if answer.token_s and answer.token_s[0] <= end_s]
    ended = [answer for answer in answers if answer.finish and answer.token_s and answer.token_s[-1] <= end_s]
    return {
        "ttft_ms": percentiles_ms(ttft),
        "tbt_ms": percentiles_ms(gaps),
        "throughput": {
            "output_tokens_per_s": num_tokens / seconds,
            "prompt_tokens_per_s": sum(answer.prompt_tokens for answer in started) / seconds,
            "requests_per_s": len(ended) / seconds,
        },
    }


def reader_figures(answers: Sequence[ReplayedAnswer]) -> dict[str, Any] | None:
    """Return the QoE of the answers that were read while they were made, 0 for those without a token; None if none
    was."""
    readers = [answer.finish.reader for answer in answers if answer.finish and answer.finish.reader]
    if not readers:
        return None
    qoe = np.asarray([reader.qoe for reader in readers])
    return {
        "answers": len(readers),
        "qoe_mean": float(qoe.mean()),
        "qoe_p5": float(np.percentile(qoe, 5)),
        "qoe_95_share": float((qoe >= GOOD_QOE).mean()),
        "qoe_paper_mean": float(np.mean([reader.qoe_paper for reader in readers])),
        "stall_ms": percentiles_ms([reader.stall_s for reader in readers]),
    }


def prefix_figures(before: dict[str, Any], after: dict[str, Any], answers: Sequence[ReplayedAnswer]) -> dict[str, Any]:
    """Return the prefix cache's hits between two readings of the trie's counts."""
    prompt, hit = (after[name] - before[name] for name in ("prompt_tokens", "hit_tokens"))
    return {
        "prompt_tokens": prompt,
        "hit_tokens": hit,
        "hit_share": hit / prompt if prompt else 0.0,
        "requests_by_tenth": prefix_shares(answers),
    }


def prefix_shares(answers: Sequence[ReplayedAnswer]) -> list[int]:
    """Count requests by the share of their prompt that was cached: from 0 to below 0.1, ..., from 0.9 to 1."""
    ends = [answer.finish for answer in answers if answer.finish and answer.finish.prompt_tokens]
    tenths = Counter(min(9, 10 * end.cached_tokens // end.prompt_tokens) for end in ends)
    return [tenths[tenth] for tenth in range(10)]


def learning_latency(pairs: Sequence[SentPair], end_s: float) -> dict[str, float | None]:
    """Return the milliseconds from a pair's submission until a version that learned it, over all pairs.

    Those not learned by `end_s` are censored: they count as longer than they have waited (Kaplan and Meier 1958). A
    percentile that too few pairs reached is None, and so is the mean where one is censored.
    """
    waits = sorted(
        (end_s - pair.sent_s, True) if pair.learned_s is None else (pair.learned_s - pair.sent_s, False)
        for pair in pairs
    )
    wanted: dict[str, float | None] = {"p50": None, "p95": None, "p99": None}
    waiting_share = 1.0
    for number, (seconds, censored) in enumerate(waits):
        waiting_share *= 1.0 if censored else 1.0 - 1.0 / (len(waits) - number)
        for name, value in wanted.items():
            if value is None and not censored and waiting_share <= 1.0 - int(name[1:]) / 100 + 1e-9:
                wanted[name] = seconds * 1e3
    whole = waits and not any(censored for _, censored in waits)
    return {"mean": float(np.mean([seconds for seconds, _ in waits]) * 1e3) if whole else None, **wanted}


def score_series(scores: Sequence[tuple[float, PairScored]], start_s: float) -> list[dict[str, Any]]:
    """Return a row for each scored pair in order, with the base model's CLPD (adapter off) beside the adapter's."""
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
        for moment_s, score in scores
    ]


def iteration_figures(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return number and mean latency of the iterations between two readings of the engine's `busy`, by their mix of
    work."""
    counts = {mix: after["iterations"][mix] - count for mix, count in before["iterations"].items()}
    seconds = {mix: after["iteration_s"][mix] - spent for mix, spent in before["iteration_s"].items()}

    def row(count: int, spent_s: float) -> dict[str, float | int | None]:
        return {"count": count, "mean_ms": spent_s / count * 1e3 if count else None}

    return {
        **row(sum(counts.values()), sum(seconds.values())),
        "by_mix": {mix: row(count, seconds[mix]) for mix, count in counts.items()},
    }


def times_usual(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float | None]:
    """Return how many times longer than usual work took between two reports of a cost model, by part of an iteration;
    None for parts that did not run."""
    spent = {
        part: {name: value - before["spent_s"][part][name] for name, value in sums.items()}
        for part, sums in after["spent_s"].items()
    }
    return {part: sums["measured"] / sums["usual"] if sums["usual"] else None for part, sums in spent.items()}


def slo_figures(
    answers: Sequence[ReplayedAnswer],
    prompts: Sequence[int],
    alone_s: Callable[[float], float],
    settings: SchedulerSettings,
) -> dict[str, Any]:
    """Return SLO attainment; `prompts` are the load's lengths, `alone_s` the TTFT of a lone prompt by its length.

    A request is in time when its first token is, and its mean time per further token (TPOT), too.
    """
    floor_s = settings.ttft_floor_ms / 1e3
    tpot_s = max(settings.tbt_floor_ms / 1e3, settings.tbt_factor * alone_s(1))

    def first_s(num_tokens: int) -> float:
        return max(floor_s, SLO_FACTOR * alone_s(num_tokens))

    return {
        "ttft_factor": SLO_FACTOR,
        "ttft_within_factor_share": attainment(answers, lambda n: SLO_FACTOR * alone_s(n)),
        "ttft_floor_ms": settings.ttft_floor_ms,
        "ttft_within_factor_or_floor_share": attainment(answers, first_s),
        "tpot_target_ms": tpot_s * 1e3,
        "requests_in_time_share": attainment(answers, first_s, tpot_s),
        "forward_ms_of_mean_prompt": alone_s(sum(prompts) / len(prompts)) * 1e3,
        "alone_ms": [(n, alone_s(n) * 1e3) for n in sorted({1, *map(int, np.percentile(prompts, range(0, 101, 2)))})],
    }


def attainment(
    answers: Sequence[ReplayedAnswer], target_s: Callable[[int], float], tpot_s: float | None = None
) -> float | None:
    """Return the share of all requests, answered or not, whose first token came within the target of their prompt
    length; with `tpot_s`, of those that also got the rest at this pace."""
    if not answers:
        return None

    def in_time(answer: ReplayedAnswer) -> bool:
        first_s = answer.ttft_s
        first = first_s is not None and first_s <= target_s(answer.prompt_tokens)
        return first and (tpot_s is None or (answer.whole and answer.tpot_s <= tpot_s))

    return sum(map(in_time, answers)) / len(answers)


def alignment_figures(scores: Sequence[PairScored]) -> dict[str, float | int | None]:
    """Return means over the pairs in order, each scored before it was trained on; `_recent` is the last 50."""
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


def shares(looks: Sequence[Look]) -> list[dict[str, float]]:
    """Return rows {"at_s", "busy_share", "prefill_share", "decode_share", "finetune_share"} between the readings, and
    each of `COUNTED` per second.

    An engine counts an iteration when it ends: work in excess of a span's length ran in the spans before it, and is
    counted there.
    """
    spans = [after - before for (before, _), (after, _) in pairwise(looks)]
    sums = [[busy[f"{part}_s"] for part in _PARTS] for _, busy in looks]
    work = [[b - a for a, b in zip(before, after, strict=True)] for before, after in pairwise(sums)]
    for index in range(len(work) - 1, -1, -1):
        total = sum(work[index])
        if total <= spans[index]:
            continue
        kept = spans[index] / total
        if index:
            work[index - 1] = [a + b * (1.0 - kept) for a, b in zip(work[index - 1], work[index], strict=True)]
        work[index] = [part * kept for part in work[index]]
    rows = []
    for ((_, before), (at_s, after)), span, parts in zip(pairwise(looks), spans, work, strict=True):
        if span > 0.05 * EVERY_S:
            row = {f"{name}_share": part / span for name, part in zip(_PARTS, parts, strict=True)}
            row |= {f"{name}_per_s": (after[name] - before[name]) / span for name in COUNTED}
            rows.append({"at_s": at_s - looks[0][0], "busy_share": sum(parts) / span, **row})
    return rows
