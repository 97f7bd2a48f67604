"""An engine in this process, asked directly: no sockets and no store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.interleave import LONGEST_WAIT_S
from edged.bench.recorder import ReplayedAnswer, ReplayRecorder
from edged.engine.engine import Engine
from edged.engine.request import Event, Request
from edged.engine.sampling.params import Sampling
from edged.settings.load import Settings


class LocalEngine:
    """A running engine that answers every request to its full length, greedily unless told otherwise.

    `settings` are sections as in a settings file; `watch` may replace methods of its parts before the engine starts,
    `also` hears of the events as well, on the engine's thread.
    """

    def __init__(
        self,
        model: Path,
        settings: Settings | dict[str, dict[str, Any]],
        folder: Path | None = None,
        watch: Callable[[Engine], None] = lambda _engine: None,
        also: Callable[[list[Event]], None] = lambda _events: None,
    ) -> None:
        self._recorder, self._also = ReplayRecorder(), also
        settings = Settings.model_validate(settings)
        self.engine = Engine.build(settings, model, self._deliver, lambda _records: None, folder)
        watch(self.engine)
        self.vocab = self.engine.model.shape.vocab_size
        self.engine.start()

    def _deliver(self, events: list[Event]) -> None:
        # First: whoever waits for the answers finds what it took from the events.
        self._also(events)
        self._recorder.deliver(events)

    def ask(self, name: str, prompt: Sequence[int], tokens: int, adapter: str | None = None, **sampling: Any) -> float:
        """Submit a request; the moment at which it was asked (monotonic clock)."""
        chosen = Sampling(**{"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **sampling})
        asked_s = time.monotonic()
        self._recorder.expect(name, asked_s, len(prompt))
        self.engine.submit(Request(name, tuple(prompt), chosen, adapter))
        return asked_s

    def wait(self) -> dict[str, ReplayedAnswer]:
        """Wait until all are answered; the answers since the last call. RuntimeError where one is not."""
        self._recorder.whole_answers(lambda: self.engine.error, LONGEST_WAIT_S)
        found, self._recorder = self._recorder.answers, ReplayRecorder()
        return found

    def close(self) -> None:
        """Stop the engine."""
        self.engine.stop(0.0)
