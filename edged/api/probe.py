"""Answers of adapter versions: each tested version answers its adapter's first prompt, for people to compare."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from edged.align.feedback.pair import Record, VersionTested
from edged.align.feedback.pair_tokens import UnusablePrompt, tokenize_pair
from edged.api.event_router import EventRouter
from edged.engine.engine import Engine
from edged.engine.request import EngineBusy, Event, FinishEvent, Request, RequestRefused
from edged.engine.sampling.params import Sampling
from edged.scheduler.task import ServiceClass
from edged.store import Store, StoreError
from edged.store.adapters import update_version
from edged.store.feedback import first_pair
from edged.text.tokenizer import Tokenizer, TokenizerError

log = logging.getLogger("edged.api")
_TOKENS, _PROMPT_TOKENS = 48, 512


class VersionAnswers:
    """Generates one version's answer at a time, in the batch class; versions that are tested meanwhile are skipped."""

    def __init__(self, store: Store, tokenizer: Tokenizer, engine: Engine, event_router: EventRouter) -> None:
        self._store, self._tokenizer, self._engine, self._event_router = store, tokenizer, engine, event_router
        self._asking: asyncio.Task[None] | None = None

    def tell(self, records: Sequence[Record]) -> None:
        """Ask the versions among the records that passed their test; any thread may call this."""
        for record in records:
            if isinstance(record, VersionTested) and record.version and not record.problem:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._event_router.loop.call_soon_threadsafe(self._start, record.adapter, record.version)

    def _start(self, adapter: str, version: int) -> None:
        if self._asking is None or self._asking.done():
            self._asking = self._event_router.loop.create_task(self._ask(adapter, version))

    async def _ask(self, adapter: str, version: int) -> None:
        queue: asyncio.Queue[Event] = asyncio.Queue()
        request_id = f"probe-{adapter}-{version}"
        try:
            row = await asyncio.to_thread(self._store.read, lambda db: first_pair(db, adapter))
            if row is None:
                return
            prompt = (await asyncio.to_thread(tokenize_pair, self._tokenizer, row, _PROMPT_TOKENS))[0].prompt
            sampling = Sampling(max_tokens=_TOKENS, temperature=0.0)
            self._event_router.expect(request_id, queue)
            self._engine.submit(Request(request_id, prompt, sampling, adapter, service=ServiceClass.BATCH))
        except (EngineBusy, RequestRefused, TokenizerError, UnusablePrompt, StoreError) as error:
            self._event_router.drop(request_id)
            log.debug("version %d of %s is not asked for an answer: %s", version, adapter, error)
            return
        ids: list[int] = []
        while not isinstance(event := await queue.get(), FinishEvent):
            if event.version != version:
                self._engine.cancel(request_id)
                self._event_router.drop(request_id)
                return
            ids.append(event.token_id)
        answer = self._tokenizer.decode([token for token in ids if token not in self._tokenizer.eos_ids])
        self._store.write(lambda db: update_version(db, adapter, version, answer=answer))
