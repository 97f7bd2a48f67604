"""Fine-tuning as the scheduler's tasks: opens steps, keeps their tasks in step, publishes and saves versions.

Owns the bridge between the trainer and the scheduler. Must not know losses or packing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from edged.align.adapter import AdapterState, Snapshot
from edged.align.dpo import DpoStep
from edged.align.memory import out_of_memory
from edged.align.pair import Record, StepSkipped, TokenPair, VersionPublished, VersionSaved
from edged.align.suspicion import Past
from edged.config import Settings
from edged.engine.budget import open_steps
from edged.engine.executor import FineTuneJob, Work
from edged.engine.memory import free_bytes, kept_graph_bytes
from edged.engine.parts import EngineParts
from edged.engine.request import EngineStopping
from edged.engine.threads import beside
from edged.scheduler.task import Kind, Outcome, Plan, Task, Unit

log = logging.getLogger("edged.align")
_GRAPH_SHARE = 0.25
"""Of the free memory: what a step's kept graph may take."""


class Learning:
    """Used by the engine thread alone, but for `versions` and `report`."""

    def __init__(
        self,
        parts: EngineParts,
        on_publish: Callable[[AdapterState, int], None],
        on_fetched: Callable[[str, str, float], None],
        post: Callable[[Callable[[], None]], None],
        journal: Callable[[list[Record]], Future[None] | None],
    ) -> None:
        """`post` has the engine thread run something; `on_fetched(adapter, why not or "", now)` answers `fetch`."""
        self._parts, self._journal, self._on_publish = parts, journal, on_publish
        self._on_fetched, self._post = on_fetched, post
        self._trainer, self._scheduler = parts.trainer, parts.scheduler
        self._page_size = parts.executor.pool.page_size
        self._settings = parts.settings
        self._tasks: dict[int, Task] = {}
        self.jobs: dict[int, FineTuneJob] = {}
        """Steps under way, by task id."""
        self.versions: dict[str, int] = self._trainer.versions()
        self.pairs_queued = self.pairs_waiting = 0
        self.alarms: tuple[str, ...] = ()
        """Users whose new pairs are quarantined unseen, for a burst."""
        self._failed: dict[int, Exception] = {}
        self.resumes_s = math.inf
        """After want of memory: when steps are opened again."""
        self._graph_bytes = kept_graph_bytes(parts.model, parts.settings)
        self.trains = not parts.model.trainable_error and parts.scheduler.policy.trains
        """Whether pairs can ever be learnt here; where not, they stay in the store."""
        self._paused = False
        self._held = False
        """Governors allow no step."""
        self._most_open = open_steps(parts.settings.align.max_loaded_adapters)
        self._loader = _beside("edged-loader")
        self._fetching: dict[str, object] = {}
        """A ticket for each adapter that is being read; `forget` takes it away."""
        self._saver = _beside("edged-saver")
        self._trainer.on_publish(self._published)
        self._problems_told = 0
        self._tell_problems()

    # -- pairs and steps ---------------------------------------------------------------------------------------------

    def submit(self, pairs: list[TokenPair]) -> None:
        """Hand pairs to the trainer."""
        if not self.trains:
            return
        self._trainer.tick(time.monotonic())
        self._trainer.submit(pairs)
        self.versions = self._trainer.versions()

    def recall(self, pasts: dict[str, Past]) -> None:
        """See `Trainer.recall`."""
        self._trainer.tick(time.monotonic())
        for adapter, past in pasts.items():
            self._trainer.recall(adapter, past)

    def calm(self, adapter: str) -> None:
        """See `Trainer.calm`."""
        self._trainer.calm(adapter)

    def pause(self, paused: bool) -> None:
        """Open no new steps, or go on."""
        self._paused = paused

    def configure(self, settings: Settings) -> None:
        """Take over other settings; steps under way end as they began."""
        self._settings = settings
        self._trainer.configure(settings.align, settings.guard)
        self._trainer.shelf.files.keep = settings.store.keep_versions

    @property
    def _opens(self) -> bool:
        """Whether steps are opened at all."""
        return self._settings.align.enabled and not (self._paused or self._held)

    def hold(self, held: bool) -> None:
        """Open no new steps and drop those under way, whose pairs stay queued; or go on."""
        if held and not self._held:
            self._abandon_all()
        self._held = held

    def release(self, busy: Collection[str]) -> bool:
        """Let the adapters that answer nobody (not `busy`) leave memory; unsaved ones are saved first. True if any did.

        One that cannot be saved stays, and is tried again as often as ever.
        """
        shelf = self._trainer.shelf
        before = shelf.count
        self._trainer.tidy(busy, 0)
        return shelf.count < before

    def restart_above(self, page: int) -> None:
        """Steps that hold pages from this number on start again: what they know of their pages is theirs alone."""
        for task_id, job in list(self.jobs.items()):
            if any((stream.pages >= page).any() for stream in job.step.group.streams):
                self.preempt(task_id, time.monotonic())

    def feed(self, now: float, slots_wanted: bool) -> None:
        """Open the steps that are due and give them to the scheduler; few at once, since each holds memory.

        None while requests wait for LoRA slots.
        """
        self._trainer.tick(now)
        if self._scheduler.degraded:
            for job in list(self.jobs.values()):
                self._abandon(job.step.adapters[0])
        if now >= self.resumes_s:
            self.resumes_s = math.inf
        # A request that waits for a slot gets the next one.
        if not self._opens or slots_wanted or self._scheduler.degraded or self.resumes_s < math.inf:
            return
        while len(self.jobs) < self._most_open:
            adapter = self._next_ready()
            if adapter is None or not self._open(adapter, now):
                return

    def _next_ready(self) -> str | None:
        """The first adapter with work that is in memory; those before it are read, few at once."""
        for adapter in self._trainer.ready():
            if self._trainer.shelf.resident(adapter):
                return adapter
            if len(self._fetching) < self._most_open:
                self.fetch(adapter)
        return None

    def _open(self, adapter: str, now: float) -> bool:
        """Open the adapter's next step or test; others who are in memory may share it. False when it got no slot.

        Those others leave half of the slots to requests: each is held until the step ends.
        """
        slots: dict[str, int] = {}

        def admit(name: str) -> bool:
            state = self._trainer.shelf.peek(name)
            if state is None:
                return False
            slot = self._parts.slots.acquire(state, self._parts.slots.count // 2 if slots else 0)
            if slot is not None:
                slots[name] = slot
            return slot is not None

        try:
            if not admit(adapter):
                return False
        except Exception as error:
            if not out_of_memory(error):
                raise
            log.warning("a step of %s waits: there was no memory for its adapter (%s)", adapter, error)
            self._shrink(now)
            return False
        try:
            step = self._trainer.open(adapter, self._may_keep_graph(), admit)
        except Exception as error:
            log.exception("a step of %s could not be opened", ", ".join(slots))
            self._release(slots)
            if out_of_memory(error):
                self._shrink(now)
            return False
        task = Task(next(self._parts.task_ids), Kind.FINETUNE, now)
        self.jobs[task.task_id], self._tasks[task.task_id] = FineTuneJob(step, slots, now), task
        self._parts.stats.labels.append((task.task_id, "", ", ".join(step.adapters)))
        self._sync(task)
        self._scheduler.add(task, now)
        return True

    def _release(self, slots: dict[str, int]) -> None:
        for slot in slots.values():
            self._parts.slots.release(slot)

    def _may_keep_graph(self) -> bool:
        """Whether the next step may spend memory to save time.

        Where the weights are read for serving anyway (a GPU that decodes), tokens in the packed forward are nearly
        free: then it is the packed forward that saves time.
        """
        settings, model = self._settings, self._parts.model
        counts = self._scheduler.counts()
        serving = counts[Kind.PREFILL] + counts[Kind.DECODE] > 0
        if not settings.align.keep_graph or self._trainer.size.graphs_fail or (serving and model.device.type == "cuda"):
            return False
        # A step that is open and has computed nothing yet has its memory still to take.
        return (1 + len(self.jobs)) * self._graph_bytes <= _GRAPH_SHARE * free_bytes(model.device)[0]

    def fetch(self, adapter: str) -> None:
        """Have an adapter's state read in the background; the engine thread takes it in when it is there."""
        if adapter not in self._fetching:
            self._fetching[adapter] = object()
            self._loader.submit(self._load, adapter, self._fetching[adapter])

    def _load(self, adapter: str, ticket: object) -> None:
        """On the loader's thread. Requests for an adapter that cannot be read end with the reason."""
        loaded, problem = None, ""
        try:
            loaded = self._trainer.shelf.load(adapter)
        except Exception as error:
            log.error("adapter %s could not be read: %s", adapter, error)
            problem = f"adapter {adapter} could not be read: {error}"

        def take() -> None:
            # Another ticket, or none: it was forgotten meanwhile, and what was read is of the past.
            if self._fetching.get(adapter) is ticket:
                del self._fetching[adapter]
                if loaded is not None:
                    self._trainer.adopt(*loaded)
                    self._tell_problems()
                    self.versions = self._trainer.versions()
                else:
                    self._trainer.set_unreadable(adapter)
            self._on_fetched(adapter, problem, time.monotonic())

        with contextlib.suppress(EngineStopping):
            self._post(take)

    def _tell_problems(self) -> None:
        problems = self._trainer.shelf.problems
        for problem in problems[self._problems_told :]:
            log.warning("%s: an older version is used", problem)
        self._problems_told = len(problems)

    def _sync(self, task: Task) -> None:
        """Bring a task's view of its step up to date."""
        step = self.jobs[task.task_id].step
        streams = step.group.streams
        task.tokens, task.next_unit = step.tokens_left, 0
        task.units = tuple(Unit(kind, tokens) for kind, tokens in step.units_left())
        task.loss = self._trainer.loss(step)
        task.context = sum(stream.done for stream in streams)
        task.held_pages = sum(len(stream.pages) for stream in streams)
        # Each stream begins on a page of its own: room is counted as if all of their last pages stayed empty.
        unfinished = sum(stream.left > 0 for stream in streams)
        task.capacity = task.context - unfinished * self._page_size

    def after(self, plan: Plan, work: Work) -> list[Outcome]:
        """What came of the fine-tune grants."""
        tokens = {id(job): n for job, n in work.finetuned}
        outcomes = []
        for grant in plan.grants:
            job = self.jobs.get(grant.task.task_id)
            if job is None:
                continue
            task_id = grant.task.task_id
            ended = job.step.finished or task_id in work.failed
            outcomes.append(
                Outcome(
                    grant.task,
                    tokens.get(id(job), 0),
                    work.units_run.get(task_id, 0),
                    None if ended else Kind.FINETUNE,
                )
            )
        self._failed = work.failed
        return outcomes

    def close_finished(self, now: float) -> None:
        """Take finished steps in; bring the others' tasks up to date."""
        for task_id in list(self._tasks):
            task, job = self._tasks[task_id], self.jobs[task_id]
            if task_id in self._failed:
                self._give_up(task_id, self._failed[task_id], now)
            elif job.step.finished:
                self._drop(task_id)
                strikes = self._trainer.size.strikes
                self._trainer.close(job.step, now - job.opened_s)
                if self._trainer.size.strikes > strikes:
                    self._pause_for_memory(now)
                self.versions = self._trainer.versions()
            else:
                self._sync(task)
                self._scheduler.update(task)

    def _drop(self, task_id: int) -> None:
        job = self.jobs.pop(task_id)
        self._tasks.pop(task_id)
        self._release(job.slots)

    def _skip(self, task_id: int, reason: str) -> None:
        step = self.jobs[task_id].step
        self._drop(task_id)
        self._trainer.skip(step, reason)

    def _give_up(self, task_id: int, error: Exception, now: float) -> None:
        """A failed step is skipped; one that kept its graph is tried again without: it may have been too large."""
        job, reason = self.jobs[task_id], f"{type(error).__name__}: {error}"
        if out_of_memory(error):
            self.starved({task_id}, reason, now)
        elif isinstance(job.step, DpoStep) and job.step.keeps_graph:
            log.warning("a step of %s failed with its graph kept; steps go on without", ", ".join(job.step.adapters))
            self._trainer.size.distrust_graphs()
            self._drop(task_id)
            self._trainer.abandon(job.step.adapters[0])
        else:
            self._skip(task_id, reason)

    def starved(self, task_ids: set[int], reason: str, now: float) -> None:
        """Memory ran out in these steps: their pairs wait, and come in smaller steps; what repeats alone is skipped."""
        exhausted = self._trainer.size.exhausted
        for task_id in task_ids & self.jobs.keys():
            if exhausted:
                self._scheduler.remove(task_id)
                self._skip(task_id, f"out of memory, also alone: {reason}")
            else:
                self._abandon(self.jobs[task_id].step.adapters[0])
        if exhausted:
            self._trainer.size.give_up()
        else:
            self._shrink(now)

    def _shrink(self, now: float) -> None:
        self._trainer.size.shrink()
        self._pause_for_memory(now)

    def _pause_for_memory(self, now: float) -> None:
        self.resumes_s = now + self._trainer.size.pause_s

    def suspect(self, adapter: str, version: int) -> None:
        """A version answered with numbers that are not finite; where it is the cause, an earlier one is served."""
        if self._trainer.suspect(adapter, version):
            log.error("version %d of %s answers with numbers that are not finite: it goes back", version, adapter)
            self._abandon(adapter)
            self._trainer.withdraw(adapter, f"guard: version {version} answered with numbers that are not finite")

    def preempt(self, task_id: int, now: float) -> bool:
        """Take a step's pages away; its forward starts again. False when the task is not a fine-tune task."""
        if task_id not in self.jobs:
            return False
        step, task = self.jobs[task_id].step, self._tasks[task_id]
        step.restart()
        self._scheduler.restart(task, step.tokens_left, now)
        self._sync(task)
        self._scheduler.update(task)
        return True

    def fail(self, task_ids: set[int], reason: str) -> None:
        """An iteration failed: the steps that were in it are skipped, with the reason on record."""
        for task_id in task_ids & self.jobs.keys():
            self._scheduler.remove(task_id)
            self._skip(task_id, reason)

    # -- versions ----------------------------------------------------------------------------------------------------

    def _published(self, state: AdapterState, previous: int) -> None:
        self._on_publish(state, previous)
        self.versions = self._trainer.versions()

    def _abandon(self, adapter: str) -> None:
        for task_id, job in list(self.jobs.items()):
            if adapter in job.step.adapters:
                self._scheduler.remove(task_id)
                self._drop(task_id)
        self._trainer.abandon(adapter)

    def _abandon_all(self) -> None:
        for job in list(self.jobs.values()):
            self._abandon(job.step.adapters[0])

    def introduce(self, adapter: str) -> None:
        """See `Trainer.introduce`."""
        self._trainer.introduce(adapter)

    def rollback(self, adapter: str, version: int) -> int:
        """Publish an earlier version again. Raises UnknownAdapter, UnknownVersion."""
        self._abandon(adapter)
        return self._trainer.rollback(adapter, version)

    def import_adapter(self, adapter: str, weights: dict[str, torch.Tensor], reason: str) -> int:
        """See `Trainer.import_adapter`."""
        self._abandon(adapter)
        return self._trainer.import_adapter(adapter, weights, reason)

    def forget(self, adapter: str, pair_ids: Collection[int]) -> Future[None]:
        """Remove an adapter, and the pairs of these ids from all adapters; the future resolves when its files are gone.

        Raises UnknownAdapter.
        """
        self._fetching.pop(adapter, None)
        for name in self._trainer.learners_of(pair_ids):
            self._abandon(name)
        self._trainer.drop_pairs(pair_ids)
        self._abandon(adapter)
        if self._parts.executor.trie is not None:
            self._parts.executor.trie.expire_all(adapter)
        self._trainer.forget(adapter)
        self._parts.slots.forget(adapter)
        self.versions = self._trainer.versions()
        # Behind those that are being written, and before any that follow.
        return self._saver.submit(self._trainer.shelf.files.forget, adapter)

    # -- the record --------------------------------------------------------------------------------------------------

    def flush(self, now: float) -> None:
        """Hand records to the journal and due versions to the saver."""
        self.pairs_queued, self.pairs_waiting = self._trainer.pairs_queued, self._trainer.waiting()
        self.alarms = self._trainer.alarms()
        if self._trainer.records:
            records, self._trainer.records = self._trainer.records, []
            self._count(records)
            self._journal(records)
        for snapshot in self._trainer.shelf.to_save(now, self._settings.store.save_every_s):
            self._saver.submit(self._save, snapshot, self._journal([]))

    def _count(self, records: list[Record]) -> None:
        totals = self._parts.stats.totals
        for record in records:
            if isinstance(record, StepSkipped):
                totals.steps_skipped += 1
            elif isinstance(record, VersionPublished):
                totals.rollbacks += record.reason.startswith("rollback")
                totals.guard_rollbacks += record.reason.startswith("guard")

    def _save(self, snapshot: Snapshot, recorded: Future[None] | None) -> None:
        """Write a version once it is `recorded` what it has learnt: a version without that would be taught it twice.

        Nothing of an adapter that was forgotten meanwhile.
        """
        try:
            if recorded is not None:
                recorded.result()
            if self._trainer.shelf.files.hidden(snapshot.adapter):
                return
            path, removed = self._trainer.shelf.files.save(snapshot)
        except Exception as error:
            # The version stays in memory and is tried again; after a restart its pairs are learnt anew.
            log.error("adapter %s version %d could not be saved: %s", snapshot.adapter, snapshot.version, error)
            self._save_ended(snapshot, False)
            return
        self._save_ended(snapshot, True)
        self._journal([VersionSaved(snapshot.adapter, snapshot.version, str(path), removed)])

    def _save_ended(self, snapshot: Snapshot, written: bool) -> None:
        with contextlib.suppress(EngineStopping):
            self._post(lambda: self._trainer.shelf.save_ended(snapshot.adapter, snapshot.version, written))

    def next_due_s(self) -> float | None:
        """When the next version is due to be saved, or the next pair that waits for its time to be learned."""
        saves_s = self._trainer.shelf.next_save_s(self._settings.store.save_every_s)
        return min((due for due in (saves_s, self._trainer.next_pair_s()) if due is not None), default=None)

    def close(self) -> None:
        """Abandon steps, save every unsaved version."""
        self._abandon_all()
        self.flush(float("inf"))
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._saver.shutdown(wait=True)

    def progress(self) -> tuple[int, int]:
        """(optimizer steps, pairs trained) since start."""
        return self._trainer.steps, self._trainer.pairs_trained

    def _reason(self) -> str:
        if self._scheduler.degraded:
            return self._scheduler.degraded
        if self.resumes_s < math.inf:
            return "memory ran out in a step: it is tried again in a moment, with fewer pairs"
        policy = self._scheduler.policy
        return "" if policy.trains else f"the policy {policy.name} does not train"

    def report(self) -> dict[str, Any]:
        """The finetune part of the status."""
        jobs = list(self.jobs.values())
        return {
            "enabled": self.trains
            and self._settings.align.enabled
            and not self._paused
            and not self._scheduler.degraded,
            "held": self._held,
            "reason": self._parts.model.trainable_error or self._reason(),
            "pairs_queued": self.pairs_queued,
            "pairs_waiting": self.pairs_waiting,
            "pairs_trained": self._trainer.pairs_trained,
            "steps": self._trainer.steps,
            "active_adapters": list(jobs[0].step.adapters) if jobs else [],
            "testing": any(not isinstance(job.step, DpoStep) for job in jobs),
            "alarms": list(self.alarms),
            "adapters_active": self._parts.slots.adapters,
            "adapters_loaded": self._trainer.shelf.count,
        }


def _beside(name: str) -> ThreadPoolExecutor:
    """One thread that leaves the cores to the engine's; it is there at once, so that nothing is set later."""
    pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=beside)
    pool.submit(lambda: None).result()
    return pool
