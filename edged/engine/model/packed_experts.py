"""Experts whose matrices are packed weights of their own.

transformers has the matrices of all experts in one tensor, [experts, out, in], and its quantizers pack linears alone.
By torchao's own register of kinds each such tensor of a plain checkpoint is packed slice by slice when it has been
read, so that one layer's experts are plain at a time. A checkpoint of 4 bits has its experts' matrices apart: they stay
as they are stored.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from edged.engine.model.quantization import INT4_GROUP, CannotQuantize, FrozenLinear, fits_int4, make_config
from edged.models.wrapper_names import text_name

log = logging.getLogger("edged.engine")
PACKS_EXPERTS = ("int4", "int8")
"""Values of `model.quantize` that pack experts, too: torchao's."""
_IMPLEMENTATION = "edged"
_MATRICES = ("gate_up_proj", "up_proj", "down_proj")


class PackedExperts(nn.Module):
    """The matrices of all experts, in place of one tensor."""

    def __init__(self, experts: Iterable[Sequence[torch.Tensor]], pack: Callable[[nn.Module], None] | None) -> None:
        """`experts` gives each one's matrix [out, in], in parts one below the other; `pack` packs a part's linear."""
        super().__init__()
        linears = [[self._linear(part, pack) for part in parts] for parts in experts]
        self.weights = nn.ParameterList([linear.weight for parts in linears for linear in parts])
        # Of a list no part is registered, so that nobody takes an expert for a linear that LoRA is applied to.
        self._linears = [[FrozenLinear(linear) for linear in parts] for parts in linears]
        shapes = {(sum(each.out_features for each in parts), parts[0].in_features) for parts in linears}
        out, fan_in = shapes.pop() if len(shapes) == 1 else (0, 0)
        self.shape = len(linears), out, fan_in
        """(experts, out, in); no sizes where experts differ."""

    def product(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Compute an expert's [rows, in] -> [rows, out]."""
        outs = [linear(x) for linear in self._linears[expert]]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)

    @staticmethod
    def _linear(matrix: torch.Tensor, pack: Callable[[nn.Module], None] | None) -> nn.Linear:
        linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(matrix, requires_grad=False)
        if pack is not None:
            pack(linear)
        return linear


def banks_of(model: nn.Module, group: int = 1) -> dict[str, tuple[int, int, int]]:
    """Return (experts, out, in) of the tensors of a plain model's experts that can be packed, by name.

    So many weights of a row share a scale: a `group`.
    """
    banks = {}
    for path, module in model.named_modules():
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed"):
            for name in _MATRICES:
                bank = module._parameters.get(name)
                if bank is None or bank.dim() != 3:
                    continue
                experts, out, fan_in = (bank.mT if module.is_transposed else bank).shape
                if fan_in % group == 0:
                    banks[f"{path}.{name}"] = experts, out, fan_in
    return banks


def sizes_of_experts(model: nn.Module) -> list[tuple[int, int, int]]:
    """Return (experts, out, in) of each fused tensor of experts in a model, packed or not."""
    found: list[tuple[int, int, int]] = []
    for module in model.modules():
        if isinstance(module, PackedExperts):
            found.append(module.shape)
        for bank in module.parameters(recurse=False):
            if _is_bank(bank):
                experts, out, fan_in = (bank.mT if getattr(module, "is_transposed", False) else bank).shape
                found.append((experts, out, fan_in))
    return found


def _is_bank(weight: torch.Tensor) -> bool:
    """Whether a weight may be that of several experts: one of a convolution over time has [channels, 1, width]."""
    return weight.dim() == 3 and weight.shape[1] > 1


