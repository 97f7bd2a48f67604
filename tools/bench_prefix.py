#!/usr/bin/env python3
"""What shared prefixes bring on a real trace: edged with and without `cache.prefix_sharing`, in turns.

    python tools/bench_prefix.py mooncake-conversation.jsonl [--requests 64] [--turns 4] [--rounds 3] [--output FILE]
    python tools/bench_prefix.py mooncake-conversation.jsonl --analyse

Requests of a trace that knows its blocks (Mooncake's), scaled down (512 tokens of the trace become --block-tokens),
sent to a random-weight Llama of SmolLM2-135M's shape with --concurrency of them open at any time. Two workloads:

    window         consecutive requests of the trace
    conversations  the conversations of at least --turns requests that begin first, each whole, in order of arrival

In a window of a few hundred requests hardly anything comes back: most conversations last longer. `--analyse` prints
what share of the prompts had been seen before, for the whole trace, for windows and for conversations, and the speed-up
that a cache that forgets nothing could bring at most: prefills alone, and with the recorded answers. Those bounds are
printed beside the measured ratios, too. No request is sent before its conversation's last one was answered.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

import checkout  # noqa: F401
from benchmarks.prefix import ALONE, SHARING, SIDES, Job, side_arguments
from benchmarks.prefix_bounds import Bound, bound, scaled, whole_conversations
from benchmarks.support.interleave import Spread, open_sides, paired_ratio, take_turns
from benchmarks.support.machine_limits import Machine, Sizes, measure_machine, report_header
from benchmarks.support.random_llama import SHAPES, device_dtype, write_random_llama
from edged.bench.traces import RequestTrace, TraceError, TraceRow, read_trace

WINDOW, CONVERSATIONS = "window", "conversations"
WINDOWS = (100, 300, 1000)
TURNS = (2, 3, 4, 6)
CONTEXT_TOKENS = 2048
"""Longer requests of the trace are cut to this."""
RATES = ("requests_per_s", "prompt_tokens_per_s")


def main() -> None:
    """Analyse or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="a Mooncake trace (.jsonl)")
    parser.add_argument("--analyse", action="store_true", help="print the bounds and measure nothing")
    parser.add_argument("--quick", action="store_true", help="a 4 M parameter model and few requests: a smoke test")
    parser.add_argument("--workload", choices=(WINDOW, CONVERSATIONS), help="this one alone (default: both)")
    parser.add_argument("--requests", type=int, default=None, help="of a workload, at most (default 64; quick: 16)")
    parser.add_argument("--start", type=int, default=0, help="the first request of the trace that is used (default 0)")
    parser.add_argument("--turns", type=int, default=4, help="requests of a conversation, at least (default 4)")
    parser.add_argument("--block-tokens", type=int, default=16, help="what a block is scaled to (default 16)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests open at any time (default 8)")
    parser.add_argument("--memory-mb", type=int, default=0, help="K/V pages (default: from free memory)")
    parser.add_argument("--rounds", type=int, default=None, help="measured rounds (default 3; quick: 1)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=None, help="write a JSON report here")
    options = parser.parse_args()
    options.requests = options.requests or (16 if options.quick else 64)
    try:
        trace = read_trace(options.trace)
        if not trace.block_tokens:
            raise TraceError(f'trace "{options.trace}" knows no shared prefixes: give a Mooncake .jsonl')
        trace = replace(trace, rows=trace.rows[options.start :])
        report = run(trace, options)
    except (TraceError, ValueError) as error:
        sys.exit(str(error))
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")


def run(trace: RequestTrace, options: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, printed and returned."""
    size = "4m" if options.quick else "135m"
    dtype = device_dtype(options.device)
    machine = measure_machine(torch.device(options.device), dtype)
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as name:
        folder = Path(name)
        job = Job(
            model=str(write_random_llama(folder / "model", SHAPES[size])),
            device=options.device,
            dtype=dtype,
            vocab=SHAPES[size].vocab,
            workloads=str(folder / "workloads.json"),
            trace_block_tokens=trace.block_tokens,
            block_tokens=options.block_tokens,
            context_tokens=CONTEXT_TOKENS,
            concurrency=options.concurrency,
            memory_mb=options.memory_mb,
        )
        limits = Limits(job, machine)
        if options.analyse:
            bounds = analyse(trace.rows, limits, options.requests)
            print(bounds_table(bounds, job, machine))
            return {"bounds": {label: found.as_json() for label, found in bounds.items()}}
        workloads = choose(trace.rows, options)
        Path(job.workloads).write_text(
            json.dumps(
                {
                    name: [(row.at_s, row.prompt_tokens, row.output_tokens, row.blocks) for row in rows]
                    for name, rows in workloads.items()
                }
            )
        )
        report = {"model": size, "trace": trace.name, "machine": machine.as_json()}
        report |= measure(job, workloads, limits, options.rounds or (1 if options.quick else 3))
    print(table(report))
    return report


class Limits:
    """The bounds of rows on one model and machine, at the lengths that the job gives them."""

    def __init__(self, job: Job, machine: Machine) -> None:
        self._job, self._machine = job, machine
        self._sizes = Sizes.of(Path(job.model), job.dtype)

    def of(self, rows: Sequence[TraceRow]) -> Bound:
        """Of rows as they are in the trace."""
        job = self._job
        rows = scaled(rows, job.block_tokens / job.trace_block_tokens, job.block_tokens, job.context_tokens)
        return bound(rows, job.block_tokens, self._sizes, self._machine, job.concurrency)


def choose(rows: Sequence[TraceRow], options: argparse.Namespace) -> dict[str, Sequence[TraceRow]]:
    """The workloads that were asked for."""
    makers = {
        WINDOW: lambda: rows[: options.requests],
        CONVERSATIONS: lambda: whole_conversations(rows, options.turns, options.requests),
    }
    return {name: make() for name, make in makers.items() if options.workload in (None, name)}


def analyse(rows: Sequence[TraceRow], limits: Limits, requests: int) -> dict[str, Bound]:
    """Bounds of the whole trace, of its windows (the middle one and the best) and of its conversations."""
    found = {"the whole trace": limits.of(rows)}
    for length in WINDOWS:
        windows = [limits.of(rows[at : at + length]) for at in range(0, len(rows) - length + 1, length)]
        if windows:
            windows.sort(key=lambda window: window.hit_share)
            found[f"windows of {length}: median"] = windows[len(windows) // 2]
            found[f"windows of {length}: most shared"] = windows[-1]
    for turns in TURNS:
        for label, most in (("all", len(rows)), (f"first {requests}", requests)):
            with contextlib.suppress(ValueError):  # a short trace may have none
                found[f"conversations of {turns} and more: {label}"] = limits.of(whole_conversations(rows, turns, most))
    return found


def measure(job: Job, workloads: dict[str, Sequence[TraceRow]], limits: Limits, rounds: int) -> dict[str, Any]:
    """One round of the first workload to warm up, then `rounds` of each, the two sides in turns."""
    header = report_header(job.device)
    names = [next(iter(workloads)), *(name for _ in range(rounds) for name in workloads)]
    questions = [{"workload": name, "seed": seed} for seed, name in enumerate(names)]
    sides = [(name, "benchmarks.prefix", side_arguments(name, job)) for name in SIDES]
    with open_sides(sides) as running:

        def show(number: int, name: str, answer: dict[str, Any]) -> None:
            label = f"{names[number]}, round {(number - 1) // len(workloads) + 1}" if number else "warm-up"
            print(f"{label}: {name} {answer['seconds']:.2f} s, hits {answer['hit_share']:.1%}", flush=True)

        answers = {name: found[1:] for name, found in take_turns(running, questions, show).items()}
    return {
        "job": {
            "block_tokens": job.block_tokens,
            "concurrency": job.concurrency,
            "context_tokens": job.context_tokens,
            "memory_mb": job.memory_mb,
        },
        **header,
        "dtype": job.dtype,
        "rounds": rounds,
        "workloads": {
            name: {
                "bound": limits.of(rows).as_json(),
                **figures({side: found[index :: len(workloads)] for side, found in answers.items()}),
            }
            for index, (name, rows) in enumerate(workloads.items())
        },
    }


def figures(answers: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Every round of both sides, and the ratios of the rounds that were measured together."""
    sides = {
        side: {
            **{key: [answer[key] for answer in found] for key in (*RATES, "hit_share")},
            **{f"ttft_ms_{key}": [answer["ttft_ms"][key] for answer in found] for key in ("p50", "p95")},
        }
        for side, found in answers.items()
    }
    with_sharing, without = sides[SHARING], sides[ALONE]
    ratios = {key: paired_ratio(with_sharing[key], without[key]).as_json() for key in RATES}
    ratios |= {key: paired_ratio(without[key], with_sharing[key]).as_json() for key in ("ttft_ms_p50", "ttft_ms_p95")}
    return {"sides": sides, "ratios": ratios}


def bounds_table(bounds: dict[str, Bound], job: Job, machine: Machine) -> str:
    """What could be had at most, as Markdown."""
    lines = [
        f"Blocks of {job.trace_block_tokens} tokens as {job.block_tokens}, context {job.context_tokens}, "
        f"{job.concurrency} at once; an unbounded cache at the floors of {machine.text()}",
        "",
        "| requests of the trace | number | mean prompt, answer | seen before | prefills | with answers |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for label, found in bounds.items():
        lengths = f"{found.mean_prompt_tokens:.0f}, {found.mean_output_tokens:.0f}"
        lines.append(
            f"| {label} | {found.requests} | {lengths} | {found.hit_share:.1%} | "
            f"{found.prefill_speedup:.2f} | {found.speedup:.2f} |"
        )
    return "\n".join(lines)


def highest_rates(most: dict[str, Any], side: str) -> tuple[dict[str, float], float]:
    """What a side reaches at its floor, and the floor of a first token (s): of the median prompt, nobody before it."""
    floor_s, ttft_s = ("unseen_s", "unseen_first_token_s") if side == SHARING else ("all_s", "first_token_s")
    requests = most["requests"] / most[floor_s]
    rates = {"requests_per_s": requests, "prompt_tokens_per_s": requests * most["mean_prompt_tokens"]}
    return rates, most[ttft_s]


def table(report: dict[str, Any]) -> str:
    """Ratios beside their bounds, and the figures of both sides, as Markdown."""
    job = report["job"]
    lines = [
        f"{report['model']} random-weight Llama, {report['trace']} with blocks of {job['block_tokens']} tokens, "
        f"{job['concurrency']} requests at once, {report['dtype']}, {report['device']}, {report['rounds']} rounds",
        "",
        "| workload | requests/s with over without sharing (quartiles) | at most | hits | seen before |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, found in report["workloads"].items():
        ratio, most = found["ratios"]["requests_per_s"], found["bound"]
        shown = Spread(ratio["median"], ratio["low"], ratio["high"], ratio["rounds"]).text()
        hits = median(found["sides"][SHARING]["hit_share"])
        lines.append(f"| {name} | {shown} | {most['speedup']:.2f} | {hits:.1%} | {most['hit_share']:.1%} |")
    lines += [
        "",
        "| workload | side | requests/s | at most | prompt tokens/s | at most | TTFT p50, p95 (ms) | floor of p50 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in report["workloads"].items():
        for side, values in found["sides"].items():
            most, ttft_s = highest_rates(found["bound"], side)
            ttft = ", ".join(f"{median(values[key]):.0f}" for key in ("ttft_ms_p50", "ttft_ms_p95"))
            rates = " | ".join(f"{median(values[key]):.2f} | {most[key]:.2f}" for key in RATES)
            lines.append(f"| {name} | {side} | {rates} | {ttft} | {1e3 * ttft_s:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
