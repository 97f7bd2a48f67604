"""Experts of a model that is quantized while it is loaded: each expert's matrix is a packed weight of its own.

transformers has the matrices of all experts in one tensor, [experts, out, in], and its quantizers pack linears alone.
By torchao's own register of kinds each such tensor is packed slice by slice when it has been read, so that one layer's
experts are plain at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from edged.engine.model.quantization import INT4_GROUP, CannotQuantize, FrozenLinear, is_linear, make_config

log = logging.getLogger("edged.engine")
PACKS_EXPERTS = ("int4", "int8")
"""Values of `model.quantize` that pack experts, too: torchao's."""
_IMPLEMENTATION = "edged"
_MATRICES = ("gate_up_proj", "up_proj", "down_proj")


class PackedExperts(nn.Module):
    """The packed matrices of all experts, in place of one tensor."""

    def __init__(self, bank: torch.Tensor, transposed: bool, pack: Callable[[nn.Module], None]) -> None:
        """`bank` is [experts, out, in], or [experts, in, out] where it is `transposed`; `pack` packs a linear."""
        super().__init__()
        linears = [self._packed(matrix.mT if transposed else matrix, pack) for matrix in bank]
        self.weights = nn.ParameterList([linear.weight for linear in linears])
        # Of a list no part is registered, so that nobody takes an expert for a linear that LoRA is applied to.
        self._linears = [FrozenLinear(linear) for linear in linears]
        self.shape = len(linears), linears[0].out_features, linears[0].in_features

    def product(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Compute an expert's [rows, in] -> [rows, out]."""
        out: torch.Tensor = self._linears[expert](x)
        return out

    @staticmethod
    def _packed(matrix: torch.Tensor, pack: Callable[[nn.Module], None]) -> nn.Linear:
        linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(matrix.contiguous(), requires_grad=False)
        pack(linear)
        return linear


def banks_of(model: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Return (experts, out, in) of the tensors of a plain model's experts that can be packed, by name."""
    banks = {}
    for path, module in model.named_modules():
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed"):
            for name in _MATRICES:
                bank = module._parameters.get(name)
                if bank is None or bank.dim() != 3:
                    continue
                experts, out, fan_in = (bank.mT if module.is_transposed else bank).shape
                if fan_in % INT4_GROUP == 0:
                    banks[f"{path}.{name}"] = experts, out, fan_in
    return banks


def sizes_of_experts(model: nn.Module) -> list[tuple[int, int, int]]:
    """Return (experts, out, in) of each fused tensor of experts in a model, packed or not."""
    plain = [(bank.shape[0], bank.shape[1], bank.shape[2]) for bank in model.parameters() if bank.dim() == 3]
    return plain + [module.shape for module in model.modules() if isinstance(module, PackedExperts)]


def demand_packed(
    config: Any, kind: str, method: str, dtype: torch.dtype, trust_remote_code: bool = False
) -> nn.Module:
    """Check what a quantization leaves plain: experts in one tensor, but where `kind` of `model.quantize` packs them.

    `method` is a packed checkpoint's, "" for a plain one. A smaller part of the weights is named in the log. Returns
    the model without memory. Raises CannotQuantize where it is most of them.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    packed = banks_of(model) if kind in PACKS_EXPERTS else {}
    plain = sum(p.numel() for name, p in model.named_parameters() if p.dim() > 2 and name not in packed)
    every = sum(p.numel() for p in model.parameters())
    what = f"quantization {method}" if method else f'model.quantize = "{kind}"'
    plain_mib, every_mib = (number * dtype.itemsize >> 20 for number in (plain, every))
    left = f"{what} packs linears: its fused experts stay in {dtype}, {plain_mib} of {every_mib} MiB"
    if 2 * plain > every:
        way_out = 'give plain weights and model.quantize = "int4", which packs experts, too, or a model without experts'
        raise CannotQuantize(f"{left}: {way_out}")
    if plain:
        log.warning("%s", left)
    return model


def quantizing(config: Any, kind: str, device: torch.device, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """Return transformers' configuration that quantizes a plain checkpoint and its experts on loading.

    `kind` is `model.quantize`. Raises CannotQuantize.
    """
    wanted = make_config(kind, device, dtype)
    model = demand_packed(config, kind, "", dtype, trust_remote_code)
    if kind in PACKS_EXPERTS and (banks := banks_of(model)):
        from torchao.quantization import FqnToConfig

        each, head = wanted.quant_type, model.get_output_embeddings()  # type: ignore[operator]
        linears = [name for name, module in model.named_modules() if is_linear(module) and module is not head]
        slices = _slices_kind()(each)
        wanted.quant_type = FqnToConfig(
            {**{f"{name}.weight": each for name in linears}, **dict.fromkeys(banks, slices)}
        )
    return wanted


@cache
def _slices_kind() -> Any:
    from torchao.core.config import AOBaseConfig
    from torchao.quantization import quantize_
    from torchao.quantization.transform_module import register_quantize_module_handler

    @dataclass
    class Slices(AOBaseConfig):
        each: AOBaseConfig

    @register_quantize_module_handler(Slices)
    def pack(module: Any, config: Slices, *, parameter_name: str = "weight") -> nn.Module:
        bank = module._parameters.pop(parameter_name).data
        setattr(
            module, parameter_name, PackedExperts(bank, module.is_transposed, lambda one: quantize_(one, config.each))
        )
        module.config._experts_implementation = _IMPLEMENTATION
        return module

    return Slices


def _forward(experts: Any, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Compute experts' answers [tokens, hidden], by the experts `chosen` for each token [tokens, k] and their shares.

    An expert computes all its tokens at once, and is not read without any.
    """
    tokens, k = chosen.shape
    order = chosen.reshape(-1).argsort(stable=True)
    counts = torch.bincount(chosen.reshape(-1), minlength=experts.num_experts).tolist()
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    outs = []
    for expert, rows in enumerate(x[order // k].split(counts)):
        if len(rows):
            inner = _product(experts, first, expert, rows)
            inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
            outs.append(_product(experts, "down_proj", expert, inner))
    out = torch.cat(outs)
    if experts.has_post_expert_norm:
        out = experts.post_expert_norm(out)
    out = (out * shares.reshape(-1)[order, None])[order.argsort()]
    return out.view(tokens, k, -1).sum(1).to(x.dtype)


def _product(experts: Any, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    bank = getattr(experts, name)
    if isinstance(bank, PackedExperts):
        out = bank.product(expert, rows)
    else:
        out = rows @ (bank[expert] if experts.is_transposed else bank[expert].mT)
    return out + getattr(experts, f"{name}_bias")[expert] if experts.has_bias else out


ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, _forward)
