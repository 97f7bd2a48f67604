"""Claims about policies, each with the value that the runs show, and whether it is met.

A claim that holds only at some loads is reported as met at those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report import learning, paper
from benchmarks.report.overheads import decision_ms, memory_mb, queued_decision_ms
from benchmarks.report.setting import HEADLINE_RETRAIN_RATE, Setting
from benchmarks.report.sources import WHOLE
from edged.lab.bench.summary import ATTAINMENT, CLPD, PAIRS, TBT, THROUGHPUT, TTFT, Middle, ReportFigure

LARGEST_TBT = 1.05
"""Largest ratio of TBT to that of serving alone (fcfs)."""
WANTED_ATTAINMENT, FALLEN_ATTAINMENT = 0.95, 0.60
"""Share of first tokens in time: mace's at loads where each baseline's is below the second number."""
LONGEST_DECISION_MS, LONGEST_QUEUED_MS, MAX_SCHEDULER_MB = 0.10, 1.0, 5.0
QUEUED_PROMPTS = 4096
"""Queued prompts, besides 64 live tasks, at which LONGEST_QUEUED_MS applies."""
MET, NOT_MET, NOT_MEASURED, WITHIN = "met", "not met", learning.NOT_MEASURED, "within the spread"
NOTHING_LEARNED = "–"
"""Text of claims that compare no policies, or whose runs lack the number."""
_NEAR = 0.03
"""Distance from the paper's retrain rate of 10 % that still counts as 10 %."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One row of the table of claims."""

    what: str
    paper: str
    ours: str
    verdict: str
    learned: str = NOTHING_LEARNED
    """Pairs that each policy learned, if policies are compared: the numbers seldom agree."""


def verdict(values: Mapping[str, float | Middle], holds: Callable[[float], bool]) -> str:
    """Return whether a claim is met at all places, at some (named), or at none; it is met where every seed meets
    it."""
    if not values:
        return NOT_MEASURED
    met = [
        place
        for place, value in values.items()
        # Claims are limits, so that the smallest and the largest value tell of all.
        if all(map(holds, (value.low, value.high) if isinstance(value, Middle) else (value,)))
    ]
    if len(met) == len(values):
        return MET
    return f"met only at {'; '.join(met)}" if met else NOT_MET


def at_least(limit: float) -> Callable[[float], bool]:
    """Return a test for values that are at least `limit`."""
    return lambda value: value >= limit


def below(limit: float) -> Callable[[float], bool]:
    """Return a test for values below `limit`."""
    return lambda value: value < limit


def claims(setting: Setting, pruned: dict[str, Any] | None = None) -> list[Claim]:
    """Return all claims about one machine's runs; `pruned` is the output of python -m benchmarks.pruning, if it ran."""
    return [
        _ratio(setting, "TTFT p50 of AdaInf's", TTFT, "adainf", 1.0 - paper.TTFT_BELOW_ADAINF.value, "at most 0.37x"),
        _ratio(setting, "TTFT p50 of Ekya's", TTFT, "ekya", 1.0, "below 1x"),
        _ratio(setting, "TBT p50 of serving alone (fcfs)", TBT, "fcfs", LARGEST_TBT, "at most 1.05x"),
        _throughput(setting),
        _attainment(setting),
        *_ablations(setting),
        *_learning_lost(setting),
        pruning_claim(setting, pruned or {}),
        _ordering(setting),
    ]


def scheduler_claims(measured: Sequence[dict[str, Any]]) -> list[Claim]:
    """Return claims about the scheduler's own overhead."""
    found = []
    for one in measured:
        if one.get("policy") != "mace":
            continue
        decision, memory = decision_ms(one), memory_mb(one)
        what, limit = f"decision with {one['tasks']} live tasks", f"{LONGEST_DECISION_MS:.2f} ms"
        met = verdict({"": decision}, lambda value: value <= LONGEST_DECISION_MS)
        found.append(Claim(what, f"at most {limit}; {paper.SCHEDULER_LATENCY_MS['mace']}", f"{decision:.3f} ms", met))
        found.append(_queued_claim(one))
        met = verdict({"": memory}, below(MAX_SCHEDULER_MB))
        told = f"under {MAX_SCHEDULER_MB:.0f} MB; {paper.SCHEDULER_MEMORY_MB['mace']}"
        found.append(Claim("the scheduler's memory", told, f"{memory:.2f} MB", met))
    return found


