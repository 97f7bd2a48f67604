"""The served model: an unmodified transformers decoder, checked at start, with the handles that the engine needs."""

from __future__ import annotations

import hashlib
import inspect
import logging
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from edged.engine.attention.base import AttentionCall
from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import IMPLEMENTATION, PagedAttention, attention_pass
from edged.engine.kv.store import KvStore
from edged.engine.lora.linear import LoraSlots
from edged.engine.model.loading import ModelRefused, load_pretrained, target_linears
from edged.engine.model.memory_model import BaseShape, linear_sizes
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
_PROBE_TOKENS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(BaseShape):
    """The sizes of a loaded model that the cache, the cost model and the status need."""

    architecture: str
    weight_bytes: int
    """Bytes of all weights as they are stored."""
    heads: int
    window: int | None
    """The shortest sliding window of a layer; None if all layers see the whole context."""


class ServedModel:
    """A decoder in eval mode whose attention is `edged.engine.attention.paged` and whose linears hold LoRA slots."""

    shape: ModelShape

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.device, self.dtype = model, model.device, model.dtype
        self.body = model.base_model
        self.layers, self.norm = _find_decoder(self.body)
        self.config = model.config.get_text_config()
        _fix_frequencies(model)
        self.softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        # Cohere multiplies its logits, Granite divides them.
        self.logit_scale = getattr(self.config, "logit_scale", None) or 1.0 / (
            getattr(self.config, "logits_scaling", None) or 1.0
        )
        self.quantized = any(is_linear(module) and is_quantized(module) for module in model.modules())
        self._probe()
        self.fingerprint = fingerprint(model)
        """Identifier of the base weights: adapters and scores of other base weights do not fit these."""
        self.lora = LoraSlots(model, [], 0, 0, self.dtype)
        """The LoRA slots; of no linears until `attach_lora`."""

    @classmethod
    def load(cls, directory: str | Path, settings: ModelSettings) -> ServedModel:
        """Load what `save_pretrained` wrote. Raises ModelRefused with the reason."""
        return cls(load_pretrained(str(directory), settings, IMPLEMENTATION))

    def attach_lora(self, align: AlignSettings, slots: int) -> None:
        """Wrap the target linears; called once. Raises ModelRefused if there are none of these names."""
        targets = target_linears(self.model, align.target_modules)
        self.shape = replace(self.shape, targets=linear_sizes(self.model, align.target_modules))
        self.lora = LoraSlots(self.model, targets, slots, align.rank, self.dtype)
        give_gradients(self.model)
        if not targets:
            self.trainable_error = f"{self.shape.architecture} has no linear layers for LoRA: it is served, not trained"

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
        """Return the tokens that end an answer, by the model's own configurations."""
        found: set[int] = set()
        for config in (self.config, getattr(self.model, "generation_config", None)):
            value = getattr(config, "eos_token_id", None)
            if value is not None:
                found.update([value] if isinstance(value, int) else value)
        return frozenset(found)

    def new_kv(self, pages: int, page_size: int) -> KvStore:
        """Allocate K/V storage for this model."""
        s = self.shape
        return KvStore(pages, page_size, s.layers, s.kv_heads, s.head_dim, self.dtype, self.device)

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page of K/V."""
        return page_size * self.shape.kv_per_token(self.dtype)

    def check_device(self) -> None:
        """Check that the device works. Raises RuntimeError if it does not, as a GPU after an illegal access."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

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

        def record(hidden_states: torch.Tensor, *_: Any, **call: Any) -> Any:
            hiddens.append(hidden_states)
            calls.append(call)
            return (hidden_states,) if self._layers_give_tuples else hidden_states

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

    def _probe(self) -> None:
        """Run a few tokens in two chunks through pages and compare with the model's own attention.

        Sets the shape and, if the head cannot be recomputed alone, `trainable_error`. Raises ModelRefused.
        """
        name = type(self.model).__name__
        spy = AttentionSpy()
        vocab = int(self.config.vocab_size)
        ids = torch.arange(7, 7 + _PROBE_TOKENS, device=self.device)[None] % vocab
        positions = torch.arange(_PROBE_TOKENS, device=self.device)[None]
        rows = torch.arange(_PROBE_TOKENS, device=self.device)
        tuples: list[bool] = []
        handle = self.layers[0].register_forward_hook(lambda _module, _args, out: tuples.append(isinstance(out, tuple)))
        with torch.inference_mode():
            try:
                with attention_pass(spy):
                    self.forward(ids, positions, rows)
            except ModelRefused:
                raise
            except Exception as error:
                raise ModelRefused(f"{name} cannot be served: {error}") from error
            handle.remove()
            self._layers_give_tuples = any(tuples)
            self.shape = self._shape_from(spy)
            self.model.set_attn_implementation("eager")
            wanted = self.model(input_ids=ids, position_ids=positions, use_cache=False).logits[0].float()
            self.model.set_attn_implementation(IMPLEMENTATION)
            kv = self.new_kv(2, _PROBE_TOKENS)
            half = _PROBE_TOKENS // 2
            got: list[torch.Tensor] = []
            last: list[torch.Tensor] = []
            handle = self.norm.register_forward_pre_hook(lambda _module, args: last.append(args[0][0]))
            for first in (0, half):
                tokens = ids[0, first : first + half].tolist()
                batch = pack([Segment(tokens, first, np.array([1]), position=first)], kv, self.device)
                with attention_pass(PagedAttention(batch, kv)):
                    got.append(self.forward(batch.input_ids, batch.position_ids, rows[:half]).float())
            handle.remove()
            # Some quantized products round their input: a last bit of it can move them by a step.
            exact = self.dtype == torch.float32 and not self.quantized
            tolerance = 1e-3 if exact else 0.1
            scale = float(wanted.abs().max()) + 1e-6
            if not float((torch.cat(got) - wanted).abs().max()) <= tolerance * scale:
                raise ModelRefused(
                    f"{name} cannot be served: over paged K/V it answers differently from its own attention "
                    "(its attention is not plainly causal, or its positions are not rotary)"
                )
            alone = self.logits(torch.cat(last))
            self.trainable_error = ""
            if not float((alone - wanted).abs().max()) <= tolerance * scale:
                self.trainable_error = (
                    f"{name}'s head does more than norm, linear and soft cap: it is served, not trained"
                )

    def _shape_from(self, spy: AttentionSpy) -> ModelShape:
        name = type(self.model).__name__
        seen = {call.layer: (query.shape[0], *key.shape[::2]) for call, query, key, _ in spy.seen}
        if sorted(seen) != list(range(len(self.layers))):
            raise ModelRefused(
                f"{name} cannot be served: {len(seen)} of its {len(self.layers)} layers use the attention "
                "interface (layers without attention, or with their own, need a cache that edged does not page)"
            )
        if "chunked_attention" in (getattr(self.config, "layer_types", None) or ()):
            raise ModelRefused(f"{name} cannot be served: its chunked attention is not causal over all that precedes")
        if len(set(seen.values())) != 1:
            raise ModelRefused(f"{name} cannot be served: its layers differ in heads or head size: {seen}")
        heads, kv_heads, head_dim = seen[0]
        linears = linear_sizes(self.model, "all-linear")
        return ModelShape(
            architecture=name,
            linears=linears,
            targets=(),
            plain_weights=weight_count(self.model) - sum(map(prod, linears)),
            weight_bytes=weight_bytes(self.model),
            layers=len(self.layers),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            hidden_size=int(self.config.hidden_size),
            vocab_size=int(self.config.vocab_size),
            max_positions=_max_positions(self.config),
            window=min((call.window for call, *_ in spy.seen if call.window is not None), default=None),
        )


