"""The engine's public interface: commands go to its thread, events and records come through two callbacks."""

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

import edged
from edged.align.adapters.adapter import AdapterFiles, Snapshot
from edged.align.adapters.adapter_cache import AdapterCache
from edged.align.adapters.form import AdapterForm
from edged.align.adapters.loader import AdapterLoader
from edged.align.adapters.writer import AdapterWriter
from edged.align.feedback.outliers import OutlierHistory
from edged.align.feedback.pair import Record, TokenPair
from edged.align.jobs import JobPlan
from edged.align.rounds import ROUNDS, LocalRound, learned_pairs
from edged.align.starts import Start, StartChoice, StartFiles
from edged.align.trainer import Trainer
from edged.engine.build import bounded, build_runner, first_cost_model, lora_spec, subject_of
from edged.engine.command_queue import STOPPING, CommandQueue
from edged.engine.finetuning import StepTable
from edged.engine.loop import EngineLoop
from edged.engine.lora.slots import SlotTable
from edged.engine.model.base_files import base_fingerprint, files_digest
from edged.engine.model.loading import drop_cached
from edged.engine.model.memory_model import STATE_BYTES, adapter_weights
from edged.engine.model.served_model import ServedModel
from edged.engine.request import EngineBusy, EngineStopping, Event, FinishReason, Request, RequestRefused
from edged.engine.resource_limits import ResourceLimits
from edged.engine.sequences import SequenceTable
from edged.engine.stats.counters import Counters, percentile
from edged.engine.stats.iterations import Iteration
from edged.governors.limits import EngineLimits
from edged.models import source_of
from edged.placement.node import NodeLoad
from edged.runtime.process import in_thread
from edged.scheduler.reader import Reader
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import ServiceClass
from edged.settings.live import Live
from edged.settings.load import Settings
from edged.store.data_dir import STARTS_FOLDER
from edged.tensors.cpu_threads import apart, beside

log = logging.getLogger("edged.engine")


