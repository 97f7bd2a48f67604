"""How the tokens of one completion are drawn."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Defaults are OpenAI's; `top_k` 0 and `min_p` 0 switch those off.

    `logprobs` is the number of alternatives to report beside the drawn token's log-probability (0-20),
    None to report nothing. Log-probabilities are the model's own, before penalties and temperature.
    `repetition_penalty` is 0.01 to 100, so that float32 scores stay finite.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
