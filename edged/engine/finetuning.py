"""Open steps: takes pairs in, opens steps when they are due, has versions published and rolled back."""

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from edged.align.adapters.adapter import AdapterError, AdapterState, UnknownAdapter
from edged.align.adapters.loader import AdapterLoader
from edged.align.adapters.writer import AdapterWriter
from edged.align.dpo.step import DpoStep
from edged.align.dpo.step_plan import Recompute
from edged.align.feedback.outliers import OutlierHistory
from edged.align.feedback.pair import START_REASON, Record, StepSkipped, TokenPair, VersionPublished, is_practice
from edged.align.guard import AdapterHealth
from edged.align.jobs import JobPlan
from edged.align.pair_queues import FinetuneStep
from edged.align.rounds import ROUNDS, LocalRound
from edged.align.starts import Start, StartFiles
from edged.align.trainer import Trainer
from edged.align.trials import TRIALS, Trial
from edged.align.versions import VersionsDiffer
from edged.engine.command_queue import pass_on
from edged.engine.lora.slots import SlotTable
from edged.engine.model.memory_model import free_bytes, kept_that_fits, max_open_steps, unused_bytes
from edged.engine.model_runner import ModelRunner, OpenStep, RunnerOutput
from edged.engine.sequences import SequenceTable
from edged.runtime import logs
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import FinetuneTask, Kind, Plan, TaskOutcome, Unit
from edged.settings.live import Live
from edged.settings.load import Settings
from edged.tensors.oom import out_of_memory

log = logging.getLogger("edged.align")
_GRAPH_SHARE = 0.25
"""Share of the free memory that a step's kept graph may take."""
_MAX_TRIED = 256
"""Number of adapters for which one iteration tries to find a slot."""


