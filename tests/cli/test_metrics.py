"""How an adapter's state is put into words."""

from __future__ import annotations

from edged.cli.status import verdict

ITEM = {"adapter": "ann", "version": 3, "verdict": "too early to tell: 6 pairs", "held": ""}


def test_language_is_told_as_far_as_it_is_known() -> None:
    assert verdict(ITEM) == "ann v3: too early to tell: 6 pairs"
    known = {
        "held_out_kl_nats": 0.125,
        "neutral_nll_change": 0.02,
        "chosen_logratio_per_token_recent": -0.5,
        "answer_tokens_recent": 41.2,
        "answer_repetition_recent": None,
    }
    assert verdict({**ITEM, **known}).removeprefix(verdict(ITEM)) == (
        "; language: KL 0.12 nats/token, neutral text +2.0%, chosen answers -0.50 nats/token, 41 tokens an answer"
    )