class Engine:
    """The engine: serves requests and trains on pairs on one thread; public methods may be called from any thread.

    Its parts are public for measurements and tests while that thread does not run.
    """

    def __init__(
        self,
        settings: Settings,
        model_dir: Path,
        deliver: Callable[[list[Event]], None] = lambda _events: None,
        journal: Callable[[list[Record]], Future[None] | None] = lambda _records: None,
        data_dir: Path | None = None,
    ) -> None:
        """Load the model and make all parts, as `build` does, with the calling thread's own share of the cores."""
        hashed = in_thread(partial(files_digest, model_dir, data_dir)) if data_dir else None
        model = self.model = ServedModel.load(model_dir, settings.model)
        settings = bounded(settings, model)
        self._live, self._path = Live(settings), str(model_dir)
        self._temporary = None if data_dir else tempfile.TemporaryDirectory(prefix="edged-")
        """The folder with the adapters of an engine without a data folder; it is deleted with the engine."""
        folder = Path(self._temporary.name) if self._temporary else Path(data_dir or "")
        runner = self.runner = build_runner(model, settings, folder)
        self.max_context_tokens = runner.max_context_tokens
        name = settings.model.name or Path(model_dir).name
        shapes = {linear: (wrapped.in_features, wrapped.out_features) for linear, wrapped in model.lora.linears.items()}
        base = base_fingerprint(model.fingerprint, hashed.result(), folder) if hashed else model.fingerprint
        # Hashing may have read them after they were dropped.
        drop_cached(Path(model_dir).glob("*.safetensors"))
        norms = None if model.quantized else model.lora.row_norms
        source = source_of(settings.model, Path(model_dir))
        spec = lora_spec(shapes, name, source, base, settings.align, norms, model.lora.dtype, model.wrapper)
        files = AdapterFiles(folder / "adapters" / spec.fingerprint, spec, settings.store.keep_versions)
        self.adapter_files = files
        """The files of the adapters' versions."""
        starts = self.start_files = StartFiles(folder / STARTS_FOLDER / spec.fingerprint, spec, 1)
        self.subject = subject_of(model, name, settings.model, runner.threads)
        """The model, device and numerics that a usable profile must have been measured on."""
        cost = first_cost_model(model, self.subject, settings.scheduler.profile, data_dir)
        scheduler = self.scheduler = Scheduler(settings.scheduler, cost, fairness=settings.fairness)
        adapter_cache = AdapterCache(spec, self._live, model.device, files)
        slots, stats, commands = SlotTable(model.lora), Counters(), CommandQueue()
        self.slots, self.stats, self.commands = slots, stats, commands
        writer = AdapterWriter(adapter_cache, self._live, commands.offer, journal)

        def on_read(adapter: str, error: str) -> None:
            sequences.on_fetched(adapter, error, time.monotonic())

        loader = AdapterLoader(adapter_cache, lambda name, state: trainer.enqueue(name, state), on_read, commands.offer)
        sequences = self.sequences = SequenceTable(
            settings.serving, scheduler, runner, slots, adapter_cache, loader.fetch, stats
        )
        trainer = self.trainer = Trainer(
            adapter_cache,
            self._live,
            runner.decoder,
            lambda pages: runner.pages.pool.release(pages.tolist()),
            (runner.pages.pool.pages - 1) * runner.pages.page_size,
            loader.read,
            sequences.on_publish,
            writer.bring,
            starts,
        )
        finetuning = self.finetuning = StepTable(
            self._live, runner, scheduler, trainer, slots, loader, writer, sequences, journal, starts
        )
        limits = self.limits = ResourceLimits(settings.serving, runner, scheduler, sequences, finetuning)
        self.loop = EngineLoop(self._live, commands, limits, scheduler, runner, sequences, finetuning, deliver, journal)
        self._requests_waiting = 0
        """Number of submitted requests that the engine thread has not taken in yet."""
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self.loop.run, name="edged-engine", daemon=True)

    @classmethod
    def build(
        cls,
        settings: Settings,
        model_dir: Path,
        deliver: Callable[[list[Event]], None],
        journal: Callable[[list[Record]], Future[None] | None],
        data_dir: Path | None,
    ) -> Self:
        """Load the model and make all parts. Raises ModelRefused with the reason.

        `deliver` and `journal` are called on engine threads and must not block; the journal's future, if it has one,
        resolves when all that it was given is on disk: a version is not saved before. Without a `data_dir` adapters
        live in a temporary folder. From now on torch uses one thread on the calling thread (see `cpu_threads.beside`).
        """
        beside()
        return apart(lambda: cls(settings, model_dir, deliver, journal, data_dir))

    @property
    def settings(self) -> Settings:
        """The settings in force, reduced to what memory allows."""
        return self._live.current

    @property
    def error(self) -> str | None:
        """The reason for which the engine ended without having been stopped; None while it has not."""
        return self.loop.recovery.error

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self, drain_s: float) -> None:
        """Refuse new requests, finish running ones within `drain_s`, cancel the rest, save adapters."""
        self.commands.stop(time.monotonic() + drain_s)
        if self._thread.is_alive():
            self._thread.join()

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, asked_s: float | None = None) -> None:
        """Queue a request; `asked_s` is when the client sent it, where that is some time ago (monotonic clock).

        Raises EngineBusy or RequestRefused.
        """
        if self.error or self.commands.stopping:
            raise EngineStopping(self.error or STOPPING)
        total = len(request.prompt_ids) + request.sampling.max_tokens
        if not request.prompt_ids:
            raise RequestRefused("the prompt is empty")
        if total > self.max_context_tokens:
            raise RequestRefused(
                f"prompt ({len(request.prompt_ids)} tokens) and max_tokens ({request.sampling.max_tokens}) exceed the "
                f"context of {self.max_context_tokens} tokens"
            )
        # An answer that has begun goes on.
        begun = bool(request.resumed_ids) or (request.delivery == "next_block" and not request.candidate)
        if not begun and self.sequences.waiting + self._requests_waiting >= self.settings.serving.max_queue:
            with self._counting:
                self.stats.outcomes["refused"] += 1
            raise EngineBusy(f"{self.settings.serving.max_queue} requests are waiting (serving.max_queue)")
        submitted = time.monotonic()
        try:
            factor = 0.0 if begun else self.settings.scheduler.refuse_ttft_factor
            self.sequences.refuse_late(request, factor, submitted)
        except EngineBusy:
            with self._counting:
                self.stats.outcomes["refused"] += 1
            raise
        self._requests_waiting += 1

        def take() -> None:
            self._requests_waiting -= 1
            try:
                self.sequences.add(request, submitted, asked_s)
                self.trainer.pair_queues.flush_accumulation(request.adapter or "")
            except Exception as error:
                log.exception("request %s could not be queued", request.request_id)
                self.sequences.cancel(request.request_id, "error", time.monotonic(), str(error))

        self.commands.post(take)

    def cancel(self, request_id: str, reason: FinishReason = "cancelled") -> None:
        """End a request; its FinishEvent has this `reason`. Unknown or finished ids are ignored."""
        self.commands.offer(lambda: self.sequences.cancel(request_id, reason, time.monotonic()))

    def spare_rows(self, num_tokens: int, tenant: str) -> int:
        """Return how many candidates of a tenant, of `num_tokens` each, find room that nothing else needs."""
        waits = self._requests_waiting > 1 or self.error or self.commands.stopping
        return 0 if waits else self.sequences.spare_rows(num_tokens, tenant)

    def count_stream(self, reason: FinishReason, reader: Reader | None, user: str, service: ServiceClass) -> None:
        """Count the end of an answer that was delivered in blocks."""
        self.commands.offer(lambda: self.sequences.count_end(reason, reader, user, service))

    # -- learning ----------------------------------------------------------------------------------------------------

    def submit_pairs(self, pairs: list[TokenPair]) -> None:
        """Queue preference pairs for training or, depending on their state, for held-out tests and replay."""
        if pairs:
            # An engine that has ended trains no more; the pairs stay queued in the store.
            self.commands.offer(lambda: self.finetuning.submit(pairs))

    def practise(self, adapter: str, pairs: list[TokenPair]) -> None:
        """Train an adapter on practice while people's own pairs leave time, in place of what is left of the last."""
        self.commands.offer(lambda: self.finetuning.practise(adapter, pairs))

    def withdraw(self, pair_ids: Collection[int]) -> None:
        """Train no more on these pairs."""
        self.commands.offer(lambda: self.finetuning.withdraw(pair_ids))

    @property
    def max_pair_tokens(self) -> int:
        """Most tokens of a pair that is trained on."""
        return min(self.settings.align.max_pair_tokens, self.trainer.max_tokens)

    def start_job(self, plan: JobPlan) -> Future[int]:
        """Begin to train an adapter by a job's plan; the future has the number of steps that it has taken already."""
        return self.commands.ask_at_length(lambda: self.finetuning.start_job(plan))

    def feed_job(self, adapter: str, step: int, examples: Sequence[TokenPair]) -> None:
        """Queue the examples of a job's step, counted from 0; steps come in their order."""
        self.commands.offer(lambda: self.trainer.feed_job(adapter, step, examples))

    def end_job(self, adapter: str) -> Future[int]:
        """End an adapter's job; the future has the version that it leaves when that is on disk, or UnknownAdapter."""
        return self.commands.ask_at_length(lambda: self.finetuning.end_job(adapter))

    def save(self, adapter: str) -> Future[int]:
        """Write an adapter's current version; the future has its number when it is on disk, or UnknownAdapter."""
        return self.commands.ask_at_length(lambda: self.finetuning.save(adapter))

    def rollback(self, adapter: str, version: int) -> Future[int]:
        """Publish an earlier version as a new one; the future has its number when it is on disk.

        The future raises UnknownAdapter, UnknownVersion, or StoreError if the new version is served but not on disk.
        """
        return self.commands.ask_at_length(lambda: self.finetuning.rollback(adapter, version))

    def import_adapter(
        self, adapter: str, weights: dict[str, torch.Tensor], reason: str, form: AdapterForm | None = None
    ) -> Future[int]:
        """Publish weights (PEFT's names, checked) as an adapter's newest version; the future is `rollback`'s.

        Their form is by default that of the settings.
        """
        build = partial(self.trainer.adapter_cache.build, adapter, weights, form=form)
        return self.commands.ask_at_length(lambda: self.finetuning.replace_version(adapter, build, reason))

    # -- starts ------------------------------------------------------------------------------------------------------

    def starts(self) -> dict[str, Start]:
        """Return the starts that users may begin with, by name."""
        return dict(self.trainer.trials.catalogue)

    def add_start(self, start: Start) -> Future[None]:
        """Have a start that is on disk measured, and scored on users' pairs."""
        return self.commands.ask(lambda: self.trainer.trials.add(start, self.trainer.pair_queues))

    def remove_start(self, name: str) -> Future[None]:
        """Score a start no longer; its files may be deleted then."""
        return self.commands.ask(lambda: self.trainer.trials.remove(name, self.trainer.pair_queues))

    def take_start(self, adapter: str, start: Start) -> Future[int]:
        """Publish a start as an adapter's newest version; the future is `rollback`'s."""
        return self.commands.ask_at_length(lambda: self.finetuning.take_start(adapter, start))

    def choice(self, adapter: str) -> Future[StartChoice]:
        """Copy what an adapter's pairs say of the starts."""
        queues = self.trainer.pair_queues.queues
        return self.commands.ask(lambda: replace(queues[adapter].choice if adapter in queues else StartChoice()))

    def restore_choices(self, choices: dict[str, StartChoice]) -> None:
        """Restore what is known of users' choices of starts, and have new starts scored on their pairs."""
        self.commands.post(lambda: self.trainer.trials.restore(choices, self.trainer.pair_queues))

    # -- rounds of a federation --------------------------------------------------------------------------------------

    def count_learned(self, adapters: Collection[str]) -> Future[dict[str, int]]:
        """Count the latest pairs that each adapter has learned, as far as a round may learn them."""
        queues = self.trainer.pair_queues.queues
        return self.commands.ask(
            lambda: {name: len(learned_pairs(queues[name])) for name in adapters if name in queues}
        )

    def begin_round(self, user: str, weights: dict[str, torch.Tensor], most: int, tests: bool) -> Future[LocalRound]:
        """Have a start's weights learn a user's learned pairs, `most` at most, in spare time, in no user's adapter.

        With `tests` it is scored on the user's held-out pairs before and after it. The future raises RoundFailed; any
        thread may build the state.
        """
        state = self.trainer.adapter_cache.build_trial(ROUNDS, weights, 1)
        return self.commands.ask_at_length(lambda: self.finetuning.begin_round(user, state, most, tests))

    def end_round(self, reason: str) -> Future[None]:
        """End the round under way without a result, if there is one."""
        return self.commands.ask(lambda: self.finetuning.end_round(reason))

    def follow(self, adapter: str) -> Future[int]:
        """Leave an adapter to its writer, another node; the future has its version when no step is under way."""
        return self.commands.ask_at_length(lambda: self.finetuning.follow(adapter))

    def follows(self, adapter: str) -> bool:
        """Whether another node of a fleet writes an adapter."""
        return adapter in self.trainer.pair_queues.followed

    def take_over(self, adapter: str, after: int) -> Future[int]:
        """Write an adapter from now on, by versions greater than `after`; the future is `rollback`'s."""
        return self.commands.ask_at_length(lambda: self.finetuning.take_over(adapter, after))

    def adopt(self, found: Snapshot) -> Future[int]:
        """Serve a version that another node made, under its number; the future also raises VersionsDiffer."""
        about = (found.adapter, found.weights, found.optimizer or None, found.form)
        build = partial(self.trainer.adapter_cache.build, *about)
        return self.commands.ask_at_length(lambda: self.finetuning.adopt(found.adapter, build, found.version))

    def publish_untrained(self, adapter: str) -> Future[None]:
        """Apply an untrained adapter as if it were trained, so that the cost of its answers does not change later."""
        return self.commands.ask(lambda: self.trainer.versions.publish_untrained(adapter))

    def forget(self, adapter: str, pair_ids: Collection[int] = ()) -> Future[None]:
        """Remove an adapter and its files, and train no more on `pair_ids`.

        The future raises UnknownAdapter, or OSError where files stay, which are never read again then. The engine
        thread does not wait for the disk; a later adapter of this name starts anew.
        """

        def run() -> Future[None]:
            self.sequences.forget(adapter)
            return self.finetuning.forget(adapter, pair_ids)

        return self.commands.ask_at_length(run)

    def block_saves(self, adapter: str, held: bool = True) -> None:
        """Save no new versions of a forgotten adapter whose files could not be removed (or, not `held`, again).

        The next try to remove the files would remove those, too.
        """
        left = self.adapter_files.left
        (left.add if held else left.discard)(adapter)

    def restore_outlier_history(self, pasts: dict[str, OutlierHistory]) -> None:
        """Restore each adapter's outlier history of before the restart; call it before its pairs are submitted."""
        self.commands.post(lambda: self.finetuning.restore_outlier_history(pasts))

    def test_with(self, neutral: list[TokenPair]) -> None:
        """Test every version with this neutral text, too; see `edged.align.language`."""
        self.commands.post(lambda: setattr(self.trainer.pair_queues, "neutral", neutral))

    def request_test(self, adapter: str) -> None:
        """Test an adapter's current version as soon as possible; a version that broke its language is rolled back."""
        self.commands.offer(lambda: self.trainer.request_test(adapter))

    def clear_alarm(self, adapter: str) -> None:
        """End the alarm about a burst of an adapter's pairs, since all its quarantined pairs were decided on."""
        self.commands.offer(lambda: self.trainer.pair_queues.clear_alarm(adapter))

    # -- settings and limits -----------------------------------------------------------------------------------------

    def configure(self, settings: Settings) -> Future[None]:
        """Change the settings between two iterations; those that `edged.reload` does not name must be the same."""
        return self.commands.ask(lambda: self.loop.configure(settings))

    def limit(self, limits: EngineLimits) -> None:
        """Keep to these limits from the next iteration on, as far as open requests allow."""
        self.commands.offer(lambda: self.limits.take(limits))

    # -- reading -----------------------------------------------------------------------------------------------------

    def adapters(self) -> dict[str, int]:
        """Return the current version of each adapter by name."""
        return dict(self.trainer.adapter_cache.versions)

    def version(self, adapter: str) -> int | None:
        """Return an adapter's current version, 0 before its first training; None for an unknown one."""
        return self.trainer.adapter_cache.versions.get(adapter)

    def weights(self, adapter: str) -> Future[tuple[int, dict[str, torch.Tensor]]]:
        """Copy an adapter's weights to the host: (version, tensors by PEFT's names); (0, {}) for one not in memory."""

        def copy() -> tuple[int, dict[str, torch.Tensor]]:
            state = self.trainer.adapter_cache.peek(adapter)
            return (state.version, state.tensors()) if state is not None else (0, {})

        return self.commands.ask(copy)

    def status(self) -> dict[str, Any]:
        """Return the engine's part of `GET /v1/status`; memory is in bytes."""
        model, adapter_cache, settings = self.model, self.trainer.adapter_cache, self.settings
        pages = self.runner.pages
        state_bytes = STATE_BYTES * adapter_weights(tuple(adapter_cache.spec.shapes.values()), adapter_cache.spec.rank)
        return {
            **self.stats.report(time.monotonic()),
            "model": {
                "name": self.subject.model,
                "path": self._path,
                "architecture": model.shape.architecture,
                "parameters": model.shape.parameters,
                "weight_bytes": model.shape.weight_bytes,
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": str(model.device),
                "max_context_tokens": self.max_context_tokens,
                "vocab_size": model.shape.vocab_size,
                "adapted_share": model.shape.adapted_share,
                "fingerprint": adapter_cache.spec.fingerprint,
                "trust_remote_code": settings.model.trust_remote_code,
            },
            "cost_model": self.scheduler.cost.report(),
            "scheduler": {
                "policy": settings.scheduler.policy,
                "decision_ms_p50": percentile(list(self.stats.decision_ms), 0.5),
                "lent_s": self.scheduler.lent_s,
            },
            "memory": {
                "weights_bytes": model.shape.weight_bytes,
                "kv_bytes": (pages.pool.pages - 1) * model.page_bytes(pages.page_size),
                "state_bytes": 0 if pages.states is None else pages.states.size_bytes,
                "adapters_bytes": model.lora.size_bytes + adapter_cache.count * state_bytes,
            },
            **self.runner.report(list(self.sequences.by_task.values())),
            "queue": self.queue(),
            "finetune": self.finetuning.report(),
            "fairness": self.scheduler.fairness_report(),
            "degraded": self.loop.degraded
            + ([model.trainable_error] if self.settings.align.enabled and model.trainable_error else []),
        }

    def load(self) -> NodeLoad:
        """Return the load by which a fleet places requests: without the database, as it is asked for all the time."""
        return self.loop.load(
            version=edged.__version__,
            model=self.subject.model,
            fingerprint=self.trainer.adapter_cache.spec.fingerprint,
            dtype=str(self.model.dtype).removeprefix("torch."),
            node=self.settings.api.node,
            pairs_queued=self.finetuning.pairs_queued,
            pairs_by_adapter=self.trainer.pair_queues.most_pairs(),
            trains=self.finetuning.opens_steps,
        )

    def queue(self) -> dict[str, int]:
        """Return the number of requests by stage, and of pairs that wait for training."""
        return {**self.sequences.queue_report(), "finetune": self.finetuning.pairs_queued}

    def iterations(self, since: int = 0) -> list[Iteration]:
        """Return the kept records of iterations after number `since`, oldest first."""
        return self.stats.since(since)
