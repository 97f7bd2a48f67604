"""Practice: answers that an adapter gives by itself, drawn in spare room, judged by taste, and learned from."""

import asyncio
import contextlib
import itertools
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial
from statistics import fmean
from typing import Any

from edged.align import metrics
from edged.align.feedback.pair import IMPORT_REASONS, Record, StepSkipped, TokenPair, VersionPublished
from edged.align.feedback.pair_tokens import UnusablePrompt, tokenize_pair
from edged.align.metrics import NOT_JUDGED, Liked
from edged.align.taste.edits import Operator
from edged.align.taste.model import Taste
from edged.align.taste.opinions import question_of
from edged.align.versions import UnknownVersion
from edged.api.drawing import Draw, Drawing
from edged.api.event_router import EventRouter
from edged.api.tastes import Tastes, is_learnable, is_sure_of
from edged.api.written_preferences import WrittenPreferences
from edged.engine.engine import Engine
from edged.engine.request import EngineBusy, EngineStopping, Request, RequestRefused
from edged.engine.sampling.params import Sampling
from edged.runtime import logs
from edged.scheduler.task import ServiceClass
from edged.settings.live import Live
from edged.settings.load import Settings
from edged.store import Store
from edged.store.completions import latest_answers, latest_prompts
from edged.store.feedback import LEARNED, get_preference, latest_pairs, requeue_taken_back, set_distilled
from edged.store.jobs.jobs import open_job_of
from edged.text.preference import prompts
from edged.text.tokenizer import Arguments, Messages, Tokenizer, TokenizerError

log = logging.getLogger("edged.api")
_PROMPTS, _PROMPT_TOKENS, _ANSWER_TOKENS = 48, 512, 96
"""The latest prompts of a user that are practised on, and the most tokens of one and of an answer."""
_ROWS, _LEAST_ROWS = 4, 2
"""Answers that are drawn of a prompt, and the fewest to compare."""
_KEPT = 48
"""Number of latest answers of the adapter, and of the base, from which shares are told."""
_PREFERRED, _CERTAIN = 0.54, 0.75
"""P(the best answer of a prompt is preferred to the worst) from which on the two make a pair, and a whole one."""
_SATISFIED = 0.95
"""Share of the adapter's answers that are liked, or show the edits, at which practice ends."""
_DISLIKED, _PROVEN, _DOUBTS = 0.45, 0.55, 3
"""The mean share of the adapter's answers that are expected to be preferred to the base's under which practice is
undone, where it was above the second before, and of how many latest rounds."""
_PATIENCE = 16
"""Rounds that are no better than as many before them, after which practice ends."""
_BASE_ANSWERS = 2
"""Answers of the base that are drawn of each prompt, to compare the adapter's with."""
_DISTANCES, _MOST_DISTANCES = 16, 80
"""Rounds of which each distance to answers with a preference is a mean, and after which it stays in the prompt."""
_LEAST_DISTANCE = 0.002
"""The distance of the base, in nats per token, under which its answers are hardly other with the preference."""
_TOLD = 0.1
"""The least gain of that share that the store is told of."""
_LEARNED = 0.8
"""Share of that distance that is gone when the preference leaves the prompt."""
_TURN = "(practice)"
"""The name under which practice takes turns: whoever is served is another."""
_MOST_USERS = 256
"""Users whose practice is in memory; the one whose turn was longest ago goes first."""
_STEP_S, _PAUSE_S, _IDLE_S = 60.0, 0.2, 1.0
"""The longest wait for a step; pauses where there is no room, and where there is nothing to do."""
_EVIDENCE = 12
"""Number of prompts with signals at which the KL budget is half of its full size."""


@dataclass(frozen=True, slots=True)
class DrawnAnswer:
    """An answer that was drawn, with what it answers."""

    question: str
    text: str


@dataclass(frozen=True, slots=True)
class PracticePrompt:
    """A prompt to practise on, and the text that was asked in it."""

    question: str
    ids: tuple[int, ...]
    with_preference: tuple[int, ...] = ()
    """The same with the user's written preference in its system turn; none where it has none."""


