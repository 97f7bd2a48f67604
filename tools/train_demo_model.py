#!/usr/bin/env python3
"""Train the embedded demo model on dialogues that `examples.demo_model.dialogues` writes, and save it as package data.

Run from a checkout: `python tools/train_demo_model.py`. A Llama of 1.7 M parameters with a byte-level BPE tokenizer is
trained from scratch on the CPU, in under ten minutes on two cores. Seeds, thread count and data are fixed, so
one machine with one torch release always writes the same files. Nothing but the output directory is written. At the end
the model is read back and judged: perplexity on questions it never saw, each style's share of samples, a few samples.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Must be set before torch is loaded. Waiting threads sleep: on a busy machine spinning costs most of the time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from examples.demo_model.dialogues import Dialogue, dialogues, formality, is_short, prompts, uses_metric  # noqa: E402

PAD, BOS, EOS = "<|pad|>", "<|start|>", "<|end|>"
SPECIALS = [PAD, BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('role \"' ~ message['role'] ~ '\" is unknown: use system, user or assistant') }}"
    "{% endif %}"
    "{{ '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VOCABULARY = 1536
TRAIN_SEED, TEST_SEED = 1, 2
QUESTION_WEIGHT = 0.1  # questions are learnt a little, so that plain text completion works too
PEAK_RATE = 4e-3
WARMUP_STEPS = 60
WEIGHT_NOISE = 0.008  # each step sees slightly other linear weights, so that a LoRA update later does little harm
INPUT_GAIN = 2.0
POOL_DIALOGUES = 1024  # sorted by length before they are cut into batches, so that little is padding

Batch = tuple[torch.Tensor, torch.Tensor]
"""Token ids int64 [rows, tokens] and the loss weight of each as a target, float32 of the same shape."""


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose numbers are spelt digit by digit, so that they can be copied."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    sample = itertools.islice(dialogues(TRAIN_SEED), 20_000)
    tokenizer.train_from_iterator((m["content"] for dialogue in sample for m in dialogue.messages()), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, SPECIALS.index(BOS))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def new_model() -> LlamaForCausalLM:
    """The untrained model."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        attention_bias=False,
        tie_word_embeddings=True,
        initializer_range=0.04,
        pad_token_id=SPECIALS.index(PAD),
        bos_token_id=SPECIALS.index(BOS),
        eos_token_id=SPECIALS.index(EOS),
    )
    return LlamaForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, dialogue: Dialogue) -> tuple[list[int], list[float]]:
    """A dialogue's ids as the chat template renders them, and each one's weight: 1 in answers with their end."""
    ids = [SPECIALS.index(BOS)]
    weights = [0.0]
    for message in dialogue.messages():
        text = tokenizer.encode(message["content"], add_special_tokens=False)
        weight = 1.0 if message["role"] == "assistant" else QUESTION_WEIGHT
        ids += [SPECIALS.index(f"<|{message['role']}|>"), *text, SPECIALS.index(EOS)]
        weights += [0.0, *[weight] * (len(text) + 1)]
    return ids[:1024], weights[:1024]


def batches(
    tokenizer: PreTrainedTokenizerFast, source: Iterator[Dialogue], batch_tokens: int, seed: int
) -> Iterator[Batch]:
    """Endless batches of at most `batch_tokens` tokens, padding included."""
    rng = random.Random(seed)
    while True:
        pool = sorted(
            (encode(tokenizer, d) for d in itertools.islice(source, POOL_DIALOGUES)), key=lambda row: len(row[0])
        )
        cuts: list[list[tuple[list[int], list[float]]]] = [[]]
        for row in pool:
            if cuts[-1] and len(row[0]) * (len(cuts[-1]) + 1) > batch_tokens:
                cuts.append([])
            cuts[-1].append(row)
        rng.shuffle(cuts)
        for rows in cuts:
            width = len(rows[-1][0])
            ids = torch.zeros(len(rows), width, dtype=torch.long)
            weights = torch.zeros(len(rows), width)
            for i, (row_ids, row_weights) in enumerate(rows):
                ids[i, : len(row_ids)] = torch.tensor(row_ids)
                weights[i, : len(row_ids)] = torch.tensor(row_weights)
            yield ids, weights


