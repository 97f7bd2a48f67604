"""Prices of an iteration's features, and the features of its load. All times are seconds."""

from __future__ import annotations

from dataclasses import dataclass

FORWARD_PRICES = (
    "pass",
    "token below the knee",
    "token beyond it",
    "decode",
    "key read",
    "pair",
    "fine-tune token",
    "adapter",
    "decodes beside chunks",
    "more tokens than the knee",
)
"""Features whose prices add up to the seconds of a forward, in the order of `Prices.forward`.

Decodes beside chunks cost once: single tokens and chunks are attended in two ways in every layer.
"""

WINDOW_STEP = 16
"""Cut windows have a multiple of as many rows: tiles of matrix products have no fewer."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds per unit of each feature, at or above zero.

    `forward` is in the order of FORWARD_PRICES, as far as it goes: files of older versions lack the last ones, which
    are then 0. `units` has (seconds, seconds per token) by `Unit.kind`; one of fewer tokens than `unit_knee` takes as
    long as one of as many, but the optimizer's, whose tokens are adapters.
    """

    forward: tuple[float, ...]
    knee_tokens: int
    units: dict[str, tuple[float, float]]
    unit_knee: int = 0

    def __post_init__(self) -> None:
        lacking = len(FORWARD_PRICES) - len(self.forward)
        object.__setattr__(self, "forward", (*self.forward, *(0.0,) * lacking))


def unit_features(kind: str, num_tokens: int, knee: int) -> tuple[float, float]:
    """Return the amounts of a unit's features: once, and its tokens, of which there are at least `knee`.

    Those of the optimizer's unit are adapters, which know no knee.
    """
    return 1.0, float(num_tokens if kind == "step" else max(num_tokens, knee))


@dataclass(slots=True)
class Load:
    """The work of one packed forward: the features that its latency is predicted from."""

    prefill_tokens: int = 0
    decodes: int = 0
    finetune_tokens: int = 0
    context: int = 0
    """Number of keys that the decodes read, summed over them."""
    pairs: float = 0.0
    """Query-key pairs of prompts' chunks: a chunk of n tokens after c others has n * (c + n / 2)."""
    adapters: int = 0
    """Number of distinct adapters in it."""

    def add_chunk(self, num_tokens: int, context: int, finetune: bool) -> None:
        """Count a chunk of a prompt, or of preference pairs' forward.

        A step's pairs are many short sequences: what their tokens attend to is in the price of a fine-tune token.
        """
        if finetune:
            self.finetune_tokens += num_tokens
        else:
            self.prefill_tokens += num_tokens
            self.pairs += num_tokens * (context + 0.5 * num_tokens)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the forward."""
        return self.prefill_tokens + self.decodes + self.finetune_tokens

    @property
    def part(self) -> str:
        """The part of an iteration, of PARTS, whose errors its forward counts to."""
        return "prefill" if self.prefill_tokens or self.finetune_tokens else "decode"

    def features(self, knee_tokens: int) -> tuple[float, ...]:
        """Return the amounts of its features in the order of FORWARD_PRICES."""
        num_tokens = self.num_tokens
        low = min(num_tokens, knee_tokens)
        return (
            1.0,
            float(low),
            float(num_tokens - low),
            float(self.decodes),
            float(self.context),
            self.pairs,
            float(self.finetune_tokens),
            float(self.adapters),
            float(0 < self.decodes < num_tokens),
            float(num_tokens > knee_tokens),
        )
