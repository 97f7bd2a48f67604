"""Training by TRL's DPOTrainer, as its documentation shows it, on the very tokens of the stored pairs."""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from edged.align.adapters.adapter import MAX_GRAD_NORM
from edged.align.dpo.loss import LOSSES
from edged.align.feedback.pair import TokenPair
from edged.settings.load import AlignSettings

REBUILT = "default"
"""The trained adapter's name in the PEFT model."""


class RebuildError(RuntimeError):
    """An adapter cannot be rebuilt or adopted; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Options of a rebuild beyond the settings' LoRA, beta, loss, step size in pairs and clipping."""

    epochs: int
    learning_rate: float
    seed: int = 0


def check_loss(align: AlignSettings) -> None:
    """Check that TRL's DPOTrainer has the loss of these settings. Raises RebuildError."""
    if LOSSES[align.loss].trl is None:
        names = " or ".join(f'"{name}"' for name, row in LOSSES.items() if row.trl)
        way_out = f"set it to {names} in a file for --config"
        raise RebuildError(f'align.loss = "{align.loss}" is none of TRL\'s DPOTrainer: {way_out}')
    if align.label_smoothing and align.loss == "sigmoid":
        way_out = "set it to 0 in a file for --config"
        raise RebuildError(f"align.label_smoothing = {align.label_smoothing}: TRL's DPO smooths no labels: {way_out}")


def check_trl() -> None:
    """Check that TRL is installed, and switch its telemetry off. Raises RebuildError."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    try:
        import trl  # noqa: F401
    except ImportError:
        way_out = f"`{sys.executable} -P -m pip install trl`, or, from a checkout, `sudo tools/install --with rebuild`"
        raise RebuildError(f"TRL is not installed for this edged: {way_out}") from None


def train(
    base: Any,
    tokenizer: Any,
    targets: Sequence[str],
    pairs: Sequence[TokenPair],
    align: AlignSettings,
    recipe: Recipe,
    progress: Callable[[int, int, float], None],
) -> tuple[Any, int]:
    """Train an adapter on `pairs`; return (a PEFT model over transformers' `base`, the number of optimizer steps).

    `targets` are the linears' names. `progress(step, steps, loss)` is called after each optimizer step.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from transformers.trainer_callback import PrinterCallback, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class ServedTokens(DPOTrainer):
        """A DPOTrainer that takes tokenized pairs: tokenizing them again might give other tokens than were served."""

        def _prepare_dataset(self, dataset: Any, *_arguments: Any, **_options: Any) -> Any:
            return dataset

    class Progress(TrainerCallback):
        def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                progress(state.global_step, state.max_steps, float(logs["loss"]))

    rows = [
        {"prompt_ids": list(pair.prompt), "chosen_ids": list(pair.chosen), "rejected_ids": list(pair.rejected)}
        for pair in pairs
    ]
    with tempfile.TemporaryDirectory(prefix="edged-") as folder:
        # The same step as edged's; all output goes to the temporary folder.
        config = DPOConfig(
            output_dir=folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=min(align.micro_batch_pairs, len(pairs)),
            num_train_epochs=recipe.epochs,
            learning_rate=recipe.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=MAX_GRAD_NORM,
            beta=align.beta,
            loss_type=[LOSSES[align.loss].trl, *(["sft"] if align.sft_weight else [])],
            loss_weights=[1.0, align.sft_weight] if align.sft_weight else None,
            max_length=None,
            bf16=base.dtype == torch.bfloat16,
            use_cpu=base.device.type == "cpu",
            seed=recipe.seed,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        lora = LoraConfig(r=align.rank, lora_alpha=align.alpha, target_modules=list(targets), task_type="CAUSAL_LM")
        data = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
        trainer = ServedTokens(model=base, args=config, peft_config=lora, callbacks=[Progress()], **data)
        # TRL's own lines would interrupt the progress.
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return trainer.model.eval(), trainer.state.global_step
