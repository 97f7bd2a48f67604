"""Drawing the next token of every sampled row at once, each with its own parameters.

Owns the meaning of the sampling parameters. A drawn token depends on its own row, seed and step alone, never on what
else shares the batch. Must not know requests' lives or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from edged.align.transfer import upload
from edged.engine.request import Sampling

NOT_A_TOKEN = -1
_BLOCK = 128
"""Tokens of a block in which the drawn one is looked for; common vocabularies are multiples of it."""
_COLDEST = 1e-5
"""The lowest temperature that scores are divided by."""
_MASK64 = (1 << 64) - 1


@dataclass(slots=True)
class Row:
    """One row to sample: `prompt` and `generated` token ids are what penalties count; `step` is the draw's number."""

    sampling: Sampling
    seed: int
    step: int
    prompt: Sequence[int]
    generated: Sequence[int]
    forbidden: Sequence[int] = ()
    """Tokens that may not be drawn now (end tokens before min_tokens)."""


@dataclass(slots=True)
class Drawn:
    """The result on the host. `logprobs` and `tops` have an entry per row, None where not asked for.

    A token is NOT_A_TOKEN where the model's scores were not numbers.
    """

    tokens: list[int]
    logprobs: list[float | None]
    tops: list[list[tuple[int, float]] | None]


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) that depends on (seed, step) alone: SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (seed * 0x9E3779B97F4A7C15 + (step + 1) * 0xD1B54A32D192ED03) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return ((x ^ (x >> 31)) >> 11) / float(1 << 53)


class SampledRows:
    """Sampling queued on the device; `read` waits for it. The one host synchronisation of an iteration."""

    def __init__(self, tokens: torch.Tensor, broken: torch.Tensor, rows: Sequence[Row], raw: torch.Tensor) -> None:
        self._rows = rows
        self._asked = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
        parts = [tokens.double().masked_fill_(broken, NOT_A_TOKEN)]
        self._width = max((rows[i].sampling.logprobs or 0 for i in self._asked), default=0)
        if self._asked:
            index = _index(self._asked, raw.device)
            logprobs = raw.index_select(0, index).log_softmax(-1)
            parts.append(logprobs.gather(1, tokens.index_select(0, index)[:, None])[:, 0].double())
            if self._width:
                best, ids = logprobs.topk(self._width)
                parts += [best.reshape(-1).double(), ids.reshape(-1).double()]
        # Doubles hold every token id exactly, so that ids and log-probabilities come back in one copy.
        self._device = torch.cat(parts)

    def read(self) -> Drawn:
        """Wait for the device and give the tokens out."""
        values = self._device.tolist()
        n, asked, width = len(self._rows), len(self._asked), self._width
        drawn = Drawn([int(v) for v in values[:n]], [None] * n, [None] * n)
        for position, row in enumerate(self._asked):
            drawn.logprobs[row] = values[n + position]
            wanted = self._rows[row].sampling.logprobs or 0
            first = n + asked + position * width
            ids = first + asked * width
            drawn.tops[row] = [(int(values[ids + j]), values[first + j]) for j in range(wanted)]
        return drawn


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> SampledRows:
    """Draw one token per row of `logits` [rows, vocab] (changed in place unless log-probabilities are asked for).

    Order, as vLLM and transformers have it: bias and forbidden tokens, penalties, temperature, top-k, top-p, min-p.
    Temperature 0 is the argmax. Otherwise the token is where the cumulated probabilities pass a uniform number.
    """
    raw = logits.float()
    scores = raw.clone() if any(row.sampling.logprobs is not None for row in rows) else raw
    _penalize(scores, rows)
    tokens, broken = choose_greedy(scores)
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
    if drawn:
        index = _index(drawn, scores.device)
        picked = _draw(scores.index_select(0, index), [rows[i] for i in drawn])
        tokens.index_copy_(0, index, picked)
    return SampledRows(tokens, broken, rows, raw)


