"""Learning speed of edged's DPO steps beside TRL's DPOTrainer, in turns, on the same pairs.

    python -m benchmarks.dpo hh-harmless.jsonl.gz [--steps 12] [--prompt-share 0.5] [--size 3b] [--output FILE]
    python -m benchmarks.dpo hh-harmless.jsonl.gz --method supervised

With `--method supervised` these are steps of a fine-tuning job over the pairs' chosen answers, beside SFTTrainer.

A random-weight Llama, of SmolLM2-135M's shape unless --size says another (3b: Llama-3.2-3B's, on a GPU); LoRA of rank
16 on all linear layers, reference log-probabilities computed beforehand on both sides. Prints ratios of pairs/s (median
and quartiles over the steps), of peak memory above the weights, and how many times its floor each side took: what this
machine must read and compute for the step, at the bandwidth and the rate that it reached when the benchmark began.
Writes every step to --output. Each side has a process of its own, because peak memory is a process's.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.support.command import DEVICE, FORMAT, PAIRS, SIZE, finish, flag, markdown, option, parse
from benchmarks.support.interleave import (
    Conversation,
    Side,
    Spread,
    open_sides,
    paired_ratio,
    progress,
    sides_of,
    take_turns,
)
from benchmarks.support.machine_limits import Machine, Sizes, dpo_step, measure_machine, report_header
from benchmarks.support.random_llama import SHAPES, device_dtype, load_llama, write_random_llama, write_tokenizer
from edged.align.feedback.pair_formats import read_pairs
from edged.profiler.proc_memory import peak_bytes, start_peak, used_bytes

LONGEST_PAIR_TOKENS = 1024
EDGED, TRL, TRL_FAST, TRL_SMALL = "edged", "TRL", "TRL without checkpointing", "TRL pair by pair"
SIDES = (EDGED, TRL, TRL_FAST, TRL_SMALL)
"""Sides of the benchmark. TRL: its defaults; its fastest options; and one pair per forward with accumulated gradients,
to save memory."""
_TokenizedPair = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """The job of every side.

    `warm_model` is a small model of the same vocabulary, for a warm-up step that loads lazily imported code.

    `pairs` is a JSON list of {"prompt", "chosen", "rejected"} texts for TRL, of {"prompt_ids", "chosen_ids",
    "rejected_ids", "ref_chosen_logp", "ref_rejected_logp"} for edged.
    """

    model: str
    warm_model: str
    pairs: str
    device: str
    dtype: str
    pairs_per_step: int
    method: str = "dpo"
    recompute: str = "auto"
    packs: bool = True
    rank: int = 16
    alpha: int = 32
    beta: float = 0.1
    learning_rate: float = 1e-3


class _Meter:
    """A meter of each step's time and peak memory above the weights."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._before = used_bytes(self._device)
        self._weights = 0
        self._started = 0.0

    def weights(self, model_dir: str) -> None:
        """Subtract the weights of `model_dir`, as they are on disk or in half precision, from the memory."""
        from safetensors import safe_open

        with safe_open(Path(model_dir) / "model.safetensors", "pt") as file:
            numbers = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
        self._weights = numbers * (2 if self._device.type == "cuda" else 4)

    def begin(self) -> None:
        """Start a step's measurement."""
        start_peak(self._device)
        self._started = time.perf_counter()

    def end(self) -> dict[str, Any]:
        """End a step's measurement; return its time and memory."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started
        return {"seconds": seconds, "peak_bytes": peak_bytes(self._device) - self._before - self._weights}


def run_edged(job: Job, converse: Conversation) -> None:
    """Answer questions: each `{"step": N}` is one optimizer step on the N-th group of pairs."""
    pairs: list[_TokenizedPair] = json.loads(Path(job.pairs).read_text())
    warm = _EdgedLearner(job, job.warm_model, job.pairs_per_step)
    warm.learn(0, pairs[: job.pairs_per_step])
    warm.close()
    del warm
    meter = _Meter(job.device)
    learner = _EdgedLearner(job, job.model, len(pairs))
    meter.weights(job.model)
    while True:
        first = converse.question()["step"] * job.pairs_per_step
        meter.begin()
        loss = learner.learn(first, pairs[first : first + job.pairs_per_step])
        converse.answer({**meter.end(), "loss": loss})


class _EdgedLearner:
    """An engine with one adapter, which a job of `count` examples trains or users' pairs, and nothing to serve."""

    def __init__(self, job: Job, model: str, count: int) -> None:
        from benchmarks.support.local_engine import LocalEngine
        from edged.align.jobs import JobPlan, job_settings

        if not job.packs:
            os.environ["EDGED_KERNELS"] = "pack_weights=off"
        settings: dict[str, dict[str, Any]] = {
            # Nothing is served: no decode iterations need be captured.
            "model": {"device": job.device, "dtype": job.dtype, "graph_memory_mb": 0},
            "cache": {"memory_mb": 256},
            "align": {
                "rank": job.rank,
                "alpha": job.alpha,
                "beta": job.beta,
                "learning_rate": job.learning_rate,
                "micro_batch_pairs": job.pairs_per_step,
                "replay_share": 0.0,
                "loss_threshold": 0.0,
                "practice": False,
                "max_active_adapters": 1,
                "recompute": job.recompute,
            },
            "guard": {"held_out_share": 0.0},
            "store": {"save_every_s": 3600.0},
        }
        self._local = LocalEngine(Path(model), settings)
        self._job = job
        if job.method != "dpo":
            align = job_settings(self._local.engine.settings.align, job.method, {"learning_rate": job.learning_rate})
            plan = JobPlan("job", "learner", align, count, job.pairs_per_step, epochs=1, seed=0)
            self._local.engine.start_job(plan).result()

    def learn(self, first_id: int, pairs: Sequence[_TokenizedPair]) -> float:
        """Run one optimizer step; return the mean loss before it."""
        from edged.align.feedback.pair import TokenPair

        recorder = self._local.recorder
        steps = len(recorder.versions)
        made = [
            TokenPair(
                pair_id=first_id + index,
                adapter="learner",
                prompt=tuple(pair["prompt_ids"]),
                chosen=tuple(pair["chosen_ids"]),
                rejected=tuple(pair["rejected_ids"]),
                ref_chosen_logp=pair["ref_chosen_logp"],
                ref_rejected_logp=pair["ref_rejected_logp"],
                trusted=self._job.method != "dpo",
            )
            for index, pair in enumerate(pairs)
        ]
        if self._job.method == "dpo":
            self._local.submit_pairs(made)
        else:
            self._local.engine.feed_job("learner", first_id // self._job.pairs_per_step, made)
        recorder.wait_for(lambda: len(recorder.versions) > steps or recorder.skipped_steps, "a step")
        if recorder.skipped_steps:
            raise RuntimeError(f"edged's engine: {recorder.skipped_steps[0].reason}")
        loss = recorder.versions[-1][1].loss
        assert loss is not None
        return loss

    def close(self) -> None:
        """Stop the engine."""
        self._local.close()


def run_trl(job: Job, converse: Conversation, checkpointing: bool, pairs_per_forward: int) -> None:
    """Answer questions: the first one prepares and returns the pairs in tokens; each further one is a step."""
    texts: list[dict[str, str]] = json.loads(Path(job.pairs).read_text())
    warm = _make_trainer(job, job.warm_model, texts[: job.pairs_per_step], checkpointing, pairs_per_forward)
    warm.train()
    del warm
    meter = _Meter(job.device)
    trainer = _make_trainer(job, job.model, texts, checkpointing, pairs_per_forward)
    meter.weights(job.model)
    converse.question()
    converse.answer({"pairs": [_tokenized(row) for row in trainer.train_dataset]})
    trainer.add_callback(_step_callback(converse, meter))
    trainer.train()
    converse.question()
    raise RuntimeError("there are no pairs left")


def _make_trainer(
    job: Job, model_dir: str, texts: list[dict[str, str]], checkpointing: bool, pairs_per_forward: int
) -> Any:
    """Make the method's trainer as TRL's documentation shows it, except for the precision, with the pairs in their
    given order."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    on_gpu, trainer_class = job.device.startswith("cuda"), DPOTrainer
    of_pairs = {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 1, "beta": job.beta}
    config_class = partial(DPOConfig, **of_pairs)
    if job.method == "supervised":
        trainer_class, config_class = SFTTrainer, SFTConfig
        texts = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in texts]
    config = config_class(
        output_dir=str(Path(model_dir) / "trl"),
        per_device_train_batch_size=pairs_per_forward,
        gradient_accumulation_steps=job.pairs_per_step // pairs_per_forward,
        num_train_epochs=1,
        max_length=None,
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        gradient_checkpointing=checkpointing,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    lora = LoraConfig(r=job.rank, lora_alpha=job.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    return trainer_class(
        model=load_llama(model_dir, job.dtype),
        args=config,
        train_dataset=Dataset.from_list(texts),
        processing_class=AutoTokenizer.from_pretrained(job.model, trust_remote_code=False, local_files_only=True),
        peft_config=lora,
    )


def _tokenized(row: dict[str, Any]) -> _TokenizedPair:
    """Convert a row of TRL's prepared data set to edged's tokenized pair."""
    if "labels" in row:
        scored = [label for label in row["labels"] if label >= 0]
        asked = row["input_ids"][: -len(scored)]
        return {"prompt_ids": asked, "chosen_ids": scored, "rejected_ids": [], **_UNSCORED}
    return {
        "prompt_ids": row["prompt_ids"],
        "chosen_ids": row["chosen_ids"],
        "rejected_ids": row["rejected_ids"],
        "ref_chosen_logp": row["ref_chosen_logps"],
        "ref_rejected_logp": row["ref_rejected_logps"],
    }


_UNSCORED = {"ref_chosen_logp": None, "ref_rejected_logp": None}


def _step_callback(converse: Conversation, meter: _Meter) -> Any:
    from transformers import TrainerCallback

    class StepByStep(TrainerCallback):
        """A trainer callback that waits for a question before each optimizer step and answers after it."""

        def __init__(self) -> None:
            self._measured: dict[str, Any] = {}

        def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
            converse.question()
            meter.begin()

        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            self._measured = meter.end()

        def on_log(self, *_args: Any, logs: dict[str, float], **_kwargs: Any) -> None:
            if "loss" in logs:
                converse.answer({**self._measured, "loss": float(logs["loss"])})

    return StepByStep()


_RUN: dict[str, Callable[[Job, Conversation], None]] = {
    EDGED: run_edged,
    TRL: lambda job, converse: run_trl(job, converse, True, job.pairs_per_step),
    TRL_FAST: lambda job, converse: run_trl(job, converse, False, job.pairs_per_step),
    TRL_SMALL: lambda job, converse: run_trl(job, converse, True, 1),
}


def be_side(name: str, told: str) -> None:
    """Run as a side; see `_RUN` for the questions."""
    _RUN[name](Job(**json.loads(told)), Conversation())


# -- the comparison ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the benchmark."""
    options = parse(
        __doc__,
        PAIRS,
        FORMAT,
        SIZE,
        option("--steps", "measured optimizer steps", 12, 2),
        option("--pairs-per-step", "pairs of one optimizer step", 4),
        option("--method", "dpo, or supervised: the chosen answers alone", "dpo", choices=("dpo", "supervised")),
        option("--recompute", "edged's align.recompute", "auto", choices=("auto", "full", "selective", "none")),
        flag("--unpacked", "edged without a packed copy of the weights (EDGED_KERNELS=pack_weights=off)"),
        option("--prompt-share", "only pairs whose prompt is this share of prompt + chosen", 0.0, least=0),
        DEVICE,
        option("--peer", "measure against this side alone", choices=SIDES[1:]),
        quick="a 4 M parameter model and two steps",
    )
    steps, dtype, shape = options.steps, device_dtype(options.device), SHAPES[options.size]
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as name:
        folder = Path(name)
        write_random_llama(folder / "model", shape, dtype)
        write_random_llama(folder / "warm", replace(SHAPES["4m"], vocab=shape.vocab), dtype)
        texts = [as_text(pair) for _, pair in read_pairs(options.pairs, options.format) if isinstance(pair, dict)]
        count = (steps + 1) * options.pairs_per_step
        chosen = choose_pairs(texts, folder / "model", shape.vocab, count, options.prompt_share)
        job = Job(
            model=str(folder / "model"),
            warm_model=str(folder / "warm"),
            pairs=str(folder / "texts.json"),
            device=options.device,
            dtype=dtype,
            pairs_per_step=options.pairs_per_step,
            method=options.method,
            recompute=options.recompute,
            packs=not options.unpacked,
        )
        Path(job.pairs).write_text(json.dumps(chosen))
        report = {
            "model": options.size,
            "method": options.method,
            "recompute": options.recompute,
            "packed": not options.unpacked,
            "pairs_file": options.pairs.name,
            "prompt_share_at_least": options.prompt_share,
        }
        peers = [options.peer] if options.peer else list(SIDES[1:])
        machine = measure_machine(torch.device(job.device), job.dtype)
        report |= measure(job, steps, folder / "tokens.json", peers, machine)
    finish(options, report, table(report))


def as_text(pair: dict[str, Any]) -> dict[str, str]:
    """Convert a pair to plain text, with dialogues in HH-RLHF's format."""
    names = {"user": "Human", "assistant": "Assistant"}
    turns = [f"\n\n{names.get(turn['role'], turn['role'])}: {turn['content']}" for turn in pair.get("messages", ())]
    prompt = "".join([*turns, "\n\nAssistant:"]) if turns else pair["prompt"]
    return {"prompt": prompt, "chosen": " " + pair["chosen"].strip(), "rejected": " " + pair["rejected"].strip()}


def choose_pairs(
    texts: list[dict[str, Any]], directory: Path, vocab: int, count: int, prompt_share: float
) -> list[dict[str, Any]]:
    """Return the first `count` pairs that are short enough, with long enough prompts, by a tokenizer trained on all
    texts."""
    tokenizer = write_tokenizer(directory, (text for pair in texts for text in pair.values()), vocab)
    chosen = []
    for pair in texts:
        prompt, *answers = (len(tokenizer.encode(pair[key])) for key in ("prompt", "chosen", "rejected"))
        if prompt + sum(answers) + 2 <= LONGEST_PAIR_TOKENS and prompt >= prompt_share * (prompt + answers[0]):
            chosen.append(pair)
        if len(chosen) == count:
            return chosen
    raise SystemExit(f"only {len(chosen)} of {len(texts)} pairs fit; {count} are needed: fewer --steps, other pairs")


def measure(job: Job, steps: int, tokens: Path, peer_names: list[str], machine: Machine) -> dict[str, Any]:
    """Measure steps in turns; edged gets the tokens and reference log-probabilities that TRL prepared."""
    header = report_header(job.device)
    with open_sides(sides_of("benchmarks.dpo", peer_names, job)) as running:
        prepared = [side.ask({})["pairs"] for side in running]
        tokens.write_text(json.dumps(prepared[0]))
        ((_, module, arguments),) = sides_of("benchmarks.dpo", [EDGED], replace(job, pairs=str(tokens)))
        with Side(EDGED, module, arguments) as ours:
            questions = ({"step": number} for number in range(steps + 1))
            answers = take_turns([ours, *running], questions, progress(step_text, lambda number: f"step {number}"))
    floor_s = floors(job, prepared[0], steps, machine)
    rates = {name: [job.pairs_per_step / a["seconds"] for a in found[1:]] for name, found in answers.items()}
    peaks = {name: max(a["peak_bytes"] for a in found) for name, found in answers.items()}
    used = prepared[0][job.pairs_per_step :]
    prompt_tokens = sum(len(pair["prompt_ids"]) for pair in used)
    answer_tokens = sum(len(pair["chosen_ids"]) + len(pair["rejected_ids"]) for pair in used)
    return {
        **header,
        "dtype": job.dtype,
        "versions": {**header["versions"], "trl": version("trl")},
        "steps": steps,
        "pairs_per_step": job.pairs_per_step,
        "mean_prompt_tokens": prompt_tokens / len(used),
        "mean_answer_tokens": answer_tokens / len(used) / (2 if job.method == "dpo" else 1),
        "pairs_per_s": rates,
        "losses": {name: [a["loss"] for a in found] for name, found in answers.items()},
        "peak_bytes_above_weights": peaks,
        "machine": asdict(machine),
        "floor_s": floor_s,
        "times_floor": {
            name: Spread.of([a["seconds"] / least for a, least in zip(found[1:], floor_s, strict=True)]).as_json()
            for name, found in answers.items()
        },
        "speed_ratios": {name: paired_ratio(rates[EDGED], rates[name]).as_json() for name in peer_names},
        "memory_ratios": {name: peaks[EDGED] / peaks[name] for name in peer_names},
    }


def floors(job: Job, pairs: list[dict[str, Any]], steps: int, machine: Machine) -> list[float]:
    """Return the least seconds of each measured step; the first group of pairs is the warm-up's."""
    sizes = Sizes.of(Path(job.model), job.dtype, job.rank)
    lengths = [(len(pair["prompt_ids"]), len(pair["chosen_ids"]), len(pair["rejected_ids"])) for pair in pairs]
    groups = (lengths[step * job.pairs_per_step :][: job.pairs_per_step] for step in range(1, steps + 1))
    return [dpo_step(sizes, group).floor_s(machine) for group in groups]


def step_text(answer: dict[str, Any]) -> str:
    """Format a step as a line of progress."""
    return f"{answer['seconds']:.2f} s, {answer['peak_bytes'] / 2**20:.0f} MiB, loss {answer['loss']:.4f}"


def table(report: dict[str, Any]) -> str:
    """Return the ratios as a Markdown table; rates only for a GPU."""
    ratios = [
        (f"{name} (its defaults)" if name == TRL else name, Spread.read(ratio).text(), f"{memory:.2f}")
        for (name, ratio), memory in zip(report["speed_ratios"].items(), report["memory_ratios"].values(), strict=True)
    ]
    reached = f"{1e3 * median(report['floor_s']):.0f} ms at {Machine(**report['machine']).text()}"
    floors = [(name, Spread.read(times).text()) for name, times in report["times_floor"].items()]
    mib = ", ".join(f"{name} {peak / 2**20:.0f}" for name, peak in report["peak_bytes_above_weights"].items())
    lines = [
        f"{report['model']} random-weight Llama, {report['method']}, {report['steps']} steps of "
        f"{report['pairs_per_step']} pairs from {report['pairs_file']} (mean prompt {report['mean_prompt_tokens']:.0f},"
        f" answer {report['mean_answer_tokens']:.0f} tokens), {report['dtype']}, {report['device']}",
        "",
        *markdown(("edged over", "pairs/s (quartiles)", "peak memory above the weights"), ratios),
        "",
        *markdown(("side", f"step over its floor of {reached} (quartiles)"), floors),
        "",
        f"Peak MiB above the weights: {mib}",
    ]
    if not report["device"].startswith("CPU"):
        rates = [(name, Spread.of(rates).text(1)) for name, rates in report["pairs_per_s"].items()]
        lines += ["", *markdown(("side", "pairs/s"), rates)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
