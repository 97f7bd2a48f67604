"""Preference pairs as the trainer sees them, and the records it leaves behind.

Owns the data that passes between the learning loop, the engine and the store. Must not know sockets or scheduling.
"""

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

    @property
    def tokens(self) -> int:
        """Tokens that one forward computes: the prompt once, and both answers."""
        return len(self.prompt) + len(self.chosen) + len(self.rejected)


@dataclass(frozen=True, slots=True)
class PairScored:
    """The current adapter's (and the reference's) log-probabilities of a pair, before that version trained on it.

    `split` is "prequential" or "held_out"; `kl_nats` is per answer token and only measured on held-out pairs.
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

    `reason` is "trained", "introduced", "imported", "rebuilt", "rollback to N" or "guard: ...".
    """

    adapter: str
    version: int
    parent: int
    reason: str
    pairs: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    step_s: float = 0.0


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


Record = PairScored | PairRetired | VersionPublished | VersionSaved | StepSkipped | IterationSample