def demand_packed(
    config: Any, kind: str, method: str, dtype: torch.dtype, trust_remote_code: bool = False
) -> tuple[nn.Module, dict[str, tuple[int, int, int]]]:
    """Check what a quantization leaves plain: experts in one tensor, but where `kind` of `model.quantize` packs them.

    `method` is a packed checkpoint's, "" for a plain one. A smaller part of the weights is named in the log. Returns
    the model without memory, and (experts, out, in) of the tensors that are packed, by name. Raises CannotQuantize
    where it is most of them.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    packed = banks_of(model, INT4_GROUP if kind == "int4" else 1)
    if not (StoredExperts(config, model).known if method else kind in PACKS_EXPERTS):
        packed = {}
    plain = sum(p.numel() for name, p in model.named_parameters() if _is_bank(p) and name not in packed)
    every = sum(p.numel() for p in model.parameters())
    what = f"quantization {method}" if method else f'model.quantize = "{kind}"'
    plain_mib, every_mib = (number * dtype.itemsize >> 20 for number in (plain, every))
    left = f"{what} packs linears: its fused experts stay in {dtype}, {plain_mib} of {every_mib} MiB"
    if 2 * plain > every:
        other = 'model.quantize = "int4", which packs experts, too'
        way_out = "where they fit" if kind in PACKS_EXPERTS or not banks_of(model, INT4_GROUP) else f"and {other}"
        way_out = f"give plain weights {way_out}, or a model without experts"
        raise CannotQuantize(f"{left}: {way_out}")
    if plain:
        log.warning("%s", left)
    return model, packed


def quantizing(
    config: Any, kind: str, device: torch.device, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[Any, dict[str, tuple[int, int, int]]]:
    """Return transformers' configuration that quantizes a plain checkpoint and its experts on loading.

    `kind` is `model.quantize`. Returns also (experts, out, in) of the experts' tensors. Raises CannotQuantize.
    """
    wanted = make_config(kind, device, dtype)
    model, banks = demand_packed(config, kind, "", dtype, trust_remote_code)
    head = model.get_output_embeddings()  # type: ignore[operator]
    linears = {name: (each.in_features, each.out_features) for name, each in _linears(model) if each is not head}
    odd = [name for name, sizes in linears.items() if kind == "int4" and not fits_int4(*sizes)]
    if odd:
        log.warning("%d linears, as %s, have sizes that int4 has no kernels for: they stay plain", len(odd), odd[0])
    if banks or odd:
        each = wanted.quant_type
        slices, by_name = _torchao_kinds()
        kinds = dict.fromkeys(linears.keys() - odd, each)
        wanted.quant_type = by_name[kind]({**kinds, **dict.fromkeys(banks, slices(each))})
    return wanted, banks


def _linears(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the weights' names of a model's linears; some routers are linears with answers of their own."""
    modules = model.named_modules()
    return [(f"{name}.weight", each) for name, each in modules if type(each).forward is nn.Linear.forward]


@cache
def _torchao_kinds() -> Any:
    """Return torchao's settings that pack tensors slice by slice, and of what is packed how, by name."""
    from torchao.core.config import AOBaseConfig
    from torchao.quantization import FqnToConfig, quantize_
    from torchao.quantization.transform_module import register_quantize_module_handler

    @dataclass
    class Slices(AOBaseConfig):
        each: AOBaseConfig

    @register_quantize_module_handler(Slices)
    def pack(module: Any, config: Slices, *, parameter_name: str = "weight") -> nn.Module:
        bank = module._parameters.pop(parameter_name).data
        experts = ([(matrix.mT if module.is_transposed else matrix).contiguous()] for matrix in bank)
        _put(module, parameter_name, PackedExperts(experts, lambda linear: quantize_(linear, config.each)))
        return module

    class Int4WeightFqnToConfig(FqnToConfig):
        """Its name tells transformers how many bits a weight takes, for which it makes room on a GPU."""

    return Slices, {"int4": Int4WeightFqnToConfig, "int8": FqnToConfig}


def _put(module: Any, name: str, experts: PackedExperts) -> None:
    setattr(module, name, experts)
    module.config._experts_implementation = _IMPLEMENTATION


