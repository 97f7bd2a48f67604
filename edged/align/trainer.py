"""Who learns what, and when a version is published: queues of pairs, steps, tests, versions of all adapters.

Owns the life of a pair from submission to its outcome. Must not know when its steps run (the scheduler's matter) nor
how a version reaches the packed batch (the engine's). Not thread-safe: the engine thread alone uses it.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from edged.align.adapter import AdapterError, AdapterState
from edged.align.decoder import Decoder
from edged.align.dpo import DpoStep
from edged.align.guard import HeldOutScore, judge
from edged.align.held_out import HeldOutTest
from edged.align.pair import (
    PairRetired,
    PairState,
    Record,
    StepSkipped,
    TokenPair,
    VersionPublished,
)
from edged.align.shelf import Shelf
from edged.config import AlignSettings, GuardSettings

FineTuneStep = DpoStep | HeldOutTest
_REPLAY_POOL = 64
_FIRST_LOSS = math.log(2.0)
"""DPO's loss of an adapter that answers as the base."""


class UnknownAdapter(KeyError):
    """No adapter of that name."""


class UnknownVersion(KeyError):
    """The adapter has no such version on disk."""


@dataclass(slots=True)
class Learner:
    """One adapter's pairs and progress."""

    name: str
    queue: deque[TokenPair] = field(default_factory=deque)
    replay: deque[TokenPair] = field(default_factory=lambda: deque(maxlen=_REPLAY_POOL))
    held_out: dict[int, TokenPair] = field(default_factory=dict)
    unscored: set[int] = field(default_factory=set)
    """Held-out pairs that no version was tested on yet."""
    seen: int = 0
    step: FineTuneStep | None = None
    tested_version: int = -1
    best: HeldOutScore | None = None
    best_weights: dict[str, torch.Tensor] | None = None
    loss: float = _FIRST_LOSS