class StepTable:
    """Fine-tune steps as tasks of the scheduler. Used by the engine thread alone, except `report` and `under_way`."""

    def __init__(
        self,
        settings: Live[Settings],
        runner: ModelRunner,
        scheduler: Scheduler,
        trainer: Trainer,
        slots: SlotTable,
        loader: AdapterLoader,
        writer: AdapterWriter,
        sequences: SequenceTable,
        journal: Callable[[list[Record]], Future[None] | None],
        start_files: StartFiles,
    ) -> None:
        """`journal` takes the records of training; its future resolves when they are on disk."""
        self._settings, self._scheduler, self._trainer, self._slots = settings, scheduler, trainer, slots
        self._model, self._pages = runner.model, runner.pages
        self._loader, self._writer, self._journal, self._start_files = loader, writer, journal, start_files
        self._sequences, self._stats = sequences, sequences.stats
        self.pairs_queued = self.pairs_waiting = 0
        self.practice_due = False
        """Whether there is practice to train on."""
        self._practice_next = False
        """Whether a step of people's own pairs, or a test, has ended since the last of practice: they take turns."""
        self.alarms: tuple[str, ...] = ()
        """Users whose new pairs are all quarantined, because of a burst."""
        self.trains = not self._model.trainable_error and scheduler.policy.trains
        """Whether model and policy allow training; where not, pairs stay in the store."""
        self._held = False
        """Whether governors forbid steps."""
        self._slotless, self._slotless_s = "", math.inf
        """The adapter whose step waits longest for a LoRA slot, and since when."""
        self._max_open = max_open_steps(settings.current.align.max_loaded_adapters)
        self.by_task: dict[int, OpenStep] = {}
        """Open steps and tests by task id."""
        self.resumes_s = math.inf
        """When steps are opened again after memory ran out; inf when nothing waits."""
        self._ending: list[tuple[str, Future[int]]] = []
        """Adapters that another node is to write once their step here has ended, and who waits for that."""

    # -- pairs -------------------------------------------------------------------------------------------------------

    def submit(self, pairs: list[TokenPair]) -> None:
        """Hand pairs to the trainer, but those that another node learns since they were read."""
        if not self.trains:
            return
        self._trainer.pair_queues.tick(time.monotonic())
        self._trainer.submit([pair for pair in pairs if pair.adapter not in self._trainer.pair_queues.followed])

    def practise(self, adapter: str, pairs: list[TokenPair]) -> None:
        """Hand practice to the trainer."""
        if self.trains and adapter not in self._trainer.pair_queues.followed:
            self._trainer.practise(adapter, pairs)

    def open_to_practice(self, adapter: str) -> bool:
        """Whether an adapter's practice would be trained on; any thread may ask.

        Its own pairs are done by then, and those of others are, too, or it is practice's turn.
        """
        queue = self._trainer.pair_queues.queues.get(adapter)
        own = (queue is not None and bool(queue.queue)) or adapter in self._trainer.pair_queues.followed
        return self.opens_steps and not own and (not self.pairs_queued or self._practice_next)

    @property
    def opens_steps(self) -> bool:
        """Whether neither policy, settings, governors nor a fault forbid steps; any thread may ask."""
        closed = self._held or self._scheduler.degraded
        return self.trains and not closed and self._settings.current.align.enabled

    def restore_outlier_history(self, pasts: dict[str, OutlierHistory]) -> None:
        """Restore adapters' outlier histories; see `PairQueues.restore_outlier_history`."""
        self._trainer.pair_queues.tick(time.monotonic())
        for adapter, past in pasts.items():
            self._trainer.pair_queues.restore_outlier_history(adapter, past)
            self._trainer.adapter_cache.files.protect(adapter, past.baseline_version)

    # -- opening steps -----------------------------------------------------------------------------------------------

    def hold(self, held: bool) -> None:
        """Stop opening steps and drop the open ones, whose pairs stay queued; or, not `held`, open steps again."""
        if held and not self._held:
            self.abandon_all()
        self._held = held

    def open_due(self, now: float) -> None:
        """Open the steps that are due and give them to the scheduler; few at once, since each holds memory.

        While requests wait for LoRA slots, steps open only if they need no further slot; the step that has waited
        longest gets one after `finetune_max_wait_s`.
        """
        self._trainer.pair_queues.tick(now)
        if self._scheduler.degraded:
            self.abandon_all()
        closed = self._held or self._scheduler.degraded
        if not self._rested(now) or closed or not self._settings.current.align.enabled:
            return
        ready = self._trainer.pair_queues.ready()
        if self._slotless not in ready:
            self._slotless, self._slotless_s = "", math.inf
        self._make_way(bool(ready))
        if self._under_way >= self._max_open:
            return
        if self._practice_next and ready and not any(open_step.practice for open_step in self.by_task.values()):
            self._begin_practice(now)
        for adapter in self._scheduler.next_steps(ready, _MAX_TRIED):
            if self._under_way >= self._max_open or not self._rested(now):
                return
            # The adapter may have joined another's step meanwhile.
            if adapter in ready:
                self._begin(adapter, now)
        if self._trainer.jobs and not (ready or self.by_task):
            # One step of one job at a time, begun when nobody's own pairs have work.
            for adapter in self._trainer.due_jobs()[:1]:
                self._try_begin(adapter, now, self._reserve, False)
        if self._trainer.rounds.due and not (ready or self.by_task):
            self._begin_round(now, self._reserve)
        if self.trains and self._trainer.trials.catalogue and not (ready or self.by_task):
            self._begin_trial(now, self._reserve)
        if not (ready or self.by_task):
            self._begin_practice(now)

    @property
    def _reserve(self) -> int:
        """Idle LoRA slots that steps leave to requests: all while a request waits for one."""
        return self._slots.count if self._sequences.waiting_for_slot else 0

    def _begin_practice(self, now: float) -> None:
        """Open the step of practice that has waited longest."""
        for adapter in self._trainer.pair_queues.practising()[:1]:
            self._try_begin(adapter, now, self._reserve, False)

    def _make_way(self, ready: bool) -> None:
        """Take the step of a job or of practice out of the way of people's own pairs and of requests; it begins again.

        It ends where its place or its slot is wanted, and gives its pages up where the others' steps need them.
        Practice that is not in turn also ends for its adapter's own work, and for a job.
        """
        bulk = [open_step for open_step in self.by_task.values() if open_step.task.bulk]
        for open_step in list(bulk):
            queue = self._trainer.pair_queues.queues[open_step.step.adapters[0]]
            suspect = queue.guard.health is AdapterHealth.SUSPECT
            wanted = queue.queue or queue.unscored or suspect or self._trainer.due_jobs()
            if wanted and open_step.practice:
                self.abandon(queue.name)
                bulk.remove(open_step)
        if not bulk:
            return
        if self._sequences.waiting_for_slot or (ready and (self._under_way >= self._max_open or not self._slots.idle)):
            for open_step in bulk:
                self.abandon(open_step.step.adapters[0])
            return
        asking = [
            open_step.task for open_step in self.by_task.values() if not (open_step.task.bulk or open_step.task.begun)
        ]
        holding = [open_step.task for open_step in bulk if open_step.task.held_pages]
        if asking and holding:
            # Beside serving a step begins where it leaves as many pages as it takes.
            pages = [task.pages_for(task.num_tokens, self._pages.page_size) for task in (*asking, *asking, *holding)]
            if sum(pages) + self._scheduler.counts()[Kind.DECODE] > self._pages.available:
                for task in holding:
                    self.preempt(task.task_id, time.monotonic())

    def _begin(self, adapter: str, now: float) -> None:
        """Open an adapter's step, or load the adapter first, few at once; note which waits longest for a slot."""
        longest_s = self._settings.current.scheduler.finetune_max_wait_s
        overdue = adapter == self._slotless and now - self._slotless_s >= longest_s
        # A request that waits for a slot gets the next one, unless fine-tuning has waited too long for it.
        reserve = 0 if overdue else self._reserve
        if not self._try_begin(adapter, now, reserve, overdue) and not self._slotless:
            self._slotless, self._slotless_s = adapter, now

    def _try_begin(self, adapter: str, now: float, reserve: int, overdue: bool) -> bool:
        """Open an adapter's step, or load the adapter first; returns whether it got a slot, or will get one."""
        if self._trainer.adapter_cache.resident(adapter):
            return self._open_step(adapter, now, reserve)
        slot = overdue or self._slots.idle > reserve
        if slot and self._loader.count < self._max_open:
            self._loader.fetch(adapter)
        return slot

    # -- starts ------------------------------------------------------------------------------------------------------

    def _begin_trial(self, now: float, reserve: int) -> None:
        """Open the next trial of a start, or have its weights read first; have a start taken that fits its user."""
        trials = self._trainer.trials
        for start in trials.measured:
            self._loader.read(TRIALS, partial(self._start_files.remember, start), lambda _: None)
        trials.measured.clear()
        if trials.reading or trials.step is not None:
            return
        due = trials.next_trial(self._trainer.pair_queues, self._settings.current)
        if isinstance(due, Trial) and trials.holds(due):
            self._open_trial(due, now, reserve)
        elif isinstance(due, Trial):
            trials.reading = True
            self._loader.read(
                TRIALS, partial(self._read_trial, due, trials.number + 1), partial(trials.take_state, due)
            )
        elif due is not None:
            user, start = due
            self.take_start(user, start).add_done_callback(partial(_log_untaken, user, start))

    def _read_trial(self, trial: Trial, number: int) -> AdapterState:
        weights = self._start_files.weights(trial.start, trial.scale)
        return self._trainer.adapter_cache.build_trial(TRIALS, weights, number)

    def _open_trial(self, trial: Trial, now: float, reserve: int) -> None:
        state = self._trainer.trials.state
        assert state is not None
        self._open_unserved(state, partial(self._trainer.open_trial, trial), now, reserve)

    def _open_unserved(self, state: AdapterState, begin: Callable[[], FinetuneStep], now: float, reserve: int) -> None:
        """Open a bulk step over a state that answers no requests, where it gets a slot."""
        self._slots.update(state, state.version - 1, hot=False)
        slot = self._slots.acquire(state, reserve)
        if slot is not None:
            try:
                step = begin()
            except Exception as error:
                self._slots.release(slot)
                if not out_of_memory(error):
                    raise
                self._shrink(now)
            else:
                self._add_step(step, {state.name: slot}, now, (), practice=False, bulk=True)

    def take_start(self, adapter: str, start: Start) -> Future[int]:
        """Publish a start as an adapter's newest version, which is tested next; see `replace_version`."""

        def read() -> AdapterState:
            weights = self._start_files.weights(start, start.scale or 1.0)
            return self._trainer.adapter_cache.build(adapter, weights)

        return self.replace_version(adapter, read, f"{START_REASON}{start.name}")

    # -- rounds ------------------------------------------------------------------------------------------------------

    def begin_round(self, user: str, state: AdapterState, most: int, tests: bool) -> Future[LocalRound]:
        """Begin a round of a user's learned pairs, `most` at most; see `RoundQueue.begin_round`. Raises RoundFailed."""
        self.abandon(ROUNDS)
        return self._trainer.rounds.begin_round(state, self._trainer.pair_queues[user], most, tests)

    def end_round(self, reason: str) -> None:
        """End the round under way without a result."""
        self.abandon(ROUNDS)
        self._trainer.rounds.fail(reason)

    def _begin_round(self, now: float, reserve: int) -> None:
        """Open the round's next step or test; a round that fails in this ends."""
        local = self._trainer.rounds.round
        assert local is not None
        try:
            self._open_unserved(local.state, lambda: self._trainer.open_round(self._recompute()), now, reserve)
        except Exception as error:
            log.exception("a step of a federation's round could not be opened")
            self._trainer.rounds.fail(logs.first_line(error, with_kind=True))

    # -- jobs --------------------------------------------------------------------------------------------------------

    def start_job(self, plan: JobPlan) -> Future[int]:
        """Begin to train an adapter by a job's plan, once it is read; the future has the number of steps it took."""
        adapter_cache = self._trainer.adapter_cache

        def start(state: AdapterState) -> Future[int]:
            self.abandon(plan.adapter)
            adapter_cache.adopt(state)
            steps: Future[int] = Future()
            steps.set_result(self._trainer.start_job(plan))
            return steps

        return self._once_read(plan.adapter, partial(adapter_cache.load, plan.adapter), start)

    def end_job(self, adapter: str) -> Future[int]:
        """End an adapter's job; the future has the version that it leaves, once that is on disk.

        Raises UnknownAdapter.
        """
        self.abandon(adapter)
        self._trainer.end_job(adapter)
        return self.save(adapter)

    def under_way(self, adapter: str) -> bool:
        """Whether a step or test of an adapter is under way; may be called on any thread."""
        return any(adapter in open_step.step.adapters for open_step in list(self.by_task.values()))

    # -- adapters ----------------------------------------------------------------------------------------------------

    def save(self, adapter: str) -> Future[int]:
        """Write an adapter's current version now; the future has it once it is on disk. Raises UnknownAdapter."""
        if adapter not in self._trainer.adapter_cache.versions:
            raise UnknownAdapter(adapter)
        return self._writer.saved(adapter, self._trainer.adapter_cache.version(adapter))

    def rollback(self, adapter: str, version: int) -> Future[int]:
        """Publish an earlier version's weights as a new one, once they are read; see `replace_version`.

        Version 0 is the untrained adapter. Raises UnknownAdapter; the future also raises UnknownVersion.
        """
        if adapter not in self._trainer.adapter_cache.versions:
            raise UnknownAdapter(adapter)
        if version == self._trainer.adapter_cache.version(adapter):
            return self.save(adapter)
        read = partial(self._trainer.versions.read, adapter, version)
        return self.replace_version(adapter, read, f"rollback to {version}", version)

    def replace_version(
        self, adapter: str, read: Callable[[], AdapterState], reason: str, restored: int | None = None
    ) -> Future[int]:
        """Publish a state that no step made, and that the loader's thread reads; the version it had is `restored`.

        The future has the new version's number when it is on disk, or raises what `read` and `AdapterWriter.saved` do.
        """

        def publish(state: AdapterState) -> Future[int]:
            if adapter in self._trainer.jobs:
                raise AdapterError(f'a fine-tuning job makes adapter "{adapter}": wait for its end, or cancel it')
            self.abandon(adapter)
            return self._writer.saved(adapter, self._trainer.versions.replace(state, reason, restored))

        return self._once_read(adapter, read, publish)

    def _once_read(
        self, adapter: str, read: Callable[[], AdapterState], then: Callable[[AdapterState], Future[int]]
    ) -> Future[int]:
        """Have the loader's thread read a state, and do something with it; returns the future of that.

        It raises UnknownAdapter where the adapter is forgotten before.
        """
        answer: Future[int] = Future()

        def take(done: Future[AdapterState] | None) -> None:
            try:
                if done is None:
                    raise UnknownAdapter(adapter)
                begun = then(done.result())
            except Exception as error:
                answer.set_exception(error)
            else:
                begun.add_done_callback(lambda _: pass_on(begun, answer))

        self._loader.read(adapter, read, take)
        return answer

    # -- a fleet's one writer ----------------------------------------------------------------------------------------

    def follow(self, adapter: str) -> Future[int]:
        """Open no more steps of an adapter, which another node writes.

        The future has its version, 0 for none, once the step under way has ended and that version is on disk.
        """
        self._trainer.pair_queues.follow(adapter)
        ended: Future[int] = Future()
        self._ending.append((adapter, ended))
        self._end_followed()
        return ended

    def _end_followed(self) -> None:
        """Drop the pairs of adapters that are followed from now on, where no step of theirs is under way any more."""
        is_withdrawn, waiting = self._trainer.adapter_cache.is_withdrawn, self._ending
        self._ending = [item for item in waiting if self.under_way(item[0]) or is_withdrawn(item[0])]
        for adapter, ended in waiting:
            if (adapter, ended) not in self._ending:
                version = self._trainer.adapter_cache.version(adapter)
                self._trainer.pair_queues.forget(adapter)
                saved = self._writer.saved(adapter, version)
                saved.add_done_callback(partial(pass_on, answer=ended))

    def adopt(self, adapter: str, build: Callable[[], AdapterState], version: int) -> Future[int]:
        """Serve an adapter's version that another node made; the future has its number once it is on disk here.

        Raises VersionsDiffer where this node has a newer one.
        """

        def publish(state: AdapterState) -> Future[int]:
            adapter_cache = self._trainer.adapter_cache
            newest = max(adapter_cache.get(adapter).newest_number, state.newest_number)
            if newest >= version:
                raise VersionsDiffer(newest)
            return self._writer.saved(adapter, self._trainer.versions.adopt(state, version - 1, "adopted"))

        return self._once_read(adapter, build, publish)

    def take_over(self, adapter: str, after: int) -> Future[int]:
        """Write an adapter from now on; its version becomes greater than `after`, where that is not 0.

        The future has the version once it is on disk. Pairs are to be submitted when it has.
        """

        def publish(state: AdapterState) -> Future[int]:
            if adapter in self._trainer.pair_queues.followed:
                self._trainer.pair_queues.forget(adapter)
                self._trainer.pair_queues.followed.discard(adapter)
            adapter_cache = self._trainer.adapter_cache
            adapter_cache.adopt(state)
            if after and after >= adapter_cache.version(adapter):
                self.abandon(adapter)
                found = adapter_cache.get(adapter).copied().snapshot()
                state = adapter_cache.build(adapter, found.weights, found.optimizer or None, found.form)
                self._trainer.versions.adopt(state, after, "took over")
            return self._writer.saved(adapter, adapter_cache.version(adapter))

        return self._once_read(adapter, partial(self._trainer.adapter_cache.load, adapter), publish)

    def release(self, busy: Collection[str]) -> bool:
        """Remove adapters that answer no request (not `busy`) from memory, saving them first. True if any was removed.

        An adapter that cannot be saved stays; saving it is retried as usual.
        """
        adapter_cache = self._trainer.adapter_cache
        before = adapter_cache.count
        self._trainer.tidy(busy, 0)
        return adapter_cache.count < before

    def withdraw(self, pair_ids: Collection[int]) -> None:
        """Remove the pairs of these ids from all adapters; a step with any of them begins again without."""
        for name in self._trainer.pair_queues.holding(pair_ids):
            self.abandon(name)
        self._trainer.pair_queues.drop(pair_ids)

    def forget(self, adapter: str, pair_ids: Collection[int]) -> Future[None]:
        """Remove an adapter, and the pairs of these ids from all adapters; the future resolves when its files are gone.

        Raises UnknownAdapter.
        """
        self._loader.forget(adapter)
        self.withdraw(pair_ids)
        self.abandon(adapter)
        self._pages.trie.expire_all(adapter)
        self._trainer.forget(adapter)
        self._slots.forget(adapter)
        return self._writer.forget(adapter)

    # -- the record --------------------------------------------------------------------------------------------------

    def flush(self, now: float) -> None:
        """Hand records to the journal, a due version to the writer; drop idle adapters when too many are in memory."""
        queues, totals = self._trainer.pair_queues, self._stats.totals
        self.pairs_queued, self.pairs_waiting, self.alarms = queues.pairs_queued, queues.waiting(), queues.alarms()
        self.practice_due = bool(queues.practising())
        if self._trainer.records:
            records, self._trainer.records = self._trainer.records, []
            for record in records:
                if isinstance(record, StepSkipped):
                    totals.steps_skipped += 1
                elif isinstance(record, VersionPublished):
                    totals.rollbacks += record.reason.startswith("rollback")
                    totals.guard_rollbacks += record.reason.startswith("guard")
            self._journal(records)
        self._end_followed()
        self._writer.save_due(now)
        if self._trainer.adapter_cache.crowded:
            # The adapter whose step waits for a slot must stay in memory until then.
            self._trainer.tidy(self._sequences.adapters | {self._slotless})

    def next_due_s(self) -> float | None:
        """Return when the next version is due to be saved, or the next delayed pair to be trained on; None if never."""
        dues_s = (self._writer.next_save_s(), self._trainer.pair_queues.next_pair_s())
        return min((due for due in dues_s if due is not None), default=None)

    def close(self) -> None:
        """Abandon steps, save every unsaved version."""
        try:
            self.abandon_all()
            self._loader.close()
            self.flush(float("inf"))
        finally:
            self._writer.close()

    def _reason(self) -> str:
        if self._scheduler.degraded:
            return self._scheduler.degraded
        if self.resumes_s < math.inf:
            return "memory ran out in a step: it is tried again in a moment, with fewer pairs"
        policy = self._scheduler.policy
        return "" if policy.trains else f"the policy {policy.name} does not train"

    def report(self) -> dict[str, Any]:
        """Return the finetune part of the status."""
        open_steps = list(self.by_task.values())
        practising = (open_step.step.adapters[0] for open_step in open_steps if open_step.practice)
        return {
            "enabled": self.trains and self._settings.current.align.enabled and not self._scheduler.degraded,
            "held": self._held,
            "reason": self._model.trainable_error or self._reason(),
            "pairs_queued": self.pairs_queued,
            "pairs_waiting": self.pairs_waiting,
            "pairs_trained": self._trainer.pairs_trained,
            "practising": next(practising, ""),
            "practice_due": self.practice_due,
            "steps": self._trainer.steps,
            "active_adapters": list(open_steps[0].step.adapters) if open_steps else [],
            "testing": any(not isinstance(open_step.step, DpoStep) for open_step in open_steps),
            "alarms": list(self.alarms),
            "adapters_active": self._slots.adapters,
            "adapters_loaded": self._trainer.adapter_cache.count,
        }

    def _rested(self, now: float) -> bool:
        """Whether the pause after memory ran out is over at `now`."""
        if now >= self.resumes_s:
            self.resumes_s = math.inf
        return self.resumes_s == math.inf

    # -- open steps --------------------------------------------------------------------------------------------------

    def _open_step(self, adapter: str, now: float, reserve: int) -> bool:
        """Open the adapter's next step or test, which other adapters in memory may join. False when it got no slot.

        It leaves `reserve` idle slots to requests; the adapters that join leave at least half of all slots idle. A slot
        is held until the step ends.
        """
        slots: dict[str, int] = {}

        def admit(name: str) -> bool:
            state = self._trainer.adapter_cache.peek(name)
            if state is None:
                return False
            slot = self._slots.acquire(state, max(reserve, self._slots.count // 2) if slots else reserve)
            if slot is not None:
                slots[name] = slot
            return slot is not None

        try:
            if not admit(adapter):
                return False
            # Beside people's own pairs practice has its turn, and is owed what they are.
            in_turn = self._practice_next and bool(self._trainer.pair_queues.ready())
            validates = adapter in self._trainer.jobs and self._trainer.jobs[adapter].validates
            step = self._trainer.open(adapter, "full" if validates else self._recompute(), admit)
        except Exception as error:
            if slots:
                log.exception("a step of %s could not be opened", ", ".join(slots))
            elif out_of_memory(error):
                log.warning("a step of %s waits: there was no memory for its adapter (%s)", adapter, error)
            else:
                raise
            self._release(slots)
            if out_of_memory(error):
                self._shrink(now)
            return False
        practice = is_practice(self._trainer.pair_queues.queues[adapter].taken)
        bulk = adapter in self._trainer.jobs or (practice and not in_turn)
        self._add_step(step, slots, now, step.adapters, practice, bulk)
        return True

    def _add_step(
        self,
        step: FinetuneStep,
        slots: dict[str, int],
        now: float,
        trains: Sequence[str],
        practice: bool,
        bulk: bool,
    ) -> None:
        """Give an open step to the scheduler, as a task by which the adapters it `trains` have had their turn."""
        task = FinetuneTask(self._stats.new_task("", ", ".join(step.adapters)), now)
        task.trains, task.bulk = tuple(trains), bulk
        about = step, task, slots, now, practice, self._pages.begin_step()
        open_step = self.by_task[task.task_id] = OpenStep(*about)
        self._sync(open_step)
        self._scheduler.add(task, now)

    def _release(self, slots: dict[str, int]) -> None:
        for slot in slots.values():
            self._slots.release(slot)

    def _recompute(self) -> Recompute:
        """Return what the next step keeps of its forward, which spends memory to save time: the most that fits.

        Where the weights are read for serving anyway (a GPU that decodes), tokens in the packed forward are nearly
        free: then it is the packed forward that saves time.
        """
        counts, device = self._scheduler.counts(), self._model.device
        serves = device.type == "cuda" and counts[Kind.PREFILL] + counts[Kind.DECODE] > 0
        if serves or self._trainer.size.graphs_fail:
            return "full"
        # Open steps may not have allocated their memory yet.
        most = _GRAPH_SHARE * (free_bytes(device)[0] + unused_bytes(device)) / (1 + len(self.by_task))
        about = self._model.shape, self._settings.current, self._model.dtype, device.type == "cuda", most
        return kept_that_fits(*about, self._trainer.adapter_cache.output_factors)

    def process(self, output: RunnerOutput, plan: Plan, _now: float) -> list[TaskOutcome]:
        """Return the outcomes of the plan's grants to steps, which have moved on by themselves."""
        return output.finetune_outcomes(plan, self.by_task)

    def close_finished(self, now: float, failed: Mapping[int, Exception]) -> None:
        """Have the trainer take finished steps in, and update the tasks of the others.

        `failed` has the error of each task whose unit raised, by task id. Where a version is the cause of answers that
        were not finite, an earlier one is served.
        """
        for task_id, open_step in list(self.by_task.items()):
            if task_id in failed:
                self._give_up(task_id, failed[task_id], now)
            elif open_step.step.finished:
                self._drop(task_id)
                strikes = self._trainer.size.strikes
                self._trainer.close(open_step.step, now - open_step.opened_s)
                self._practice_next = not (open_step.practice or open_step.task.bulk)
                if self._trainer.size.strikes > strikes:
                    self.resumes_s = now + self._trainer.size.pause_s
            else:
                self._look_ahead(open_step.step, now)
                self._sync(open_step)
                self._scheduler.update(open_step.task)
        while self._sequences.suspects:
            adapter, version = self._sequences.suspects.popleft()
            followed = adapter in self._trainer.pair_queues.followed
            if not followed and self._trainer.versions.suspect(adapter, version):
                log.error("version %d of %s answers with numbers that are not finite: it goes back", version, adapter)
                self.abandon(adapter)
                reason = f"guard: version {version} answered with numbers that are not finite"
                self._trainer.fail_job(adapter, reason)
                self._trainer.versions.withdraw(adapter, reason)
        totals = self._stats.totals
        totals.optimizer_steps, totals.pairs_trained = self._trainer.steps, self._trainer.pairs_trained
        totals.trained_tokens = self._trainer.trained_tokens

    @property
    def _under_way(self) -> int:
        """Number of micro-batches under way, each of which holds its layers' inputs."""
        return len(self.by_task) + sum(
            open_step.step.packing is not open_step.step.micro_batch for open_step in self.by_task.values()
        )

    def _look_ahead(self, step: FinetuneStep, now: float) -> None:
        """Have a step's next micro-batch computed beside its units, in the memory of a step that could be open."""
        fills = self._scheduler.policy.fills_ahead
        if not fills or not isinstance(step, DpoStep) or self._under_way >= self._max_open or not self._rested(now):
            return
        try:
            step.look_ahead()
        except Exception as error:
            if not out_of_memory(error):
                raise
            self._shrink(now)

    def _drop(self, task_id: int) -> FinetuneStep:
        """End a step's task, which the scheduler may have removed already; returns the step."""
        open_step = self.by_task.pop(task_id)
        self._scheduler.remove(task_id)
        self._release(open_step.slots)
        self._pages.end_step(open_step.states)
        return open_step.step

    def abandon(self, adapter: str) -> None:
        """Drop the step that trains this adapter; the pairs of all adapters in it stay queued."""
        for task_id, open_step in list(self.by_task.items()):
            if adapter in open_step.step.adapters:
                self._drop(task_id)
        self._trainer.abandon(adapter)

    def abandon_all(self) -> None:
        """Drop every step; the pairs stay queued."""
        for open_step in list(self.by_task.values()):
            self.abandon(open_step.step.adapters[0])

    # -- an iteration ------------------------------------------------------------------------------------------------

    def _sync(self, open_step: OpenStep) -> None:
        """Copy the state of an open step into its task."""
        task, step = open_step.task, open_step.step
        pair_forwards = step.pair_forwards
        task.num_tokens, task.next_unit = step.micro_batch.tokens_left, 0
        task.ahead = 0 if task.num_tokens else step.packing.tokens_left
        task.units = tuple(Unit(kind, num_tokens) for kind, num_tokens in step.units_left())
        task.loss, task.groups_done = self._trainer.loss(step), step.groups_done
        task.context = sum(pair_forward.done for pair_forward in pair_forwards)
        task.held_pages = sum(len(pair_forward.pages) for pair_forward in pair_forwards)
        # Each stream begins on a page of its own: capacity is counted as if all of their last pages stayed empty.
        unfinished = sum(pair_forward.left > 0 for pair_forward in pair_forwards)
        task.capacity = task.context - unfinished * self._pages.page_size

    def preempt(self, task_id: int, now: float) -> None:
        """Free a step's pages, so that its forward starts again."""
        open_step = self.by_task.get(task_id)
        if open_step is None:
            return
        open_step.step.restart()
        self._scheduler.restart(open_step.task, open_step.step.micro_batch.tokens_left, now)
        open_step.task.underway = open_step.step.groups_done > 0
        self._sync(open_step)
        self._scheduler.update(open_step.task)

    def restart_above(self, page: int) -> None:
        """Restart the steps that hold pages from this number on: steps' pages cannot be moved."""
        for task_id, open_step in list(self.by_task.items()):
            if any((pair_forward.pages >= page).any() for pair_forward in open_step.step.pair_forwards):
                self.preempt(task_id, time.monotonic())

    # -- failures and lack of memory ---------------------------------------------------------------------------------

    def fail(self, task_ids: set[int], error: str, _now: float) -> list[str]:
        """Skip the steps of a failed iteration, with the reason on record."""
        for task_id in task_ids & self.by_task.keys():
            self._trainer.skip(self._drop(task_id), error)
        return []

    def _give_up(self, task_id: int, error: Exception, now: float) -> None:
        """Skip a failed step; one that kept its graph is tried again without, since it may have been too large."""
        open_step, reason = self.by_task[task_id], logs.first_line(error, with_kind=True)
        if out_of_memory(error):
            self.starved({task_id}, reason, now)
            message = f"memory ran out in fine-tuning, which waits {self._trainer.size.pause_s:.3g} s ({reason})"
            logs.event(log, logging.WARNING, "memory_short", message)
        elif isinstance(open_step.step, DpoStep) and open_step.step.keeps_graph:
            log.warning(
                "a step of %s failed with its graph kept; steps go on without", ", ".join(open_step.step.adapters)
            )
            self._trainer.size.distrust_graphs()
            self._trainer.abandon(self._drop(task_id).adapters[0])
        else:
            self._trainer.skip(self._drop(task_id), reason)

    def starved(self, task_ids: set[int], reason: str, now: float) -> None:
        """Drop steps in which memory ran out: their pairs come again in smaller steps, or are skipped if hopeless."""
        starved = task_ids & self.by_task.keys()
        for task_id in starved:
            self._trainer.starved(self._drop(task_id), len(starved) == 1, reason)
        self._shrink(now)

    def _shrink(self, now: float) -> None:
        self._trainer.size.shrink()
        self.resumes_s = now + self._trainer.size.pause_s


def _log_untaken(user: str, start: Start, taken: Future[int]) -> None:
    if (error := taken.exception()) is not None:
        log.error('start "%s" was not taken for %s: %s', start.name, user, error)
