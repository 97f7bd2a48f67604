"""The engine loop: commands, plan, run, complete, publish."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from edged.align.feedback.pair import IterationSample, Record
from edged.engine.command_queue import CommandQueue
from edged.engine.interfaces import Finetuning, Limits, Runner, Workload
from edged.engine.model_runner import RunnerOutput
from edged.engine.recovery import Recovery
from edged.engine.request import Event
from edged.engine.sequences import SequenceTable
from edged.engine.stats.iterations import Iteration
from edged.placement.node import NodeLoad
from edged.runtime.process import give_back_memory
from edged.scheduler.lookahead import LookaheadPlan
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import IterationResult, Plan, Resources, Task
from edged.settings.live import Live
from edged.settings.load import Settings

_BUSY_ITERATIONS = 256
"""Latest iterations that may count as the last second's."""
log = logging.getLogger("edged.engine")
_SAMPLE_EVERY_S = 1.0
_CALIBRATED_AFTER = 50
"""Number of iterations after which the cost model is trusted to judge whether targets can be met."""
_GIVE_BACK_AFTER_S = 30.0
"""Idle seconds after which free heap memory is returned to the system."""


class EngineLoop:
    """The loop that plans, runs and completes iterations.

    Other threads read `recovery.error`, `degraded`, `last_sign_s` and `load` alone.
    """

    def __init__(
        self,
        settings: Live[Settings],
        commands: CommandQueue,
        limits: Limits,
        scheduler: Scheduler,
        runner: Runner,
        sequences: SequenceTable,
        finetuning: Finetuning,
        deliver: Callable[[list[Event]], None],
        journal: Callable[[list[Record]], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deliver` takes the events of an iteration, `journal` a sample of it once a second; both must not block.

        `clock` is in seconds.
        """
        self._settings, self._commands, self._limits, self._scheduler = settings, commands, limits, scheduler
        self._runner, self._sequences, self._finetuning, self._stats = runner, sequences, finetuning, sequences.stats
        self._workloads: tuple[Workload, ...] = (finetuning, sequences)
        self._deliver, self._journal, self._clock = deliver, journal, clock
        self.recovery = Recovery(settings.current.serving, scheduler, sequences, finetuning, runner, clock)
        self.plans_ahead = runner.overlaps
        """Whether the next iteration is planned while one runs: else nothing computes meanwhile."""
        self._ahead: LookaheadPlan | None = None
        self._ahead_s = 0.0
        """Seconds that planning ahead took for the next iteration."""
        self.resumes_s = 0.0
        """When there may be work again, after a step without any."""
        self._sampled_at_s = 0.0
        self._idle_since_s: float | None = None
        """When the engine ran out of work; -inf once its free memory was given back."""
        self._sign_s, self._waiting = time.monotonic(), False

    def step(self) -> bool:
        """Run one iteration; False when there is nothing to do before `resumes_s` or the next command."""
        self._commands.run_pending()
        self._ahead = None if self._limits.apply() else self._ahead
        now = self._clock()
        self._runner.begin_iteration(now)
        for workload in self._workloads:
            workload.open_due(now)
        if self._commands.stopping:
            self._sequences.end_renewal(now, again=False)
        else:
            self._sequences.renew(now)
        plan, started = self._plan(), self._clock()
        self.recovery.isolate(plan)
        if plan.grants or plan.preempt:
            with self.recovery.iteration(plan):
                self._preempt(plan.preempt, started)
                self._sequences.admit(plan, started)
                self._sequences.draft(plan, started, limited=bool(self.recovery.memory_problem))
                sequences, open_steps = self._sequences.by_task, self._finetuning.by_task
                ahead = partial(self._look_ahead, plan, started)
                output = self._runner.run(
                    plan, sequences, open_steps, interrupted=lambda: self._commands.arrived, while_waiting=ahead
                )
                self.recovery.computed = True
                self._complete(plan, output, started)
        self._publish()
        return bool(plan.grants or plan.preempt)

    def run(self) -> None:
        """Run the engine thread from its start to its end."""
        last = (self._publish, self._finetuning.close, self._publish, self._runner.close)
        with self.recovery.thread(self._commands, last):
            self._runner.begin_thread()
            while not self._done():
                self._sign_s = time.monotonic()
                if not self.step():
                    self._wait(self.resumes_s)
                else:
                    self._idle_since_s = None
                    if self.recovery.pause_s:
                        self._wait(self._clock() + self.recovery.pause_s)

    @property
    def last_sign_s(self) -> float:
        """Time of the thread's latest layer or iteration (monotonic clock), or now while it waits for work."""
        return time.monotonic() if self._waiting else max(self._sign_s, self._runner.last_sign_s)

    @property
    def degraded(self) -> list[str]:
        """A sentence for each problem that degrades the service."""
        return [problem for problem in (self._scheduler.degraded, self.recovery.memory_problem) if problem]

    def load(self, **known: Any) -> NodeLoad:
        """Return the load, as a fleet places requests by it; `known` are the fields that the loop does not tell.

        Any thread may ask: what the engine's thread changes is copied.
        """
        table, cost, serving = self._sequences, self._scheduler.cost, self._settings.current.serving
        pool = self._runner.pages.pool
        counts, prices = table.queue_report(), cost.prices
        # A renewal makes way for whatever comes.
        sequences = [each for each in list(table.by_task.values()) if each.request.delivery != "none"]
        decodes = [sequence for sequence in sequences if sequence.decoding]
        tasks = list(self._scheduler.queues.finetunes)
        # Sliced, since the engine's thread may move on meanwhile.
        units = [unit for task in tasks for unit in task.units[task.next_unit :][:1]]
        recent, since_s = self._stats.latest(_BUSY_ITERATIONS), self._clock() - 1.0
        return NodeLoad.model_validate(
            {
                **known,
                "phase": "ready",
                "backlog_tokens": sum(sequence.task.num_tokens for sequence in sequences if not sequence.decoding),
                "waiting": counts["waiting"] + counts["prefill"],
                "decodes": len(decodes),
                "context": sum(sequence.rows for sequence in decodes),
                "free_pages": pool.free_pages + pool.evictable_pages,
                "pages": pool.pages - 1,
                "page_tokens": pool.page_size,
                "free_sequences": max(0, serving.max_sequences - len(sequences)),
                "chunk_tokens": serving.max_batch_tokens,
                "unit_s": cost.unit_s(units[0]) if units else 0.0,
                "busy_share": min(1.0, sum(record.elapsed_s for record in recent if record.started_s > since_s)),
                "slowness": cost.slowness,
                "forward_prices": prices.forward,
                "knee_tokens": prices.knee_tokens,
            }
        )

    def configure(self, settings: Settings) -> None:
        """Change the settings of all parts, and plan anew."""
        self._scheduler.configure(settings.scheduler)
        self._scheduler.share_by(settings.fairness)
        self._settings.current = settings
        self._ahead = None

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
        return self.recovery.limited(self._limits.resources())

    def _look_ahead(self, plan: Plan, started: float) -> None:
        """Plan the next iteration while the device is busy with `plan`."""
        if not self.plans_ahead:
            return
        with self.recovery.logged("the next iteration could not be planned ahead"):
            begun = time.perf_counter()
            self._ahead = self._scheduler.foresee(plan, started, self._resources())
            self._ahead_s = time.perf_counter() - begun

    def _preempt(self, tasks: Sequence[Task], now: float) -> None:
        for task in tasks:
            for workload in self._workloads:
                workload.preempt(task.task_id, now)

    def _complete(self, plan: Plan, output: RunnerOutput, started: float) -> None:
        """Take in the iteration's results: tokens, finished steps, and times for the cost model."""
        now = self._clock()
        outcomes = [outcome for workload in self._workloads for outcome in workload.process(output, plan, now)]
        result, cost = IterationResult(outcomes, output.forward_s, output.units), self._scheduler.cost
        free_pages = self._runner.pages.pool.free_pages
        iteration = self._stats.record(plan, result, cost, started, now, free_pages, self._sequences.waiting)
        if self._journal is not None:
            self._sample(iteration, self._journal, now)
        self._scheduler.complete(result, now)
        self._finetuning.close_finished(now, output.failed)

    def _sample(self, iteration: Iteration, journal: Callable[[list[Record]], object], now: float) -> None:
        """Journal one iteration a second; warn once, when prices are known, of targets that the device cannot meet."""
        if iteration.number == _CALIBRATED_AFTER:
            for problem in self._scheduler.targets.impossible():
                log.warning("%s", problem)
        if now - self._sampled_at_s >= _SAMPLE_EVERY_S:
            self._sampled_at_s = now
            predicted_ms, pages = iteration.predicted_s * 1e3, iteration.free_pages
            journal([IterationSample(**iteration.report(), predicted_ms=predicted_ms, free_pages=pages)])

    def _publish(self) -> None:
        events = self._sequences.take_events()
        if events:
            self._deliver(events)
        self._finetuning.flush(self._clock())

    # -- between steps -----------------------------------------------------------------------------------------------

    def _wait(self, resume_s: float) -> None:
        """Wait for a command, for `resume_s`, or until an adapter is due to be saved or a pair to be trained on.

        Free memory is returned to the system after a while.
        """
        now = time.monotonic()
        if self._idle_since_s is None:
            self._idle_since_s = now
        keep_until_s = self._idle_since_s + _GIVE_BACK_AFTER_S
        if now >= keep_until_s > 0:
            give_back_memory()
            self._idle_since_s = -math.inf
        dues_s = (self._finetuning.next_due_s(), resume_s, keep_until_s if keep_until_s > now else None)
        waits = [max(0.0, due_s - now) for due_s in dues_s if due_s is not None and due_s < math.inf]
        if not self._limits.unsettled:
            self._waiting = True
            self._commands.wait(min(waits, default=None))
            self._sign_s, self._waiting = time.monotonic(), False

    def _done(self) -> bool:
        if not self._commands.stopping:
            return False
        if self._clock() >= self._commands.deadline_s:
            self._sequences.end_all(self._clock())
            return True
        return not (self._commands.arrived or self._sequences.by_task)
