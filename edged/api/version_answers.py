"""Answers of adapter versions: each tested version answers its adapter's first prompt, for people to compare."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from sqlite_utils import Database

from edged.align.feedback.pair import Record, VersionTested
from edged.align.feedback.pair_tokens import UnusablePrompt, tokenize_pair
from edged.api.drawing import Drawing
from edged.api.event_router import EventRouter
from edged.engine.engine import Engine
from edged.engine.request import EngineBusy, Request, RequestRefused
from edged.engine.sampling.params import Sampling
from edged.scheduler.task import ServiceClass
from edged.store import Store, StoreError
from edged.store.adapters import unanswered_versions, update_version
from edged.store.feedback import PairRow, Side, first_pair
from edged.text.tokenizer import Tokenizer, TokenizerError

log = logging.getLogger("edged.api")
_TOKENS, _PROMPT_TOKENS = 48, 512
_UNTRAINED_S = 10.0
"""How long the base model's answer is waited for."""


class VersionAnswers:
    """Generates one version's answer at a time, in the batch class; of an adapter's versions the latest one waits."""

    def __init__(
        self,
        store: Store,
        tokenizer: Tokenizer,
        engine: Engine,
        event_router: EventRouter,
        answered: Callable[[str, int], None],
    ) -> None:
        """`answered(adapter, version)` is called when a version's answer is on disk."""
        self._store, self._tokenizer, self._engine, self._event_router = store, tokenizer, engine, event_router
        self._answered = answered
        self._waiting: dict[str, int] = {}
        """Versions to be asked, by adapter, in the order in which the adapters' tests ended."""
        self._asking: asyncio.Task[None] | None = None
        self._untrained: dict[str, tuple[int, str]] = {}
        """(Id of the first pair, the base model's answer to its prompt) by adapter."""
        self._one_at_a_time = asyncio.Lock()

    def on_records(self, records: Sequence[Record]) -> None:
        """Ask the versions among the records that passed their test; any thread may call this."""
        for record in records:
            if isinstance(record, VersionTested) and record.version and not record.problem:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._event_router.loop.call_soon_threadsafe(self._start, record.adapter, record.version)

    def resume(self) -> None:
        """Ask the versions that were not asked before the daemon last ended, 64 at most; any thread may call this."""
        for adapter, version in self._store.read(lambda db: unanswered_versions(db, 64)):
            self._event_router.loop.call_soon_threadsafe(self._start, adapter, version)

    def _start(self, adapter: str, version: int) -> None:
        self._waiting[adapter] = version
        if self._asking is None or self._asking.done():
            self._asking = self._event_router.loop.create_task(self._ask_all())

    async def _ask_all(self) -> None:
        while self._waiting:
            adapter = next(iter(self._waiting))
            version = self._waiting.pop(adapter)
            try:
                await self._ask(adapter, version)
            except StoreError as error:
                log.debug("version %d of %s has no answer: %s", version, adapter, error)
            except Exception:
                log.exception("version %d of %s has no answer", version, adapter)

    async def untrained(self, adapter: str, first: PairRow) -> str | None:
        """The base model's answer to the prompt of an adapter's first pair.

        None where it does not come in time, or another one is being asked for.
        """
        pair_id, answer = self._untrained.get(adapter, (0, ""))
        if pair_id == first.id:
            return answer
        if self._one_at_a_time.locked():
            return None
        async with self._one_at_a_time:
            found = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_UNTRAINED_S):
                    found = await self._answer(f"probe-{adapter}-untrained", first, None, 0)
            # The adapter may have been forgotten meanwhile.
            if found is not None and await asyncio.to_thread(self._store.read, lambda db: _is_first(db, first)):
                self._untrained[adapter] = first.id, found
            return found

    def forget(self, adapter: str) -> None:
        """Forget the base model's answer to an adapter's prompt."""
        self._untrained.pop(adapter, None)

    async def _ask(self, adapter: str, version: int) -> None:
        first = await asyncio.to_thread(self._store.read, lambda db: first_pair(db, adapter))
        if first is None:
            return
        answer = await self._answer(f"probe-{adapter}-{version}", first, adapter, version)

        def write(db: Database) -> bool:
            # The adapter may have been forgotten meanwhile, and taught anew.
            if same := _is_first(db, first):
                update_version(db, adapter, version, answer=answer)
            return same

        if answer is not None and await asyncio.wrap_future(self._store.write(write)):
            self._answered(adapter, version)

    async def _answer(self, request_id: str, first: PairRow, adapter: str | None, version: int) -> str | None:
        """Generate a version's answer to a pair's prompt; None where it is refused or the version is replaced."""
        try:
            # An answer that was not generated may change how the prompt ends.
            chosen, rejected = (side if side.token_ids else Side("") for side in (first.chosen, first.rejected))
            asked = replace(first, chosen=chosen, rejected=rejected)
            prompt = (await asyncio.to_thread(tokenize_pair, self._tokenizer, asked, _PROMPT_TOKENS))[0].prompt
            sampling = Sampling(max_tokens=_TOKENS, temperature=0.0)
            batch, turn = ServiceClass.BATCH, "(versions)"
            request = Request(
                request_id, prompt, sampling, adapter, service=batch, tenant=first.adapter, fairness_key=turn
            )
            (drawn,) = await Drawing(self._engine, self._event_router, [request]).collect()
        except (EngineBusy, RequestRefused, TokenizerError, UnusablePrompt) as error:
            log.debug("version %d of %s is not asked for an answer: %s", version, first.adapter, error)
            return None
        if not drawn.whole or any(event.version != version for event in drawn.tokens):
            return None
        return drawn.text(self._tokenizer)


def _is_first(db: Database, pair: PairRow) -> bool:
    """Whether a pair is still the first of its adapter."""
    first = first_pair(db, pair.adapter)
    return first is not None and first.id == pair.id
