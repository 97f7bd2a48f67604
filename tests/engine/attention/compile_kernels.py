"""Compiles the Triton kernels where the engine calls them, for a GPU that need not be there; nothing is run.

`python -m tests.engine.attention.compile_kernels 87 bfloat16 64 3` (compute capability, dtype, head size, heads of a
group) prints as JSON the shared memory of each variant that the trials at start made, and the names of variants that
iterations of other sizes made beside them.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from edged.engine.attention.base import AttentionCall
from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import IMPLEMENTATION, DecodePath, PagedAttention, attention_over, attention_pass
from edged.engine.attention.selection import Backends, selftest, selftest_of_lora
from edged.engine.kv.pruned_layout import PrunedLayout
from edged.engine.kv.store import KvStore
from edged.engine.lora import triton as triton_lora
from edged.engine.lora.linear import LoraSlots
from edged.engine.lora.segments import NO_SLOT
from edged.engine.model import gpu_layers
from edged.engine.model.gpu_layers import fuse_layers
from edged.engine.model.served_model import ServedModel
from edged.engine.model.state_steps import step_in_slots
from edged.engine.model.triton_states import TRITON
from edged.settings.load import AlignSettings
from tests.models import tiny_model

CPU = torch.device("cpu")
PAGE = 16


class AbsentGpu:
    """What Triton's compiler asks of a driver."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_only() -> dict[str, tuple[str, int]]:
    """From now on launches only compile; the result fills with hash -> (kernel, bytes of shared memory)."""
    made: dict[str, tuple[str, int]] = {}
    run = JITFunction.run

    def compiled(self: JITFunction, *arguments: Any, **options: Any) -> Any:
        kernel = run(self, *arguments, **{**options, "warmup": True})
        made[kernel.hash] = (self.__name__, kernel.metadata.shared)
        return kernel

    JITFunction.run = compiled
    return made


def iterations(kv: KvStore, group: int, paths: Backends, slots: LoraSlots) -> None:
    """Packed batches of several sizes, so that every table lies at another place of the one that is uploaded."""
    for decodes, length, window in ((1, 2, None), (3, 17, 5), (10, 32, None)):
        segments = [Segment([0], 61 * n, np.ones(40, np.int64)) for n in range(decodes)]
        if decodes > 3:
            segments[-1].compacted = PrunedLayout(3, np.full((2, 2), 3), 32)
        segments += [Segment([0] * length, 7, np.array([5, 6, 7, 8]))] * (decodes % 3)
        batch = pack(segments, kv, CPU, paths.tile_tokens)
        tokens = batch.input_ids.shape[1]
        query, key = (torch.zeros(heads, tokens, kv.head_dim, dtype=kv.keys.dtype) for heads in (2 * group, 2))
        for softcap in (None, 30.0):
            PagedAttention(batch, kv, paths.decode).attend(AttentionCall(1, 0.5, window, softcap), query, key, key)
        x = torch.zeros(tokens, 192, dtype=kv.keys.dtype)
        tiles = triton_lora.cut([(n, n + 1, n % 2) for n in range(tokens)], CPU)
        for linears in slots.groups():
            ys = [x.new_zeros(tokens, linear.out_features) for linear in linears]
            downs, ups = ([getattr(linear, side) for linear in linears] for side in ("down", "up"))
            triton_lora.add_updates(x, ys, downs, ups, tiles)


def layers(dtype: torch.dtype, head_dim: int, group: int) -> list[ServedModel]:
    """Models whose decodes pass with few launches: Llama's layers, and Gemma's, which have all norms."""
    sizes = {
        "hidden_size": 64 * group,
        "head_dim": head_dim,
        "num_key_value_heads": 2,
        "num_attention_heads": 2 * group,
    }
    models = []
    for kind in ("llama", "gemma3_text"):
        base = tiny_model(kind, num_hidden_layers=1, layer_types=None, **sizes).to(dtype).requires_grad_(False)
        base.set_attn_implementation(IMPLEMENTATION)
        models.append(ServedModel(base))
        models[-1].attach_lora(AlignSettings(), 2)
        models[-1].lora.runs.kernel = "triton"
        assert fuse_layers(models[-1], PAGE) == ""
    return models


def states(dtype: torch.dtype, head_dim: int) -> ServedModel:
    """A model whose decodes change states in their slots."""
    sizes = {"linear_key_head_dim": head_dim, "linear_value_head_dim": head_dim}
    base = tiny_model("qwen3_5_text", **sizes).to(dtype).requires_grad_(False)
    base.set_attn_implementation(IMPLEMENTATION)
    model = ServedModel(base)
    assert "wrong numbers" in step_in_slots(model, TRITON)
    for mixer in model.mixers:
        mixer.steps = TRITON
    return model


def decodes(model: ServedModel, count: int, slot: int, path: DecodePath = "triton") -> None:
    """A forward of decodes, as an iteration launches it."""
    kv = model.new_kv(3, PAGE, count)
    texts = [Segment([0], 3, np.array([1]), slot, position=3, states=(at, at)) for at in range(1, count + 1)]
    batch = pack(texts, kv, CPU, lora=slot != NO_SLOT)
    with (
        torch.inference_mode(),
        attention_pass(attention_over(batch, kv, path)),
        model.lora.packed(batch.runs, batch.lora_tiles),
    ):
        model.forward(batch.input_ids, batch.position_ids, batch.logit_rows)


def main(capability: int, dtype: torch.dtype, head_dim: int, group: int) -> None:
    from edged.engine.attention import triton

    driver.set_active(AbsentGpu(capability))
    made = compile_only()
    kv = KvStore(9, PAGE, 2, 2, head_dim, dtype, CPU)
    paths = Backends("triton", triton.tile_tokens(kv, group))
    sizes = {"q_proj": 192, "k_proj": 64, "v_proj": 64, "o_proj": 192, "gate_proj": 480, "up_proj": 480}
    model = nn.ModuleDict({name: nn.Linear(192, size, dtype=dtype) for name, size in sizes.items()})
    slots = LoraSlots(model, list(sizes), 2, 16, dtype)
    for sinks in (False, True):
        selftest(kv, group, paths, sinks)
    selftest_of_lora(slots, "triton")
    # Nothing runs, so that no numbers agree.
    same = gpu_layers._same
    gpu_layers._same = lambda *given: same(*given) or True
    models = layers(dtype, head_dim, group)
    stateful = states(dtype, head_dim)
    at_start = dict(made)
    iterations(kv, group, paths, slots)
    for model in models:
        for count in (1, 5, 16):
            for slot in (NO_SLOT, 1):
                decodes(model, count, slot)
    for count in (1, 3, 4, 16):
        decodes(stateful, count, NO_SLOT, "padded")
    later = [name for hashed, (name, _) in made.items() if hashed not in at_start]
    print(json.dumps({"shared_bytes": list(at_start.values()), "compiled_later": later}))


if __name__ == "__main__":
    main(int(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
