"""Quantized base models: checkpoints' needs, quantization of plain ones by `model.quantize`, and their linears.

The methods themselves are transformers' and their packages'; none is imported before a model asks for it.
"""

import copy
import importlib.util
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from edged.runtime import logs

log = logging.getLogger("edged.engine")
_PACKAGES = {
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel",),
    "quanto": ("optimum-quanto",),
    **{name: (name,) for name in ("bitsandbytes", "torchao", "auto-round", "compressed-tensors", "hqq", "aqlm")},
}
"""pip names of the packages that transformers imports, by method."""
MADE_BY = {"nf4": "bitsandbytes", "llm-int8": "bitsandbytes", "int8": "torchao", "int4": "torchao"}
"""Values of `model.quantize` -> the method that makes them."""
INT4_GROUPS = (128, 64, 32)
"""Weights that may share a scale in torchao's int4 kernels."""
INT4_GROUP = 64
"""Weights that share a scale: small enough to divide the hidden size of small models, too."""
_GPU_ONLY_INT4 = ("tile_packed_to_4d", "plain", "preshuffled", "plain_int32")
"""torchao's int4 layouts that only GPU kernels read."""

_NO_KERNELS = (
    "it would be dequantized to bfloat16, in up to four times the memory): give the plain checkpoint, and "
    "model.quantize where it is too large"
)


class CannotQuantize(ValueError):
    """A quantization cannot be used here; the message says which, why, and the way out."""


def method_of(config: Any) -> dict[str, Any] | None:
    """Return a checkpoint's `quantization_config` as a dictionary; None if it holds plain weights."""
    for part in (config, config.get_text_config(decoder=True)):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            return dict(found) if isinstance(found, dict) else dict(found.to_dict())
    return None


def without(config: Any) -> Any:
    """Return a configuration that says nothing of a quantization."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config(decoder=True)):
        part.__dict__.pop("quantization_config", None)
    return config


@dataclass(frozen=True, slots=True)
class PackedForm:
    """Weights of 4 bits, as a checkpoint stores them: (number - zero point) * scale."""

    method: str
    group: int
    """Weights of a row that share a scale; 0: the whole row."""
    zeros: bool
    """Whether zero points are stored; without them each is 8."""
    zero_offset: int = 0
    """What is added to stored zero points."""

    @property
    def parts(self) -> tuple[str, str, str]:
        """Names of the numbers, scales and zero points of a linear."""
        if self.method == "compressed-tensors":
            return "weight_packed", "weight_scale", "weight_zero_point"
        return "qweight", "scales", "qzeros"

    @property
    def order(self) -> str:
        """Name of the groups of a linear's columns, where they are stored."""
        return "weight_g_idx" if self.method == "compressed-tensors" else "g_idx"

    @property
    def kernel_group(self) -> int:
        """Weights that share a scale in the kernels that read them here; 0: there are none for such groups."""
        return next((size for size in INT4_GROUPS if (self.group or size) % size == 0), 0)


def packed_form(stored: dict[str, Any]) -> PackedForm | None:
    """Return the form of a checkpoint of 4-bit weights that edged reads itself; None for others.

    Raises CannotQuantize for numbers or groups that it does not read.
    """
    method, bits = stored.get("quant_method"), stored.get("bits", stored.get("w_bit", 4))
    if method == "compressed-tensors" and stored.get("format") == "pack-quantized":
        kinds = [group.get("weights") or {} for group in (stored.get("config_groups") or {}).values()]
        others = [group for group in (stored.get("config_groups") or {}).values() if group.get("input_activations")]
        said = {(kind.get("num_bits"), kind.get("type", "int"), kind.get("strategy")) for kind in kinds}
        if others or not said or not said <= {(4, "int", "group"), (4, "int", "channel")}:
            what = "quantized inputs" if others else f"weights of {sorted(map(str, said)) or 'no kind'}"
            raise CannotQuantize(
                f"quantization compressed-tensors (pack-quantized) has {what}: edged reads integers of 4 bits "
                "by groups or rows (W4A16): give such a checkpoint, or the plain one"
            )
        sizes = {int(kind.get("group_size") or -1) for kind in kinds}
        form = PackedForm(method, max(min(sizes), 0), any(kind.get("symmetric") is False for kind in kinds))
    elif method == "gptq" and bits == 4:
        offset = 0 if stored.get("checkpoint_format") == "gptq_v2" else 1
        form = PackedForm(method, max(int(stored.get("group_size", 128)), 0), True, offset)
    elif method == "awq" and bits == 4 and str(stored.get("version", "gemm")).lower() == "gemm":
        form = PackedForm(method, max(int(stored.get("group_size", stored.get("q_group_size", 128))), 0), True)
    else:
        return None
    if not form.kernel_group:
        raise CannotQuantize(
            f"quantization {method} has groups of {form.group} weights: edged reads groups of 32, 64 or 128, their "
            "multiples and whole rows: give such a checkpoint, or the plain one"
        )
    return form


