"""The served model: an unmodified transformers decoder, checked at start, with the handles that the engine needs."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import IMPLEMENTATION, attention_over, attention_pass
from edged.engine.kv.state import ZEROS, StateStore, slots_for
from edged.engine.kv.store import PagedKv, store_of
from edged.engine.lora.linear import LoraSlots
from edged.engine.model.inspection import Inspection, find_decoder, fix_frequencies, inspect_model, max_positions
from edged.engine.model.loading import load_pretrained, target_linears
from edged.engine.model.memory_model import BaseShape, expert_sizes, layer_input_size, linear_sizes
from edged.engine.model.mixers import wrap_mixers
from edged.engine.model.packed_linear import BOTH_COPIES, pack_linears, why_not_packed
from edged.engine.model.quantization import (
    give_gradients,
    is_linear,
    is_quantized,
    stored_tensors,
    weight_bytes,
    weight_count,
)
from edged.settings.load import AlignSettings, ModelSettings

log = logging.getLogger("edged.engine")
_REFUSED_BY_PEFT = dict.fromkeys(("falcon_h1", "nemotron_h", "mamba2"), "out_proj")
"""Linears that PEFT loads no adapter of, by model type: Mamba's kernels read their weights themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(BaseShape):
    """The sizes of a loaded model that the cache, the cost model and the status need."""

    architecture: str
    weight_bytes: int
    """Bytes of all weights as they are stored."""
    window: int | None
    """The shortest sliding window of a layer; None if all layers see the whole context."""
    layer_weights: int
    """Number of weights in decoder layers."""

    @property
    def adapted_share(self) -> float:
        """Share of the layers' weights that lie in linears with LoRA; fused experts do not."""
        return sum(map(prod, self.targets)) / self.layer_weights


