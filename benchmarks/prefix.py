"""The gain of shared prefixes on a real trace: edged with `cache.share_across` "all" and "none", in turns.

    python -m benchmarks.prefix mooncake-conversation.jsonl [--requests 64] [--turns 4] [--rounds 3] [--output FILE]
    python -m benchmarks.prefix mooncake-conversation.jsonl --analyse

Requests of a trace that knows its blocks (Mooncake's), scaled down (512 tokens of the trace become --block-tokens),
sent to a random-weight Llama of SmolLM2-135M's shape with --concurrency of them open at any time. Two workloads:

    window         consecutive requests of the trace
    conversations  the conversations of at least --turns requests that begin first, each whole, in order of arrival

In a window of a few hundred requests hardly anything comes back: most conversations last longer. `--analyse` prints
what share of the prompts had been seen before, for the whole trace, for windows and for conversations, and the speed-up
that a cache that forgets nothing could bring at most: prefills alone, and with the recorded answers. Those bounds are
printed beside the measured ratios, too. No request is sent before its conversation's last one was answered: when one
ends, the next one that continues none of the open conversations follows.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.support.command import DEVICE, finish, flag, markdown, option, parse, table_of
from benchmarks.support.interleave import (
    Conversation,
    Spread,
    open_sides,
    paired_ratio,
    progress,
    sides_of,
    take_turns,
)
from benchmarks.support.local_engine import LocalEngine
from benchmarks.support.machine_limits import Machine, Sizes, measure_machine, report_header
from benchmarks.support.prefix_bounds import Bound, bound, conversation_of, scaled, whole_conversations
from benchmarks.support.random_llama import SHAPES, device_dtype, write_random_llama
from edged.lab.bench.figures import percentiles_ms
from edged.lab.bench.traces import Arrival, PromptIds, RequestTrace, TraceError, TraceRow, read_trace, scale_rows

WINDOW, CONVERSATIONS = "window", "conversations"
WINDOWS = (100, 300, 1000)
TURNS = (2, 3, 4, 6)
CONTEXT_TOKENS = 2048
"""Longer requests of the trace are cut to this."""
RATES = ("requests_per_s", "prompt_tokens_per_s")
SHARING, ALONE = "edged with prefix sharing", "edged without"
SIDES = (SHARING, ALONE)
_FIRST_ID = 3
"""First random token id; the ids below are left to special tokens."""


@dataclass(frozen=True, slots=True)
class Job:
    """The job of both sides. `workloads`: a JSON file of lists of rows, by name."""

    model: str
    device: str
    dtype: str
    vocab: int
    workloads: str
    trace_block_tokens: int
    block_tokens: int
    context_tokens: int
    concurrency: int
    memory_mb: int


class _ClosedLoop(LocalEngine):
    """An engine that is kept at `concurrency` open requests."""

    def __init__(self, job: Job, shares: bool) -> None:
        self._concurrency = job.concurrency
        settings: dict[str, dict[str, Any]] = {
            "model": {"device": job.device, "dtype": job.dtype},
            "cache": {"share_across": "all" if shares else "none", "memory_mb": job.memory_mb},
        }
        super().__init__(Path(job.model), settings)

    def run(self, rows: Sequence[TraceRow], load: Sequence[Arrival]) -> dict[str, Any]:
        """Send the load, made from `rows`, as fast as it is answered; return its figures."""
        talks = {str(number): conversation_of(row) for number, row in enumerate(rows)}
        waiting, answers = list(talks), self.recorder.answers

        def next_one() -> str | None:
            """Return the first request that continues no open conversation; None if none may be sent now."""
            going_on = [talks[name] for name, answer in answers.items() if answer.finish is None]
            if len(going_on) >= self._concurrency:
                return None
            return next((name for name in waiting if talks[name] is None or talks[name] not in going_on), None)

        started = time.monotonic()
        while waiting:
            self.recorder.wait_for(lambda: next_one() or self.engine.error, "an answer")
            name = next_one()
            if name is None:
                raise RuntimeError(f"edged's engine: {self.engine.error}")
            waiting.remove(name)
            self.ask(name, load[int(name)].prompt_ids, load[int(name)].output_tokens)
        self.wait()
        seconds = time.monotonic() - started
        ends = [answer.finish for answer in answers.values() if answer.finish is not None]
        prompt_tokens = sum(end.prompt_tokens for end in ends)
        return {
            "seconds": seconds,
            "requests_per_s": len(load) / seconds,
            "prompt_tokens_per_s": prompt_tokens / seconds,
            "ttft_ms": percentiles_ms([answer.ttft_s for answer in answers.values() if answer.ttft_s is not None]),
            "hit_share": sum(end.cached_tokens for end in ends) / prompt_tokens,
        }


def be_side(name: str, told: str) -> None:
    """Run as a side: each question `{"workload": NAME, "seed": N}` is a round, with tokens that no other round has."""
    job = Job(**json.loads(told))
    workloads = {
        workload: [TraceRow(**{**row, "blocks": tuple(row["blocks"])}) for row in rows]
        for workload, rows in json.loads(Path(job.workloads).read_text()).items()
    }
    loop = _ClosedLoop(job, name == SHARING)
    conversation = Conversation()
    while True:
        question = conversation.question()
        rows = workloads[question["workload"]]
        prompts = PromptIds(job.context_tokens, range(_FIRST_ID, job.vocab), question["seed"])
        load = scale_rows(rows, prompts, job.block_tokens / job.trace_block_tokens, job.trace_block_tokens)
        conversation.answer(loop.run(rows, load))


# -- the comparison ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Analyse or measure."""
    options = parse(
        __doc__,
        option("trace", "a Mooncake trace (.jsonl)"),
        flag("--analyse", "print the bounds and measure nothing"),
        option("--workload", "this one alone (default: both)", choices=(WINDOW, CONVERSATIONS)),
        option("--requests", "of a workload, at most", 64, 16),
        option("--start", "the first request of the trace that is used", 0, least=0),
        option("--turns", "requests of a conversation, at least", 4),
        option("--block-tokens", "what a block is scaled to", 16),
        option("--concurrency", "requests open at any time", 8),
        option("--memory-mb", "K/V pages; 0: from free memory", 0, least=0),
        option("--rounds", "measured rounds", 3, 1),
        DEVICE,
        quick="a 4 M parameter model and few requests",
    )
    try:
        trace = read_trace(options.trace)
        if not trace.block_tokens:
            raise TraceError(f'trace "{options.trace}" knows no shared prefixes: give a Mooncake .jsonl')
        run(replace(trace, rows=trace.rows[options.start :]), options)
    except (TraceError, ValueError) as error:
        sys.exit(str(error))


