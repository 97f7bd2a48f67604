"""The engine's counters: totals, rates of the last seconds, percentiles of the latest events.

Written by the engine thread, read by any: deques and integers are replaced, never iterated in place.
"""

from array import array
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from edged.engine.stats.iterations import KEPT, MIXES, Iteration, pack_member
from edged.scheduler.cost.model import CostModel, load_of
from edged.scheduler.task import IterationResult, Kind, Plan, ServiceClass, TaskOutcome

_NOBODY_WAITS_S = 1e6


@dataclass(slots=True)
class TimeShares:
    """Seconds of work since start, by kind of work; time between iterations and launches is in none.

    Written by the engine thread, read by any.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    finetune_s: float = 0.0
    iterations: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MIXES, 0))
    iteration_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MIXES, 0.0))
    """Seconds of whole iterations, from before pages are allocated until the tokens are known, by mix."""

    def add(self, iteration: Iteration) -> None:
        """Add an iteration."""
        self.prefill_s += iteration.prefill_s
        self.decode_s += iteration.decode_s
        self.finetune_s += iteration.finetune_s
        self.iterations[iteration.mix] += 1
        self.iteration_s[iteration.mix] += iteration.elapsed_s


def split(cost: CostModel, result: IterationResult) -> tuple[float, float, float]:
    """Split a measured iteration into seconds of prefill, decode and fine-tuning; the sum is its forward and units.

    Fine-tune tokens get the time that they are predicted to have added to the forward (MACE packs them into what
    serving leaves free); prefill and decode share the rest in proportion to their predicted forwards alone.
    """
    units_s = sum(seconds for _, seconds in result.units)
    prefills, decodes, finetunes = ([each for each in result.outcomes if each.task.kind is kind] for kind in Kind)
    serving_s = result.forward_s
    if any(outcome.num_tokens for outcome in finetunes):
        whole_s = cost.forward_s(load_of(result))
        serving_s *= min(1.0, _forward_s(cost, prefills + decodes) / whole_s) if whole_s > 0.0 else 0.0
    alone_s = _forward_s(cost, prefills) if prefills else 0.0
    both_s = alone_s + (_forward_s(cost, decodes) if decodes else 0.0)
    prefill_s = serving_s * alone_s / both_s if both_s > 0.0 else 0.0
    return prefill_s, serving_s - prefill_s, units_s + result.forward_s - serving_s


def _forward_s(cost: CostModel, outcomes: list[TaskOutcome]) -> float:
    """Predict the seconds of a forward of these outcomes alone."""
    return cost.forward_s(load_of(IterationResult(outcomes)))


WAITS_KEPT = 1 << 15
"""Number of records kept: a reader that reads once a second misses none below as many tokens a second."""

Wait = tuple[int, float, bool, ServiceClass]
"""Number (from 1, without gaps), seconds, whether the target was met, the class whose target it is."""

_CLASSES = tuple(ServiceClass)
_WAIT_CODES = {service: 2 * place for place, service in enumerate(_CLASSES)}


class LatencyRing:
    """A ring of the latest `WAITS_KEPT` latencies of one kind: TTFT or TBT.

    The ring has its full size from the start, 9 bytes a record, whatever is recorded.
    """

    __slots__ = ("_codes", "_seconds", "count")

    def __init__(self) -> None:
        self.count = 0
        """Number of latencies recorded since start."""
        # One more place is written while the others are read.
        self._seconds = array("d", bytes(8 * (WAITS_KEPT + 1)))
        self._codes = bytearray(WAITS_KEPT + 1)
        """Twice the index of the class, plus one where the target was met."""

    def add(self, seconds: float, met: bool, service: ServiceClass) -> None:
        """Record a latency; the engine thread alone calls it."""
        place = self.count % len(self._codes)
        self._seconds[place] = seconds
        self._codes[place] = _WAIT_CODES[service] + met
        self.count += 1

    def since(self, number: int) -> list[Wait]:
        """Return the kept records after `number`, newest first."""
        newest = self.count
        seconds, codes = self._seconds[:], bytes(self._codes)
        # The oldest records may have been overwritten meanwhile, and one more may be about to be.
        oldest = max(number, self.count + 1 - len(codes))
        return [
            (each, seconds[place], bool(codes[place] & 1), _CLASSES[codes[place] >> 1])
            for each in range(newest, oldest, -1)
            for place in ((each - 1) % len(codes),)
        ]

    def latest(self, count: int) -> list[Wait]:
        """Return the last `count` records, newest first."""
        return self.since(max(0, self.count - count))[:count]


_RATE_SPAN_S = 10.0
_RATES = {
    **{name: name for name in ("output_tokens", "prompt_tokens", "finetune_tokens", "requests")},
    "pairs": "pairs_trained",
}
"""The total that each rate of the status is made of."""
_BINS = 32
"""Number of iterations that the status shows."""
_LATEST = 1000
"""Number of latest tokens, iterations and decisions from which percentiles and attainment are computed."""
OUTCOMES = ("stop", "length", "cancelled", "error", "refused")
"""The ways in which a request can end; "refused" is when the queue was full."""
_LABELS = 8192

Label = tuple[int, str, str]
"""A task's id, the request that it serves ("" for fine-tuning), and its adapter's name (several of a joint step)."""


def percentile(values: list[float], share: float) -> float:
    """Return the value below which `share` of the values lie (nearest rank); 0 when there are none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


