"""Loss and gradient of every loss are those of TRL's own trainers by autograd, wherever the units are cut."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from datasets import Dataset
from torch.nn.functional import huber_loss
from trl import KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from edged.align.dpo.loss import LOSSES
from edged.align.dpo.step_plan import Recompute
from edged.align.feedback.pair import TokenPair
from edged.settings.load import AlignSettings
from tests.align.dpo.test_dpo_exact import (
    BETA,
    Gradients,
    gradients_of,
    load_weights,
    make_pairs,
    peft_model,
    trl_gradients,
    unit_gradients,
    worst_error,
)
from tests.models import byte_tokenizer, tiny_model

QUIET = {
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "max_length": None,
}
WAYS = pytest.mark.parametrize(
    ("window", "recompute"),
    [
        (16, "full"),
        pytest.param(500, "full", marks=pytest.mark.slow),
        pytest.param(500, "none", marks=pytest.mark.slow),
        (500, "selective"),
    ],
)
PAIR = {"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}


def padded(sequences: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    width = max(map(len, sequences))
    return torch.tensor([[*ids, *[value] * (width - len(ids))] for ids in sequences])


def texts(sides: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, torch.Tensor]:
    """Prompts with their answers, in the form that TRL's collators give."""
    whole = [[*prompt, *answer] for prompt, answer in sides]
    scored = [[0] * len(prompt) + [1] * len(answer) for prompt, answer in sides]
    labels = [[-100] * len(prompt) + list(answer) for prompt, answer in sides]
    return {
        "input_ids": padded(whole, 0),
        "attention_mask": padded([[1] * len(ids) for ids in whole], 0),
        "completion_mask": padded(scored, 0),
        "labels": padded(labels, -100),
    }


def by_trl(trainer: Any, weights: dict[str, torch.Tensor], loss: Any) -> tuple[Gradients, float]:
    load_weights(trainer.model, weights)
    trainer.model.eval()
    value = loss(trainer)
    value.backward()
    return gradients_of(trainer.model, weights), float(value)


def pairwise(kind: str, pair: TokenPair, weights: dict[str, torch.Tensor], folder: Path, **how: Any) -> Any:
    """TRL's SimPO (of its CPOTrainer) or ORPO of one pair."""
    made = {"simpo": (CPOTrainer, CPOConfig), "orpo": (ORPOTrainer, ORPOConfig)}
    trainer_class, config = made[kind]
    args = config(output_dir=str(folder), beta=BETA, disable_dropout=True, **QUIET, **how)
    rows = Dataset.from_dict(PAIR)
    model = peft_model(tiny_model("llama"))
    trainer = trainer_class(model, args=args, train_dataset=rows, processing_class=byte_tokenizer())
    sides = {name: texts([(pair.prompt, getattr(pair, name))]) for name in ("chosen", "rejected")}
    batch = {f"{name}_{key}": value for name, found in sides.items() for key, value in found.items()}
    batch = {key: value for key, value in batch.items() if "completion" not in key}
    return by_trl(trainer, weights, lambda trainer: trainer.get_batch_loss_metrics(trainer.model, batch)[0])


def test_every_loss_that_can_be_set_has_a_row() -> None:
    assert sorted(LOSSES) == sorted(get_args(AlignSettings.model_fields["loss"].annotation))


@WAYS
def test_cdpo_equals_trls(window: int, recompute: Recompute, tmp_path: Path) -> None:
    pairs, how = make_pairs(19)[:1], {"label_smoothing": 0.2}
    got, step, weights = unit_gradients(tiny_model("llama"), pairs, window, 23, recompute=recompute, **how)
    # TRL smooths the labels of AOT, which is DPO where a batch is one pair.
    wanted, loss = trl_gradients(tiny_model("llama"), pairs, weights, tmp_path, "aot", **how)
    assert step.loss == pytest.approx(loss, rel=1e-5)
    assert worst_error(got, wanted) <= 1e-5


