"""Failures of the engine loop: an iteration's ends the tasks that were in it, the third in a row ends the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edged.engine.command_queue import STOPPING, CommandQueue
from edged.engine.oom_recovery import FinetuneTasks, OomRecovery
from edged.engine.sequences import SequenceTable
from edged.runtime import logs
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import Plan
from edged.tensors.oom import out_of_memory

log = logging.getLogger("edged.engine")
_MOST_FAILURES = 3


class Recovery:
    """Has every `except` of the loop. Want of memory during a forward is `memory`'s matter and no failure."""

    def __init__(
        self,
        scheduler: Scheduler,
        sequences: SequenceTable,
        finetuning: FinetuneTasks,
        memory: OomRecovery,
        check_device: Callable[[], None],
        clock: Callable[[], float],
        most_failures: int = _MOST_FAILURES,
    ) -> None:
        """`check_device` raises where the device does nothing more; `most_failures` in a row are raised."""
        self._scheduler, self._sequences, self._finetuning, self.memory = scheduler, sequences, finetuning, memory
        self._check_device, self._clock, self._most_failures = check_device, clock, most_failures
        self._failures = 0
        self._computed = False
        self.error: str | None = None
        """Why the engine thread ended, where it was not stopped."""

    @contextmanager
    def thread(self, commands: CommandQueue, last: tuple[Callable[[], object], ...]) -> Iterator[None]:
        """Around the whole life of the engine thread: open requests end with it, then what is `last` is done."""
        try:
            yield
        except Exception as error:
            log.exception("the engine stopped")
            self.error = f"the engine stopped: {error}"
            self._sequences.fail_all(self.error, self._clock())
        finally:
            commands.close(self.error or STOPPING)
            commands.run_pending()
            if self.error:
                self._sequences.fail_all(self.error, self._clock())
            else:
                self._sequences.cancel_all(self._clock())
            for end in last:
                with self.logged("the engine did not end as it should"):
                    end()

    @contextmanager
    def logged(self, message: str) -> Iterator[None]:
        """Around what may fail without harm to anything else."""
        try:
            yield
        except Exception:
            log.exception(message)

    @contextmanager
    def iteration(self, plan: Plan) -> Iterator[None]:
        """Around one iteration; `computed` tells where its forward and units have ended."""
        self._computed = False
        try:
            yield
        except Exception as error:
            if not self._computed and out_of_memory(error):
                self.memory.relieve(plan, error, self._clock())
                return
            self._failures += 1
            if self._failures >= self._most_failures:
                raise
            self._fail(plan, error)
        else:
            self.memory.calm()
            self._failures = 0

    def computed(self) -> None:
        """The iteration has computed all: an error from here on is none of memory."""
        self._computed = True

    def _fail(self, plan: Plan, error: Exception) -> None:
        # A device that does nothing more raises here, before the pairs of a step are blamed.
        self._check_device()
        ids = {grant.task.task_id for grant in plan.grants}
        hit = self._sequences.fail(ids, f"the iteration failed: {error}", self._clock())
        self._finetuning.fail(ids, str(error))
        for task_id in ids:
            # Also of those that had ended when the iteration failed.
            self._scheduler.remove(task_id)
        name = "out_of_memory" if out_of_memory(error) else "iteration_failed"
        logs.event(log, logging.ERROR, name, f"an iteration failed: {error}", exc_info=True, requests=hit)