@dataclass(slots=True)
class Totals:
    """Counts since start."""

    requests: int = 0
    output_tokens: int = 0
    candidate_tokens: int = 0
    """Tokens of answers that were drawn to choose from, beside the first of each; `output_tokens` has none of them."""
    candidates: int = 0
    """Number of such answers, and blocks of answers."""
    candidates_dropped: int = 0
    """Number of them that were dropped, since their room was wanted."""
    drafted_tokens: int = 0
    """Tokens that were looked up and tried beside a sequence's own next one."""
    drafted_right: int = 0
    """Number of them that were right: `output_tokens` has these."""
    prompt_tokens: int = 0
    finetune_tokens: int = 0
    optimizer_steps: int = 0
    pairs_trained: int = 0
    trained_tokens: int = 0
    """Tokens of the pairs in finished steps, each time that they are trained on."""
    stall_s: float = 0.0
    """Seconds that readers waited for tokens beyond what they expect, of answers that ended."""
    preemptions: int = 0
    iterations: int = 0
    plans_foreseen: int = 0
    """Number of iterations whose plan was made while the one before ran."""
    followers: int = 0
    """Number of times that a request waited for another to compute their shared prefix."""
    renewals: int = 0
    """Number of talks whose K/V were computed again under a new version, before they go on."""
    prunings: int = 0
    """Number of times that a sequence's K/V was pruned."""
    pruned_pages: int = 0
    """Number of pages that pruning freed."""
    steps_skipped: int = 0
    rollbacks: int = 0
    """Number of rollbacks that users asked for."""
    guard_rollbacks: int = 0
    """Number of versions that the guard rolled back."""