def dequantizes(stored: dict[str, Any]) -> bool:
    """Whether a checkpoint's weights are shorter floats, which are dequantized while they are loaded."""
    method, form = stored.get("quant_method"), stored.get("format")
    if method == "modelopt":
        return stored.get("quant_algo") in ("NVFP4", "FP8")
    short = method == "compressed-tensors" and form in ("float-quantized", "nvfp4-pack-quantized")
    return method in ("fp8", "mxfp4") or short


def check_packed(stored: dict[str, Any]) -> None:
    """Check that a checkpoint's weights stay as they are stored. Raises CannotQuantize.

    compressed-tensors decompresses all of them at the first forward, without a word.
    """
    form = stored.get("format", "dense")
    if stored.get("quant_method") == "compressed-tensors" and form != "dense" and not stored.get("dequantize"):
        raise CannotQuantize(f"quantization compressed-tensors ({form}) does not stay packed ({_NO_KERNELS}")


def check_checkpoint(stored: dict[str, Any], device: torch.device) -> None:
    """Check that a checkpoint's weights can be read and multiplied here. Raises CannotQuantize."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer

    method = stored.get("quant_method")
    if method is None and (stored.get("load_in_4bit") or stored.get("load_in_8bit")):
        method = "bitsandbytes"
    known = {name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZATION_CONFIG_MAPPING}
    if method not in known:
        # transformers itself would go on and take the packed numbers for weights.
        names = ", ".join(sorted(known))
        raise CannotQuantize(
            f"quantization {method!r} is not known to transformers ({names}): give the plain checkpoint"
        )
    check_packed(stored)
    # A checkpoint that says so itself is dequantized knowingly.
    knowingly = bool(stored.get("dequantize"))
    if not knowingly:
        _need_packages(str(method))
    if method == "torchao" and device.type == "cpu" and (layout := _int4_layout(stored)):
        way_out = 'give model.device = "cuda", or the plain checkpoint and model.quantize = "int4"'
        raise CannotQuantize(f'torchao int4 in the layout "{layout}" is read by GPU kernels alone: {way_out}')
    try:
        quantizer = AutoHfQuantizer.from_config(stored, pre_quantized=True)
        quantizer.validate_environment(device_map={"": device})
    except Exception as error:
        raise CannotQuantize(f"quantization {method}: {logs.first_line(error)}") from error
    # transformers' way to say that there are no kernels for it here, with a warning that is easily missed.
    if getattr(quantizer.quantization_config, "dequantize", False) and not knowingly:
        raise CannotQuantize(f"quantization {method} cannot be computed on this {device.type} ({_NO_KERNELS}")


def _int4_layout(stored: dict[str, Any]) -> str:
    """Return the GPU layout that a torchao checkpoint names; "" if it names none."""
    kind = stored.get("quant_type", {}).get("default", {})
    layout = kind.get("_data", {}).get("int4_packing_format", {}) if isinstance(kind, dict) else {}
    name = str(layout.get("_data", "") if isinstance(layout, dict) else layout).lower()
    return name if name in _GPU_ONLY_INT4 else ""


def make_config(kind: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return transformers' configuration that quantizes a plain checkpoint on loading; `kind` is `model.quantize`.

    Raises CannotQuantize.
    """
    method = MADE_BY[kind]
    _need_packages(method)
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if kind == "nf4":
        nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
        return BitsAndBytesConfig(load_in_4bit=True, **nf4)
    if kind == "llm-int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    try:
        return TorchAoConfig(_torchao_form(kind, device, dtype))
    except ImportError as error:
        raise CannotQuantize(
            f'model.quantize = "{kind}" is not in this torchao ({error}): pip install -U torchao'
        ) from error