def run(trace: RequestTrace, options: Namespace) -> None:
    """Run what the options ask for."""
    size, dtype = "4m" if options.quick else "135m", device_dtype(options.device)
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
        limit = bounds_of(job, machine)
        if options.analyse:
            bounds = analyse(trace.rows, limit, options.requests)
            report: dict[str, Any] = {"bounds": {label: asdict(found) for label, found in bounds.items()}}
            finish(options, report, bounds_table(bounds, job, machine))
            return
        workloads = choose(trace.rows, options)
        rows = {name: [asdict(row) for row in chosen] for name, chosen in workloads.items()}
        Path(job.workloads).write_text(json.dumps(rows))
        report = {"model": size, "trace": trace.name, "machine": asdict(machine)}
        report |= measure(job, workloads, limit, options.rounds)
    finish(options, report, table(report))


BoundOf = Callable[[Sequence[TraceRow]], Bound]
"""A function from rows as they are in the trace to their bound, at the lengths that a job gives them."""


def bounds_of(job: Job, machine: Machine) -> BoundOf:
    """Return a function that computes bounds on the job's model and a machine."""
    sizes = Sizes.of(Path(job.model), job.dtype)

    def limit(rows: Sequence[TraceRow]) -> Bound:
        rows = scaled(rows, job.block_tokens / job.trace_block_tokens, job.block_tokens, job.context_tokens)
        return bound(rows, job.block_tokens, sizes, machine, job.concurrency)

    return limit


def choose(rows: Sequence[TraceRow], options: Namespace) -> dict[str, Sequence[TraceRow]]:
    """Return the workloads that the options ask for."""
    makers = {
        WINDOW: lambda: rows[: options.requests],
        CONVERSATIONS: lambda: whole_conversations(rows, options.turns, options.requests),
    }
    return {name: make() for name, make in makers.items() if options.workload in (None, name)}