@dataclass(slots=True)
class Counters:
    """All counters of one engine; latencies in milliseconds."""

    totals: Totals = field(default_factory=Totals)
    busy: TimeShares = field(default_factory=TimeShares)
    ttft: LatencyRing = field(default_factory=LatencyRing)
    tbt: LatencyRing = field(default_factory=LatencyRing)
    qoe: LatencyRing = field(default_factory=LatencyRing)
    """QoE of readers whose answers ended, instead of seconds."""
    qoe_by_user: deque[tuple[str, float]] = field(default_factory=partial(deque, maxlen=_LATEST))
    """(User, QoE) of the latest answers that were read while they were made."""
    outcomes: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))
    """Number of ended requests, by outcome."""
    task_ids: Iterator[int] = field(default_factory=partial(count, 1))
    labels: deque[Label] = field(default_factory=partial(deque, maxlen=_LABELS))
    """Labels of the latest tasks, for readers of iterations' records."""
    decision_ms: deque[float] = field(default_factory=partial(deque, maxlen=_LATEST))
    iterations: deque[Iteration] = field(default_factory=partial(deque, maxlen=KEPT))
    """Records of the latest iterations, oldest first."""
    _marks: deque[tuple[float, Totals]] = field(default_factory=partial(deque, maxlen=256))

    def new_task(self, request_id: str, adapter: str) -> int:
        """Return the id of a new task, which is labelled with its request and adapter."""
        task_id = next(self.task_ids)
        self.labels.append((task_id, request_id, adapter))
        return task_id

    def record(
        self,
        plan: Plan,
        result: IterationResult,
        cost: CostModel,
        started_s: float,
        now: float,
        free_pages: int,
        waiting: int,
    ) -> Iteration:
        """Count an iteration and keep a record of it; call it before its tasks advance: it reads their contexts."""
        prefill_s, decode_s, finetune_s = split(cost, result)
        iteration = Iteration(
            number=self.totals.iterations + 1,
            started_s=started_s,
            elapsed_s=now - started_s,
            decision_s=self.decision_ms[-1] * 1e-3,
            budget_s=plan.budget_s if plan.budget_s < _NOBODY_WAITS_S else None,
            predicted_s=plan.predicted_forward_s + plan.predicted_units_s,
            forward_s=result.forward_s,
            units=tuple((unit.kind, unit.num_tokens, seconds) for unit, seconds in result.units),
            packed=b"".join(map(pack_member, result.outcomes)),
            preempted=tuple(task.task_id for task in plan.preempt),
            prefill_s=prefill_s,
            decode_s=decode_s,
            finetune_s=finetune_s,
            free_pages=free_pages,
            waiting=waiting,
        )
        self.iterations.append(iteration)
        self.busy.add(iteration)
        self.totals.iterations += 1
        self.totals.plans_foreseen += plan.foreseen
        self.totals.finetune_tokens += iteration.num_tokens(Kind.FINETUNE)
        # Rates are computed from copies of the totals, which are made at most ten times a second.
        if not self._marks or now - self._marks[-1][0] >= 0.1:
            self._marks.append((now, replace(self.totals)))
        return iteration

    def forget(self, user: str) -> None:
        """Forget what a user's readers experienced."""
        self.qoe_by_user = deque([each for each in self.qoe_by_user if each[0] != user], maxlen=_LATEST)

    def since(self, number: int) -> list[Iteration]:
        """Return the kept records of iterations after `number`, oldest first."""
        kept = list(self.iterations.copy())
        return kept[max(0, number + 1 - kept[0].number) :] if kept else []

    def latest(self, count: int) -> list[Iteration]:
        """Return the records of the last `count` iterations, oldest first."""
        return list(self.iterations.copy())[-count:]

    def rates(self, now: float) -> dict[str, float]:
        """Return rates per second over at most the last ten seconds."""
        marks = [mark for mark in list(self._marks) if now - mark[0] <= _RATE_SPAN_S]
        start, before = marks[0] if marks else (now, self.totals)
        span = max(now - start, 1e-3)
        return {
            f"{shown}_per_s": (getattr(self.totals, name) - getattr(before, name)) / span
            for shown, name in _RATES.items()
        }

    def report(self, now: float) -> dict[str, Any]:
        """Return the status' parts that are made from these counters."""

        def halves(values: list[float]) -> dict[str, float | None]:
            shares = {"p50": 0.5, "p95": 0.95}
            return {name: percentile(values, share) if values else None for name, share in shares.items()}

        def milliseconds(waits: list[Wait]) -> list[float]:
            return [seconds * 1e3 for _, seconds, _, _ in waits]

        def share(waits: list[Wait]) -> float | None:
            return sum(met for _, _, met, _ in waits) / len(waits) if waits else None

        def readers(waits: list[Wait]) -> dict[str, Any]:
            qoe, by_user = [value for _, value, _, _ in waits], dict[str, list[float]]()
            for user, value in self.qoe_by_user.copy():
                by_user.setdefault(user, []).append(value)
            return {
                "qoe_mean": sum(qoe) / len(qoe) if qoe else None,
                "qoe_p5": percentile(qoe, 0.05) if qoe else None,
                "qoe_95_share": share(waits),
                "users": {
                    user: {"answers": len(values), "qoe_mean": sum(values) / len(values)}
                    for user, values in by_user.items()
                },
            }

        ttft, tbt = self.ttft.latest(_LATEST), self.tbt.latest(_LATEST)
        return {
            "rates": self.rates(now),
            "latency": {
                "ttft_ms": halves(milliseconds(ttft)),
                "tbt_ms": halves(milliseconds(tbt)),
                "iteration_ms": halves([each.elapsed_s * 1e3 for each in self.latest(_LATEST)]),
            },
            "bins": [iteration.report() for iteration in self.latest(_BINS)],
            "totals": asdict(self.totals),
            "outcomes": dict(self.outcomes),
            "busy": asdict(self.busy),
            "readers": readers(self.qoe.latest(_LATEST)),
            "slo": {"ttft_attainment": share(ttft), "tbt_attainment": share(tbt)},
        }
