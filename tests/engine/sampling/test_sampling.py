"""Sampling: each row by its own parameters, and by nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from edged.engine.native.library import kernels, why_no_kernels
from edged.engine.sampling.params import Sampling, SamplingRow, TokenCounts
from edged.engine.sampling.sampler import NOT_A_TOKEN, Changes, sample, uniform
from edged.engine.sampling.truncation import keep_nucleus, keep_nucleus_by_sort, keep_nucleus_by_torch, kth_best
from edged.tensors.device_copy import upload

VOCAB = 50


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def counted(prompt: Sequence[int], generated: Sequence[int]) -> TokenCounts:
    counts = TokenCounts(prompt)
    counts.extend(generated)
    return counts


def draw(scores: torch.Tensor, sampling: Sampling, n: int = 4000, counts: TokenCounts | None = None) -> np.ndarray:
    """Frequencies of `n` draws of one row."""
    rows = [SamplingRow(sampling, 7, step, counts) for step in range(n)]
    return np.bincount(sample(scores.repeat(n, 1), rows).read().token_ids, minlength=VOCAB) / n


CASES = {
    "temperature": (Sampling(temperature=0.6), [TemperatureLogitsWarper(0.6)]),
    "top_k": (Sampling(top_k=5), [TopKLogitsWarper(5)]),
    "top_p": (Sampling(top_p=0.7), [TopPLogitsWarper(0.7)]),
    "min_p": (Sampling(min_p=0.1), [MinPLogitsWarper(0.1)]),
    "all": (
        Sampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.2),
        [TemperatureLogitsWarper(1.5), TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.2)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_follow_transformers_warpers(name: str) -> None:
    sampling, warpers = CASES[name]
    wanted = LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.long), logits()).softmax(-1)[0].numpy()
    got = draw(logits(), sampling)
    assert set(np.nonzero(got)[0]) <= set(np.nonzero(wanted)[0])
    # Four standard deviations of a binomial share.
    assert np.all(np.abs(got - wanted) <= 4 * np.sqrt(wanted * (1 - wanted) / 4000) + 1e-9)


def test_repetition_penalty_is_transformers() -> None:
    sampling = Sampling(temperature=0.0, repetition_penalty=1.7)
    counts = counted([3, 9, 9], [1])
    penalized = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[3, 9, 9, 1]]), logits())
    row = SamplingRow(sampling, 0, 0, counts)
    assert sample(logits(), [row]).read().token_ids == [int(penalized.argmax())]
    assert draw(logits(), Sampling(repetition_penalty=1.7), counts=counts) == pytest.approx(
        penalized.softmax(-1)[0].numpy(), abs=0.04
    )


def test_presence_and_frequency_lower_generated_tokens_only() -> None:
    scores = torch.zeros(1, VOCAB)
    scores[0, :3] = torch.tensor([3.0, 2.5, 2.0])

    def best(generated: list[int], prompt: tuple[int, ...] = (), **penalties: Any) -> int:
        row = SamplingRow(Sampling(temperature=0.0, **penalties), 0, 0, counted(prompt, generated))
        return sample(scores.clone(), [row]).read().token_ids[0]

    assert best([0], presence_penalty=0.4) == 0
    assert best([0], presence_penalty=0.6) == 1
    assert best([0, 0], frequency_penalty=0.3) == 1
    assert best([], prompt=(0, 0, 0), presence_penalty=2.0, frequency_penalty=2.0) == 0


def test_a_seed_gives_the_same_token_whatever_shares_the_batch() -> None:
    mine = logits(seed=3)
    row = SamplingRow(Sampling(temperature=1.0, top_p=0.95), 42, 5)
    others = [SamplingRow(Sampling(temperature=t, top_k=k), 1, 0) for t, k in ((0.0, 0), (2.0, 3), (0.7, 0))]
    alone = sample(mine.clone(), [row]).read().token_ids[0]
    together = sample(torch.cat([logits(3, seed=9), mine]), [*others, row]).read().token_ids[3]
    assert alone == together


def test_bias_and_forbidden_tokens() -> None:
    best = int(logits().argmax())
    assert sample(logits(), [SamplingRow(Sampling(temperature=0.0), 0, 0, forbidden=(best,))]).read().token_ids != [
        best
    ]
    assert sample(
        logits(), [SamplingRow(Sampling(temperature=0.0, logit_bias={17: 100.0}), 0, 0)]
    ).read().token_ids == [17]


def test_logprobs_are_the_models_own_whatever_was_done_to_the_scores() -> None:
    asked = SamplingRow(Sampling(temperature=0.3, logprobs=3, logit_bias={5: 50.0}), 0, 0)
    silent = SamplingRow(Sampling(temperature=0.0), 0, 0)
    drawn = sample(logits(2), [silent, asked]).read()
    wanted = logits(2)[1].log_softmax(-1)
    assert drawn.token_ids[1] == 5
    assert drawn.logprobs == [None, pytest.approx(float(wanted[5]), abs=1e-5)]
    best = wanted.topk(3)
    assert [token for token, _ in drawn.tops[1] or ()] == best.indices.tolist()
    assert [value for _, value in drawn.tops[1] or ()] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_uniform_numbers_are_uniform_and_independent_of_order() -> None:
    values = np.array([uniform(seed, step) for seed in range(50) for step in range(200)])
    assert values.min() >= 0
    assert values.max() < 1
    counts, _ = np.histogram(values, bins=20)
    assert np.all(np.abs(counts - 500) < 120)


def test_scores_that_are_not_numbers_give_no_token() -> None:
    scores = logits(3)
    scores[1, 7] = float("nan")
    rows = [SamplingRow(Sampling(temperature=t), 0, 0) for t in (0.0, 0.0, 1.0)]
    tokens = sample(scores, rows).read().token_ids
    assert tokens[1] == NOT_A_TOKEN
    assert min(tokens[0], tokens[2]) >= 0


def test_what_is_asked_for_never_makes_the_model_look_broken() -> None:
    counts = counted(range(0, 20), [3] * 100_000 + [4])
    scores = logits() * 500
    scores[0, 49] = float("-inf")
    extremes = itertools.product(
        (0.0, 1e-9, 2.0),
        (1e-45, 0.01, 1.0, 100.0),
        (-2.0, 2.0),
        (-2.0, 2.0),
        ({}, {3: 100.0, 30: -100.0}),
        (0, 1),
        (0.0, 1.0),
    )
    rows = []
    for temperature, repetition, presence, frequency, bias, top_k, share in extremes:
        sampling = Sampling(
            temperature=temperature,
            top_p=share,
            min_p=1 - share,
            top_k=top_k,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
            logit_bias=bias,
            min_tokens=9,
        )
        rows += [SamplingRow(sampling, 1, len(rows), counts, forbidden) for forbidden in ((), (3, 4), range(VOCAB))]
    tokens = sample(scores.repeat(len(rows), 1), rows).read().token_ids
    assert all(0 <= token < VOCAB for token in tokens)
    some = [
        token
        for row, token in zip(rows, tokens, strict=True)
        if len(row.forbidden) == 2 and row.sampling.repetition_penalty > 1e-3
    ]
    assert not {3, 4}.intersection(some)


@pytest.mark.parametrize("at", [{"repetition_penalty": 1.1}, {"logit_bias": {7: -100.0}}, {}])
def test_the_models_own_scores_are_judged_whatever_is_asked_for(at: dict[str, Any]) -> None:
    scores = logits(2)
    scores[1, 7] = float("nan")
    rows = [SamplingRow(Sampling(temperature=0.0, **at), 0, 0, counted([7], []), (7,)) for _ in range(2)]
    tokens = sample(scores, rows).read().token_ids
    assert tokens[0] >= 0
    assert tokens[1] == NOT_A_TOKEN


@pytest.mark.parametrize("vocab", [3, 128, 1000, 5000])
def test_the_drawn_token_is_where_the_cumulated_probabilities_pass_the_uniform_number(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(200, vocab, generator=generator)
    logits[:, vocab // 2 :: 3] = float("-inf")
    rows = [SamplingRow(Sampling(temperature=0.7), seed=index, step=5) for index in range(200)]
    drawn = sample(logits.clone(), rows).read().token_ids
    probabilities = (logits.double() / 0.7).softmax(-1).numpy()
    for token, row, chances in zip(drawn, rows, probabilities, strict=True):
        point = uniform(row.seed, row.step)
        ends = chances.cumsum()
        assert chances[token] > 0
        assert ends[token] - chances[token] - 1e-6 <= point <= ends[token] + 1e-6


def sorted_nucleus(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """What stays of each row, by sorting all of it, in double."""
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    chances = ordered.double().softmax(-1)
    kept = chances.cumsum(-1) - chances < top_p[:, None].double().clamp_min(1e-9)
    return torch.zeros_like(kept).scatter_(-1, order, kept)


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0, 60.0])
@pytest.mark.parametrize("vocab", [3, 1000, 49152])
@pytest.mark.parametrize("step", [0.0, 0.5], ids=["floats", "ties"])
def test_the_nucleus_is_that_of_a_stable_sort(spread: float, vocab: int, step: float) -> None:
    scores = spread * torch.randn(12, vocab, generator=torch.Generator().manual_seed(vocab))
    scores = (scores / step).round() * step if step else scores
    scores[:4, ::3] = float("-inf")
    top_p = torch.tensor([0.0, 0.1, 0.3777, 0.5111, 0.7, 0.8, 0.9123, 0.95, 0.987, 0.999, 0.9999, 1e-7])
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    got = weights.clone()
    keep_nucleus(got, top_p)
    wanted = sorted_nucleus(scores, top_p)
    chances = scores.double().softmax(-1)
    # Sets that differ differ by no more than the rounding of a float32 weight makes of the share.
    differing = (chances * ((got > 0) != (wanted & (weights > 0)))).sum(-1)
    share, last = (chances * wanted).sum(-1), torch.where(wanted, chances, 2.0).amin(-1)
    near = torch.minimum((share - top_p).abs(), (share - last - top_p).abs()) < 1e-6
    assert (differing[~near] <= 1e-6).all()
    assert torch.equal(got[got > 0], weights[got > 0])
    assert (got > 0).any(-1).all()


@pytest.mark.skipif(kernels() is None, reason=why_no_kernels())
@pytest.mark.parametrize("threads", [1, 2, 20])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0])
@pytest.mark.parametrize("vocab", [1, 3, 1000, 49152])
def test_the_kernels_nucleus_is_torchs_to_the_last_bit(vocab: int, spread: float, threads: int) -> None:
    scores = spread * torch.randn(12, vocab, generator=torch.Generator().manual_seed(vocab))
    scores[6:] = (scores[6:] / 0.5).round() * 0.5
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    top_p = torch.tensor([0.0, 0.1, 0.3777, 0.5, 0.7, 0.8, 0.9123, 0.95, 0.987, 0.999, 1.0, 1e-7])
    wanted, by_sort, got, beside_nan = (weights.clone() for _ in range(4))
    beside_nan[3] = torch.nan
    keep_nucleus_by_torch(wanted, top_p)
    keep_nucleus_by_sort(by_sort, top_p)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        keep_nucleus(got, top_p)
        keep_nucleus(beside_nan, top_p)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(by_sort, wanted)
    assert torch.equal(got, wanted)
    sound = torch.arange(12) != 3
    assert torch.equal(beside_nan[sound], wanted[sound])


@pytest.mark.parametrize(("vocab", "most"), [(50, 7), (4096, 60), (4096, 2000), (4100, 30)])
def test_the_kth_best_is_topks(vocab: int, most: int) -> None:
    scores = torch.randn(6, vocab, generator=torch.Generator().manual_seed(most)).mul_(3).round_()
    counts = torch.tensor([1, 2, 3, most // 2, most - 1, most])
    wanted = scores.sort(-1, descending=True).values.gather(1, counts[:, None] - 1)
    assert torch.equal(kth_best(scores, counts, most), wanted)


def test_scores_that_are_not_numbers_give_no_token_under_top_p_and_top_k() -> None:
    scores = logits(4)
    scores[1, 7] = float("nan")
    scores[2] = float("inf")
    scores[3] = float("-inf")
    rows = [SamplingRow(Sampling(top_p=0.9, top_k=20), 0, 0) for _ in range(4)]
    tokens = sample(scores, rows).read().token_ids
    assert tokens[1] == NOT_A_TOKEN
    assert all(0 <= tokens[row] < VOCAB for row in (0, 2, 3))


def test_penalties_count_what_a_sequence_holds_as_it_grows() -> None:
    """The oracle counts all of it anew at every step, row by row."""
    random = np.random.default_rng(0)
    sampling = Sampling(
        temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logprobs=0
    )
    sampling = replace(sampling, logit_bias={4: 1.5, 7: -2.0})
    prompts = [random.integers(0, 20, size).tolist() for size in (9, 0, 30)]
    answers: list[list[int]] = [[], [], []]
    kept = [TokenCounts(prompt) for prompt in prompts]
    for step in range(120):
        scores = logits(3, seed=step)
        changes = Changes([SamplingRow(sampling, 0, step, counts) for counts in kept], VOCAB)
        got = scores.clone()
        changes.apply(got, upload(changes.tables(), got.device))
        assert torch.allclose(got, penalized_anew(scores, sampling, prompts, answers), atol=1e-5)
        for row, counts in enumerate(kept):
            token = int(random.integers(0, VOCAB))
            answers[row].append(token)
            counts.extend([token])


def penalized_anew(
    scores: torch.Tensor, sampling: Sampling, prompts: list[list[int]], answers: list[list[int]]
) -> torch.Tensor:
    out = scores.clone()
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        for token in {*prompt, *answer}:
            value = out[row, token]
            factor = sampling.repetition_penalty
            out[row, token] = value / factor if value > 0 else value * factor
        for token in set(answer):
            out[row, token] -= sampling.presence_penalty + sampling.frequency_penalty * answer.count(token)
        for token, bias in sampling.logit_bias.items():
            out[row, token] += bias
    return out


def test_what_is_asked_for_beside_the_tokens_comes_with_them() -> None:
    rows = [SamplingRow(Sampling(temperature=0.0, logprobs=n), 0, 0) for n in (2, 0)]
    broken = torch.tensor([False, True, False, False, True])
    drawn = sample(logits(2), rows, broken).read()
    assert drawn.beside is not None
    assert drawn.beside.tolist() == broken.tolist()
    assert len(drawn.tops[0] or ()) == 2
    assert sample(logits(2), rows).read().beside is None
