"""Practice: answers that an adapter gives by itself, drawn in spare room, judged by taste, and learned from."""

import asyncio
import contextlib
import itertools
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from edged.align.feedback.pair import Record, StepSkipped, TokenPair, VersionPublished
from edged.align.feedback.pair_tokens import UnusablePrompt, tokenize_pair
from edged.align.metrics import NOT_JUDGED, Liked
from edged.align.taste.edits import Operator, induce
from edged.align.taste.model import Taste
from edged.align.taste.opinions import question_of
from edged.api.drawing import Draw, draw
from edged.api.event_router import EventRouter
from edged.api.tastes import SURE, Tastes
from edged.engine.engine import Engine
from edged.engine.request import EngineBusy, Request, RequestRefused
from edged.engine.sampling.params import Sampling
from edged.scheduler.task import ServiceClass
from edged.settings.live import Live
from edged.settings.load import Settings
from edged.store import Store
from edged.store.completions import latest_answers, latest_prompts
from edged.store.feedback import latest_pairs
from edged.text.tokenizer import Tokenizer, TokenizerError

log = logging.getLogger("edged.api")
_PROMPTS, _PROMPT_TOKENS, _ANSWER_TOKENS = 48, 512, 96
"""The latest prompts of a user that are practised on, and the most tokens of one and of an answer."""
_ROWS, _LEAST_ROWS = 4, 2
"""Answers that are drawn of a prompt, and the fewest to compare."""
_KEPT = 48
"""Number of latest answers of the adapter, and of the base, from which shares are told."""
_PREFERRED = 0.65
"""P(the best answer of a prompt is preferred to the worst) from which on the two make a pair."""
_SATISFIED = 0.95
"""Share of the adapter's answers that are liked, or show the edits, at which practice ends."""
_PATIENCE = 16
"""Rounds that are no better than as many before them, after which practice ends."""
_BASE_ANSWERS = 2
"""Answers of the base that are drawn of each prompt, to compare the adapter's with."""
_STEP_S, _PAUSE_S, _IDLE_S = 60.0, 0.2, 1.0
"""The longest wait for a step; pauses where there is no room, and where there is nothing to do."""
_EVIDENCE = 12
"""Number of prompts with signals at which the KL budget is half of its full size."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that was drawn, with what it answers."""

    question: str
    text: str


@dataclass(frozen=True, slots=True)
class _Prompt:
    question: str
    ids: tuple[int, ...]


