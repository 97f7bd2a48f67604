"""Accounts of the bytes that training keeps of a model's forward, by what is left out (FlexLLM, Figure 13).

One decoder layer runs on tensors that have shapes and no memory, so that any model is accounted anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from peft.utils import constants
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoModelForCausalLM

from edged.align.dpo.decoder import Branches, LoraParameters, LoraRows
from edged.align.dpo.layout import Piece
from edged.align.dpo.lean import Keep, KeptResults
from edged.engine.attention.paged import IMPLEMENTATION, BranchAttention, attention_pass
from edged.engine.lora.linear import LoraSlots
from edged.engine.model.inspection import find_decoder
from edged.engine.model.loading import ModelRefused, read_config, target_linears
from edged.runtime import logs

_DTYPE = torch.bfloat16
_RANK = 16
_IA3_LINEARS = constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING
_IA3_INPUTS = constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING
"""Names of the linears that PEFT's IA3 scales, and of those whose inputs it scales, by the model's type."""


def _ends(names: Iterable[str]) -> tuple[str, ...]:
    """Return the ends of the paths of modules of these names."""
    return tuple(f".{name}" for name in names)


class _Storages:
    """Distinct storages, without those of `left_out` tensors."""

    def __init__(self, left_out: Iterable[torch.Tensor]) -> None:
        self._left_out = {tensor.untyped_storage()._cdata for tensor in left_out}
        self._found: dict[int, torch.UntypedStorage] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor's storage, once; returns the tensor."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._left_out:
            self._found[storage._cdata] = storage
        return tensor

    @property
    def bytes(self) -> int:
        """Bytes of all."""
        return sum(storage.nbytes() for storage in self._found.values())


class _Layer:
    """One decoder layer of a model with LoRA or IA3, and its arguments for `tokens` tokens."""

    def __init__(self, config: Any, peft: str, tokens: int) -> None:
        self.tokens = tokens
        self.model = AutoModelForCausalLM.from_config(config, dtype=_DTYPE, attn_implementation=IMPLEMENTATION).eval()
        layers, _, _ = find_decoder(self.model)
        self.layer, kind = layers[0], self.model.config.get_text_config().model_type
        wanted = _IA3_LINEARS.get(kind, []) if peft == "ia3" else [peft.removeprefix("lora:")]
        if len({tuple((name, weight.shape) for name, weight in layer.named_parameters()) for layer in layers}) > 1:
            raise ModelRefused(f"the layers of {type(self.model).__name__} differ: the first one cannot stand for all")
        names = [
            name
            for name in target_linears(self.model, "all-linear")
            if wanted == ["all"] or f".{name}".endswith(_ends(wanted))
        ]
        if not names:
            named = " or ".join(wanted) or "by PEFT"
            raise ModelRefused(f"--peft {peft}: the model has no linear named {named}: use lora:all")
        self.lora = LoraSlots(self.model, names, 1, _RANK, _DTYPE)
        self.hidden, self.call = self._arguments()
        leaves: dict[str, tuple[torch.Tensor, ...]] = {}
        inputs = _ends(_IA3_INPUTS.get(kind, []))
        for name, linear in self.lora.linears.items():
            sides = [(_RANK, linear.in_features), (linear.out_features, _RANK)]
            if peft == "ia3":
                sides = [(1, linear.in_features) if f".{name}".endswith(inputs) else (linear.out_features, 1)]
            leaves[name] = tuple(torch.empty(*size, dtype=_DTYPE, requires_grad=True) for size in sides)
        self.leaves = LoraParameters(leaves, dict.fromkeys(leaves, 1.0), leaves)
        self.outside = [*self.model.parameters(), *self.model.buffers()]
        self.outside += [matrix for own in leaves.values() for matrix in own]
        self.outside += [part for part in tree_leaves(self.call) if isinstance(part, torch.Tensor)]

    def _arguments(self) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the layer's input and keyword arguments, without computing it."""
        taken: list[Any] = []

        def record(_layer: Any, args: Any, call: dict[str, Any]) -> None:
            hidden, call = args[0] if args else call["hidden_states"], dict(call)
            call.pop("hidden_states", None)
            taken.extend((hidden, call))
            raise StopIteration

        hook = self.layer.register_forward_pre_hook(record, with_kwargs=True)
        with suppress(StopIteration), torch.no_grad():
            ids, positions = torch.zeros(1, self.tokens, dtype=torch.int64), torch.arange(self.tokens)
            self.model.base_model(input_ids=ids, position_ids=positions[None], use_cache=False)
        hook.remove()
        return taken[0], taken[1]

    def run(self, attention: str, branch: Branches) -> tuple[torch.Tensor, BranchAttention]:
        """Run the layer with autograd, by an attention of transformers or ours; returns its input and the latter."""
        self.model.set_attn_implementation(attention)
        rows = branch.last

        def last(value: Any) -> Any:
            per_token = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == self.tokens
            return value[:, -rows:] if per_token else value

        call = tree_map(last, self.call)
        hidden = self.hidden[:, :rows].clone().requires_grad_(True)
        attending = BranchAttention([branch])
        with self.lora.training([LoraRows(0, rows, self.leaves)]), attention_pass(attending):
            self.layer(hidden, **call)
        return hidden, attending

    def saved(self, attention: str, branch: Branches, trains_base: bool = False) -> int:
        """Return the bytes that autograd saves."""
        for parameter in self.model.parameters():
            parameter.requires_grad_(trains_base)
        found = _Storages(self.outside)
        with torch.autograd.graph.saved_tensors_hooks(found.add, lambda tensor: tensor):
            self.run(attention, branch)
        return found.bytes

    def pruned(self, branch: Branches) -> tuple[int, int, torch.Tensor]:
        """Return the bytes of Algorithm 1's tensors after its first step, after its second, and the layer's keys.

        The second step drops the inputs of linears with adapters, which are norms and products of what is left, and
        the low-rank rows; of IA3 the scaled inputs, and outputs beside what they were before.
        """
        kept, small = KeptResults(_RANK), 0
        mode, inputs = Keep(kept), _Storages(self.outside)

        def count(linear: Any, args: tuple[torch.Tensor]) -> None:
            nonlocal small
            *lora, last = self.leaves.weights[linear.name]
            # LoRA's low-rank rows, or the outputs that IA3 scales.
            small += self.tokens * _DTYPE.itemsize * (_RANK if lora else last.shape[0] if last.shape[1] == 1 else 0)
            if (lora or last.shape[0] == 1) and not mode.origins(args[0]):
                inputs.add(args[0])

        hooks = [linear.register_forward_pre_hook(count) for linear in self.lora.linears.values()]
        with mode:
            hidden, attending = self.run(IMPLEMENTATION, branch)
        for hook in hooks:
            hook.remove()
        found = _Storages(self.outside)
        for tensor in (hidden, *kept.tensors):
            found.add(tensor)
        return found.bytes + inputs.bytes + small, found.bytes, attending.keys


