"""Fine-tuning jobs in training: the plan of a job's steps, and the queue of an adapter that a job trains.

Each of a job's steps takes AdamW's step once, and AdamW counts them: a version says by itself where its job goes on.
"""

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from statistics import fmean
from typing import Any

from edged.align.dpo.loss import LOSSES
from edged.align.feedback.pair import JobStepped, PairState, TokenPair
from edged.align.pair_queues import AdapterQueue, StepBatch, SuppliedQueue
from edged.settings.load import AlignSettings, GuardSettings

METHODS = {row.method: name for name, row in LOSSES.items() if row.method} | {"kto": "sigmoid"}
"""The loss of each method; that of `kto`, whose examples are single ratings, is `align.unpaired`'s."""
MAX_STEPS = 100_000
"""Steps of a job: each is a row of its report."""
_LATEST = 256
"""Steps, and validation batches, from whose time the end is estimated."""
_WARM_UP = 0.03
"""Share of a job's steps in which the learning rate rises."""
_MIN_KTO_BATCH = 8
"""Ratings of a step of KTO, which compares them with each other: of one alone it computes APO-zero."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A job's steps: which examples each takes, and by which settings. All of it follows from these fields."""

    job_id: str
    adapter: str
    align: AlignSettings
    """The settings of its steps but for the learning rate, which is the highest."""
    examples: int
    batch_size: int
    epochs: int
    seed: int
    other_steps: int = 0
    """AdamW's steps on the adapter that others' pairs took while the job was paused."""

    @property
    def epoch_steps(self) -> int:
        """Number of steps of an epoch."""
        return -(-self.examples // self.batch_size)

    @property
    def steps(self) -> int:
        """Number of all steps."""
        return self.epochs * self.epoch_steps

    def batch(self, step: int) -> Sequence[int]:
        """Return the numbers of the examples of a step, from 0: each epoch has an order of its own.

        An epoch's steps are of one size, or differ by one: none has an example alone that KTO compares with nothing.
        """
        epoch, place = divmod(step, self.epoch_steps)
        begin, end = (each * self.examples // self.epoch_steps for each in (place, place + 1))
        places = range(begin, end)
        return [_shuffled(f"{self.seed} {epoch}", self.examples, place) for place in places]

    def settings(self, step: int) -> AlignSettings:
        """Return the settings of a step: the learning rate rises at first, and falls linearly to the end."""
        warm = max(1, round(_WARM_UP * self.steps))
        share = (step + 1) / warm if step < warm else (self.steps - step) / (self.steps - warm)
        return self.align.model_copy(update={"learning_rate": self.align.learning_rate * share})


def _shuffled(order: str, count: int, place: int) -> int:
    """Return the number, below `count`, at a place of a pseudo-random order, of which nothing is kept.

    Four rounds of a Feistel network permute the numbers of twice as many bits as `half`; those beyond go on.
    """
    half = max(1, (count.bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(4):
            digest = blake2b(f"{order} {turn} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest) & mask)
        place = left << half | right
        if place < count:
            return place


def job_settings(align: AlignSettings, method: str, hyperparameters: dict[str, Any]) -> AlignSettings:
    """Return the settings of a job's steps, at its highest learning rate.

    Every example is trained on as often as it is said, whatever its loss, and alone counts as much as many.
    """
    own: dict[str, Any] = {"loss": METHODS[method], "learning_rate": hyperparameters["learning_rate"]}
    own |= {"loss_threshold": 0.0, "micro_batch_pairs": 1, "sft_weight": 0.0, "label_smoothing": 0.0}
    own["unpaired"] = "kto" if method == "kto" else "off"
    if "beta" in hyperparameters:
        own["beta"] = hyperparameters["beta"]
    return align.model_copy(update=own)


def auto(examples: int, method: str, hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """Return hyperparameters with a number for each "auto"."""
    least = min(_MIN_KTO_BATCH, examples) if method == "kto" else 1
    epochs = 3 if examples <= 500 else 2 if examples <= 5_000 else 1
    batch_size = min(32, max(least, round(0.002 * examples)))
    chosen = {"n_epochs": epochs, "batch_size": batch_size, "learning_rate_multiplier": 1.0, "beta": 0.1}
    return {name: chosen[name] if value == "auto" else value for name, value in hyperparameters.items()}


class JobPace:
    """The time that a job's latest steps and validation batches took, without that in which none was open."""

    def __init__(self) -> None:
        self._steps_s, self._batches_s = deque[float](maxlen=_LATEST), deque[float](maxlen=_LATEST)
        self._left_s: float | None = None

    def take(self, step: JobStepped, batches_left: int) -> None:
        """Take in a step, or a validation batch; before the first one, a batch is taken to last as long as a step."""
        (self._batches_s if step.validated else self._steps_s).append(step.seconds)
        if self._steps_s:
            batches_s = fmean(self._batches_s or self._steps_s) * batches_left
            self._left_s = fmean(self._steps_s) * (step.total_steps - step.step) + batches_s

    def finish_s(self, now_s: float) -> int | None:
        """Return when the job is likely to end, in seconds since 1970; None before its first step."""
        return None if self._left_s is None else round(now_s + self._left_s)


@dataclass(slots=True)
class JobQueue(SuppliedQueue):
    """The queue of an adapter that a job trains: its pairs are the job's examples, and no test judges its versions.

    Pairs that its users give meanwhile wait in the queue whose place it has.
    """

    plan: JobPlan = field(kw_only=True)
    former: AdapterQueue = field(kw_only=True)
    """The queue whose place it has until the job ends."""
    done: int = 0
    """Number of the job's steps that were taken."""
    batches: deque[list[TokenPair]] = field(default_factory=deque)
    """Examples of the next steps."""
    failed: bool = False

    @property
    def validates(self) -> bool:
        """Whether the next step's examples are of a validation file: their loss is computed, and nothing else."""
        return bool(self.batches) and self.batches[0][0].state == "held_out"

    @property
    def step_settings(self) -> AlignSettings:
        """The settings of the next step; no loss is high enough for validation examples to be trained on."""
        if self.validates:
            return self.plan.align.model_copy(update={"loss_threshold": math.inf})
        return self.plan.settings(self.done)

    @property
    def due(self) -> bool:
        """Whether its next step can be opened."""
        return bool(self.batches) and self.step is None and not (self.unreadable or self.failed)

    def enqueue(self, pair: TokenPair, guard: GuardSettings, now: float) -> tuple[PairState, str] | None:
        """Give a pair to the queue whose place it has."""
        return self.former.enqueue(pair, guard, now)

    def draw(self, align: AlignSettings) -> StepBatch:
        """Return the next step's examples, which stay until the step was taken."""
        return StepBatch(self.batches[0], [])

    def drop(self, pair_ids: Collection[int]) -> None:
        """Remove pairs from the queue whose place it has."""
        self.former.drop(pair_ids)

    def advance(self) -> None:
        """Note that the step was taken; one of validation examples is none of the plan's."""
        self.done += not self.validates
        self.batches.popleft()
