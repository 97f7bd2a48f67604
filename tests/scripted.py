"""A tiny model with another's chat template that says what a script has, token by token: its weights say which follows.

Where an answer to a tool is in the prompt, it says the second script.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForCausalLM

from tests.models import byte_tokenizer

QWEN_MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
RESULT = "<tool_response>"
"""The token by which the model knows that a tool has answered."""


def call(name: str, **arguments: object) -> str:
    """A call as Qwen's models write it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def pieces(text: str, size: int = 5) -> list[str]:
    """A text in pieces that are all different, for tokens of the model. A tag is in one, so that no other is cut."""
    found: list[str] = []
    while text:
        tag = re.match(r"\n*<[^>]*>", text)
        length = tag.end() if tag else min(size, *(match.start() + 1 for match in re.finditer(r"\n*<", text[1:])), 99)
        while text[:length] in found and length < len(text):
            length += 1
        assert text[:length] not in found, "the script ends as it went on before: end it otherwise"
        found.append(text[:length])
        text = text[length:]
    return found


def save_scripted(
    directory: Path, template: str, script: str, after_tools: str = "Done.", context: int = 16384, size: int = 5
) -> Path:
    """Write a model that answers with `script`, or with `after_tools`, and then ends; returns its directory."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": list(QWEN_MARKS)})
    tokenizer.eos_token = "<|im_end|>"
    chains: Sequence[list[str]] = [pieces(script, size)]
    taken = set(chains[0])
    second = [piece for piece in pieces(after_tools, size + 1)]
    assert not taken & set(second), "the two scripts share a piece: choose other words"
    words = [*dict.fromkeys([RESULT, *chains[0], *second])]
    # Only what the model says is split so: prompts are read byte by byte.
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    ids = tokenizer.convert_tokens_to_ids
    size_of = len(tokenizer)
    last = ids("Ċ")
    const, seen = size_of, size_of + 1
    hidden = size_of + 2 + (-(size_of + 2)) % 8
    config = AutoConfig.for_model(
        "llama",
        vocab_size=size_of,
        hidden_size=hidden,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        rope_theta=1e12,
        max_position_embeddings=context,
        eos_token_id=ids("<|im_end|>"),
        bos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        embedding, head, layer = model.model.embed_tokens.weight, model.lm_head.weight, model.model.layers[0]
        embedding[torch.arange(size_of), torch.arange(size_of)] = 1.0
        embedding[:, const] = 1.0
        attention = layer.self_attn
        attention.q_proj.weight[15, const] = 1.0
        attention.k_proj.weight[15, ids(RESULT)] = 10.0
        attention.v_proj.weight[0, ids(RESULT)] = 1.0
        attention.o_proj.weight[seen, 0] = 0.1
        end = ids("<|im_end|>")
        for chain in (chains[0], second):
            states = [last, *map(ids, chain)]
            for state, following in zip(
                states[(chain is second) :], [*states[(chain is second) + 1 :], end], strict=True
            ):
                head[following, state] = 10.0
        # At the prompt's end, the second script's beginning is likelier where a tool has answered.
        head[ids(second[0]), last] = 6.0
        head[ids(second[0]), seen] = 7.0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
