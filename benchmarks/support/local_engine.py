"""An engine in this process, without sockets and store."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.interleave import LONGEST_WAIT_S
from edged.align.feedback.pair import PairRetired, Record, TokenPair, VersionPublished, VersionSaved
from edged.engine.engine import Engine
from edged.engine.request import Event, Request, TokenEvent
from edged.engine.sampling.params import Sampling
from edged.profiler.recorder import ReplayedAnswer, ReplayRecorder
from edged.scheduler.reader import Pace
from edged.settings.load import Settings

WEIGHTS_FILE = "adapter_model.safetensors"


class LearningRecorder(ReplayRecorder):
    """A recorder that also keeps answers' tokens, and outcomes of pairs and versions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: defaultdict[str, list[TokenEvent]] = defaultdict(list)
        """Tokens by request."""
        self.outcomes: dict[int, PairRetired] = {}
        """The latest outcome of each pair, by its id."""
        self.versions: list[tuple[float, VersionPublished]] = []
        """Published versions with the times of their records."""
        self.files: dict[tuple[str, int], str] = {}
        """Weights files of the versions on disk, by adapter and version."""

    def deliver(self, events: list[Event]) -> None:
        """Keep the tokens, before the base class wakes those who wait for a request's end."""
        for event in events:
            if isinstance(event, TokenEvent):
                self.tokens[event.request_id].append(event)
        super().deliver(events)

    def journal(self, records: list[Record]) -> None:
        """Keep the records, and wake those who wait for any of them."""
        super().journal(records)
        with self._changed:
            for record in records:
                if isinstance(record, PairRetired):
                    self.outcomes[record.pair_id] = record
                elif isinstance(record, VersionPublished):
                    self.versions.append((self.clock(), record))
                elif isinstance(record, VersionSaved):
                    self.files[record.adapter, record.version] = str(Path(record.path) / WEIGHTS_FILE)
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], Any], what: str, seconds: float = LONGEST_WAIT_S) -> None:
        """Wait until `condition` holds, checked on events and records. Raises RuntimeError on timeout."""
        with self._changed:
            if not self._changed.wait_for(condition, seconds):
                raise RuntimeError(f"the engine: {what} was not there after {seconds:g} s")


class LocalEngine:
    """A running engine that answers greedily and to the full length by default.

    `settings` are sections as in a settings file; `watch` may replace methods of its parts before the engine starts.
    """

    def __init__(
        self,
        model: Path,
        settings: Settings | dict[str, dict[str, Any]],
        folder: Path | None = None,
        watch: Callable[[Engine], None] = lambda _engine: None,
        recorder: LearningRecorder | None = None,
    ) -> None:
        self.recorder = recorder or LearningRecorder()
        made = Settings.model_validate(settings)
        self.engine = Engine.build(made, model, self.recorder.deliver, self.recorder.journal, folder)
        watch(self.engine)
        self.vocab = self.engine.model.shape.vocab_size
        self.engine.start()

    def ask(
        self,
        name: str,
        prompt: Sequence[int],
        tokens: int,
        adapter: str | None = None,
        due_s: float | None = None,
        pace: Pace | None = None,
        **sampling: Any,
    ) -> float:
        """Submit a request that is due at `due_s`, or now, and read along at `pace`, if at all; return that time
        (monotonic clock)."""
        chosen = Sampling(**{"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **sampling})
        due_s = time.monotonic() if due_s is None else due_s
        self.recorder.expect(name, due_s, len(prompt))
        self.engine.submit(Request(name, tuple(prompt), chosen, adapter, pace=pace))
        return due_s

    def submit_pairs(self, pairs: Sequence[TokenPair]) -> None:
        """Submit pairs to learn."""
        for pair in pairs:
            self.recorder.expect_pair(pair.pair_id)
        self.engine.submit_pairs(list(pairs))

    def wait(self, seconds: float = LONGEST_WAIT_S) -> dict[str, ReplayedAnswer]:
        """Wait until all requests are answered; return the answers since the last call. Raises RuntimeError if one is
        not."""
        self.recorder.wait_for_whole_answers(lambda: self.engine.error, seconds)
        found, self.recorder.answers = self.recorder.answers, {}
        return found

    def close(self) -> None:
        """Stop the engine."""
        self.engine.stop(0.0)
