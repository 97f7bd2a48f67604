"""Which pair of policies should be the default: what is a share of the best, and what the verdict is by."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Any

import pytest

from benchmarks.simulated.verdict import pairs_of, settings_of, tables, verdict


def served(pair: str, seed: int, requests: float, first_tokens: float, pairs: float) -> dict[str, Any]:
    figures = {"slo.requests_in_time_share": requests, "slo.ttft_within_factor_share": first_tokens}
    figures |= {"readers.qoe_mean": 1.0, "readers.qoe_95_share": 1.5 - first_tokens, "tbt_ms.mean": 50.0}
    figures["finetune.pairs_trained"] = pairs
    return {"device": "box", "load": "chat", "pair": pair, "seed": seed, **figures}


def completed(pair: str, mean_s: float) -> dict[str, Any]:
    return {"device": "box", "load": "agents", "pair": pair, "seed": 0, "mean_s": mean_s}


ROWS = [
    *(served("a", 0, 1.0, 0.5, 10.0), served("a", 1, 0.5, 0.5, 10.0), completed("a", 20.0)),
    *(served("b", 0, 0.8, 1.0, 5.0), served("b", 1, 0.4, 1.0, 5.0), completed("b", 10.0)),
]


def test_shares_are_of_the_best_of_the_same_seed() -> None:
    a, b = verdict(ROWS)
    assert (a["pair"], a["requests"], a["first tokens"], a["training"], a["agents"]) == ("a", 1.0, 0.5, 1.0, 0.5)
    assert (b["pair"], b["requests"], b["first tokens"], b["training"], b["agents"]) == ("b", 0.8, 1.0, 0.5, 1.0)
    assert a["by requests"] == pytest.approx(0.5 ** (1 / 3))
    assert b["by first tokens"] == pytest.approx(0.5 ** (1 / 3))
    assert (a["readers"], b["readers"]) == (1.0, 0.5)
    assert (a["far_behind"], b["far_behind"]) == (["box agents"], ["box chat"])


def test_who_trains_nothing_comes_last() -> None:
    idle = [{**row, "finetune.pairs_trained": 0.0} if row["pair"] == "a" else row for row in ROWS]
    assert [row["pair"] for row in verdict(idle)] == ["b", "a"]


def test_the_tables_have_every_pair() -> None:
    text = "\n".join(tables(ROWS))
    assert "| box | `a` | 0.500 | 0.750 (0.500–1.000) | 1.000 | 1.000 | 50.00 | 10 |" in text
    assert "| `b` | 0.800 | 1.000 | 0.500 | 0.500 | 1.000 |" in text


def test_a_pair_names_both_policies() -> None:
    settings = settings_of("fcfs+vtc")
    assert (settings.scheduler.policy, settings.fairness.policy) == ("fcfs", "vtc")
    assert pairs_of("mace,fcfs+vtc") == ["mace", "fcfs+vtc"]
    with pytest.raises(ArgumentTypeError, match="mase"):
        pairs_of("mase")
    with pytest.raises(ValueError, match="off"):
        pairs_of("mace+turns")
