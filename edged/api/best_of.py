"""Answers that are chosen among several: whole ones, or streams block by block, by their user's taste model."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from edged.align.taste.model import Taste
from edged.api.drawing import Draw, draw
from edged.api.services import Services
from edged.api.tastes import is_sure, is_sure_of
from edged.engine.request import Event, FinishEvent, FinishReason, Request, TokenEvent
from edged.engine.sampling.params import Sampling
from edged.scheduler.cost.prices import Load
from edged.scheduler.reader import Reader

_AUTO = 4
"""Number of candidates by default."""
_BLOCK, _LEAST_BLOCK, _MOST_BLOCK = 16, 8, 64
"""Tokens of a block: unchosen, and the fewest and most of one that is chosen."""
_PLANNED = 0.6
"""Share of the time until a block is due that its tokens are predicted to take."""


@dataclass(frozen=True, slots=True)
class Chooser:
    """A user's taste, the text that was asked, and the most candidates to choose from."""

    taste: Taste
    question: str
    rows: int

    def best(self, answers: Sequence[tuple[str, bool]]) -> int:
        """Return the number of the answer that the user is expected to like best; each is a text, and whether whole."""
        if not is_sure_of(self.taste, self.question, [text for text, _ in answers]):
            return 0
        scores = [float(self.taste.scores(self.question, [text], ended)[0]) for text, ended in answers]
        return max(range(len(scores)), key=scores.__getitem__)


def chooser_of(services: Services, taste: Taste | None, question: str, sampling: Sampling) -> Chooser | None:
    """Return the chooser of an answer that names neither `n` nor `best_of`; None where it is not to be chosen.

    An answer of temperature 0, of a seed, or with log-probabilities is the model's own.
    """
    setting = services.settings.serving.best_of
    own = sampling.temperature == 0 or sampling.seed is not None or sampling.logprobs is not None
    if setting in ("off", "1") or taste is None or own or not is_sure(taste):
        return None
    return Chooser(taste, question, _AUTO if setting == "auto" else int(setting))


