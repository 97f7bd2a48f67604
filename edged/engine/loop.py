"""The engine loop: commands, plan, run, complete, publish."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from edged.align.feedback.pair import IterationSample, Record
from edged.engine.command_queue import CommandQueue
from edged.engine.heartbeat import Heartbeat
from edged.engine.model_runner import RunnerOutput
from edged.engine.recovery import Recovery
from edged.engine.request import Event
from edged.engine.sequences import SequenceTable
from edged.engine.stats.counters import Counters
from edged.engine.stats.iterations import Iteration
from edged.scheduler.lookahead import LookaheadPlan
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import IterationResult, Kind, Plan, Resources, Task, TaskOutcome
from edged.settings.load import SchedulerSettings

log = logging.getLogger("edged.engine")
_SAMPLE_EVERY_S = 1.0
_CALIBRATED_AFTER = 50
"""Iterations after which the cost model is believed about what this device can do at all."""


class Runner(Protocol):
    """Runs plans: `ModelRunner` on a device, `SimulatedRunner` in virtual time."""

    overlaps: bool
    """Whether the device computes while the calling thread does something else."""

    def begin_thread(self) -> None:
        """Have the calling thread run plans from now on."""
        ...

    def begin_iteration(self, now: float) -> None:
        """A plan is about to be made: follow what other programs leave of the device."""
        ...

    def run(
        self,
        plan: Plan,
        sequences: Any,
        jobs: Any,
        interrupted: Callable[[], bool],
        while_waiting: Callable[[], None],
    ) -> RunnerOutput:
        """Run a plan over `sequences` and fine-tune `jobs`, both by task id; see `ModelRunner.run`."""
        ...

    def close(self) -> None:
        """No plan comes any more."""
        ...


class Limits(Protocol):
    """The resources that an iteration may use, as `ResourceLimits` has them."""

    @property
    def unsettled(self) -> bool:
        """Whether `apply` has more to do at once."""
        ...

    def apply(self) -> bool:
        """Between two iterations: give pages back or take them again. True when that made plans void."""
        ...

    def resources(self) -> Resources:
        """What the next bin may use."""
        ...


class Finetuning(Protocol):
    """Fine-tune steps, as `FinetuneJobs` has them."""

    resumes_s: float

    @property
    def jobs(self) -> Mapping[int, Any]:
        """Steps and tests under way, by task id."""
        ...

    def open_due_steps(self, now: float, slots_wanted: bool) -> None:
        """Open the steps that are due; `slots_wanted`: requests wait for LoRA slots."""
        ...

    def preempt(self, task_id: int, now: float) -> bool:
        """Take a step's pages away; False when the task is no step."""
        ...

    def process(self, plan: Plan, work: RunnerOutput) -> list[TaskOutcome]:
        """The outcomes of the fine-tune grants."""
        ...

    def close_finished(self, now: float, suspects: deque[tuple[str, int]]) -> None:
        """Take finished steps in; see `FinetuneJobs.close_finished`."""
        ...

    def flush(self, now: float, answering: Callable[[], set[str]]) -> None:
        """Hand over the records of the iteration."""
        ...

    def next_due_s(self) -> float | None:
        """When something is due while nothing runs."""
        ...

    def close(self) -> None:
        """End with every version saved."""
        ...