class ServedModel:
    """A decoder in eval mode whose attention is `edged.engine.attention.paged` and whose linears hold LoRA slots."""

    shape: ModelShape

    def __init__(self, model: PreTrainedModel, wrapper: str = "") -> None:
        """`wrapper` is the model's name in the wrapper that its checkpoint is of, with a dot behind; "" if in none."""
        self.wrapper = wrapper
        self.model, self.device, self.dtype = model, model.device, model.dtype
        self.body = model.base_model
        self.config = model.config.get_text_config()
        fix_frequencies(model)
        self.layers, self.norm, states = find_decoder(model)
        self.states = tuple(states.values())
        """Sizes of the states that the model's layers keep, by mixer."""
        self.mixers = wrap_mixers(list(states))
        self.softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        # Cohere multiplies its logits, Granite divides them.
        self.logit_scale = getattr(self.config, "logit_scale", None) or 1.0 / (
            getattr(self.config, "logits_scaling", None) or 1.0
        )
        self.quantized = any(is_linear(module) and is_quantized(module) for module in model.modules())
        found = inspect_model(self)
        self.shape, self._tuple_items = self._shape_of(found), found.tuple_items
        self.trainable_error, self.has_sinks = found.untrainable, found.sinks
        refused = _REFUSED_BY_PEFT.get(self.config.model_type)
        self.adaptable = frozenset(name for name in found.adaptable if name.rpartition(".")[2] != refused)
        """Names of the linears that LoRA can wrap, and PEFT load."""
        self.fingerprint = fingerprint(model)
        """Identifier of the base weights: adapters and scores of other base weights do not fit these."""
        self.lora = LoraSlots(model, [], 0, 0, self.dtype)
        """The LoRA slots; of no linears until `attach_lora`."""

    @classmethod
    def load(cls, directory: str | Path, settings: ModelSettings) -> ServedModel:
        """Load what `save_pretrained` wrote. Raises ModelRefused with the reason."""
        return cls(*load_pretrained(str(directory), settings, IMPLEMENTATION))

    def attach_lora(self, align: AlignSettings, slots: int) -> None:
        """Wrap the `targets`, and no others. Raises ModelRefused if there are no linears of these names."""
        self.lora.unwrap()
        targets = self.targets(align)
        self.shape = replace(self.shape, targets=linear_sizes(self.model, targets))
        self.lora = LoraSlots(self.model, targets, slots, align.rank, self.dtype)
        for mixer in self.mixers:
            mixer.lora = self.lora
        give_gradients(self.model)
        if not targets:
            self.trainable_error = f"{self.shape.architecture} has no linear layers for LoRA: it is served, not trained"

    def targets(self, align: AlignSettings) -> list[str]:
        """Return the linears that LoRA is applied to: those of `align.target_modules` that can be adapted."""
        return [name for name in target_linears(self.model, align.target_modules) if name in self.adaptable]

    def pack_weights(self, native: bool = True, in_16_bits: bool = True) -> str:
        """Speed up the CPU's products by packed weights; return why not, or "". Call it after `attach_lora`.

        With `native` few rows are multiplied by the compiled kernels, if there are any; these read the weights
        `in_16_bits` if that changes no number, and memory allows the second copy, too.
        """
        if reason := why_not_packed(self.model, self.device, self.dtype):
            return reason
        if native and in_16_bits and (lacking := why_not_packed(self.model, self.device, self.dtype, BOTH_COPIES)):
            log.info("weights are not read in 16 bits: %s", lacking)
            in_16_bits = False
        pack_linears(self.model, native, in_16_bits)
        return ""

    def end_ids(self) -> frozenset[int]:
        """Return the tokens that end an answer, by the model's own configurations, but for those it has not."""
        found: set[int] = set()
        for config in (self.config, getattr(self.model, "generation_config", None)):
            value = getattr(config, "eos_token_id", None)
            if value is not None:
                found.update([value] if isinstance(value, int) else value)
        return frozenset(token for token in found if 0 <= token < self.shape.vocab_size)

    def new_kv(self, pages: int, page_size: int, sequences: int = 1, steps: int = 0, copies: int = 0) -> PagedKv:
        """Allocate K/V storage for this model, and slots for states: of sequences, open steps and copies."""
        about = (self.dtype, self.device)
        states = StateStore(slots_for(sequences, steps, copies), self.states, *about) if self.states else None
        return store_of(self.shape.layer_heads, pages, page_size, *about, states)

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page of K/V."""
        return page_size * self.shape.kv_per_token(self.dtype)

    def check_device(self) -> None:
        """Compute a few tokens. Raises where the device fails at anything, as a GPU after an illegal access."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        kv = self.new_kv(2, 4)
        batch = pack([Segment([0, 1, 2, 3], 0, np.array([1]), states=(ZEROS, 1))], kv, self.device)
        with torch.inference_mode(), attention_pass(attention_over(batch, kv)), self.lora.packed(batch.runs):
            self.forward(batch.input_ids, batch.position_ids, batch.logit_rows).float().sum().item()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        """Compute logits [len(logit_rows), vocab] of a packed batch; the caller sets attention pass and LoRA runs."""
        out = self.model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=logit_rows, return_dict=True
        )
        return out.logits[0]

    def layer_calls(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        """Return the first layer's input [n, hidden_size] for tokens `ids` [n] at `positions` [n], and every layer's
        keyword arguments; no layer is computed."""
        hiddens: list[torch.Tensor] = []
        calls: list[dict[str, Any]] = []

        def record(*args: Any, **kwargs: Any) -> Any:
            hidden_states, call = layer_call(self.layers[len(calls)], args, kwargs)
            hiddens.append(hidden_states)
            calls.append(call)
            return (hidden_states, *[None] * (self._tuple_items - 1)) if self._tuple_items else hidden_states

        before = [layer.__dict__.get("forward") for layer in self.layers]
        try:
            for layer in self.layers:
                layer.forward = record
            with torch.no_grad():
                self.body(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        finally:
            for layer, own in zip(self.layers, before, strict=True):
                del layer.forward
                if own is not None:
                    layer.forward = own
        return hiddens[0][0], calls

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply final norm and head: [tokens, hidden_size] (the last layer's output) -> [tokens, vocab] in fp32."""
        head = self.model.get_output_embeddings()
        out = head(self.norm(hidden[None]))[0].float() * self.logit_scale
        return out if self.softcap is None else self.softcap * torch.tanh(out / self.softcap)

    def _shape_of(self, found: Inspection) -> ModelShape:
        linears = linear_sizes(self.model, target_linears(self.model, "all-linear"))
        return ModelShape(
            architecture=type(self.model).__name__,
            linears=linears,
            targets=(),
            plain_weights=weight_count(self.model) - sum(map(prod, linears)),
            weight_bytes=weight_bytes(self.model),
            layers=len(self.layers),
            states=self.states,
            layer_heads=found.layer_heads,
            hidden_size=int(self.config.hidden_size),
            vocab_size=int(self.config.vocab_size),
            max_positions=max_positions(self.config),
            window=found.window,
            experts=expert_sizes(self.model, self.config),
            layer_input_size=layer_input_size(self.config),
            layer_weights=weight_count(self.layers),
        )


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of what a kind of layer is given behind its hidden states."""
    return tuple(inspect.signature(forward).parameters)[2:]


def layer_call(
    layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return what a layer is called with: hidden states, and all else by name."""
    call = dict(kwargs)
    hidden, *others = args or (call.pop("hidden_states"),)
    if others:
        call |= zip(_parameters(type(layer).forward), others, strict=False)
    return hidden, call


def fingerprint(model: nn.Module) -> str:
    """Return an identifier of a base model: a hash of each weight tensor's name, shape and first values."""
    digest = hashlib.sha256()
    for name, tensor in stored_tensors(model):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().flatten()[:16].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
