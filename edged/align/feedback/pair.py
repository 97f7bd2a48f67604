"""Preference pairs as the trainer sees them, and the records it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PairState = Literal["queued", "held_out", "trained", "learnt", "skipped", "quarantined"]


@dataclass(frozen=True, slots=True)
class TokenPair:
    """One pair in tokens: `chosen` and `rejected` end with EOS unless cut; log-probabilities are sums in nats.

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
    """Somebody who may decide looked at it: it is learned from as it is."""
    again: bool = False
    """A version that had learned it was taken back: it was let in and judged before."""
    direct: bool = False
    """A choice or an edit by the account that teaches this adapter: many that say something new are a change."""

    @property
    def tokens(self) -> int:
        """Tokens that one forward computes: the prompt once, and both answers."""
        return len(self.prompt) + len(self.chosen) + len(self.rejected)

    def retired(self, state: PairState, version: int, epochs_done: int, reason: str = "") -> PairRetired:
        """The record of its new state."""
        return PairRetired(self.pair_id, self.adapter, state, version, epochs_done, reason)


@dataclass(frozen=True, slots=True)
class PairScored:
    """The current adapter's (and the reference's) log-probabilities of a pair, before that version trained on it.

    `split` is "prequential" or "held_out"; `kl_nats` is per answer token and only measured on held-out pairs. Lengths
    are the scored tokens of each answer; 0: not known.
    """

    pair_id: int
    adapter: str
    version: int
    split: Literal["prequential", "held_out"]
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
    def drop_nats(self) -> float:
        """How much less likely both answers are than under the base, in nats a token; negative: likelier."""
        tokens = max(self.chosen_tokens + self.rejected_tokens, 1)
        return (self.ref_chosen_logp + self.ref_rejected_logp - self.chosen_logp - self.rejected_logp) / tokens


@dataclass(frozen=True, slots=True)
class PairRetired:
    """A pair's DPO job ended (CheckEnd), or made progress: `state` "queued" means that epochs are left."""

    pair_id: int
    adapter: str
    state: PairState
    version: int
    epochs_done: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class VersionPublished:
    """An adapter's new state.

    `reason` is "trained", "trained: ..." (preferences have changed), "introduced", "imported", "rebuilt",
    "rollback to N" or "guard: ...". `restored` is the earlier version whose weights these are, 0 the untrained ones.
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
    step_scale: float = 1.0
    """Share of the step size that broken versions have left the adapter."""

    @property
    def taken_back(self) -> bool:
        """Whether the guard put it in the place of a version that must not be served."""
        return self.reason.startswith("guard")


@dataclass(frozen=True, slots=True)
class VersionTested:
    """A version's test ended; the NLL of neutral text is in nats per token, None where there is no such text."""

    adapter: str
    version: int
    neutral_nll: float | None
    neutral_base_nll: float | None
    problem: str = ""
    """Why the version is taken back; "" for one that stays."""


@dataclass(frozen=True, slots=True)
class VersionSaved:
    """A version is on disk, fsynced, under `path`; `removed` versions were deleted by retention."""

    adapter: str
    version: int
    path: str
    removed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepSkipped:
    """An optimizer step that was not taken, and why (non-finite loss or gradient)."""

    adapter: str
    version: int
    pair_ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class IterationSample:
    """One iteration, as the iteration_samples table keeps it."""

    prefill_tokens: int
    decode_tokens: int
    finetune_tokens: int
    finetune_units: int
    latency_ms: float
    predicted_ms: float
    budget_ms: float | None
    free_pages: int


Record = PairScored | PairRetired | VersionPublished | VersionTested | VersionSaved | StepSkipped | IterationSample
