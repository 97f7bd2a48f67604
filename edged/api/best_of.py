"""Answers that are chosen among several: whole ones, or streams block by block, by their user's taste model."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from edged.align.taste.model import Taste
from edged.api.drawing import Draw, Drawing
from edged.api.services import Services
from edged.api.tastes import is_sure
from edged.engine.request import EngineBusy, Event, FinishEvent, FinishReason, Request, TokenEvent
from edged.engine.sampling.params import Sampling
from edged.scheduler.cost.prices import Load
from edged.scheduler.reader import Reader

log = logging.getLogger("edged.api")
_AUTO = 4
"""Number of candidates by default."""
_LEAST_BLOCK, _MOST_BLOCK = 8, 64
"""The fewest and the most tokens of a block that is chosen."""
_PLANNED = 0.6
"""Share of the time until a block is due that its tokens are predicted to take."""


@dataclass(frozen=True, slots=True)
class Chooser:
    """A user's taste, the text that was asked, and the most candidates: 1 where the caller says how many."""

    taste: Taste
    question: str
    rows: int

    def ranked(self, answers: Sequence[tuple[str, bool]]) -> list[int]:
        """Return the numbers of answers, each a text and whether whole, the one that the user likes best first."""
        scores = self.taste.scores(self.question, [text for text, _ in answers], [ended for _, ended in answers])
        # An empty answer is chosen where there is no other.
        return sorted(range(len(answers)), key=lambda at: (bool(answers[at][0].strip()), scores[at]), reverse=True)


def may_choose(services: Services, sampling: Sampling, stream: bool) -> bool:
    """Whether an answer that names neither `n` nor `best_of` may be chosen among several.

    One of temperature 0, of a seed, or with log-probabilities is the model's own. One that follows a grammar has a form
    of its own, which a taste of texts does not know. Penalties count an answer's tokens,
    which the blocks of a stream are not known to have before them.
    """
    own = sampling.temperature == 0 or sampling.seed is not None or sampling.logprobs is not None
    own = own or sampling.grammar is not None
    return services.settings.serving.by_taste and not own and not (stream and sampling.penalizes)


def chooser_of(services: Services, taste: Taste | None, question: str) -> Chooser | None:
    """Return the chooser of an answer that may be chosen; None where the taste model is not sure enough."""
    setting = services.settings.serving.best_of
    if taste is None or not is_sure(taste):
        return None
    return Chooser(taste, question, _AUTO if setting == "auto" else int(setting))


@dataclass(eq=False)
class Blocks:
    """A streamed answer that is drawn in blocks: of each, several continuations, the best of which goes on.

    A block is chosen only where it is delivered in time: the first within its target for a first token, later ones
    before the reader has read what is there. Otherwise the rest is one continuation, delivered as it is made.
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
    _drawing: Drawing | None = None
    _stopped: bool = False

    def __post_init__(self) -> None:
        targets, prompt = self.services.engine.scheduler.targets, len(self.request.prompt_ids)
        self._first_due_s = self.asked_s + targets.ttft_s(self.request.service, prompt)
        if pace := self.request.pace:
            ttft_s = max(pace.ttft_s, self.services.engine.scheduler.cost.prompt_s(prompt))
            self._reader = Reader(pace.tokens_per_s, self.asked_s + ttft_s)

    def begin(self) -> bool:
        """Submit the first block; False where it cannot be chosen in time. Raises EngineBusy and RequestRefused."""
        rows, size = self._plan(self.request.sampling.max_tokens)
        if rows > 1:
            self._drawing = self._submit(rows, size, 0)
        return rows > 1

    def stop(self) -> None:
        """Draw no more: a stop string was found in what was delivered."""
        self._stopped = True

    async def run(self) -> None:
        """Draw the answer to its end."""
        number = 0
        try:
            reason: FinishReason | None = None
            while reason is None and not self._stopped:
                reason = await self._block(number)
                number += 1
            self._end(reason or "stop")
        except Exception as error:
            if not isinstance(error, EngineBusy):
                log.exception("a streamed answer ends early")
            self._end("error", str(error) if isinstance(error, EngineBusy) else "the engine gave this request up")

    def _submit(self, rows: int, size: int, number: int) -> Drawing:
        """Submit the continuations of a block, all but the first as candidates."""
        sampling = self.request.sampling
        request = replace(
            self.request,
            prompt_ids=(*self.request.prompt_ids, *(event.token_id for event in self._tokens)),
            sampling=replace(
                sampling, max_tokens=size, min_tokens=min(size, max(0, sampling.min_tokens - len(self._tokens)))
            ),
            pace=None,
            delivery="next_block" if number else "block",
        )
        requests = [
            replace(request, request_id=f"{request.request_id}-{number}-{row}", candidate=row > 0)
            for row in range(rows)
        ]
        asked_s = None if number else self.asked_s
        return Drawing(self.services.engine, self.services.event_router, requests, asked_s)

    async def _block(self, number: int) -> FinishReason | None:
        """Draw and deliver a block; return the reason for which the answer ends with it, or None.

        Where none can be chosen in time, the rest of the answer is delivered as it is made.
        """
        left = self.request.sampling.max_tokens - len(self._tokens)
        drawing, self._drawing = self._drawing, None
        chosen = drawing is not None
        if drawing is None:
            rows, size = self._plan(left)
            chosen = rows > 1
            drawing = self._submit(rows, size if chosen else left, number)
        draws = await drawing.collect(None if chosen else self._deliver)
        best = self._choose([each for each in draws if each.whole] or draws[:1])
        if chosen:
            self.chosen_of = max(self.chosen_of, sum(each.whole for each in draws))
            for event in best.tokens:
                self._deliver(event)
        finish = best.finish
        assert finish is not None
        self._first = self._first or finish
        if finish.reason == "error":
            raise EngineBusy(finish.error or "the engine gave this request up")
        ended = len(self._tokens) >= self.request.sampling.max_tokens
        return finish.reason if finish.reason != "length" or ended or not chosen else None

    def _plan(self, left: int) -> tuple[int, int]:
        """Return the number of continuations of the next block, and its tokens, that are delivered in time."""
        engine, now = self.services.engine, time.monotonic()
        scheduler = engine.scheduler
        size = min(left, _MOST_BLOCK)
        rows = min(self.chooser.rows, 1 + engine.spare_rows(size, self.request.fairness_key))
        cost, context = scheduler.cost, len(self.request.prompt_ids) + len(self._tokens)
        decodes = len(scheduler.queues.decodes) + rows
        token_s = cost.forward_s(Load(decodes=decodes, context=decodes * context))
        # A later block computes again what does not fill a page.
        page = engine.settings.cache.page_size
        begun_s = cost.prompt_s(rows * page, context) if self._tokens else cost.prompt_s(context)
        due_s = self._due_s(token_s) - now - begun_s
        size = min(size, int(_PLANNED * due_s / token_s) if token_s > 0 and due_s < math.inf else size)
        return (rows, size) if rows > 1 and size >= min(_LEAST_BLOCK, left) else (1, left)

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
        return draws[self.chooser.ranked(texts)[0]]

    def _deliver(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            now = time.monotonic()
            self._first_s = self._first_s or now
            if self._reader is not None:
                self._reader.take(now)
            self._tokens.append(event)
            self.emit(replace(event, request_id=self.request.request_id))

    def _end(self, reason: FinishReason, error: str = "") -> None:
        now, known = time.monotonic(), self.request
        self.services.engine.count_stream(reason, self._reader, known.fairness_key or known.user or "", known.service)
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