def _torchao_form(kind: str, device: torch.device, dtype: torch.dtype) -> Any:
    # torchao's settings for the compiler would change the precision of every product in the process.
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return Int8WeightOnlyConfig(set_inductor_config=False)
    if device.type == "cpu":
        from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=INT4_GROUP, set_inductor_config=False)
    from torchao.quantization import Int4WeightOnlyConfig

    if dtype != torch.bfloat16 or torch.cuda.get_device_capability(device) < (8, 0):
        here = f'not in {dtype} on {torch.cuda.get_device_name(device)}: use "nf4"'
        raise CannotQuantize(f'model.quantize = "int4" computes in bfloat16 on GPUs of capability 8.0 or later, {here}')
    layout = "tile_packed_to_4d"
    return Int4WeightOnlyConfig(group_size=INT4_GROUP, int4_packing_format=layout, set_inductor_config=False)


def _need_packages(method: str) -> None:
    missing = [package for package in _PACKAGES.get(method, ()) if not _there(package)]
    if missing:
        raise CannotQuantize(
            f"quantization {method} needs {' and '.join(missing)}, not installed here: pip install {' '.join(missing)}"
        )


def _there(package: str) -> bool:
    module = "optimum.quanto" if package == "optimum-quanto" else package.replace("-", "_")
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that `module` would be in
        return False


def settle(model: nn.Module, dtype: torch.dtype) -> None:
    """Let bitsandbytes' 4-bit linears of a loaded model compute in `dtype`, and not repack their weights on the CPU.

    A checkpoint names the dtype it was tried with, often fp32 by default. On CPUs with AVX512-BF16 the first product
    would pack the weights for a kernel that rounds to bfloat16 and lets no gradient through, without a word.
    """
    linear: Any
    for linear in model.modules():
        if _of_bitsandbytes(linear) and hasattr(linear, "compute_dtype"):
            linear.compute_dtype, linear.compute_type_is_set = dtype, True
            linear.support_avx512bf16_for_cpu = False


# -- what linears hold -------------------------------------------------------------------------------------------------


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear of any kind, by PEFT's criterion."""
    return hasattr(module, "in_features") and hasattr(module, "out_features")


def is_quantized(module: nn.Module) -> bool:
    """Whether a linear holds its weight in another form than one plain floating-point parameter."""
    weight = getattr(module, "weight", None)
    return type(weight) is not nn.Parameter or not weight.is_floating_point()


def other_shapes(model: nn.Module) -> list[tuple[str, torch.Size, list[int]]]:
    """Return (name, shape, the shape that its linear needs) of weights of `MADE_BY`'s forms that do not fit."""
    linears = {f"{name}.weight": module for name, module in model.named_modules() if is_linear(module)}
    shapes = ((name, getattr(linear.weight, "quant_state", linear.weight).shape) for name, linear in linears.items())
    needed = {name: [linear.out_features, linear.in_features] for name, linear in linears.items()}
    return [(name, shape, needed[name]) for name, shape in shapes if list(shape) != needed[name]]


