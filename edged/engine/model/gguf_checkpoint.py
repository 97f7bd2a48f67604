"""A GGUF file as a checkpoint: read by transformers' own reader, and held against what the file says.

transformers leaves out what it does not know without a word, such as the scaled positions of Llama 3.1. So each number
of the file must be read, found again in the configuration, or known to change nothing; and all weights must be there.
"""

import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from gguf import GGMLQuantizationType, GGUFReader
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from edged.engine.model.loading import ModelRefused, refusal_of
from edged.models.gguf import metadata_of, plain_checkpoint

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FOUND_AGAIN = {
    **dict.fromkeys(("attention.key_length", "attention.value_length"), "head_dim"),
    **{name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")},
    **{"attention.sliding_window": "sliding_window", "expert_feed_forward_length": "moe_intermediate_size"},
}
"""Numbers that transformers' reader leaves out, and the names of those that its configuration has anyway."""
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
"""Ways to split text that are GPT-2's, with each digit alone (llama.cpp's `llama-vocab.cpp`)."""
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Ways to split text that take a word which is a token as it is, without merges, as llama.cpp does."""
_SCALING = {f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "finetuned")}
"""What is read of how positions are scaled."""
_LARGE_GEMMAS = (46, 62)
"""Layers of Gemma 2 and 3 of 27B, whose scores are scaled by hidden size over heads; no number of a file says it."""
_MEMORY = 1.3
"""Times the checkpoint's bytes that the conversion has in memory at its peak; measured were 1.1, without the file's."""
_ROPE_FACTORS = "rope_freqs.weight"


def convert(file: Path, folder: Path) -> dict[str, Any]:
    """Write a GGUF file's model and tokenizer to a new `folder`, as `save_pretrained` does; it is whole or not there.

    Blocks become bfloat16; a file of floats keeps its type. Returns the class, dtype, bytes and types of blocks. Raises
    ModelRefused where not all of the file would be understood, or memory or disk is short, and OSError.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelRefused(f'"{folder}" is there already: name a new folder, or remove it')
    said, reader = _opened(file)
    types = {GGMLQuantizationType(tensor.tensor_type).name for tensor in reader.tensors}
    floats = [_FLOATS[name] for name in ("BF16", "F16", "F32") if name in types]
    # Norms are in float32 whatever the others are.
    dtype = floats[0] if types <= _FLOATS.keys() else torch.bfloat16
    count = sum(int(tensor.n_elements) for tensor in reader.tensors if tensor.name != _ROPE_FACTORS)
    size = count * dtype.itemsize
    # transformers stacks experts in float32.
    held = count * 4 if any("_exps." in tensor.name for tensor in reader.tensors) else size
    parent = next(path for path in folder.absolute().parents if path.exists())
    for what, there, needed in (
        ("memory", psutil.virtual_memory().available, int(_MEMORY * held)),
        ("disk", shutil.disk_usage(parent).free, size + (64 << 20)),
    ):
        if there < needed:
            lack = f"{needed / 2**30:.1f} GiB of {what} are needed and {there / 2**30:.1f} GiB are free"
            raise ModelRefused(f'"{file}" cannot be converted: {lack}; do it on a larger machine and copy the folder')
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        # Alone in a folder: transformers would take a tokenizer that lies beside the file.
        alone, made = Path(scratch) / "file", Path(scratch) / "made"
        alone.mkdir()
        (alone / file.name).symlink_to(file.absolute())
        model, tokenizer = _read(alone / file.name, file, said, reader, dtype, count)
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        for path in made.iterdir():
            path.chmod(0o644)
        made.rename(folder)
    about = {"class": type(model).__name__, "dtype": str(dtype).removeprefix("torch.")}
    return {**about, "bytes": size, "blocks": sorted(types)}


def _opened(file: Path) -> tuple[dict[str, Any], GGUFReader]:
    """Return the metadata and the reader of a file. Raises ModelRefused for a part of several, or no whole file."""
    try:
        said = metadata_of(file)
        parts = int(said.get("split.count", 0))
        reader = None if parts > 1 else GGUFReader(file)
    except (ValueError, LookupError, struct.error) as error:
        raise ModelRefused(f'"{file}" is no whole GGUF file ({error}): download it again') from None
    if reader is None:
        raise _refused(file, said, f"it is one of {parts} parts: join them by llama.cpp's gguf-split")
    return said, reader


def _read(
    alone: Path, file: Path, said: dict[str, Any], reader: GGUFReader, dtype: torch.dtype, count: int
) -> tuple[Any, Any]:
    """Return the model and the tokenizer of the file, which is `alone` in a folder. Raises ModelRefused."""
    source = {"pretrained_model_name_or_path": str(alone.parent), "gguf_file": alone.name}
    try:
        config = AutoConfig.from_pretrained(**source)
        _demand_understood(file, said, config)
        _scale_positions(file, said, config, reader)
        tokenizer = AutoTokenizer.from_pretrained(**source)
        split, backend = said.get("tokenizer.ggml.pre"), tokenizer.backend_tokenizer
        if split in _DIGITS_APART:
            backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
        if split in _WHOLE_WORDS:
            backend.model.ignore_merges = True
        loaded, report = AutoModelForCausalLM.from_pretrained(
            **source, config=config, dtype=dtype, output_loading_info=True
        )
    except Exception as error:  # transformers raises ValueError, KeyError, TypeError, ... here
        raise refusal_of(error, str(file), "") from error
    # Tied ones are one.
    weights = sum(weight.numel() for weight in {*loaded.state_dict(keep_vars=True).values()})
    if report["missing_keys"] or report["mismatched_keys"] or weights != count:
        raise _refused(file, said, f"transformers reads {weights} of its {count} numbers")
    # Beside the text's end llama.cpp knows that of a turn.
    ends = [said.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    loaded.generation_config.eos_token_id = [end for end in dict.fromkeys(ends) if end is not None] or None
    return _without_quantizer(loaded), tokenizer


def _refused(file: Path, said: dict[str, Any], reason: str) -> ModelRefused:
    return ModelRefused(f'"{file}" cannot be converted: {reason}; or take {plain_checkpoint(said)} as safetensors')


def _demand_understood(file: Path, said: dict[str, Any], config: Any) -> None:
    """Raise ModelRefused for a number of the file, or a way to split text, that transformers leaves out.

    What llama.cpp knows by the model's size, or transformers reads for other models alone, is set in `config`.
    """
    kind = said["general.architecture"]
    spaced = said.get("tokenizer.ggml.add_space_prefix", True) or kind.startswith("gemma")
    if said.get("tokenizer.ggml.model") == "llama" and not spaced:
        raise _refused(file, said, "its tokenizer puts no space before a text, and transformers' does")
    split = said.get("tokenizer.ggml.pre", "default")
    known = (*GGUF_PRE_TOKENIZER_SPLITS, *_DIGITS_APART, "gpt-2")
    if said.get("tokenizer.ggml.model") == "gpt2" and split not in known:
        raise _refused(file, said, f'its tokenizer splits text by "{split}", which transformers does not know')
    scaling = {key for key, value in _numbers(said, kind) if key.startswith("rope.scaling.") and value != "none"}
    if strange := scaling.difference(() if kind in GGUF_CONFIG_ARCHS else _SCALING):
        raise _refused(file, said, f'transformers does not read its "{min(strange)}"')
    if kind in GGUF_CONFIG_ARCHS:
        return
    # Without it transformers leaves a Llama's rows in llama.cpp's order.
    if f"{kind}.attention.head_count_kv" not in said:
        raise _refused(file, said, 'it has no single "attention.head_count_kv"')
    if config.model_type == "mistral":
        config.sliding_window = None
    if kind in ("gemma2", "gemma3") and config.num_hidden_layers in _LARGE_GEMMAS:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    if hasattr(config, "head_dim"):
        config.head_dim = said.get(f"{kind}.attention.key_length", config.head_dim)
    if kind == "phi3":
        config.sliding_window = said.get("phi3.attention.sliding_window")
    beside = (getattr(config, "rope_parameters", None) or {}).get("sliding_attention", {})
    named = {kind, kind.replace("-", "_"), kind.replace("moe", "_moe")}
    read = {key for each in named for key, name in GGUF_TO_TRANSFORMERS_MAPPING["config"].get(each, {}).items() if name}
    for key, value in _numbers(said, kind):
        if value == _width(config) if key == "rope.dimension_count" else key in read or key in _SCALING:
            continue
        if key == "rope.freq_base_swa" and value == beside.get("rope_theta"):
            continue
        name = _FOUND_AGAIN.get(key, "")
        if (_head_dim(config) if name == "head_dim" else getattr(config, name, None)) != value:
            raise _refused(file, said, f'transformers does not read its "{key}" of {value}')


def _numbers(said: dict[str, Any], kind: str) -> Iterator[tuple[str, Any]]:
    for key, value in said.items():
        if key.startswith(f"{kind}."):
            yield key.removeprefix(f"{kind}."), value


def _width(config: Any) -> int:
    """Numbers of a head that positions turn."""
    share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor") or 1.0
    return int(_head_dim(config) * share)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _scale_positions(file: Path, said: dict[str, Any], config: Any, reader: GGUFReader) -> None:
    """Take what the file says of positions beyond their base into `config`. Raises ModelRefused where it is unknown."""
    kind = said["general.architecture"]
    if kind in GGUF_CONFIG_ARCHS:
        return
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    scaling = said.get(f"{kind}.rope.scaling.type", "none")
    if scaling == "none" and f"{kind}.rope.scaling.factor" in said:
        raise _refused(file, said, "its positions are scaled, and it does not say how")
    if scaling in ("linear", "yarn"):
        rope |= {"rope_type": scaling, "factor": said[f"{kind}.rope.scaling.factor"]}
        if original := said.get(f"{kind}.rope.scaling.original_context_length"):
            rope["original_max_position_embeddings"] = original
    elif scaling != "none":
        raise _refused(file, said, f'its positions are scaled by "{scaling}"')
    found = next((tensor for tensor in reader.tensors if tensor.name == _ROPE_FACTORS), None)
    if found is None:
        return
    factors = torch.from_numpy(found.data.copy()).double()
    plain, _ = ROPE_INIT_FUNCTIONS["linear"](_with(config, rope_type="linear", factor=1.0), torch.device("cpu"))
    llama3 = {"rope_type": "llama3", "factor": round(factors.max().item(), 3), "original_max_position_embeddings": 8192}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](_with(config, **llama3), torch.device("cpu"))
    if factors.shape != plain.shape or not torch.allclose(plain / scaled, factors.float(), rtol=1e-3):
        raise _refused(file, said, f"its {_ROPE_FACTORS} are not those of Llama 3")
    rope |= llama3


def _with(config: Any, **rope: Any) -> Any:
    """Return the configuration with other positions."""
    changed = type(config).from_dict(config.to_dict())
    changed.rope_parameters = {**config.rope_parameters, **rope}
    return changed


def _without_quantizer(loaded: Any) -> Any:
    """Return the model without the mark of its quantizer, with which it cannot be saved; its weights are not copied."""
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model
