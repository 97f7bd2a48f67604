"""The runner of fine-tuning jobs: it checks their files, feeds their examples to the engine, and ends them."""

import contextlib
import csv
import logging
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlite_utils import Database

from edged.align.adapters.adapter import AdapterError, UnknownAdapter
from edged.align.feedback.examples import BadFile, ExampleFile
from edged.align.feedback.pair import JobStepped, PairState, Record, TokenPair
from edged.align.feedback.pair_bounds import cut_asked, cut_side
from edged.align.feedback.pair_tokens import demand_rows, tokenize_pair
from edged.align.feedback.row_shapes import Pair
from edged.align.jobs import MAX_STEPS, JobPace, JobPlan, auto, job_settings
from edged.engine.engine import Engine
from edged.engine.request import EngineStopping
from edged.http.access import id_of, matches_user
from edged.runtime import logs
from edged.settings.live import Live
from edged.settings.load import USER_NAME, Settings
from edged.store import Store, StoreError, utc_now, utc_text
from edged.store.adapters import forget_learning
from edged.store.data_dir import SCRATCH, sha256_of
from edged.store.feedback import PairRow, Side
from edged.store.jobs import files, jobs
from edged.tensors.oom import out_of_memory
from edged.text.tokenizer import Tokenizer, TokenizerError

log = logging.getLogger("edged.api")

_STEPS_AHEAD = 2
"""Steps whose examples the engine has beside the one under way: memory does not grow with the file."""
_MAX_STEP_TOKENS = 1 << 21
"""Tokens of a step's examples."""
_VALIDATED = 256
"""Validation examples whose loss is computed at the end of an epoch, about; after the last step it is that of all."""
_CHECK_TURN_S = 1.0
"""Time after which the check of a job's files lets another owner's job have its turn."""
_RETRY_S = 5.0
"""Time after which the store is asked again when it failed."""
_ROWS_AT_ONCE = 1000
_METRICS = ("step", "train_loss", "valid_loss", "full_valid_loss", "learning_rate", "tokens", "tokens_per_s")
T = TypeVar("T")


class JobFailed(Exception):
    """A job that cannot go on: `code` and `param` are OpenAI's."""

    def __init__(self, message: str, code: str = "training_failed", param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


class _JobStopped(Exception):
    """The daemon stops, the job was cancelled or paused, or another owner's job has its turn."""


@dataclass(eq=False)
class JobRunner:
    """Checks one file and trains one job at a time, on two threads; owners take turns.

    Where jobs go on after a turn or a restart is in their versions.
    """

    store: Store
    tokenizer: Tokenizer
    engine: Engine
    settings: Live[Settings]
    base: str
    """The base model's fingerprint: jobs of another base wait."""
    model: str
    resubmit_pairs: Callable[[], None]
    """Has the pairs learned that came while a job trained their adapter."""

    def __post_init__(self) -> None:
        self._wake = threading.Condition()
        self._changes = 0
        """Number of changes after which there may be something to check or train."""
        self._stopping = False
        self._files: dict[str, tuple[str, list[ExampleFile]]] = {}
        """Owner and files of jobs whose check was begun, by job: that of training, and of validation."""
        self._checked: set[str] = set()
        """Jobs whose files are checked since the start."""
        self._stop_requested: Counter[str] = Counter()
        """Jobs that are to be left, because they are cancelled or paused, with the number of those who ask for it."""
        self._under_way: set[str] = set()
        """Jobs that are being checked or trained."""
        self._warned: set[tuple[str, str]] = set()
        """(Job, what of it is told once)."""
        self._validations: dict[tuple[str, int], list[tuple[float, int]]] = {}
        """(Mean loss, number of examples) of validation batches, by (job, step): another's turn may come within."""
        self._turn_ends_s = 0.0
        """When the job that is trained lets another owner's have its turn."""
        self._steps: deque[JobStepped] = deque()
        self._tokens = 0
        """Tokens that jobs have trained on since the start."""
        self.paces: dict[str, JobPace] = {}
        """The pace of the job that is trained."""
        self.adapters = jobs.NO_ADAPTERS
        """Adapters that jobs make, or made a version of."""
        self._refreshing = threading.Lock()
        self._threads = [
            threading.Thread(target=self._loop, args=(work, checked), name=f"edged-jobs-{checked:d}", daemon=True)
            for work, checked in ((self._check, False), (self._train, True))
        ]

    # -- from other threads ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin, or go on, with open jobs."""
        self.refresh()
        for thread in self._threads:
            thread.start()

    def run_soon(self) -> None:
        """Look for something to check or to train."""
        with self._wake:
            self._changes += 1
            self._wake.notify_all()

    def refresh(self) -> None:
        """Read anew which adapters are of whose jobs. Raises StoreError."""
        with self._refreshing:
            self.adapters = self.store.read(jobs.job_adapters)

    def on_records(self, records: Sequence[Record]) -> None:
        """Take in the steps among an engine's records."""
        for record in records:
            if isinstance(record, JobStepped):
                self._tokens += record.tokens
                with self._wake:
                    if record.job_id in self._under_way:
                        self._steps.append(record)
                        self._wake.notify_all()

    def readings(self) -> dict[str, Any]:
        """Return the metrics of jobs. Raises StoreError."""
        return {"edged_jobs": self.store.read(jobs.count_by_status), "edged_job_tokens_total": self._tokens}

    def kept_of(self, owner: str) -> tuple[int, int]:
        """Return (how many files an owner has uploaded, bytes of the owner's files and of open jobs' indexes of them).

        Raises StoreError.
        """
        count, kept = self.store.read(lambda db: files.stored_files_of(db, owner))
        indexed = [each for account, opened in list(self._files.values()) if account == owner for each in opened]
        return count, kept + sum(each.index_bytes for each in indexed)

    def plan(self, job: jobs.JobRow) -> JobPlan:
        """Return the plan of a job whose hyperparameters are settled."""
        settled = job.hyperparameters
        align = job_settings(self.settings.current.align, job.method, settled)
        sizes = (job.examples, settled["batch_size"], settled["n_epochs"], job.seed)
        return JobPlan(job.id, job.adapter, align, *sizes, job.other_steps)

    def end(self, job: jobs.JobRow) -> None:
        """Cancel an open job, whose last version stays and is on disk then. Raises StoreError."""
        self._stop_job(job.id, lambda: self._finish(job, "cancelled", "The job was cancelled"))

    def pause(self, job: jobs.JobRow, paused: bool) -> None:
        """Pause an open job, whose last version is on disk then, or let it go on. Raises StoreError."""
        if bool(job.paused) is paused:
            return

        def write(db: Database) -> None:
            stands = {"paused_at": jobs.last_step(db, job.id)} if paused else {}
            if jobs.update_job(db, job.id, paused=int(paused), **stands):
                jobs.add_event(db, utc_text(utc_now()), job.id, "The job is paused" if paused else "The job goes on")

        self._stop_job(job.id, lambda: self.store.write(write).result())
        if paused:
            self.resubmit_pairs()

    def close(self) -> None:
        """Stop the threads; open jobs go on at the next start."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _stop_job(self, job_id: str, then: Callable[[], object]) -> None:
        """Have a job left, if it is under way, and then do something before it can be begun again."""
        with self._wake:
            self._stop_requested[job_id] += 1
            self._wake.notify_all()
            self._wake.wait_for(lambda: job_id not in self._under_way)
        try:
            then()
        finally:
            with self._wake:
                self._stop_requested -= Counter([job_id])
            self.run_soon()

    # -- the threads -------------------------------------------------------------------------------------------------

    def _loop(self, work: Callable[[jobs.JobRow], None], checked: bool) -> None:
        """Do the work of jobs whose files were `checked`, or were not; wait where there are none."""
        turns: dict[str, float] = {}
        while not self._stopping:
            seen: int = self._changes
            wait_s: float | None = None
            try:
                if self._run_next(work, checked, turns):
                    continue
            except EngineStopping:
                log.debug("fine-tuning jobs go on at the next start")
            except Exception as error:
                told = logs.first_line(error, with_kind=True)
                log.warning("fine-tuning jobs wait: %s", told, exc_info=not _may_pass(error))
                wait_s = _RETRY_S
            with self._wake:
                self._wake.wait_for(partial(lambda seen: self._stopping or self._changes != seen, seen), wait_s)

    def _run_next(self, work: Callable[[jobs.JobRow], None], checked: bool, turns: dict[str, float]) -> bool:
        """Do the work of the next job whose file was `checked`, or was not; returns whether there was one.

        The owner whose latest turn is the longest ago has the next one.
        """
        waiting = self._waiting(checked)
        if not waiting:
            return False
        job = min(waiting, key=lambda job: turns.get(job.owner, 0.0))
        turns[job.owner] = time.monotonic()
        with self._wake:
            if job.id in self._stop_requested:
                return True
            self._under_way.add(job.id)
        try:
            # It may have been cancelled or paused since it was chosen.
            now = self.store.read(lambda db: jobs.find_job(db, job.id))
            if now is not None and now.status in jobs.OPEN and not now.paused:
                work(now)
        except _JobStopped:
            log.debug("job %s is left", job.id)
        except Exception as error:
            if isinstance(error, EngineStopping) or _may_pass(error):
                raise
            failure = error if isinstance(error, JobFailed) else JobFailed(logs.first_line(error, with_kind=True))
            if failure is not error:
                log.exception("job %s failed", job.id)
            self._finish(job, "failed", f"The job failed: {failure}", failure)
        finally:
            with self._wake:
                self._under_way.discard(job.id)
                self._wake.notify_all()
        return True

    @property
    def _may_train(self) -> bool:
        settings = self.settings.current
        return settings.jobs.enabled and settings.align.enabled and self.engine.finetuning.trains

    def _waiting(self, checked: bool) -> list[jobs.JobRow]:
        """Return the open jobs whose file was `checked`, or was not; none while nothing may be trained."""
        if not self._may_train:
            return []
        open_jobs, left = self.store.read(lambda db: jobs.open_jobs(db, self.base)), self._stop_requested
        return [job for job in open_jobs if (job.id in self._checked) is checked and not (job.paused or job.id in left)]

    @property
    def has_open_jobs(self) -> bool:
        """Whether a job can go on by itself. Raises StoreError."""
        return bool(self._waiting(True) or self._waiting(False))

    def _must_stop(self, job_id: str) -> bool:
        return self._stopping or job_id in self._stop_requested

    def _result(self, future: Future[T]) -> T:
        """Wait for the engine. Raises EngineStopping where it ends before it has answered."""
        future.add_done_callback(lambda _: self.run_soon())
        with self._wake:
            self._wake.wait_for(lambda: future.done() or self._stopping)
        if not future.done():
            raise EngineStopping("the daemon is stopping")
        return future.result()

    # -- a job's files -----------------------------------------------------------------------------------------------

    def _check(self, job: jobs.JobRow) -> None:
        """Check a job's files as far as its turn goes, and settle its hyperparameters then. Raises JobFailed."""
        (_, checked), turn_ends_s = self._files.setdefault(job.id, (job.owner, [])), time.monotonic() + _CHECK_TURN_S

        def stopped() -> bool:
            nonlocal turn_ends_s
            if time.monotonic() >= turn_ends_s:
                if any(other.owner != job.owner for other in self._waiting(False)):
                    return True
                turn_ends_s = time.monotonic() + _CHECK_TURN_S
            return self._must_stop(job.id)

        with contextlib.ExitStack() as unused:
            unused.callback(self._close_files, job.id)
            for place, name in enumerate(name for name in jobs.FILES if getattr(job, name)):
                self._check_file(job, name, place, checked, stopped)
                if not checked[place].complete:
                    unused.pop_all()
                    return
            examples = len(checked[0])
            settled = auto(examples, job.method, job.hyperparameters)
            highest = self.settings.current.jobs.learning_rate * settled["learning_rate_multiplier"]
            settled.setdefault("learning_rate", highest)
            steps = self.plan(replace(job, examples=examples, hyperparameters=settled)).steps
            if steps > MAX_STEPS:
                told = f"{examples} examples, {settled['n_epochs']} times in batches of {settled['batch_size']}"
                told += f", are {steps} steps, and a job has at most {MAX_STEPS}: raise batch_size, or lower n_epochs"
                raise JobFailed(told, "invalid_hyperparameters", "hyperparameters")
            status = "queued" if job.status == "validating_files" else job.status
            columns: dict[str, Any] = {"examples": examples, "hyperparameters": settled, "status": status}
            if self.store.write(lambda db: jobs.update_job(db, job.id, **columns)).result():
                self._checked.add(job.id)
                unused.pop_all()
                self.run_soon()

    def _check_file(
        self, job: jobs.JobRow, name: str, place: int, checked: list[ExampleFile], stopped: Callable[[], bool]
    ) -> None:
        """Check one of a job's files, at a place of `checked`, until it is `stopped`. Raises JobFailed."""
        folder, file_id, waits = self.store.path.parent, getattr(job, name), job.status == "validating_files"
        try:
            if place < len(checked):
                checked[place].go_on(stopped)
            else:
                if waits:
                    self._tell(job.id, f"Validating {name.replace('_', ' ')}: {file_id}")
                path, demand = files.content_of(self.store, file_id), partial(demand_rows, self.tokenizer)
                checked.append(ExampleFile(path, folder, job.method, stopped, demand))
        except (BadFile, FileNotFoundError) as error:
            told = str(error) if isinstance(error, BadFile) else f"the file cannot be read: {error}"
            raise JobFailed(told, f"invalid_{name}", name) from None
        (_, kept), (bound, max_mb) = self.kept_of(job.owner), stored_bound(self.settings.current)
        if waits and kept > max_mb << 20:
            told = f"with the index of the file's lines {kept} bytes of you are stored, and {bound} = {max_mb}"
            raise JobFailed(f"{told}: delete files, or cancel other jobs", "storage_full", name)
        for told, count in checked[place].taken.items() if waits and checked[place].complete else ():
            self._tell(job.id, f"{name.replace('_', ' ').capitalize()}, {count} examples: {told}")

    def _close_files(self, job_id: str) -> None:
        """Give the room of a job's indexes back."""
        self._checked.discard(job_id)
        for examples in self._files.pop(job_id, ("", []))[1]:
            examples.close()

    # -- training ----------------------------------------------------------------------------------------------------

    def _train(self, job: jobs.JobRow) -> None:
        """Train a job to its end, or until it is left. Raises JobFailed, and _JobStopped."""
        self._steps.clear()
        plan = self._begin(job)
        try:
            self._take_steps(job, plan, self._go_on(job, plan))
        finally:
            self.paces.pop(job.id, None)
            if not self._stopping:
                with contextlib.suppress(UnknownAdapter):  # forgotten meanwhile
                    self._result(self.engine.end_job(job.adapter))
        if self._stopping:
            raise _JobStopped
        told = f"The job has successfully completed: {self.model}:{job.adapter} is ready"
        self._finish(job, "succeeded", told)

    def _begin(self, job: jobs.JobRow) -> JobPlan:
        """Make a job's adapter ready for it; returns its plan. Raises JobFailed, and _JobStopped."""
        plan = self.plan(job)
        version = self.engine.version(job.adapter)
        if version and job.status != "running":
            told = f'adapter "{job.adapter}" was taught while the job waited: give another suffix'
            raise JobFailed(told, "suffix_taken", "suffix")
        if not self.store.write(lambda db: jobs.update_job(db, job.id, status="running")).result():
            raise _JobStopped
        if job.parent and not version:
            self._copy(job.parent, job.adapter)
        return plan

    def _go_on(self, job: jobs.JobRow, plan: JobPlan) -> int:
        """Have the engine begin a job, or go on with it; returns the number of steps that were taken."""
        if job.paused_at is not None and self.engine.version(job.adapter):
            self._result(self.engine.save(job.adapter))
        done = self._result(self.engine.start_job(plan))
        if job.paused_at is not None and done > job.paused_at:
            # Others taught the adapter while the job was paused: those steps are none of its own.
            plan = replace(plan, other_steps=plan.other_steps + done - job.paused_at)
            done = self._result(self.engine.start_job(plan))

        def write(db: Database) -> None:
            jobs.update_job(db, job.id, paused_at=None, other_steps=plan.other_steps)
            jobs.drop_later_steps(db, job.id, done)
            told = f"step {done} of {plan.steps} is done, {plan.examples} examples"
            message = f"Fine-tuning job {'goes on' if job.status == 'running' else 'started'}: {told}"
            jobs.add_event(db, utc_text(utc_now()), job.id, message)

        self.store.write(write).result()
        return done

    def _copy(self, source: str, adapter: str) -> None:
        """Make an adapter of the weights of another one's newest version on disk. Raises JobFailed."""
        on_disk = self.engine.adapter_files
        version, _ = on_disk.newest(source)
        if not version:
            raise JobFailed(f'adapter "{source}" has no version on disk: name another model', "invalid_model", "model")
        found = on_disk.load(source, version)
        self._result(self.engine.import_adapter(adapter, found.weights, "imported", found.form))

    def _take_steps(self, job: jobs.JobRow, plan: JobPlan, done: int) -> None:
        """Feed a job's steps until all are taken. Raises JobFailed, and _JobStopped."""
        fed, ended, self.paces[job.id] = done, 0, JobPace()
        self._turn_ends_s = time.monotonic() + self.settings.current.jobs.turn_s
        while True:
            if done != ended and not done % plan.epoch_steps:
                self._validate(job, plan, done)
                if done == plan.steps:
                    return
                self._keep_checkpoint(job, done)
                ended = done
            # No step is taken before the version that it changes is validated and kept.
            ends = plan.epoch_steps * (done // plan.epoch_steps + 1)
            while fed < min(ends, done + 1 + _STEPS_AHEAD):
                self.engine.feed_job(plan.adapter, fed, self._examples(job, plan, fed))
                fed += 1
            step = self._next_step(job, plan, max(0.0, self._turn_ends_s - time.monotonic()) or _RETRY_S)
            if step is not None:
                done = step.step
            if done < plan.steps and (step is not None or not self.engine.finetuning.under_way(plan.adapter)):
                self._yield_turn(job)

    def _keep_checkpoint(self, job: jobs.JobRow, step: int) -> None:
        """Keep the version after a step as an adapter SUFFIX@STEP, unless that was done, or the name is another's.

        It is on disk then, as the job's own version is; the job's older ones are forgotten. One that somebody forgot
        is not made again.
        """
        name, engine, access = f"{job.adapter}@{step}", self.engine, self.settings.current.access
        granted = any(matches_user(user, name) and not matches_user(user, job.adapter) for user in access.granted_users)
        known = granted or engine.version(name) is not None or name in engine.adapter_files.left
        valid = USER_NAME.fullmatch(name) is not None
        about = (utc_text(utc_now()), job.id, step, name, valid and not known and id_of("user", name) is None)
        if not self.store.write(lambda db: jobs.keep_checkpoint(db, *about)).result():
            if not self.store.read(partial(jobs.was_forgotten, job_id=job.id, step=step)):
                why = "is somebody's: give another suffix" if valid else "has over 64 characters: give a shorter suffix"
                self._warn_once(job, name, f'Step {step} has no checkpoint: "{name}" {why}')
            return
        self.refresh()
        with contextlib.suppress(UnknownAdapter):  # forgotten meanwhile
            if not engine.version(name):
                self._result(engine.save(job.adapter))
                self._copy(job.adapter, name)
            self._result(engine.save(name))
        lost = [name] if self.store.read(partial(jobs.checkpoint_of, adapter=name)) != job.id else []
        for old in (*lost, *self.store.read(partial(jobs.old_checkpoints, job_id=job.id))):
            if engine.version(old) is not None:
                with contextlib.suppress(UnknownAdapter):  # somebody forgets it, too
                    self._result(engine.forget(old))
                self.store.write(partial(lambda db, name: forget_learning(db, name), name=old)).result()

    def _yield_turn(self, job: jobs.JobRow) -> None:
        """Raise _JobStopped where a job's turn has ended and another owner's job waits."""
        if time.monotonic() >= self._turn_ends_s:
            if any(other.owner != job.owner for other in self._waiting(True)):
                raise _JobStopped
            self._turn_ends_s = time.monotonic() + self.settings.current.jobs.turn_s

    def _next_step(self, job: jobs.JobRow, plan: JobPlan, wait_s: float = _RETRY_S) -> JobStepped | None:
        """Return the next step or validation batch that was taken; None after `wait_s` without one.

        Raises JobFailed, and _JobStopped.
        """
        with self._wake:
            self._wake.wait_for(lambda: self._steps or self._must_stop(job.id) or not self._may_train, wait_s)
            if self._must_stop(job.id) or not (self._steps or self._may_train):
                raise _JobStopped
            step = self._steps.popleft() if self._steps else None
        if step is None or step.left_out:
            return step
        if step.error:
            raise JobFailed(step.error)
        left = 0
        if job.validation_file:
            valid, part = self._validation(job, plan)
            done = len(self._validations.get((job.id, step.step), ())) + bool(step.validated)
            left = part * (plan.epochs - 1 - (step.step - 1) // plan.epoch_steps) + valid.steps - done
        self.paces[job.id].take(step, left)
        return step

    def _validation(self, job: jobs.JobRow, plan: JobPlan) -> tuple[JobPlan, int]:
        """Return the plan of a job's validation batches, and the number of those after each epoch but the last."""
        valid = replace(plan, examples=len(self._files[job.id][1][1]), epochs=1)
        return valid, min(valid.steps, -(-_VALIDATED * valid.steps // valid.examples))

    def _validate(self, job: jobs.JobRow, plan: JobPlan, done: int) -> None:
        """Report the loss of validation examples after the last step of an epoch, unless it was reported.

        What cannot be computed is left out, an example or all: what was trained is not lost for it. Raises JobFailed,
        and _JobStopped.
        """
        if not job.validation_file or self.store.read(lambda db: jobs.is_validated(db, job.id, done)):
            return
        valid, part = self._validation(job, plan)
        most = valid.steps if done == plan.steps else part
        losses = self._validations.setdefault((job.id, done), [])
        while len(losses) < most:
            batch: JobStepped | None = None
            if examples := self._examples(job, valid, len(losses), 1):
                self.engine.feed_job(plan.adapter, done, examples)
                while (batch := self._next_step(job, plan)) is None:
                    pass
            losses.append((batch.loss, batch.validated) if batch is not None else (0.0, 0))
            if batch is not None and batch.error:
                self._warn_once(job, f"valid {done}", f"The validation after step {done} is left out: {batch.error}")
                losses[:] = [(0.0, 0)] * most
            if len(losses) < most:
                self._yield_turn(job)
        figures: dict[str, Any] = {"step": done, "total_steps": plan.steps, "valid_loss": _mean(losses[:part])}
        if most == valid.steps:
            figures["full_valid_loss"] = _mean(losses)
        if any(examples for _, examples in losses):
            self.store.write(lambda db: jobs.record_validation(db, utc_text(utc_now()), job.id, figures)).result()

    def _examples(self, job: jobs.JobRow, plan: JobPlan, step: int, which: int = 0) -> list[TokenPair]:
        """Return the tokenized examples of a step, of the training file or (`which` 1) that of validation.

        No other pairs have their ids. Raises JobFailed.
        """
        most, pairs, total = self.engine.max_pair_tokens, list[TokenPair](), 0
        if job.method == "kto":
            most //= 2  # each prompt is also computed with another one's answer
        file_name = jobs.FILES[which]
        for line, example in self._files[job.id][1][which].read(plan.batch(step)):
            for turn, pair in enumerate(example):
                if self._must_stop(job.id):
                    raise _JobStopped
                row = _row(plan.adapter, pair, most)
                try:
                    made, note = tokenize_pair(self.tokenizer, row, most)
                except TokenizerError as error:
                    if which:
                        self._warn_of_example(job, file_name, f"line {line}: {error}", "left out")
                        continue
                    raise JobFailed(f"line {line}: {error}", f"invalid_{file_name}", file_name) from None
                if note:
                    self._warn_of_example(job, file_name, f"line {line}: {note}", "cut")
                total += made.num_tokens
                if total > _MAX_STEP_TOKENS:
                    if which:
                        self._warn_of_example(job, file_name, f"line {line}: too many tokens for a batch", "left out")
                        return pairs
                    told = f"step {step + 1} has more than {_MAX_STEP_TOKENS} tokens: lower batch_size"
                    raise JobFailed(told, "invalid_hyperparameters", "hyperparameters")
                state: PairState = "held_out" if which else "queued"
                pairs.append(replace(made, pair_id=-1 - (line << 16 | turn), trusted=True, state=state))
        return pairs

    def _warn_of_example(self, job: jobs.JobRow, name: str, what: str, fate: str) -> None:
        """Warn of the first example of a job's file that is cut, or left out."""
        told = f"{name.replace('_', ' ')}, {what}; further examples that are {fate} are not told"
        self._warn_once(job, name + fate, told)

    def _warn_once(self, job: jobs.JobRow, about: str, message: str) -> None:
        if (job.id, about) not in self._warned:
            self._warned.add((job.id, about))
            self._tell(job.id, message, "warn")

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self, job: jobs.JobRow, status: str, message: str, failure: JobFailed | None = None) -> None:
        """End an open job that is not under way. Raises StoreError."""
        now = utc_text(utc_now())
        num_tokens = self.store.read(lambda db: jobs.trained_tokens(db, job.id))
        columns: dict[str, Any] = {"status": status, "finished_at": now, "trained_tokens": num_tokens}
        if failure is not None:
            columns |= {"error": str(failure), "error_code": failure.code, "error_param": failure.param}
        results = self._write_results(job) if num_tokens else None
        columns["result_file"] = results.id if results is not None else None

        def write(db: Database) -> bool:
            is_open = jobs.update_job(db, job.id, **columns)
            if is_open:
                jobs.add_event(db, now, job.id, message, "error" if failure is not None else "info")
            return is_open

        # In one transaction: a job whose end is not stored is ended again, with another file.
        ended = self.store.write(write).result() if results is None else files.insert_file(self.store, results, write)
        if ended:
            logs.event(log, logging.INFO, "job_ended", f"job {job.id}: {message}", job=job.id, status=status)
        self.refresh()
        self._validations = {step: losses for step, losses in self._validations.items() if step[0] != job.id}
        self._warned = {told for told in self._warned if told[0] != job.id}
        self._close_files(job.id)
        self.resubmit_pairs()
        self.run_soon()

    def _write_results(self, job: jobs.JobRow) -> files.FileRow | None:
        """Write the metrics of a job's steps as a CSV file of its owner; returns its row, which is to be inserted.

        None where it has none.
        """
        try:
            with tempfile.TemporaryDirectory(prefix=f"{SCRATCH}results-", dir=self.store.path.parent) as folder:
                draft, last = Path(folder) / "metrics", 0
                with draft.open("w", encoding="utf-8", newline="") as file:
                    table = csv.DictWriter(file, _METRICS, extrasaction="ignore")
                    table.writeheader()
                    read = partial(jobs.metrics_after, job_id=job.id, most=_ROWS_AT_ONCE)
                    while rows := self.store.read(partial(read, step=last)):
                        table.writerows(rows)
                        last = rows[-1]["step"]
                about = ("step_metrics.csv", "fine-tune-results", draft, sha256_of(draft))
                return files.place_file(self.store, job.owner, *about)
        except OSError as error:
            log.warning("the metrics of job %s are in no file: %s", job.id, error)
            return None

    def _tell(self, job_id: str, message: str, level: str = "info") -> None:
        self.store.write(lambda db: jobs.add_event(db, utc_text(utc_now()), job_id, message, level)).result()


def stored_bound(settings: Settings) -> tuple[str, int]:
    """Return the setting that bounds the bytes which are kept of a user's files and jobs, and its value in MiB."""
    bounds = {"jobs.files_mb": settings.jobs.files_mb, "limits.stored_mb": settings.limits.stored_mb}
    return min(((name, max_mb) for name, max_mb in bounds.items() if max_mb), key=lambda bound: bound[1])


def _may_pass(error: Exception) -> bool:
    """Whether an error's cause may pass, so that jobs wait: want of disk or memory, an adapter's file that went."""
    passes = isinstance(error, StoreError | OSError | AdapterError) and not isinstance(error, FileNotFoundError)
    return passes or out_of_memory(error)


def _mean(losses: Sequence[tuple[float, int]]) -> float:
    """Mean of (mean, number) of batches; 0 of none."""
    return sum(loss * count for loss, count in losses) / max(1, sum(count for _, count in losses))


def _row(adapter: str, pair: Pair, max_tokens: int) -> PairRow:
    """A pair of a file as a stored pair has it."""
    messages = pair.get("messages")
    asked = cut_asked((tuple(messages) if messages is not None else None, pair.get("prompt"), None, None), max_tokens)
    chosen, rejected = (cut_side(Side(pair.get(side, "")), max_tokens) for side in ("chosen", "rejected"))
    return PairRow(0, "", adapter, "", "pair", 1.0, *asked[:3], chosen, rejected, state="queued")