def analyse(rows: Sequence[TraceRow], limit: BoundOf, requests: int) -> dict[str, Bound]:
    """Return bounds of the whole trace, of its windows (the middle one and the best) and of its conversations."""
    found = {"the whole trace": limit(rows)}
    for length in WINDOWS:
        windows = [limit(rows[at : at + length]) for at in range(0, len(rows) - length + 1, length)]
        if windows:
            windows.sort(key=lambda window: window.hit_share)
            found[f"windows of {length}: median"] = windows[len(windows) // 2]
            found[f"windows of {length}: most shared"] = windows[-1]
    for turns in TURNS:
        for label, most in (("all", len(rows)), (f"first {requests}", requests)):
            with contextlib.suppress(ValueError):  # a short trace may have none
                found[f"conversations of {turns} and more: {label}"] = limit(whole_conversations(rows, turns, most))
    return found


def measure(job: Job, workloads: dict[str, Sequence[TraceRow]], limit: BoundOf, rounds: int) -> dict[str, Any]:
    """Run one round of the first workload to warm up, then `rounds` of each, the two sides in turns."""
    header = report_header(job.device)
    names = [next(iter(workloads)), *(name for _ in range(rounds) for name in workloads)]
    questions = [{"workload": name, "seed": seed} for seed, name in enumerate(names)]

    def label(number: int) -> str:
        return f"{names[number]}, round {(number - 1) // len(workloads) + 1}"

    with open_sides(sides_of("benchmarks.prefix", SIDES, job)) as running:
        answers = take_turns(running, questions, progress(round_text, label))
    answers = {name: found[1:] for name, found in answers.items()}
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
                "bound": asdict(limit(rows)),
                **figures({side: found[index :: len(workloads)] for side, found in answers.items()}),
            }
            for index, (name, rows) in enumerate(workloads.items())
        },
    }


def figures(answers: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return every round of both sides, and the ratios of the rounds that were measured together."""
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


def round_text(answer: dict[str, Any]) -> str:
    """Format a round as a line of progress."""
    return f"{answer['seconds']:.2f} s, hits {answer['hit_share']:.1%}"


def bounds_table(bounds: dict[str, Bound], job: Job, machine: Machine) -> str:
    """Return the upper bounds as Markdown."""
    columns = {
        "requests of the trace": "{label}",
        "number": "{requests}",
        "mean prompt, answer": "{mean_prompt_tokens:.0f}, {mean_output_tokens:.0f}",
        "seen before": "{hit_share:.1%}",
        "prefills": "{prefill_speedup:.2f}",
        "with answers": "{speedup:.2f}",
    }
    rows = [{"label": label, **asdict(found)} for label, found in bounds.items()]
    title = (
        f"Blocks of {job.trace_block_tokens} tokens as {job.block_tokens}, context {job.context_tokens}, "
        f"{job.concurrency} at once; an unbounded cache at the floors of {machine.text()}"
    )
    return "\n".join([title, "", *table_of(columns, rows)])


def highest_rates(most: dict[str, Any], side: str) -> tuple[dict[str, float], float]:
    """Return a side's rate at its floor, and the floor of TTFT (s) of the median prompt on an idle engine."""
    floor_s, ttft_s = ("unseen_s", "unseen_first_token_s") if side == SHARING else ("all_s", "first_token_s")
    requests = most["requests"] / most[floor_s]
    rates = {"requests_per_s": requests, "prompt_tokens_per_s": requests * most["mean_prompt_tokens"]}
    return rates, most[ttft_s]


def table(report: dict[str, Any]) -> str:
    """Return ratios beside their bounds, and the figures of both sides, as Markdown."""
    job, ratios, rates = report["job"], [], []
    for name, found in report["workloads"].items():
        bound_of, ratio = found["bound"], Spread.read(found["ratios"]["requests_per_s"]).text()
        hits = f"{median(found['sides'][SHARING]['hit_share']):.1%}"
        ratios.append((name, ratio, f"{bound_of['speedup']:.2f}", hits, f"{bound_of['hit_share']:.1%}"))
        for side, values in found["sides"].items():
            most, ttft_s = highest_rates(bound_of, side)
            reached = [f"{number:.2f}" for key in RATES for number in (median(values[key]), most[key])]
            ttft = ", ".join(f"{median(values[key]):.0f}" for key in ("ttft_ms_p50", "ttft_ms_p95"))
            rates.append((name, side, *reached, ttft, f"{1e3 * ttft_s:.0f}"))
    sides = ("workload", "side", "requests/s", "at most", "prompt tokens/s", "at most", "TTFT p50, p95 (ms)")
    lines = [
        f"{report['model']} random-weight Llama, {report['trace']} with blocks of {job['block_tokens']} tokens, "
        f"{job['concurrency']} requests at once, {report['dtype']}, {report['device']}, {report['rounds']} rounds",
        "",
        *markdown(
            ("workload", "requests/s with over without sharing (quartiles)", "at most", "hits", "seen before"), ratios
        ),
        "",
        *markdown((*sides, "floor of p50"), rates),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
