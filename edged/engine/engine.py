"""The engine as other threads use it: commands go to its thread, events and records come through two callbacks."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from edged.align.adapters.adapter import AdapterFiles
from edged.align.feedback.outliers import OutlierHistory
from edged.align.feedback.pair import Record, TokenPair
from edged.engine.build import EngineParts, build_parts_apart
from edged.engine.command_queue import STOPPING
from edged.engine.request import EngineBusy, EngineStopping, Event, FinishReason, Request, RequestRefused
from edged.engine.stats.iterations import Iteration
from edged.governors.limits import EngineLimits, Use
from edged.settings.load import Settings

log = logging.getLogger("edged.engine")
T = TypeVar("T")


class Engine:
    """Serves requests and learns from pairs on one thread; every public method may be called from any thread."""

    def __init__(self, parts: EngineParts) -> None:
        self.settings, self.max_context_tokens, self.stats = parts.settings, parts.max_context_tokens, parts.stats
        self.parts, self._commands, self._loop = parts, parts.commands, parts.loop
        self._sequences, self._finetuning, self._limits = parts.sequences, parts.finetuning, parts.limits
        self._trainer = parts.trainer
        self._requests_waiting = 0
        """Requests among the commands."""
        self._counting = threading.Lock()
        self.heartbeat = self._loop.heartbeat
        """Its `last_sign_s` tells whether the thread goes on."""
        self._thread = threading.Thread(target=self._loop.run, name="edged-engine", daemon=True)

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
        return cls(build_parts_apart(settings, model_dir, data_dir, deliver, journal))

    @property
    def error(self) -> str | None:
        """Why the engine ended without having been stopped; None while it has not."""
        return self._loop.error

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self, drain_s: float) -> None:
        """Refuse new requests, finish running ones within `drain_s`, cancel the rest, save adapters."""
        self._commands.stop(time.monotonic() + drain_s)
        if self._thread.is_alive():
            self._thread.join()

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, asked_s: float | None = None) -> None:
        """Queue a request; `asked_s` is when it was asked for, where that is some time ago (monotonic clock).

        Raises EngineBusy or RequestRefused.
        """
        if self.error or self._commands.stopping:
            raise EngineStopping(self.error or STOPPING)
        total = len(request.prompt_ids) + request.sampling.max_tokens
        if not request.prompt_ids:
            raise RequestRefused("the prompt is empty")
        if total > self.max_context_tokens:
            raise RequestRefused(
                f"prompt ({len(request.prompt_ids)} tokens) and max_tokens ({request.sampling.max_tokens}) exceed the "
                f"context of {self.max_context_tokens} tokens"
            )
        if self._sequences.waiting + self._requests_waiting >= self.settings.serving.max_queue:
            with self._counting:
                self.stats.outcomes["refused"] += 1
            raise EngineBusy(f"{self.settings.serving.max_queue} requests are waiting (serving.max_queue)")
        self._requests_waiting += 1
        submitted = time.monotonic()

        def take() -> None:
            self._requests_waiting -= 1
            try:
                self._sequences.add(request, submitted, asked_s)
            except Exception as error:
                log.exception("request %s could not be queued", request.request_id)
                self._sequences.cancel(request.request_id, "error", time.monotonic(), str(error))

        self._commands.post(take)

    def cancel(self, request_id: str, reason: FinishReason = "cancelled") -> None:
        """End a request; its FinishEvent tells `reason`. Unknown or finished ids are ignored."""
        with contextlib.suppress(EngineStopping):
            self._commands.post(lambda: self._sequences.cancel(request_id, reason, time.monotonic()))

    # -- learning ----------------------------------------------------------------------------------------------------

    def submit_pairs(self, pairs: list[TokenPair]) -> None:
        """Queue preference pairs for learning (or, by their state, for tests and replay)."""
        if pairs:
            # An engine that has ended learns nothing more; the pairs stay queued in the store.
            with contextlib.suppress(EngineStopping):
                self._commands.post(lambda: self._finetuning.submit(pairs))

    def rollback(self, adapter: str, version: int) -> Future[int]:
        """Publish an earlier version as a new one; the future has its number when it is on disk.

        It raises UnknownAdapter, UnknownVersion, and StoreError where the new version is served but not on disk.
        """
        return self._once_saved(adapter, lambda: self._trainer.versions.rollback(adapter, version))

    def import_adapter(self, adapter: str, weights: dict[str, torch.Tensor], reason: str) -> Future[int]:
        """Publish weights (PEFT's names, checked) as an adapter's newest version; the future is `rollback`'s."""
        return self._once_saved(adapter, lambda: self._trainer.versions.import_adapter(adapter, weights, reason))

    def _once_saved(self, adapter: str, publish: Callable[[], int]) -> Future[int]:
        """The number of what is published, when it is on disk."""
        return self._ask_at_length(lambda: self._finetuning.publish(adapter, publish))

    def _ask_at_length(self, command: Callable[[], tuple[T, Future[None]]]) -> Future[T]:
        """What a command has to say when what it began, and returns besides, has ended; or what either raises."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                value, begun = command()
            except Exception as error:
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(error)
            else:
                begun.add_done_callback(lambda _: _follow(answer, begun, value))

        self._commands.post(run)
        return answer

    def introduce(self, adapter: str) -> Future[None]:
        """Have an adapter that has learnt nothing applied as if it had: what its answers cost does not change later."""
        return self._commands.ask(lambda: self._trainer.versions.introduce(adapter))

    def forget(self, adapter: str, pair_ids: Collection[int] = ()) -> Future[None]:
        """Remove an adapter and its files, and learn nothing more from `pair_ids`; the future raises UnknownAdapter, or
        OSError where files stay, which are never read again then.

        No caller waits for the disk, and what the adapter learns from now on is new.
        """

        def run() -> tuple[None, Future[None]]:
            self._sequences.forget(adapter)
            return None, self._finetuning.forget(adapter, pair_ids)

        return self._ask_at_length(run)

    def hold_back(self, adapter: str, held: bool = True) -> None:
        """Files of a forgotten adapter could not be removed: save nothing new of it, which the next try would remove.

        Callable from any thread.
        """
        left = self.adapter_files.left
        (left.add if held else left.discard)(adapter)

    def held_back(self, adapter: str) -> bool:
        """Whether files of this adapter, which was forgotten, could not be removed."""
        return adapter in self.adapter_files.left

    def recall(self, pasts: dict[str, OutlierHistory]) -> None:
        """What was usual for each adapter when the daemon last ended; to be told before its pairs are submitted."""
        self._commands.post(lambda: self._finetuning.recall(pasts))

    def test_with(self, neutral: list[TokenPair]) -> None:
        """Test every version with this neutral text, too: see `edged.align.language`."""
        self._commands.post(lambda: setattr(self._trainer.pair_queues, "neutral", neutral))

    def examine(self, adapter: str) -> None:
        """Have an adapter's present version tested as soon as can be; one whose language is broken is taken back."""
        with contextlib.suppress(EngineStopping):
            self._commands.post(lambda: self._trainer.examine(adapter))

    def calm(self, adapter: str) -> None:
        """All of an adapter's quarantined pairs were decided about: a burst's alarm ends."""
        with contextlib.suppress(EngineStopping):
            self._commands.post(lambda: self._trainer.pair_queues.calm(adapter))

    def pause_finetuning(self, paused: bool) -> None:
        """Stop opening fine-tune steps (those under way end), or go on."""
        self._commands.post(lambda: self._finetuning.pause(paused))

    # -- settings and limits -----------------------------------------------------------------------------------------

    def configure(self, settings: Settings) -> Future[None]:
        """Go on under other settings, between two iterations; those that `edged.reload` does not name are the same."""

        def configure() -> None:
            self._loop.configure(settings.scheduler)
            self.settings = self.parts.live.now = settings

        return self._commands.ask(configure)

    def limit(self, limits: EngineLimits) -> None:
        """Keep to these limits from the next iteration on, as far as requests at hand allow."""
        with contextlib.suppress(EngineStopping):
            self._commands.post(lambda: self._limits.take(limits))

    def use(self) -> Use:
        """What governors see."""
        return self._limits.use()

    # -- what there is to see ----------------------------------------------------------------------------------------

    @property
    def adapter_files(self) -> AdapterFiles:
        """Where the adapters' versions are."""
        return self._trainer.adapter_cache.files

    def adapters(self) -> dict[str, int]:
        """Current version by adapter name."""
        return dict(self._trainer.adapter_cache.versions)

    def version(self, adapter: str) -> int | None:
        """An adapter's current version, 0 before it has learned; None of an unknown one."""
        return self._trainer.adapter_cache.versions.get(adapter)

    def weights(self, adapter: str) -> Future[tuple[int, dict[str, torch.Tensor]]]:
        """An adapter's version and its weights by PEFT's names, copied to the host; version 0 of one not in memory."""

        def copy() -> tuple[int, dict[str, torch.Tensor]]:
            state = self._trainer.adapter_cache.peek(adapter)
            return (state.version, state.tensors()) if state is not None else (0, {})

        return self._commands.ask(copy)

    def status(self) -> dict[str, Any]:
        """What `GET /v1/status` shows of the engine."""
        return {
            **self.stats.report(time.monotonic()),
            **self.parts.report(),
            "queue": self.queue(),
            "finetune": self._finetuning.report(),
            "degraded": self._loop.degraded,
        }

    def finetune(self) -> dict[str, Any]:
        """The status' part on fine-tuning, alone."""
        return self._finetuning.report()

    def queue(self) -> dict[str, int]:
        """Requests by stage, and pairs that wait to be learned."""
        return {**self._sequences.queue_report(), "finetune": self._finetuning.pairs_queued}

    def iterations(self, since: int = 0) -> list[Iteration]:
        """Records of the iterations after number `since` that are still kept, oldest first."""
        return self.stats.iterations.since(since)

    def busy(self) -> dict[str, Any]:
        """The status' sums of where the time went, alone."""
        return asdict(self.stats.busy)


def _follow(future: Future[T], done: Future[None], value: T) -> None:
    """Have a future end with `value`, or as one that is done ended, if anybody still waits for it."""
    if not future.set_running_or_notify_cancel():
        return
    error = done.exception()
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
