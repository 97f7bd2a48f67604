"""Loading of a checkpoint's directory as a transformers model on its device, tensor by tensor.

It needs memory for the weights and about one tensor more.
"""

import contextlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from edged.engine.model import quantization
from edged.runtime import logs
from edged.runtime.process import frugal, quiet
from edged.settings.load import ModelSettings
from edged.text.remote_code import Untrusted, check_code, check_weights

log = logging.getLogger("edged.engine")
_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "head_dim"),
    *("num_attention_heads", "num_key_value_heads"),
)
"""Numbers of a configuration, where it has them, that are from 1 on."""


class ModelRefused(ValueError):
    """The model cannot be served; the message says why and what to do."""


def read_config(path: str, trust_remote_code: bool) -> Any:
    """Read the configuration of a causal language model from a directory, or a config.json.

    Raises ModelRefused for one that cannot be read, of another kind of model, or with sizes that no model has.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, TypeError, ... here
        reason = " ".join(str(error).split())
        raise ModelRefused(f'model "{path}" has no configuration that can be read: {reason}') from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(config, "auto_map", None):
        raise ModelRefused(
            f'model "{path}" cannot be served: {config.model_type} is no causal language model of '
            "transformers, as text decoders in a wrapper with towers are not: give one that is saved alone"
        )
    text, problem = config.get_text_config(), ""
    # Not its attributes: some that differ by layer raise when they are read.
    said = text.to_dict()
    sizes = {name: said[name] for name in _SIZES if isinstance(said.get(name), int)}
    heads, kv_heads = (said.get(name) for name in _SIZES[-2:])
    if wrong := [f"{name} = {size}" for name, size in sizes.items() if size < 1]:
        problem = f"{wrong[0]}: a number from 1 on is needed"
    elif isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        problem = f"num_key_value_heads = {kv_heads}, which does not divide num_attention_heads = {heads}"
    if problem:
        raise ModelRefused(f'model "{path}" cannot be served: its config.json has {problem}; download it again')
    return config


def load_pretrained(directory: str, settings: ModelSettings, implementation: str) -> PreTrainedModel:
    """Load what `save_pretrained` wrote, quantized or to be quantized, with the attention `implementation`.

    The model's `device` is that of `model.device`; its `dtype` that of `model.dtype`, unless the quantization's
    kernels know only another. Raises ModelRefused with the reason.
    """
    device = pick_device(settings.device)
    dtype = pick_dtype(settings.dtype, device)
    path = Path(directory)
    if path.exists() and not (path / "config.json").is_file():
        raise ModelRefused(f'model "{directory}" has no config.json: give a directory that save_pretrained wrote')
    quiet()
    try:
        check_code(path, settings.trust_remote_code)
        check_weights(path)
    except Untrusted as error:
        raise ModelRefused(f'model "{directory}" is not loaded: {error}') from None
    try:
        config = read_config(directory, settings.trust_remote_code)
        stored = quantization.method_of(config)
        if stored is not None and settings.quantize:
            method = stored.get("quant_method")
            raise quantization.CannotQuantize(f'it is already quantized ({method}): leave model.quantize = ""')
        wanted = quantization.make_config(settings.quantize, device, dtype) if settings.quantize else None
        if stored is not None:
            quantization.check_checkpoint(stored, device)
        elif settings.quantize:
            quantization.check_experts(config, settings.quantize, dtype, settings.trust_remote_code)
        with frugal():
            # Tensors of other shapes are told as those that lack, instead of in a table in the log.
            model, loaded = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=settings.trust_remote_code,
                attn_implementation=implementation,
                device_map={"": device} if device.type == "cuda" else None,
                quantization_config=wanted,
            )
    except Exception as error:
        raise refusal_of(error, directory, implementation) from error
    _check_tensors(model, loaded, directory, settings.quantize)
    quantization.settle(model, model.dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    drop_cached(path.glob("*.safetensors"))
    return model.eval().requires_grad_(False)


def refusal_of(error: Exception, path: str, implementation: str) -> ModelRefused:
    """Return the refusal of a model that transformers cannot make with the attention `implementation`."""
    if isinstance(error, ModelRefused):
        return error
    reason = logs.first_line(error)
    if isinstance(error, KeyError) and error.args == (implementation,):
        reason = "its class knows attention of its own alone, none that keeps keys and values in pages"
    return ModelRefused(f'model "{path}" cannot be loaded: {reason}')


def _check_tensors(model: PreTrainedModel, loaded: dict[str, Any], directory: str, quantize: str) -> None:
    """Check that a checkpoint gave every weight, by transformers' `loaded`. Raises ModelRefused.

    transformers itself gives random numbers to those that lack. Tensors that the model has no place for are told.
    """
    refused = f'model "{directory}" cannot be served: its checkpoint'
    way_out = "its files are not whole, or of another model than its config.json: download both again"
    # While it quantizes, transformers does not look at shapes.
    packed = quantization.other_shapes(model) if quantize else []
    for name, shape, needed in sorted([*loaded["mismatched_keys"], *packed], key=str):
        other = f"has {name} of the shape {list(shape)}, its config.json needs {list(needed)}"
        raise ModelRefused(f"{refused} {other}: {way_out}")
    if missing := sorted(loaded["missing_keys"]):
        raise ModelRefused(f"{refused} has no {missing[0]} ({len(missing)} missing in all): {way_out}")
    if left := sorted(loaded["unexpected_keys"]):
        told = 'model "%s": its checkpoint has %d tensors that the model has no place for, as %s: they are not used'
        log.warning(told, directory, len(left), left[0])
    vocab_size, head = model.config.get_text_config().vocab_size, model.get_output_embeddings()
    for rows in (model.get_input_embeddings().weight.shape[0], getattr(head, "out_features", vocab_size)):
        if rows != vocab_size:
            raise ModelRefused(f"{refused} has {rows} rows for the {vocab_size} tokens of its config.json: {way_out}")


def drop_cached(files: Iterable[Path]) -> None:
    """Drop files from the system's page cache, unless this process has mapped them (as weights that are used in place).

    On a GPU that shares the box's memory, a checkpoint's pages are a second copy of the weights, which the system would
    give up only under pressure.
    """
    with contextlib.suppress(OSError):
        mapped = Path("/proc/self/maps").read_text()
        for file in files:
            if str(file.resolve()) not in mapped:
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def pick_device(setting: str) -> torch.device:
    """Return the device of `model.device`; "auto" is CUDA if there is one. Raises ModelRefused for a missing device."""
    if setting == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(setting)
        if device.type == "cuda":
            torch.cuda.get_device_properties(device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ModelRefused(f'model.device = "{setting}" is not there: {logs.first_line(error)}') from None
    return device


def pick_dtype(setting: str, device: torch.device) -> torch.dtype:
    """Return the dtype of `model.dtype`; "auto" is bfloat16 on CUDA and float32 on CPU."""
    if setting == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[setting]


def target_linears(model: nn.Module, targets: str | list[str]) -> list[str]:
    """Return the names of the linears that LoRA is applied to, as PEFT resolves `target_modules`.

    "all-linear" is every linear of the decoder but the language-model head. Raises ModelRefused when nothing matches.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    linears = [name for name, module in model.named_modules() if module is not head and quantization.is_linear(module)]
    if targets == "all-linear":
        return linears
    # Slow to import: it brings whatever quantization packages there are.
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    config = LoraConfig(target_modules=targets)
    found = [name for name in linears if check_target_module_exists(config, name)]
    if not found:
        raise ModelRefused(f'align.target_modules = {targets!r} matches no linear of the model; try "all-linear"')
    return found