def account(model: Path, peft: str, tokens: int, window_tokens: int) -> dict[str, Any]:
    """Return the bytes that a sequence of `tokens` keeps for its backward, by what is left out. Raises ModelRefused."""
    rows: list[dict[str, Any]] = []

    def add(kept: str, every: int, once: int = 0) -> None:
        total = layers * every + once
        row = {"kept": kept, "bytes_per_token_layer": every / tokens, "once_bytes": once, "total_bytes": total}
        rows.append(row)

    with FakeTensorMode():
        try:
            layer = _Layer(read_config(str(model), trust_remote_code=False)[0], peft, tokens)
        except ModelRefused:
            raise
        except Exception as error:
            raise ModelRefused(
                f'model "{model}" has no configuration that can be read: {logs.first_line(error)}'
            ) from error
        text = layer.model.config.get_text_config()
        layers = int(text.num_hidden_layers)
        whole = Branches(0, tokens, 0, (Piece(0, tokens, 0, None),), None)
        # Gemma 2 has no fused attention of transformers'.
        attentions = ("eager", "sdpa") if layer.model._supports_sdpa else ("eager",)
        for attention in attentions:
            add(f"autograd, all weights trained, {attention}", layer.saved(attention, whole, trains_base=True))
        add(f"autograd, frozen weights, {attentions[-1]}", layer.saved(attentions[-1], whole))
        pruned, lean, keys = layer.pruned(whole)
        add("Algorithm 1", pruned)
        add("+ rematerialization", lean)
        first = max(0, tokens - window_tokens)
        earlier = keys[:, :first].detach().requires_grad_(), keys[:, :first].detach().requires_grad_()
        window = Branches(0, tokens - first, first, (Piece(first, tokens, first, None),), earlier if first else None)
        inputs = tokens * int(text.hidden_size) * _DTYPE.itemsize
        # The gradients of one layer's K/V are collected in fp32.
        once = layer.saved(IMPLEMENTATION, window) + 2 * keys.numel() * torch.float32.itemsize
        add("+ token windows", inputs + 2 * keys.nbytes, once)
    return {
        **{"model": str(model), "peft": peft, "rank": _RANK, "dtype": str(_DTYPE).removeprefix("torch.")},
        **{"layers": layers, "tokens": tokens, "window_tokens": tokens - first, "rows": rows},
    }
