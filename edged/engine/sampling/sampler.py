"""Sampling of the next token of all sampled rows at once, each with its own parameters.

A drawn token depends on its own row, seed and step alone, never on what else shares the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from edged.engine.sampling.params import SamplingRow
from edged.engine.sampling.truncation import keep_nucleus, kth_best
from edged.tensors.device_copy import upload
from edged.text.grammar import GrammarMatcher

NOT_A_TOKEN = -1
_BLOCK = 128
"""Tokens of a block in the two-level search for the drawn token; common vocabularies are multiples of it."""
_COLDEST = 1e-5
"""The lowest temperature that scores are divided by."""
_MASK64 = (1 << 64) - 1


@dataclass(slots=True)
class Drawn:
    """The drawn tokens on the host. `logprobs` and `tops` have an entry per row, None if not asked for.

    A token is NOT_A_TOKEN if the model's scores were not numbers.
    """

    token_ids: list[int]
    logprobs: list[float | None]
    tops: list[list[tuple[int, float]] | None]
    beside: np.ndarray | None = None
    """The values that were to be read together with the tokens."""


def uniform(seed: int, step: int) -> float:
    """Return a number in [0, 1) that depends on (seed, step) alone: SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (seed * 0x9E3779B97F4A7C15 + (step + 1) * 0xD1B54A32D192ED03) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return ((x ^ (x >> 31)) >> 11) / float(1 << 53)


class SampledRows:
    """Sampling that is queued on the device; `read` waits for it, an iteration's only host synchronisation."""

    def __init__(
        self,
        token_ids: torch.Tensor,
        broken: torch.Tensor,
        rows: Sequence[SamplingRow],
        raw: torch.Tensor,
        beside: torch.Tensor | None = None,
    ) -> None:
        """`token_ids` and `broken` [rows], `raw` scores [rows, vocab], `beside` of one dimension."""
        self._rows = rows
        self._asked = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
        parts = [token_ids.double().masked_fill_(broken, NOT_A_TOKEN)]
        self._width = max((rows[i].sampling.logprobs or 0 for i in self._asked), default=0)
        if self._asked:
            (index,) = upload([np.array(self._asked, np.int64)], raw.device)
            logprobs = raw.index_select(0, index).log_softmax(-1)
            parts.append(logprobs.gather(1, token_ids.index_select(0, index)[:, None])[:, 0].double())
            if self._width:
                best, ids = logprobs.topk(self._width)
                parts += [best.reshape(-1).double(), ids.reshape(-1).double()]
        if beside is not None:
            parts.append(beside.double())
        # Doubles hold every token id exactly, so that ids and log-probabilities come back in one copy.
        self._device = torch.cat(parts)

    def read(self) -> Drawn:
        """Wait for the device and return the tokens."""
        values = self._device.tolist()
        n, asked, width = len(self._rows), len(self._asked), self._width
        end = n + asked * (1 + 2 * width)
        beside = np.array(values[end:]) if end < len(values) else None
        drawn = Drawn([int(v) for v in values[:n]], [None] * n, [None] * n, beside)
        for position, row in enumerate(self._asked):
            drawn.logprobs[row] = values[n + position]
            wanted = self._rows[row].sampling.logprobs or 0
            first = n + asked + position * width
            ids = first + asked * width
            drawn.tops[row] = [(int(values[ids + j]), values[first + j]) for j in range(wanted)]
        return drawn


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow], beside: torch.Tensor | None = None) -> SampledRows:
    """Draw one token per row of `logits` [rows, vocab] (changed in place unless log-probabilities are asked for).

    Order, as transformers has it: penalties, bias and forbidden tokens, grammars, temperature, top-k, top-p, min-p.
    Temperature 0 is the argmax. Otherwise the token is where the cumulated probabilities pass a uniform number.
    `beside` is read together with the tokens.
    """
    raw = logits.float().contiguous()
    scores = raw.clone() if any(row.sampling.logprobs is not None for row in rows) else raw
    changes, draws = Changes(rows, scores.shape[1]), _Draws(rows, scores.shape[1])
    tables = changes.tables()
    # One transfer: the forward runs on the device meanwhile, and the host waits for neither.
    moved = upload([*tables, *draws.tables()], scores.device)
    token_ids, broken = choose_greedy(scores)
    if changes.any:
        # `broken` comes from the model's own scores: bias and forbidden tokens may leave no token to draw.
        changes.apply(scores, moved[: len(tables)])
        token_ids = token_ids if draws.all else scores.argmax(-1)
    if draws.rows:
        draws.run(scores, moved[len(tables) :], token_ids)
    return SampledRows(token_ids, broken, rows, raw, beside)