def _of_bitsandbytes(module: nn.Module) -> bool:
    return type(module).__module__.startswith("bitsandbytes")


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every plain tensor that holds weights, once, by name: parameters, the parts of tensor subclasses, and the
    buffers of linears without a weight (GPTQ, AWQ)."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "__tensor_flatten__"):
            for part in parameter.__tensor_flatten__()[0]:
                yield f"{name}.{part}", getattr(parameter, part)
        else:
            yield name, parameter
    for path, module in model.named_modules():
        if is_linear(module) and getattr(module, "weight", None) is None:
            for name, buffer in module.named_buffers(recurse=False):
                yield f"{path}.{name}", buffer


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all weights, with the scales of quantized ones."""
    total = sum(tensor.nbytes for _, tensor in stored_tensors(model))
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)  # bitsandbytes, 4 bit
        while state is not None:
            tensors = (getattr(state, name, None) for name in ("absmax", "code", "offset"))
            total += sum(tensor.nbytes for tensor in tensors if tensor is not None)
            state = getattr(state, "state2", None)
    for module in model.modules():
        scales = getattr(getattr(module, "state", None), "SCB", None)  # bitsandbytes, 8 bit
        total += scales.nbytes if isinstance(scales, torch.Tensor) else 0
    return total


def weight_count(model: nn.Module) -> int:
    """Return the number of weights that the model computes with: packed ones count unpacked, tied ones once."""
    seen: set[int] = set()
    total = 0
    for module in model.modules():
        own = {id(p): p for p in module.parameters(recurse=False) if id(p) not in seen}
        seen.update(own)
        if is_linear(module) and is_quantized(module):
            total += int(module.in_features) * int(module.out_features)  # type: ignore[arg-type]
            own.pop(id(getattr(module, "weight", None)), None)
        total += sum(p.numel() for p in own.values())
    return total


# -- what they take ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightForm:
    """The storage of a linear's weight [out, in]: `bits` a number, and `scale_bytes` for every `group` of a row (0: the
    whole row). Kernels may need rows and columns padded; of sizes that they do not take, numbers have `plain_bits`."""

    bits: float
    group: int = 0
    scale_bytes: float = 0.0
    pad_in: int = 1
    pad_out: int = 1
    plain_bits: float = 0.0

    def bytes_of(self, in_features: int, out_features: int) -> int:
        """Return the bytes of one weight with its scales."""
        if self.plain_bits and not fits_int4(in_features, out_features):
            return round(in_features * out_features * self.plain_bits / 8)
        columns, rows = (-(-n // pad) * pad for n, pad in ((in_features, self.pad_in), (out_features, self.pad_out)))
        groups = rows * (-(-columns // self.group) if self.group else 1)
        return round(rows * columns * self.bits / 8 + groups * self.scale_bytes)


def fits_int4(in_features: int, out_features: int) -> bool:
    """Whether `model.quantize` = int4 packs a weight of these sizes."""
    return in_features % INT4_GROUP == 0 and out_features % 16 == 0


_NESTED = 1 + 4 / 256
"""Bytes of a scale that is itself quantized to 8 bits, in blocks of 256 with an fp32 scale."""


def form_of_setting(kind: str, dtype: torch.dtype, cuda: bool) -> WeightForm:
    """Return the form that `model.quantize` = `kind` makes; "" is plain `dtype`."""
    padding = {"pad_in": 1024, "pad_out": 8} if cuda else {}
    return {
        "": WeightForm(8.0 * dtype.itemsize),
        "nf4": WeightForm(4, 64, _NESTED),
        "llm-int8": WeightForm(8, 0, 4),
        "int8": WeightForm(8, 0, dtype.itemsize),
        "int4": WeightForm(4, INT4_GROUP, 2 * dtype.itemsize, **padding, plain_bits=8.0 * dtype.itemsize),
    }[kind]


def form_of_checkpoint(stored: dict[str, Any], dtype: torch.dtype, cuda: bool) -> WeightForm:
    """Return the form of a checkpoint's `quantization_config`. Raises CannotQuantize if its size is not known."""
    if (packed := packed_form(stored)) is not None:
        return replace(form_of_setting("int4", dtype, cuda), group=packed.kernel_group, plain_bits=0.0)
    if dequantizes(stored):
        return form_of_setting("", dtype, cuda)
    check_packed(stored)
    method = stored.get("quant_method")
    if stored.get("load_in_4bit"):
        return WeightForm(4, 64, _NESTED if stored.get("bnb_4bit_use_double_quant") else 4)
    if stored.get("load_in_8bit"):
        return form_of_setting("llm-int8", dtype, cuda)
    if method in ("gptq", "awq"):
        bits = float(stored.get("bits", 4))
        group = int(stored.get("group_size", 128))
        return WeightForm(bits, max(group, 0), 2 + bits / 8)
    kind = str(stored.get("quant_type", {}).get("default", {}).get("_type", "")) if method == "torchao" else ""
    if "Int8Weight" in kind:
        return form_of_setting("int8", dtype, cuda)
    if "Int4Weight" in kind:
        return form_of_setting("int4", dtype, cuda)
    raise CannotQuantize(f"how much memory weights of quantization {method} {kind} take is not known")


_INT4_ROWS = 64
"""Rows of a block that torchao's int4 layouts do not mix with others."""
_COLUMNS = 512
"""Columns recovered at once of a weight that is only known by its products."""


