"""Which implementations of attention and LoRA an engine uses: what is asked for and can be, picked once, at start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from edged.engine.attention import cpu as native
from edged.engine.attention import cpu_sparse
from edged.engine.attention.base import AttentionCall
from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import DecodePath, PagedAttention
from edged.engine.kv.pruned_layout import PrunedLayout
from edged.engine.kv.store import KvStore
from edged.engine.lora.cpu import NativeUpdates, why_no_native_updates
from edged.engine.lora.linear import LoraSlots
from edged.engine.lora.segments import Run, slots_of_rows
from edged.runtime import logs
from edged.settings.load import ModelSettings

log = logging.getLogger("edged.engine")
_LoraKernel = Literal["native", "triton"]
_TOLERANCE = 0.05
"""Of results of size 1 in bfloat16, whose unit is 1/128: enough to tell a wrong kernel from a coarse one."""


@dataclass(frozen=True, slots=True)
class Backends:
    """How the segments of a packed batch attend: single tokens on `decode`; longer segments in tiles of `tile_tokens`
    (see `pack`) by a Triton kernel that reads pages where they lie, or, with 0, one by one over gathered pages."""

    decode: DecodePath = "padded"
    tile_tokens: int = 0
    why_not: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Why "decode" or "prefill" is not what was asked for, or what is fastest."""


def pick_paths(kv: KvStore, settings: ModelSettings, group: int) -> Backends:
    """`decode_attention` and `prefill_attention` as set, or for "auto" the fastest; torch's where that cannot be.

    `group` is the number of query heads of a KV head.
    """
    cuda = kv.keys.device.type == "cuda"
    prefill = settings.prefill_attention
    decode, reason = _pick_decode(kv, settings, group)
    why_not = {"decode": reason} if reason else {}
    if prefill == "gathered" or (prefill == "auto" and not cuda):
        return Backends(decode, why_not=why_not)
    from edged.engine.attention import triton_prefill  # triton is slow to import, and not everywhere

    reason = triton_prefill.why_not(kv)
    tile_tokens = 0 if reason else triton_prefill.tile_tokens(kv, group)
    if reason := reason or trial(kv, group, Backends("padded", tile_tokens)):
        log.info("prefill attention gathers pages (triton is not used: %s)", reason)
        return Backends(decode, why_not={**why_not, "prefill": reason})
    return Backends(decode, tile_tokens, why_not)


def _pick_decode(kv: KvStore, settings: ModelSettings, group: int) -> tuple[DecodePath, str]:
    """How decodes attend, and why not as asked for or as is fastest."""
    fastest: tuple[DecodePath, ...] = ("triton",) if kv.keys.device.type == "cuda" else ("native", "ragged")
    wanted = fastest if settings.decode_attention == "auto" else (settings.decode_attention,)
    reasons: list[str] = []
    for path in (*wanted, "padded"):
        reason = _why_not_decode(kv, path, group)
        if not reason:
            break
        reasons.append(reason)
    if reasons:
        instead = "gathers pages" if path == "padded" else "uses torch's sparse products"
        log.info("decode attention %s (%s is not used: %s)", instead, wanted[0], reasons[0])
    return path, reasons[0] if reasons else ""


def _why_not_decode(kv: KvStore, path: DecodePath, group: int) -> str:
    if path == "triton":
        from edged.engine.attention import triton_decode

        return triton_decode.why_not(kv) or trial(kv, group, Backends(path))
    if path == "native":
        return native.why_not(kv) or trial(kv, group, Backends(path))
    return cpu_sparse.why_not(kv) if path == "ragged" else ""


