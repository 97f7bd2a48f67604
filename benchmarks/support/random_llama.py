"""Random-weight Llamas for measuring speed: the cost of a forward does not depend on the weights' values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int


SHAPES = {
    "135m": Shape(hidden=576, layers=30, heads=9, kv_heads=3, intermediate=1536, vocab=49152),
    "4m": Shape(hidden=192, layers=4, heads=6, kv_heads=2, intermediate=512, vocab=8192),
    "3b": Shape(hidden=3072, layers=28, heads=24, kv_heads=8, intermediate=8192, vocab=128256),
}
"""Shapes by name: 135m is SmolLM2-135M's, 3b is Llama-3.2-3B's; 4m is for trying a benchmark out."""
MAX_POSITIONS = 4096


def device_dtype(device: str) -> str:
    """Return the dtype of computation: bfloat16 on CUDA, float32 elsewhere, as an engine chooses by default."""
    return "bfloat16" if device.startswith("cuda") else "float32"


def config_of(shape: Shape) -> LlamaConfig:
    """Return the model's configuration. It has no EOS token, so that every answer has the requested length."""
    return LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def write_random_llama(directory: Path, shape: Shape, dtype: str = "float32", seed: int = 0) -> Path:
    """Write config and weights of `dtype` to `directory` as save_pretrained does, and return it."""
    torch.manual_seed(seed)
    # A GPU draws billions of numbers in a second, processors in a minute.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=getattr(torch, dtype))
    model.save_pretrained(directory)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return directory


def load_llama(directory: str, dtype: str) -> Any:
    """Load the transformers model that the peers use, on the CPU."""
    return AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=getattr(torch, dtype),
        attn_implementation="sdpa",
        trust_remote_code=False,
        local_files_only=True,
    )


def write_tokenizer(directory: Path, texts: Iterable[str], vocab: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `vocab` tokens on `texts`, so that they tokenize to realistic lengths, and save
    it."""
    specials = ["<pad>", "<eos>"]
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=vocab, special_tokens=specials, initial_alphabet=alphabet, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=specials[0], eos_token=specials[1])
    fast.save_pretrained(directory)
    return fast