class FrozenLinear(nn.Module):
    """A frozen quantized linear whose input gets the gradient upstream @ weight; the graph keeps no weight.

    The weight is dequantized for each backward product and freed again.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.in_features, self.out_features = int(base.in_features), int(base.out_features)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [..., in_features] -> [..., out_features]."""
        learns = torch.is_grad_enabled() and x.requires_grad
        out: torch.Tensor = _Product.apply(x, self) if learns else self.base(x)
        return out

    def input_gradient(self, upstream: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the input: [..., out_features] -> [..., in_features]."""
        weight: Any = getattr(self.base, "weight", None)
        known = type(weight).dequantize is not torch.Tensor.dequantize if isinstance(weight, torch.Tensor) else False
        # A scale of the inputs is not in the weight.
        if getattr(weight, "act_pre_scale", None) is None and (known or hasattr(weight, "scale_and_zero")):
            whole: torch.Tensor = weight.dequantize() if known else _from_int4(weight)
            return upstream @ whole.to(upstream.dtype)
        return torch.cat([self._columns(upstream, start) for start in range(0, self.in_features, _COLUMNS)], dim=-1)

    def _columns(self, upstream: torch.Tensor, start: int) -> torch.Tensor:
        """Return the gradient of inputs from `start` on, by products of unit vectors: rows of the transposed weight."""
        count = min(_COLUMNS, self.in_features - start)
        units = upstream.new_zeros(count, self.in_features)
        units[:, start : start + count].fill_diagonal_(1.0)
        rows = self.base(units[None])[0]
        bias = getattr(self.base, "bias", None)
        if bias is not None:
            rows = rows - bias
        return upstream @ rows.t().to(upstream.dtype)


def _from_int4(weight: Any) -> torch.Tensor:
    """Return the numbers [out, in] of a weight in one of torchao's int4 layouts, which cannot be dequantized.

    A layout moves numbers within blocks of rows. Where each goes is asked of the function that packs, once for a block.
    """
    scales, zeros = weight.scale_and_zero.unbind(-1)
    rows, columns = scales.shape[1], scales.shape[0] * weight.block_size[1]
    block = _INT4_ROWS if rows % _INT4_ROWS == 0 else rows
    places = _int4_places(block, columns, weight.qdata.device)
    numbers = nibbles(weight.qdata).view(-1, block * columns)[:, places].view(rows, scales.shape[0], -1)
    found = (numbers.to(scales.dtype) - 8) * scales.t()[..., None] + zeros.t()[..., None]
    return found.view(rows, columns)[: weight.shape[0], : weight.shape[1]]


@cache
def _int4_places(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Return the place of each number [rows * columns] among the packed ones."""
    numbers = torch.arange(rows * columns, device=device).view(rows, columns)
    found = torch.zeros(rows * columns, dtype=torch.long, device=device)
    for shift in range(0, (rows * columns - 1).bit_length(), 4):
        found |= nibbles(int4_words(numbers >> shift & 15)).flatten().long() << shift
    return found.argsort()


def int4_words(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers [out, in] from 0 to 15 in the layout that the int4 kernels of their device read."""
    if numbers.device.type == "cpu":
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int().contiguous(), 1)
    pairs = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)
    return torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), 8)


def nibbles(words: torch.Tensor, along: int | None = None, order: Iterable[int] | None = None) -> torch.Tensor:
    """Return the numbers of 4 bits in integers, which follow each other along this dimension (None: the last).

    `order` has their places in an integer; None: the lowest first.
    """
    along = words.dim() - 1 if along is None else along
    parts = [words >> 4 * place & 15 for place in order or range(2 * words.element_size())]
    return torch.stack(parts, dim=along + 1).flatten(along, along + 1)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, linear: FrozenLinear) -> torch.Tensor:
        ctx.linear = linear
        out: torch.Tensor = linear.base(x)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.linear.input_gradient(upstream[0]), None


def give_gradients(model: nn.Module) -> None:
    """Wrap every quantized linear without a derivative of its own; bitsandbytes' have one, wrappers no weight."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            plain = is_linear(child) and not list(child.children()) and not isinstance(parent, FrozenLinear)
            if plain and is_quantized(child) and not _of_bitsandbytes(child):
                setattr(parent, name, FrozenLinear(child))
