"""Attention over the paged cache, registered with transformers so that unmodified models use it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from edged.align.dpo.decoder import Branches
from edged.engine.attention.cpu import NativeDecode
from edged.engine.attention.cpu_sparse import RaggedDecode, RowsByHead
from edged.engine.attention.packed_batch import PackedBatch, Prefill
from edged.engine.kv.pruned_layout import HeadTables
from edged.engine.kv.store import KvStore

IMPLEMENTATION = "edged_paged"
DecodePath = Literal["padded", "ragged", "native", "triton"]
_UNSUPPORTED = ("s_aux", "sinks", "position_bias", "head_mask", "cu_seq_lens_q")


class UnsupportedAttention(ValueError):
    """The model asks its attention for something that the paged cache does not do."""


class AttentionBackend(Protocol):
    """One forward's meaning of attention."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """`query` [heads, tokens, d], `key` and `value` [kv_heads, tokens, d] -> [tokens, heads, d]."""


_current = threading.local()


@contextmanager
def attention_pass(current: AttentionBackend) -> Iterator[None]:
    """Make `current` answer every attention call of this thread."""
    before = getattr(_current, "value", None)
    _current.value = current
    try:
        yield
    finally:
        _current.value = before


def current_pass() -> AttentionBackend:
    """What answers this thread's attention calls at present."""
    current: AttentionBackend = _current.value
    return current


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function behind `attn_implementation="edged_paged"`; shapes are transformers' own, batch size 1."""
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UnsupportedAttention(
                f'the model passes "{name}" to its attention, which the paged cache cannot honour'
            )
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise UnsupportedAttention("the model's attention is not plainly causal (it passes a mask)")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = current_pass().attend(module.layer_idx, query[0], key[0], value[0], scale, sliding_window, softcap)  # type: ignore[arg-type]
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, paged_attention)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    causal: bool = False,
) -> torch.Tensor:
    """Grouped-query attention: [n, heads, q, d] over [n, kv_heads, k, d] -> [n, heads, q, d].

    `mask` is added to the scores: 0 where a key is seen, -inf elsewhere, broadcastable to [n, heads, q, k]. (A boolean
    one would be turned into this in every layer.) `softcap` bounds the scores as in Gemma 2: cap * tanh(score / cap).
    """
    groups = query.shape[1] // key.shape[1]
    # On CUDA torch has no fused kernel for both a mask and grouped queries.
    if groups > 1 and (softcap is not None or (mask is not None and query.is_cuda)):
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if softcap is None:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=causal,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    scores = query @ key.transpose(-1, -2) * scaling
    scores = softcap * torch.tanh(scores / softcap)
    if causal:
        mask = causal_mask(query.shape[2], key.shape[2], None, query)
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return weights @ value


