"""How fast models whose layers keep states decode, beside a Llama of about their size.

    python -m benchmarks.engine.states [--requests 16] [--rounds 5] [--output FILE] [--json]

Random-weight shapes of about 135 M weights: SmolLM2's Llama; Qwen3.5's, three layers of a gated delta rule for one of
attention; LFM2's, short convolutions and some attention. Engines in one process take turns, one thread each: forwards
of single tokens after 256 others, with the kernels that a start has picked. On a busy machine the processor's time is
what to compare. Then a chat of eight turns: how many tokens of the last prompt are computed, and the seconds until its
first token, beside those of the same prompt where nothing is kept.
"""

from __future__ import annotations

import benchmarks.support.prepared  # noqa: F401

# isort: split
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.support.command import DEVICE, finish, markdown, option, parse, say
from benchmarks.support.interleave import Spread, paired_ratio
from benchmarks.support.local_engine import LocalEngine
from benchmarks.support.machine_limits import report_header
from benchmarks.support.random_llama import SHAPES, config_of
from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import attention_over, attention_pass

CONTEXT, _PAGE, _ITERATIONS = 256, 16, 12
TURNS, _ASKED, _ANSWERED = 8, 48, 80
"""Turns of a chat, and tokens of each question and answer."""
_COMMON: dict[str, Any] = {
    "vocab_size": 49152, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 128, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    },
    "lfm2": {
        "hidden_size": 768, "intermediate_size": 2560, "num_hidden_layers": 14, "num_attention_heads": 12,
        "num_key_value_heads": 4, "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if layer in (2, 5, 8, 10, 12) else "conv" for layer in range(14)],
    },
}  # fmt: skip


def measure(options: Any) -> list[dict[str, Any]]:
    """Return a row for each shape."""
    torch.set_num_threads(1)
    took: dict[str, list[float]] = {}
    busy: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        engines = {name: _engine(Path(temporary) / name, name, options) for name in ("llama", *KINDS)}
        try:
            for turn in range(options.rounds + 1):
                for name, made in engines.items():
                    took_ms, busy_ms = _decode_ms(made, options.requests)
                    say(f"{name}: {took_ms:.1f} ms, {busy_ms:.1f} of the processor")
                    if turn:
                        took.setdefault(name, []).append(took_ms)
                        busy.setdefault(name, []).append(busy_ms)
            models = {name: made.engine.model for name, made in engines.items()}
            chats = {name: _chat(made) for name, made in engines.items()}
        finally:
            for made in engines.values():
                made.close()
    return [
        {
            "shape": name,
            "parameters": model.shape.parameters,
            "state_bytes": model.shape.state_bytes(model.dtype),
            "iteration_ms": Spread.of(took[name]).as_json(),
            "processor_ms": Spread.of(busy[name]).as_json(),
            "beside_llama": paired_ratio(took[name], took["llama"]).as_json(),
            "processor_beside_llama": paired_ratio(busy[name], busy["llama"]).as_json(),
            "chat": chats[name],
        }
        for name, model in models.items()
    ]


def _engine(folder: Path, name: str, options: Any) -> LocalEngine:
    config = config_of(SHAPES["135m"]) if name == "llama" else AutoConfig.for_model(name, **_COMMON, **KINDS[name])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    settings: dict[str, dict[str, Any]] = {
        "model": {"device": options.device, "threads": 1},
        "serving": {"max_sequences": options.requests, "prompt_lookup": False},
        "cache": {"memory_mb": 512},
        "align": {"enabled": False},
    }
    return LocalEngine(folder, settings)


def _decode_ms(made: LocalEngine, requests: int) -> tuple[float, float]:
    """Return the milliseconds of a forward of decodes after `CONTEXT` tokens each, and those of the processor."""
    model, pages = made.engine.model, CONTEXT // _PAGE + 1
    kv = model.new_kv(requests * pages + 1, _PAGE, requests)
    tables = [np.arange(pages) + number * pages + 1 for number in range(requests)]
    times: list[tuple[float, float]] = []
    with torch.inference_mode():
        for step in range(_ITERATIONS):
            at = CONTEXT + step % _PAGE
            began = time.perf_counter(), time.process_time()
            segments = [
                Segment([7], at, table, position=at, samples=True, states=(number, number))
                for number, table in enumerate(tables, 1)
            ]
            batch = pack(segments, kv, model.device)
            with attention_pass(attention_over(batch, kv, made.engine.runner.report([])["paths"]["decode"])):
                model.forward(batch.input_ids, batch.position_ids, batch.logit_rows).sum().item()
            times.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    took, busy = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    return took, busy


def _chat(made: LocalEngine) -> dict[str, float]:
    """Return of the last turn of a chat its tokens, those that are computed, and the seconds to its first token; and
    those of a prompt as long that is new."""
    random, text, answers = np.random.default_rng(0), list[int](), []
    for turn in range(TURNS):
        text += random.integers(3, made.vocab, _ASKED).tolist()
        made.ask(f"turn {turn}", text, _ANSWERED)
        answers.append(made.wait()[f"turn {turn}"])
        asked, text = len(text), [*text, *(event.token_id for event in made.recorder.tokens[f"turn {turn}"])]
    made.ask("alone", random.integers(3, made.vocab, asked).tolist(), 1)
    last, alone = answers[-1], made.wait()["alone"]
    return {
        "tokens": asked,
        "computed": asked - (last.finish.cached_tokens if last.finish else 0),
        "ttft_s": last.ttft_s or 0.0,
        "alone_ttft_s": alone.ttft_s or 0.0,
    }


def main() -> None:
    """Run the benchmark."""
    options = parse(
        __doc__,
        DEVICE,
        option("--requests", "answers that are decoded together", 16, 4),
        option("--rounds", "measured rounds", 5, 1),
        quick="few requests, one round",
    )
    rows = measure(options)
    heads = ["shape", "weights", "state", "ms an iteration", "times the Llama's", "ms of the processor", "times"]
    heads += ["turn 8: tokens, computed", "s to the first token, alone"]
    lines = [
        [
            row["shape"],
            f"{row['parameters'] / 1e6:.0f} M",
            f"{row['state_bytes'] / 2**10:,.0f} KiB",
            Spread.read(row["iteration_ms"]).text(1),
            Spread.read(row["beside_llama"]).text(),
            Spread.read(row["processor_ms"]).text(1),
            Spread.read(row["processor_beside_llama"]).text(),
            "{tokens}, {computed}".format(**row["chat"]),
            "{ttft_s:.2f}, {alone_ttft_s:.2f}".format(**row["chat"]),
        ]
        for row in rows
    ]
    report = {**report_header(options.device), "requests": options.requests, "rows": rows}
    finish(options, report, "\n".join(markdown(heads, lines)))


if __name__ == "__main__":
    main()
