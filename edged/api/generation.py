"""One completion being generated: its engine requests, the text that grows from their tokens, its record."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from sqlite_utils import Database

from edged.align.feedback.signals import note_next_turn
from edged.align.language import repetition
from edged.api.errors import ApiError, unavailable
from edged.api.limits import LimitReached
from edged.api.services import Services
from edged.engine.request import Event, FinishEvent, Request, TokenEvent
from edged.engine.sampling.params import Sampling
from edged.scheduler.task import ServiceClass
from edged.store import StoreError, utc_now, utc_text
from edged.store.completions import Choice, Completion, insert_completion, users_of_completion
from edged.store.user_quota import StorageFull
from edged.text.tokenizer import Detokenizer, StopMatcher, Tokenizer

log = logging.getLogger("edged.api")


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be generated. `messages` is a chat's, `prompt` a text completion's; both None: bare token ids."""

    completion_id: str
    object: Literal["chat.completion", "text_completion"]
    model: str
    created_s: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stops: tuple[str, ...]
    choices: int
    tenant: str
    """Whose share it counts as: the user, else the adapter, else the caller."""
    teaches: bool
    """Whether the next turn may count against the answer before it: the caller may train."""
    user: str | None = None
    adapter: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    prompt: str | None = None
    service: ServiceClass = ServiceClass.INTERACTIVE


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability with its best alternatives, and where its text begins in the answer (characters)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(slots=True)
class _PendingLogprob:
    entry: TokenLogprob
    end: int
    """Characters of the answer when this token was in."""


