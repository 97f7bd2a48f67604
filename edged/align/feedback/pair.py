"""Preference pairs in tokens, and the records that the learning loop writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Split = Literal["prequential", "held_out"]
PairState = Literal["queued", "held_out", "trained", "learnt", "skipped", "quarantined"]


@dataclass(frozen=True, slots=True)
class TokenPair:
    """A preference pair in tokens: `chosen` and `rejected` end with EOS unless cut; log-probabilities are sums in nats.

    The reference log-probabilities are None until the base model has scored the pair.
    """

    pair_id: int
    adapter: str
    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    weight: float = 1.0
    ref_chosen_logp: float | None = None
    ref_rejected_logp: float | None = None
    epochs_done: int = 0
    state: PairState = "queued"
    trusted: bool = False
    """Whether a reviewer with the right to decide accepted it: it is trained on without judgement."""
    again: bool = False
    """Whether a version that had learned it was taken back: it was admitted and judged before."""
    first_party: bool = False
    """Whether it is a choice or an edit by the adapter's own account: many contrary ones are a change."""
    practice: bool = False
    """Whether the daemon made it of its own answers: it is trained on once, unjudged, and is in no store."""
    imitate: bool = False
    """Whether `chosen`, its only answer, is learned token by token (NLL), and not as a rating."""
    floors: tuple[float, ...] = ()
    """The log-probability of each token of an imitated answer from which on it is not made likelier: what the base
    itself gave it where the token is the base's own, and infinite where it is to be learned; (): all are."""
    own: tuple[bool, bool] = (True, True)
    """Whether the model itself gave the chosen and the rejected answer."""
    alike: bool = False
    """Whether the user likes both answers alike, as far as the taste model knows."""

    @property
    def num_tokens(self) -> int:
        """Tokens that one forward computes: the prompt once, and both answers."""
        return len(self.prompt) + len(self.chosen) + len(self.rejected)

    @property
    def single(self) -> bool:
        """Whether it is a rating of one answer: a good one has no `rejected`, a bad one no `chosen`."""
        return not (self.imitate or (self.chosen and self.rejected))

    @property
    def telling(self) -> bool:
        """Whether it can contradict what was learned: ratings of one answer, and chance between two, do not."""
        return not (self.single or self.alike)

    @property
    def exempt(self) -> bool:
        """Whether it is trained on without judgement: a reviewer accepted it, or the daemon made it."""
        return self.trusted or self.practice

    def retired(self, state: PairState, version: int, epochs_done: int, reason: str = "") -> PairRetired:
        """The record of the pair's new state."""
        return PairRetired(self.pair_id, self.adapter, state, version, epochs_done, reason)


def is_practice(pairs: Sequence[TokenPair]) -> bool:
    """Whether a step's own pairs are practice."""
    return bool(pairs) and pairs[0].practice


@dataclass(frozen=True, slots=True)
class PairScored:
    """A pair's log-probabilities under the adapter's current version and the reference, before training on it.

    `split` is "prequential" or "held_out"; `kl_nats` is per answer token and only measured on held-out pairs. Lengths
    are the scored tokens of each answer; 0: not known.
    """

    pair_id: int
    adapter: str
    version: int
    split: Split
    chosen_logp: float
    rejected_logp: float
    ref_chosen_logp: float
    ref_rejected_logp: float
    reward_margin: float
    loss: float
    kl_nats: float | None = None
    chosen_tokens: int = 0
    rejected_tokens: int = 0

    @property
    def rating(self) -> int:
        """1 for a single rating of a good answer, -1 for one of a bad answer, 0 for a pair."""
        return (self.chosen_tokens > 0) - (self.rejected_tokens > 0)

    @property
    def drop_nats(self) -> float:
        """Drop of both answers' log-probability from the base's, in nats per token; negative: a rise."""
        num_tokens = max(self.chosen_tokens + self.rejected_tokens, 1)
        return (self.ref_chosen_logp + self.ref_rejected_logp - self.chosen_logp - self.rejected_logp) / num_tokens


@dataclass(frozen=True, slots=True)
class PairRetired:
    """The record that a pair's training ended (CheckEnd) or made progress: with `state` "queued" epochs are left."""

    pair_id: int
    adapter: str
    state: PairState
    version: int
    epochs_done: int
    reason: str = ""


IMPORT_REASONS = ("imported", "rebuilt")
"""Reasons of versions that were made elsewhere; `edged align rebuild` sends the second."""
STEP_REASONS = ("trained", "practised", "job")
"""Reasons of versions that a step made of the one before; that of the first may go on."""
START_REASON = "start "
"""Beginning of the reason of a version that is a start, before the start's name."""


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """The record of an adapter's new version.

    `reason` is "trained", "trained: ..." (preferences have changed), "practised" (a step over the daemon's own
    pairs), "job" (a step of a fine-tuning job), "introduced", "imported", "rebuilt", "start NAME", "rollback to N" or
    "guard: ...".
    `restored` is the earlier version whose weights these are, 0 the untrained ones.
    """

    adapter: str
    version: int
    parent: int
    reason: str
    pairs: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    step_s: float = 0.0
    restored: int | None = None
    own_kl_nats: float | None = None
    """Of a step of practice: KL to the base per token of the answers in it, which the adapter gave by itself."""
    gain_nats: float | None = None
    """Of a step that imitates answers: how much likelier per token it found them than the base does."""
    step_scale: float = 1.0
    """Share of the step size that is left to the adapter after broken versions."""

    @property
    def stepped(self) -> bool:
        """Whether a step made it of its parent, so that the two are near to each other."""
        return self.reason.startswith(STEP_REASONS)

    @property
    def taken_back(self) -> bool:
        """Whether the guard published it in place of a version that must not be served."""
        return self.reason.startswith("guard")

    @property
    def is_start(self) -> bool:
        """Whether it is a start, on which all that the adapter had learned is learned again."""
        return self.reason.startswith(START_REASON)


@dataclass(frozen=True, slots=True)
class VersionTested:
    """The record of a version's test; the NLL of neutral text is in nats per token, None without such text."""

    adapter: str
    version: int
    neutral_nll: float | None
    neutral_base_nll: float | None
    problem: str = ""
    """Reason why the version is taken back; "" for one that stays."""


@dataclass(frozen=True, slots=True)
class VersionSaved:
    """The record of a version on disk, fsynced, under `path`; `removed` versions were deleted by retention."""

    adapter: str
    version: int
    path: str
    removed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepSkipped:
    """The record of an optimizer step that was not taken, with the reason (non-finite loss or gradient)."""

    adapter: str
    version: int
    pair_ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class IterationSample:
    """The record of one iteration, a row of the iteration_samples table."""

    prefill_tokens: int
    decode_tokens: int
    finetune_tokens: int
    finetune_units: int
    latency_ms: float
    predicted_ms: float
    budget_ms: float | None
    free_pages: int


@dataclass(frozen=True, slots=True)
class JobStepped:
    """The record of a step of a fine-tuning job, or of validation examples after it.

    `step` counts the job's steps from 1; `loss` is the mean objective of its `tokens`, or that of the `validated`
    examples. With an `error` the job cannot go on, or where `left_out` it goes on without the validation.
    """

    job_id: str
    adapter: str
    step: int
    version: int
    total_steps: int = 0
    loss: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    learning_rate: float = 0.0
    error: str = ""
    validated: int = 0
    left_out: bool = False


Record = (
    PairScored
    | PairRetired
    | VersionPublished
    | VersionTested
    | VersionSaved
    | StepSkipped
    | JobStepped
    | IterationSample
)
