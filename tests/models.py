"""Small random-weight models of real architectures, with a byte-level tokenizer, as `save_pretrained` writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

DEVICE = torch.device(os.environ.get("EDGED_TEST_DEVICE", "cpu"))
"""Where engines of tests compute; what they are compared with is computed on the CPU."""
SPECIALS = ["<pad>", "<s>", "</s>"]
VOCAB = len(SPECIALS) + 256
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 24, "query_pre_attn_scalar": 16},
    "gemma4_text": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
    "gpt_oss": {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "phi3": {},
}
READING: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    # Layer 4 reads layer 2, layers 3 and 5 read layer 1.
    "num_kv_shared_layers": 3,
    "attention_k_eq_v": False,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 259,
}
"""Changes that make Gemma 4's model one whose last layers read the keys and values of earlier ones, as E2B."""
STATEFUL: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 16, "ssm_state_size": 16},
    },
    "falcon_h1": {
        **{"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 1},
        **{"mamba_d_head": 16, "mamba_chunk_size": 16},
    },
}
"""Models whose layers keep states: a convolution, a gated delta rule, Mamba-2, and Mamba-2 beside attention."""


def tiny_config(kind: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of a three-layer model of `kind` (a transformers model type)."""
    return AutoConfig.for_model(kind, **{**_SHAPE, **(ARCHITECTURES | STATEFUL).get(kind, {}), **changes})


def tiny_model(kind: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random-weight fp32 model whose next-token distributions are far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.12, generator=generator)
    return model.eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that any text round-trips and multi-byte characters span tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(SPECIALS + alphabet)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tiny(directory: Path, kind: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Write model and tokenizer to `directory` and return it."""
    tiny_model(kind, seed, **changes).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory
