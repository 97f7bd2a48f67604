"""The runner of fine-tuning jobs: it checks their files, feeds their examples to the engine, and ends them."""

import csv
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edged.align.adapters.adapter import AdapterError, UnknownAdapter
from edged.align.feedback.examples import BadFile, ExampleFile
from edged.align.feedback.pair import JobStepped, Record, TokenPair
from edged.align.feedback.pair_formats import Pair
from edged.align.feedback.pair_tokens import tokenize_pair
from edged.align.jobs import JobPlan, auto, job_settings
from edged.engine.engine import Engine
from edged.engine.request import EngineStopping
from edged.runtime import logs
from edged.settings.live import Live
from edged.settings.load import Settings
from edged.store import Store, StoreError, utc_now, utc_text
from edged.store.data_dir import FILES_FOLDER, SCRATCH, sha256_of
from edged.store.feedback import PairRow, Side, queued_ids
from edged.store.jobs import files, jobs
from edged.text.tokenizer import Tokenizer, TokenizerError

log = logging.getLogger("edged.api")

_STEPS_AHEAD = 2
"""Steps whose examples the engine has beside the one under way: memory does not grow with the file."""
_LONGEST_S = 120.0
"""How long the engine may take to begin or end a job."""
_METRICS = ("step", "train_loss", "learning_rate", "tokens", "tokens_per_s")


