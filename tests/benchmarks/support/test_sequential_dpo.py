"""The reference loop is DPO as torch and peft have it, and what it scores is what the engine's files say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.alignment import Load, before_training, figures, learning, on_arrival, run_under_load
from benchmarks.support.interleave import open_sides
from benchmarks.support.local_engine import WEIGHTS_FILE
from benchmarks.support.sequential_dpo import Recipe, Reference, side_of
from edged.align.feedback.pair import TokenPair, VersionSaved
from edged.lab.bench.traces import read_trace
from edged.settings.load import Settings
from tests.engine.harness import random_pairs, running_engine
from tests.models import save_tiny

PAIRS = 120
SETTINGS = {"align__learning_rate": 1e-3, "align__replay_share": 0.0, "align__loss_threshold": 0.0}


def plain_pairs(count: int) -> list[TokenPair]:
    """A taste that even random weights learn from a few pairs: ten tokens are liked, ten others are not."""
    rng = np.random.default_rng(0)
    return [
        TokenPair(
            n, "ann", *(tuple(rng.integers(low, high, 10).tolist()) for low, high in ((3, 250), (3, 13), (130, 140)))
        )
        for n in range(count)
    ]


@pytest.mark.slow
def test_the_loop_and_an_idle_engine_agree_on_every_step_but_for_the_first_weights(tmp_path: Path) -> None:
    pairs = random_pairs(8)
    with running_engine(tmp_path, guard__held_out_share=0.0, **SETTINGS) as (engine, client):
        engine.submit_pairs(pairs)
        client.wait(lambda: bool(client.of(VersionSaved)) and engine.adapters() == {"ann": 2})
    saved = client.of(VersionSaved)[-1]
    assert saved.version == 2
    with open_sides([side_of(Recipe(str(tmp_path / "model-llama")))]) as (side,):
        reference = Reference(side)
        tested = reference.learn(pairs, seed=0)
        plain = reference.score(pairs)
        ours = reference.score(pairs, str(Path(saved.path) / WEIGHTS_FILE))
        assert reference.base(pairs) == [[rc, rr, rc, rr] for _, _, rc, rr in plain]
    assert all(row[:2] == row[2:] for row in tested[:4]), "nothing was learned before"
    assert figures(tested[:4])["reward_accuracy"] == [0.5] * 4, "which is neither right nor wrong"
    margins = [sum((c - rc) - (r - rr) for c, r, rc, rr in rows) / len(rows) for rows in (plain, ours)]
    # Two steps of AdamW move every weight as far, whichever random A they start from.
    assert margins[1] == pytest.approx(margins[0], rel=0.3)
    assert margins[0] > 0.05


@pytest.mark.slow
def test_under_sustained_load_no_pair_is_lost_and_two_opposite_users_learn(tmp_path: Path) -> None:
    """Requests come faster than they can be served; ann likes what bob dislikes."""
    model = save_tiny(tmp_path / "model")
    liked = plain_pairs(PAIRS // 2)
    disliked = [
        replace(p, pair_id=1000 + p.pair_id, adapter="bob", chosen=p.rejected, rejected=p.chosen) for p in liked
    ]
    pairs = [pair for both in zip(liked, disliked, strict=True) for pair in both]
    settings = Settings.model_validate(
        {
            "model": {"device": "cpu"},
            "cache": {"memory_mb": 16},
            "serving": {"max_queue": 4096},
            "align": {"learning_rate": 5e-3},
        }
    )
    load = Load(model, read_trace("poisson"), rate_per_s=60.0, seconds=12.0)
    notes = run_under_load(load, settings, pairs, tmp_path / "data")
    counts = learning(notes)
    assert notes.report["requests"]["unfinished"] > 0, "the load must be more than can be served"
    assert counts["pairs_sent"] == counts["pairs_scored"] == PAIRS
    assert counts["skipped"] == []
    assert notes.report["steps_in_time"] > 0, "steps happen while serving is saturated"
    with open_sides([side_of(Recipe(str(model)))]) as (side,):
        for own in (liked, disliked):
            tested = before_training(notes, own)["reward_accuracy"]
            assert tested[-1] is not None
            assert tested[-1] >= 0.9
            arrived = on_arrival(notes, own, Reference(side))["reward_accuracy"]
            assert arrived[0] is not None
            assert arrived[0] <= tested[0], "a version cannot answer before it is learnt"
