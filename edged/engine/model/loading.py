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
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    GenerationConfig,
    PreTrainedModel,
)

from edged.engine.model import quantization
from edged.engine.model.packed_experts import StoredExperts, demand_packed, demand_shapes, quantizing
from edged.engine.model.stored_weights import stored_tensors_of
from edged.models.gguf import is_gguf
from edged.models.wrapper_names import TEXT_KEYS, text_name
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
_SAME = {
    **{"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2"},
    **{"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"},
}
"""Text decoders without a causal class -> those that they are where no token is an image: three positions are one."""
_OUTER = ("architectures", "dtype", "eos_token_id", "tie_word_embeddings")
"""What a wrapper's configuration says for its text decoder."""
_PLAIN = ("modules_to_not_convert", "llm_int8_skip_modules")
"""Where a `quantization_config` names modules that stay plain."""


class ModelRefused(ValueError):
    """The model cannot be served; the message says why and what to do."""


def read_config(path: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Read the configuration of a causal language model from a directory, a config.json or a GGUF file; return also the
    whole checkpoint's: of a wrapper with towers the first is its text decoder's, else both are one.

    Raises ModelRefused for one that cannot be read, of another kind of model, or with sizes that no model has.
    """
    try:
        file = {"gguf_file": Path(path).name} if is_gguf(Path(path)) else {}
        place = str(Path(path).parent) if file else path
        whole = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, **file)
        config = text_of(whole)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, TypeError, ... here
        reason = " ".join(str(error).split())
        raise ModelRefused(f'model "{path}" has no configuration that can be read: {reason}') from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(config, "auto_map", None):
        raise ModelRefused(
            f'model "{path}" cannot be served: {config.model_type} is no causal language model of '
            "transformers, and holds no text decoder that is one"
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
    return config, whole


def text_of(whole: Any) -> Any:
    """Return the configuration of the causal language model that a wrapper with towers holds, or the same one."""
    text = whole.get_text_config(decoder=True)
    if text is whole or type(whole) not in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return whole
    if same := _SAME.get(text.model_type):
        options = {name: value for name, value in text.to_dict().items() if name != "model_type"}
        rope = {name: value for name, value in (options.pop("rope_parameters") or {}).items() if "mrope" not in name}
        text = AutoConfig.for_model(same, rope_parameters=rope, **options)
        if same == "qwen3_moe":
            # Scores of a token's experts add up to 1 there, and by its name experts' matrices are turned while loading.
            text.norm_topk_prob, text.model_type = True, whole.model_type
    elif type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return whole
    for name in _OUTER:
        if (value := getattr(whole, name, None)) is not None:
            setattr(text, name, value)
    if (stored := getattr(whole, "quantization_config", None)) is not None:
        names = {name: list(map(text_name, stored[name])) for name in _PLAIN if stored.get(name)}
        text.quantization_config = {**stored, **names}
    return text


def name_in(whole: Any) -> str:
    """Return what a wrapper's own class calls its text decoder, with a dot behind; the wrapper takes no memory."""
    with torch.device("meta"):
        model = AutoModelForMultimodalLM.from_config(whole)
    text = model.config.get_text_config(decoder=True)
    return next(f"{name}." for name, module in model.named_modules() if getattr(module, "config", None) is text)


def load_pretrained(directory: str, settings: ModelSettings, implementation: str) -> tuple[PreTrainedModel, str]:
    """Load what `save_pretrained` wrote, quantized or to be quantized, with the attention `implementation`.

    Of a wrapper with towers it is the text decoder alone; what the wrapper calls it comes with it ("": it is no part).
    The model's `device` is that of `model.device`; its `dtype` that of `model.dtype`, unless the quantization's kernels
    know only another. Raises ModelRefused with the reason.
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
        config, whole = read_config(directory, settings.trust_remote_code)
        wrapper = "" if config is whole else name_in(whole)
        stored = quantization.method_of(config)
        packed = None if stored is None else quantization.packed_form(stored)
        short = stored is not None and quantization.dequantizes(stored)
        if stored is not None and not short and settings.quantize:
            method = stored.get("quant_method")
            raise quantization.CannotQuantize(f'it is already quantized ({method}): leave model.quantize = ""')
        own_code, wanted, plain, experts = settings.trust_remote_code, None, None, None
        banks: dict[str, tuple[int, int, int]] = {}
        if packed is not None:
            # Only for its checks of the device: the weights have their numbers already.
            quantization.make_config("int4", device, dtype)
            plain, _ = demand_packed(config, "", packed.method, dtype, own_code)
        elif settings.quantize:
            wanted, banks = quantizing(config, settings.quantize, device, dtype, own_code)
        elif stored is not None and not short:
            quantization.check_checkpoint(stored, device)
        source: dict[str, Any] = {"pretrained_model_name_or_path": directory}
        kind: Any = AutoModelForCausalLM
        if stored is not None and (packed is not None or short):
            config = quantization.without(config)
            if (whole_kind := MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)) is None:
                raise quantization.CannotQuantize("its class is in its own code: give the plain checkpoint")
            experts = StoredExperts(config, plain)
            tensors = stored_tensors_of(path, stored, experts.packs, dtype, device)
            experts.take(tensors)
            kind = experts.class_without(whole_kind)
            source = {"pretrained_model_name_or_path": None, "state_dict": tensors}
        if wrapper:
            # Its table of leftovers would have a line for each kind of tensor in the towers.
            logging.getLogger("transformers.modeling_utils").setLevel(logging.ERROR)
        with frugal():
            # Tensors of other shapes are told as those that lack, instead of in a table in the log.
            model, loaded = kind.from_pretrained(
                **source,
                config=config,
                key_mapping=TEXT_KEYS if wrapper else None,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=settings.trust_remote_code,
                attn_implementation=implementation,
                device_map={"": device} if device.type == "cuda" else None,
                quantization_config=wanted,
            )
        demand_shapes(model, banks)
        if experts is not None:
            experts.put(model, whole_kind)
    except Exception as error:
        raise refusal_of(error, directory, implementation) from error
    if "state_dict" in source:
        with contextlib.suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(directory)
    if packed is not None:
        model.config.quantization_config = stored
    _check_tensors(model, loaded, directory, settings.quantize, wrapper)
    quantization.settle(model, model.dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    drop_cached(path.glob("*.safetensors"))
    return model.eval().requires_grad_(False), wrapper


def refusal_of(error: Exception, path: str, implementation: str) -> ModelRefused:
    """Return the refusal of a model that transformers cannot make with the attention `implementation`."""
    if isinstance(error, ModelRefused):
        return error
    reason = logs.first_line(error)
    if isinstance(error, KeyError) and error.args == (implementation,):
        reason = "its class knows attention of its own alone, none that keeps keys and values in pages"
    return ModelRefused(f'model "{path}" cannot be loaded: {reason}')


def _check_tensors(model: PreTrainedModel, loaded: dict[str, Any], directory: str, quantize: str, wrapper: str) -> None:
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
    left = sorted(loaded["unexpected_keys"])
    if wrapper:
        inside = tuple(f"{model.base_model_prefix}.{name}." for name, _ in model.base_model.named_children())
        of_text = [name for name in left if name.startswith((*inside, "lm_head."))]
        told = 'model "%s": its text decoder is served alone, %d tensors of its towers are left out'
        log.info(told, directory, len(left) - len(of_text))
        left = of_text
    if left:
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