class JobFailed(Exception):
    """A job that cannot go on: `code` and `param` are OpenAI's."""

    def __init__(self, message: str, code: str = "training_failed", param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


@dataclass(slots=True)
class _RunningJob:
    """The job under way, its plan, and the number of its steps whose examples the engine has."""

    plan: JobPlan
    examples: ExampleFile
    fed: int
    cut_told: bool = False


@dataclass(eq=False)
class JobRunner:
    """Runs one job after the other, on a thread of its own; where jobs go on after a restart is in their versions."""

    store: Store
    tokenizer: Tokenizer
    engine: Engine
    settings: Live[Settings]
    base: str
    """The base model's fingerprint: jobs of another base wait."""
    model: str
    learn_soon: Callable[[Sequence[int]], None]
    """Has the pairs of these ids learned, which came while a job trained their adapter."""

    def __post_init__(self) -> None:
        self._running: _RunningJob | None = None
        self._ended: set[str] = set()
        """Jobs that were cancelled, or are of users that are being forgotten."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="edged-jobs")

    def run_soon(self) -> None:
        """Begin the next job, if none is under way."""
        self._post(self._begin_next)

    def tell(self, records: Sequence[Record]) -> None:
        """Take in the steps among an engine's records; any thread may call it."""
        for record in records:
            if isinstance(record, JobStepped):
                self._post(self._stepped, record)

    def end(self, job: jobs.JobRow, status: str = "cancelled") -> Future[None]:
        """End an open job, whose last version stays; the future resolves when it is on disk."""
        self._ended.add(job.id)
        return self._thread.submit(self._end, job.id, job.adapter, status)

    def close(self) -> None:
        """Stop the thread; open jobs go on at the next start."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _post(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            self._thread.submit(work, *arguments).add_done_callback(_report)
        except RuntimeError:
            log.debug("a job's step came after the end")

    # -- the life of a job -------------------------------------------------------------------------------------------

    def _begin_next(self) -> None:
        settings = self.settings.now
        may_run = settings.jobs.enabled and settings.align.enabled and self.engine.finetuning.trains
        while may_run and self._running is None:
            job = self.store.read(lambda db: jobs.next_job(db, self.base, self._ended))
            if job is None:
                return
            with self._failing(job.id, job.adapter):
                self._begin(job)

    def _begin(self, job: jobs.JobRow) -> None:
        """Check a job's file, and have the engine begin where it is. Raises JobFailed."""
        path = self.store.path.parent / FILES_FOLDER / job.training_file
        if job.status == "validating_files":
            self._tell(job.id, f"Validating training file: {job.training_file}")
        try:
            examples = ExampleFile(path, job.method != "supervised", lambda: job.id in self._ended)
        except BadFile as error:
            raise JobFailed(str(error), "invalid_training_file", "training_file") from None
        except OSError as error:
            raise JobFailed(f"the file cannot be read: {error}", "invalid_training_file", "training_file") from None
        if job.id in self._ended:
            return
        hyperparameters = auto(len(examples), job.hyperparameters)
        settings = self.settings.now
        align = job_settings(settings.align, job.method, settings.jobs.learning_rate, hyperparameters)
        if job.status == "running":
            # What was begun goes on by what it began with.
            align = align.model_copy(update={"learning_rate": hyperparameters["learning_rate"]})
        hyperparameters["learning_rate"] = align.learning_rate
        sizes = (len(examples), hyperparameters["batch_size"], hyperparameters["n_epochs"], job.seed)
        plan = JobPlan(job.id, job.adapter, align, *sizes)
        version = self.engine.version(job.adapter)
        if version and job.status != "running":
            told = f'adapter "{job.adapter}" was taught while the job waited: give another suffix'
            raise JobFailed(told, "suffix_taken", "suffix")
        columns = {"status": "running", "examples": len(examples), "hyperparameters": hyperparameters}
        self.store.write(lambda db: jobs.update_job(db, job.id, **columns)).result()
        if job.parent and not version:
            self._inherit(job)
        done = self.engine.start_job(plan).result(_LONGEST_S)
        self.store.write(lambda db: jobs.drop_later_metrics(db, job.id, done)).result()
        word = "resumed" if job.status == "running" else "started"
        told = f"Fine-tuning job {word}: step {done} of {plan.steps} is done, {len(examples)} examples"
        self._tell(job.id, told)
        self._running = _RunningJob(plan, examples, done)
        self._feed(done)

    def _inherit(self, job: jobs.JobRow) -> None:
        """Begin with the weights of another adapter's newest version on disk. Raises JobFailed."""
        files = self.engine.adapter_files
        version, _ = files.newest(job.parent)
        try:
            if not version:
                raise AdapterError(f'adapter "{job.parent}" has no version on disk')
            self.engine.import_adapter(job.adapter, files.load(job.parent, version).weights, "imported").result()
        except AdapterError as error:
            raise JobFailed(str(error), "invalid_model", "model") from None

    def _feed(self, done: int) -> None:
        """Have the engine take in the next examples, when `done` steps were taken; at the end, end the job."""
        running = self._running
        if running is None:
            return
        plan = running.plan
        if done >= plan.steps:
            self._end(plan.job_id, plan.adapter, "succeeded")
            return
        while running.fed < min(plan.steps, done + 1 + _STEPS_AHEAD):
            pairs: list[TokenPair] = []
            for line, example in running.examples.read(plan.batch(running.fed)):
                pairs += self._tokens(running, line, example)
            self.engine.feed_job(plan.adapter, running.fed, pairs)
            running.fed += 1

    def _tokens(self, running: _RunningJob, line: int, example: Sequence[Pair]) -> list[TokenPair]:
        """Tokenize an example; no other pair has its ids. Raises JobFailed."""
        tokens = []
        for turn, pair in enumerate(example):
            row = _row(running.plan.adapter, pair)
            try:
                made, note = tokenize_pair(self.tokenizer, row, self.engine.most_pair_tokens)
            except TokenizerError as error:
                raise JobFailed(f"line {line}: {error}", "invalid_training_file", "training_file") from None
            if note and not running.cut_told:
                running.cut_told = True
                told = f"line {line}: {note}; further examples that are cut are not told"
                self._tell(running.plan.job_id, told, "warn")
            rejected = made.rejected if row.rejected.text else ()
            tokens.append(replace(made, pair_id=-1 - (line << 16 | turn), rejected=rejected, trusted=True))
        return tokens

    def _stepped(self, record: JobStepped) -> None:
        running = self._running
        if running is None or running.plan.job_id != record.job_id:
            return
        with self._failing(record.job_id, record.adapter):
            if record.error:
                raise JobFailed(record.error)
            self._feed(record.step)

    def _end(self, job_id: str, adapter: str, status: str, failure: JobFailed | None = None) -> None:
        """End a job with its status, once its version is on disk; then begin the next one."""
        self._ended.add(job_id)
        if self._running is not None and self._running.plan.job_id == job_id:
            self._running = None
            try:
                self.engine.end_job(adapter).result(_LONGEST_S)
            except UnknownAdapter:
                log.debug("adapter %s was forgotten while a job trained it", adapter)
        now, message = utc_text(utc_now()), "The job was cancelled"
        columns: dict[str, Any] = {"status": status, "finished_at": now}
        if failure is not None:
            message = f"The job failed: {failure}"
            columns |= {"error": str(failure), "error_code": failure.code, "error_param": failure.param}
        elif status == "succeeded":
            message = f"The job has successfully completed: {self.model}:{adapter} is ready"
            columns["result_file"] = self._write_results(job_id)

        def end(db: Any) -> list[int]:
            if jobs.update_job(db, job_id, **columns):
                jobs.add_event(db, now, job_id, message, "error" if failure is not None else "info")
            return queued_ids(db, adapter)

        self.learn_soon(self.store.write(end).result())
        logs.event(log, logging.INFO, "job_ended", f"job {job_id}: {message}", job=job_id, status=status)
        self.run_soon()

    def _write_results(self, job_id: str) -> str | None:
        """Write the metrics of a job's steps as a CSV file of the job's owner; returns its id."""
        job, events = self.store.read(lambda db: (jobs.find_job(db, job_id), jobs.list_events(db, job_id)))
        if job is None:
            return None
        with tempfile.TemporaryDirectory(prefix=f"{SCRATCH}results-", dir=self.store.path.parent) as folder:
            draft = Path(folder) / "metrics"
            with draft.open("w", newline="") as file:
                table = csv.DictWriter(file, _METRICS)
                table.writeheader()
                table.writerows(event.data for event in reversed(events) if event.type == "metrics")
            about = ("step_metrics.csv", "fine-tune-results", draft, sha256_of(draft))
            return files.keep_file(self.store, job.owner, *about).id

    def _tell(self, job_id: str, message: str, level: str = "info") -> None:
        now = utc_text(utc_now())
        self.store.write(lambda db: jobs.add_event(db, now, job_id, message, level)).result()

    @contextmanager
    def _failing(self, job_id: str, adapter: str) -> Iterator[None]:
        """A context in which an error ends a job, unless the daemon is stopping: then the next start goes on."""
        try:
            yield
        except (EngineStopping, StoreError, CancelledError):
            raise
        except Exception as error:
            failure = error if isinstance(error, JobFailed) else JobFailed(logs.first_line(error, with_kind=True))
            if failure is not error:
                log.exception("job %s failed", job_id)
            self._end(job_id, adapter, "failed", failure)


def _row(adapter: str, pair: Pair) -> PairRow:
    """A pair of a file as a stored pair has it."""
    messages = pair.get("messages")
    prompt = (tuple(messages) if messages is not None else None, pair.get("prompt"), None)
    sides = (Side(pair["chosen"]), Side(pair.get("rejected", "")))
    return PairRow(0, "", adapter, "", "pair", 1.0, *prompt, *sides, state="queued")


def _report(done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) and not isinstance(error, EngineStopping):
        log.error("a fine-tuning job stands still until the next start: %s", error)
