"""Serving speed: edged's engine beside transformers' continuous batching, its static-batch `generate`, and llama.cpp.

Owns the sides and the job they all do: some requests that arrive at once, each with a prompt of random tokens and an
answer of a fixed length, greedily decoded. Each side runs in a process of its own (see
`benchmarks.support.interleave`).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.interleave import Conversation

EDGED, ADAPTED = "edged", "edged with an adapter"
CONTINUOUS, STATIC, LLAMA_CPP = "transformers continuous batching", "transformers generate", "llama.cpp"
PEERS = (CONTINUOUS, STATIC, LLAMA_CPP)
Prompts = list[list[int]]
Answers = list[list[int]]
_LONGEST_WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Job:
    """What every side is told at its start.

    `adapters`: a folder for edged's adapter. `gguf` and `gguf_half` (fp16): llama.cpp's file of the model.
    """

    model: str
    adapters: str
    gguf: str
    gguf_half: bool
    device: str
    dtype: str
    vocab: int
    requests: int
    prompt_tokens: int
    output_tokens: int


def make_prompts(job: Job, seed: int) -> Prompts:
    """New prompts for every round, so that no side can reuse what an earlier round cached."""
    generator = np.random.default_rng(seed)
    ids: Prompts = generator.integers(3, job.vocab, (job.requests, job.prompt_tokens)).tolist()
    return ids


def start_edged(job: Job, adapter: str | None = None) -> Callable[[Prompts], Answers]:
    """edged's engine in process, with the settings that a daemon has by default; `adapter` gets random weights."""
    from benchmarks.adapters import write_adapters
    from edged.engine.engine import Engine
    from edged.engine.request import Event, FinishEvent, Request, Sampling, TokenEvent
    from edged.settings.load import Settings

    settings = Settings.model_validate({"model": {"device": job.device, "dtype": job.dtype}})
    tokens: dict[str, list[int]] = {}
    problems: list[str] = []
    done = threading.Semaphore(0)

    def deliver(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, TokenEvent):
                if event.version != bool(adapter):
                    problems.append(f"a token of version {event.version}, with adapter {adapter}")
                tokens[event.request_id].append(event.token_id)
            elif isinstance(event, FinishEvent):
                if event.reason != "length":
                    problems.append(f"{event.reason} {event.error}".strip())
                done.release()

    folder = Path(job.adapters) if adapter else None
    if adapter:
        blank = Engine.build(settings, Path(job.model), deliver, lambda _records: None, folder)
        write_adapters(blank.adapter_files, [adapter])
        del blank
    engine = Engine.build(settings, Path(job.model), deliver, lambda _records: None, folder)
    engine.start()
    sampling = Sampling(max_tokens=job.output_tokens, temperature=0.0, ignore_eos=True)

    def answer(prompts: Prompts) -> Answers:
        tokens.clear()
        tokens.update({str(index): [] for index in range(len(prompts))})
        for index, prompt in enumerate(prompts):
            engine.submit(Request(str(index), tuple(prompt), sampling, adapter))
        for _ in prompts:
            if not done.acquire(timeout=_LONGEST_WAIT_S) or problems:
                raise RuntimeError(f"edged's engine: {engine.error or problems or 'no answer'}")
        return [tokens[str(index)] for index in range(len(prompts))]

    return answer


def start_continuous(job: Job) -> Callable[[Prompts], Answers]:
    """`generate_batch` with a manager that stays up between rounds, its cache sized for the job."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = _load(job)
    greedy = GenerationConfig(max_new_tokens=job.output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Prefixes are never shared here: the prompts are random. All prompts may be computed in one pass, which is fastest.
    batching = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=2 * job.requests * -(-(job.prompt_tokens + job.output_tokens) // 32),
        max_batch_tokens=max(256, job.requests * job.prompt_tokens),
    )

    def answer(prompts: Prompts) -> Answers:
        outputs = model.generate_batch(
            prompts, generation_config=greedy, continuous_batching_config=batching, persistent_manager=True
        )
        return [list(output.generated_tokens) for output in outputs.values()]

    return answer


def start_static(job: Job) -> Callable[[Prompts], Answers]:
    """`generate` on the whole batch: all prompts have one length, so that nothing is padded."""
    from transformers import GenerationConfig

    model = _load(job)
    greedy = GenerationConfig(
        max_new_tokens=job.output_tokens, min_new_tokens=job.output_tokens, do_sample=False, pad_token_id=0
    )

    @torch.inference_mode()
    def answer(prompts: Prompts) -> Answers:
        ids = torch.tensor(prompts, device=model.device)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
        answers: Answers = output[:, ids.shape[1] :].tolist()
        return answers

    return answer


def start_llama_cpp(job: Job) -> Callable[[Prompts], Answers]:
    """llama.cpp through its Python binding, which answers one request after the other; all cores, or the whole GPU."""
    import llama_cpp

    # Keys and values are of the weights' precision: fp16 beside fp32 would be another computation.
    precision = llama_cpp.GGML_TYPE_F16 if job.gguf_half else llama_cpp.GGML_TYPE_F32
    threads = len(os.sched_getaffinity(0))
    llama = llama_cpp.Llama(
        job.gguf,
        n_ctx=job.prompt_tokens + job.output_tokens,
        n_batch=job.prompt_tokens,
        n_ubatch=job.prompt_tokens,
        n_threads=threads,
        n_threads_batch=threads,
        n_gpu_layers=-1 if job.device.startswith("cuda") else 0,
        type_k=precision,
        type_v=precision,
        verbose=False,
    )

    def answer(prompts: Prompts) -> Answers:
        return [list(islice(llama.generate(prompt, temp=0.0), job.output_tokens)) for prompt in prompts]

    return answer


def _load(job: Job) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        job.model,
        dtype=getattr(torch, job.dtype),
        attn_implementation="sdpa",
        trust_remote_code=False,
        local_files_only=True,
    )
    return model.to(job.device).eval()


_START: dict[str, Callable[[Job], Callable[[Prompts], Answers]]] = {
    EDGED: start_edged,
    ADAPTED: lambda job: start_edged(job, "user"),
    CONTINUOUS: start_continuous,
    STATIC: start_static,
    LLAMA_CPP: start_llama_cpp,
}


def side_arguments(name: str, job: Job) -> list[str]:
    """Command-line arguments of this module that make a process the side `name`."""
    return [name, json.dumps(asdict(job))]


def main(arguments: list[str]) -> None:
    """Be one side: each question `{"seed": N}` is a round."""
    name, job = arguments[0], Job(**json.loads(arguments[1]))
    work = _START[name](job)

    conversation = Conversation()
    while True:
        prompts = make_prompts(job, conversation.question()["seed"])
        started = time.perf_counter()
        outputs = work(prompts)
        seconds = time.perf_counter() - started
        short = [len(output) for output in outputs if len(output) != job.output_tokens]
        if short or len(outputs) != job.requests:
            raise RuntimeError(f"{name}: {len(outputs)} answers, of wrong lengths: {short}")
        rate = job.requests * job.output_tokens / seconds
        conversation.answer({"seconds": seconds, "output_tokens_per_s": rate, "ids": outputs})


if __name__ == "__main__":
    main(sys.argv[1:])