@WAYS
@pytest.mark.parametrize("smoothing", [0.1, pytest.param(0.0, marks=pytest.mark.slow)])
def test_simpo_equals_trls(smoothing: float, window: int, recompute: Recompute, tmp_path: Path) -> None:
    pair = make_pairs(19)[0]
    how = {"loss": "simpo", "simpo_gamma": 0.4, "label_smoothing": smoothing}
    got, step, weights = unit_gradients(tiny_model("llama"), [pair], window, 23, recompute=recompute, **how)
    how = {"loss_type": "simpo", "simpo_gamma": 0.4, "label_smoothing": smoothing, "cpo_alpha": 0.0}
    wanted, loss = pairwise("simpo", pair, weights, tmp_path, **how)
    assert step.loss == pytest.approx(loss, rel=1e-5)
    assert worst_error(got, wanted) <= 1e-5


def test_simpo_with_the_chosen_answers_nll_equals_trls(tmp_path: Path) -> None:
    pair = make_pairs(19)[0]
    how = {"loss": "simpo", "sft_weight": 0.7}
    got, _, weights = unit_gradients(tiny_model("llama"), [pair], 16, 23, **how)
    wanted, _ = pairwise("simpo", pair, weights, tmp_path, loss_type="simpo", simpo_gamma=0.5, cpo_alpha=0.7)
    assert worst_error(got, wanted) <= 1e-5


@WAYS
@pytest.mark.parametrize("prompt", [0, 19])
def test_orpo_equals_trls(prompt: int, window: int, recompute: Recompute, tmp_path: Path) -> None:
    pair = make_pairs(prompt)[0]
    got, step, weights = unit_gradients(tiny_model("llama"), [pair], window, 23, recompute=recompute, loss="orpo")
    wanted, loss = pairwise("orpo", pair, weights, tmp_path)
    assert step.loss == pytest.approx(loss, rel=1e-5)
    assert worst_error(got, wanted) <= 1e-5


@WAYS
@pytest.mark.parametrize("loss", ["sft", "dft"])
def test_the_chosen_answers_nll_equals_trls(loss: str, window: int, recompute: Recompute, tmp_path: Path) -> None:
    # Of different lengths: the mean is over tokens.
    pairs = make_pairs(19)
    cut = partial(random.Random(0).choice, [0, 1, 5, 16, 48])
    how = {"recompute": recompute, "loss": loss, "preempt_at": (3, 9), "cut_to": cut}
    got, step, weights = unit_gradients(tiny_model("llama"), pairs, window, 23, **how)
    args = SFTConfig(output_dir=str(tmp_path), loss_type="nll" if loss == "sft" else "dft", **QUIET)
    rows = Dataset.from_dict({"prompt": ["a"], "completion": ["b"]})
    model = peft_model(tiny_model("llama"))
    trainer = SFTTrainer(model, args=args, train_dataset=rows, processing_class=byte_tokenizer())
    inputs = texts([(pair.prompt, pair.chosen) for pair in pairs])
    del inputs["completion_mask"]
    wanted, value = by_trl(trainer, weights, lambda trainer: trainer.compute_loss(trainer.model, inputs))
    assert step.loss == pytest.approx(value, rel=1e-5)
    assert worst_error(got, wanted) <= 1e-5


def ratings(good: Sequence[bool], seed: int = 0) -> list[TokenPair]:
    """Answers of 7 to 30 tokens that were rated good or bad; the base has not scored them."""
    sides = [(pair.prompt, answer) for pair in make_pairs(19, seed) for answer in (pair.chosen, pair.rejected)]
    blank = TokenPair(0, "ann", (), (), ())
    return [
        replace(blank, pair_id=number, prompt=prompt, **{"chosen" if is_good else "rejected": answer})
        for number, (is_good, (prompt, answer)) in enumerate(zip(good, sides, strict=False), 1)
    ]


