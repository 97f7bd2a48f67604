"""Scores of two adapters of one PEFT model on the same pairs and prompts."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from edged.align.feedback.pair import TokenPair

BASE = None
"""Name of the base model, with adapters off."""


@dataclass(frozen=True, slots=True)
class Score:
    """Means over `pairs` preference pairs. Log-probabilities in nats; `kl_nats`: KL(adapter || base) per answer
    token."""

    pairs: int
    reward_accuracy: float
    reward_margin: float
    win_rate: float
    clpd: float
    kl_nats: float


@torch.no_grad()
def score(model: Any, adapter: str, pairs: Sequence[TokenPair], beta: float) -> Score | None:
    """Score `adapter` on `pairs`; None if there are none."""
    if not pairs:
        return None
    sums, kl = [], 0.0
    for pair in pairs:
        row = []
        for answer in (pair.chosen, pair.rejected):
            own, base = (answer_logps(model, name, pair.prompt, answer) for name in (adapter, BASE))
            targets = torch.tensor(answer, device=own.device)[:, None]
            row += [float(logps.gather(1, targets).sum()) for logps in (own, base)]
            kl += float((own.exp() * (own - base)).sum())
        sums.append(row)
    chosen, ref_chosen, rejected, ref_rejected = np.array(sums).T
    differences = chosen - rejected
    margins = beta * (differences - ref_chosen + ref_rejected)
    return Score(
        pairs=len(pairs),
        reward_accuracy=float(np.mean(margins > 0)),
        reward_margin=float(np.mean(margins)),
        win_rate=float(np.mean(differences > 0)),
        clpd=float(np.mean(differences)),
        kl_nats=kl / sum(len(pair.chosen) + len(pair.rejected) for pair in pairs),
    )


def answer_logps(model: Any, adapter: str | None, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Return log-probabilities [answer tokens, vocab] in fp32 of the next token at each position of the answer."""
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    with _as(model, adapter):
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1]
    return logits.float().log_softmax(-1)


@torch.no_grad()
def greedy_agreement(
    model: Any, one: str, other: str, prompts: Sequence[Sequence[int]], num_tokens: int
) -> float | None:
    """Return the mean share of the first `num_tokens` greedy tokens before the two adapters diverge; None without
    prompts."""
    if not prompts:
        return None
    shares = []
    for prompt in prompts:
        answers = [_greedy(model, adapter, prompt, num_tokens) for adapter in (one, other)]
        longest = max(map(len, answers))
        same = len(list(takewhile(lambda both: both[0] == both[1], zip(*answers, strict=False))))
        shares.append(same / longest if longest else 1.0)
    return sum(shares) / len(shares)


def _greedy(model: Any, adapter: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([list(prompt)], device=model.device)
    with _as(model, adapter):
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            use_cache=True,
        )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def _as(model: Any, adapter: str | None) -> Any:
    """Return a context in which the model answers under `adapter`."""
    if adapter is BASE:
        return model.disable_adapter()
    model.set_adapter(adapter)
    return nullcontext()
