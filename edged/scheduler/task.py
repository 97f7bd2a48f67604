"""The scheduler's records: tasks, the grants of an iteration, and its results."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Generic, Literal, TypeVar

from edged.scheduler.reader import Reader


class ServiceClass(StrEnum):
    """The class of a request's latency targets: its reader waits for every token, or for the whole answer."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class Kind(StrEnum):
    """MACE's three workloads."""

    PREFILL = "prefill"
    DECODE = "decode"
    FINETUNE = "finetune"


PREFILL: Final = Kind.PREFILL
DECODE: Final = Kind.DECODE
FINETUNE: Final = Kind.FINETUNE
"""The members, for what is asked many times in a plan: to read one from the class takes as long as a call."""


CUTTABLE_UNITS = frozenset({"score", "head", "layer"})
"""Kinds of units whose last rows can be computed without the others."""


@dataclass(frozen=True, slots=True)
class Unit:
    """The smallest preemptible piece of a fine-tune step after its forward.

    `kind` is "graph", "head", "score" (a head without a gradient), "layer", "pairs" (a layer over whole pairs, where
    layers keep states), "grad", "step" (the optimizer) or "test" (a held-out pair's heads); `num_tokens` is the window
    it covers, but of "step" the adapters that take one.
    """

    kind: str
    num_tokens: int


@dataclass(slots=True, eq=False)
class _Task:
    """One schedulable piece of work; it lives from `Scheduler.add` until it is finished or removed.

    Units of fields: seconds of the injected clock, tokens, pages.
    """

    task_id: int
    kind: Kind
    arrival_s: float
    """Start of the wait that raises the priority: its request's arrival; work moves a fine-tune task's towards now."""
    num_tokens: int = 1
    """Forward tokens still to compute: the rest of a prompt, 1 for a decode, the rest of a pair's forward."""
    context: int = 0
    """Number of tokens that are computed already."""
    adapter: int = 0
    """Number of its adapter; 0: the base, not known yet, or those of a step."""
    held_pages: int = 0
    """Number of pages that it holds (and would give back if preempted)."""
    capacity: int = 0
    """Number of tokens for which it holds room: `held_pages * page_size`, less what a prefix hit occupies twice."""

    def pages_for(self, num_tokens: int, page_size: int) -> int:
        """Return the pages that it must get to compute `num_tokens` more."""
        missing = self.context + num_tokens - self.capacity
        return -(-missing // page_size) if num_tokens and missing > 0 else 0


@dataclass(slots=True, eq=False)
class ServingTask(_Task):
    """A request as a task: a prefill, then a decode."""

    kind: Literal[Kind.PREFILL, Kind.DECODE]
    deadline_s: float = math.inf
    """When its next token is due (TTFT or TBT target); `Scheduler.add` sets it when it is inf."""
    pruned: int = 0
    """Computed tokens whose K/V were pruned; the rest is attended to."""
    service: ServiceClass = ServiceClass.INTERACTIVE
    tenant: str = ""
    """The user whose turn a request is, or for whom the caller's counts; "" where nobody is named."""
    run: str = ""
    """Run of an application that the request is a call of; "" where it stands for itself."""
    run_cost: float = 0.0
    """Work that the whole run is expected to need (`virtual_time.call_cost`), where it is known."""
    preemptions: int = 0
    """How often its pages were taken away."""
    queue_key: tuple[float, int] = (math.inf, 0)
    """Place of a prompt in its queue, by the order's key when it was filed."""
    candidate: bool = False
    """Whether its answer is one of several to choose from: its pages are taken first."""
    reader: Reader | None = None
    """Who reads the answer while it is made, if anybody does; the engine tells it of each token."""


@dataclass(slots=True, eq=False)
class FinetuneTask(_Task):
    """A fine-tune step as a task."""

    kind: Literal[Kind.FINETUNE] = field(default=Kind.FINETUNE, init=False)
    loss: float = 0.0
    """Mean DPO loss of its pairs; before their forward that of the adapter's latest step, or ln 2."""
    units: tuple[Unit, ...] = ()
    """All its units, in order; `next_unit` is the first that has not run."""
    next_unit: int = 0
    ahead: int = 0
    """Forward tokens still to compute of the next group, which may join forwards while this one's units run."""
    groups_done: int = 0
    """Groups of its pairs that have ended."""
    underway: bool = False
    """Whether it has computed parts of its step before those in `num_tokens` and `units`."""
    trains: tuple[str, ...] = ()
    """Adapters that it trains."""
    bulk: bool = False
    """Whether it is of a job or a pass in idle time: it has what people's own pairs leave, and is owed nothing."""

    @property
    def begun(self) -> bool:
        """Whether it is in the middle of its step."""
        return self.underway or self.context > 0 or self.next_unit > 0

    @property
    def has_work(self) -> bool:
        """Whether anything of its step is still to run."""
        return self.num_tokens > 0 or self.next_unit < len(self.units)


Task = ServingTask | FinetuneTask
"""Any task; its `kind` tells which of the two it is."""
T_co = TypeVar("T_co", bound=Task, covariant=True)


@dataclass(slots=True)
class Grant(Generic[T_co]):
    """The work that one task may do in this iteration: `num_tokens` of forward, then up to `units` units.

    Nobody changes it, nor a `TaskOutcome`: frozen ones, made by the dozen in every iteration, would take three times as
    long.
    """

    task: T_co
    num_tokens: int
    units: int = 0
    window: int = 0
    """Rows of the last unit to compute, its last ones, where it can be cut; 0: all of it."""


@dataclass(slots=True)
class Plan:
    """One bin, ready to run.

    `preempt` tasks give their pages back first; the engine answers each with `Scheduler.restart`.
    """

    grants: list[Grant[Task]] = field(default_factory=list)
    preempt: list[Task] = field(default_factory=list)
    pages: int = 0
    """Number of pages that the grants will allocate."""
    budget_s: float = math.inf
    """Latency budget: the least slack of the members, less what fine-tuning may not take of it."""
    predicted_forward_s: float = 0.0
    predicted_units_s: float = 0.0
    resume_s: float = math.inf
    """Moment at which an empty plan is to be made anew though no task comes."""
    foreseen: bool = False
    """Whether it was made while the iteration before it ran."""
    prepaid: bool = False
    """Whether fine-tuning gets more than it is owed, because its memory is wanted; it waits longer afterwards."""


@dataclass(slots=True)
class TaskOutcome:
    """The result of a grant. `next_kind` is None when the task is finished (MACE's CheckEnd)."""

    task: Task
    num_tokens: int
    units: int
    next_kind: Kind | None
    drafted: int = 0
    """Tokens of a decode that were tried beside its own; those that were right are in `num_tokens`."""


@dataclass(slots=True)
class IterationResult:
    """The outcomes of an iteration and its measured times."""

    outcomes: list[TaskOutcome] = field(default_factory=list)
    forward_s: float = 0.0
    """Wall time of the packed forward with sampling; 0 when there was none."""
    units: list[tuple[Unit, float]] = field(default_factory=list)
    """Each unit that ran with its wall time in seconds."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The pages, tokens and sequences that the next bin may use."""

    free_pages: int
    """Number of pages that are free or can be evicted at once."""
    total_pages: int
    page_size: int
    max_tokens: int
    """Most forward tokens of an iteration."""
    max_sequences: int
    """Most sequences that hold pages at once."""