class StoredExperts:
    """The experts' matrices of a packed checkpoint, by transformers' own table of how it joins them."""

    def __init__(self, config: Any, model: nn.Module | None) -> None:
        """`model` is the plain one without memory; None: nothing of the checkpoint is packed."""
        self._linears = {name for name, _ in _linears(model)} if model is not None else set()
        self._banks = banks_of(model) if model is not None else {}
        table = get_checkpoint_conversion_mapping(config.model_type) or []
        self._renamings = [each for each in table if isinstance(each, WeightRenaming)]
        self._sources = [
            # Some are written as regular expressions.
            (re.compile("(.*)" + re.escape(source.replace("\\", "")).replace(r"\*", r"(\d+)")), target, part)
            for each in table
            if isinstance(each, WeightConverter) and all(".experts.*." in source for source in each.source_patterns)
            for target in each.target_patterns[:1]
            for part, source in enumerate(each.source_patterns)
        ]
        self._found: dict[str, dict[tuple[int, int], Any]] = {}

    @property
    def known(self) -> bool:
        """Whether checkpoints have the matrices of all of the model's experts apart."""
        targets = tuple(target for _, target, _ in self._sources)
        return bool(self._banks) and all(name.endswith(targets) for name in self._banks)

    def packs(self, name: str) -> bool:
        """Tell whether a stored weight is a linear's or an expert's."""
        return text_name(name) in self._linears or self._place(name) is not None

    def _place(self, name: str) -> tuple[str, tuple[int, int]] | None:
        """Return the bank, the expert and the part of a stored matrix; None for another tensor."""
        renamed = text_name(name)
        for each in self._renamings:
            renamed = re.sub(each.source_patterns[0], each.target_patterns[0], renamed)
        for source, target, part in self._sources:
            if (found := source.fullmatch(renamed)) and f"{found[1]}{target}" in self._banks:
                return f"{found[1]}{target}", (int(found[2]), part)
        return None

    def take(self, tensors: dict[str, Any]) -> None:
        """Take the matrices out of a checkpoint's tensors. Raises CannotQuantize where some lack, or are too many."""
        if not self.known:
            return
        for name in list(tensors):
            if (place := self._place(name)) is not None:
                self._found.setdefault(place[0], {})[place[1]] = tensors.pop(name)
        for name, found in self._found.items():
            parts = 1 + max(part for _, target, part in self._sources if name.endswith(target))
            needed = self._banks[name][0] * parts
            if len(found) != needed or max(found)[0] >= self._banks[name][0]:
                seen = f"has {len(found)} matrices of {name}, its config.json needs {needed}"
                raise CannotQuantize(f"its checkpoint {seen}: download both again")

    def class_without(self, kind: type[nn.Module]) -> type[nn.Module]:
        """Return a model's class whose models begin without the tensors that were taken."""

        def begin(model: Any, *args: Any, **kwargs: Any) -> None:
            kind.__init__(model, *args, **kwargs)
            for bank in self._found:
                path, _, name = bank.rpartition(".")
                module = model.get_submodule(path)
                del module._parameters[name]
                module._is_hf_initialized = True

        return type(kind.__name__, (kind,), {"__init__": begin, "__module__": kind.__module__}) if self._found else kind

    def put(self, model: Any, kind: type[nn.Module]) -> None:
        """Read the matrices that were taken into a model that began without; its class is `kind` from then on."""
        model.__class__ = kind

        def read(matrix: Any) -> torch.Tensor:
            tensor: torch.Tensor = matrix[...]
            return tensor.to(model.device, model.dtype) if type(tensor) is torch.Tensor else tensor.to(model.device)

        for bank, found in self._found.items():
            experts: list[list[torch.Tensor]] = [[] for _ in range(self._banks[bank][0])]
            for (expert, _), matrix in sorted(found.items()):
                experts[expert].append(read(matrix))
            path, _, name = bank.rpartition(".")
            _put(model.get_submodule(path), name, PackedExperts(experts, None))
        demand_shapes(model, {bank: self._banks[bank] for bank in self._found})


def demand_shapes(model: nn.Module, banks: Mapping[str, tuple[int, int, int]]) -> None:
    """Raise CannotQuantize for packed experts of other sizes than (experts, out, in) of their bank."""
    for bank, needed in banks.items():
        found: Any = model.get_submodule(bank).shape
        if found != needed:
            seen = f"{bank} of the shape {list(found)}" if found[1] else f"experts of unlike shapes in {bank}"
            way_out = f"its config.json needs {list(needed)}: download both again"
            raise CannotQuantize(f"its checkpoint has {seen}, {way_out}")


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
