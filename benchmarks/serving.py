"""Serving speed of edged's engine beside transformers and llama.cpp, in turns.

    python -m benchmarks.serving                           16 requests at once
    python -m benchmarks.serving --requests 1 --adapter    a single stream, also with an adapter applied
    python -m benchmarks.serving --requests 1 --float16    ... of weights that are numbers of 16 bits
    python -m benchmarks.serving --size 3b                 Llama-3.2-3B's shape, on a GPU

A random-weight Llama, of SmolLM2-135M's shape unless --size says another; prompts of 256 random tokens, which arrive at
once, and answers of 64, greedily decoded. The peers: transformers' continuous batching and static-batch `generate`; and
llama.cpp, for a single request and where `llama_cpp` and `gguf` can be imported (the extra [peers]). Prints ratios of
output tokens/s (median and quartiles over the rounds), and how many times its floor each side took: what this machine
must read and compute for the job, at the bandwidth and the rate that it reached when the benchmark began. Every round
goes to --output. Rates are shown for a GPU only: on a CPU they say more about the machine than about the sides.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.support.command import DEVICE, SIZE, finish, flag, markdown, option, parse, say
from benchmarks.support.interleave import (
    Conversation,
    Spread,
    open_sides,
    paired_ratio,
    progress,
    sides_of,
    take_turns,
)
from benchmarks.support.machine_limits import Machine, Sizes, decode, measure_machine, prefill, report_header
from benchmarks.support.random_llama import SHAPES, device_dtype, load_llama, write_random_llama

ADAPTER_RANK = 16
EDGED, ADAPTED = "edged", "edged with an adapter"
CONTINUOUS, STATIC, LLAMA_CPP = "transformers continuous batching", "transformers generate", "llama.cpp"
PEERS = (CONTINUOUS, STATIC, LLAMA_CPP)
Prompts = list[list[int]]
Answers = list[list[int]]


@dataclass(frozen=True, slots=True)
class Job:
    """The job of every side.

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
    """Draw new prompts for every round, so that no side can reuse what an earlier round cached."""
    generator = np.random.default_rng(seed)
    ids: Prompts = generator.integers(3, job.vocab, (job.requests, job.prompt_tokens)).tolist()
    return ids


def start_edged(job: Job, adapter: str | None = None) -> Callable[[Prompts], Answers]:
    """Start edged's engine in process, with the settings that a daemon has by default; `adapter` gets random
    weights."""
    from benchmarks.adapters import write_adapters
    from benchmarks.support.local_engine import LocalEngine
    from edged.settings.load import Settings

    settings = Settings.model_validate({"model": {"device": job.device, "dtype": job.dtype}})
    model, folder = Path(job.model), Path(job.adapters)
    if adapter:
        write_adapters(settings, model, folder, [adapter])
    engine = LocalEngine(model, settings, folder if adapter else None)

    def answer(prompts: Prompts) -> Answers:
        engine.recorder.tokens.clear()
        for index, prompt in enumerate(prompts):
            engine.ask(str(index), prompt, job.output_tokens, adapter)
        engine.wait()
        found = [engine.recorder.tokens[str(index)] for index in range(len(prompts))]
        if wrong := {event.version for events in found for event in events} - {int(bool(adapter))}:
            raise RuntimeError(f"edged's engine: tokens of versions {wrong}, with adapter {adapter}")
        return [[event.token_id for event in events] for events in found]

    return answer


def start_continuous(job: Job) -> Callable[[Prompts], Answers]:
    """Start `generate_batch` with a manager that stays up between rounds, its cache sized for the job."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = load_llama(job.model, job.dtype).to(job.device).eval()
    greedy = GenerationConfig(max_new_tokens=job.output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # The random prompts share no prefixes. All prompts may be computed in one pass, which is fastest.
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
    """Start `generate` on the whole batch: all prompts have one length, so that nothing is padded."""
    from transformers import GenerationConfig

    model = load_llama(job.model, job.dtype).to(job.device).eval()
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
    """Start llama.cpp through its Python binding, which answers one request after the other; all cores, or the whole
    GPU."""
    import llama_cpp

    # K/V has the weights' precision: fp16 K/V with fp32 weights would be another computation.
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


_START: dict[str, Callable[[Job], Callable[[Prompts], Answers]]] = {
    EDGED: start_edged,
    ADAPTED: lambda job: start_edged(job, "user"),
    CONTINUOUS: start_continuous,
    STATIC: start_static,
    LLAMA_CPP: start_llama_cpp,
}


def be_side(name: str, told: str) -> None:
    """Run as a side: each question `{"seed": N}` is a round."""
    job = Job(**json.loads(told))
    work, conversation = _START[name](job), Conversation()
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


# -- the comparison ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the benchmark."""
    options = parse(
        __doc__,
        SIZE,
        option("--rounds", "measured rounds", 7, 2),
        option("--requests", "requests at once", 16),
        option("--prompt-tokens", "of each", 256, 64),
        option("--output-tokens", "of each", 64, 8),
        flag("--adapter", "measure edged with an adapter of rank 16 applied, too"),
        option("--peer", "measure against this side alone", choices=PEERS),
        flag("--float16", "a checkpoint in float16, which llama.cpp reads as F16"),
        DEVICE,
        quick="a 4 M parameter model and short answers",
    )
    dtype = device_dtype(options.device)
    stored = "float16" if options.float16 else dtype
    if options.float16 and options.device.startswith("cuda"):
        dtype = stored
    sides = [EDGED, *([ADAPTED] if options.adapter else []), *choose_peers(options.peer, options.requests)]
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        job = Job(
            model=str(write_random_llama(Path(folder) / "model", SHAPES[options.size], stored)),
            adapters=str(Path(folder) / "adapters"),
            gguf=str(Path(folder) / "model.gguf"),
            gguf_half=options.float16,
            device=options.device,
            dtype=dtype,
            vocab=SHAPES[options.size].vocab,
            requests=options.requests,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
        )
        if LLAMA_CPP in sides:
            from benchmarks.support.gguf_file import write_gguf

            write_gguf(Path(job.model), Path(job.gguf), job.gguf_half)
        machine = measure_machine(torch.device(job.device), job.dtype)
        report = {"model": options.size, "checkpoint": stored, **measure(job, options.rounds, sides)}
        report |= floors(job, machine)
    finish(options, report, table(report))


