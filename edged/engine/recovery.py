"""Recovery from failures of the engine loop: the tasks of a failed iteration run again, each alone.

A task that fails alone ends with the reason; the others go on. The engine ends where the device computes nothing
more, or where its own accounts fail again and again. When memory runs out, no request fails: smaller iterations follow.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from edged.engine.command_queue import STOPPING, CommandQueue
from edged.engine.sequences import SequenceTable
from edged.runtime import logs
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import Kind, Plan, Resources, Task
from edged.settings.load import ServingSettings
from edged.tensors.oom import out_of_memory

if TYPE_CHECKING:
    from edged.engine.interfaces import Finetuning, Runner, Workload

log = logging.getLogger("edged.engine")
_MAX_FAILURES = 3
"""Number of iterations in a row whose results could not be taken in at which the engine ends."""
_MIN_TOKENS = 16
"""Smallest token limit of an iteration: one page of a prompt."""
_MAX_STRIKES = 4
"""Number of tries of a single request's smallest iteration before that request fails."""
_PAUSE_S = 0.2
"""Pause before the smallest iteration is tried again: another process may free memory."""
_EASES_AFTER = 64
"""Number of successful iterations after which limits are doubled."""


class DeviceLost(RuntimeError):
    """The device fails whatever it is given, as a GPU after an illegal access; what was acknowledged is on disk."""


