"""A real engine over a small random model, driven from a test."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edged.align.feedback.pair import Record, TokenPair
from edged.engine.engine import Engine
from edged.engine.lora_selftest import PASSED
from edged.engine.request import Event, FinishEvent, Request, TokenEvent
from edged.engine.sampling.params import Sampling
from edged.governors.limits import EngineLimits
from edged.settings.load import Settings, load_settings
from tests.cache.integrity import check_trie
from tests.models import DEVICE, save_tiny

PASSED_BY_KIND: dict[str, bytes] = {}
"""The self-test that a model of a kind passed last: an engine of the same does without, as a daemon that restarts."""


class Client:
    """Collects an engine's events and records; waits for them."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[TokenEvent]] = defaultdict(list)
        self.finished: dict[str, FinishEvent] = {}
        self.records: list[Record] = []
        self._changed = threading.Condition()

    def deliver(self, events: list[Event]) -> None:
        with self._changed:
            for event in events:
                if isinstance(event, TokenEvent):
                    self.tokens[event.request_id].append(event)
                else:
                    self.finished[event.request_id] = event
            self._changed.notify_all()

    def journal(self, records: list[Record]) -> None:
        with self._changed:
            self.records += records
            self._changed.notify_all()

    def wait(self, condition: Any, seconds: float = 60.0) -> None:
        """Until `condition()` holds, which need not come with an event; fails after `seconds`."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not condition():
                assert time.monotonic() < deadline, "the engine did not get there in time"
                self._changed.wait(0.05)

    def of(self, kind: type) -> list[Any]:
        return [record for record in list(self.records) if isinstance(record, kind)]

    def ids(self, request_id: str) -> list[int]:
        return [event.token_id for event in self.tokens[request_id]]


class BuiltEngine(Engine):
    """An engine whose parts the test checks after every iteration, and may replace methods of."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.built = self
        self.broken: list[str] = []
        """Invariants of pool or trie that an iteration broke."""
        runner = self.runner
        run = runner.run

        def checked(*arguments: Any, **named: Any) -> Any:
            work = run(*arguments, **named)
            try:
                check_trie(runner.pages.trie)
            except AssertionError as error:
                self.broken.append(str(error))
            return work

        runner.run = checked  # type: ignore[method-assign]

    def pause_finetuning(self, paused: bool) -> None:
        """Open no steps, as governors have it, or go on."""
        self.limit(EngineLimits(finetune_share=0.0 if paused else 1.0))


@contextmanager
def running_engine(
    tmp_path: Path, kind: str = "llama", data: str = "data", fails: bool = False, **settings: Any
) -> Iterator[tuple[BuiltEngine, Client]]:
    """An engine on a saved tiny model, which `fails` or not; `settings` are section__key overrides."""
    model = tmp_path / f"model-{kind}"
    if not model.exists():
        save_tiny(model, kind)
    overrides = {"model.device": str(DEVICE), "model.dtype": "float32", "cache.page_size": 8, "cache.memory_mb": 4}
    overrides |= {key.replace("__", "."): value for key, value in settings.items()}
    made: Settings = load_settings(environ={}, overrides=overrides)
    client, passed = Client(), tmp_path / data / PASSED
    passed.parent.mkdir(exist_ok=True)
    if PASSED_BY_KIND.get(kind):
        passed.write_bytes(PASSED_BY_KIND[kind])
    engine = BuiltEngine.build(made, model, client.deliver, client.journal, passed.parent)
    if passed.exists():
        PASSED_BY_KIND[kind] = passed.read_bytes()
    engine.start()
    try:
        yield engine, client
        assert not engine.broken, engine.broken[0]
        assert (engine.error is not None) is fails
    finally:
        engine.stop(5.0)


def request(name: str, prompt: list[int], tokens: int = 12, adapter: str | None = None, **sampling: Any) -> Request:
    options = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, **sampling}
    return Request(name, tuple(prompt), Sampling(**options), adapter)


def random_ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, count).tolist()


def random_pairs(
    count: int, adapter: str = "ann", seed: int = 0, first_id: int = 1, prompt: int = 14, answer: int = 9
) -> list[TokenPair]:
    """Pairs with a learnable taste: chosen answers use other tokens than rejected ones."""
    rng = np.random.default_rng(seed)
    return [
        TokenPair(
            first_id + i,
            adapter,
            tuple(rng.integers(3, 250, prompt).tolist()),
            (*rng.integers(3, 120, answer).tolist(), 2),
            (*rng.integers(130, 250, answer).tolist(), 2),
        )
        for i in range(count)
    ]


def wait_idle(engine: Engine, seconds: float = 60.0) -> None:
    """Until no pair is queued, and no talk is computed again under a new version."""
    deadline, table = time.monotonic() + seconds, engine.sequences
    while engine.status()["finetune"]["pairs_queued"] or table.renewals.pending:
        assert time.monotonic() < deadline, "pairs are still queued, or a talk is still computed again"
        time.sleep(0.02)
