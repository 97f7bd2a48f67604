#!/usr/bin/env python
"""Measure edged's serving against transformers' continuous batching and static-batch generate, in turns.

A random-weight Llama of SmolLM2-135M's shape; 16 requests at once, prompts of 256 tokens, answers of 64. Prints ratios
of output tokens/s (median and quartiles over the rounds) and writes every round to --output. Rates are shown for a GPU
only: on a CPU they say more about the machine than about the sides.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
import transformers

import edged
from edged.bench.random_llama import SHAPES, write_random_llama
from edged.bench.serving import EDGED, SIDES, Job, side_arguments
from edged.bench.turns import Spread, open_sides, paired_ratio, take_turns


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a 4 M parameter model and short answers: a smoke test")
    parser.add_argument("--rounds", type=int, default=None, help="measured rounds (default 7; quick: 2)")
    parser.add_argument("--requests", type=int, default=16, help="requests at once (default 16)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=None, help="write a JSON report here")
    options = parser.parse_args()

    rounds = options.rounds or (2 if options.quick else 7)
    size = "4m" if options.quick else "135m"
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        job = Job(
            model=str(write_random_llama(Path(folder), SHAPES[size])),
            device=options.device,
            dtype="bfloat16" if options.device.startswith("cuda") else "float32",
            vocab=SHAPES[size].vocab,
            requests=options.requests,
            prompt_tokens=64 if options.quick else 256,
            output_tokens=8 if options.quick else 64,
        )
        report = measure(job, rounds)
    report["model"] = size
    print(table(report))
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")


def measure(job: Job, rounds: int) -> dict:
    """One round to warm up, then `rounds` that count; greedy answers of all sides are compared."""
    load_before = os.getloadavg()[0]
    sides = [(name, "edged.bench.serving", side_arguments(name, job)) for name in SIDES]
    with open_sides(sides) as running:
        questions = [{"seed": seed} for seed in range(rounds + 1)]

        def show(number: int, name: str, answer: dict) -> None:
            label = f"round {number}" if number else "warm-up"
            print(f"{label}: {name} {answer['seconds']:.2f} s", flush=True)

        answers = {name: found[1:] for name, found in take_turns(running, questions, show).items()}
    rates = {name: [answer["output_tokens_per_s"] for answer in found] for name, found in answers.items()}
    return {
        "job": {"requests": job.requests, "prompt_tokens": job.prompt_tokens, "output_tokens": job.output_tokens},
        "device": torch.cuda.get_device_name() if job.device.startswith("cuda") else f"CPU, {os.cpu_count()} cores",
        "dtype": job.dtype,
        "versions": {"edged": edged.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load_average_before": load_before,
        "rounds": rounds,
        "output_tokens_per_s": rates,
        "ratios": {name: paired_ratio(rates[EDGED], rates[name]).as_json() for name in SIDES if name != EDGED},
        "equal_answers_share": {
            name: sum(
                ours == theirs
                for a, b in zip(answers[EDGED], answers[name], strict=True)
                for ours, theirs in zip(a["ids"], b["ids"], strict=True)
            )
            / (rounds * job.requests)
            for name in SIDES
            if name != EDGED
        },
    }


def table(report: dict) -> str:
    """The ratios as a Markdown table; rates only where they belong to a GPU."""
    gpu = not report["device"].startswith("CPU")
    lines = [
        f"{report['model']} random-weight Llama, {report['job']['requests']} requests, prompt "
        f"{report['job']['prompt_tokens']}, output {report['job']['output_tokens']}, {report['dtype']}, "
        f"{report['device']}, {report['rounds']} rounds",
        "",
        "| edged's output tokens/s over that of | ratio (quartiles) | equal greedy answers |",
        "| --- | --- | --- |",
    ]
    for name, ratio in report["ratios"].items():
        shown = Spread(ratio["median"], ratio["low"], ratio["high"], ratio["rounds"]).text()
        lines.append(f"| {name} | {shown} | {report['equal_answers_share'][name]:.0%} |")
    if gpu:
        lines += ["", "| side | output tokens/s |", "| --- | --- |"]
        lines += [f"| {name} | {Spread.of(rates).text(0)} |" for name, rates in report["output_tokens_per_s"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
