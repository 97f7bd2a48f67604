"""Fine-tune steps under way, as tasks of the scheduler: opened, kept in step with their tasks, ended or given up.

Owns their LoRA slots and pages while they last, and the pause after want of memory. Must not know when a step is due,
nor what becomes of its versions. The engine thread alone uses it; others may read `jobs` and `resumes_s`.
"""

from __future__ import annotations

import logging
import math
import time

from edged import logs
from edged.align.dpo import DpoStep
from edged.align.memory import out_of_memory
from edged.config import AlignSettings
from edged.engine.executor import FineTuneJob, Work
from edged.engine.memory import free_bytes, kept_graph_bytes, unused_bytes
from edged.engine.parts import EngineParts
from edged.scheduler.task import Kind, Outcome, Plan, Task, Unit

log = logging.getLogger("edged.align")
_GRAPH_SHARE = 0.25
"""Of the free memory: what a step's kept graph may take."""


class Steps:
    """All steps and tests of adapters that have begun and not ended."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts, self._trainer, self._scheduler = parts, parts.trainer, parts.scheduler
        self._align = parts.settings.align
        self._page_size = parts.executor.pool.page_size
        self._graph_bytes = kept_graph_bytes(parts.model, parts.settings)
        self._tasks: dict[int, Task] = {}
        self.jobs: dict[int, FineTuneJob] = {}
        """What the executor works on, by task id."""
        self._failed: dict[int, Exception] = {}
        self.resumes_s = math.inf
        """After want of memory: when steps are opened again."""

    def configure(self, align: AlignSettings) -> None:
        """Open steps by other settings; those under way end as they began."""
        self._align = align

    def rested(self, now: float) -> bool:
        """Whether no step waits for memory at `now`."""
        if now >= self.resumes_s:
            self.resumes_s = math.inf
        return self.resumes_s == math.inf

    # -- begin and end -----------------------------------------------------------------------------------------------

    def open(self, adapter: str, now: float, spare: int = 0) -> bool:
        """Open the adapter's next step or test; others who are in memory may share it. False when it got no slot.

        It leaves `spare` idle slots to requests, those others at least half of all: each is held until the step ends.
        """
        slots: dict[str, int] = {}

        def admit(name: str) -> bool:
            state = self._trainer.shelf.peek(name)
            if state is None:
                return False
            slot = self._parts.slots.acquire(state, max(spare, self._parts.slots.count // 2) if slots else spare)
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
        model = self._parts.model
        counts = self._scheduler.counts()
        serving = counts[Kind.PREFILL] + counts[Kind.DECODE] > 0
        if not self._align.keep_graph or self._trainer.size.graphs_fail or (serving and model.device.type == "cuda"):
            return False
        # A step that is open and has computed nothing yet has its memory still to take.
        free = free_bytes(model.device)[0] + unused_bytes(model.device)
        return (1 + len(self.jobs)) * self._graph_bytes <= _GRAPH_SHARE * free

    def close_finished(self, now: float) -> bool:
        """Have the trainer take finished steps in, and bring the others' tasks up to date. True if any was finished."""
        closed = False
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
                closed = True
            else:
                self._sync(task)
                self._scheduler.update(task)
        return closed

    def _drop(self, task_id: int) -> None:
        job = self.jobs.pop(task_id)
        self._tasks.pop(task_id)
        self._release(job.slots)

    def _skip(self, task_id: int, reason: str) -> None:
        step = self.jobs[task_id].step
        self._drop(task_id)
        self._trainer.skip(step, reason)

    def abandon(self, adapter: str) -> None:
        """Drop the step that the adapter has part in; the pairs of all who share it stay queued."""
        for task_id, job in list(self.jobs.items()):
            if adapter in job.step.adapters:
                self._scheduler.remove(task_id)
                self._drop(task_id)
        self._trainer.abandon(adapter)

    def abandon_all(self) -> None:
        """Drop every step; the pairs stay queued."""
        for job in list(self.jobs.values()):
            self.abandon(job.step.adapters[0])

    # -- an iteration ------------------------------------------------------------------------------------------------

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
            kind = None if ended else Kind.FINETUNE
            outcomes.append(Outcome(grant.task, tokens.get(id(job), 0), work.units_run.get(task_id, 0), kind))
        self._failed = work.failed
        return outcomes

    def preempt(self, task_id: int, now: float) -> bool:
        """Take a step's pages away; its forward starts again. False when the task is not a fine-tune task."""
        if task_id not in self.jobs:
            return False
        step, task = self.jobs[task_id].step, self._tasks[task_id]
        step.restart()
        self._scheduler.restart(task, step.tokens_left, now)
        task.underway = step.groups_done > 0
        self._sync(task)
        self._scheduler.update(task)
        return True

    def restart_above(self, page: int) -> None:
        """Steps that hold pages from this number on start again: what they know of their pages is theirs alone."""
        for task_id, job in list(self.jobs.items()):
            if any((stream.pages >= page).any() for stream in job.step.group.streams):
                self.preempt(task_id, time.monotonic())

    # -- failures and want of memory ---------------------------------------------------------------------------------

    def fail(self, task_ids: set[int], reason: str) -> None:
        """An iteration failed: the steps that were in it are skipped, with the reason on record."""
        for task_id in task_ids & self.jobs.keys():
            self._scheduler.remove(task_id)
            self._skip(task_id, reason)

    def _give_up(self, task_id: int, error: Exception, now: float) -> None:
        """A failed step is skipped; one that kept its graph is tried again without: it may have been too large."""
        job, reason = self.jobs[task_id], logs.first_line(error, with_kind=True)
        if out_of_memory(error):
            self.starved({task_id}, reason, now)
            message = f"memory ran out in fine-tuning, which waits {self._trainer.size.pause_s:.3g} s ({reason})"
            logs.event(log, logging.WARNING, "memory_short", message)
        elif isinstance(job.step, DpoStep) and job.step.keeps_graph:
            log.warning("a step of %s failed with its graph kept; steps go on without", ", ".join(job.step.adapters))
            self._trainer.size.distrust_graphs()
            self._drop(task_id)
            self._trainer.abandon(job.step.adapters[0])
        else:
            self._skip(task_id, reason)

    def starved(self, task_ids: set[int], reason: str, now: float) -> None:
        """Memory ran out in these steps: their pairs wait, and come in smaller steps; what repeats alone is skipped."""
        starved = task_ids & self.jobs.keys()
        for task_id in starved:
            step = self.jobs[task_id].step
            self._scheduler.remove(task_id)
            self._drop(task_id)
            self._trainer.starved(step, len(starved) == 1, reason)
        self._shrink(now)

    def _shrink(self, now: float) -> None:
        self._trainer.size.shrink()
        self._pause_for_memory(now)

    def _pause_for_memory(self, now: float) -> None:
        self.resumes_s = now + self._trainer.size.pause_s