@dataclass(eq=False)
class Practised:
    """A user's practice: what was drawn, and how far it has come."""

    taste: Taste
    operator: Operator | None
    prompts: Sequence[PracticePrompt]
    picks: bool
    """Whether there are other signals than edits."""
    preference: str = ""
    """The written preference that is to be learned; "" once it is, or was given up."""
    text: str = ""
    """The written preference, as prompts have it."""
    distances: list[tuple[float, float]] = field(default_factory=list)
    """The KL per token of each round, of answers by the base that has the preference in its prompt: to the adapter, and
    to the base without it."""
    told: float = -1.0
    """How much of the preference is learned, as it was last told to the store; under 0: not yet."""
    adapter_answers: deque[DrawnAnswer] = field(default_factory=lambda: deque(maxlen=_KEPT))
    base_answers: dict[str, list[tuple[str, Draw]]] = field(default_factory=dict)
    """Answers of the base by the text that was asked."""
    imitation_nll: float = math.inf
    """NLL per token of the edited answers that were imitated last."""
    kl_nats: float = 0.0
    """KL of the adapter to the base per token of its own answers, a running mean."""
    ended: bool = False
    proven: bool = False
    """Whether what was practised was once better than the base, and was not undone since."""
    started: bool = False
    """Whether the adapter began with a start that is not judged by answers yet."""
    turn: int = 0
    gains: deque[float] = field(default_factory=lambda: deque(maxlen=2 * _PATIENCE))
    """The share of each round's answers that are expected to be preferred to the base's; of edits the share that shows
    them, less the NLL of those that are imitated."""

    def next_prompts(self, count: int) -> list[PracticePrompt]:
        """Return the prompts whose turn it is."""
        first, self.turn = self.turn, self.turn + count
        return [self.prompts[at % len(self.prompts)] for at in range(first, first + min(count, len(self.prompts)))]

    def shows(self, operator: Operator) -> bool:
        """Whether the adapter's latest answers show the edits, so that practice ends."""
        latest = list(self.adapter_answers)[-_KEPT // 2 :]
        shown = sum(operator.shown(each.text) for each in latest) / max(1, len(latest))
        self.ended |= len(latest) >= _KEPT // 2 and shown >= _SATISFIED
        # An edit shows late: until then the imitated answers become likelier.
        self.note(shown - self.imitation_nll)
        return self.ended

    @property
    def disliked(self) -> bool:
        """Whether what was practised, or a start, is worse than the base, by what the user's taste is now."""
        return (self.proven or self.started) and self.operator is None and self._latest < _DISLIKED

    @property
    def _latest(self) -> float:
        latest = list(self.gains)[-_DOUBTS:]
        return fmean(latest) if len(latest) == _DOUBTS else 0.5

    @property
    def distilled(self) -> float:
        """How much of the distance to answers with the preference is gone, from 0 to 1."""
        if len(self.distances) < 2 * _DISTANCES:
            return 0.0
        gone = fmean(whole - left for left, whole in self.distances[-_DISTANCES:])
        return min(1.0, max(0.0, gone / self._whole)) if self._whole > _LEAST_DISTANCE else 0.0

    @property
    def without_effect(self) -> bool:
        """Whether the base's answers are hardly other with the preference, so that there is nothing to learn."""
        return len(self.distances) >= _DISTANCES and self._whole <= _LEAST_DISTANCE

    @property
    def _whole(self) -> float:
        """The distance of the base, as a mean over all rounds: that of one round is mostly chance."""
        return fmean(whole for _, whole in self.distances)

    def note(self, gain: float) -> None:
        """Take in the mean of a round; practice ends where the latest rounds are no better than those before."""
        self.gains.append(gain)
        self.proven |= self._latest > _PROVEN
        self.started &= self._latest <= _PROVEN
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
        preferences: WrittenPreferences,
        live: Live[Settings],
    ) -> None:
        self._store, self._tokenizer, self._engine, self._router = store, tokenizer, engine, router
        self._tastes, self._preferences, self._live = tastes, preferences, live
        self.users: OrderedDict[str, Practised] = OrderedDict()
        """Those who have practice, the one whose turn is next first."""
        self.judged: dict[str, Liked] = {}
        """What was liked of adapters' answers, when it was last asked for."""
        self._told: dict[str, tuple[Any, ...]] = {}
        """The taste and the answers that `judged` is of."""
        self._numbers = itertools.count(1)
        self._wake = asyncio.Event()
        self._stepped: dict[str, asyncio.Future[VersionPublished | None]] = {}
        self._task: asyncio.Task[None] | None = None
        self.learn_again: Callable[[str], None] = lambda adapter: None
        """Submits the pairs of an adapter again that versions taken back had learned."""

    def start(self) -> None:
        """Begin, with the adapters that are known."""
        for adapter in {*list(self._engine.adapters())[-_MOST_USERS:], *self._preferences.pending}:
            self._tastes.refit(adapter)
        self._task = asyncio.create_task(self._run(), name="edged-practice")

    async def close(self) -> None:
        """End, with the round under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def on_taste(self, adapter: str) -> None:
        """Begin a user's practice anew, since there are new signals."""
        self._router.loop.create_task(self._renew(adapter))

    def on_records(self, records: Sequence[Record]) -> None:
        """Hear that a step of practice ended; any thread may call this."""
        for record in records:
            if isinstance(record, VersionPublished) and record.is_start:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._router.loop.call_soon_threadsafe(self._note_start, record.adapter)
            back = isinstance(record, VersionPublished) and record.taken_back
            waited = isinstance(record, StepSkipped) or (
                isinstance(record, VersionPublished) and record.reason == "practised"
            )
            if isinstance(record, VersionPublished | StepSkipped) and (
                back or (waited and record.adapter in self._stepped)
            ):
                made = record if isinstance(record, VersionPublished) and not back else None
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._router.loop.call_soon_threadsafe(self._note_step, record.adapter, made)

    def forget(self, adapter: str) -> None:
        """Forget a user's practice; any thread may call this."""

        def drop() -> None:
            self.users.pop(adapter, None)
            self.judged.pop(adapter, None)
            self._told.pop(adapter, None)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._router.loop.call_soon_threadsafe(drop)

    def _note_start(self, adapter: str) -> None:
        """Have the answers of an adapter that began with a start judged beside the base's."""
        if (practised := self.users.get(adapter)) is not None:
            practised.started, practised.ended = True, False
            practised.gains.clear()

    def _note_step(self, adapter: str, made: VersionPublished | None) -> None:
        if (stepped := self._stepped.get(adapter)) is not None and not stepped.done():
            stepped.set_result(made)
        if made is None and adapter in self.users:
            # The step failed, or its version was taken back: the next signal begins anew.
            self.users[adapter].ended = True

    async def _renew(self, adapter: str) -> None:
        taste, preference = await self._tastes.of(adapter), self._preferences.in_prompt(adapter)
        if taste is None and not preference:
            return self.forget(adapter)
        before = self.users.get(adapter)
        if (
            before is not None
            and before.prompts
            and (taste or before.taste).version == before.taste.version
            and preference == before.text
        ):
            return
        prompts, picks = await asyncio.to_thread(self._read, adapter)
        began = before is None and await self._began(adapter)
        if await self._tastes.of(adapter) is not taste:
            # It was fitted anew, or forgotten, meanwhile.
            return
        # Answers that are served edited show the edits; to imitate them, too, would only make the rest worse.
        operator = taste.operator if taste and not self._live.current.serving.by_taste else None
        practised = Practised(taste or Taste.fit([]), operator, prompts, picks, preference, preference, started=began)
        if before is not None:
            practised.started = before.started
            if before.text == preference:
                practised.preference, practised.told = before.preference, before.told
                practised.distances = before.distances
            practised.kl_nats, practised.turn, practised.proven = before.kl_nats, before.turn, before.proven
            asked = {prompt.question for prompt in prompts}
            practised.base_answers = {text: each for text, each in before.base_answers.items() if text in asked}
        self.users[adapter] = practised
        while len(self.users) > _MOST_USERS:
            self.users.popitem(last=False)
        self._wake.set()

    async def _began(self, adapter: str) -> bool:
        """Tell whether an adapter is on a start: taken before there was a taste to judge it by, or before a restart."""
        try:
            return bool((await asyncio.wrap_future(self._engine.choice(adapter))).start)
        except EngineStopping:
            return False

    def _read(self, adapter: str) -> tuple[list[PracticePrompt], bool]:
        """Read a user's latest prompts, those with signals first, also with the written preference.

        The second item tells whether there are other signals than edits.
        """
        rows = self._store.read(lambda db: latest_pairs(db, adapter, 4 * _PROMPTS))
        written = self._store.read(lambda db: get_preference(db, adapter))
        preference = written.text if written is not None else ""
        found: dict[str, PracticePrompt] = {}
        for row in reversed(rows):
            question = question_of(row.messages, row.prompt)
            if question not in found and len(found) < _PROMPTS:
                with contextlib.suppress(TokenizerError, UnusablePrompt):
                    arguments = _without_tools(row.template_arguments)
                    if arguments != row.template_arguments and row.messages:
                        ids = tuple(self._tokenizer.render_chat(row.messages, arguments))
                    else:
                        ids = tokenize_pair(self._tokenizer, row, 2 * _PROMPT_TOKENS)[0].prompt
                    preferred = self._preferred(row.messages, preference, arguments)
                    found[question] = PracticePrompt(question, ids[-_PROMPT_TOKENS:], preferred)
        for completion in self._store.read(lambda db: latest_prompts(db, adapter, _PROMPTS)):
            question = question_of(completion.messages, completion.prompt)
            if question not in found and len(found) < _PROMPTS:
                with contextlib.suppress(TokenizerError):
                    # Anew: another model's tokenizer may have made the stored tokens.
                    messages, text = completion.messages, completion.prompt or ""
                    arguments, encode = _without_tools(completion.template_arguments), self._tokenizer.encode_prompt
                    asked = encode(text) if messages is None else self._tokenizer.render_chat(messages, arguments)
                    preferred = self._preferred(messages, preference, arguments)
                    found[question] = PracticePrompt(question, tuple(asked[-_PROMPT_TOKENS:]), preferred)
        return list(found.values()), any(row.source != "edit" for row in rows)

    def _preferred(self, messages: Messages | None, preference: str, arguments: Arguments | None) -> tuple[int, ...]:
        if not (messages and preference):
            return ()
        plain, preferred = prompts(self._tokenizer, messages, preference, 2 * _PROMPT_TOKENS, arguments)
        return tuple(preferred) if preferred != plain else ()

    async def relearn(self, adapter: str, began: str = "practised") -> None:
        """Have an adapter learn its user's signals anew, without what was practised by beliefs that are struck now, or
        without the start that it `began` with."""
        rows = await asyncio.to_thread(self._store.read, lambda db: metrics.versions(db, adapter, 10_000))
        made = [row["created_at"] for row in rows if row["reason"].startswith(began)]
        if made:
            # Of starts the latest is the one that is judged.
            await self.undo(adapter, min(made) if began == "practised" else max(made))

    async def undo(self, adapter: str, since: str) -> None:
        """Have an adapter learn anew, from the version before the moment `since` on, its user's signals alone.

        What was practised after that is gone with those versions. Raises UnknownAdapter.
        """
        rows = await asyncio.to_thread(self._store.read, lambda db: metrics.versions(db, adapter, 10_000))
        before = next((row["version"] for row in rows if row["created_at"] < since and row["on_disk"]), 0)
        kept = any(row["reason"] in (*IMPORT_REASONS, "job") for row in rows if row["version"] > before)
        job = await asyncio.to_thread(lambda: self._store.read(lambda db: open_job_of(db, adapter)))
        if kept or job:
            log.info("%s keeps what it practised: weights of an import or a job would be lost", adapter)
            return
        try:
            version = await asyncio.wrap_future(self._engine.rollback(adapter, before))
        except UnknownVersion:
            before, version = 0, await asyncio.wrap_future(self._engine.rollback(adapter, 0))
        log.info("%s learns anew from version %d on, as %d", adapter, before, version)
        await asyncio.wrap_future(self._store.write(lambda db: requeue_taken_back(db, adapter, before)))
        self.learn_again(adapter)
        self.on_taste(adapter)

    async def liked(self, adapter: str) -> Liked:
        """Return how many of an adapter's latest answers its user's taste model likes, told apart from their prompts.

        They are the latest that were served, what the adapter gave by itself, as the first of several, and the base's.
        """
        if self._engine.version(adapter) is None:
            return NOT_JUDGED
        taste, practised = await self._tastes.of(adapter), self.users.get(adapter)
        if taste is None:
            return NOT_JUDGED
        rows, several = await asyncio.to_thread(
            self._store.read,
            lambda db: [latest_answers(db, adapter, _KEPT // 2, several) for several in (False, True)],
        )
        served, own = (
            [DrawnAnswer(question_of(each.messages, each.prompt), each.choices[0].text) for each in reversed(some)]
            for some in (rows, several)
        )
        base = [
            DrawnAnswer(asked, text)
            for asked, some in (practised.base_answers if practised else {}).items()
            for text, _ in some
        ]
        own += practised.adapter_answers if practised else []

        def judged(answers: Sequence[DrawnAnswer]) -> tuple[float, int]:
            likes = [taste.likes(each.question, each.text, apart=True) for each in answers[-_KEPT:]]
            return sum(likes), len(likes)

        told = (taste.version, [each.id for each in (*rows, *several)], len(own), len(base), own[-1:])
        if self._told.get(adapter) != told:
            self.judged[adapter] = await asyncio.to_thread(lambda: Liked(judged(served), judged(own), judged(base)))
            self._told[adapter] = told
        return self.judged[adapter]

    def readings(self, adapters: Collection[str]) -> dict[str, Any]:
        """Return the metric of what was liked, of those of `adapters` that were judged; any thread may call this."""
        known = {name: liked.report() for name, liked in self.judged.copy().items() if name in adapters}
        shares = {(name, kind): each["share"] for name, kinds in known.items() for kind, each in kinds.items() if each}
        return {"edged_adapter_liked_ratio": shares}

    # -- rounds ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._turn()
            except (EngineBusy, RequestRefused):
                await asyncio.sleep(_IDLE_S)
            except Exception:
                log.exception("practice failed: it goes on with the next user")
                await asyncio.sleep(_IDLE_S)

    async def _turn(self) -> None:
        """Have the next user practise for a round, or wait where there is nothing to do."""
        adapter = next((name for name, each in self.users.items() if each.prompts and not each.ended), "")
        if not adapter or not self._live.current.align.practice:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_S):
                    await self._wake.wait()
            # Somebody who has told it once may have asked by now.
            for name in [name for name, each in self.users.items() if not each.prompts]:
                await self._renew(name)
            return
        self.users.move_to_end(adapter)
        practised = self.users[adapter]
        try:
            if not await self._round(adapter, practised):
                await asyncio.sleep(_PAUSE_S)
        except (EngineBusy, RequestRefused):
            raise
        except Exception:
            practised.ended = True
            raise

    async def _round(self, adapter: str, practised: Practised) -> bool:
        """Draw, judge, and learn from what some prompts show; returns whether there was room for it."""
        align = self._live.current.align
        rows = self._engine.spare_rows(_PROMPT_TOKENS // 4 + _ANSWER_TOKENS, _TURN)
        if rows < _LEAST_ROWS or not self._engine.finetuning.open_to_practice(adapter):
            return False
        if practised.turn >= len(practised.prompts):
            # What was asked meanwhile is practised on, too.
            practised.prompts, practised.turn = (await asyncio.to_thread(self._read, adapter))[0], 0
        count, pairs = max(1, min(align.micro_batch_pairs, rows // _ROWS)), list[TokenPair]()
        prompts = practised.next_prompts(count)
        new = [prompt for prompt in prompts if prompt.question not in practised.base_answers]
        for prompt, answers in zip(new, await self._draw(None, adapter, new, _BASE_ANSWERS), strict=True):
            if answers:
                practised.base_answers[prompt.question] = [(each.text(self._tokenizer), each) for each in answers]
        operator = practised.operator
        drawn = await self._draw(adapter, adapter, prompts, min(_ROWS, rows) if operator is None else 1)
        for prompt, answers in zip(prompts, drawn, strict=True):
            practised.adapter_answers.extend(
                DrawnAnswer(prompt.question, each.text(self._tokenizer)) for each in answers
            )
        teach = [prompt for prompt in prompts if prompt.with_preference]
        if practised.preference and teach:
            return await self._distil(adapter, practised, teach)
        if operator is None and practised.taste.operator and not practised.picks:
            practised.ended = True
        elif operator is None:
            pairs = self._comparisons(adapter, practised, prompts, drawn)
        elif not practised.shows(operator):
            # Edits alone say nothing of which of the base's answers is to be edited.
            each = min(_ROWS, rows) if practised.picks else 1
            taught = await self._draw(None, adapter, prompts, each, with_preference=True)
            pairs = self._imitations(adapter, practised, prompts, taught)
        log.debug(
            "practice of %s: %d prompts, %d pairs, gain %.3f, KL %.3f%s",
            *(adapter, len(prompts), len(pairs), practised.gains[-1] if practised.gains else 0.0, practised.kl_nats),
            ", ended" if practised.ended else "",
        )
        if practised.disliked:
            began, what = ("start ", "start") if practised.started else ("practised", "practice")
            log.info("%s unlearns its %s: its user likes the base's answers better by now", adapter, what)
            practised.proven, practised.started, practised.kl_nats = False, False, 0.0
            practised.gains.clear()
            await self.relearn(adapter, began)
            return True
        if practised.ended:
            await self.liked(adapter)
        if pairs and not practised.ended and self.users.get(adapter) is practised:
            made = await self._learn(adapter, practised, pairs)
            if made is not None and made.loss is not None and pairs[0].imitate:
                practised.imitation_nll = made.loss
        return True

    async def _distil(self, adapter: str, practised: Practised, prompts: Sequence[PracticePrompt]) -> bool:
        """Have the adapter imitate the base that has the preference in its prompt, until it answers as that does.

        The mean NLL of such answers, less that by the base itself, is the forward KL of the two (context
        distillation, Snell et al. 2022).
        """
        drawn = await self._draw(None, adapter, prompts, 1, with_preference=True)
        found = [(prompt, answers[0]) for prompt, answers in zip(prompts, drawn, strict=True) if answers]
        pairs = [self._imitation(adapter, prompt, each.token_ids) for prompt, each in found]
        if not pairs or self.users.get(adapter) is not practised:
            return bool(pairs)
        made = await self._learn(adapter, practised, pairs)
        if made is None or made.loss is None:
            return True
        left = made.loss + fmean(fmean(_logprobs(each)) for _, each in found)
        practised.distances.append((left, left + (made.gain_nats or 0.0)))
        share, text = practised.distilled, practised.preference
        log.debug("preference of %s: distances %.3f of %.3f, %.2f learned", adapter, *practised.distances[-1], share)
        learned = share >= _LEARNED
        if learned or practised.without_effect or len(practised.distances) >= _MOST_DISTANCES:
            practised.preference = ""
        if practised.without_effect:
            self._preferences.without_effect.add(adapter)
        if learned:
            logs.event(log, logging.INFO, "preference_learned", f"{adapter} has learned its written preference")
        elif share < practised.told + _TOLD:
            return True
        # From the first step on there is something to undo where the preference is changed.
        practised.told = LEARNED if learned else max(share, _TOLD)
        write = partial(set_distilled, adapter=adapter, text=text, share=practised.told)
        await asyncio.wrap_future(self._preferences.change(adapter, write))
        return True

    async def _draw(
        self,
        adapter: str | None,
        user: str,
        prompts: Sequence[PracticePrompt],
        each: int,
        with_preference: bool = False,
    ) -> list[list[Draw]]:
        """Draw so many answers of each prompt; those that were dropped are left out."""
        sampling = Sampling(
            max_tokens=_ANSWER_TOKENS,
            stop_token_ids=tuple(self._tokenizer.eos_ids),
            logprobs=0 if adapter is None else None,
        )
        requests = [
            Request(
                f"practice-{next(self._numbers)}",
                (with_preference and prompt.with_preference) or prompt.ids,
                sampling,
                adapter,
                ServiceClass.BATCH,
                user,
                fairness_key=_TURN,
                candidate=True,
            )
            for prompt in prompts
            for _ in range(each)
        ]
        draws = await Drawing(self._engine, self._router, requests).collect() if requests else []
        by_prompt = [draws[at : at + each] for at in range(0, len(draws), each)]
        return [[each for each in some if each.whole] for some in by_prompt]

    def _comparisons(
        self, adapter: str, practised: Practised, prompts: Sequence[PracticePrompt], drawn: Sequence[Sequence[Draw]]
    ) -> list[TokenPair]:
        """Return pairs of the best and the worst answer of each prompt, where the taste model is sure of the two."""
        taste, pairs, wins = practised.taste, list[TokenPair](), list[float]()
        for prompt, answers in zip(prompts, drawn, strict=True):
            if not answers:
                continue
            texts, question = [each.text(self._tokenizer) for each in answers], prompt.question
            utilities = taste.scores(question, texts)
            base = practised.base_answers.get(question, [])
            if not is_sure_of(taste, question, texts):
                # What is learned elsewhere shall not spill: here the base's answer is as good as any.
                pairs += [self._imitation(adapter, prompt, each.token_ids, _logprobs(each)) for _, each in base[:1]]
                continue
            wins += [taste.preference(question, text, other) for text in texts for other, _ in base]
            best, worst = int(utilities.argmax()), int(utilities.argmin())
            sure = taste.preference(question, texts[best], texts[worst])
            if sure >= _PREFERRED and texts[best].strip():
                chosen, rejected = (tuple(answers[at].token_ids) for at in (best, worst))
                weight = min(1.0, (sure - 0.5) / (_CERTAIN - 0.5))
                about = (-next(self._numbers), adapter, prompt.ids, chosen, rejected, weight)
                pairs.append(TokenPair(*about, practice=True))
        if wins:
            practised.note(sum(wins) / len(wins))
        if practised.kl_nats > self._budget(taste):
            # Some rounds only judge whether what was practised is still liked.
            practised.ended |= not (practised.proven and wins) or len(practised.gains) >= _DOUBTS
            pairs = []
        practised.ended |= not is_learnable(taste)
        return pairs

    def _imitations(
        self, adapter: str, practised: Practised, prompts: Sequence[PracticePrompt], drawn: Sequence[Sequence[Draw]]
    ) -> list[TokenPair]:
        """Return the best of the base's answers to each prompt as the user would have edited them.

        The rest of such an answer is the base's own text, also by what the user has written: it need only stay as
        likely as the base has it.
        """
        operator, pairs, eos = practised.operator, list[TokenPair](), self._tokenizer.eos_id
        assert operator is not None
        for prompt, answers in zip(prompts, drawn, strict=True):
            answers = [each for each in answers if each.ended]
            texts = [each.text(self._tokenizer) for each in answers]
            if texts:
                best = int(practised.taste.scores(prompt.question, texts).argmax())
                edited = [*self._tokenizer.encode_answer(operator.apply(texts[best])), eos]
                floors = _floors(answers[best].token_ids, _logprobs(answers[best]), edited)
                pairs.append(self._imitation(adapter, prompt, edited, floors))
        return pairs

    def _imitation(
        self, adapter: str, prompt: PracticePrompt, answer: Sequence[int], floors: Sequence[float] = ()
    ) -> TokenPair:
        """Return an answer to imitate; `floors` are those of its tokens."""
        # Log-probabilities by the base have no part in those with floors: its forward is left out.
        known = 0.0 if floors else None
        about = (-next(self._numbers), adapter, prompt.ids, tuple(answer), (), 1.0, known, known)
        return TokenPair(*about, practice=True, imitate=True, floors=tuple(floors))

    async def _learn(self, adapter: str, practised: Practised, pairs: list[TokenPair]) -> VersionPublished | None:
        """Have the engine train on practice; returns the version that it makes, or None."""
        stepped = self._stepped[adapter] = asyncio.get_running_loop().create_future()
        self._engine.practise(adapter, pairs)
        try:
            async with asyncio.timeout(_STEP_S):
                made = await stepped
            if made is not None and made.own_kl_nats is not None:
                practised.kl_nats += 0.3 * (max(0.0, made.own_kl_nats) - practised.kl_nats)
            return made
        except TimeoutError:
            # The box is busy, or governors hold training back: what was drawn is old by then.
            self._engine.practise(adapter, [])
            return None
        finally:
            del self._stepped[adapter]

    def _budget(self, taste: Taste) -> float:
        """Return the KL that the evidence allows: it grows with the number of prompts that have signals."""
        evidence = taste.prompts / (taste.prompts + _EVIDENCE)
        return self._live.current.align.kl_budget * evidence if taste.prompts else -math.inf


def _without_tools(arguments: Arguments | None) -> Arguments | None:
    """Return the arguments of a prompt to practise by: calls are no matter of taste."""
    return {name: value for name, value in (arguments or {}).items() if name != "tools"} or None


def _logprobs(draw: Draw) -> list[float]:
    """Return the log-probability of each token that was drawn."""
    return [event.logprob or 0.0 for event in draw.tokens]


def _floors(drawn: Sequence[int], logprobs: Sequence[float], edited: Sequence[int]) -> list[float]:
    """Return the floors of an edited answer's tokens: those that were drawn, too, have what they had there.

    The token after a change is a part of it: without the change another one stood there.
    """
    floors = [math.inf] * len(edited)
    for i, k, count in SequenceMatcher(None, drawn, edited, autojunk=False).get_matching_blocks():
        begun = 1 if (i, k) != (0, 0) else 0
        floors[k + begun : k + count] = logprobs[i + begun : i + count]
    return floors
