"""The engine thread: plan, run, complete.

Owns the lives of requests and fine-tune steps between submission and their last event. Must not know HTTP or SQL: it is
spoken to through thread-safe methods and answers through two callbacks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from edged import logs
from edged.align.adapter import AdapterFiles
from edged.align.memory import out_of_memory
from edged.align.pair import IterationSample, Record, TokenPair
from edged.align.suspicion import Past
from edged.config import Settings
from edged.engine.iterations import Iteration
from edged.engine.learning import Learning
from edged.engine.limiter import Limiter
from edged.engine.parts import EngineParts, build_parts
from edged.engine.request import EngineBusy, EngineStopping, Event, FinishReason, Request, RequestRefused
from edged.engine.rest import Rest
from edged.engine.scarcity import Scarcity
from edged.engine.serving import Serving
from edged.engine.steps import Steps
from edged.engine.threads import apart, beside
from edged.governors.limits import Limits, Use
from edged.scheduler.foresight import Foresight
from edged.scheduler.task import Kind, Plan, Resources, Result

log = logging.getLogger("edged.engine")
_MOST_FAILURES = 3
_SAMPLE_EVERY_S = 1.0
_CALIBRATED_AFTER = 50
"""Iterations after which the cost model is believed about what this device can do at all."""


class Engine:
    """Serves requests and learns from pairs on one thread; every public method may be called from any thread."""

    def __init__(
        self,
        parts: EngineParts,
        deliver: Callable[[list[Event]], None],
        journal: Callable[[list[Record]], Future[None] | None],
    ) -> None:
        self.settings, self.max_context_tokens, self.stats = parts.settings, parts.max_context_tokens, parts.stats
        self.error: str | None = None
        self._parts, self._deliver, self._journal = parts, deliver, journal
        self._scheduler, self._executor, self._stats = parts.scheduler, parts.executor, parts.stats
        self._foresight: Foresight | None = None
        self._foreseeing_s = 0.0
        """What the plan that comes has cost already."""
        self._serving = Serving(parts)
        self._steps = Steps(parts)
        self._learning = Learning(
            parts, self._steps, self._serving.on_publish, self._serving.on_fetched, self._post, journal
        )
        self._serving.on_missing(self._learning.fetcher.fetch)
        self._limiter = Limiter(parts, self._serving, self._learning, self._steps)
        self._scarcity = Scarcity(parts, self._serving, self._steps)
        self._inbox: deque[Callable[[], None]] = deque()
        self._requests_waiting = 0
        self._wake = threading.Condition()
        self._stopping = self._closed = False
        self._deadline_s: float | None = None
        self._failures = 0
        self._sampled_at_s = 0.0
        self.rest = Rest()
        """Its `last_sign_s` tells whether the thread goes on."""
        self._thread = threading.Thread(target=self._run, name="edged-engine", daemon=True)

    @classmethod
    def build(
        cls,
        settings: Settings,
        model_dir: Path,
        deliver: Callable[[list[Event]], None],
        journal: Callable[[list[Record]], Future[None] | None],
        data_dir: Path | None,
    ) -> Engine:
        """Load the model and make all parts. Raises ModelRefused with the reason.

        `deliver` and `journal` are called on engine threads and must not block; the journal's future, if it has one,
        resolves when all that it was given is on disk: a version is not saved before. Without a `data_dir` adapters
        live in a temporary folder. From now on torch works alone on the calling thread (see `threads.beside`).
        """
        beside()
        return cls(apart(lambda: build_parts(settings, model_dir, data_dir)), deliver, journal)

    # -- from any thread ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self, drain_s: float) -> None:
        """Refuse new requests, finish running ones within `drain_s`, cancel the rest, save adapters."""
        with self._wake:
            self._stopping = True
            self._deadline_s = time.monotonic() + drain_s
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, request: Request, asked_s: float | None = None) -> None:
        """Queue a request; `asked_s` is when it was asked for, where that is some time ago (monotonic clock).

        Raises EngineBusy or RequestRefused.
        """
        if self.error or self._stopping:
            raise EngineStopping(self.error or "the daemon is stopping")
        total = len(request.prompt_ids) + request.sampling.max_tokens
        if not request.prompt_ids:
            raise RequestRefused("the prompt is empty")
        if total > self.max_context_tokens:
            raise RequestRefused(
                f"prompt ({len(request.prompt_ids)} tokens) and max_tokens ({request.sampling.max_tokens}) exceed the "
                f"context of {self.max_context_tokens} tokens"
            )
        if self._serving.waiting + self._requests_waiting >= self.settings.serving.max_queue:
            with self._wake:
                self._stats.outcomes["refused"] += 1
            raise EngineBusy(f"{self.settings.serving.max_queue} requests are waiting (serving.max_queue)")
        self._requests_waiting += 1
        submitted = time.monotonic()

        def take() -> None:
            self._requests_waiting -= 1
            try:
                self._serving.add(request, submitted, asked_s)
            except Exception as error:
                log.exception("request %s could not be queued", request.request_id)
                self._serving.cancel(request.request_id, "error", time.monotonic(), str(error))

        self._post(take)

    def cancel(self, request_id: str, reason: FinishReason = "cancelled") -> None:
        """End a request; its FinishEvent tells `reason`. Unknown or finished ids are ignored."""
        with contextlib.suppress(EngineStopping):
            self._post(lambda: self._serving.cancel(request_id, reason, time.monotonic()))

    def submit_pairs(self, pairs: list[TokenPair]) -> None:
        """Queue preference pairs for learning (or, by their state, for tests and replay)."""
        if pairs:
            # An engine that has ended learns nothing more; the pairs stay queued in the store.
            with contextlib.suppress(EngineStopping):
                self._post(lambda: self._learning.submit(pairs))

    def rollback(self, adapter: str, version: int) -> Future[int]:
        """Publish an earlier version as a new one; the future raises UnknownAdapter or UnknownVersion."""
        return self._ask(lambda: self._learning.rollback(adapter, version))

    def import_adapter(self, adapter: str, weights: dict[str, torch.Tensor], reason: str) -> Future[int]:
        """Publish weights (PEFT's names, checked) as an adapter's newest version; the future has its number."""
        return self._ask(lambda: self._learning.import_adapter(adapter, weights, reason))

    def introduce(self, adapter: str) -> Future[None]:
        """Have an adapter that has learnt nothing applied as if it had: what its answers cost does not change later."""
        return self._ask(lambda: self._learning.introduce(adapter))

    def forget(self, adapter: str, pair_ids: Collection[int] = ()) -> Future[None]:
        """Remove an adapter and its files, and learn nothing more from `pair_ids`; the future raises UnknownAdapter.

        Nobody waits for the disk, and what the adapter learns from now on is new.
        """
        gone: Future[None] = Future()

        def forget() -> None:
            try:
                self._serving.forget(adapter)
                removal = self._learning.forget(adapter, pair_ids)
            except Exception as error:
                gone.set_exception(error)
            else:
                removal.add_done_callback(lambda _: _follow(gone, removal))

        self._post(forget)
        return gone

    def recall(self, pasts: dict[str, Past]) -> None:
        """What was usual for each adapter when the daemon last ended; to be told before its pairs are submitted."""
        self._post(lambda: self._learning.recall(pasts))

    def calm(self, adapter: str) -> None:
        """Somebody decided about all of an adapter's quarantined pairs: a burst's alarm ends."""
        with contextlib.suppress(EngineStopping):
            self._post(lambda: self._learning.calm(adapter))

    def restore_policy(self) -> None:
        """Have the policy decide again after it failed."""
        self._post(self._scheduler.restore)

    def pause_finetuning(self, paused: bool) -> None:
        """Stop opening fine-tune steps (those under way end), or go on."""
        self._post(lambda: self._learning.pause(paused))

    def configure(self, settings: Settings) -> Future[None]:
        """Go on under other settings, between two iterations; those that `edged.reload` does not name are the same."""

        def configure() -> None:
            self._scheduler.configure(settings.scheduler)
            self._learning.configure(settings)
            self.settings, self._foresight = settings, None

        return self._ask(configure)

    def limit(self, limits: Limits) -> None:
        """Keep to these limits from the next iteration on, as far as requests at hand allow."""
        with contextlib.suppress(EngineStopping):
            self._post(lambda: self._limiter.take(limits))

    def use(self) -> Use:
        """What governors see."""
        return self._limiter.use()

    @property
    def adapter_files(self) -> AdapterFiles:
        """Where the adapters' versions are."""
        return self._parts.trainer.shelf.files

    def adapters(self) -> dict[str, int]:
        """Current version by adapter name."""
        return self._learning.versions

    def weights(self, adapter: str) -> Future[tuple[int, dict[str, torch.Tensor]]]:
        """An adapter's version and its weights by PEFT's names, copied to the host; version 0 of one not in memory."""

        def copy() -> tuple[int, dict[str, torch.Tensor]]:
            state = self._parts.trainer.shelf.peek(adapter)
            return (state.version, state.tensors()) if state is not None else (0, {})

        return self._ask(copy)

    def status(self) -> dict[str, Any]:
        """What `GET /v1/status` shows of the engine."""
        return {
            **self._stats.report(time.monotonic()),
            **self._parts.report(),
            "queue": self.queue(),
            "finetune": self._learning.report(),
            "degraded": [problem for problem in (self._scheduler.degraded, self._scarcity.problem) if problem],
        }

    def queue(self) -> dict[str, int]:
        """Requests by stage, and pairs that wait to be learned."""
        return {**self._serving.queue_report(), "finetune": self._learning.pairs_queued}

    def iterations(self, since: int = 0) -> list[Iteration]:
        """Records of the iterations after number `since` that are still kept, oldest first."""
        return self._stats.iterations.since(since)

    def busy(self) -> dict[str, Any]:
        """The status' sums of where the time went, alone."""
        return self._stats.busy.report()

    def _post(self, command: Callable[[], None]) -> None:
        """Have the engine thread run a command. Raises EngineStopping when it has ended."""
        with self._wake:
            if self._closed:
                raise EngineStopping(self.error or "the daemon is stopping")
            self._inbox.append(command)
            self._wake.notify()

    def _ask(self, command: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

        self._post(run)
        return future

    # -- the engine thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._parts.model.device.type == "cuda":
            torch.cuda.set_device(self._parts.model.device)
        if self._parts.threads is not None:
            self._parts.threads.begin()
        try:
            while not self._done():
                self.rest.sign()
                self._take_inbox()
                if self._limiter.settle():
                    # A plan that was made ahead counted on other pages.
                    self._foresight = None
                self._learning.feed(time.monotonic(), self._serving.refused)
                self._serving.prune(time.monotonic())
                plan = self._plan()
                busy = bool(plan.grants or plan.preempt)
                if busy:
                    self.rest.work()
                    self._iterate(plan)
                self._flush()
                if not busy:
                    self._wait(min(plan.resume_s, self._steps.resumes_s))
                elif self._scarcity.pause_s:
                    self._wait(time.monotonic() + self._scarcity.pause_s)
        except Exception as error:
            log.exception("the engine stopped")
            self.error = f"the engine stopped: {error}"
            self._serving.fail_all(self.error, time.monotonic())
        finally:
            with self._wake:
                self._closed = True
            self._take_inbox()
            if self.error:
                self._serving.fail_all(self.error, time.monotonic())
            else:
                self._serving.cancel_all(time.monotonic())
            self._learning.close()
            self._flush()
            self._executor.close()

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
            self._serving.admit(plan, started)
            work = self._executor.run(
                plan,
                self._serving.running,
                self._steps.jobs,
                interrupted=lambda: bool(self._inbox),
                meanwhile=lambda: self._foresee(plan, started),
            )
            ran, now = True, time.monotonic()
            outcomes = self._serving.after(work, now) + self._steps.after(plan, work)
            result = Result(outcomes, work.forward_s, work.units)
            self._account(plan, result, started, now - started)
            self._scheduler.complete(result, now)
            self._learning.close_finished(now)
            while self._serving.suspects:
                self._learning.suspect(*self._serving.suspects.pop())
            self._scarcity.calm()
            self._stats.totals.optimizer_steps, self._stats.totals.pairs_trained = self._learning.progress()
            self._failures = 0
        except Exception as error:
            if not ran and out_of_memory(error):
                self._scarcity.relieve(plan, error, time.monotonic())
                return
            self._failures += 1
            if self._failures >= _MOST_FAILURES:
                raise
            now = time.monotonic()
            ids = {grant.task.task_id for grant in plan.grants}
            hit = self._serving.fail(ids, f"the iteration failed: {error}", now)
            self._steps.fail(ids, str(error))
            name = "out_of_memory" if out_of_memory(error) else "iteration_failed"
            logs.event(log, logging.ERROR, name, f"an iteration failed: {error}", exc_info=True, requests=hit)

    def _foresee(self, plan: Plan, started: float) -> None:
        """Plan the next iteration while the device is busy with `plan`."""
        ahead = self.settings.scheduler.plan_ahead
        if ahead == "off" or (ahead == "auto" and self._parts.model.device.type != "cuda"):
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
            self._serving.preempt(task_id, now)
            self._stats.totals.preemptions += 1

    def _account(self, plan: Plan, result: Result, started_s: float, elapsed_s: float) -> None:
        stats = self._stats
        iteration = stats.iterations.add(
            plan,
            result,
            started_s=started_s,
            elapsed_s=elapsed_s,
            decision_s=stats.decision_ms[-1] * 1e-3,
            spent_s=stats.busy.add(self._parts.cost, result, elapsed_s),
            free_pages=self._executor.pool.free_pages,
            waiting=self._serving.waiting,
        )
        stats.totals.iterations += 1
        if stats.totals.iterations == _CALIBRATED_AFTER:
            for problem in self._scheduler.targets.impossible():
                log.warning("%s", problem)
        stats.totals.plans_foreseen += plan.foreseen
        if self._executor.pruner is not None:
            stats.totals.prunings = self._executor.pruner.prunings
            stats.totals.pruned_pages = self._executor.pruner.pages_returned
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

    def _take_inbox(self) -> None:
        while self._inbox:
            try:
                self._inbox.popleft()()
            except Exception:
                log.exception("a command failed")

    def _flush(self) -> None:
        events = self._serving.take_events()
        if events:
            self._deliver(events)
        self._learning.flush(time.monotonic())
        if self._parts.trainer.shelf.crowded:
            self._parts.trainer.tidy(self._serving.adapters)

    def _resources(self) -> Resources:
        """What the next bin may use."""
        return self._scarcity.limited(self._limiter.resources())

    def _wait(self, resume_s: float) -> None:
        """Wait for a command, for `resume_s`, or until an adapter is due to be saved or a pair to be learned."""
        wait_s = self.rest.wait_s((self._learning.next_due_s(), resume_s))
        if self._limiter.unsettled:
            return
        with self._wake, self.rest:
            if not self._inbox:
                self._wake.wait(0.01 if self._stopping else wait_s)

    def _done(self) -> bool:
        if not self._stopping:
            return False
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            self._serving.cancel_all(time.monotonic())
            return True
        return not self._inbox and not self._serving.busy


def _follow(future: Future[None], done: Future[None]) -> None:
    """Have a future end as one that is done."""
    error = done.exception()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