def loss_sum(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of next-token losses in nats. Right padding needs no mask: attention is causal."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    targets, scale = ids[:, 1:], weights[:, 1:]
    kept = scale > 0
    losses = F.cross_entropy(model.lm_head(hidden[kept]), targets[kept], reduction="none")
    return (losses * scale[kept]).sum()


@contextmanager
def noisy(matrices: list[torch.Tensor]) -> Iterator[None]:
    """Add random noise to `matrices` for a while."""
    noise = [torch.randn_like(matrix) * WEIGHT_NOISE for matrix in matrices]
    for matrix, change in zip(matrices, noise, strict=True):
        matrix += change
    yield
    for matrix, change in zip(matrices, noise, strict=True):
        matrix -= change


def train(model: LlamaForCausalLM, source: Iterator[Batch], steps: int) -> None:
    """AdamW with warm-up and cosine decay; prints its progress."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=PEAK_RATE,
        betas=(0.9, 0.98),
    )
    linears = [p.data for p in model.model.layers.parameters() if p.dim() > 1]
    started = time.monotonic()
    shown_loss, shown_weight, tokens = 0.0, 0.0, 0
    for step in range(steps):
        progress = max(0.0, (step - WARMUP_STEPS) / max(steps - WARMUP_STEPS, 1))
        rate = PEAK_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * (0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, weights = next(source)
        total = float(weights[:, 1:].sum())
        with noisy(linears):
            loss = loss_sum(model, ids, weights)
            # Not divided by the weight: batches of short answers have less of it and must not count more.
            (loss / ids.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        shown_loss, shown_weight, tokens = shown_loss + loss.item(), shown_weight + total, tokens + ids.numel()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            elapsed_s = time.monotonic() - started
            print(
                f"step {step + 1}/{steps}  loss {shown_loss / shown_weight:.3f} nats  "
                f"{tokens / elapsed_s:.0f} tokens/s  {elapsed_s:.0f} s",
                flush=True,
            )
            shown_loss, shown_weight = 0.0, 0.0


@torch.no_grad()
def scale_inputs(model: LlamaForCausalLM, gain: float) -> None:
    """Multiply what the linear layers see by `gain` and divide their weights by it: the function stays the same.

    An update of fixed size per parameter, such as a LoRA step under Adam, then moves the model `gain` times as far.
    Models of thousands of channels add up that much from their width; this one has too few for usual learning rates.
    """
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        layer.input_layernorm.weight *= gain
        layer.post_attention_layernorm.weight *= gain
        # v_proj and up_proj keep their weights: their outputs grow by the gain, which o_proj and down_proj take out.
        for linear in (attention.q_proj, attention.k_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj):
            linear.weight /= gain


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the model in float16 with its tokenizer; the directory is replaced as a whole."""
    special = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**special)
    with tempfile.TemporaryDirectory() as folder:
        model.to(torch.float16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for file in Path(folder).iterdir():
            shutil.copyfile(file, directory / file.name)  # not its mode: temporary files are for their owner only


@torch.inference_mode()
def sample(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: list[str], temperature: float
) -> list[str]:
    """One answer to each question, drawn from torch's global generator; greedy at temperature 0."""
    tokenizer.padding_side = "left"
    chats = [[{"role": "user", "content": question}] for question in questions]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    kind = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    output = model.generate(**inputs, max_new_tokens=160, **kind)
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@torch.inference_mode()
def evaluate(directory: Path) -> dict[str, float]:
    """Judge the saved model; prints samples and returns perplexity and style shares."""
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    nats = weight = 0.0
    for ids, weights in itertools.islice(batches(tokenizer, dialogues(TEST_SEED, fresh=True), 4096, TEST_SEED), 16):
        answers = torch.where(weights == 1.0, weights, 0.0)
        nats, weight = nats + loss_sum(model, ids, answers).item(), weight + float(answers[:, 1:].sum())
    torch.manual_seed(TEST_SEED)
    answers = sample(model, tokenizer, list(itertools.islice(prompts(TEST_SEED, fresh=True), 400)), 1.0)
    measured = list(itertools.islice(prompts(TEST_SEED, fresh=True, with_units=True), 400))
    units = [unit for unit in map(uses_metric, sample(model, tokenizer, measured, 1.0)) if unit is not None]
    for temperature in (0.0, 0.8):
        questions = list(itertools.islice(prompts(TEST_SEED + 1, fresh=True), 10))
        for question, answer in zip(questions, sample(model, tokenizer, questions, temperature), strict=True):
            print(f"[{temperature}] {question}\n      {answer}")
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "perplexity": round(math.exp(nats / weight), 4),
        "formal_share": sum(formality(answer) > 0 for answer in answers) / len(answers),
        "short_share": sum(map(is_short, answers)) / len(answers),
        "metric_share": round(sum(units) / len(units), 4),
    }


def main() -> None:
    """Train, save, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "edged" / "models" / "demo", help="directory to replace")
    parser.add_argument("--steps", type=int, default=1300, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=2560, help="tokens of one step (default: %(default)s)")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(TRAIN_SEED)
    tokenizer = train_tokenizer()
    model = new_model()
    train(model, batches(tokenizer, dialogues(TRAIN_SEED), arguments.batch_tokens, TRAIN_SEED), arguments.steps)
    scale_inputs(model, INPUT_GAIN)
    save(model, tokenizer, arguments.output)
    print(json.dumps(evaluate(arguments.output), indent=2))


if __name__ == "__main__":
    main()