def _queued_claim(measured: dict[str, Any]) -> Claim:
    """Return the claim about a decision with a long queue, which has its own limit."""
    queued, decision = measured.get("queued"), queued_decision_ms(measured)
    what, limit = f"decision with {QUEUED_PROMPTS:,} queued besides", f"at most {LONGEST_QUEUED_MS:.0f} ms"
    if decision is None or queued != QUEUED_PROMPTS:
        told = "–" if decision is None else f"{decision:.3f} ms with {queued:,} queued"
        return Claim(what, limit, told, NOT_MEASURED)
    return Claim(what, limit, f"{decision:.3f} ms", MET if decision <= LONGEST_QUEUED_MS else NOT_MET)


def _by_load(setting: Setting, metric: ReportFigure, policy: str, baseline: str) -> dict[str, Middle]:
    """Return the ratio at each load, at the headline's retrain rate."""
    found = {}
    for rate in setting.rates:
        point = {**setting.headline, "rate_per_s": rate}
        ratio = setting.runs.ratio(metric, policy, baseline, **point)
        if ratio is not None:
            found[setting.load(rate)] = ratio
    return found


def _listed(values: Mapping[str, float | Middle], form: str = "{:.2f}x") -> str:
    return "; ".join(f"{_told(value, form)} at {place}" for place, value in values.items()) or "–"


def _told(value: float | Middle, form: str) -> str:
    """Format a value, with its range where the seeds differ."""
    if not isinstance(value, Middle):
        return form.format(value)
    low, middle, high = (form.format(each) for each in (value.low, value.median, value.high))
    return middle if low == high else f"{middle} ({low}–{high})"


def _learned(
    setting: Setting, policies: Sequence[str], rates: Sequence[float], retrain_rates: Sequence[float] = ()
) -> str:
    """Return the median pairs that each policy learned in the window, by load, at each of the retrain rates."""
    found = []
    for rate in rates:
        counts = {
            policy: [
                setting.median(PAIRS, policy, rate_per_s=rate, retrain_rate=retrain_rate)
                for retrain_rate in retrain_rates or (setting.headline_retrain_rate,)
            ]
            for policy in policies
        }
        if any(count is not None for each in counts.values() for count in each):
            told = [f"{policy} {' / '.join(map(_count, each))}" for policy, each in counts.items()]
            found.append(f"{', '.join(told)} at {setting.load(rate)}")
    return "; ".join(found) or NOTHING_LEARNED


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def _ratio(setting: Setting, what: str, metric: ReportFigure, baseline: str, most: float, wanted: str) -> Claim:
    ratios = _by_load(setting, metric, "mace", baseline)
    told = f"{wanted}; {paper.TTFT_BELOW_ADAINF}" if (metric, baseline) == (TTFT, "adainf") else wanted
    unanswered = _unanswered(setting, ("mace", baseline)) if metric == TTFT else ""
    met = verdict(ratios, below(most) if baseline == "ekya" else lambda value: value <= most)
    return Claim(what, told, _listed(ratios) + unanswered, met, _learned(setting, ("mace", baseline), setting.rates))


def _unanswered(setting: Setting, policies: Sequence[str]) -> str:
    """Return the shares of unanswered requests, which latencies leave out; empty if unknown."""
    found = []
    for rate in setting.rates:
        shares = []
        for policy in policies:
            runs = setting.runs.at(policy=policy, **{**setting.headline, "rate_per_s": rate})
            counts = [done.report["requests"] for done in runs if "requests" in done.report]
            sent = sum(count["sent"] for count in counts)
            if sent:
                shares.append(f"{policy} {1.0 - sum(count['finished'] for count in counts) / sent:.0%}")
        if shares:
            found.append(f"{', '.join(shares)} at {setting.load(rate)}")
    return f" (unanswered: {'; '.join(found)})" if found else ""


