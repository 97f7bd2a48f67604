"""A completion being generated: its engine requests, the text of each choice, and its record in the store."""

import asyncio
import contextlib
import json
import logging
import math
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any
from zlib import crc32

from sqlite_utils import Database

from edged.align.feedback.signals import FeedbackResult, note_next_turn
from edged.align.language import repetition
from edged.align.taste.edits import EditedText, Operator
from edged.api.admission import LimitReached
from edged.api.best_of import Blocks, Chooser
from edged.api.requests import BegunChoice, ChatRequest, CompletionRequest
from edged.api.runs import ApplicationRun
from edged.api.services import Services
from edged.engine.request import EngineBusy, Event, FinishEvent, FinishReason, Request, RequestRefused, TokenEvent
from edged.engine.sampling.params import Sampling
from edged.http.errors import ApiError, bad_request
from edged.http.json_format import Json
from edged.runtime.pacer import LAG_S, Pacer
from edged.scheduler.reader import TOKENS_PER_WORD, Pace
from edged.store import StoreError, utc_now, utc_text
from edged.store.completions import Choice, Completion, insert_completion, users_of_completion
from edged.store.jobs.jobs import came_since
from edged.store.user_quota import PairQueueFull, StorageFull
from edged.text.answer_parser import ParsedAnswer
from edged.text.grammar import NOT_FOLLOWED
from edged.text.tokenizer import Detokenizer, StopMatcher, Tokenizer

log = logging.getLogger("edged.api")
STORED_WITHIN_S = 5.0
"""Time for which an answer, or feedback, waits for the database."""
_LEAST_WAIT_S = 0.25
"""The least time for which candidates are waited for after the first answer."""
_PARSED_CHARS = 32
"""Characters of an answer that are parsed at once, where nobody waits for them: each time costs as much."""
_TEACHES_NOTHING = "completion %s teaches nothing about the answer before: %s"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability with its top alternatives; its text begins at `offset` in the answer (characters)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int
    end: int = 0
    """Characters of the answer up to and including this token."""


