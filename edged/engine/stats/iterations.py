"""Records of the latest iterations, for the status, traces and metrics.

Written by the engine thread, read by any: records are never changed.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edged.scheduler.task import FINETUNE, Kind, ServiceClass, TaskOutcome

MIXES = ("serving", "finetune", "hybrid")
"""The mixes of an iteration: requests alone, fine-tuning alone, both."""
KEPT = 8192
"""Number of records kept: at ten milliseconds an iteration, more than a minute."""
_MEMBER = struct.Struct("<BqiiiB?")
_KINDS, _CLASSES = tuple(Kind), tuple(ServiceClass)
_KIND_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_CLASS_CODES = {service: code for code, service in enumerate(_CLASSES)}
_FINETUNE = _KIND_CODES[Kind.FINETUNE]


@dataclass(frozen=True, slots=True)
class IterationShare:
    """The part of one task in an iteration: `num_tokens` of the forward, then `units` units."""

    kind: Kind
    task_id: int
    num_tokens: int
    units: int
    context: int
    """Tokens that were computed before this iteration."""
    service: ServiceClass
    finished: bool


def pack_member(outcome: TaskOutcome) -> bytes:
    """Pack an `IterationShare` into 23 bytes, for the object takes some 120 and hundreds of thousands are kept."""
    task, did, finished = outcome.task, (outcome.num_tokens, outcome.units), outcome.next_kind is None
    service = ServiceClass.INTERACTIVE if task.kind is FINETUNE else task.service
    return _MEMBER.pack(_KIND_CODES[task.kind], task.task_id, *did, task.context, _CLASS_CODES[service], finished)


@dataclass(frozen=True, slots=True)
class Iteration:
    """The record of one iteration, as planned and as measured; times in seconds."""

    number: int
    """The iteration's number, from 1, without gaps."""
    started_s: float
    """Start of the iteration (monotonic clock)."""
    elapsed_s: float
    """Time from before pages are allocated until the tokens are known."""
    decision_s: float
    budget_s: float | None
    """The latency budget; None when no request was waiting for tokens."""
    predicted_s: float
    """Predicted time of its forward and units."""
    forward_s: float
    units: tuple[tuple[str, int, float], ...]
    """Kind, tokens and seconds of each unit, in the order in which they ran."""
    packed: bytes
    """`members`, each packed by `pack_member`."""
    preempted: tuple[int, ...]
    """Ids of tasks that were preempted for it."""
    prefill_s: float
    decode_s: float
    finetune_s: float
    free_pages: int
    waiting: int
    """Number of requests that held no pages."""

    @property
    def members(self) -> Iterator[IterationShare]:
        """The part of each task."""
        for kind, task_id, num_tokens, units, context, service, finished in _MEMBER.iter_unpack(self.packed):
            yield IterationShare(_KINDS[kind], task_id, num_tokens, units, context, _CLASSES[service], finished)

    @property
    def member_count(self) -> int:
        """Number of tasks that took part."""
        return len(self.packed) // _MEMBER.size

    @property
    def mix(self) -> str:
        """The iteration's mix, one of `MIXES`."""
        kinds = {code for code, *_ in _MEMBER.iter_unpack(self.packed)}
        trained, served = bool(self.units) or _FINETUNE in kinds, bool(kinds - {_FINETUNE})
        return MIXES[2] if trained and served else MIXES[1] if trained else MIXES[0]

    def num_tokens(self, kind: Kind) -> int:
        """Return the number of forward tokens of a kind."""
        code = _KIND_CODES[kind]
        return sum(num_tokens for of, _, num_tokens, *_ in _MEMBER.iter_unpack(self.packed) if of == code)

    def report(self) -> dict[str, Any]:
        """Return the iteration as the status shows it; times in milliseconds."""
        return {
            "prefill_tokens": self.num_tokens(Kind.PREFILL),
            "decode_tokens": self.num_tokens(Kind.DECODE),
            "finetune_tokens": self.num_tokens(Kind.FINETUNE),
            "finetune_units": len(self.units),
            "latency_ms": self.elapsed_s * 1e3,
            "budget_ms": None if self.budget_s is None else self.budget_s * 1e3,
        }
