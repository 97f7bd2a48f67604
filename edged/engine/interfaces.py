"""The interfaces that the loop runs over: a runner, its limits, sequences and fine-tune steps, real or simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from edged.engine.kv_pages import KvPages
from edged.engine.model_runner import RunnerOutput
from edged.engine.pruner import Pruner
from edged.engine.sequence import Sequence, SequenceStatus
from edged.engine.stats.counters import Counters
from edged.scheduler.task import Plan, Resources, TaskOutcome


class Runner(Protocol):
    """The interface of runners: `ModelRunner` on a device, `SimulatedRunner` in virtual time."""

    pages: KvPages
    pruner: Pruner | None
    max_context_tokens: int
    """Largest number of tokens of a sequence."""
    end_ids: frozenset[int]
    """Ids of tokens that end an answer."""
    overlaps: bool
    """Whether the device computes while the calling thread works on."""
    drafts: bool
    """Whether it computes sequences' drafts."""

    def begin_thread(self) -> None:
        """Have the calling thread run plans from now on."""

    def begin_iteration(self, now: float) -> None:
        """Adapt to what other programs leave of the device, before a plan is made."""

    @property
    def last_sign_s(self) -> float:
        """Time of the latest sign of life within a plan (monotonic clock)."""

    def check_device(self) -> None:
        """Raise the error of a device that does nothing more."""

    def return_memory(self) -> None:
        """Return free memory to the system."""

    def run(
        self,
        plan: Plan,
        sequences: Any,
        open_steps: Any,
        interrupted: Callable[[], bool],
        while_waiting: Callable[[], None],
    ) -> RunnerOutput:
        """Run a plan over `sequences` and `open_steps`, both by task id; see `ModelRunner.run`."""

    def close(self) -> None:
        """End: no plan follows."""


class Limits(Protocol):
    """The interface of `ResourceLimits`: the resources that an iteration may use."""

    @property
    def unsettled(self) -> bool:
        """Whether `apply` has more to do at once."""

    def apply(self) -> bool:
        """Give pages back or take them again, between two iterations. True when that made plans void."""

    def resources(self) -> Resources:
        """Return what the next bin may use."""


class Workload(Protocol):
    """The interface of a table of open tasks, over which loop and recovery go: `SequenceTable` and `StepTable`."""

    @property
    def by_task(self) -> Mapping[int, Any]:
        """Open sequences or steps by task id."""

    def open_due(self, now: float) -> None:
        """Open what is due, and end what waits in vain, before a plan is made."""

    def preempt(self, task_id: int, now: float) -> None:
        """Free a task's pages, if it is of this table and holds any."""

    def process(self, output: RunnerOutput, plan: Plan, now: float) -> list[TaskOutcome]:
        """Take the results of a plan in; return the outcomes of the table's grants."""

    def fail(self, task_ids: set[int], error: str, now: float) -> list[str]:
        """End those of its tasks with the error; return the ids of the requests that it hit."""


class Finetuning(Workload, Protocol):
    """The interface of `StepTable` beyond a workload's, real or simulated."""

    resumes_s: float

    def close_finished(self, now: float, failed: Mapping[int, Exception]) -> None:
        """Take finished steps in; see `StepTable.close_finished`."""

    def starved(self, task_ids: set[int], reason: str, now: float) -> None:
        """Drop steps in which memory ran out."""

    def flush(self, now: float) -> None:
        """Hand over the records of the iteration."""

    def next_due_s(self) -> float | None:
        """Return when something is due while nothing runs."""

    def close(self) -> None:
        """Abandon steps and save every version."""


class Sequences(Protocol):
    """The interface of `SequenceTable` for those that hold its sequences back."""

    by_task: dict[int, Sequence]
    stats: Counters
    adapter_cache: Any

    def schedule(self, sequence: Sequence) -> None:
        """Give a sequence to the scheduler."""

    def move(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Put a sequence into another state."""
