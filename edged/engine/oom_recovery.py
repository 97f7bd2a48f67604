"""Want of memory in the middle of an iteration: less is done at once, and no request fails for it."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from edged.engine.sequences import SequenceTable
from edged.runtime import logs
from edged.scheduler.task import Plan, Resources, Task
from edged.settings.load import ServingSettings

log = logging.getLogger("edged.engine")
_LEAST_TOKENS = 16
"""Chunks are not cut below this: a prompt's page."""
_MOST_STRIKES = 4
"""How often the smallest iteration of a single request is tried before that request fails."""
_PAUSE_S = 0.2
"""Rest before the smallest iteration is tried again: a neighbour may give memory back."""
_EASES_AFTER = 64
"""Iterations that must have gone well before limits are doubled."""


class FinetuneTasks(Protocol):
    """The steps under way, as `FinetuneJobs` has them."""

    @property
    def jobs(self) -> Mapping[int, object]:
        """Steps and tests by task id."""
        ...

    def starved(self, task_ids: set[int], reason: str, now: float) -> None:
        """Memory ran out in these."""
        ...

    def fail(self, task_ids: set[int], reason: str) -> None:
        """An iteration with these failed."""
        ...


class OomRecovery:
    """Fine-tuning gives way first, then chunks shrink, then sequences are preempted; last, one request fails."""

    def __init__(
        self,
        settings: ServingSettings,
        sequences: SequenceTable,
        finetuning: FinetuneTasks,
        return_memory: Callable[[], None],
    ) -> None:
        """`return_memory` gives what is free back to the device."""
        self._settings, self._sequences, self._finetuning = settings, sequences, finetuning
        self._return_memory = return_memory
        self._most_tokens: float = math.inf
        self._most_sequences: float = math.inf
        self._strikes = 0
        self._went_well = 0
        self.pause_s = 0.0
        """How long to rest before the next iteration."""

    def limited(self, resources: Resources) -> Resources:
        """What the next bin may use under the present limits."""
        if self._most_tokens == self._most_sequences == math.inf:
            return resources
        return replace(
            resources,
            max_tokens=int(min(resources.max_tokens, self._most_tokens)),
            max_sequences=int(min(resources.max_sequences, self._most_sequences)),
        )

    @property
    def problem(self) -> str:
        """What is limited now, for people; "" when nothing is."""
        if self._most_tokens == self._most_sequences == math.inf:
            return ""
        most = [f"{int(self._most_tokens)} tokens"] if self._most_tokens < math.inf else []
        most += [f"{int(self._most_sequences)} sequences"] if self._most_sequences < math.inf else []
        return f"memory ran out: an iteration has at most {' and '.join(most)} for now"

    def relieve(self, plan: Plan, error: Exception, now: float) -> None:
        """An iteration ran out of memory before anything came of it: free some, and have less tried."""
        self._went_well = 0
        # Its frames hold what the iteration had computed.
        traceback.clear_frames(error.__traceback__)
        self._return_memory()
        self._drop_torn(plan, now)
        tuning = {grant.task.task_id for grant in plan.grants} & self._finetuning.jobs.keys()
        if tuning:
            _tell("memory ran out beside fine-tuning, which waits", error)
            self._finetuning.starved(tuning, logs.first_line(error, with_kind=True), now)
            # What was computed of sequences in this iteration does not count; they are as they were.
            return
        serving = [grant for grant in plan.grants if grant.task.task_id in self._sequences.by_task]
        tokens = sum(grant.tokens for grant in serving)
        tasks = [grant.task for grant in serving]
        if len(tasks) <= 1 and tokens <= _LEAST_TOKENS:
            self._try_again(tasks, error, now)
        elif tokens > max(_LEAST_TOKENS, 2 * len(tasks)):
            self._most_tokens = max(_LEAST_TOKENS, len(tasks), tokens // 2)
            _tell(f"memory ran out: iterations of at most {self._most_tokens} tokens follow", error)
        else:
            self._most_sequences = max(1, len(tasks) // 2)
            _tell(f"memory ran out: at most {self._most_sequences} sequences at once follow", error)
            self._preempt(tasks, int(self._most_sequences), now)

    def calm(self) -> None:
        """An iteration went well."""
        self._strikes, self.pause_s = 0, 0.0
        if self._most_tokens == self._most_sequences == math.inf:
            return
        self._went_well += 1
        if self._went_well >= _EASES_AFTER:
            self._went_well = 0
            serving = self._settings
            self._most_tokens = _doubled(self._most_tokens, serving.max_batch_tokens)
            self._most_sequences = _doubled(self._most_sequences, serving.max_sequences)

    def _drop_torn(self, plan: Plan, now: float) -> None:
        """Sequences whose K/V went ahead of what the scheduler knows are computed again."""
        for grant in plan.grants:
            sequence = self._sequences.by_task.get(grant.task.task_id)
            if sequence is not None and sequence.admitted and sequence.computed != grant.task.context:
                self._sequences.preempt(grant.task.task_id, now)

    def _try_again(self, tasks: list[Task], error: Exception, now: float) -> None:
        """The smallest iteration there is: a few times more, then its request fails."""
        self._strikes += 1
        self.pause_s = _PAUSE_S
        if self._strikes >= _MOST_STRIKES:
            self._strikes, self.pause_s = 0, 0.0
            reason = f"out of memory, also alone and in small pieces: {logs.first_line(error, with_kind=True)}"
            message = f"a request fails for want of memory: {logs.first_line(error, with_kind=True)}"
            logs.event(log, logging.ERROR, "out_of_memory", message)
            self._sequences.fail([task.task_id for task in tasks], reason, now)

    def _preempt(self, tasks: list[Task], keep: int, now: float) -> None:
        """Take the pages of all but the `keep` that came first; they are computed again when there is room."""
        for task in sorted(tasks, key=lambda task: (task.arrival_s, task.task_id))[keep:]:
            if self._sequences.by_task[task.task_id].admitted:
                self._sequences.preempt(task.task_id, now)


def _doubled(limit: float, whole: int) -> float:
    return 2 * limit if 2 * limit < whole else math.inf


def _tell(what: str, error: Exception) -> None:
    logs.event(log, logging.WARNING, "memory_short", f"{what} ({logs.first_line(error, with_kind=True)})")
