"""A Llama's weights as a GGUF file, so that llama.cpp runs the same model as the other sides.

A file without a vocabulary has no tokenizer: prompts are given as token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(
    model_dir: Path,
    path: Path,
    half: bool = False,
    blocks: str = "",
    vocabulary: Sequence[str] = (),
    rope_factors: np.ndarray | None = None,
    numbers: Mapping[str, float] | None = None,
) -> Path:
    """Write the Llama of `model_dir` (config.json, model.safetensors in fp32 or fp16) to `path`, and return that.

    With `half` matrices are in fp16, with `blocks` (as "Q8_0") those of layers are in such, else in fp32. Embeddings
    that are tied in the model are tied in the file: it then has no output matrix. A `vocabulary` is of bytes, without
    merges, and begins with three special tokens: padding, beginning, end. `numbers` are further ones by their keys.
    """
    import gguf

    config = json.loads((model_dir / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2" if vocabulary else "none")
    if vocabulary:
        control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(vocabulary)
        writer.add_token_scores([0.0] * len(vocabulary))
        writer.add_token_types([control] * 3 + [normal] * (len(vocabulary) - 3))
        writer.add_pad_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    for key, value in (numbers or {}).items():
        writer.add_float32(key, value)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if half else gguf.LlamaFileType.ALL_F32)
    for name, tensor in load_file(model_dir / "model.safetensors").items():
        if name.endswith("q_proj.weight"):
            tensor = interleaved(tensor, heads)
        elif name.endswith("k_proj.weight"):
            tensor = interleaved(tensor, kv_heads)
        if blocks and tensor.ndim == 2 and name.startswith("model.layers."):
            kind = gguf.GGMLQuantizationType[blocks]
            writer.add_tensor(gguf_name(name), gguf.quantize(tensor.astype(np.float32), kind), raw_dtype=kind)
            continue
        dtype = np.float16 if half and tensor.ndim == 2 else np.float32
        writer.add_tensor(gguf_name(name), tensor.astype(dtype, copy=False))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rope_theta(config: dict) -> float:
    """Return the base of the rotary embedding from either generation of transformers' configs."""
    return float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])


def gguf_name(name: str) -> str:
    """Return a tensor's name in GGUF. Raises KeyError for tensors that a Llama does not have."""
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_NAMES[part.removesuffix('.weight')]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of a query or key matrix [heads * head_dim, in] in llama.cpp's order of rotation.

    transformers rotates row i of a head with row i + head_dim / 2, llama.cpp rows 2 i and 2 i + 1.
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