def choose_peers(wanted: str | None, requests: int) -> list[str]:
    """Return the peers that can run the job here; exits if the one that is asked for cannot."""
    missing = [name for name in ("llama_cpp", "gguf") if importlib.util.find_spec(name) is None]
    why = f"{' and '.join(missing)} cannot be imported: pip install 'edged[peers]'" if missing else ""
    if requests > 1:
        why = "its Python binding answers one request at a time: give --requests 1"
    if wanted == LLAMA_CPP and why:
        sys.exit(f"no comparison with llama.cpp: {why}")
    if why and wanted is None:
        say(f"llama.cpp is left out: {why}")
    return [peer for peer in PEERS if wanted in (None, peer) and not (peer == LLAMA_CPP and why)]


def measure(job: Job, rounds: int, sides: list[str]) -> dict[str, Any]:
    """Run one warm-up round, then `rounds` measured ones; greedy answers of all sides are compared with edged's."""
    header = report_header(job.device)
    peers = [name for name in sides if name in PEERS]
    questions = [{"seed": seed} for seed in range(rounds + 1)]
    with open_sides(sides_of("benchmarks.serving", sides, job)) as running:
        found = take_turns(running, questions, progress(lambda answer: f"{answer['seconds']:.2f} s"))
    answers = {name: rounds_of[1:] for name, rounds_of in found.items()}
    rates = {name: [answer["output_tokens_per_s"] for answer in own] for name, own in answers.items()}
    report = {
        "job": {"requests": job.requests, "prompt_tokens": job.prompt_tokens, "output_tokens": job.output_tokens},
        **header,
        "dtype": job.dtype,
        "rounds": rounds,
        "seconds": {name: [answer["seconds"] for answer in own] for name, own in answers.items()},
        "output_tokens_per_s": rates,
        "ratios": {name: paired_ratio(rates[EDGED], rates[name]).as_json() for name in peers},
        "equal_answers_share": {name: equal_share(answers[EDGED], answers[name]) for name in peers},
    }
    if ADAPTED in sides:
        report["ratios_with_adapter"] = {
            name: paired_ratio(rates[ADAPTED], rates[name]).as_json() for name in [EDGED, *peers]
        }
    if LLAMA_CPP in sides:
        import llama_cpp

        report["versions"]["llama-cpp-python"] = llama_cpp.__version__
        report["llama_cpp_weights"] = "F16" if job.gguf_half else "F32"
    return report


def equal_share(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """Return the share of the answers with identical tokens."""
    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a["ids"], b["ids"], strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def floors(job: Job, machine: Machine) -> dict[str, Any]:
    """Return the least seconds of one round: all prompts, then a decode of all requests for each further token."""

    def seconds(adapters: int) -> float:
        sizes = Sizes.of(Path(job.model), job.dtype, ADAPTER_RANK)
        total = prefill(sizes, job.prompt_tokens, job.requests, adapters=adapters).floor_s(machine)
        for token in range(1, job.output_tokens):
            total += decode(sizes, job.requests, job.prompt_tokens + token, adapters).floor_s(machine)
        return total

    return {"machine": asdict(machine), "floor_s": {EDGED: seconds(0), ADAPTED: seconds(1)}}


def table(report: dict[str, Any]) -> str:
    """Return the ratios as a Markdown table; rates only for a GPU."""
    job, floor_s, seconds = report["job"], report["floor_s"], report["seconds"]

    def named(name: str) -> str:
        return f"{name}, {report['llama_cpp_weights']}" if name == LLAMA_CPP else name

    def ratios(key: str) -> dict[str, str]:
        return {name: Spread.read(ratio).text() for name, ratio in report.get(key, {}).items()}

    equal = report["equal_answers_share"]
    lines = [
        f"{report['model']} random-weight Llama ({report['checkpoint']}), {job['requests']} requests, prompt "
        f"{job['prompt_tokens']}, output {job['output_tokens']}, {report['dtype']}, {report['device']}, "
        f"{report['rounds']} rounds",
        "",
        *markdown(
            ("edged's output tokens/s over that of", "ratio (quartiles)", "equal greedy answers"),
            [(named(name), ratio, f"{equal[name]:.0%}") for name, ratio in ratios("ratios").items()],
        ),
    ]
    if with_adapter := ratios("ratios_with_adapter"):
        rows = [(named(name), ratio) for name, ratio in with_adapter.items()]
        lines += ["", *markdown(("with an adapter, over that of", "ratio (quartiles)"), rows)]
    reached = f"{1e3 * floor_s[EDGED]:.0f} ms at {Machine(**report['machine']).text()}"
    over = {name: median(took) / floor_s[ADAPTED if name == ADAPTED else EDGED] for name, took in seconds.items()}
    rows = [(named(name), f"{times:.2f}") for name, times in over.items()]
    lines += ["", *markdown(("side", f"seconds a round over its floor of {reached}"), rows)]
    if not report["device"].startswith("CPU"):
        rows = [(name, Spread.of(rates).text(0)) for name, rates in report["output_tokens_per_s"].items()]
        lines += ["", *markdown(("side", "output tokens/s"), rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
