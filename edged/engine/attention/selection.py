"""Selection of the attention and LoRA implementations, once, at start: the configured ones if they work here."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap

import numpy as np
import torch

from edged.engine.attention import cpu, cpu_sparse
from edged.engine.attention.base import AttentionCall
from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import DecodePath, PagedAttention
from edged.engine.kv.pruned_layout import PrunedLayout
from edged.engine.kv.store import KvStore
from edged.engine.lora.linear import LoraSlots
from edged.engine.lora.runs import Run
from edged.engine.lora.segments import LoraKernel, NativeUpdates, slots_of_rows, why_no_updates
from edged.runtime import logs
from edged.settings.kernels import Kernels

log = logging.getLogger("edged.engine")
_TOLERANCE = 0.05
"""Largest difference of results of size 1; bfloat16's unit is 1/128, so that this tells wrong from coarse."""


@dataclass(frozen=True, slots=True)
class Backends:
    """The selected attention implementations: `decode` for single tokens; for longer segments a Triton kernel over
    tiles of `tile_tokens` (see `pack`) that reads pages in place, or, with 0, torch one by one over gathered pages."""

    decode: DecodePath = "padded"
    tile_tokens: int = 0
    why_not: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Reasons, by "decode" or "prefill", for not using the configured or the fastest implementation."""


def pick_paths(shapes: Sequence[tuple[KvStore, int]], kernels: Kernels, sinks: bool = False) -> Backends:
    """Pick `decode_attention` and `prefill_attention` as set, or for "auto" the fastest; torch's if that cannot work.

    `shapes` are the stores of all layers, each with the number of query heads of a KV head; `sinks` tells whether any
    layer has sinks.
    """
    cuda = shapes[0][0].keys.device.type == "cuda"
    fastest: tuple[DecodePath, ...] = ("triton",) if cuda else ("native", "ragged")
    wanted = fastest if kernels.decode_attention == "auto" else (kernels.decode_attention,)
    why_not: dict[str, str] = {}
    for decode in (*wanted, "padded"):
        if not (reason := _first_reason(shapes, partial(_why_not_decode, path=decode, sinks=sinks))):
            break
        why_not.setdefault("decode", reason)
    if why_not:
        instead = "gathers pages" if decode == "padded" else "uses torch's sparse products"
        log.info("decode attention %s (%s is not used: %s)", instead, wanted[0], why_not["decode"])
    tile_tokens = 0
    if kernels.prefill_attention == "triton" or (kernels.prefill_attention == "auto" and cuda):
        from edged.engine.attention import triton  # slow to import, and not everywhere

        reason = _first_reason(shapes, lambda kv, _group: triton.why_not(kv))
        tile_tokens = 0 if reason else max(starmap(triton.tile_tokens, shapes))
        trial = partial(selftest, paths=Backends("padded", tile_tokens), sinks=sinks)
        if reason := reason or _first_reason(shapes, trial):
            log.info("prefill attention gathers pages (triton is not used: %s)", reason)
            tile_tokens, why_not["prefill"] = 0, reason
    return Backends(decode, tile_tokens, why_not)


def _first_reason(shapes: Sequence[tuple[KvStore, int]], why_not: Callable[[KvStore, int], str]) -> str:
    return next(filter(None, starmap(why_not, shapes)), "")


def _why_not_decode(kv: KvStore, group: int, path: DecodePath, sinks: bool) -> str:
    if path == "triton":
        from edged.engine.attention import triton

        return triton.why_not(kv) or selftest(kv, group, Backends(path), sinks)
    if path == "native":
        return cpu.why_not(kv) or selftest(kv, group, Backends(path), sinks)
    return cpu_sparse.why_not(kv) if path == "ragged" else ""


def selftest(kv: KvStore, group: int, paths: Backends, sinks: bool = False) -> str:
    """Compile the kernels of `paths` and compare them with torch's; return what went wrong, or ""."""
    size, device, dtype, scale = kv.page_size, kv.keys.device, kv.keys.dtype, kv.head_dim**-0.5
    # A single token, one of the kind that leaves rows out, one of a pruned sequence, with pages of their own to write.
    segments = [
        Segment([0], size, np.array([1, 2])),
        Segment([0] * (size + 1), size, np.array([3, 5, 4]), hidden=(0, size - 1)),
    ]
    counts = np.full((1, kv.kv_heads), 2)
    counts[0, :2] += (1, -1) if kv.kv_heads > 1 else (0,)
    pruned = [Segment([0], 2 * size, np.array([4, 2, 0]), compacted=PrunedLayout(2, counts, size))]

    # One for both: on an integrated GPU its memory is mapped for good.
    small = KvStore(6, size, 1, kv.kv_heads, kv.head_dim, dtype, device)

    def attended(paths: Backends) -> torch.Tensor:
        """Return the attention outputs and the K/V afterwards, flattened."""
        random = _random(device, dtype)
        small.keys.copy_(random(*small.keys.shape))
        small.values.copy_(random(*small.values.shape))
        new = [random(heads, size + 2, kv.head_dim) for heads in (kv.kv_heads * group, kv.kv_heads, kv.kv_heads)]
        passed = []
        for batch in (segments, pruned):
            attention = PagedAttention(pack(batch, small, device, paths.tile_tokens), small, paths.decode)
            num_tokens = sum(len(segment.token_ids) for segment in batch)
            query, key, value = (part[:, :num_tokens] for part in new)
            own = query[:, 0, 0].contiguous() if sinks else None
            calls = (AttentionCall(0, scale, sinks=own), AttentionCall(0, scale, size, 9.0, own))
            passed += [attention.attend(call, query, key, value) for call in calls]
        return torch.cat([part.flatten() for part in (*passed, small.keys, small.values)])

    return _compared(lambda: attended(paths), lambda: attended(Backends()))


