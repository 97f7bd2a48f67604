"""Learning speed: edged's DPO steps, run by its engine, beside TRL's DPOTrainer.

Owns the sides and the job they share: the same pairs in the same tokens, as many in each optimizer step, LoRA of one
rank on all linear layers, reference log-probabilities computed beforehand. Each side runs in a process of its own (see
`benchmarks.support.interleave`), because peak memory is a process's.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.interleave import Conversation
from edged.profiler.proc_memory import peak_bytes, start_peak, used_bytes

EDGED, TRL, TRL_FAST, TRL_SMALL = "edged", "TRL", "TRL without checkpointing", "TRL pair by pair"
SIDES = (EDGED, TRL, TRL_FAST, TRL_SMALL)
"""TRL with its defaults; as fast as it can; and with one pair per forward, gradients accumulated, to save memory."""
_LONGEST_WAIT_S = 600.0
_TokenizedPair = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """What every side is told at its start.

    `warm_model` is a small model of the same vocabulary: a step on it loads what is loaded late.

    `pairs` is a JSON list of {"prompt", "chosen", "rejected"} texts for TRL, of {"prompt_ids", "chosen_ids",
    "rejected_ids", "ref_chosen_logp", "ref_rejected_logp"} for edged.
    """

    model: str
    warm_model: str
    pairs: str
    device: str
    dtype: str
    pairs_per_step: int
    rank: int = 16
    alpha: int = 32
    beta: float = 0.1
    learning_rate: float = 1e-3


class _Meter:
    """Time of each step and peak memory above the weights."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._before = used_bytes(self._device)
        self._weights = 0
        self._started = 0.0

    def weights(self, model_dir: str) -> None:
        """Leave the weights of `model_dir`, as they are on disk or in half precision, out of the count."""
        from safetensors import safe_open

        with safe_open(Path(model_dir) / "model.safetensors", "pt") as file:
            numbers = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
        self._weights = numbers * (2 if self._device.type == "cuda" else 4)

    def begin(self) -> None:
        """A step starts."""
        start_peak(self._device)
        self._started = time.perf_counter()

    def end(self) -> dict[str, Any]:
        """The step ended: its time and memory."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started
        return {"seconds": seconds, "peak_bytes": peak_bytes(self._device) - self._before - self._weights}


def run_edged(job: Job, converse: Conversation) -> None:
    """Each question `{"step": N}` is one optimizer step on the N-th group of pairs."""
    pairs: list[_TokenizedPair] = json.loads(Path(job.pairs).read_text())
    warm = _EdgedLearner(job, job.warm_model)
    warm.learn(0, pairs[: job.pairs_per_step])
    warm.close()
    del warm
    meter = _Meter(job.device)
    learner = _EdgedLearner(job, job.model)
    meter.weights(job.model)
    while True:
        first = converse.question()["step"] * job.pairs_per_step
        meter.begin()
        loss = learner.learn(first, pairs[first : first + job.pairs_per_step])
        converse.answer({**meter.end(), "loss": loss})


class _EdgedLearner:
    """The engine with one adapter and nothing to serve."""

    def __init__(self, job: Job, model: str) -> None:
        from edged.align.feedback.pair import PairScored, Record, StepSkipped, VersionPublished
        from edged.engine.engine import Engine
        from edged.settings.load import Settings

        settings = Settings.model_validate(
            {
                "model": {"device": job.device, "dtype": job.dtype},
                "cache": {"memory_mb": 256},
                "align": {
                    "rank": job.rank,
                    "alpha": job.alpha,
                    "beta": job.beta,
                    "learning_rate": job.learning_rate,
                    "micro_batch_pairs": job.pairs_per_step,
                    "replay_share": 0.0,
                    "loss_threshold": 0.0,
                    "max_active_adapters": 1,
                },
                "guard": {"held_out_share": 0.0},
                "store": {"save_every_s": 3600.0},
            }
        )
        self._done = threading.Semaphore(0)
        self._losses: list[float] = []
        self._problem = ""

        def journal(records: list[Record]) -> None:
            for record in records:
                if isinstance(record, PairScored):
                    self._losses.append(record.loss)
                elif isinstance(record, StepSkipped):
                    self._problem = record.reason
                    self._done.release()
                elif isinstance(record, VersionPublished):
                    self._done.release()

        self._engine = Engine.build(settings, Path(model), lambda _events: None, journal, None)
        self._engine.start()

    def learn(self, first_id: int, pairs: Sequence[_TokenizedPair]) -> float:
        """One optimizer step; returns the mean loss before it."""
        from edged.align.feedback.pair import TokenPair

        self._losses.clear()
        self._engine.submit_pairs(
            [
                TokenPair(
                    pair_id=first_id + index,
                    adapter="learner",
                    prompt=tuple(pair["prompt_ids"]),
                    chosen=tuple(pair["chosen_ids"]),
                    rejected=tuple(pair["rejected_ids"]),
                    ref_chosen_logp=pair["ref_chosen_logp"],
                    ref_rejected_logp=pair["ref_rejected_logp"],
                )
                for index, pair in enumerate(pairs)
            ]
        )
        if not self._done.acquire(timeout=_LONGEST_WAIT_S) or self._problem:
            raise RuntimeError(f"edged's engine: {self._engine.error or self._problem or 'no step in time'}")
        return sum(self._losses) / len(self._losses)

    def close(self) -> None:
        """Stop the engine."""
        self._engine.stop(0.0)


def run_trl(job: Job, converse: Conversation, checkpointing: bool, pairs_per_forward: int) -> None:
    """The first question prepares and is answered with the pairs in tokens; each further one is a step."""
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
    """TRL as its documentation shows it, but for the precision, and with the pairs in their given order."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    on_gpu = job.device.startswith("cuda")
    config = DPOConfig(
        output_dir=str(Path(model_dir) / "trl"),
        per_device_train_batch_size=pairs_per_forward,
        gradient_accumulation_steps=job.pairs_per_step // pairs_per_forward,
        precompute_ref_log_probs=True,
        precompute_ref_batch_size=1,
        num_train_epochs=1,
        max_length=None,
        beta=job.beta,
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
    model = AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=getattr(torch, job.dtype),
        attn_implementation="sdpa",
        trust_remote_code=False,
        local_files_only=True,
    )
    lora = LoraConfig(r=job.rank, lora_alpha=job.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    return DPOTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(texts),
        processing_class=AutoTokenizer.from_pretrained(job.model, trust_remote_code=False, local_files_only=True),
        peft_config=lora,
    )


def _tokenized(row: dict[str, Any]) -> _TokenizedPair:
    """A row of TRL's prepared data set as edged takes it."""
    return {
        "prompt_ids": row["prompt_ids"],
        "chosen_ids": row["chosen_ids"],
        "rejected_ids": row["rejected_ids"],
        "ref_chosen_logp": row["ref_chosen_logps"],
        "ref_rejected_logp": row["ref_rejected_logps"],
    }


def _step_callback(converse: Conversation, meter: _Meter) -> Any:
    from transformers import TrainerCallback

    class StepByStep(TrainerCallback):
        """Waits for a question before each optimizer step and answers after it."""

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


def side_arguments(name: str, job: Job) -> list[str]:
    """Command-line arguments of this module that make a process the side `name`."""
    return [name, json.dumps(asdict(job))]


def main(arguments: list[str]) -> None:
    """Be one side."""
    _RUN[arguments[0]](Job(**json.loads(arguments[1])), Conversation())


if __name__ == "__main__":
    main(sys.argv[1:])