def _throughput(setting: Setting) -> Claim:
    policies = ("mace", "adainf")
    ratios = _by_load(setting, THROUGHPUT, *policies)
    if abs(setting.headline_retrain_rate - HEADLINE_RETRAIN_RATE) > _NEAR:
        ratios = {}
    if "orin" in (setting.simulated or ""):
        return _mean_throughput(setting, ratios)
    number, learned = paper.THROUGHPUT_TO_ADAINF, _learned(setting, policies, setting.rates)
    wanted, met = f"at least {number.value:.2f}x; {number}", verdict(ratios, at_least(number.value))
    return Claim("throughput of AdaInf's at 10 % retrain rate", wanted, _listed(ratios), met, learned)


def _mean_throughput(setting: Setting, headline: dict[str, Middle]) -> Claim:
    """Return the Orin's claim: the paper averages over its retrain rates; our ratio at 10 % alone is shown beside
    it."""
    number, policies = paper.THROUGHPUT_TO_ADAINF_ORIN, ("mace", "adainf")
    means = {setting.load(rate): setting.mean_ratio(THROUGHPUT, *policies, rate) for rate in setting.rates}
    known = {place: mean for place, mean in means.items() if mean is not None}
    rates = ", ".join(f"{rate:.0%}" for rate in setting.retrain_rates)
    told = [f"mean over {rates}: {_listed(known)}"] if known else []
    told += [f"{setting.headline_retrain_rate:.0%} alone: {_listed(headline)}"] if headline else []
    met = verdict(known, at_least(number.value))
    if headline and not known:
        met = "not shown: an average needs several retrain rates"
    what, wanted = "throughput of AdaInf's, mean over the retrain rates", f"at least {number.value:.2f}x; {number}"
    learned = _learned(setting, policies, setting.rates, setting.retrain_rates)
    return Claim(what, wanted, " / ".join(told) or "–", met, learned)


def _attainment(setting: Setting) -> Claim:
    ours: dict[str, Middle] = {}
    told = []
    for rate in setting.rates:
        mace = setting.runs.middle(ATTAINMENT, policy="mace", **{**setting.headline, "rate_per_s": rate})
        baselines = [setting.median(ATTAINMENT, policy, rate_per_s=rate) for policy in ("ekya", "adainf")]
        known = [value for value in baselines if value is not None]
        if mace is None or len(known) < len(baselines):
            continue
        place = setting.load(rate)
        told.append(f"{_told(mace, '{:.0%}')} ({', '.join(f'{value:.0%}' for value in known)}) at {place}")
        if max(known) < FALLEN_ATTAINMENT:
            ours[place] = mace
    wanted = f"at least {WANTED_ATTAINMENT:.0%} where both baselines are under {FALLEN_ATTAINMENT:.0%}"
    met = verdict(ours, at_least(WANTED_ATTAINMENT))
    met = "not shown: at no load both baselines fell so low" if told and not ours else met
    learned = _learned(setting, ("mace", "ekya", "adainf"), setting.rates)
    return Claim("SLO attainment (of Ekya and AdaInf)", wanted, "; ".join(told) or "–", met, learned)


def _ablations(setting: Setting) -> list[Claim]:
    """Return, at the highest load, the cost of leaving out each part of MACE."""
    highest = setting.rates[-1]
    place = setting.load(highest)

    def value(metric: ReportFigure, policy: str) -> Middle | None:
        return setting.runs.middle(metric, policy=policy, **{**setting.headline, "rate_per_s": highest})

    def claim(
        what: str,
        policy: str,
        number: paper.PaperNumber,
        ours: Middle | None,
        form: str,
        holds: Callable[[float], bool],
    ) -> Claim:
        values, learned = {} if ours is None else {place: ours}, _learned(setting, ("mace", policy), (highest,))
        return Claim(f"{what} {policy}", str(number), _listed(values, form), verdict(values, holds), learned)

    def loss(metric: ReportFigure, policy: str) -> Middle | None:
        kept = setting.runs.ratio(metric, policy, "mace", **{**setting.headline, "rate_per_s": highest})
        return kept and Middle(1.0 - kept.median, 1.0 - kept.high, 1.0 - kept.low)

    share, limit = value(ATTAINMENT, "mace-bin"), paper.BIN_ATTAINMENT
    found = [claim("attainment as", "mace-bin", limit, share, "{:.0%}", below(limit.value))]
    for what, policy, metric, form, number in (
        ("attainment", "mace-prefix", ATTAINMENT, "{:.0%}", paper.PREFIX_ATTAINMENT),
        ("throughput", "mace-bin", THROUGHPUT, "{:.1%}", paper.BIN_THROUGHPUT),
        ("throughput", "mace-prefix", THROUGHPUT, "{:.1%}", paper.PREFIX_THROUGHPUT),
        ("throughput", "mace-prune", THROUGHPUT, "{:.1%}", paper.PRUNE_THROUGHPUT),
    ):
        found.append(claim(f"{what} lost as", policy, number, loss(metric, policy), form, at_least(number.value)))
    return found