def choose_greedy(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row of `scores` [rows, vocab], and whether the row's scores are no numbers."""
    tokens = scores.argmax(-1)
    # argmax points at a NaN where there is one.
    return tokens, scores.gather(1, tokens[:, None])[:, 0].isnan()


def is_plain(row: Row) -> bool:
    """Whether `choose` draws its token: nothing but temperature and min-p shapes its distribution."""
    s = row.sampling
    penalties = s.repetition_penalty != 1.0 or s.presence_penalty or s.frequency_penalty
    return not (penalties or s.logit_bias or row.forbidden or s.top_k > 0 or s.top_p < 1)


def plain_parameters(rows: Sequence[Row]) -> np.ndarray:
    """What `choose` is given for these rows: [3, rows] of temperature, min-p and uniform number."""
    columns = [(row.sampling.temperature, row.sampling.min_p, uniform(row.seed, row.step)) for row in rows]
    return np.ascontiguousarray(np.array(columns, np.float64).T)


def choose(scores: torch.Tensor, parameters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `sample` for plain rows, from `plain_parameters` on the device: no step of it depends on their values.

    `scores` [rows, vocab] in float32 are left alone.
    """
    tokens, broken = choose_greedy(scores)
    temperature, min_p, uniforms = parameters
    scaled = scores / temperature.clamp_min(_COLDEST).float()[:, None]
    _min_p(scaled, min_p.float())
    drawn = _inverse(scaled.softmax(-1), uniforms)
    return torch.where(temperature > 0, drawn, tokens), broken


def _index(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return upload([np.asarray(values, np.int64)], device)[0]


def _floats(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)


def _penalize(scores: torch.Tensor, rows: Sequence[Row]) -> None:
    """Bias, forbidden tokens and the three penalties, in place.

    Repetition (CTRL, Keskar et al. 2019) counts prompt and answer; presence and frequency (OpenAI) the answer alone.
    """
    adds: list[tuple[int, int, float]] = []
    for i, row in enumerate(rows):
        s = row.sampling
        adds += [(i, token, bias) for token, bias in s.logit_bias.items()]
        adds += [(i, token, float("-inf")) for token in row.forbidden]
        if s.repetition_penalty != 1.0:
            seen = _index(np.unique(np.fromiter((*row.prompt, *row.generated), np.int64)).tolist(), scores.device)
            values = scores[i].index_select(0, seen)
            scores[i].index_copy_(
                0, seen, torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
            )
        if (s.presence_penalty or s.frequency_penalty) and row.generated:
            ids, counts = np.unique(np.fromiter(row.generated, np.int64), return_counts=True)
            amounts = -(s.presence_penalty + s.frequency_penalty * counts)
            adds += [(i, int(token), float(amount)) for token, amount in zip(ids, amounts, strict=True)]
    if adds:
        row_ids, tokens, amounts_ = zip(*adds, strict=True)
        device = scores.device
        scores.index_put_((_index(row_ids, device), _index(tokens, device)), _floats(amounts_, device), accumulate=True)


def _draw(scores: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Tokens [rows] by inverse transform over the truncated distributions."""
    device, vocab = scores.device, scores.shape[1]
    temperature = _floats([max(row.sampling.temperature, _COLDEST) for row in rows], device)
    scores = scores / temperature[:, None]
    limited = [i for i, row in enumerate(rows) if 0 < row.sampling.top_k < vocab]
    if limited:
        index, counts = _index(limited, device), [rows[i].sampling.top_k for i in limited]
        some = scores.index_select(0, index)
        lowest = some.topk(max(counts)).values.gather(1, _index(counts, device)[:, None] - 1)
        scores.index_copy_(0, index, some.masked_fill_(some < lowest, float("-inf")))
    if any(row.sampling.min_p > 0 for row in rows):
        _min_p(scores, _floats([row.sampling.min_p for row in rows], device))
    nucleus = [i for i, row in enumerate(rows) if row.sampling.top_p < 1]
    if nucleus:
        index = _index(nucleus, device)
        scores.index_copy_(
            0, index, _top_p(scores.index_select(0, index), _floats([rows[i].sampling.top_p for i in nucleus], device))
        )
    uniforms = torch.tensor([uniform(row.seed, row.step) for row in rows], dtype=torch.float64)
    return _inverse(scores.softmax(-1), uniforms.to(device, non_blocking=True))


def _inverse(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token [rows] at which the cumulated `probabilities` [rows, vocab] pass `uniforms` [rows] of their sum.

    In two levels, blocks and then the tokens of one, so that the vocabulary is read once. Sums are double: a float32
    sum over a large vocabulary can end visibly short of 1.
    """
    rows, vocab = probabilities.shape
    if vocab % _BLOCK:
        probabilities = F.pad(probabilities, (0, _BLOCK - vocab % _BLOCK))
    blocks = probabilities.view(rows, -1, _BLOCK)
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniforms[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_min(0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    place = torch.searchsorted(inside.double().cumsum(-1), target - before, right=True)
    # Two orders of summation may differ in the last bit: never end on a token that cannot be drawn.
    last = (inside > 0).int().mul_(torch.arange(1, _BLOCK + 1, device=inside.device)).argmax(-1, keepdim=True)
    return (block * _BLOCK + torch.minimum(place, last))[:, 0]


def _min_p(scores: torch.Tensor, min_p: torch.Tensor) -> None:
    """Leave out, in place, what is less likely than `min_p` [rows] times the most likely token."""
    scores.masked_fill_(scores < scores.amax(-1, keepdim=True) + min_p.log()[:, None], float("-inf"))


def _top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of most likely tokens whose probability reaches `top_p` (Holtzman et al. 2020)."""
    ordered, order = scores.sort(-1, descending=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    ordered = ordered.masked_fill(before >= top_p[:, None].clamp_min(1e-9), float("-inf"))
    return torch.empty_like(scores).scatter_(-1, order, ordered)