class EngineLoop:
    """Serving and fine-tuning by turns. Used by one thread alone, but for `error`, `degraded` and `heartbeat`."""

    def __init__(
        self,
        commands: CommandQueue,
        limits: Limits,
        scheduler: Scheduler,
        runner: Runner,
        sequences: SequenceTable,
        finetuning: Finetuning,
        recovery: Recovery,
        stats: Counters,
        settings: SchedulerSettings,
        deliver: Callable[[list[Event]], None],
        observe: Callable[[Iteration], None] = lambda _iteration: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deliver` takes the events of an iteration, `observe` its record; both must not block. `clock` in seconds."""
        self._commands, self._limits, self._scheduler, self._runner = commands, limits, scheduler, runner
        self._sequences, self._finetuning, self._recovery, self._stats = sequences, finetuning, recovery, stats
        self._deliver, self._observe, self._clock = deliver, observe, clock
        self._plan_ahead = settings.plan_ahead
        self._ahead: LookaheadPlan | None = None
        self._ahead_s = 0.0
        """Seconds that planning ahead has taken already."""
        self.resumes_s = 0.0
        """After a step without work: when there may be some."""
        self.heartbeat = Heartbeat()

    def step(self) -> bool:
        """One iteration; False when there is nothing to do before `resumes_s` or the next command."""
        self._commands.run_pending()
        self._ahead = None if self._limits.apply() else self._ahead
        now = self._clock()
        self._runner.begin_iteration(now)
        self._finetuning.open_due_steps(now, self._sequences.waiting_for_slot)
        self._sequences.prepare(now)
        plan, started = self._plan(), self._clock()
        if plan.grants or plan.preempt:
            with self._recovery.iteration(plan):
                self._preempt(plan.preempt, started)
                self._sequences.admit(plan, started)
                sequences, jobs = self._sequences.by_task, self._finetuning.jobs
                ahead = partial(self._look_ahead, plan, started)
                output = self._runner.run(plan, sequences, jobs, interrupted=self._interrupted, while_waiting=ahead)
                self._recovery.computed()
                self._complete(plan, output, started)
        self._publish()
        return bool(plan.grants or plan.preempt)

    def run(self) -> None:
        """The engine thread from its start to its end."""
        last = (self._publish, self._finetuning.close, self._publish, self._runner.close)
        with self._recovery.thread(self._commands, last):
            self._runner.begin_thread()
            while not self._done():
                self.heartbeat.sign()
                if self.step():
                    self.heartbeat.work()
                    if self._recovery.memory.pause_s:
                        self._wait(self._clock() + self._recovery.memory.pause_s)
                else:
                    self._wait(self.resumes_s)

    @property
    def error(self) -> str | None:
        """Why the thread ended, where it was not stopped."""
        return self._recovery.error

    @property
    def degraded(self) -> list[str]:
        """A sentence for everything that is not as it should be."""
        return [problem for problem in (self._scheduler.degraded, self._recovery.memory.problem) if problem]

    def configure(self, settings: SchedulerSettings) -> None:
        """Plan by other settings."""
        self._scheduler.configure(settings)
        self._plan_ahead, self._ahead = settings.plan_ahead, None

    # -- parts of a step ---------------------------------------------------------------------------------------------

    def _plan(self) -> Plan:
        started = time.perf_counter()
        ahead, self._ahead = self._ahead, None
        plan = self._scheduler.plan(self._clock(), self._resources(), ahead)
        self._stats.decision_ms.append((time.perf_counter() - started + self._ahead_s) * 1e3)
        self._ahead_s = 0.0
        self.resumes_s = min(plan.resume_s, self._finetuning.resumes_s)
        return plan

    def _resources(self) -> Resources:
        return self._recovery.memory.limited(self._limits.resources())

    def _look_ahead(self, plan: Plan, started: float) -> None:
        """Plan the next iteration while the device is busy with `plan`."""
        if self._plan_ahead == "off" or (self._plan_ahead == "auto" and not self._runner.overlaps):
            return
        with self._recovery.logged("the next iteration could not be planned ahead"):
            begun = time.perf_counter()
            self._ahead = self._scheduler.foresee(plan, started, self._resources())
            self._ahead_s = time.perf_counter() - begun

    def _preempt(self, tasks: Sequence[Task], now: float) -> None:
        for task in tasks:
            if not self._finetuning.preempt(task.task_id, now):
                self._sequences.preempt(task.task_id, now)

    def _interrupted(self) -> bool:
        return self._commands.arrived

    def _complete(self, plan: Plan, output: RunnerOutput, started: float) -> None:
        """Take in what the iteration came to: tokens, finished steps, the cost model's lesson."""
        now = self._clock()
        outcomes = self._sequences.process(output, now) + self._finetuning.process(plan, output)
        result = IterationResult(outcomes, output.forward_s, output.units)
        self._record(plan, result, started, now)
        self._scheduler.complete(result, now)
        self._finetuning.close_finished(now, self._sequences.suspects)

    def _record(self, plan: Plan, result: IterationResult, started: float, now: float) -> None:
        stats = self._stats
        iteration = stats.iterations.add(
            plan,
            result,
            started_s=started,
            elapsed_s=now - started,
            decision_s=stats.decision_ms[-1] * 1e-3,
            spent_s=stats.busy.add(self._scheduler.cost, result, now - started),
            free_pages=self._sequences.free_pages,
            waiting=self._sequences.waiting,
        )
        stats.totals.iterations += 1
        stats.totals.plans_foreseen += plan.foreseen
        stats.totals.finetune_tokens += iteration.tokens(Kind.FINETUNE)
        stats.iteration_ms.append((now - started) * 1e3)
        stats.mark(now)
        self._observe(iteration)

    def _publish(self) -> None:
        events = self._sequences.take_events()
        if events:
            self._deliver(events)
        self._finetuning.flush(self._clock(), lambda: self._sequences.adapters)

    # -- between steps -----------------------------------------------------------------------------------------------

    def _wait(self, resume_s: float) -> None:
        """Wait for a command, for `resume_s`, or until an adapter is due to be saved or a pair to be learned."""
        wait_s = self.heartbeat.wait_s((self._finetuning.next_due_s(), resume_s))
        if not self._limits.unsettled:
            self._commands.wait(wait_s, self.heartbeat)

    def _done(self) -> bool:
        if not self._commands.stopping:
            return False
        if self._clock() >= self._commands.deadline_s:
            self._sequences.cancel_all(self._clock())
            return True
        return not self._commands.arrived and not self._sequences.busy


class IterationSampler:
    """Journals an iteration a second, and warns of targets that the device cannot meet once its times are known."""

    def __init__(self, scheduler: Scheduler, journal: Callable[[list[Record]], Future[None] | None]) -> None:
        self._scheduler, self._journal = scheduler, journal
        self._sampled_at_s = 0.0
        self._seen = 0

    def observe(self, iteration: Iteration) -> None:
        """Look at the latest iteration."""
        self._seen += 1
        if self._seen == _CALIBRATED_AFTER:
            for problem in self._scheduler.targets.impossible():
                log.warning("%s", problem)
        now = iteration.started_s + iteration.elapsed_s
        if now - self._sampled_at_s >= _SAMPLE_EVERY_S:
            self._sampled_at_s = now
            predicted_s = iteration.predicted_forward_s + iteration.predicted_units_s
            self._journal(
                [IterationSample(**iteration.report(), predicted_ms=predicted_s * 1e3, free_pages=iteration.free_pages)]
            )