def _learning_lost(setting: Setting) -> list[Claim]:
    """Return claims on CLPD without a part at the highest load, met if the difference exceeds the spread over seeds."""
    found = []
    point = {**setting.headline, "rate_per_s": setting.rates[-1]}
    for policy, number in (("mace-bin", paper.BIN_CLPD), ("mace-prefix", paper.PREFIX_CLPD)):
        whole, part = (setting.runs.middle(CLPD, policy=name, **point) for name in ("mace", policy))
        what, met, told = f"CLPD, {policy} to mace", NOT_MEASURED, "–"
        if whole is not None and part is not None:
            told = learning.against(whole.median, part.median)
            met = MET if whole.low > part.high else NOT_MET if whole.high < part.low else WITHIN
            if min(len(setting.runs.at(policy=name, **point)) for name in ("mace", policy)) < 2:
                met = "not shown: one seed tells no spread"
        learned = _learned(setting, ("mace", policy), setting.rates[-1:])
        found.append(Claim(what, str(number), told, met, learned))
    return found


def pruning_claim(setting: Setting, pruned: dict[str, Any]) -> Claim:
    """Return the claim about pruning's loss of accuracy. Replays score pairs unpruned: only benchmarks.pruning measures
    it."""
    what, wanted = "CLPD not pruned (mace-prune) to pruned", str(paper.PRUNE_CLPD)
    models = {done.report["model"]["name"] for done in setting.runs.done if "model" in done.report}
    if not pruned or models != {pruned["model"]}:
        return Claim(what, wanted, "–", NOT_MEASURED)
    quality = pruned["quality"]
    whole = quality[WHOLE]["clpd_nats"]
    kept = {f"{name} tokens a head": row["clpd_nats"] for name, row in quality.items() if name != WHOLE}
    told = f"{whole:.3f} not pruned; {_listed(kept, '{:.3f}')}"
    return Claim(what, wanted, told, verdict(kept, lambda value: value <= whole))


def _ordering(setting: Setting) -> Claim:
    """Return Figure 2's claim: no retraining < periodic < continuous, by the mean CLPD over the window."""
    point = {"rate_per_s": setting.middle_rate, "retrain_rate": setting.retrain_rates[-1]}
    runs = {policy: setting.runs.at(policy=policy, **point) for policy in setting.policies}
    base = learning.mean(learning.untrained(runs, learning.clpd, learning.base_clpd))
    judged = all(learning.judged(ran) for ran in runs.values() if ran)
    means = {"none": base} if base is not None else {}
    for policy in ("periodic-async", "ekya", "mace"):
        ours = learning.mean(learning.pairs(runs.get(policy, ()), learning.scored, learning.clpd))
        means |= {policy: ours} if ours is not None else {}
    wanted = f"none < periodic < continuous; {paper.PERIODIC_CLPD}, {paper.CONTINUOUS_CLPD}"
    told = ", ".join(f"{policy} {value:.3f}" for policy, value in means.items()) or "–"
    periodic = [value for policy, value in means.items() if policy in learning.PERIODIC]
    # Pairs scored when their step begins hide how stale the served version was when they came.
    if not judged or not periodic or "none" not in means or "mace" not in means:
        return Claim("CLPD over time by strategy", wanted, told, NOT_MEASURED)
    ordered = means["none"] < min(periodic) and max(periodic) < means["mace"]
    trained = [policy for policy in means if policy != "none"]
    learned = _learned(setting, trained, (point["rate_per_s"],), (point["retrain_rate"],))
    return Claim("CLPD over time by strategy", wanted, told, MET if ordered else NOT_MET, learned)
