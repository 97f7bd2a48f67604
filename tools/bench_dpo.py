#!/usr/bin/env python
"""Measure edged's DPO steps against TRL's DPOTrainer, in turns, on the same pairs.

A random-weight Llama, of SmolLM2-135M's shape unless --size says another (3b: Llama-3.2-3B's, on a GPU); LoRA of rank
16 on all linear layers, reference log-probabilities computed beforehand on both sides. Prints ratios of pairs/s (median
and quartiles over the steps), of peak memory above the weights, and how many times its floor each side took: what this
machine must read and compute for the step, at the bandwidth and the rate that it reached when the benchmark began.
Writes every step to --output.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import trl

import checkout  # noqa: F401
from benchmarks.dpo import EDGED, SIDES, TRL, Job, side_arguments
from benchmarks.support.interleave import Side, Spread, open_sides, paired_ratio, take_turns
from benchmarks.support.machine_limits import Machine, Sizes, dpo_step, measure_machine, report_header
from benchmarks.support.random_llama import SHAPES, device_dtype, write_random_llama, write_tokenizer
from edged.align.feedback.pair_formats import read_pairs

LONGEST_PAIR_TOKENS = 1024


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path, help="preference pairs: a (gzipped) JSONL file")
    parser.add_argument("--format", choices=["hh", "trl", "edged"], default="hh", help="of the file (default hh)")
    parser.add_argument("--quick", action="store_true", help="a 4 M parameter model and two steps: a smoke test")
    parser.add_argument("--size", choices=SHAPES, default=None, help="of the model (default 135m; quick: 4m)")
    parser.add_argument("--steps", type=int, default=None, help="measured optimizer steps (default 12; quick: 2)")
    parser.add_argument("--pairs-per-step", type=int, default=4, help="pairs of one optimizer step (default 4)")
    parser.add_argument(
        "--prompt-share",
        type=float,
        default=0.0,
        help="only pairs whose prompt is this share of prompt + chosen",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peer", choices=SIDES[1:], default=None, help="measure against this side alone")
    parser.add_argument("--output", type=Path, default=None, help="write a JSON report here")
    options = parser.parse_args()

    steps = options.steps or (2 if options.quick else 12)
    size, dtype = options.size or ("4m" if options.quick else "135m"), device_dtype(options.device)
    shape = SHAPES[size]
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as name:
        folder = Path(name)
        write_random_llama(folder / "model", shape, dtype)
        write_random_llama(folder / "warm", replace(SHAPES["4m"], vocab=shape.vocab), dtype)
        texts = [pair for _, pair in read_pairs(options.pairs, options.format) if isinstance(pair, dict)]
        chosen = choose_pairs(
            [as_text(pair) for pair in texts],
            folder / "model",
            shape.vocab,
            (steps + 1) * options.pairs_per_step,
            options.prompt_share,
        )
        job = Job(
            model=str(folder / "model"),
            warm_model=str(folder / "warm"),
            pairs=str(folder / "texts.json"),
            device=options.device,
            dtype=dtype,
            pairs_per_step=options.pairs_per_step,
        )
        Path(job.pairs).write_text(json.dumps(chosen))
        report = {"model": size, "pairs_file": options.pairs.name, "prompt_share_at_least": options.prompt_share}
        peers = [options.peer] if options.peer else list(SIDES[1:])
        machine = measure_machine(torch.device(job.device), job.dtype)
        report |= measure(job, steps, folder / "tokens.json", peers, machine)
    print(table(report))
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n")


def as_text(pair: dict) -> dict[str, str]:
    """A pair as plain text: HH-RLHF's way of writing dialogues."""
    names = {"user": "Human", "assistant": "Assistant"}
    turns = [f"\n\n{names.get(turn['role'], turn['role'])}: {turn['content']}" for turn in pair.get("messages", ())]
    prompt = "".join([*turns, "\n\nAssistant:"]) if turns else pair["prompt"]
    return {"prompt": prompt, "chosen": " " + pair["chosen"].strip(), "rejected": " " + pair["rejected"].strip()}


def choose_pairs(texts: list[dict], directory: Path, vocab: int, count: int, prompt_share: float) -> list[dict]:
    """The first `count` pairs that are short enough and have prompts long enough, by a tokenizer trained on all."""
    tokenizer = write_tokenizer(directory, (text for pair in texts for text in pair.values()), vocab)
    chosen = []
    for pair in texts:
        prompt, *answers = (len(tokenizer.encode(pair[key])) for key in ("prompt", "chosen", "rejected"))
        if prompt + sum(answers) + 2 <= LONGEST_PAIR_TOKENS and prompt >= prompt_share * (prompt + answers[0]):
            chosen.append(pair)
        if len(chosen) == count:
            return chosen
    raise SystemExit(f"only {len(chosen)} of {len(texts)} pairs fit; {count} are needed: fewer --steps, other pairs")


