"""Attention over the paged cache, registered with transformers so that unmodified models use it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import compress, pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from edged.align.dpo.decoder import Branches, Masks
from edged.engine.attention.base import AttentionBackend, AttentionCall
from edged.engine.attention.cpu import NativeDecode
from edged.engine.attention.cpu_sparse import RowsByHead, ragged_decode
from edged.engine.attention.packed_batch import PackedBatch, Prefill
from edged.engine.kv.store import KvStore, PagedKv

IMPLEMENTATION = "edged_paged"
DecodePath = Literal["padded", "ragged", "native", "triton"]
_UNSUPPORTED = ("sinks", "position_bias", "head_mask", "cu_seq_lens_q")


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
    """Return the backend that answers this thread's attention calls at present."""
    current: AttentionBackend = _current.value
    return current


def pass_under_way() -> AttentionBackend | None:
    """Return the backend that answers this thread's attention calls; None while the model's own attention does."""
    return getattr(_current, "value", None)


class CannotPage(ValueError):
    """A model asks its attention for what K/V in pages do not answer."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for `attn_implementation="edged_paged"`; shapes are transformers' own, with batch size 1.

    Raises CannotPage where a model asks its attention for something that the paged cache does not do.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise CannotPage(f'the model passes "{name}" to its attention, which the paged cache cannot honour')
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise CannotPage("the model's attention is not plainly causal (it passes a mask)")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(module.layer_idx, scale, sliding_window, softcap, s_aux)  # type: ignore[arg-type]
    size = value.shape[-1]
    if size < key.shape[-1]:
        # Keys and values share a store, and kernels: shorter values have zeros behind them, and so have the answers.
        value = F.pad(value, (0, key.shape[-1] - size))
    # Not [0], whose gradient is a copy.
    out = current_pass().attend(call, query.squeeze(0), key.squeeze(0), value.squeeze(0)).unsqueeze(0)
    return out[..., :size] if size < out.shape[-1] else out, None


AttentionInterface.register(IMPLEMENTATION, paged_attention)


def attend(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Grouped-query attention: [n, heads, q, d] over [n, kv_heads, k, d] -> [n, heads, q, d]; no window but the mask's.

    `mask` is added to the scores: 0 where a key is seen, -inf elsewhere, broadcastable to [n, heads, q, k]. (A boolean
    one would be turned into this in every layer.)
    """
    groups = query.shape[1] // key.shape[1]
    # On CUDA torch has no fused kernel for both a mask and grouped queries.
    if groups > 1 and (call.softcap is not None or (mask is not None and query.is_cuda)):
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    # Heads of a group may be the query rows of their KV head.
    sinks = None if call.sinks is None else call.sinks.to(query.dtype).view(1, query.shape[1], -1, 1)
    if call.softcap is None:
        grouped, size = query.shape[1] != key.shape[1], value.shape[-1]
        if sinks is not None:
            query, key, value, mask = _with_sink_key(sinks / call.scaling, query, key, value, mask)
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=call.scaling, enable_gqa=grouped)
        return out if sinks is None else out[..., :size]
    scores = query @ key.transpose(-1, -2) * call.scaling
    scores = call.softcap * torch.tanh(scores / call.softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    return scores.softmax(dim=-1, dtype=torch.float32)[..., : key.shape[2]].to(query.dtype) @ value


def _with_sink_key(
    sinks: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return queries, keys, values and a mask with one more key, whose product with each query is its head's `sinks`.

    Heads have eight numbers more, as torch's fused kernels want: the first is the sink at queries, 1 at the further key
    and 0 at all others, so that no mask is as large as all heads' scores.
    """
    # A sink of -inf, which no softmax sees, would be NaN times 0.
    sinks = sinks.clamp(min=torch.finfo(sinks.dtype).min / 2).expand(*query.shape[:-1], 1)
    last = F.pad(key.new_ones(*key.shape[:2], 1, 1), (key.shape[3], 7))
    query = torch.cat((query, F.pad(sinks, (0, 7))), dim=-1)
    key = torch.cat((F.pad(key, (0, 8)), last), dim=2)
    return query, key, F.pad(value, (0, 8, 0, 1)), None if mask is None else F.pad(mask, (0, 1))


def attend_to_last(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, masks: Masks
) -> torch.Tensor:
    """Attend causally, where the last query's own key is the last key; `masks` keeps those that were made."""
    queries, keys = query.shape[2], key.shape[2]
    window = call.window if call.window is not None and keys > call.window else None
    if queries == keys and window is None and call.softcap is None and call.sinks is None:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=call.scaling, enable_gqa=grouped)
    kind = queries, keys, window
    if kind not in masks:
        own = torch.arange(keys - queries, keys, device=query.device)
        masks[kind] = causal_mask(keys, own, window, query.dtype)
    return attend(call, query, key, value, masks[kind])


def causal_mask(keys: int, own: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask [..., keys] of queries whose own keys are at `own` [...]: 0 where a key is at or before the
    query's own and within the window; -inf elsewhere."""
    ahead = torch.arange(keys, device=own.device) - own[..., None]
    hidden = ahead > 0
    if window is not None:
        hidden |= ahead <= -window
    return torch.zeros(ahead.shape, dtype=dtype, device=ahead.device).masked_fill_(hidden, float("-inf"))


def _without(hidden: tuple[int, int] | None, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return keys and values [..., rows, d] without the rows `hidden`."""
    if hidden is None:
        return parts
    return tuple(torch.cat((part[..., : hidden[0], :], part[..., hidden[1] :, :]), dim=-2) for part in parts)


def attention_over(batch: PackedBatch, kv: PagedKv, decode_path: DecodePath = "padded") -> PagedBackend:
    """Return the backend of a packed forward over K/V of any model."""
    if isinstance(kv, KvStore) and kv.places is None:
        return PagedAttention(batch, kv, decode_path)
    return AttentionByLayer(batch, kv, decode_path)


class AttentionByLayer:
    """The backend where a layer's place in its store is not its number: shapes differ, or some layers do not attend.

    Each attends in its own store, over the same packed batch.
    """

    def __init__(self, batch: PackedBatch, kv: PagedKv, decode_path: DecodePath) -> None:
        self.batch, self.kv = batch, kv
        self.parts: Any = None
        self._attention = {id(store): PagedAttention(batch, store, decode_path) for store in kv.stores}

    def attend(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        store, layer = self.kv.store_of_layer(call.layer)
        return self._attention[id(store)].attend(call._replace(layer=layer), query, key, value)


class PagedAttention:
    """The backend of a packed forward over the pages of one store: it writes the new K/V, then each segment attends to
    its own context.

    Decodes are computed together: "native", "ragged" and "triton" read each context's pages in place, "padded" gathers
    them, padded to the longest. Longer segments are computed together, over pages in place, if the batch was packed in
    tiles; else one by one over gathered pages.
    """

    def __init__(self, batch: PackedBatch, kv: KvStore, decode_path: DecodePath = "padded") -> None:
        self.batch, self.kv = batch, kv
        self._decode_path = decode_path
        self.parts: Any = None
        """The batch as `edged.engine.model.mixers` cuts it, once a layer with a state has asked."""
        self._write_rows = kv.row_index(batch.pages, batch.offsets)
        # The first layer that needs one of these makes it, and all layers use it.
        self._native = cache(partial(NativeDecode, kv, batch.decode_tables, batch.decode_context, batch.pruned))
        self._ragged = cache(partial(ragged_decode, batch.decodes, kv))
        self._rows_by_head = cache(partial(RowsByHead, batch.decodes, kv))
        longest = batch.decode_tables.shape[1] * kv.page_size
        self._decode_mask = cache(partial(causal_mask, longest, batch.decode_context))
        self._decode_blocks = cache(partial(kv.block_index, batch.decode_tables))
        self._prefills = [
            (each, None if each.pages is None else kv.block_index(each.pages[None])) for each in batch.prefills
        ]

    def attend(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        batch = self.batch
        alone = batch.tiles is None and not batch.prefills
        if alone and self._decode_path == "native":
            # These kernels store the new keys and values themselves.
            return self.decode(call, query.transpose(0, 1), (key, value))
        self.kv.write(call.layer, self._write_rows, key.transpose(0, 1), value.transpose(0, 1))
        heads, num_tokens, _ = query.shape
        if alone:
            # A batch of decodes alone is in the order of the batch's rows.
            return self.decode(call, query.transpose(0, 1))
        out = query.new_empty(num_tokens, heads, value.shape[-1])
        if len(batch.decode_rows):
            rows = query.index_select(1, batch.decode_rows).transpose(0, 1)
            out.index_copy_(0, batch.decode_rows, self.decode(call, rows))
        if batch.tiles is not None:
            from edged.engine.attention import triton

            triton.paged_prefill(call, query, batch.tiles, self.kv, out)
        for chunk, blocks in self._prefills:
            out[chunk.segment.rows] = self._prefill(call, chunk, blocks, query, key, value)[0].transpose(0, 1)
        return out

    @property
    def decodes_in_place(self) -> bool:
        """Whether a layer may store keys and values itself and then `decode`: the batch has decodes alone, and Triton's
        kernels read their pages."""
        return self._decode_path == "triton" and self.batch.tiles is None and not self.batch.prefills

    def decode(
        self, call: AttentionCall, rows: torch.Tensor, new: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Attend with the decodes, whose K/V are stored, and update their statistics: `rows` [n, heads, d] -> the same.

        "native" stores the `new` keys and values.
        """
        batch, heads = self.batch, rows.shape[1]
        if self._decode_path == "native":
            out = self._native(heads).attend(call, rows.transpose(0, 1), new)
        elif self._decode_path == "triton":
            from edged.engine.attention import triton

            out = triton.paged_decode(call, rows, batch.decode_tables, batch.decode_context, self.kv, batch.pruned)
        elif self._decode_path == "ragged":
            # Rows of pruned sequences lie elsewhere in each layer.
            pruned = batch.pruned is not None
            sparse = self._rows_by_head(heads).layer(call.layer) if pruned else self._ragged(heads, call.window)
            out = sparse.attend(call, rows)
        else:
            out = self._padded(call, rows)
        self._show(call, rows, out)
        return out

    def _show(self, call: AttentionCall, rows: torch.Tensor, out: torch.Tensor) -> None:
        heads, layer = self.batch.decode_heads, call.layer
        if heads is None or all(segment.watch is None for segment in self.batch.decodes):
            return
        blocks, lengths = heads.blocks(layer), heads.lengths(layer, self.kv.page_size)
        for index, segment in enumerate(self.batch.decodes):
            if segment.watch is not None:
                keys = self.kv.read_keys(layer, blocks[index, :, : heads.max_blocks[layer, index]])
                segment.watch.see(call, rows[index], out[index], keys, lengths[index])

    def _padded(self, call: AttentionCall, rows: torch.Tensor) -> torch.Tensor:
        """Attend over gathered rows, padded to the longest; no window is shorter than a pruned sequence's context."""
        n, pruned, kv = len(rows), self.batch.pruned, self.kv
        if pruned is not None:
            keys, values = kv.read(call.layer, pruned.blocks(call.layer).flatten(), n)
            mask = causal_mask(keys.shape[2], pruned.lengths(call.layer, kv.page_size) - 1, None, rows.dtype)[
                :, :, None
            ]
        else:
            keys, values = kv.read(call.layer, self._decode_blocks(), n)
            mask = self._decode_mask(call.window, rows.dtype)[:, None, None]
        # The heads of a group become query rows of their KV head: no key is copied per head.
        grouped = rows.reshape(n, kv.kv_heads, -1, kv.head_dim)
        return attend(call, grouped, keys, values, mask).reshape(n, -1, kv.head_dim)

    def _prefill(
        self,
        call: AttentionCall,
        chunk: Prefill,
        blocks: torch.Tensor | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        segment, new = chunk.segment, chunk.segment.rows
        keys, values = key[None, :, new], value[None, :, new]
        if blocks is not None:
            stop = segment.context + len(segment.token_ids)
            read = self.kv.read(call.layer, blocks, 1)
            keys, values = _without(segment.hidden, *(part[:, :, :stop] for part in read))
        return attend_to_last(call, query[None, :, new], keys, values, chunk.masks)


PagedBackend = PagedAttention | AttentionByLayer
"""The backend of a packed forward."""


class BranchAttention:
    """The backend of one layer on a window of preference pairs, with autograd: a pair sees its earlier K/V and its own.

    `keys` and `values` [kv_heads, tokens, head_dim] are the window's own, kept so that gradients can enter them.
    """

    def __init__(self, branches: Sequence[Branches]) -> None:
        self.branches = branches
        # A layer without attention has none.
        self.keys = self.values = torch.empty(0)

    def attend(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        self.keys, self.values = key, value
        # All is cut by splits: each slice would have a gradient as large as the whole.
        rows = iter(query.split([piece.stop - piece.start for own in self.branches for piece in own.pieces], dim=1))
        sizes = [branch.last - branch.first for branch in self.branches]
        outputs = []
        for branch, *own in zip(self.branches, key.split(sizes, dim=1), value.split(sizes, dim=1), strict=True):
            runs, earlier = _runs(branch), branch.earlier or (None, None)
            keys, values = (_cut(part, before, branch.start, runs) for part, before in zip(own, earlier, strict=True))
            for piece in branch.pieces:
                low, high = piece.hidden or (0, 0)
                seen = [stop <= piece.stop and not low <= start < high for start, stop in runs]
                k, v = (torch.cat(list(compress(parts, seen)), dim=1).unsqueeze(0) for parts in (keys, values))
                out = attend_to_last(call, next(rows).unsqueeze(0), k, v, branch.masks)
                outputs.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(outputs)


def _runs(branch: Branches) -> list[tuple[int, int]]:
    """Return the runs [start, stop) of a branch's flat rows that each piece sees whole or not at all."""
    ends = {0, branch.start, branch.start + branch.last - branch.first}
    for piece in branch.pieces:
        ends |= {piece.stop, *(piece.hidden or ())}
    return list(pairwise(sorted(ends)))


def _cut(
    own: torch.Tensor, earlier: torch.Tensor | None, first: int, runs: list[tuple[int, int]]
) -> list[torch.Tensor]:
    """Return the rows of each run, of a branch's `own` from row `first` on and of the `earlier` ones."""
    before = [stop - start for start, stop in runs if stop <= first]
    after = [stop - start for start, stop in runs[len(before) :]]
    return [*(() if earlier is None else earlier.split(before, dim=1)), *own.split(after, dim=1)]
