"""Answers that are given up: what the engine has of them still counts, and what it has not does not begin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edged.api.admission import TenantQueue, UserLimits
from edged.api.completions import counted
from edged.api.event_router import EventRouter
from edged.api.generation import Generation
from edged.api.requests import CompletionRequest
from edged.api.runs import ApplicationRun, RunNames
from edged.api.services import Services
from edged.engine.request import FinishEvent, TokenEvent
from edged.engine.sampling.params import Sampling
from edged.settings.load import LimitSettings, load_settings
from edged.store.completions import Completion
from edged.text.tokenizer import Tokenizer
from tests.engine.harness import BuiltEngine
from tests.models import byte_tokenizer, save_tiny


@asynccontextmanager
async def serving(folder: Path, places: int = 8) -> AsyncIterator[Any]:
    """The parts that a generation needs, with an engine that runs when the test has it step."""
    router = EventRouter(asyncio.get_running_loop())
    settings = load_settings(environ={}, overrides={"model.device": "cpu", "cache.memory_mb": 4})
    engine = BuiltEngine.build(settings, save_tiny(folder / "tiny"), router.deliver, lambda _: None, None)
    admission = TenantQueue(lambda: (places, 100))
    tokenizer = Tokenizer(byte_tokenizer(), "bytes")
    parts = {"engine": engine, "event_router": router, "admission": admission, "tokenizer": tokenizer}
    try:
        yield SimpleNamespace(**parts, settings=settings, limits=UserLimits(LimitSettings(concurrent_requests=1)))
    finally:
        engine.runner.close()


def generation_of(services: Any, choices: int = 1) -> Generation:
    body = CompletionRequest.checked({"prompt": "hi", "n": choices})
    known = Completion("cmpl-1", "", "text_completion", "tiny", (5, 6), (), None, None, prompt="hi")
    sampling = Sampling(max_tokens=4, ignore_eos=True)
    made = Generation(cast(Services, services), body, known, known.prompt_ids, sampling, "ann", "ann", False)
    made.run = ApplicationRun("", "ann", "text", "cmpl-1", 0.0, 0.0)
    return made


async def test_its_place_is_taken_until_the_engine_has_ended_it(tmp_path: Path) -> None:
    async with serving(tmp_path, places=1) as services:
        generation = generation_of(services)
        await generation.start()
        generation.abandon()
        waiting = asyncio.ensure_future(services.admission.enter("bob"))
        await asyncio.sleep(0.0)
        assert not waiting.done()
        services.engine.loop.step()
        await asyncio.wait_for(waiting, 5.0)


@pytest.mark.parametrize("others", [True, False], ids=["others ask", "alone"])
async def test_further_choices_begin_after_the_first_token_of_the_first_while_others_ask(
    tmp_path: Path, others: bool
) -> None:
    async with serving(tmp_path) as services:
        if others:
            await services.admission.enter("bob")
        generation = generation_of(services, choices=4)
        await generation.start()
        await asyncio.sleep(0.0)
        assert services.event_router.open_requests == (1 if others else 4)

        async def read() -> None:
            async for _ in generation.updates():
                pass

        reading = asyncio.ensure_future(read())
        async with asyncio.timeout(60.0):
            while not reading.done():
                services.engine.loop.step()
                await asyncio.sleep(0.001)
        assert [len(answer.token_ids) for answer in generation.answers] == [4] * 4
        assert not services.admission.waiting


async def test_who_gave_up_hears_of_the_end_once_and_of_nothing_else() -> None:
    router, ended = EventRouter(asyncio.get_running_loop()), list[str]()
    queue: asyncio.Queue[Any] = asyncio.Queue()
    for name in ("given up", "ended"):
        router.expect(name, queue)
    router.deliver([FinishEvent("ended", "length")])
    await asyncio.sleep(0.0)
    router.drop("ended", lambda: ended.append("ended"))
    assert ended == ["ended"]
    router.drop("given up", lambda: ended.append("given up"))
    router.deliver([TokenEvent("given up", 5, 0)])
    await asyncio.sleep(0.0)
    assert ended == ["ended"]
    router.deliver([FinishEvent("given up", "cancelled")] * 2)
    await asyncio.sleep(0.0)
    assert ended == ["ended", "given up"]
    assert queue.qsize() == 1


async def test_a_request_that_fails_before_it_begins_leaves_no_place_taken(tmp_path: Path) -> None:
    async with serving(tmp_path) as services:

        def fail(*_: object) -> None:
            raise OSError("no room")

        services.runs = SimpleNamespace(begin=fail)
        for _ in range(2):
            with (
                pytest.raises(OSError, match="no room"),
                counted(services, generation_of(services), RunNames("text", ""), 10),
            ):
                pass