class AttentionSpy:
    """An attention backend that records every call with its query, key and value, and returns the query."""

    def __init__(self) -> None:
        self.seen: list[tuple[AttentionCall, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def attend(self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `AttentionBackend.attend`. Raises ModelRefused for keys and values that cannot be paged."""
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            raise ModelRefused("keys and values of different head sizes cannot share a page")
        self.seen.append((call, query, key, value))
        return query.transpose(0, 1).clone()


def _fix_frequencies(model: nn.Module) -> None:
    """Fix rotary embeddings to their first frequencies, which never change within `_max_positions`.

    Dynamic ones would ask the device, in every forward, for the largest position, which no capture may do.
    """
    for module in model.modules():
        found = getattr(module, "rope_type", "")
        kinds = found.values() if isinstance(found, dict) else [found]
        if any(kind == "longrope" or "dynamic" in kind for kind in kinds):
            plain = inspect.unwrap(type(module).forward)
            module.forward = torch.no_grad()(partial(plain, module))


def _max_positions(config: Any) -> int:
    """Return the longest context. LongRoPE changes the frequencies of the whole batch when one position passes the
    original context: up to there a sequence's K/V do not depend on the rest of the batch, so the context ends there."""
    longest = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") == "longrope":
            longest = min(longest, int(part.get("original_max_position_embeddings") or longest))
    return longest


def fingerprint(model: nn.Module) -> str:
    """Return an identifier of a base model: a hash of each weight tensor's name, shape and first values."""
    digest = hashlib.sha256()
    for name, tensor in stored_tensors(model):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().flatten()[:16].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _find_decoder(body: nn.Module) -> tuple[nn.ModuleList, nn.Module]:
    """Return the list of decoder layers and the final norm, by the names that transformers' decoders use."""
    layers = next(
        (found for n in ("layers", "h", "blocks") if isinstance(found := getattr(body, n, None), nn.ModuleList)), None
    )
    norm = next(
        (getattr(body, n) for n in ("norm", "final_layernorm", "ln_f", "final_layer_norm") if hasattr(body, n)), None
    )
    if layers is None or norm is None:
        raise ModelRefused(
            f"{type(body).__name__} cannot be served: no list of decoder layers with a final norm was found in it "
            "(it is not a decoder-only model that edged knows how to page)"
        )
    return layers, norm