def trial(kv: KvStore, group: int, paths: Backends) -> str:
    """Compile the kernels of `paths` and compare them with torch's; what went wrong, or ""."""
    size, device = kv.page_size, kv.keys.device
    small = KvStore(6, size, 1, kv.kv_heads, kv.head_dim, kv.keys.dtype, device)
    random = _Random(device, kv.keys.dtype)
    small.keys.copy_(random(*small.keys.shape))
    small.values.copy_(random(*small.values.shape))
    # A single token, one of the kind that leaves rows out, one of a pruned sequence, with pages of their own to write.
    segments = [
        Segment([0], size, np.array([1, 2])),
        Segment([0] * (size + 1), size, np.array([3, 5, 4]), hidden=(0, size - 1)),
    ]
    counts = np.full((1, kv.kv_heads), 2)
    counts[0, :2] += (1, -1) if kv.kv_heads > 1 else (0,)
    pruned = [Segment([0], 2 * size, np.array([4, 2, 0]), compacted=PrunedLayout(2, counts, size))]
    query, key, value = (random(heads, size + 2, kv.head_dim) for heads in (kv.kv_heads * group, *(kv.kv_heads,) * 2))

    stored = small.keys.clone(), small.values.clone()

    def attended(paths: Backends) -> torch.Tensor:
        """What is attended, and what K/V hold afterwards."""
        small.keys.copy_(stored[0])
        small.values.copy_(stored[1])
        passed = []
        for batch in (segments, pruned):
            attention = PagedAttention(pack(batch, small, device, paths.tile_tokens), small, paths.decode)
            tokens = sum(len(segment.tokens) for segment in batch)
            new = (query[:, :tokens], key[:, :tokens], value[:, :tokens])
            calls = (AttentionCall(0, kv.head_dim**-0.5), AttentionCall(0, kv.head_dim**-0.5, size, 9.0))
            passed += [attention.attend(call, *new) for call in calls]
        return torch.cat([part.flatten() for part in (*passed, small.keys, small.values)])

    return _compared(lambda: attended(paths), lambda: attended(Backends()))


def pick_lora_kernel(lora: LoraSlots, settings: ModelSettings) -> str:
    """Let `lora` use `lora_kernel` as set, or for "auto" the fastest; torch's products where that cannot be.

    Returns why it cannot, or "".
    """
    wanted = settings.lora_kernel
    if wanted == "auto":
        wanted = "triton" if lora.device.type == "cuda" else "native"
    if wanted == "torch":
        return ""
    if reason := _why_not_lora(wanted, lora) or trial_of_lora(lora, wanted):
        log.info("LoRA updates are multiplied by torch (%s is not used: %s)", wanted, reason)
    else:
        lora.runs.kernel = wanted
    return reason


def _why_not_lora(kernel: _LoraKernel, lora: LoraSlots) -> str:
    if kernel == "native":
        return why_no_native_updates(lora.device, lora.dtype, lora.rank)
    from edged.engine.lora import triton as triton_lora

    return triton_lora.why_not(lora.device, lora.dtype, lora.rank)


def trial_of_lora(lora: LoraSlots, kernel: _LoraKernel) -> str:
    """Try the kernels on every shape of linear and compare them with torch's products; what went wrong, or ""."""
    random = _Random(lora.device, lora.dtype)
    shapes = sorted({(linear.in_features, linear.out_features) for linear in lora.linears.values()})
    batches: tuple[list[Run], ...] = ([(1, 2, 1)], [(0, 3, 1), (3, 70, 0)])
    reasons = (_wrong_updates(kernel, random, *shape, lora.rank, runs) for shape in shapes for runs in batches)
    return next(filter(None, reasons), "")


def _wrong_updates(
    kernel: _LoraKernel, random: _Random, size_in: int, size_out: int, rank: int, runs: list[Run]
) -> str:
    rows, slots = runs[-1][1], max(slot for _, _, slot in runs) + 1
    x, y = random(rows, size_in), random(rows, size_out)
    down, up = random(slots, size_in, rank) / size_in**0.5, random(slots, rank, size_out) / rank**0.5

    def by_kernel() -> torch.Tensor:
        out = y.clone()
        if kernel == "native":
            NativeUpdates(down, up).add(x, out, slots_of_rows(runs, rows))
        else:
            from edged.engine.lora import triton as triton_lora

            triton_lora.add_updates(x, out, down, up, triton_lora.cut(runs, y.device))
        return out

    def by_torch() -> torch.Tensor:
        out = y.clone()
        for start, stop, slot in runs:
            out[start:stop].addmm_(x[start:stop] @ down[slot], up[slot])
        return out

    return _compared(by_kernel, by_torch)


class _Random:
    """Tensors of normal numbers, the same at every start; torch's own generator is left alone."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._generator, self._device, self._dtype = torch.Generator(device).manual_seed(0), device, dtype

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, device=self._device).to(self._dtype)


@torch.inference_mode()
def _compared(kernel: Callable[[], torch.Tensor], torchs_own: Callable[[], torch.Tensor]) -> str:
    """What is wrong with a kernel's result of size 1, or ""."""
    try:
        difference = float((kernel().float() - torchs_own().float()).abs().max())
    except Exception as error:
        return f"its kernels do not run here: {logs.first_line(error)}"
    # Not "above": a NaN is above nothing.
    return "" if difference <= _TOLERANCE else "its kernels give wrong numbers here"