@dataclass(eq=False)
class Practised:
    """A user's practice: what was drawn, and how far it has come."""

    taste: Taste
    operator: Operator | None
    prompts: Sequence[_Prompt]
    adapter_answers: deque[Answer] = field(default_factory=lambda: deque(maxlen=_KEPT))
    base_answers: dict[str, list[str]] = field(default_factory=dict)
    """Answers of the base by the text that was asked."""
    kl_nats: float = 0.0
    """KL of the adapter to the base per token of its own answers, a running mean."""
    ended: bool = False
    turn: int = 0
    gains: deque[float] = field(default_factory=lambda: deque(maxlen=2 * _PATIENCE))
    """The share of each round's answers that are expected to be preferred to the base's, or that show the edits."""

    def next_prompts(self, count: int) -> list[_Prompt]:
        """Return the prompts whose turn it is."""
        first, self.turn = self.turn, self.turn + count
        return [self.prompts[at % len(self.prompts)] for at in range(first, first + min(count, len(self.prompts)))]

    def shows(self, operator: Operator) -> bool:
        """Whether the adapter's latest answers show the edits, so that practice ends."""
        latest = list(self.adapter_answers)[-_KEPT // 2 :]
        shown = sum(operator.shown(each.text) for each in latest) / max(1, len(latest))
        self.ended |= len(latest) >= _KEPT // 2 and shown >= _SATISFIED
        self.gains.append(shown)
        return self.ended

    def note(self, gain: float) -> None:
        """Take in the mean of a round; practice ends where the latest rounds are no better than those before."""
        self.gains.append(gain)
        if len(self.gains) == 2 * _PATIENCE:
            means = list(self.gains)
            self.ended |= sum(means[_PATIENCE:]) <= sum(means[:_PATIENCE])


class Practice:
    """The practice of all users, in turns, one round of one user at a time. Used on the event loop."""

    def __init__(
        self,
        store: Store,
        tokenizer: Tokenizer,
        engine: Engine,
        router: EventRouter,
        tastes: Tastes,
        live: Live[Settings],
    ) -> None:
        self._store, self._tokenizer, self._engine, self._router = store, tokenizer, engine, router
        self._tastes, self._live = tastes, live
        self.users: OrderedDict[str, Practised] = OrderedDict()
        """Those who have practice, the one whose turn is next first."""
        self._numbers = itertools.count(1)
        self._wake = asyncio.Event()
        self._stepped: dict[str, asyncio.Future[float | None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run(), name="edged-practice")

    async def close(self) -> None:
        """End, with the round under way."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def on_taste(self, adapter: str) -> None:
        """Begin a user's practice anew, since there are new signals."""
        self._router.loop.create_task(self._renew(adapter))

    def on_records(self, records: Sequence[Record]) -> None:
        """Hear that a step of practice ended; any thread may call this."""
        for record in records:
            if isinstance(record, VersionPublished | StepSkipped) and record.adapter in self._stepped:
                kl = record.own_kl_nats if isinstance(record, VersionPublished) else None
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._router.loop.call_soon_threadsafe(self._note_step, record.adapter, kl)

    def forget(self, adapter: str) -> None:
        """Forget a user's practice."""
        self.users.pop(adapter, None)

    def _note_step(self, adapter: str, kl: float | None) -> None:
        if (stepped := self._stepped.get(adapter)) is not None and not stepped.done():
            stepped.set_result(kl)

    async def _renew(self, adapter: str) -> None:
        taste = await self._tastes.of(adapter)
        if taste is None:
            return self.forget(adapter)
        operator, prompts = await asyncio.to_thread(self._read, adapter)
        if not prompts:
            return
        before = self.users.get(adapter)
        practised = Practised(taste, operator, prompts)
        if before is not None:
            practised.kl_nats, practised.turn = before.kl_nats, before.turn
            practised.base_answers = before.base_answers
        self.users[adapter] = practised
        self._wake.set()

    def _read(self, adapter: str) -> tuple[Operator | None, list[_Prompt]]:
        """Read a user's edits and latest prompts, those with signals first."""
        rows = self._store.read(lambda db: latest_pairs(db, adapter, 4 * _PROMPTS))
        edits = [(row.rejected.text, row.chosen.text) for row in rows if row.source == "edit"]
        found: dict[str, _Prompt] = {}
        for row in reversed(rows):
            question = question_of(row.messages, row.prompt)
            if question not in found and len(found) < _PROMPTS:
                with contextlib.suppress(TokenizerError, UnusablePrompt):
                    ids = tokenize_pair(self._tokenizer, row, 2 * _PROMPT_TOKENS)[0].prompt
                    found[question] = _Prompt(question, ids[-_PROMPT_TOKENS:])
        for completion in self._store.read(lambda db: latest_prompts(db, adapter, _PROMPTS)):
            question = question_of(completion.messages, completion.prompt)
            if question not in found and len(found) < _PROMPTS:
                found[question] = _Prompt(question, completion.prompt_ids[-_PROMPT_TOKENS:])
        return induce(edits), list(found.values())

    async def liked(self, adapter: str) -> Liked:
        """Return how many of an adapter's latest answers its user's taste model likes, told apart from their prompts.

        They are those served since the signals, what the adapter gave by itself, and the base's.
        """
        taste, practised = await self._tastes.of(adapter), self.users.get(adapter)
        if taste is None:
            return NOT_JUDGED
        rows = await asyncio.to_thread(self._store.read, lambda db: latest_answers(db, adapter, _KEPT // 2))
        served = [Answer(question_of(each.messages, each.prompt), each.choices[0].text) for each in rows]
        base = [
            Answer(asked, text)
            for asked, some in (practised.base_answers if practised else {}).items()
            for text in some
        ]
        own = list(practised.adapter_answers) if practised else []

        def judged(answers: Sequence[Answer]) -> tuple[int, int]:
            likes = [taste.likes(each.question, each.text, apart=True) > 0.5 for each in answers[-_KEPT:]]
            return sum(likes), len(likes)

        return await asyncio.to_thread(lambda: Liked(judged(served), judged(own), judged(base)))

    # -- rounds ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            adapter = next((name for name, each in self.users.items() if not each.ended), "")
            if not adapter or not self._live.current.align.practice:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_IDLE_S):
                        await self._wake.wait()
                continue
            self.users.move_to_end(adapter)
            try:
                if not await self._round(adapter, self.users[adapter]):
                    await asyncio.sleep(_PAUSE_S)
            except (EngineBusy, RequestRefused):
                await asyncio.sleep(_IDLE_S)
            except Exception:
                log.exception("practice of %s failed: it goes on with the next signal", adapter)
                if adapter in self.users:
                    self.users[adapter].ended = True

    async def _round(self, adapter: str, practised: Practised) -> bool:
        """Draw, judge, and learn from what some prompts show; returns whether there was room for it."""
        align = self._live.current.align
        rows = self._engine.spare_rows(_PROMPT_TOKENS // 4 + _ANSWER_TOKENS)
        if rows < _LEAST_ROWS or self._engine.queue()["finetune"]:
            return False
        count, pairs = max(1, min(align.micro_batch_pairs, rows // _ROWS)), list[TokenPair]()
        prompts = practised.next_prompts(count)
        new = [prompt for prompt in prompts if prompt.question not in practised.base_answers]
        for prompt, answers in zip(new, await self._draw(None, adapter, new, _BASE_ANSWERS), strict=True):
            practised.base_answers[prompt.question] = [self._text(each) for each in answers]
        operator = practised.operator
        drawn = await self._draw(adapter, adapter, prompts, min(_ROWS, rows) if operator is None else 1)
        for prompt, answers in zip(prompts, drawn, strict=True):
            practised.adapter_answers.extend(Answer(prompt.question, self._text(each)) for each in answers)
        if operator is None:
            pairs = self._comparisons(adapter, practised, drawn)
        elif not practised.shows(operator):
            pairs = self._imitations(adapter, practised, await self._draw(None, adapter, prompts, min(_ROWS, rows)))
        log.debug(
            "practice of %s: %d prompts, %d pairs, gain %.3f, KL %.3f%s",
            *(adapter, len(prompts), len(pairs), practised.gains[-1] if practised.gains else 0.0, practised.kl_nats),
            ", ended" if practised.ended else "",
        )
        if pairs and not practised.ended and self.users.get(adapter) is practised:
            await self._learn(adapter, practised, pairs)
        return True

    async def _draw(self, adapter: str | None, user: str, prompts: Sequence[_Prompt], each: int) -> list[list[Draw]]:
        """Draw so many answers of each prompt; those that were dropped are left out."""
        sampling = Sampling(max_tokens=_ANSWER_TOKENS, stop_token_ids=tuple(self._tokenizer.eos_ids))
        requests = [
            Request(
                f"practice-{next(self._numbers)}",
                prompt.ids,
                sampling,
                adapter,
                ServiceClass.BATCH,
                user,
                candidate=True,
            )
            for prompt in prompts
            for _ in range(each)
        ]
        draws = await draw(self._engine, self._router, requests)
        by_prompt = [draws[at : at + each] for at in range(0, len(draws), each)]
        return [[each for each in some if each.whole] for some in by_prompt]

    def _text(self, drawn: Draw) -> str:
        return self._tokenizer.decode([token for token in drawn.token_ids if token not in self._tokenizer.eos_ids])

    def _comparisons(self, adapter: str, practised: Practised, drawn: Sequence[Sequence[Draw]]) -> list[TokenPair]:
        """Return pairs of the best and the worst answer of each prompt, where the taste model is sure of the two."""
        taste, pairs, wins = practised.taste, list[TokenPair](), list[float]()
        for answers in drawn:
            if not answers:
                continue
            texts, question = [self._text(each) for each in answers], self._question(answers[0], practised)
            utilities = taste.scores(question, texts)
            base = practised.base_answers.get(question, [])
            wins += [taste.preference(question, text, other) for text in texts for other in base]
            best, worst = int(utilities.argmax()), int(utilities.argmin())
            sure = taste.preference(question, texts[best], texts[worst])
            if sure >= _PREFERRED and texts[best].strip():
                chosen, rejected = (tuple(answers[at].token_ids) for at in (best, worst))
                pairs.append(self._pair(adapter, answers[best].request.prompt_ids, chosen, rejected))
        if wins:
            practised.note(sum(wins) / len(wins))
        practised.ended |= taste.sure < SURE or practised.kl_nats > self._budget(taste)
        return pairs

    def _imitations(self, adapter: str, practised: Practised, drawn: Sequence[Sequence[Draw]]) -> list[TokenPair]:
        """Return the best of the base's answers to each prompt as the user would have edited them.

        The rest of such an answer is the base's own text, so that imitating it changes nothing else.
        """
        operator, pairs, eos = practised.operator, list[TokenPair](), self._tokenizer.eos_id
        assert operator is not None
        for answers in drawn:
            ended = [each for each in answers if each.ended]
            if ended:
                question = self._question(ended[0], practised)
                best = ended[int(practised.taste.scores(question, [self._text(each) for each in ended]).argmax())]
                edited = self._tokenizer.encode_answer(operator.apply(self._text(best)))
                pairs.append(self._pair(adapter, best.request.prompt_ids, (*edited, eos)))
        return pairs

    def _question(self, drawn: Draw, practised: Practised) -> str:
        return next(each.question for each in practised.prompts if each.ids == drawn.request.prompt_ids)

    def _pair(
        self, adapter: str, prompt: tuple[int, ...], chosen: tuple[int, ...], rejected: tuple[int, ...] = ()
    ) -> TokenPair:
        number = -next(self._numbers)
        return TokenPair(
            number,
            adapter,
            prompt,
            chosen,
            rejected,
            practice=True,
            imitate=not rejected,
            own=(bool(rejected),) * 2,
        )

    async def _learn(self, adapter: str, practised: Practised, pairs: list[TokenPair]) -> None:
        """Have the engine train on practice, and wait for the version that it makes."""
        stepped = self._stepped[adapter] = asyncio.get_running_loop().create_future()
        self._engine.practise(adapter, pairs)
        try:
            async with asyncio.timeout(_STEP_S):
                if (kl := await stepped) is not None:
                    practised.kl_nats += 0.3 * (max(0.0, kl) - practised.kl_nats)
        except TimeoutError:
            # The box is busy, or governors hold training back: what was drawn is old by then.
            self._engine.practise(adapter, [])
        finally:
            del self._stepped[adapter]

    def _budget(self, taste: Taste) -> float:
        """Return the KL that the evidence allows: it grows with the number of prompts that have signals."""
        evidence = taste.prompts / (taste.prompts + _EVIDENCE)
        return self._live.current.align.kl_budget * evidence if taste.prompts else -math.inf