def pick_lora_kernel(lora: LoraSlots, kernels: Kernels) -> str:
    """Let `lora` use `lora_kernel` as set, or for "auto" the fastest; torch's products if that cannot be used.

    Returns why it cannot, or "".
    """
    wanted = kernels.lora_kernel
    if wanted == "auto":
        wanted = "triton" if lora.device.type == "cuda" else "native"
    if wanted == "torch":
        return ""
    if reason := why_no_updates(wanted, lora.device, lora.dtype, lora.rank) or selftest_of_lora(lora, wanted):
        log.info("LoRA updates are multiplied by torch (%s is not used: %s)", wanted, reason)
    else:
        lora.runs.kernel = wanted
    return reason


def selftest_of_lora(lora: LoraSlots, kernel: LoraKernel) -> str:
    """Compare the kernels with torch's products on every shape of linears; return what went wrong, or ""."""
    random = _random(lora.device, lora.dtype)
    batches: tuple[list[Run], ...] = ([(1, 2, 1)], [(0, 3, 1), (3, 70, 0)])
    groups = {(group[0].in_features, *(linear.out_features for linear in group)) for group in lora.groups()}
    for size_in, *sizes_out in sorted(groups):
        for runs in batches:
            rows = runs[-1][1]
            x, ys = random(rows, size_in), [random(rows, size) for size in sizes_out]
            downs = [random(2, size_in, lora.rank) / size_in**0.5 for _ in ys]
            ups = [random(2, lora.rank, size) / lora.rank**0.5 for size in sizes_out]
            kernels_own, torchs = (partial(_updated, which, x, ys, downs, ups, runs) for which in (kernel, "torch"))
            if reason := _compared(kernels_own, torchs):
                return reason
    return ""


def _updated(
    kernel: LoraKernel,
    x: torch.Tensor,
    ys: Sequence[torch.Tensor],
    downs: Sequence[torch.Tensor],
    ups: Sequence[torch.Tensor],
    runs: list[Run],
) -> torch.Tensor:
    """Return `ys` plus the updates of their rows, flat."""
    outs = [y.clone() for y in ys]
    if kernel == "triton":
        from edged.engine.lora import triton as triton_lora

        triton_lora.add_updates(x, outs, downs, ups, triton_lora.cut(runs, x.device))
    for out, down, up in zip(outs, downs, ups, strict=True):
        if kernel == "native":
            NativeUpdates(down, up).add(x, out, slots_of_rows(runs, len(x)))
        elif kernel == "torch":
            for start, stop, slot in runs:
                out[start:stop].addmm_(x[start:stop] @ down[slot], up[slot])
    return torch.cat([out.flatten() for out in outs])


def _random(device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return a maker of normal random tensors, the same at every start; torch's global generator is not used."""
    generator = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator, device=device).to(dtype)


@torch.inference_mode()
def _compared(kernel: Callable[[], torch.Tensor], torchs_own: Callable[[], torch.Tensor]) -> str:
    """Compare a kernel's result, of size about 1, with torch's; return what is wrong, or ""."""
    try:
        difference = float((kernel().float() - torchs_own().float()).abs().max())
    except Exception as error:
        return f"its kernels do not run here: {logs.first_line(error)}"
    # Not "above": a NaN is above nothing.
    return "" if difference <= _TOLERANCE else "its kernels give wrong numbers here"