def rated_by_trl(rated: list[TokenPair], weights: dict[str, torch.Tensor], folder: Path, loss: str) -> Any:
    """TRL's loss over all ratings in one batch; the base is its reference."""
    args = KTOConfig(
        output_dir=str(folder),
        beta=BETA,
        loss_type=loss,
        disable_dropout=True,
        per_device_train_batch_size=max(2, len(rated)),
        **QUIET,
    )
    rows = Dataset.from_dict({"prompt": ["a", "b"], "completion": ["c", "d"], "label": [True, False]})
    model = peft_model(tiny_model("llama"))
    trainer = KTOTrainer(model, args=args, train_dataset=rows, processing_class=byte_tokenizer())
    answers = [pair.chosen or pair.rejected for pair in rated]
    prompts = [pair.prompt for pair in rated]
    inputs = texts(list(zip(prompts, answers, strict=True)))
    other = texts(list(zip(prompts, answers[-1:] + answers[:-1], strict=True)))
    inputs |= {f"KL_{key}": value for key, value in other.items()} if loss == "kto" else {}
    inputs = {key: value for key, value in inputs.items() if "labels" not in key}
    inputs["label"] = torch.tensor([bool(pair.chosen) for pair in rated])
    return by_trl(trainer, weights, lambda trainer: trainer._compute_loss(trainer.model, inputs, False))


# With seed 1 the adapter raises answers to other prompts, with seed 0 it lowers them: KTO's origin is 0 then.
@WAYS
@pytest.mark.parametrize(
    ("loss", "seed"), [("apo", 1), ("kto", 1), pytest.param("kto", 0, marks=pytest.mark.slow)], ids=str
)
def test_ratings_of_single_answers_equal_trls(
    loss: str, seed: int, window: int, recompute: Recompute, tmp_path: Path
) -> None:
    # At 16 tokens a window each of them has a group of its own.
    rated = ratings([True, False, True], seed)
    cut = partial(random.Random(0).choice, [0, 1, 5, 16, 48])
    how = {"recompute": recompute, "unpaired": loss, "preempt_at": (3, 6, 9, 14, 22, 40), "cut_to": cut}
    got, step, weights = unit_gradients(tiny_model("llama"), rated, window, 23, **how)
    kind = {"apo": "apo_zero_unpaired", "kto": "kto"}[loss]
    wanted, value = rated_by_trl(rated, weights, tmp_path, kind)
    assert step.loss == pytest.approx(value, rel=1e-5)
    assert worst_error(got, wanted) <= 1e-5
    assert [outcome.pair.pair_id for outcome in step.outcomes] == [1, 2, 3]
    assert not step.scores, "one answer has no margin over another"
    if loss == "kto":
        without, _ = rated_by_trl(rated, weights, tmp_path, "apo_zero_unpaired")
        assert (worst_error(without, wanted) > 0.01) == (seed == 1), "the origin matters"


def test_a_rating_that_is_alone_has_no_origin_to_be_measured_from(tmp_path: Path) -> None:
    rated = ratings([False])
    got, step, weights = unit_gradients(tiny_model("llama"), rated, 16, 23, unpaired="kto")
    wanted, value = rated_by_trl(rated, weights, tmp_path, "apo_zero_unpaired")
    assert step.loss == pytest.approx(value, rel=1e-5)
    assert worst_error(got, wanted) <= 1e-5


@WAYS
def test_an_imitated_answer_that_has_floors_equals_torchs_huber_loss(window: int, recompute: Recompute) -> None:
    pair = replace(make_pairs(19)[0], rejected=(), imitate=True, ref_chosen_logp=0.0, ref_rejected_logp=0.0)
    floors = (math.inf, -9.0, -6.0, -5.5, -5.0, -4.5, -1.0) * 2
    pair = replace(pair, floors=floors[: len(pair.chosen)])
    got, step, weights = unit_gradients(tiny_model("llama"), [pair], window, 23, recompute=recompute)
    model = peft_model(tiny_model("llama")).eval()
    load_weights(model, weights)
    ids, begin = torch.tensor([[*pair.prompt, *pair.chosen]]), len(pair.prompt)
    logps = model(ids).logits[0, begin - 1 : -1].log_softmax(-1).gather(1, ids[0, begin:, None])[:, 0]
    known = torch.tensor(pair.floors)
    learned = known.isinf()
    below = logps[~learned].minimum(known[~learned])
    loss = (huber_loss(below, known[~learned], reduction="sum") - logps[learned].sum()) / learned.sum()
    loss.backward()
    assert step.loss == pytest.approx(float(loss), rel=1e-5)
    assert worst_error(got, gradients_of(model, weights)) <= 1e-5
