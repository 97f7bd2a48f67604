"""Decode attention on the CPU that reads each context's K/V where it lies: no copy, no padding.

Each query head of each sequence is a row of a sparse matrix whose columns are the K/V rows that it sees. The scores are
the product of queries and keys sampled at that pattern; the output is the sum of the value rows weighted by the scores'
softmax, an embedding bag. Both read a row once per query head, from cache after the first head of a group.
"""

import itertools
import warnings
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from edged.engine.attention.base import AttentionCall
from edged.engine.attention.packed_batch import Segment
from edged.engine.kv.store import KvStore

# torch calls its CSR tensors a beta feature, once per process.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")


def why_not(kv: KvStore) -> str:
    """Return why this path cannot be used on this K/V storage; "" when it can."""
    if kv.keys.device.type != "cpu" or kv.keys.dtype != torch.float32:
        return f"torch has the sparse products for float32 on the CPU, not for {kv.keys.dtype} on {kv.keys.device.type}"
    if kv.keys[0].numel() // kv.head_dim >= 2**31:
        return "the cache has more rows than 32 bits can number"
    return ""


class RaggedDecode:
    """The decodes of one iteration, each a single query token over `context` + 1 keys (the last `window` of them).

    If any sequence was pruned, an object serves one layer only: see `RowsByHead`.
    """

    def __init__(self, kv: KvStore, columns: np.ndarray, seen: list[int], equal: int) -> None:
        """`columns` are the K/V rows that the query heads see, concatenated; of `equal` heads each sees `seen[i]`."""
        self._kv, self._rows = kv, len(seen) * equal
        self._columns = torch.from_numpy(columns)
        offsets = np.zeros(self._rows + 1, np.int32)
        np.cumsum(np.repeat(seen, equal), out=offsets[1:])
        self._offsets = torch.from_numpy(offsets)
        self._weights = torch.empty(len(columns), dtype=kv.keys.dtype)
        self._pattern = torch.sparse_csr_tensor(
            self._offsets,
            self._columns,
            # Zeros, not empty: torch adds them to the scores after a product with beta 0, which a NaN would survive.
            torch.zeros(len(columns), dtype=kv.keys.dtype),
            (self._rows, len(kv.rows(0)[0])),
            check_invariants=False,
        )
        self._runs = _runs(seen, equal)

    def attend(self, call: AttentionCall, query: torch.Tensor) -> torch.Tensor:
        """Attend: `query` [n, heads, d] -> [n, heads, d]; `columns` already respect the window."""
        keys, values = self._kv.rows(call.layer)
        flat = query.reshape(self._rows, -1)
        scores = torch.sparse.sampled_addmm(self._pattern, flat, keys.t(), beta=0.0, alpha=call.scaling).values()
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        sinks = None if call.sinks is None else call.sinks.to(scores.dtype).repeat(len(query))
        row = 0
        for start, stop, length in self._runs:
            own, weights = (part[start:stop].view(-1, length) for part in (scores, self._weights))
            torch.softmax(own, dim=-1, out=weights)
            if sinks is not None:
                # e^score / (sum of e^scores + e^sink) is the softmax' share times this.
                weights *= (own.logsumexp(-1) - sinks[row : row + len(own)]).sigmoid()[:, None]
                row += len(own)
        out = F.embedding_bag(self._columns, values, self._offsets[:-1], mode="sum", per_sample_weights=self._weights)
        return out.view(query.shape)


def ragged_decode(decodes: Sequence[Segment], kv: KvStore, heads: int, window: int | None) -> RaggedDecode:
    """Build the decodes of sequences that were not pruned; all layers with this window share them."""
    lengths = np.array([segment.context + 1 for segment in decodes])
    first = np.zeros_like(lengths) if window is None else np.maximum(0, lengths - window)
    seen = lengths - first
    ends = np.cumsum(seen * heads)
    columns = np.empty(int(ends[-1]), np.int32)
    head_rows = (np.arange(heads) // (heads // kv.kv_heads) * kv.page_size).astype(np.int32)[:, None]
    start = 0
    for segment, begin, length, stop in zip(decodes, first.tolist(), lengths.tolist(), ends.tolist(), strict=True):
        rows = _first_heads_rows(segment.pages[begin // kv.page_size : -(-length // kv.page_size)], kv)
        skipped = begin % kv.page_size
        np.add(head_rows, rows[skipped : skipped + length - begin], out=columns[start:stop].reshape(heads, -1))
        start = stop
    return RaggedDecode(kv, columns, seen.tolist(), heads)


class RowsByHead:
    """The K/V rows of one iteration's decodes after pruning, where each head sees its own rows, and its own number."""

    def __init__(self, decodes: Sequence[Segment], kv: KvStore, heads: int) -> None:
        self._kv, self._group = kv, heads // kv.kv_heads
        none = np.zeros((kv.layers, kv.kv_heads), np.int64)
        head_rows = (np.arange(kv.kv_heads) * kv.page_size).astype(np.int32)[:, None]
        self._sequences: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        """For each: the rows of all heads in its compacted pages, in order; later rows by head; kept rows by head."""
        for segment in decodes:
            slabs = segment.compacted.slabs if segment.compacted else 0
            counts = segment.compacted.counts if segment.compacted else none
            length = segment.context + 1 - slabs * kv.page_size
            later = _first_heads_rows(segment.pages[slabs : slabs - (-length // kv.page_size)], kv)[:length]
            # A page's blocks lie one after the other.
            starts = (segment.pages[:slabs] * (kv.kv_heads * kv.page_size)).astype(np.int32)
            kept = starts[:, None] + np.arange(kv.kv_heads * kv.page_size, dtype=np.int32)
            self._sequences.append((kept.reshape(-1), later + head_rows, counts * kv.page_size))

    def layer(self, layer: int) -> RaggedDecode:
        """Build the decodes of `layer`."""
        columns: list[np.ndarray] = []
        seen: list[int] = []
        for kept, later, counts in self._sequences:
            stop = 0
            for rows, own in zip(counts[layer].tolist(), later, strict=True):
                start, stop = stop, stop + rows
                columns += [kept[start:stop], own] * self._group
                seen.append(rows + len(own))
        return RaggedDecode(self._kv, np.concatenate(columns), seen, self._group)


def _first_heads_rows(pages: np.ndarray, kv: KvStore) -> np.ndarray:
    """Return the rows of KV head 0 in whole `pages`; the rows of head h lie h * page_size behind them."""
    first = (pages * (kv.kv_heads * kv.page_size)).astype(np.int32)
    return (first[:, None] + np.arange(kv.page_size, dtype=np.int32)).reshape(-1)


def _runs(seen: list[int], equal: int) -> list[tuple[int, int, int]]:
    """Group neighbouring rows of equal length for one softmax: (start, stop, length); `equal` rows see `seen[i]`."""
    runs: list[tuple[int, int, int]] = []
    start = 0
    for length, alike in itertools.groupby(seen):
        stop = start + length * equal * sum(1 for _ in alike)
        runs.append((start, stop, length))
        start = stop
    return runs