def causal_mask(queries: int, keys: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """Additive [queries, keys]: the last query sees the last key; with a window, only the latest `window` keys."""
    device = like.device
    ahead = torch.arange(keys, device=device)[None, :] - torch.arange(keys - queries, keys, device=device)[:, None]
    return _additive(ahead, window, like.dtype)


def _additive(ahead: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """0 where a key is at or before its query, and within the window; -inf elsewhere."""
    hidden = ahead > 0
    if window is not None:
        hidden |= ahead <= -window
    return torch.zeros(ahead.shape, dtype=dtype, device=ahead.device).masked_fill_(hidden, float("-inf"))


class PagedAttention:
    """A packed forward over pages: writes the new K/V, then lets every segment attend to its own context.

    Single tokens are attended together: "native", "ragged" and "triton" read each context's pages where they lie,
    "padded" gathers them, padded to the longest. Longer segments are attended together and where their context lies if
    the batch was packed in tiles, else one by one over gathered pages.
    """

    def __init__(self, batch: PackedBatch, kv: KvStore, decode_path: DecodePath = "padded") -> None:
        self.batch, self.kv = batch, kv
        self._decode_path = decode_path
        self._native: NativeDecode | None = None
        self._ragged_decodes: dict[int | None, RaggedDecode] = {}
        self._rows_by_head: RowsByHead | None = None
        self._decode_masks: dict[int | None, torch.Tensor] = {}
        self._decode_blocks: torch.Tensor | None = None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        batch = self.batch
        alone = batch.tiles is None and not batch.prefills
        if alone and self._decode_path == "native":
            # The kernels store them on their way.
            return self._decode_and_see(layer, query.transpose(0, 1), scaling, window, softcap, (key, value))
        self.kv.write(layer, batch.write_rows, key.transpose(0, 1), value.transpose(0, 1))
        heads, tokens, _ = query.shape
        if alone:
            # Single tokens alone lie in order.
            return self._decode_and_see(layer, query.transpose(0, 1), scaling, window, softcap)
        out = query.new_empty(tokens, heads, value.shape[-1])
        if len(batch.decode_rows):
            rows = query.index_select(1, batch.decode_rows).transpose(0, 1)
            out.index_copy_(0, batch.decode_rows, self._decode_and_see(layer, rows, scaling, window, softcap))
        if batch.tiles is not None:
            from edged.engine.attention import triton_prefill

            triton_prefill.paged_prefill(layer, query, batch.tiles, self.kv, out, scaling, window, softcap)
        for chunk in batch.prefills:
            piece = self._prefill(layer, chunk, query, key, value, scaling, window, softcap)
            out[chunk.start : chunk.stop] = piece[0].transpose(0, 1)
        return out

    def _decode_and_see(
        self,
        layer: int,
        rows: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """`_decode`, shown to whoever observes one of the sequences; "native" stores the `new` keys and values."""
        if self._decode_path == "native":
            out = self._natively(rows.shape[1]).attend(layer, rows.transpose(0, 1), new, scaling, window, softcap)
        else:
            out = self._decode(layer, rows, scaling, window, softcap)
        if self.batch.decode_heads is not None:
            self._show(self.batch.decode_heads, layer, rows, out, scaling, softcap)
        return out

    def _show(
        self,
        heads: HeadTables,
        layer: int,
        rows: torch.Tensor,
        out: torch.Tensor,
        scaling: float,
        softcap: float | None,
    ) -> None:
        if all(segment.watch is None for segment in self.batch.decodes):
            return
        blocks, lengths = heads.blocks(layer), heads.lengths(layer, self.kv.page_size)
        for index, segment in enumerate(self.batch.decodes):
            if segment.watch is not None:
                keys = self.kv.read_keys(layer, blocks[index, :, : heads.most_blocks[layer, index]])
                segment.watch.see(layer, rows[index], out[index], keys, lengths[index], scaling, softcap)

    def _decode(
        self, layer: int, rows: torch.Tensor, scaling: float, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """`rows` [n, heads, d] -> [n, heads, d]."""
        batch = self.batch
        n, heads, _ = rows.shape
        if self._decode_path == "triton":
            from edged.engine.attention import triton_decode

            if batch.pruned is not None:
                return triton_decode.paged_decode_by_head(layer, rows, batch.pruned, self.kv, scaling, softcap)
            return triton_decode.paged_decode(
                layer, rows, batch.decode_tables, batch.decode_context, self.kv, scaling, window, softcap
            )
        if self._decode_path == "ragged":
            return self._ragged(layer, heads, window).attend(layer, rows, scaling, softcap)
        if batch.pruned is not None:
            return self._decode_by_head(batch.pruned, layer, rows, scaling, softcap)
        if self._decode_blocks is None:
            self._decode_blocks = self.kv.block_index(batch.decode_tables)
        keys, values = self.kv.read(layer, self._decode_blocks, n)
        # The heads of a group become query rows of their KV head: no key is copied per head.
        grouped = rows.reshape(n, self.kv.kv_heads, -1, self.kv.head_dim)
        if window not in self._decode_masks:
            ahead = torch.arange(keys.shape[2], device=keys.device)[None, :] - batch.decode_context[:, None]
            self._decode_masks[window] = _additive(ahead, window, rows.dtype)[:, None, None, :]
        out = attend(grouped, keys, values, self._decode_masks[window], scaling, softcap)
        return out.reshape(n, -1, self.kv.head_dim)

    def _natively(self, heads: int) -> NativeDecode:
        """Made once for all layers."""
        if self._native is None:
            batch = self.batch
            self._native = NativeDecode(self.kv, batch.decode_tables, batch.decode_context, heads, batch.pruned)
        return self._native

    def _ragged(self, layer: int, heads: int, window: int | None) -> RaggedDecode:
        """Made once for all layers, but for pruned sequences, whose rows lie elsewhere in each."""
        if self.batch.pruned is not None:
            if self._rows_by_head is None:
                self._rows_by_head = RowsByHead(self.batch.decodes, heads, self.kv)
            return self._rows_by_head.layer(layer)
        if window not in self._ragged_decodes:
            self._ragged_decodes[window] = RaggedDecode.of(self.batch.decodes, heads, self.kv, window)
        return self._ragged_decodes[window]

    def _decode_by_head(
        self, heads: HeadTables, layer: int, rows: torch.Tensor, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """Decodes some of which were pruned, over gathered rows; no window is shorter than their contexts."""
        n = len(rows)
        keys, values = self.kv.read(layer, heads.blocks(layer).flatten(), n)
        grouped = rows.reshape(n, self.kv.kv_heads, -1, self.kv.head_dim)
        last = heads.lengths(layer, self.kv.page_size)[..., None] - 1
        mask = _additive(torch.arange(keys.shape[2], device=keys.device) - last, None, rows.dtype)[:, :, None]
        return attend(grouped, keys, values, mask, scaling, softcap).reshape(n, -1, self.kv.head_dim)

    def _prefill(
        self,
        layer: int,
        chunk: Prefill,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        new = slice(chunk.start, chunk.stop)
        if chunk.blocks is None:
            keys, values = key[None, :, new], value[None, :, new]
        else:
            keys, values = self.kv.read(layer, chunk.blocks, 1)
            stop = chunk.context + chunk.stop - chunk.start
            keys, values = keys[:, :, :stop], values[:, :, :stop]
            if chunk.hidden is not None:
                first, last = chunk.hidden
                keys = torch.cat((keys[:, :, :first], keys[:, :, last:]), dim=2)
                values = torch.cat((values[:, :, :first], values[:, :, last:]), dim=2)
        queries, seen = chunk.stop - chunk.start, keys.shape[2]
        narrow = window is not None and seen > window
        if queries == seen and not narrow:
            return attend(query[None, :, new], keys, values, None, scaling, softcap, causal=True)
        limit = window if narrow else None
        if limit not in chunk.mask:
            chunk.mask[limit] = causal_mask(queries, seen, limit, query)
        return attend(query[None, :, new], keys, values, chunk.mask[limit], scaling, softcap)


class BranchAttention:
    """One layer on a window of preference pairs, with autograd: each pair attends to its earlier K/V and its own.

    `keys` and `values` [kv_heads, tokens, head_dim] are the window's own, kept so that gradients can enter them.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, branches: Sequence[Branches]) -> None:
        self._branches = branches

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        self.keys, self.values = key, value
        outputs = []
        for branch in self._branches:
            keys, values = key[:, branch.first : branch.last], value[:, branch.first : branch.last]
            if branch.earlier is not None:
                keys = torch.cat((branch.earlier[0], keys), dim=1)
                values = torch.cat((branch.earlier[1], values), dim=1)
            for piece in branch.pieces:
                seen_k, seen_v = keys[:, : piece.stop], values[:, : piece.stop]
                if piece.hidden is not None:
                    first, last = piece.hidden
                    seen_k = torch.cat((seen_k[:, :first], seen_k[:, last:]), dim=1)
                    seen_v = torch.cat((seen_v[:, :first], seen_v[:, last:]), dim=1)
                start = branch.first + piece.start - branch.start
                rows = query[None, :, start : start + piece.stop - piece.start]
                n, m = rows.shape[2], seen_k.shape[1]
                narrow = window is not None and m > window
                plain = n == m and not narrow
                mask = None if plain else causal_mask(n, m, window if narrow else None, query)
                out = attend(rows, seen_k[None], seen_v[None], mask, scaling, softcap, causal=plain)
                outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)
