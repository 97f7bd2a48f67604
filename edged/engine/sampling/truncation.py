"""Truncation to the most likely tokens: top-k and top-p, on the CPU without sorting the vocabulary.

The host waits for no GPU here, and a row's result does not depend on the rows beside it. On the CPU top-p is a compiled
kernel, if there is one; torch's ways give the same to the last bit.
"""

import torch

from edged.engine.native.library import kernels, readable

_GROUP = 32
"""Tokens that share a maximum in the search for the best k."""
_DIGIT_BITS = 10
_DIGITS = 1 << _DIGIT_BITS
_SHIFTS = (20, 10, 0)
"""Shifts of the three digits of the pattern of a float32 in [0, 1], which has at most 30 bits."""
_EXACT_BITS = 52
"""Bits of the sum of a row's masses: integers below 2^53 and their sums are exact in a double, in any order."""


def kth_best(scores: torch.Tensor, k: torch.Tensor, most: int) -> torch.Tensor:
    """Return the `k`-th largest of each row of `scores` [rows, vocab]: [rows, 1]; `k` [rows] is at most `most`."""
    rows, vocab = scores.shape
    if vocab % _GROUP == 0 and 2 * most <= vocab // _GROUP:
        # The best k lie in the k columns whose maxima are the largest.
        columns = scores.view(rows, _GROUP, -1)
        best = columns.amax(1).topk(most, sorted=False).indices
        scores = columns.gather(2, best[:, None].expand(-1, _GROUP, -1)).flatten(1)
    return scores.topk(most).values.gather(1, k[:, None] - 1)


def keep_nucleus(weights: torch.Tensor, top_p: torch.Tensor) -> None:
    """Zero, in place, all but the smallest set of largest `weights` whose share of the row's sum reaches `top_p`.

    `weights` [rows, vocab] are float32 in [0, 1], rows at least one, `top_p` [rows]. A row with NaNs may stay as it is.
    Of equal weights the first ones stay (Holtzman et al. 2020, as a stable sort has it). The smallest weight that stays
    is found digit by digit of its bit pattern, as a radix sort would find it: the patterns of positive floats are in
    the floats' order.
    """
    library, (rows, vocab) = kernels(), weights.shape
    if weights.device.type != "cpu":
        keep_nucleus_by_sort(weights, top_p)
        return
    if library is None or not readable(weights):
        keep_nucleus_by_torch(weights, top_p)
        return
    threads = min(torch.get_num_threads(), rows)
    left, top_p = weights.new_empty(threads, vocab), top_p.double().contiguous()
    scale = 2.0 ** _mass_bits(vocab)
    library.edged_keep_nucleus(weights.data_ptr(), rows, vocab, top_p.data_ptr(), scale, left.data_ptr(), threads)


def keep_nucleus_by_sort(weights: torch.Tensor, top_p: torch.Tensor) -> None:
    """Do the same as `keep_nucleus`, on any device: on a GPU in a third of the launches of a search by digits."""
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    masses = _masses(ordered)
    wanted = masses.sum(-1, keepdim=True) * top_p[:, None].double().clamp_min(1e-9)
    ordered.masked_fill_(masses.cumsum(-1) - masses >= wanted, 0.0)
    weights.scatter_(-1, order, ordered)


def keep_nucleus_by_torch(weights: torch.Tensor, top_p: torch.Tensor) -> None:
    """Do the same as `keep_nucleus` on the CPU."""
    masses = _masses(weights)
    wanted = masses.sum(-1, keepdim=True) * top_p[:, None].double().clamp_min(1e-9)
    least, above, equals = _min_to_keep(weights, masses, wanted)
    each = _masses(least, weights.shape[1]).clamp_min_(1.0)
    kept = ((wanted - above) / each).ceil_()
    out = weights < least
    if bool((equals > kept * each).any()):
        equal = weights == least
        out |= equal & (equal.cumsum(-1, dtype=torch.int32) > kept)
    weights.masked_fill_(out, 0.0)


def _masses(weights: torch.Tensor, vocab: int | None = None) -> torch.Tensor:
    """Return weights as whole numbers in doubles, small enough that a row of `vocab` of them has an exact sum."""
    return (weights * 2.0 ** _mass_bits(vocab or weights.shape[1])).round_().double()


def _mass_bits(vocab: int) -> int:
    return _EXACT_BITS - (vocab - 1).bit_length()


def _min_to_keep(
    weights: torch.Tensor, masses: torch.Tensor, wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the largest weight whose mass and that of all larger ones reach `wanted`, the mass of the larger ones, and
    the mass of the weights that equal it; each [rows, 1]."""
    rows, patterns = weights.shape[0], weights.view(torch.int32)
    owner = torch.arange(rows, device=weights.device)
    offsets = (owner * _DIGITS).int()[:, None]
    above, found, reached = torch.zeros_like(wanted), torch.zeros_like(offsets), wanted
    for shift in _SHIFTS:
        digits = (patterns >> shift).bitwise_and_(_DIGITS - 1)
        sums = masses.new_zeros(rows * _DIGITS)
        sums.scatter_add_(0, (digits + offsets[owner]).view(-1).long(), masses.view(-1))
        downwards = sums.view(rows, _DIGITS).flip(-1).cumsum(-1)
        place = torch.searchsorted(downwards, wanted - above).clamp_(max=_DIGITS - 1)
        reached = above + downwards.gather(1, place)
        above = above + torch.where(place > 0, downwards.gather(1, (place - 1).clamp_min(0)), 0.0)
        digit = (_DIGITS - 1 - place).int()
        found = (found << _DIGIT_BITS) + digit
        inside = digits == digit[owner]
        # Only the remaining weights are looked up for the next digits.
        line, column = inside.nonzero(as_tuple=True)
        patterns, masses, owner = patterns[line, column, None], masses[line, column, None], owner[line]
    return found.view(torch.float32), above, reached - above