@dataclass(eq=False)
class Blocks:
    """A streamed answer that is drawn in blocks: of each, several continuations, the best of which goes on.

    A block is chosen only where it is delivered in time: the first within its target for a first token, later ones
    before the reader has read what is there. Otherwise a block is one continuation, delivered as it is made.
    """

    services: Services
    request: Request
    chooser: Chooser
    asked_s: float
    emit: Callable[[Event], None]
    """Takes the events of the answer, as if its own request had made them."""
    chosen_of: int = 1
    """The most candidates that a block was chosen from."""
    _tokens: list[TokenEvent] = field(default_factory=list)
    _first: FinishEvent | None = None
    _first_s: float = 0.0
    _reader: Reader | None = None
    _stopped: bool = False

    def __post_init__(self) -> None:
        targets, prompt = self.services.engine.scheduler.targets, len(self.request.prompt_ids)
        self._first_due_s = self.asked_s + targets.ttft_s(self.request.service, prompt)
        if pace := self.request.pace:
            ttft_s = max(pace.ttft_s, self.services.engine.scheduler.cost.prompt_s(prompt))
            self._reader = Reader(pace.tokens_per_s, self.asked_s + ttft_s)

    def stop(self) -> None:
        """Draw no more: a stop string was found in what was delivered."""
        self._stopped = True

    async def run(self) -> None:
        """Draw the answer to its end."""
        reason, number = None, 0
        try:
            while reason is None and not self._stopped:
                reason = await self._block(number)
                number += 1
        except asyncio.CancelledError:
            raise
        except Exception as error:
            return self._end("error", str(error))
        self._end(reason or "stop")

    async def _block(self, number: int) -> FinishReason | None:
        """Draw and deliver a block; return the reason for which the answer ends with it, or None."""
        sampling, left = self.request.sampling, self.request.sampling.max_tokens - len(self._tokens)
        rows, size = self._plan(left)
        if rows == 1:
            size = min(left, _BLOCK)
        prompt = (*self.request.prompt_ids, *(event.token_id for event in self._tokens))
        least = min(size, max(0, sampling.min_tokens - len(self._tokens)))
        request = replace(
            self.request,
            prompt_ids=prompt,
            sampling=replace(sampling, max_tokens=size, min_tokens=least),
            pace=None,
            delivery="next_block" if number else "block" if rows > 1 else "tokens",
        )
        requests = [
            replace(request, request_id=f"{request.request_id}-{number}-{row}", candidate=row > 0)
            for row in range(rows)
        ]
        live = self._deliver if rows == 1 else None
        draws = await draw(self.services.engine, self.services.event_router, requests, live)
        best = self._choose([each for each in draws if each.whole] or draws[:1])
        if rows > 1:
            self.chosen_of = max(self.chosen_of, sum(each.whole for each in draws))
            for event in best.tokens:
                self._deliver(event)
        finish = best.finish
        assert finish is not None
        self._first = self._first or finish
        if finish.reason == "length" and len(self._tokens) < sampling.max_tokens:
            return None if len(prompt) + size < self.services.engine.max_context_tokens else "length"
        if finish.reason == "error":
            raise RuntimeError(finish.error or "the engine gave this request up")
        return finish.reason

    def _plan(self, left: int) -> tuple[int, int]:
        """Return the number of continuations of the next block, and its tokens, that are delivered in time."""
        engine, now = self.services.engine, time.monotonic()
        scheduler = engine.scheduler
        size = min(left, _MOST_BLOCK)
        rows = min(self.chooser.rows, 1 + engine.spare_rows(size))
        cost, context = scheduler.cost, len(self.request.prompt_ids) + len(self._tokens)
        decodes = len(scheduler.queues.decodes) + rows
        token_s = cost.forward_s(Load(decodes=decodes, context=decodes * context))
        # A later block computes again what does not fill a page.
        page = engine.settings.cache.page_size
        begun_s = cost.prompt_s(rows * page, context) if self._tokens else cost.prompt_s(context)
        due_s = self._due_s(token_s) - now - begun_s
        size = min(size, int(_PLANNED * due_s / token_s) if token_s > 0 and due_s < math.inf else size)
        return (rows, size) if rows > 1 and size >= min(_LEAST_BLOCK, left) else (1, size)

    def _due_s(self, token_s: float) -> float:
        """Return when the next token is due: where nobody is said to read, each one's target counts from the first."""
        if not self._tokens:
            return self._first_due_s
        if self._reader is not None:
            return self._reader.dry_s
        target_s = self.services.engine.scheduler.targets.tbt_s(self.request.service, token_s)
        return self._first_s + len(self._tokens) * target_s

    def _choose(self, draws: Sequence[Draw]) -> Draw:
        if len(draws) == 1:
            return draws[0]
        tokenizer, so_far = self.services.tokenizer, [event.token_id for event in self._tokens]
        ends = {*self.request.sampling.stop_token_ids}
        texts = [
            (
                tokenizer.decode([token for token in so_far + each.token_ids if token not in ends]),
                each.finish is not None and each.finish.reason == "stop",
            )
            for each in draws
        ]
        return draws[self.chooser.best(texts)]

    def _deliver(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            now = time.monotonic()
            self._first_s = self._first_s or now
            if self._reader is not None:
                self._reader.take(now)
            self._tokens.append(event)
            self.emit(replace(event, request_id=self.request.request_id))

    def _end(self, reason: FinishReason, error: str = "") -> None:
        now = time.monotonic()
        first = self._first or FinishEvent(self.request.request_id, reason)
        self.emit(
            replace(
                first,
                request_id=self.request.request_id,
                reason=reason,
                error=error,
                completion_tokens=len(self._tokens),
                ttft_s=max(0.0, self._first_s - self.asked_s),
                total_s=now - self.asked_s,
                reader=self._reader,
            )
        )