def choose_greedy(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most likely token of each row of `scores` [rows, vocab], and whether the row has a NaN."""
    token_ids = scores.argmax(-1)
    # argmax points at a NaN where there is one.
    return token_ids, scores.gather(1, token_ids[:, None])[:, 0].isnan()


def is_plain(row: SamplingRow) -> bool:
    """Whether `choose` can draw the row's token: only temperature and min-p shape its distribution."""
    s = row.sampling
    changed = s.penalizes or s.logit_bias or row.forbidden or row.matcher
    return not (changed or s.top_k > 0 or s.top_p < 1)


def plain_parameters(rows: Sequence[SamplingRow]) -> np.ndarray:
    """Return the parameters of `choose` for these rows: [3, rows] of temperature, min-p and uniform number."""
    columns = [(row.sampling.temperature, row.sampling.min_p, uniform(row.seed, row.step)) for row in rows]
    return np.ascontiguousarray(np.array(columns, np.float64).T)


def choose(scores: torch.Tensor, parameters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample plain rows from `plain_parameters` on the device, without control flow that depends on their values.

    Returns tokens and broken rows, each [rows]; `scores` [rows, vocab] in float32 are not changed.
    """
    token_ids, broken = choose_greedy(scores)
    temperature, min_p, uniforms = parameters
    weights = _weights(_scaled(scores, temperature))
    weights.masked_fill_(weights < min_p.float()[:, None], 0.0)
    return torch.where(temperature > 0, _inverse(weights, uniforms), token_ids), broken


class Changes:
    """The changes of tokens' scores in some rows, gathered on the host: bias, forbidden tokens, penalties on tokens
    that occurred, and the masks of grammars."""

    def __init__(self, rows: Sequence[SamplingRow], vocab: int) -> None:
        self._penalized = [
            (i * vocab, row.sampling, row.counts) for i, row in enumerate(rows) if row.counts is not None
        ]
        self._added: dict[int, float] = {}
        for i, row in enumerate(rows):
            if row.sampling.logit_bias or row.forbidden:
                amounts = row.sampling.logit_bias | dict.fromkeys(row.forbidden, float("-inf"))
                self._added |= {i * vocab + token: amount for token, amount in amounts.items()}
        self._followed: dict[GrammarMatcher, list[int]] = {}
        """Rows of each answer that follows a grammar, by how much of its draft is before them."""
        for i, row in enumerate(rows):
            if row.matcher is not None:
                self._followed.setdefault(row.matcher, []).append(i)
        self._drafts = [rows[own[-1]].draft for own in self._followed.values()]
        self.any = bool(self._added or self._penalized or self._followed)

    def tables(self) -> list[np.ndarray]:
        """Return the tables that `apply` needs on the device, for `upload`."""
        # Doubles are uploaded as integers of the same bits.
        tables = [np.array([*self._added], np.int64), np.array([*self._added.values()], np.float64).view(np.int64)]
        if self._penalized:
            seen = [counts.ids + first for first, _, counts in self._penalized]
            owners = np.repeat(np.arange(len(seen)), [ids.size for ids in seen])
            penalties = [(s.repetition_penalty, s.presence_penalty, s.frequency_penalty) for _, s, _ in self._penalized]
            tables += [np.concatenate(seen), np.concatenate([counts.counts for _, _, counts in self._penalized])]
            tables += [owners, np.array(penalties, np.float64).reshape(-1).view(np.int64)]
        if self._followed:
            tables += [np.array([i for own in self._followed.values() for i in own], np.int64), self._masks()]
        return tables

    def _masks(self) -> np.ndarray:
        """Return which tokens may follow in each of the rows of `_followed`, a bit each, as one table."""
        rows, width = sum(map(len, self._followed.values())), self._mask_words
        words = np.full(rows * width + rows * width % 2, -1, np.int32)
        masks, done = words[: rows * width].reshape(rows, width), 0
        for (matcher, own), draft in zip(self._followed.items(), self._drafts, strict=True):
            matcher.fill(masks[done : done + len(own)], draft)
            done += len(own)
        return words.view(np.int64)

    @property
    def _mask_words(self) -> int:
        return -(-next(iter(self._followed)).grammar.vocab // 32)

    def apply(self, scores: torch.Tensor, tables: Sequence[torch.Tensor]) -> None:
        """Change `scores` [rows, vocab], contiguous, by the `tables` on their device.

        Repetition (CTRL, Keskar et al. 2019) counts prompt and answer; presence and frequency (OpenAI) the answer
        alone.
        """
        flat = scores.view(-1)
        if self._penalized:
            seen, counts, owners, penalties = tables[2:6]
            repetition, presence, frequency = penalties.view(torch.float64).view(-1, 3).index_select(0, owners).T
            values, factor = flat.index_select(0, seen), repetition.float()
            values = torch.where(values > 0, values / factor, values * factor)
            flat.index_copy_(0, seen, values - (presence * (counts > 0) + frequency * counts).float())
        if self._added:
            flat.scatter_add_(0, tables[0], tables[1].view(torch.float64).float())
        if self._followed:
            followed, masks = tables[-2:]
            rows = followed.numel()
            marks = masks.view(torch.uint8)[: rows * self._mask_words * 4].int()
            added = _added_by_byte(masks.device).index_select(0, marks).view(rows, -1)
            scores.index_add_(0, followed, added[:, : scores.shape[1]])


@cache
def _added_by_byte(device: torch.device) -> torch.Tensor:
    """Return what each byte of a mask adds to the scores of its eight tokens: 0, or -inf where a bit is not set."""
    bits = torch.arange(256)[:, None].bitwise_right_shift(torch.arange(8)) % 2
    return torch.zeros(256, 8).masked_fill_(bits == 0, float("-inf")).to(device)


class _Draws:
    """The rows that are drawn at random, and the truncations of their distributions."""

    def __init__(self, rows: Sequence[SamplingRow], vocab: int) -> None:
        self._drawn = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
        self.rows = [rows[index] for index in self._drawn]
        self.all = len(self._drawn) == len(rows)
        """Whether no row is greedy."""
        self._limited = [place for place, row in enumerate(self.rows) if 0 < row.sampling.top_k < vocab]
        self._nucleus = [place for place, row in enumerate(self.rows) if row.sampling.top_p < 1]
        self._counts = [self.rows[place].sampling.top_k for place in self._limited]

    def tables(self) -> list[np.ndarray]:
        """Return the tables that `run` needs on the device, for `upload`."""
        if not self._drawn:
            return []
        top_p = [self.rows[place].sampling.top_p for place in self._nucleus]
        indices = [np.array(values, np.int64) for values in (self._drawn, self._limited, self._counts, self._nucleus)]
        floats = [np.array(top_p, np.float64), plain_parameters(self.rows).reshape(-1)]
        return [*indices, *(values.view(np.int64) for values in floats)]

    def run(self, scores: torch.Tensor, tables: Sequence[torch.Tensor], token_ids: torch.Tensor) -> None:
        """Put the drawn rows' tokens into `token_ids` [rows], by inverse transform over truncated distributions."""
        drawn, limited, counts, nucleus = tables[:4]
        temperature, min_p, uniforms = tables[5].view(torch.float64).view(3, -1)
        scaled = _scaled(scores if self.all else scores.index_select(0, drawn), temperature)
        out = None
        if self._limited:
            some = scaled if len(self._limited) == len(self.rows) else scaled.index_select(0, limited)
            least = scaled.new_full((len(scaled), 1), float("-inf"))
            # Ties with the k-th best stay.
            out = scaled < least.index_copy_(0, limited, kth_best(some, counts, max(self._counts)))
        weights = _weights(scaled)
        if out is not None:
            weights.masked_fill_(out, 0.0)
        if len(self._nucleus) == len(self.rows):
            keep_nucleus(weights, tables[4].view(torch.float64))
        elif self._nucleus:
            some = weights.index_select(0, nucleus)
            keep_nucleus(some, tables[4].view(torch.float64))
            weights.index_copy_(0, nucleus, some)
        if any(row.sampling.min_p > 0 for row in self.rows):
            weights.masked_fill_(weights < min_p.float()[:, None], 0.0)
        token_ids.index_copy_(0, drawn, _inverse(weights, uniforms))


def _scaled(scores: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return scores / temperature.clamp_min(_COLDEST).float()[:, None]


def _weights(scaled: torch.Tensor) -> torch.Tensor:
    """Turn `scaled` scores in place into probabilities [rows, vocab] relative to the row's largest, as min-p needs."""
    return scaled.sub_(scaled.amax(-1, keepdim=True)).exp_()


def _inverse(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the first token [rows] where the cumulated `weights` [rows, vocab] pass `uniforms` [rows] of their sum.

    In two levels, blocks and then the tokens of one, so that the vocabulary is read once. Sums over blocks are double:
    a float32 sum over a large vocabulary can end visibly short of the whole.
    """
    rows, vocab = weights.shape
    if vocab % _BLOCK:
        weights = F.pad(weights, (0, _BLOCK - vocab % _BLOCK))
    blocks = weights.view(rows, -1, _BLOCK)
    ends = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    target = uniforms[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp_min(0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    place = torch.searchsorted(inside.double().cumsum(-1), target - before, right=True)
    # Two orders of summation may differ in the last bit: never end on a token that cannot be drawn.
    last = (inside > 0).int().mul_(torch.arange(1, _BLOCK + 1, device=inside.device)).argmax(-1, keepdim=True)
    return (block * _BLOCK + torch.minimum(place, last))[:, 0]