class Recovery:
    """The loop's error handling: every `except` of the loop is here.

    When memory runs out, fine-tuning pauses first, then chunks shrink, then sequences are preempted; last, one request
    fails.
    """

    def __init__(
        self,
        settings: ServingSettings,
        scheduler: Scheduler,
        sequences: SequenceTable,
        finetuning: Finetuning,
        runner: Runner,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._scheduler, self._sequences, self._finetuning = settings, scheduler, sequences, finetuning
        self._workloads: tuple[Workload, ...] = (finetuning, sequences)
        self._runner, self._clock = runner, clock
        self._keeps_states = runner.pages.states is not None
        """Whether layers keep states: some of them have taken in the tokens of an iteration that failed half-way."""
        self._failures = 0
        self._suspects: dict[int, int] = {}
        """Tasks of failed iterations, by id, with their contexts then: each runs alone until it is beyond that."""
        self.computed = False
        """Whether the iteration's computation has ended: later errors are not treated as lack of memory."""
        self.error: str | None = None
        """The reason for which the engine thread ended without having been stopped; None otherwise."""
        self._most: dict[str, int] = {}
        """Limits of an iteration's "tokens" and "sequences" while memory is short."""
        self._strikes = 0
        self._went_well = 0
        self.pause_s = 0.0
        """Seconds to pause before the next iteration."""

    @contextmanager
    def thread(self, commands: CommandQueue, last: tuple[Callable[[], object], ...]) -> Iterator[None]:
        """Wrap the life of the engine thread: at its end, open requests end and the functions `last` are called."""
        try:
            yield
        except Exception as error:
            log.exception("the engine stopped")
            self.error = f"the engine stopped: {error}"
            self._sequences.end_all(self._clock(), self.error)
        finally:
            commands.close(self.error or STOPPING)
            commands.run_pending()
            self._sequences.end_all(self._clock(), self.error or "")
            for end in last:
                with self.logged("the engine did not end as it should"):
                    end()

    @contextmanager
    def logged(self, message: str) -> Iterator[None]:
        """Log exceptions of a part whose failure harms nothing else."""
        try:
            yield
        except Exception:
            log.exception(message)

    @contextmanager
    def iteration(self, plan: Plan) -> Iterator[None]:
        """Handle the exceptions of one iteration, which sets `computed` when its forward and units have ended."""
        self.computed = False
        try:
            yield
        except Exception as error:
            if not self.computed and out_of_memory(error):
                self._relieve(plan, error, self._clock())
                return
            # A task that fails alone ends: it is not the engine's accounts that fail.
            self._failures += self.computed and len({grant.task.task_id for grant in plan.grants}) > 1
            if self._failures >= _MAX_FAILURES:
                raise
            self._blame(plan, error)
        else:
            self._ease()
            self._failures = 0
            for task in (grant.task for grant in plan.grants):
                if task.kind is Kind.FINETUNE or task.context > self._suspects.get(task.task_id, 0):
                    self._suspects.pop(task.task_id, None)

    def isolate(self, plan: Plan) -> None:
        """Leave one suspect of an earlier failure alone in the plan, if it has any."""
        if self._suspects:
            self._suspects = {task_id: context for task_id, context in self._suspects.items() if self._open(task_id)}
            suspects = [grant for grant in plan.grants if grant.task.task_id in self._suspects]
            plan.grants[:] = suspects[:1] or plan.grants

    def _open(self, task_id: int) -> bool:
        return any(task_id in workload.by_task for workload in self._workloads)

    def _blame(self, plan: Plan, error: Exception) -> None:
        """Fail the plan's only task, or have each of several run again alone."""
        self._check_device(error)
        ids, now = {grant.task.task_id for grant in plan.grants}, self._clock()
        if self.computed:
            # Optimizer steps that were taken are not taken again.
            with self.logged("finished steps could not be closed"):
                self._finetuning.close_finished(now, {})
        if len(ids) == 1:
            told = f"the iteration failed: {error}"
            hit = [request for workload in self._workloads for request in workload.fail(ids, told, now)]
        else:
            self._suspects |= {grant.task.task_id: grant.task.context for grant in plan.grants}
            hit = [one.request.request_id for task_id in ids if (one := self._sequences.by_task.get(task_id))]
            for task_id in ids if self.computed or self._keeps_states else ():
                # Its results were taken in by half. Tokens that were sent stay, and their K/V are computed again.
                for workload in self._workloads:
                    workload.preempt(task_id, now)
        for task_id in ids:
            # Those that ended, also before the iteration failed.
            if not self._open(task_id):
                self._scheduler.remove(task_id)
        level, name, told = logging.ERROR, "iteration_failed", f"an iteration failed: {error}"
        if len(ids) > 1:
            level, name, told = logging.WARNING, "iteration_retried", f"{told}; each of its tasks runs again alone"
        logs.event(log, level, "out_of_memory" if out_of_memory(error) else name, told, exc_info=True, requests=hit)

    def _check_device(self, cause: Exception) -> None:
        """Raise DeviceLost where the device computes nothing more: then no task is to blame for `cause`."""
        try:
            self._runner.check_device()
        except Exception as error:
            if error is cause:
                raise
            if not out_of_memory(error):
                raise DeviceLost(f"the device computes nothing more, and edged must start again: {error}") from error

    # -- lack of memory ----------------------------------------------------------------------------------------------

    def limited(self, resources: Resources) -> Resources:
        """Return the resources, limited while memory is short."""
        if not self._most:
            return resources
        most = {f"max_{what}": min(number, getattr(resources, f"max_{what}")) for what, number in self._most.items()}
        return replace(resources, **most)

    @property
    def memory_problem(self) -> str:
        """A sentence on the limits in force; "" when there are none."""
        most = " and ".join(f"{number} {what}" for what, number in self._most.items())
        return most and f"memory ran out: an iteration has at most {most} for now"

    def _relieve(self, plan: Plan, error: Exception, now: float) -> None:
        """Free memory after an iteration ran out of it, and limit the next ones."""
        self._went_well = 0
        # The traceback's frames hold the iteration's tensors.
        traceback.clear_frames(error.__traceback__)
        self._runner.return_memory()
        tasks = [grant.task for grant in plan.grants]
        for task in tasks:
            # A sequence with more K/V than the scheduler knows of is computed again.
            sequence = self._sequences.by_task.get(task.task_id)
            if sequence is not None and (self._keeps_states or sequence.computed != task.context):
                self._sequences.preempt(task.task_id, now)
        tuning = {task.task_id for task in tasks} & self._finetuning.by_task.keys()
        if tuning:
            _warn("memory ran out beside fine-tuning, which waits", error)
            self._finetuning.starved(tuning, logs.first_line(error, with_kind=True), now)
            # The iteration's sequences are unchanged, since its results were not taken in.
            return
        serving = [task for task in tasks if task.task_id in self._sequences.by_task]
        num_tokens = sum(grant.num_tokens for grant in plan.grants if grant.task.task_id in self._sequences.by_task)
        if len(serving) <= 1 and num_tokens <= _MIN_TOKENS:
            self._try_again(serving, error, now)
        elif num_tokens > max(_MIN_TOKENS, 2 * len(serving)):
            self._most["tokens"] = max(_MIN_TOKENS, len(serving), num_tokens // 2)
            _warn(f"memory ran out: iterations of at most {self._most['tokens']} tokens follow", error)
        else:
            keep = self._most["sequences"] = max(1, len(serving) // 2)
            _warn(f"memory ran out: at most {keep} sequences at once follow", error)
            # All but the first to arrive lose their pages and are computed again when there is room.
            for task in sorted(serving, key=lambda task: (task.arrival_s, task.task_id))[keep:]:
                self._sequences.preempt(task.task_id, now)

    def _try_again(self, tasks: list[Task], error: Exception, now: float) -> None:
        """Have the smallest iteration tried again after a pause; after a few tries its request fails."""
        self._strikes += 1
        self.pause_s = _PAUSE_S
        if self._strikes >= _MAX_STRIKES:
            self._strikes, self.pause_s = 0, 0.0
            why = logs.first_line(error, with_kind=True)
            logs.event(log, logging.ERROR, "out_of_memory", f"a request fails for want of memory: {why}")
            reason = f"out of memory, also alone and in small pieces: {why}"
            self._sequences.fail({task.task_id for task in tasks}, reason, now)

    def _ease(self) -> None:
        """Count a successful iteration; after enough of them limits are doubled."""
        self._strikes, self.pause_s = 0, 0.0
        self._went_well += bool(self._most)
        if self._went_well >= _EASES_AFTER:
            self._went_well = 0
            whole = {"tokens": self._settings.max_batch_tokens, "sequences": self._settings.max_sequences}
            self._most = {what: 2 * number for what, number in self._most.items() if 2 * number < whole[what]}


def _warn(what: str, error: Exception) -> None:
    logs.event(log, logging.WARNING, "memory_short", f"{what} ({logs.first_line(error, with_kind=True)})")