class ChoiceText:
    """The text of one choice as it grows; `take_text` and `take_logprobs` return what is new and final."""

    def __init__(
        self,
        index: int,
        request_id: str,
        tokenizer: Tokenizer,
        sampling: Sampling,
        stops: Sequence[str],
        operator: Operator | None = None,
        stream: bool = True,
        parsed: ParsedAnswer | None = None,
        one_call: bool = False,
    ) -> None:
        """`operator` is the change that is made to the text: as it grows in a `stream`, else at its end.

        `parsed` tells the content of the text from reasoning and calls; with `one_call` the answer ends behind a call.
        """
        self.index, self.request_id = index, request_id
        self.token_ids: list[int] = []
        self._raw = ""
        """The text of the tokens."""
        self._edited, self._grows = EditedText(operator) if operator is not None else None, stream
        self.finish: FinishEvent | None = None
        self.version = 0
        """The adapter's version that sampled the latest token."""
        self._tokenizer, self._sampling = tokenizer, sampling
        self._detokenizer, self._stops = Detokenizer(tokenizer, parsed is not None), StopMatcher(stops)
        self._parsed, self._one_call = parsed, one_call
        self._unparsed = ""
        """Text of the latest tokens that is parsed with those that follow."""
        self._each = bool(stops) or one_call or sampling.logprobs is not None
        """Whether it must be known at each token what the content is."""
        self.reasoning_tokens = 0
        self._told_reasoning = 0
        """Characters that `take_reasoning` has returned."""
        self._taken = 0
        """Characters that `take_text` has looked at."""
        self._left = 0
        """Characters that it has returned."""
        self._told = 0
        """Tokens that `take_progress` has returned."""
        self._seen = 0
        """Characters of all tokens, with those that a stop string may still remove."""
        self._logprobs: list[TokenLogprob] = []
        self.announced = False
        """Whether a client has a chunk of this choice."""
        self.ended = False
        """Whether it has the last one."""
        self.told_calls = 0
        """The number of calls that it has."""
        self.empty = False
        """Whether the token that is drawn is no part of it: what is asked for is the prompt's log-probabilities."""
        self.prompt: Sequence[tuple[float, list[tuple[int, float]]]] = ()
        """Log-probabilities and likeliest tokens of the prompt's second token and those that follow."""
        self.pacer: Pacer | None = None
        """Holds text back where the stream is to be smooth."""

    @property
    def text(self) -> str:
        """The text so far that is final, as it is edited."""
        return self._raw if self._edited is None else self._edited.text

    @property
    def edited(self) -> bool:
        """Whether the text is another than that of its tokens."""
        return self.text != self._raw

    @property
    def reasoning(self) -> str:
        """The reasoning before the text."""
        return self._parsed.reasoning if self._parsed is not None else ""

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The tools that the answer calls."""
        return self._parsed.calls[: 1 if self._one_call else None] if self._parsed is not None else []

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens, where they were asked for; -inf of an empty answer."""
        return fmean(entry.logprob for entry in self._logprobs) if self._logprobs else -math.inf

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found, or the only call that is wanted."""
        return self._stops.stopped_by is not None or (self._one_call and bool(self.calls))

    @property
    def reason(self) -> str:
        """The finish reason in OpenAI's words; "" while the choice runs."""
        reason = "stop" if self.stopped else self.finish.reason if self.finish else ""
        reason = "length" if reason == "stop" and self.empty else reason
        return "tool_calls" if reason == "stop" and self.calls else reason

    def push(self, event: TokenEvent) -> bool:
        """Append one sampled token; return whether it completes a stop string.

        Tokens after a stop string are ignored; an end token has no text.
        """
        if self.stopped:
            return False
        self.version, self.prompt = event.version, event.prompt or self.prompt
        if self.empty:
            return False
        self.token_ids.append(event.token_id)
        if event.token_id in self._sampling.stop_token_ids:
            if self._sampling.prompt_logprobs and event.logprob is not None:
                # Programs that score a prompt cut the entry of the drawn token off, whatever it is.
                top = tuple(event.top or ())
                self._logprobs.append(TokenLogprob(event.token_id, event.logprob, top, self._seen, self._seen))
            return False
        start = self._seen
        self._add(self._detokenizer.push(event.token_id))
        if event.logprob is not None:
            self._logprobs.append(
                TokenLogprob(event.token_id, event.logprob, tuple(event.top or ()), start, self._seen)
            )
        if self._parsed is not None and self._parsed.thinking:
            self.reasoning_tokens = len(self.token_ids)
        return self.stopped

    def end(self, event: FinishEvent) -> None:
        """Record the end: text that was held back for a stop string or an unfinished character is final now."""
        self.finish = event
        if not self.stopped:
            self._add(self._detokenizer.finish())
        if self._parsed is not None and not self.stopped:
            # An end token may be the mark that ends a call.
            ends = self.token_ids and self.token_ids[-1] in self._sampling.stop_token_ids
            self._read(self._parsed.closing or self._tokenizer.mark_of(self.token_ids[-1]) if ends else "")
            self._push_content(self._parsed.finish())
        if self._stops.stopped_by is None:
            self._raw += self._stops.finish()
        if self._edited is not None and self.calls and not self._edited.text:
            # What comes with a call is served as the model wrote it.
            self._edited = None
        if self._edited is not None:
            # Behind a stop string, and where it is cut, an answer has no end.
            self._edited.end(self._raw, whole=self.reason == "stop" and not self.stopped)

    def take_text(self) -> str:
        """Return the text that became final since the last call, or as much as leaves by now where it is paced."""
        self._read("")
        # What a resumed stream's client has may be more than what its tokens so far make final.
        fresh, self._taken = self.text[self._taken :], max(self._taken, len(self.text))
        if self.pacer is not None:
            now = time.monotonic()
            self.pacer.push(fresh, now)
            fresh = self.pacer.finish() if self.finish or self.stopped else self.pacer.take(now)
        self._left += len(fresh)
        return fresh

    def take_reasoning(self) -> str:
        """Return the reasoning that came since the last call."""
        fresh, self._told_reasoning = self.reasoning[self._told_reasoning :], len(self.reasoning)
        return fresh

    def take_logprobs(self) -> list[TokenLogprob]:
        """Return the log-probabilities of further tokens whose text is final."""
        count = len(self._logprobs)
        if self.finish is None or self.stopped:
            count = next((i for i, entry in enumerate(self._logprobs) if entry.end > len(self.text)), count)
        out, self._logprobs = self._logprobs[:count], self._logprobs[count:]
        return out

    def take_progress(self) -> Json:
        """Return what a client has now: the tokens since the last call, and the characters of all.

        Tokens whose log-probabilities have not left are not among them: they are drawn again, and equal.
        """
        token_ids = self.token_ids[: len(self.token_ids) - len(self._logprobs)]
        fresh, self._told = token_ids[self._told :], len(token_ids)
        return {"token_ids": fresh, "chars": self._left, "version": self.version}

    def resume(self, begun: BegunChoice, version: int) -> None:
        """Take what a client has of this choice, which was sampled elsewhere by the same `version`."""
        for token_id in begun.token_ids:
            self.push(TokenEvent(self.request_id, token_id, version))
        self._read("")
        self._taken, self._left, self._told_reasoning = begun.chars, begun.chars, len(self.reasoning)
        self._told, self.announced, self.ended = len(self.token_ids), True, begun.ended
        self.told_calls = begun.calls

    @property
    def ended_by(self) -> FinishReason | None:
        """The reason why no token follows those that are there, or None."""
        if self.stopped or (self.token_ids and self.token_ids[-1] in self._sampling.stop_token_ids):
            return "stop"
        return "length" if len(self.token_ids) >= self._sampling.max_tokens else None

    def record(self) -> Choice:
        """Return the choice as the store keeps it."""
        finish = self.finish or FinishEvent(self.request_id, "cancelled")
        token_ids, beside = self.token_ids, self._beside()
        if beside and (self.edited or self.stopped):
            # The chat template writes it anew where it is learned.
            token_ids = []
        elif self.edited:
            ending = [token for token in token_ids[-1:] if token in self._tokenizer.eos_ids]
            token_ids = [*self._tokenizer.encode_answer(self.text), *ending]
        elif self.stopped:
            token_ids = self._tokenizer.ids_of_text(token_ids, self.text)
        return Choice(
            choice=self.index,
            text=self.text,
            token_ids=tuple(token_ids),
            finish_reason=self.reason or "cancelled",
            completion_tokens=len(self.token_ids),
            cached_tokens=finish.cached_tokens,
            queue_ms=finish.queue_s * 1e3,
            ttft_ms=finish.ttft_s * 1e3,
            total_ms=finish.total_s * 1e3,
            repetition=repetition(self.token_ids),
            beside=beside,
        )

    def _beside(self) -> dict[str, Any] | None:
        """Return reasoning and calls, as chat templates take them: the arguments of calls are objects."""
        beside: dict[str, Any] = {"reasoning_content": self.reasoning} if self.reasoning else {}
        functions = [call["function"] for call in self.calls]
        if functions:
            beside["tool_calls"] = [
                {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
                for call, function in zip(self.calls, functions, strict=True)
            ]
        return beside or None

    def _add(self, piece: str) -> None:
        if self._parsed is None:
            return self._push_content(piece)
        self._unparsed += piece
        if self._each or not self._parsed.begun or len(self._unparsed) >= _PARSED_CHARS:
            self._read("")

    def _read(self, piece: str) -> None:
        """Parse the text that is not yet, and a further piece."""
        piece, self._unparsed = self._unparsed + piece, ""
        if self._parsed is not None and piece and not self.stopped:
            self._push_content(self._parsed.push(piece))

    def _push_content(self, piece: str) -> None:
        self._seen += len(piece)
        # As with end tokens, stop strings have no effect before `min_tokens`.
        self._raw += piece if len(self.token_ids) <= self._sampling.min_tokens else self._stops.push(piece)
        if self._edited is not None and self._grows:
            self._edited.push(self._raw)


def prompt_sum(token_ids: Sequence[int]) -> int:
    """Return a checksum of a prompt's tokens: behind other ones an answer cannot go on."""
    return crc32(array("q", token_ids))


@dataclass(eq=False)
class Generation:
    """All choices of one completion. Use: `start`, then iterate `updates` to its end, then `store`; else `abandon`."""

    services: Services
    body: ChatRequest | CompletionRequest
    completion: Completion
    """The completion's record without answers; its prompt is the one that is served."""
    asked_ids: Sequence[int]
    """The prompt's tokens as the store keeps them, for training: without a written preference."""
    sampling: Sampling
    tenant: str
    """The tenant that the completion counts for: the user, else the adapter, else the caller."""
    fairness_key: str
    """The name under which it takes turns with others: see `Caller.turn`."""
    teaches: bool
    """Whether this turn may count as feedback against the answer before it: the caller may train."""
    pace: Pace | None = None
    """The pace at which each of the answers is read, if any is."""
    chooser: Chooser | None = None
    """The chooser of the answer among several, where it is the user's taste model that chooses."""
    contrast: bool = False
    """Whether some of the answers are the base's, so that a pick tells more than among answers that are alike."""
    operator: Operator | None = None
    """The change that the user makes to answers, which is made to those that are not the base's."""
    kept: bool = True
    """Whether it is stored, so that feedback can name it, and its turn may be some."""
    run: ApplicationRun = field(init=False)
    """The run of an application that it belongs to, once it is known."""

    def __post_init__(self) -> None:
        begun = self.body.begun
        self.created_s = begun.created if begun is not None else int(time.time())
        self.prompt_sum = prompt_sum(self.completion.prompt_ids)
        self.answers = [self._choice(index) for index in range(self.body.drawn)]
        if begun is not None:
            for answer, told in zip(self.answers, begun.choices, strict=True):
                if told is not None:
                    answer.resume(told, begun.version)
        self.chosen_of = 1
        """The number of answers, or of continuations of a block, that the answer was chosen from."""
        self.unchosen_tokens = 0
        """Tokens of the answers that a request's `best_of` drew and that were not chosen."""
        self._candidates: dict[str, ChoiceText] = {}
        """Answers that are drawn beside the first in room that nothing else needs, by request."""
        self._blocks: Blocks | None = None
        self._drawing: asyncio.Task[None] | None = None
        reading = self.body.reading
        if reading is not None and self.pace is not None and reading.deliver == "smooth":
            words_per_s, lag_s = self.pace.tokens_per_s / TOKENS_PER_WORD, math.inf if reading.speech else LAG_S
            for answer in self.answers:
                answer.pacer = Pacer(words_per_s, lag_s)
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        """Engine events, and the error of a choice that was not admitted."""
        self._unfinished = {answer.request_id: answer for answer in self.answers}
        self._entering: asyncio.Task[None] | None = None
        self._first_came = asyncio.Event()
        """Set at the first event of the first choice."""
        self._inside: set[str] = set()
        """Ids of the requests that the engine has."""
        self._outside = 0
        """Choices that still wait for admission, once the first has entered."""
        self._written: Future[FeedbackResult | None] | None = None

    def _choice(self, index: int) -> ChoiceText:
        tokenizer, known = self.services.tokenizer, self.completion
        about = index, f"{known.id}-{index}", tokenizer, self.sampling, self.body.stops
        operator = None if index in self.base_choices else self.operator
        parsed, one_call = None, False
        if isinstance(self.body, ChatRequest):
            parsed = tokenizer.parsed(known.prompt_ids, self.tools, bool(self.body.called))
            one_call = self.body.parallel_tool_calls is False
        choice = ChoiceText(*about, operator, bool(self.body.stream), parsed, one_call)
        choice.empty = self.body.answer_tokens == 0
        return choice

    @property
    def tools(self) -> list[Any] | None:
        """The tools that answers may call; None for none."""
        return (self.completion.template_arguments or {}).get("tools")

    @property
    def edited(self) -> bool:
        """Whether an answer was edited as its user does."""
        return any(answer.edited for answer in self.answers)

    @property
    def resumable(self) -> bool:
        """Whether another node of a fleet could go on: not where answers are edited, or some are the base's."""
        return self.body.resume is not None and self.operator is None and not self.contrast

    @property
    def is_chat(self) -> bool:
        """Whether this is a chat completion; else a text completion."""
        return self.completion.messages is not None

    @property
    def version(self) -> int:
        """The newest of the adapter's versions that sampled a token; 0 is the base model."""
        return max(answer.version for answer in self.answers)

    @property
    def base_choices(self) -> range:
        """The choices that are the base's."""
        count = self.body.drawn
        return range(count - count // 2 if self.contrast else count, count)

    async def start(self) -> None:
        """Submit the first choice when it is the tenant's turn, and the others one by one in a task.

        Their prompt is computed once. Raises EngineBusy and RequestRefused.
        """
        asked_s = time.monotonic()
        await self.services.admission.enter(self.fairness_key, len(self.answers))
        self._outside = len(self.answers) - 1
        self._submit(self.answers[0], asked_s)
        if self._outside:
            self._entering = asyncio.create_task(self._enter_others(asked_s))

    async def _enter_others(self, asked_s: float) -> None:
        """Submit the other choices, each when it is the tenant's turn.

        While others ask, too, they come after the first one's first token: clients that leave before it begin no more.
        """
        try:
            if self.services.admission.several_ask:
                await self._first_came.wait()
            for answer in self.answers[1:]:
                await self.services.admission.enter(self.fairness_key, begun=True)
                self._outside -= 1
                self._submit(answer, asked_s)
        except Exception as error:
            # `updates` raises it.
            self._queue.put_nowait(error)

    def _submit(self, answer: ChoiceText, asked_s: float) -> None:
        """Submit an admitted choice to the engine, and candidates beside it where there is room."""
        services = self.services
        if reason := answer.ended_by:
            self._inside.add(answer.request_id)
            self._queue.put_nowait(FinishEvent(answer.request_id, reason))
            return
        request = self._request(answer)
        if self.chooser is not None and self.body.stream and not self.tools:
            blocks = Blocks(services, request, self.chooser, asked_s, self._queue.put_nowait)
            try:
                begun = blocks.begin()
            except Exception:
                services.admission.leave(self.fairness_key)
                self._cancel()
                raise
            if begun:
                self._blocks, self._drawing = blocks, asyncio.create_task(blocks.run())
                return
        services.event_router.expect(request.request_id, self._queue)
        try:
            services.engine.submit(request, asked_s)
        except Exception:
            services.event_router.drop(request.request_id)
            services.admission.leave(self.fairness_key)
            self._cancel()
            raise
        self._inside.add(answer.request_id)
        if self.chooser is not None and not self.body.stream:
            self._submit_candidates(request, self.chooser)

    def _submit_candidates(self, request: Request, chooser: Chooser) -> None:
        """Submit further draws of the only answer, as many as find room that nothing else needs."""
        services = self.services
        rows = services.engine.spare_rows(len(request.prompt_ids) + request.sampling.max_tokens, self.fairness_key)
        for index in range(1, min(chooser.rows, 1 + rows)):
            answer = self._choice(index)
            name = answer.request_id
            services.event_router.expect(name, self._queue, counted=False)
            try:
                services.engine.submit(replace(request, request_id=name, pace=None, candidate=True))
            except (EngineBusy, RequestRefused):
                services.event_router.drop(name)
                return
            self._candidates[name] = self._unfinished[name] = answer

    def choose(self) -> None:
        """Keep the answers that the user is expected to like best, of those that were drawn, once all have ended.

        Without a taste model the likeliest ones are kept, as OpenAI's API has it.
        """
        # Taste chooses among texts: an answer with calls is not weighed against others.
        ended = [each for each in self._candidates.values() if each.reason in ("stop", "length")]
        drawn = [*self.answers, *([] if any(each.calls for each in self.answers) else ended)]
        self.chosen_of = self._blocks.chosen_of if self._blocks else 1
        if len(drawn) > self.body.choices:
            self.chosen_of, best = len(drawn), self._ranked(drawn)[: self.body.choices]
            if not self._candidates:
                self.unchosen_tokens = sum(len(each.token_ids) for each in self.answers if each not in best)
            for index, answer in enumerate(best):
                answer.index = index
            self.answers = best

    def _ranked(self, drawn: list[ChoiceText]) -> list[ChoiceText]:
        """Return answers, the best first."""
        if self.chooser is not None and any(each.calls for each in drawn):
            return drawn
        if self.chooser is None:
            return sorted(drawn, key=lambda each: each.mean_logprob, reverse=True)
        return [drawn[at] for at in self.chooser.ranked([(each.text, True) for each in drawn])]

    def _request(self, answer: ChoiceText) -> Request:
        """Return an answer's request to the engine."""
        services, known, sampling = self.services, self.completion, self.sampling
        if sampling.seed is None and self.body.resume is not None and self.chooser is None:
            sampling = replace(sampling, seed=self.body.resume.seed)
        if sampling.seed is not None:
            # A seed must not make all choices equal.
            sampling = replace(sampling, seed=sampling.seed + answer.index)
        if len(self.answers) > self.body.choices and sampling.logprobs is None and self.chooser is None:
            sampling = replace(sampling, logprobs=0)
        return Request(
            request_id=answer.request_id,
            prompt_ids=known.prompt_ids,
            sampling=sampling,
            adapter=None if answer.index in self.base_choices else known.adapter,
            service=self.body.service,
            tenant=self.tenant if services.settings.cache.share_across == "user" else "",
            # A base choice belongs to the adapter's user, too: it goes where that is forgotten.
            user=known.user or known.adapter,
            fairness_key=self.fairness_key,
            pace=self.pace,
            run=self.run.key,
            run_cost=self.run.predicted,
            resumed_ids=tuple(answer.token_ids),
        )

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt and of all answers so far."""
        drawn = sum(len(answer.token_ids) for answer in self.answers)
        return len(self.completion.prompt_ids) + self.unchosen_tokens + drawn

    async def updates(self) -> AsyncIterator[list[ChoiceText]]:
        """Yield the choices that have new events, or text that leaves now, until all have ended.

        Raises ApiError when the engine fails one.
        """
        paced = [(answer, answer.pacer) for answer in self.answers if answer.pacer is not None]
        while self._unfinished:
            events: list[Any] = []
            leaves_s = min((pacer.due_s for _, pacer in paced), default=math.inf)
            with contextlib.suppress(TimeoutError):
                # All events that are queued, so that a slow reader catches up in one go.
                async with asyncio.timeout(max(0.0, leaves_s - time.monotonic()) if leaves_s < math.inf else None):
                    events.append(await self._queue.get())
            while not self._queue.empty():
                events.append(self._queue.get_nowait())
            now = time.monotonic()
            touched = {answer.index: answer for answer, pacer in paced if pacer.due_s <= now}
            for event in events:
                if isinstance(event, BaseException):
                    raise event
                if (answer := self._unfinished.get(event.request_id)) is not None:
                    self._apply(event, answer)
                    touched[answer.index] = answer
            if touched:
                if not self._unfinished:
                    self.choose()
                yield list(touched.values())

    async def store(self) -> None:
        """Store the completion under its id. A store that fails is only logged, since the answer is good without it.

        One that is slow, as while another program holds the file, is not waited for longer than `STORED_WITHIN_S`.

        A completion without a user or adapter is not kept: no feedback on it is possible, and no user could erase it.
        """
        if self.completion.adapter is None or not self.kept:
            return
        try:
            stored = asyncio.wrap_future(self._write())
        except StoreError as error:
            return self._tell_missing(error)
        stored.add_done_callback(lambda done: self._tell_missing(done.exception()))
        await asyncio.wait([stored], timeout=STORED_WITHIN_S)
        if not stored.done():
            told = "completion %s is answered before it is stored: the database is slow, or another program holds it"
            log.warning(told, self.completion.id)

    def _tell_missing(self, error: BaseException | None) -> None:
        if error is not None:
            log.error("completion %s was not stored, feedback cannot name it: %s", self.completion.id, error)

    def abandon(self) -> None:
        """Cancel all choices and store what the client has seen; for a client that left or will get an error."""
        self._cancel()
        known = self.completion.adapter is not None and self.kept
        if known and self._written is None and any(answer.text or answer.calls for answer in self.answers):
            try:
                self._write()
            except StoreError as error:
                log.warning("an abandoned completion was not stored: %s", error)

    def facts(self) -> dict[str, Any]:
        """Return the fields of the log line: counts and times (ms), no text."""
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

    def _write(self) -> Future[FeedbackResult | None]:
        """Queue the write; the pairs that follow from it are learned even if the caller stops waiting."""
        taught, loop = self._may_teach(), asyncio.get_running_loop()

        def settle(written: Future[FeedbackResult | None]) -> None:
            """Undo the count where the write yields no feedback, unless the loop is closed."""
            if written.cancelled() or written.exception() or written.result() is None:
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self.services.limits.no_feedback, self.tenant)

        self._written = self.services.store.write(lambda db: self._record(db, taught))
        self._written.add_done_callback(self.services.feedback_intake.learn_from)
        if taught:
            self._written.add_done_callback(settle)
        return self._written

    def _may_teach(self) -> bool:
        """Whether this turn may be feedback on the answer before it; if so, counts it against the limit for now."""
        if not (self.teaches and self.completion.messages):
            return False
        try:
            self.services.limits.feedback(self.tenant)
        except LimitReached as error:
            log.info(_TEACHES_NOTHING, self.completion.id, error)
            return False
        return True

    def _apply(self, event: Event, answer: ChoiceText) -> None:
        self._first_came.set()
        if isinstance(event, TokenEvent):
            if answer.push(event):
                if self._blocks is not None:
                    self._blocks.stop()
                self.services.engine.cancel(answer.request_id, "stop")
            return
        answer.end(event)
        del self._unfinished[event.request_id]
        if event.request_id in self._candidates:
            return
        self._inside.discard(event.request_id)
        self.services.admission.leave(self.fairness_key)
        if self._candidates.keys() & self._unfinished.keys():
            # Candidates have as long again as the first answer took.
            asyncio.get_running_loop().call_later(max(_LEAST_WAIT_S, event.total_s), self._drop_candidates)
        if event.reason == "error" and event.error.startswith(NOT_FOLLOWED):
            field = self.body.constraint.field if self.body.constraint is not None else "tools"
            raise bad_request(event.error, field, "grammar_failed")
        if event.reason == "error":
            raise ApiError(500, event.error or "the engine gave this request up", code="engine_failed")
        if event.reason == "cancelled":
            raise ApiError(503, "the daemon stopped before the answer was complete", code="cancelled")

    def _drop_candidates(self) -> None:
        for request_id in self._candidates.keys() & self._unfinished.keys():
            self.services.engine.cancel(request_id, "dropped")

    def _cancel(self) -> None:
        if self._entering is not None:
            self._entering.cancel()
        self.services.admission.withdraw(self._outside)
        self._outside = 0
        for request_id in self._inside:
            # The engine has it until it looks at its commands, and its place is taken so long.
            self.services.event_router.drop(request_id, partial(self.services.admission.leave, self.fairness_key))
            self.services.engine.cancel(request_id)
        for request_id in self._candidates.keys() & self._unfinished.keys():
            self.services.event_router.drop(request_id)
            self.services.engine.cancel(request_id)
        if self._drawing is not None and self.answers[0].request_id in self._unfinished:
            self._drawing.cancel()
            self.services.admission.leave(self.fairness_key)
        self._inside.clear()
        self._unfinished.clear()

    def _record(self, db: Database, taught: bool) -> FeedbackResult | None:
        """Write the completion; return its feedback on the answer before it, if `taught` and there is room."""
        now, quota, about = utc_now(), self.services.quota, self.completion
        if came_since(db, about.adapter or "", about.created_at):
            # Its user has a name that another account took meanwhile, and would read this.
            log.warning("completion %s is not stored: a job makes an adapter of its user's name", about.id)
            return None
        answers = tuple(answer.record() for answer in self.answers)
        asked = replace(self.completion, prompt_ids=tuple(self.asked_ids))
        completion = replace(asked, created_at=utc_text(now), choices=answers, version=self.version)
        insert_completion(db, completion)
        quota.added(db, completion.adapter or "", completion.size)
        if not taught:
            return None
        try:
            for user in users_of_completion(db, completion.id):
                quota.demand_room(db, user)
        except (StorageFull, PairQueueFull) as error:
            log.info(_TEACHES_NOTHING, completion.id, error)
            return None
        result = note_next_turn(db, completion.id, now, self.services.settings)
        if result is None or result.duplicate:
            return None
        quota.learned(db, completion.adapter or "", result.pair_ids)
        return result
