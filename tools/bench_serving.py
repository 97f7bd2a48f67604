#!/usr/bin/env python
"""Measure edged's serving against transformers and llama.cpp, in turns.

    python tools/bench_serving.py                           16 requests at once
    python tools/bench_serving.py --requests 1 --adapter    a single stream, also with an adapter applied
    python tools/bench_serving.py --requests 1 --float16    ... of weights that are numbers of 16 bits
    python tools/bench_serving.py --size 3b                 Llama-3.2-3B's shape, on a GPU

A random-weight Llama, of SmolLM2-135M's shape unless --size says another; prompts of 256 tokens, answers of 64. The
peers: transformers' continuous batching and static-batch `generate`; and llama.cpp, for a single request and where
`llama_cpp` and `gguf` can be imported (the extra [peers]). Prints ratios of output tokens/s (median and quartiles over
the rounds), and how many times its floor each side took: what this machine must read and compute for the job, at the
bandwidth and the rate that it reached when the benchmark began. Every round goes to --output. Rates are shown for a GPU
only: on a CPU they say more about the machine than about the sides.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch

import checkout  # noqa: F401
from benchmarks.serving import ADAPTED, EDGED, LLAMA_CPP, PEERS, Job, side_arguments
from benchmarks.support.interleave import Spread, open_sides, paired_ratio, take_turns
from benchmarks.support.machine_limits import Machine, Sizes, decode, measure_machine, prefill, report_header
from benchmarks.support.random_llama import SHAPES, device_dtype, write_random_llama

ADAPTER_RANK = 16


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a 4 M parameter model and short answers: a smoke test")
    parser.add_argument("--size", choices=SHAPES, default=None, help="of the model (default 135m; quick: 4m)")
    parser.add_argument("--rounds", type=int, default=None, help="measured rounds (default 7; quick: 2)")
    parser.add_argument("--requests", type=int, default=16, help="requests at once (default 16)")
    parser.add_argument("--prompt-tokens", type=int, default=None, help="of each (default 256; quick: 64)")
    parser.add_argument("--output-tokens", type=int, default=None, help="of each (default 64; quick: 8)")
    parser.add_argument("--adapter", action="store_true", help="measure edged with an adapter of rank 16 applied, too")
    parser.add_argument("--peer", choices=PEERS, default=None, help="measure against this side alone")
    parser.add_argument("--float16", action="store_true", help="a checkpoint in float16, which llama.cpp reads as F16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=None, help="write a JSON report here")
    options = parser.parse_args()

    rounds = options.rounds or (2 if options.quick else 7)
    size, dtype = options.size or ("4m" if options.quick else "135m"), device_dtype(options.device)
    stored = "float16" if options.float16 else dtype
    if options.float16 and options.device.startswith("cuda"):
        dtype = stored
    sides = [EDGED, *([ADAPTED] if options.adapter else []), *choose_peers(options.peer, options.requests)]
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        job = Job(
            model=str(write_random_llama(Path(folder) / "model", SHAPES[size], stored)),
            adapters=str(Path(folder) / "adapters"),
            gguf=str(Path(folder) / "model.gguf"),
            gguf_half=options.float16,
            device=options.device,
            dtype=dtype,
            vocab=SHAPES[size].vocab,
            requests=options.requests,
            prompt_tokens=options.prompt_tokens or (64 if options.quick else 256),
            output_tokens=options.output_tokens or (8 if options.quick else 64),
        )
        if LLAMA_CPP in sides:
            from benchmarks.support.gguf_file import write_gguf

            write_gguf(Path(job.model), Path(job.gguf), job.gguf_half)
        machine = measure_machine(torch.device(job.device), job.dtype)
        report = {"model": size, "checkpoint": stored, **measure(job, rounds, sides), **floors(job, machine)}
    print(table(report))
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")


def choose_peers(wanted: str | None, requests: int) -> list[str]:
    """The peers that can do the job here; exits where the one that is wanted cannot."""
    missing = [name for name in ("llama_cpp", "gguf") if importlib.util.find_spec(name) is None]
    why = f"{' and '.join(missing)} cannot be imported: pip install 'edged[peers]'" if missing else ""
    if requests > 1:
        why = "its Python binding answers one request at a time: give --requests 1"
    if wanted == LLAMA_CPP and why:
        sys.exit(f"no comparison with llama.cpp: {why}")
    if why and wanted is None:
        print(f"llama.cpp is left out: {why}", flush=True)
    return [peer for peer in PEERS if wanted in (None, peer) and not (peer == LLAMA_CPP and why)]


def measure(job: Job, rounds: int, sides: list[str]) -> dict:
    """One round to warm up, then `rounds` that count; greedy answers of all sides are compared with edged's."""
    header = report_header(job.device)
    peers = [name for name in sides if name in PEERS]
    with open_sides([(name, "benchmarks.serving", side_arguments(name, job)) for name in sides]) as running:
        questions = [{"seed": seed} for seed in range(rounds + 1)]

        def show(number: int, name: str, answer: dict) -> None:
            label = f"round {number}" if number else "warm-up"
            print(f"{label}: {name} {answer['seconds']:.2f} s", flush=True)

        answers = {name: found[1:] for name, found in take_turns(running, questions, show).items()}
    rates = {name: [answer["output_tokens_per_s"] for answer in found] for name, found in answers.items()}
    report = {
        "job": {"requests": job.requests, "prompt_tokens": job.prompt_tokens, "output_tokens": job.output_tokens},
        **header,
        "dtype": job.dtype,
        "rounds": rounds,
        "seconds": {name: [answer["seconds"] for answer in found] for name, found in answers.items()},
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


def equal_share(ours: list[dict], theirs: list[dict]) -> float:
    """Share of the answers that are the same tokens."""
    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a["ids"], b["ids"], strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def floors(job: Job, machine: Machine) -> dict:
    """Seconds that one round must take: all prompts, then a decode of all requests for each further token."""

    def seconds(adapters: int) -> float:
        sizes = Sizes.of(Path(job.model), job.dtype, ADAPTER_RANK)
        total = prefill(sizes, job.prompt_tokens, job.requests, adapters=adapters).floor_s(machine)
        for token in range(1, job.output_tokens):
            total += decode(sizes, job.requests, job.prompt_tokens + token, adapters).floor_s(machine)
        return total

    return {"machine": machine.as_json(), "floor_s": {EDGED: seconds(0), ADAPTED: seconds(1)}}


def table(report: dict) -> str:
    """The ratios as a Markdown table; rates only where they belong to a GPU."""
    gpu = not report["device"].startswith("CPU")
    machine = Machine(**report["machine"])
    lines = [
        f"{report['model']} random-weight Llama ({report['checkpoint']}), {report['job']['requests']} requests, prompt "
        f"{report['job']['prompt_tokens']}, output {report['job']['output_tokens']}, {report['dtype']}, "
        f"{report['device']}, {report['rounds']} rounds",
        "",
        "| edged's output tokens/s over that of | ratio (quartiles) | equal greedy answers |",
        "| --- | --- | --- |",
    ]
    for name, ratio in report["ratios"].items():
        lines.append(f"| {_named(report, name)} | {_spread(ratio)} | {report['equal_answers_share'][name]:.0%} |")
    if "ratios_with_adapter" in report:
        lines += ["", "| with an adapter, over that of | ratio (quartiles) |", "| --- | --- |"]
        lines += [
            f"| {_named(report, name)} | {_spread(ratio)} |" for name, ratio in report["ratios_with_adapter"].items()
        ]
    lines += [
        "",
        f"| side | seconds a round over its floor of {1e3 * report['floor_s'][EDGED]:.0f} ms at {machine.text()} |",
        "| --- | --- |",
    ]
    for name, seconds in report["seconds"].items():
        floor_s = report["floor_s"][ADAPTED if name == ADAPTED else EDGED]
        lines.append(f"| {_named(report, name)} | {median(seconds) / floor_s:.2f} |")
    if gpu:
        lines += ["", "| side | output tokens/s |", "| --- | --- |"]
        lines += [f"| {name} | {Spread.of(rates).text(0)} |" for name, rates in report["output_tokens_per_s"].items()]
    return "\n".join(lines)


def _named(report: dict, name: str) -> str:
    return f"{name}, {report['llama_cpp_weights']}" if name == LLAMA_CPP else name


def _spread(ratio: dict) -> str:
    return Spread(ratio["median"], ratio["low"], ratio["high"], ratio["rounds"]).text()


if __name__ == "__main__":
    main()
