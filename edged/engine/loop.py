"""The engine thread: take the inbox, plan, run, complete, flush.

Owns the iteration, its failures, and what is counted of it. Must not know who posts commands or reads events.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch

from edged.align.feedback.pair import IterationSample, Record
from edged.engine.build import EngineParts
from edged.engine.command_queue import STOPPING, CommandQueue
from edged.engine.finetuning import FinetuneJobs, FinetuneSteps
from edged.engine.heartbeat import Heartbeat
from edged.engine.oom_recovery import OomRecovery
from edged.engine.request import Event
from edged.engine.resource_limits import ResourceLimits
from edged.engine.sequences import SequenceTable
from edged.runtime import logs
from edged.scheduler.lookahead import LookaheadPlan
from edged.scheduler.task import IterationResult, Kind, Plan, Resources
from edged.settings.load import Settings
from edged.tensors.oom import out_of_memory

log = logging.getLogger("edged.engine")
_MOST_FAILURES = 3
_SAMPLE_EVERY_S = 1.0
_CALIBRATED_AFTER = 50
"""Iterations after which the cost model is believed about what this device can do at all."""


class EngineLoop:
    """Serving and learning by turns. Used by the engine thread alone, but for `error`, `degraded` and `rest`."""

    def __init__(
        self,
        parts: EngineParts,
        command_queue: CommandQueue,
        deliver: Callable[[list[Event]], None],
        journal: Callable[[list[Record]], Future[None] | None],
    ) -> None:
        """`deliver` and `journal` take what an iteration brought, and must not block."""
        self._parts, self._command_queue, self._deliver, self._journal = parts, command_queue, deliver, journal
        self._scheduler, self._runner, self._stats = parts.scheduler, parts.runner, parts.stats
        self._plan_ahead = parts.settings.scheduler.plan_ahead
        self._foresight: LookaheadPlan | None = None
        self._foreseeing_s = 0.0
        """What the plan that comes has cost already."""
        self.serving = SequenceTable(parts)
        self._steps = FinetuneSteps(parts)
        self.learning = FinetuneJobs(
            parts, self._steps, self.serving.on_publish, self.serving.on_fetched, command_queue.post, journal
        )
        self.serving.on_missing(self.learning.fetcher.fetch)
        self.resource_limits = ResourceLimits(parts, self.serving, self.learning, self._steps)
        self._oom_recovery = OomRecovery(parts, self.serving, self._steps)
        self._failures = 0
        self._sampled_at_s = 0.0
        self.error: str | None = None
        """Why the thread ended, where nobody stopped it."""
        self.rest = Heartbeat()

    @property
    def degraded(self) -> list[str]:
        """A sentence for everything that is not as it should be."""
        return [problem for problem in (self._scheduler.degraded, self._oom_recovery.problem) if problem]

    def configure(self, settings: Settings) -> None:
        """Go on under other settings."""
        self._scheduler.configure(settings.scheduler)
        self.learning.configure(settings)
        self._plan_ahead, self._foresight = settings.scheduler.plan_ahead, None

    def run(self) -> None:
        """The engine thread from its start to its end."""
        if self._parts.model.device.type == "cuda":
            torch.cuda.set_device(self._parts.model.device)
        if self._parts.threads is not None:
            self._parts.threads.begin()
        try:
            while not self._done():
                self.rest.sign()
                self._command_queue.take()
                if self.resource_limits.settle():
                    # A plan that was made ahead counted on other pages.
                    self._foresight = None
                self.learning.feed(time.monotonic(), self.serving.refused)
                self.serving.unpark()
                self.serving.prune(time.monotonic())
                plan = self._plan()
                busy = bool(plan.grants or plan.preempt)
                if busy:
                    self.rest.work()
                    self._iterate(plan)
                self._flush()
                if not busy:
                    self._wait(min(plan.resume_s, self._steps.resumes_s))
                elif self._oom_recovery.pause_s:
                    self._wait(time.monotonic() + self._oom_recovery.pause_s)
        except Exception as error:
            log.exception("the engine stopped")
            self.error = f"the engine stopped: {error}"
            self.serving.fail_all(self.error, time.monotonic())
        finally:
            self._command_queue.close(self.error or STOPPING)
            self._command_queue.take()
            if self.error:
                self.serving.fail_all(self.error, time.monotonic())
            else:
                self.serving.cancel_all(time.monotonic())
            for last in (self._flush, self.learning.close, self._flush, self._runner.close):
                try:
                    last()
                except Exception:
                    log.exception("the engine did not end as it should")

    def _plan(self) -> Plan:
        started = time.perf_counter()
        foresight, self._foresight = self._foresight, None
        plan = self._scheduler.plan(time.monotonic(), self._resources(), foresight)
        self._stats.decision_ms.append((time.perf_counter() - started + self._foreseeing_s) * 1e3)
        self._foreseeing_s = 0.0
        return plan

    def _iterate(self, plan: Plan) -> None:
        """One iteration; its failure ends the tasks that were in it, not the daemon."""
        started = time.monotonic()
        if self._parts.threads is not None:
            self._parts.threads.follow(started)
        ran = False
        try:
            for task in plan.preempt:
                self._preempt(task.task_id, started)
            self.serving.admit(plan, started)
            work = self._runner.run(
                plan,
                self.serving.running,
                self._steps.jobs,
                interrupted=lambda: not self._command_queue.empty,
                meanwhile=lambda: self._foresee(plan, started),
            )
            ran, now = True, time.monotonic()
            outcomes = self.serving.after(work, now) + self._steps.after(plan, work)
            result = IterationResult(outcomes, work.forward_s, work.units)
            self._account(plan, result, started, now - started)
            self._scheduler.complete(result, now)
            self.learning.close_finished(now)
            while self.serving.suspects:
                self.learning.suspect(*self.serving.suspects.pop())
            self._oom_recovery.calm()
            self._stats.totals.optimizer_steps, self._stats.totals.pairs_trained = self.learning.progress()
            self._failures = 0
        except Exception as error:
            if not ran and out_of_memory(error):
                self._oom_recovery.relieve(plan, error, time.monotonic())
                return
            self._failures += 1
            if self._failures >= _MOST_FAILURES:
                raise
            # A device that does nothing more raises here, before anybody's pairs are blamed.
            self._parts.model.check_device()
            now = time.monotonic()
            ids = {grant.task.task_id for grant in plan.grants}
            hit = self.serving.fail(ids, f"the iteration failed: {error}", now)
            self._steps.fail(ids, str(error))
            for task_id in ids:
                # Also of those that had ended when the iteration failed.
                self._scheduler.remove(task_id)
            name = "out_of_memory" if out_of_memory(error) else "iteration_failed"
            logs.event(log, logging.ERROR, name, f"an iteration failed: {error}", exc_info=True, requests=hit)

    def _foresee(self, plan: Plan, started: float) -> None:
        """Plan the next iteration while the device is busy with `plan`."""
        if self._plan_ahead == "off" or (self._plan_ahead == "auto" and self._parts.model.device.type != "cuda"):
            return
        try:
            begun = time.perf_counter()
            self._foresight = self._scheduler.foresee(plan, started, self._resources())
            self._foreseeing_s = time.perf_counter() - begun
        except Exception:
            # The iteration that runs has nothing to do with it.
            log.exception("the next iteration could not be planned ahead")

    def _preempt(self, task_id: int, now: float) -> None:
        if not self._steps.preempt(task_id, now):
            self.serving.preempt(task_id, now)
            self._stats.totals.preemptions += 1

    def _account(self, plan: Plan, result: IterationResult, started_s: float, elapsed_s: float) -> None:
        stats = self._stats
        iteration = stats.iterations.add(
            plan,
            result,
            started_s=started_s,
            elapsed_s=elapsed_s,
            decision_s=stats.decision_ms[-1] * 1e-3,
            spent_s=stats.busy.add(self._parts.cost, result, elapsed_s),
            free_pages=self._runner.pool.free_pages,
            waiting=self.serving.waiting,
        )
        stats.totals.iterations += 1
        if stats.totals.iterations == _CALIBRATED_AFTER:
            for problem in self._scheduler.targets.impossible():
                log.warning("%s", problem)
        stats.totals.plans_foreseen += plan.foreseen
        if self._runner.pruner is not None:
            stats.totals.prunings = self._runner.pruner.prunings
            stats.totals.pruned_pages = self._runner.pruner.pages_returned
        stats.totals.finetune_tokens += iteration.tokens(Kind.FINETUNE)
        stats.iteration_ms.append(elapsed_s * 1e3)
        now = time.monotonic()
        stats.mark(now)
        if now - self._sampled_at_s >= _SAMPLE_EVERY_S:
            self._sampled_at_s = now
            predicted_s = iteration.predicted_forward_s + iteration.predicted_units_s
            self._journal(
                [IterationSample(**iteration.report(), predicted_ms=predicted_s * 1e3, free_pages=iteration.free_pages)]
            )

    def _flush(self) -> None:
        events = self.serving.take_events()
        if events:
            self._deliver(events)
        self.learning.flush(time.monotonic())
        if self._parts.trainer.adapter_cache.crowded:
            self._parts.trainer.tidy(self.serving.adapters | self.learning.wanted)

    def _resources(self) -> Resources:
        """What the next bin may use."""
        return self._oom_recovery.limited(self.resource_limits.resources())

    def _wait(self, resume_s: float) -> None:
        """Wait for a command, for `resume_s`, or until an adapter is due to be saved or a pair to be learned."""
        wait_s = self.rest.wait_s((self.learning.next_due_s(), resume_s))
        if not self.resource_limits.unsettled:
            self._command_queue.wait(wait_s, self.rest)

    def _done(self) -> bool:
        if not self._command_queue.stopping:
            return False
        if time.monotonic() >= self._command_queue.deadline_s:
            self.serving.cancel_all(time.monotonic())
            return True
        return self._command_queue.empty and not self.serving.busy