class Trainer:
    """All adapters of one base model."""

    def __init__(
        self,
        shelf: Shelf,
        align: AlignSettings,
        guard: GuardSettings,
        decoder: Decoder,
        release: Callable[[np.ndarray], None],
        cache_tokens: int,
    ) -> None:
        """`cache_tokens` is the whole K/V cache: a group's forwards, by adapter and base, must fit in half of it."""
        self.shelf, self._align, self._guard = shelf, align, guard
        self._decoder, self._release = decoder, release
        self._published: Callable[[AdapterState, int], None] = lambda state, parent: None
        self._learners: dict[str, Learner] = {}
        self._most_tokens = cache_tokens // 4
        self._random = random.Random(0)
        self.records: list[Record] = []
        self.pairs_trained = 0
        self.steps = 0

    def on_publish(self, published: Callable[[AdapterState, int], None]) -> None:
        """Whom to tell of a new version: called with its state and the version that it follows."""
        self._published = published

    # -- what is there -----------------------------------------------------------------------------------------------

    def versions(self) -> dict[str, int]:
        """Current version by adapter; 0 is an adapter that has not learnt yet."""
        return dict(self.shelf.versions)

    def version(self, adapter: str | None) -> int:
        """The adapter's current version; 0 when it has not learnt, or is not there at all."""
        return self.shelf.versions.get(adapter or "", 0)

    def state(self, adapter: str) -> AdapterState:
        """The current weights. Raises UnknownAdapter."""
        if adapter not in self.shelf.versions:
            raise UnknownAdapter(adapter)
        return self.shelf.get(adapter)

    def pairs_queued(self) -> int:
        """Pairs that wait for training or are in a step."""
        waiting = sum(len(learner.queue) for learner in self._learners.values())
        return waiting + sum(len(x.step.fresh) for x in self._learners.values() if isinstance(x.step, DpoStep))

    def loss(self, adapter: str) -> float:
        """Mean loss of the adapter's latest step; ln 2 before the first."""
        return self._learners[adapter].loss

    def _learner(self, adapter: str) -> Learner:
        self.shelf.versions.setdefault(adapter, 0)
        return self._learners.setdefault(adapter, Learner(adapter))

    def tidy(self, busy: Collection[str]) -> None:
        """Drop idle states from memory when there are too many; `busy` adapters answer somebody now."""
        working = {name for name, learner in self._learners.items() if learner.step is not None}
        for name in self.shelf.tidy(working.union(busy)):
            if name in self._learners:
                self._learners[name].best_weights = None

    def _best_weights(self, learner: Learner) -> Mapping[str, torch.Tensor] | None:
        """Of the best tested version, from disk when they left memory; None (untrained) when they are nowhere."""
        if learner.best_weights is None and learner.best is not None and learner.best.version:
            with contextlib.suppress(AdapterError):
                return self.shelf.files.load(learner.name, learner.best.version).weights
        return learner.best_weights

    # -- pairs in ----------------------------------------------------------------------------------------------------

    def submit(self, pairs: Sequence[TokenPair]) -> None:
        """Take pairs in: new ones are queued or held out; earlier ones go where their state says."""
        for pair in pairs:
            learner = self._learner(pair.adapter)
            if pair.tokens > self._most_tokens:
                reason = f"{pair.tokens} tokens do not fit: the K/V cache has room for pairs of {self._most_tokens}"
                self._retire(pair, "skipped", self.version(pair.adapter), pair.epochs_done, reason)
            elif pair.state == "held_out":
                learner.held_out[pair.pair_id] = pair
            elif pair.state != "queued":
                learner.replay.append(pair)
            elif self._hold_out(learner, pair):
                learner.held_out[pair.pair_id] = replace(pair, state="held_out")
                learner.unscored.add(pair.pair_id)
                self._retire(pair, "held_out", self.version(pair.adapter), 0)
            else:
                learner.queue.append(pair)

    def _hold_out(self, learner: Learner, pair: TokenPair) -> bool:
        if pair.epochs_done:
            return False
        learner.seen += 1
        share, room = self._guard.held_out_share, len(learner.held_out) < self._guard.held_out_pairs
        return share > 0 and room and learner.seen % max(1, round(1 / share)) == 0

    # -- work out ----------------------------------------------------------------------------------------------------

    def ready(self) -> list[str]:
        """Adapters that have work and no step under way."""
        return [name for name, x in self._learners.items() if x.step is None and (x.queue or self._test_due(x))]

    def _test_due(self, learner: Learner) -> bool:
        if not learner.held_out:
            return False
        behind = self.version(learner.name) - learner.tested_version
        return behind >= self._guard.evaluate_every or (not learner.queue and (behind > 0 or bool(learner.unscored)))

    def open(self, adapter: str, keep_graph: bool = False) -> FineTuneStep:
        """Begin the adapter's next step or test; `close` ends it. Its state should be resident.

        A step may keep its graph, which takes memory and saves time, where `keep_graph` is set.
        """
        learner = self._learner(adapter)
        if self._test_due(learner):
            return self._open_test(learner)
        fresh = [learner.queue.popleft() for _ in range(min(len(learner.queue), self._align.micro_batch_pairs))]
        wanted = min(len(learner.replay), round(len(fresh) * self._align.replay_share + 1e-9))
        if self._align.replay_share and not wanted and learner.replay:
            # Single pairs would never be accompanied: chance keeps the share.
            wanted = int(self._random.random() < len(fresh) * self._align.replay_share)
        older = self._random.sample(list(learner.replay), wanted)
        try:
            learner.step = DpoStep(
                self.shelf.get(adapter),
                fresh,
                older,
                self._decoder,
                self._align,
                self._release,
                self._most_tokens,
                keep_graph,
            )
        except Exception as error:
            self._skipped(learner, fresh, f"{type(error).__name__}: {error}")
            raise
        return learner.step

    def _open_test(self, learner: Learner) -> HeldOutTest:
        version, pairs = self.version(learner.name), list(learner.held_out.values())
        try:
            test = HeldOutTest(learner.name, version, pairs, self._decoder, self._align, self._release)
        except Exception:
            # Not again at once: the next versions will be tested.
            learner.tested_version = version
            learner.unscored.clear()
            raise
        learner.step = test
        return test

    def close(self, adapter: str, seconds: float) -> None:
        """Take in a step that finished `seconds` after it was opened: outcomes, a new version, a judgement."""
        learner = self._learners[adapter]
        step, learner.step = learner.step, None
        assert step is not None
        if isinstance(step, HeldOutTest):
            self._close_test(learner, step)
        else:
            self._close_step(learner, step, seconds)

    def _close_step(self, learner: Learner, step: DpoStep, seconds: float) -> None:
        state = self.shelf.get(learner.name)
        self.records += step.scores
        learner.loss = step.loss if math.isfinite(step.loss) else _FIRST_LOSS
        if step.error:
            self._skipped(learner, step.fresh, step.error)
            if not math.isfinite(step.loss) and step.version > 0:
                # Weights that answer with NaN or infinity must not be served a moment longer.
                self._restore(learner, self._best_weights(learner), f"guard: {step.error}")
            return
        for pair, loss, trained in step.outcomes:
            epochs = pair.epochs_done + int(trained)
            if trained and epochs < self._align.epochs:
                learner.queue.append(replace(pair, epochs_done=epochs))
                self._retire(pair, "queued", state.version, epochs)
                continue
            ended: PairState = "trained" if trained else "learnt"
            learner.replay.append(replace(pair, epochs_done=epochs, state=ended))
            reason = "" if trained else f"loss {loss:.4f} is under align.loss_threshold"
            self._retire(pair, ended, state.version, epochs, reason)
            self.pairs_trained += 1
        if step.trained:
            self.steps += 1
            self._publish(learner, step.version, "trained", step, seconds)

    def _close_test(self, learner: Learner, test: HeldOutTest) -> None:
        score = HeldOutScore.of(test.version, test.scores)
        learner.tested_version = test.version
        for scored in test.scores:
            self.records.append(scored)
            if scored.pair_id in learner.unscored:
                self.records.append(replace(scored, split="prequential", kl_nats=None))
        learner.unscored -= {scored.pair_id for scored in test.scores}
        if test.version != self.version(learner.name):
            return
        reason = judge(score, learner.best, self._guard)
        if reason:
            self._restore(learner, self._best_weights(learner), reason)
        elif score.better_than(learner.best, self._guard):
            learner.best, learner.best_weights = score, self.shelf.get(learner.name).tensors()

    def _publish(
        self, learner: Learner, parent: int, reason: str, step: DpoStep | None = None, seconds: float = 0.0
    ) -> None:
        state = self.shelf.get(learner.name)
        self.shelf.versions[state.name] = state.version
        self.records.append(
            VersionPublished(
                adapter=state.name,
                version=state.version,
                parent=parent,
                reason=reason,
                pairs=step.trained if step else 0,
                loss=step.loss if step else None,
                grad_norm=step.grad_norm if step else None,
                step_s=seconds,
            )
        )
        self._published(state, parent)

    def _retire(self, pair: TokenPair, state: PairState, version: int, epochs: int, reason: str = "") -> None:
        self.records.append(PairRetired(pair.pair_id, pair.adapter, state, version, epochs, reason))

    # -- versions ----------------------------------------------------------------------------------------------------

    def rollback(self, adapter: str, version: int) -> int:
        """Publish an earlier version's weights as a new version; returns its number.

        Version 0 is the untrained adapter. Raises UnknownAdapter, UnknownVersion.
        """
        if adapter not in self.shelf.versions:
            raise UnknownAdapter(adapter)
        learner = self._learner(adapter)
        snapshot = None
        if version == self.version(adapter):
            return version
        if version:
            try:
                snapshot = self.shelf.files.load(adapter, version)
            except AdapterError as error:
                raise UnknownVersion(f"version {version} of {adapter} is not on disk: {error}") from None
        self.abandon(adapter)
        self._restore(learner, snapshot.weights if snapshot else None, f"rollback to {version}")
        learner.best, learner.best_weights = None, None
        return self.version(adapter)

    def _restore(self, learner: Learner, weights: Mapping[str, torch.Tensor] | None, reason: str) -> None:
        """Publish `weights` (None: the untrained ones) as a new version."""
        parent = self.version(learner.name)
        if weights is None:
            state = self.shelf.reset(learner.name)
            state.version = state.newest_number = max(parent, state.newest_number) + 1
        else:
            state = self.shelf.get(learner.name)
            state.restore(weights, max(parent, state.newest_number) + 1)
        learner.tested_version = state.version
        self._publish(learner, parent, reason)

    def abandon(self, adapter: str) -> None:
        """Drop the step under way; its pairs go back to the head of the queue."""
        learner = self._learners.get(adapter)
        if learner is None or learner.step is None:
            return
        learner.step.free()
        if isinstance(learner.step, DpoStep):
            learner.queue.extendleft(reversed(learner.step.fresh))
        learner.step = None

    def skip(self, adapter: str, reason: str) -> None:
        """Drop the step under way because it failed; its pairs are retired as skipped."""
        learner = self._learners[adapter]
        step, learner.step = learner.step, None
        if step is None:
            return
        step.free()
        if isinstance(step, DpoStep):
            self._skipped(learner, step.fresh, reason)
        else:
            learner.tested_version = step.version
            learner.unscored.clear()

    def _skipped(self, learner: Learner, fresh: Sequence[TokenPair], reason: str) -> None:
        state = self.shelf.get(learner.name)
        self.records.append(StepSkipped(state.name, state.version, tuple(pair.pair_id for pair in fresh), reason))
        for pair in fresh:
            self._retire(pair, "skipped", state.version, pair.epochs_done, reason)

    def learners_of(self, pair_ids: Collection[int]) -> list[str]:
        """Adapters whose step under way holds any of these pairs."""
        steps = {name: learner.step for name, learner in self._learners.items()}
        return [
            name
            for name, step in steps.items()
            if isinstance(step, DpoStep) and any(pair.pair_id in pair_ids for pair in (*step.fresh, *step.replay))
        ]

    def drop_pairs(self, pair_ids: Collection[int]) -> None:
        """Learn nothing more from these pairs, whoever learns from them."""
        for learner in self._learners.values():
            for pairs in (learner.queue, learner.replay):
                kept = [pair for pair in pairs if pair.pair_id not in pair_ids]
                pairs.clear()
                pairs.extend(kept)
            for pair_id in learner.held_out.keys() & set(pair_ids):
                del learner.held_out[pair_id]
                learner.unscored.discard(pair_id)

    def forget(self, adapter: str) -> None:
        """Remove the adapter, its pairs and its files. Raises UnknownAdapter."""
        if adapter not in self.shelf.versions:
            raise UnknownAdapter(adapter)
        self.abandon(adapter)
        self._learners.pop(adapter, None)
        self.shelf.forget(adapter)
