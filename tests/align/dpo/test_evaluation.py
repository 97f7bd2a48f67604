"""The held-out test's scores are those of a PEFT model in transformers, whatever the windows and chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from edged.align.dpo.evaluation import HeldOutEvaluation
from edged.align.feedback.pair import TokenPair
from edged.engine.attention.paged import IMPLEMENTATION
from edged.engine.model.layer_access import LayerTap, PagedDecoder
from edged.engine.model.served_model import ServedModel
from edged.settings.load import AlignSettings
from tests.align.dpo.test_dpo_exact import (
    BETA,
    compute_chunk,
    load_weights,
    make_pairs,
    peft_model,
    trained_adapter,
)
from tests.models import DEVICE, tiny_model


def evaluate(
    base: PreTrainedModel,
    pairs: list[TokenPair],
    neutral: list[TokenPair],
    window: int,
    chunk: int,
    preempt_at: tuple[int, ...] = (),
) -> tuple[HeldOutEvaluation, dict[str, torch.Tensor]]:
    """The finished test of version 1 of an adapter, and its weights by PEFT's names."""
    align = AlignSettings(rank=4, alpha=8.0, beta=BETA, window_tokens=window)
    base.requires_grad_(False).to(DEVICE).set_attn_implementation(IMPLEMENTATION)
    model = ServedModel(base)
    model.attach_lora(align, slots=4)
    kv = model.new_kv(80, 8)
    tap, decoder = LayerTap(model), PagedDecoder(model, kv)
    state = trained_adapter(model, align)
    model.lora.load(1, state.weights, state.form.scalings)
    free = list(range(1, 80))
    test = HeldOutEvaluation("ann", 1, pairs, decoder, align, lambda pages: free.extend(pages.tolist()), neutral)
    assert (test.adapters, test.version) == (("ann",), 1)
    ran = 0
    while not test.finished:
        if test.packing.tokens_left:
            compute_chunk(test.packing, chunk, model, kv, tap, {"ann": 1}, free)
        elif (ran := ran + 1) in preempt_at:
            test.restart()
        else:
            expected = test.units_left()[0]
            assert test.run_unit() == expected
    assert sorted(free) == list(range(1, 80)), "the test gave all pages back"
    return test, state.tensors()


def token_logps(model: PreTrainedModel, prompt: tuple[int, ...], answer: tuple[int, ...]) -> torch.Tensor:
    """The distributions [tokens, vocabulary] before each of the answer's tokens, but a first one without a prompt."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0]
    return logits[max(len(prompt), 1) - 1 : -1].log_softmax(-1)


def summed(table: torch.Tensor, answer: tuple[int, ...]) -> float:
    """The log-probability of the answer's tokens that have a predictor."""
    return float(table.gather(1, torch.tensor(answer[len(answer) - len(table) :])[:, None]).sum())


@pytest.mark.parametrize(("window", "chunk", "preempt_at"), [(500, 400, ()), (9, 7, (2, 5))])
@pytest.mark.parametrize("prompt", [0, 19])
def test_scores_kl_and_neutral_nll_equal_those_of_peft(
    prompt: int, window: int, chunk: int, preempt_at: tuple[int, ...]
) -> None:
    pairs = [replace(pair, ref_chosen_logp=None, ref_rejected_logp=None) for pair in make_pairs(prompt)]
    text = make_pairs(12, seed=2)[0]
    neutral = [
        TokenPair(-1, "", text.prompt, text.chosen, text.rejected),
        TokenPair(-2, "", text.prompt, text.rejected, (), ref_chosen_logp=-100.0, ref_rejected_logp=0.0),
    ]
    test, weights = evaluate(tiny_model("llama"), pairs, neutral, window, chunk, preempt_at)
    model = peft_model(tiny_model("llama"))
    load_weights(model, weights)
    model.eval()
    wanted: dict[int, tuple[list[float], list[float], float, int]] = {}
    for pair in (*pairs, *neutral):
        policy, base, kl, tokens = [], [], 0.0, 0
        for answer in (pair.chosen, pair.rejected):
            if not answer:
                continue
            now = token_logps(model, pair.prompt, answer)
            with model.disable_adapter():
                before = token_logps(model, pair.prompt, answer)
            policy.append(summed(now, answer))
            base.append(summed(before, answer))
            kl += float((now.exp() * (now - before)).sum())
            tokens += len(now)
        wanted[pair.pair_id] = policy, base, kl / tokens, tokens
    assert [score.pair_id for score in test.scores] == [pair.pair_id for pair in pairs]
    for score in test.scores:
        policy, base, kl, _ = wanted[score.pair_id]
        assert (score.split, score.version, score.adapter) == ("held_out", 1, "ann")
        assert [score.chosen_logp, score.rejected_logp] == pytest.approx(policy, rel=1e-4)
        assert [score.ref_chosen_logp, score.ref_rejected_logp] == pytest.approx(base, rel=1e-4)
        assert score.kl_nats == pytest.approx(kl, rel=1e-3, abs=1e-6)
        margin = BETA * ((policy[0] - base[0]) - (policy[1] - base[1]))
        assert score.reward_margin == pytest.approx(margin, rel=1e-2, abs=1e-4)
    assert [pair.pair_id for pair in test.neutral] == [-1, -2]
    first, second = test.neutral
    assert [first.ref_chosen_logp, first.ref_rejected_logp] == pytest.approx(wanted[-1][1], rel=1e-4)
    assert (second.ref_chosen_logp, second.ref_rejected_logp) == (-100.0, 0.0), "what is known is not computed again"
    tokens = wanted[-1][3] + wanted[-2][3]
    assert test.neutral_nll == pytest.approx(
        (-(sum(wanted[-1][0]) + wanted[-2][0][0]) / tokens, -(sum(wanted[-1][1]) - 100.0) / tokens), rel=1e-4
    )
    assert test.groups_done == 3


def test_without_neutral_text_there_is_no_nll_of_it() -> None:
    test, _ = evaluate(tiny_model("llama"), make_pairs(19), [], 500, 400)
    assert test.neutral_nll is None
    assert [score.ref_rejected_logp for score in test.scores] != [-31.0, -31.0], "the base is computed for the KL"