def measure(job: Job, steps: int, tokens: Path, peer_names: list[str], machine: Machine) -> dict:
    """TRL's sides prepare, edged gets the very tokens and reference log-probabilities; then steps in turns."""
    header = report_header(job.device)
    peers = [(name, "benchmarks.dpo", side_arguments(name, job)) for name in peer_names]
    with open_sides(peers) as running:
        prepared = [side.ask({})["pairs"] for side in running]
        tokens.write_text(json.dumps(prepared[0]))
        with Side(EDGED, "benchmarks.dpo", side_arguments(EDGED, replace(job, pairs=str(tokens)))) as ours:

            def show(number: int, name: str, answer: dict) -> None:
                label = f"step {number}" if number else "warm-up"
                cost = f"{answer['seconds']:.2f} s, {answer['peak_bytes'] / 2**20:.0f} MiB"
                print(f"{label}: {name} {cost}, loss {answer['loss']:.4f}", flush=True)

            questions = ({"step": number} for number in range(steps + 1))
            answers = take_turns([ours, *running], questions, show)
    floor_s = floors(job, prepared[0], steps, machine)
    rates = {name: [job.pairs_per_step / a["seconds"] for a in found[1:]] for name, found in answers.items()}
    peaks = {name: max(a["peak_bytes"] for a in found) for name, found in answers.items()}
    used = prepared[0][job.pairs_per_step :]
    prompt_tokens = sum(len(pair["prompt_ids"]) for pair in used)
    answer_tokens = sum(len(pair["chosen_ids"]) + len(pair["rejected_ids"]) for pair in used)
    return {
        **header,
        "dtype": job.dtype,
        "versions": {**header["versions"], "trl": trl.__version__},
        "steps": steps,
        "pairs_per_step": job.pairs_per_step,
        "mean_prompt_tokens": prompt_tokens / len(used),
        "mean_answer_tokens": answer_tokens / len(used) / 2,
        "pairs_per_s": rates,
        "losses": {name: [a["loss"] for a in found] for name, found in answers.items()},
        "peak_bytes_above_weights": peaks,
        "machine": machine.as_json(),
        "floor_s": floor_s,
        "times_floor": {
            name: Spread.of([a["seconds"] / least for a, least in zip(found[1:], floor_s, strict=True)]).as_json()
            for name, found in answers.items()
        },
        "speed_ratios": {name: paired_ratio(rates[EDGED], rates[name]).as_json() for name in peer_names},
        "memory_ratios": {name: peaks[EDGED] / peaks[name] for name in peer_names},
    }


def floors(job: Job, pairs: list[dict], steps: int, machine: Machine) -> list[float]:
    """Seconds that each measured step must take; the first group of pairs is the warm-up's."""
    sizes = Sizes.of(Path(job.model), job.dtype, job.rank)
    lengths = [tuple(len(pair[f"{part}_ids"]) for part in ("prompt", "chosen", "rejected")) for pair in pairs]
    groups = (lengths[step * job.pairs_per_step :][: job.pairs_per_step] for step in range(1, steps + 1))
    return [dpo_step(sizes, group).floor_s(machine) for group in groups]


def table(report: dict) -> str:
    """The ratios as a Markdown table; rates only where they belong to a GPU."""
    gpu = not report["device"].startswith("CPU")
    lines = [
        f"{report['model']} random-weight Llama, {report['steps']} steps of {report['pairs_per_step']} pairs from "
        f"{report['pairs_file']} (mean prompt {report['mean_prompt_tokens']:.0f}, answer "
        f"{report['mean_answer_tokens']:.0f} tokens), {report['dtype']}, {report['device']}",
        "",
        "| edged over | pairs/s (quartiles) | peak memory above the weights |",
        "| --- | --- | --- |",
    ]
    for name, ratio in report["speed_ratios"].items():
        shown = Spread(ratio["median"], ratio["low"], ratio["high"], ratio["rounds"]).text()
        label = f"{name} (its defaults)" if name == TRL else name
        lines.append(f"| {label} | {shown} | {report['memory_ratios'][name]:.2f} |")
    machine = Machine(**report["machine"])
    lines += [
        "",
        f"| side | step over its floor of {1e3 * median(report['floor_s']):.0f} ms at {machine.text()} (quartiles) |",
        "| --- | --- |",
    ]
    for name, times in report["times_floor"].items():
        lines.append(f"| {name} | {Spread(times['median'], times['low'], times['high'], times['rounds']).text()} |")
    mib = {name: peak / 2**20 for name, peak in report["peak_bytes_above_weights"].items()}
    lines += ["", "Peak MiB above the weights: " + ", ".join(f"{name} {value:.0f}" for name, value in mib.items())]
    if gpu:
        lines += ["", "| side | pairs/s |", "| --- | --- |"]
        lines += [f"| {name} | {Spread.of(rates).text(1)} |" for name, rates in report["pairs_per_s"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
