"""What the latest iterations did, one record each: for the status, for a trace, for whoever watches.

Written by the engine thread, read by any: records are never changed.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from edged.scheduler.task import IterationResult, Kind, Plan, ServiceClass, TaskOutcome

_NOBODY_WAITS_S = 1e6
KEPT = 8192
"""Records that are kept: at ten milliseconds an iteration, more than a minute."""
_MEMBER = struct.Struct("<BqiiiB?")
_KINDS, _CLASSES = tuple(Kind), tuple(ServiceClass)
_KIND_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_CLASS_CODES = {service: code for code, service in enumerate(_CLASSES)}


@dataclass(frozen=True, slots=True)
class IterationShare:
    """What one task did in an iteration: `tokens` of the forward, then `units` units."""

    kind: Kind
    task_id: int
    tokens: int
    units: int
    context: int
    """Tokens that were computed before this iteration."""
    service: ServiceClass
    finished: bool


def pack_member(outcome: TaskOutcome) -> bytes:
    """An `IterationShare` in 23 bytes; the object takes some 120: thousands of records with dozens of them are kept."""
    task, did, finished = outcome.task, (outcome.tokens, outcome.units), outcome.next_kind is None
    return _MEMBER.pack(_KIND_CODES[task.kind], task.task_id, *did, task.context, _CLASS_CODES[task.service], finished)


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration as it was planned and as it was measured; times in seconds."""

    number: int
    """Counts from 1, without gaps."""
    started_s: float
    """Of the monotonic clock."""
    elapsed_s: float
    """From before the pages are taken until the tokens are known."""
    decision_s: float
    budget_s: float | None
    """None: nobody was waiting."""
    predicted_forward_s: float
    predicted_units_s: float
    forward_s: float
    units: tuple[tuple[str, int, float], ...]
    """Kind, tokens and seconds of each unit, in the order in which they ran."""
    packed: bytes
    """`members`, as `pack_member` has each."""
    preempted: tuple[int, ...]
    """Tasks that gave their pages back for it."""
    prefill_s: float
    decode_s: float
    finetune_s: float
    free_pages: int
    waiting: int
    """Requests that held no pages."""

    @property
    def members(self) -> Iterator[IterationShare]:
        """What each task did."""
        for kind, task_id, tokens, units, context, service, finished in _MEMBER.iter_unpack(self.packed):
            yield IterationShare(_KINDS[kind], task_id, tokens, units, context, _CLASSES[service], finished)

    @property
    def member_count(self) -> int:
        """How many tasks did something."""
        return len(self.packed) // _MEMBER.size

    def tokens(self, kind: Kind) -> int:
        """Forward tokens of a kind."""
        code = _KIND_CODES[kind]
        return sum(tokens for of, _, tokens, *_ in _MEMBER.iter_unpack(self.packed) if of == code)

    def report(self) -> dict[str, Any]:
        """As the status shows it; times in milliseconds."""
        return {
            "prefill_tokens": self.tokens(Kind.PREFILL),
            "decode_tokens": self.tokens(Kind.DECODE),
            "finetune_tokens": self.tokens(Kind.FINETUNE),
            "finetune_units": len(self.units),
            "latency_ms": self.elapsed_s * 1e3,
            "budget_ms": None if self.budget_s is None else self.budget_s * 1e3,
        }


class IterationLog:
    """The latest `KEPT` records."""

    def __init__(self) -> None:
        self._kept: deque[Iteration] = deque(maxlen=KEPT)

    def add(
        self,
        plan: Plan,
        result: IterationResult,
        *,
        started_s: float,
        elapsed_s: float,
        decision_s: float,
        spent_s: tuple[float, float, float],
        free_pages: int,
        waiting: int,
    ) -> Iteration:
        """Record an iteration; call it before its tasks advance, for it reads their contexts.

        `spent_s` is what prefill, decode and fine-tuning had of it.
        """
        prefill_s, decode_s, finetune_s = spent_s
        record = Iteration(
            number=self.newest + 1,
            started_s=started_s,
            elapsed_s=elapsed_s,
            decision_s=decision_s,
            budget_s=plan.budget_s if plan.budget_s < _NOBODY_WAITS_S else None,
            predicted_forward_s=plan.predicted_forward_s,
            predicted_units_s=plan.predicted_units_s,
            forward_s=result.forward_s,
            units=tuple((unit.kind, unit.tokens, seconds) for unit, seconds in result.units),
            packed=b"".join(map(pack_member, result.outcomes)),
            preempted=tuple(task.task_id for task in plan.preempt),
            prefill_s=prefill_s,
            decode_s=decode_s,
            finetune_s=finetune_s,
            free_pages=free_pages,
            waiting=waiting,
        )
        self._kept.append(record)
        return record

    @property
    def newest(self) -> int:
        """Number of the latest record; 0 before the first."""
        return self._kept[-1].number if self._kept else 0

    def since(self, number: int) -> list[Iteration]:
        """Records after `number` that are still kept, oldest first."""
        kept = self._kept.copy()
        return _last(kept, kept[-1].number - number if kept else 0)

    def latest(self, count: int) -> list[Iteration]:
        """The last `count` records, oldest first."""
        return _last(self._kept.copy(), count)


def _last(kept: deque[Iteration], count: int) -> list[Iteration]:
    return list(islice(kept, max(0, len(kept) - count), None))