class ChoiceText:
    """One choice's text as it grows; `take_text` and `take_logprobs` give out what is new and certain."""

    def __init__(self, index: int, request_id: str, codec: Tokenizer, ask: Ask) -> None:
        self.index, self.request_id = index, request_id
        self.token_ids: list[int] = []
        self.text = ""
        self.finish: FinishEvent | None = None
        self.version = 0
        """The adapter's version that answered last."""
        self._codec, self._sampling = codec, ask.sampling
        self._detokenizer, self._stops = Detokenizer(codec), StopMatcher(ask.stops)
        self._fresh = ""
        self._seen = 0
        self._logprobs: list[_PendingLogprob] = []
        self.announced = False
        """Whether a stream has shown this choice yet."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.stopped_by is not None

    @property
    def reason(self) -> str:
        """Why it ended, in OpenAI's words."""
        if self.stopped:
            return "stop"
        return self.finish.reason if self.finish else ""

    def push(self, event: TokenEvent) -> None:
        """Take one sampled token in. Tokens after a stop string are nobody's; one that ends the answer has no text."""
        if self.stopped:
            return
        self.token_ids.append(event.token_id)
        self.version = event.version
        if event.token_id in self._sampling.stop_token_ids:
            return
        piece = self._detokenizer.push(event.token_id)
        if event.logprob is not None:
            entry = TokenLogprob(event.token_id, event.logprob, tuple(event.top or ()), self._seen)
            self._logprobs.append(_PendingLogprob(entry, self._seen + len(piece)))
        self._add(piece)

    def end(self, event: FinishEvent) -> None:
        """Take the end in: what was held back is certain now."""
        self.finish = event
        if self.stopped:
            return
        self._add(self._detokenizer.finish())
        if not self.stopped:
            self._release(self._stops.finish())

    def take_text(self) -> str:
        """Text that became certain since the last call."""
        fresh, self._fresh = self._fresh, ""
        return fresh

    def take_logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the tokens whose text is out."""
        count = len(self._logprobs)
        if self.finish is None or self.stopped:
            count = next((i for i, pending in enumerate(self._logprobs) if pending.end > len(self.text)), count)
        out, self._logprobs = self._logprobs[:count], self._logprobs[count:]
        return [pending.entry for pending in out]

    def record(self) -> Choice:
        """As the store keeps it."""
        finish = self.finish
        return Choice(
            choice=self.index,
            text=self.text,
            token_ids=tuple(self._codec.ids_of_text(self.token_ids, self.text) if self.stopped else self.token_ids),
            finish_reason=self.reason or "cancelled",
            completion_tokens=len(self.token_ids),
            cached_tokens=finish.cached_tokens if finish else 0,
            queue_ms=finish.queue_s * 1e3 if finish else 0.0,
            ttft_ms=finish.ttft_s * 1e3 if finish else 0.0,
            total_ms=finish.total_s * 1e3 if finish else 0.0,
            repetition=repetition(self.token_ids),
        )

    def _add(self, piece: str) -> None:
        self._seen += len(piece)
        # As with end tokens, an answer does not stop before it has `min_tokens`.
        if len(self.token_ids) <= self._sampling.min_tokens:
            self._release(piece)
        else:
            self._release(self._stops.push(piece))

    def _release(self, text: str) -> None:
        self.text += text
        self._fresh += text


class Generation:
    """All choices of one completion. Use: `start`, then iterate `updates` to its end, then `store`; else `abandon`."""

    def __init__(self, services: Services, ask: Ask) -> None:
        self.ask, self._services = ask, services
        self.answers = [
            ChoiceText(index, f"{ask.completion_id}-{index}", services.codec, ask) for index in range(ask.choices)
        ]
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        """Events, and the error of a choice that was not let in."""
        self._unfinished: dict[str, ChoiceText] = {}
        self._entering: asyncio.Task[None] | None = None
        self._inside: set[str] = set()
        """Requests that the engine has."""
        self._outside = 0
        """Choices that have not entered, once the first has."""
        self._written: Future[tuple[int, ...]] | None = None
        self._signalled = False
        """Whether the record led to a signal about the answer before."""

    @property
    def version(self) -> int:
        """The adapter's version that answered; 0 is the base model."""
        return max(answer.version for answer in self.answers)

    async def start(self) -> None:
        """Submit the first choice when it is the tenant's turn, and the others one by one behind the caller.

        Their prompt is computed once. Raises EngineBusy, RequestRefused.
        """
        self._unfinished = {answer.request_id: answer for answer in self.answers}
        asked_s = time.monotonic()
        await self._services.admission.enter(self.ask.tenant, self.ask.choices)
        self._outside = self.ask.choices - 1
        self._submit(self.answers[0], asked_s)
        if self._outside:
            self._entering = asyncio.create_task(self._enter_others(asked_s))

    async def _enter_others(self, asked_s: float) -> None:
        """Submit the other choices, each when it is the tenant's turn."""
        try:
            for answer in self.answers[1:]:
                await self._services.admission.enter(self.ask.tenant, begun=True)
                self._outside -= 1
                self._submit(answer, asked_s)
        except Exception as error:
            # Whoever iterates `updates` hears of it.
            self._queue.put_nowait(error)

    def _submit(self, answer: ChoiceText, asked_s: float) -> None:
        """Hand a choice that has entered to the engine."""
        ask, services = self.ask, self._services
        request = Request(
            request_id=answer.request_id,
            prompt_ids=ask.prompt_ids,
            sampling=_nth(ask.sampling, answer.index),
            adapter=ask.adapter,
            service=ask.service,
            tenant=ask.tenant if services.settings.cache.share_across == "user" else "",
            user=ask.user,
        )
        services.event_router.expect([request.request_id], self._queue)
        self._inside.add(answer.request_id)
        try:
            services.engine.submit(request, asked_s)
        except Exception:
            self._cancel()
            raise

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and of all answers until now."""
        return len(self.ask.prompt_ids) + sum(len(answer.token_ids) for answer in self.answers)

    async def updates(self) -> AsyncIterator[list[ChoiceText]]:
        """Choices that something happened to, until all have ended. Raises ApiError when the engine gave one up."""
        while self._unfinished:
            touched: dict[int, ChoiceText] = {}
            for event in await _take_all(self._queue):
                if isinstance(event, BaseException):
                    raise event
                answer = self._unfinished.get(event.request_id)
                if answer is None:
                    continue
                self._apply(event, answer)
                touched[answer.index] = answer
            if touched:
                yield list(touched.values())

    async def store(self) -> None:
        """Make the completion known under its id. A store that fails is logged: the answer is good without it.

        One that belongs to nobody is not kept: no feedback on it is possible, and nobody could have it erased.
        """
        if self.ask.adapter is None:
            return
        try:
            await asyncio.shield(asyncio.wrap_future(self._write()))
        except StoreError as error:
            log.error("completion %s was not stored, feedback cannot name it: %s", self.ask.completion_id, error)

    def abandon(self) -> None:
        """The client is gone or will get an error: free the engine at once, keep what the client has seen."""
        self._cancel()
        if self._written is None and self.ask.adapter is not None and any(answer.text for answer in self.answers):
            try:
                self._write()
            except StoreError as error:
                log.warning("an abandoned completion was not stored: %s", error)

    def facts(self) -> dict[str, Any]:
        """What the log tells of it: counts and times, no text."""
        ended = [answer.finish for answer in self.answers if answer.finish is not None]
        facts: dict[str, Any] = {
            "version": self.version,
            "choices": len(self.answers),
            "completion_tokens": sum(len(answer.token_ids) for answer in self.answers),
        }
        if ended:
            facts["ttft_ms"] = round(max(event.ttft_s for event in ended) * 1e3, 1)
            facts["queue_ms"] = round(max(event.queue_s for event in ended) * 1e3, 1)
            facts["finish_reason"] = next((answer.reason for answer in self.answers if answer.finish), "")
        return facts

    def _write(self) -> Future[tuple[int, ...]]:
        """Queue the record; what follows from it is learned even if nobody waits for this any more."""
        taught = self._may_teach()
        self._written = self._services.store.write(lambda db: self._record(db, taught))
        self._written.add_done_callback(self._services.feedback_intake.learn_from)
        if taught:
            loop = asyncio.get_running_loop()
            self._written.add_done_callback(lambda _: _tell(loop, self._settle_feedback))
        return self._written

    def _may_teach(self) -> bool:
        """Whether this may count against the answer before it; it counts as feedback until it turns out to be none."""
        if not (self.ask.teaches and self.ask.messages):
            return False
        try:
            self._services.limits.feedback(self.ask.tenant)
        except LimitReached as error:
            log.info("completion %s teaches nothing about the answer before: %s", self.ask.completion_id, error)
            return False
        return True

    def _settle_feedback(self) -> None:
        """The record is written: only a signal counts."""
        if not self._signalled:
            self._services.limits.no_feedback(self.ask.tenant)

    def _apply(self, event: Event, answer: ChoiceText) -> None:
        if isinstance(event, TokenEvent):
            stopped = answer.stopped
            answer.push(event)
            if answer.stopped and not stopped:
                self._services.engine.cancel(answer.request_id, "stop")
            return
        answer.end(event)
        del self._unfinished[event.request_id]
        self._inside.discard(event.request_id)
        self._services.admission.leave()
        if event.reason == "error":
            raise ApiError(500, event.error or "the engine gave this request up", code="engine_failed")
        if event.reason == "cancelled":
            raise unavailable("the daemon stopped before the answer was complete", "cancelled")

    def _cancel(self) -> None:
        if self._entering is not None:
            self._entering.cancel()
        self._services.admission.withdraw(self._outside)
        self._outside = 0
        self._services.event_router.drop(self._unfinished)
        for request_id in self._inside:
            self._services.engine.cancel(request_id)
            self._services.admission.leave()
        self._inside.clear()
        self._unfinished.clear()

    def _record(self, db: Database, taught: bool) -> tuple[int, ...]:
        """Write the completion; returns the pairs that it leads to as the turn after another answer, if it may."""
        ask, now = self.ask, utc_now()
        completion = Completion(
            id=ask.completion_id,
            created_at=utc_text(now),
            object=ask.object,
            model=ask.model,
            prompt_ids=ask.prompt_ids,
            choices=tuple(answer.record() for answer in self.answers),
            user=ask.user,
            adapter=ask.adapter,
            version=self.version,
            messages=ask.messages,
            prompt=ask.prompt,
        )
        insert_completion(db, completion)
        self._services.footprint.added(db, ask.adapter or "", completion.size)
        return self._teach(db, completion, now) if taught else ()

    def _teach(self, db: Database, completion: Completion, now: datetime) -> tuple[int, ...]:
        """What a completion says about the answer before it, if there is room for that; the pairs it leads to."""
        footprint = self._services.footprint
        try:
            for user in users_of_completion(db, completion.id):
                footprint.demand_room(db, user)
        except StorageFull as error:
            log.info("completion %s teaches nothing about the answer before: %s", completion.id, error)
            return ()
        result = note_next_turn(db, completion.id, now, self._services.settings.feedback)
        if result is None or result.duplicate:
            return ()
        self._signalled = True
        footprint.learned(db, completion.learner or "", result.pair_ids)
        return result.pair_ids


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Have the event loop call something, from any thread; where it has ended, nobody counts any more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def _nth(sampling: Sampling, index: int) -> Sampling:
    """The sampling of choice `index`: a seed must not make all choices equal."""
    return sampling if sampling.seed is None or not index else replace(sampling, seed=sampling.seed + index)


async def _take_all(queue: asyncio.Queue[Any]) -> list[Any]:
    """Wait for an event; take all that are there, so that a slow reader catches up in one go."""
    events = [await queue.get()]
    while not queue.empty():
        events.append(queue.get_nowait())
    return events
