"""The units' gradient is the gradient of TRL's DPO loss by autograd, whatever the windows and chunks."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftConfig, get_peft_model
from transformers import PreTrainedModel
from trl import DPOConfig, DPOTrainer

from edged.align.adapters.adapter import MAX_GRAD_NORM, AdapterState
from edged.align.adapters.form import LoraSpec
from edged.align.dpo.adapter_step import AdapterStep
from edged.align.dpo.micro_batch import MicroBatch
from edged.align.dpo.step import DpoStep
from edged.align.dpo.step_plan import Recompute
from edged.align.feedback.outliers import OutlierDetector, OutlierHistory
from edged.align.feedback.pair import TokenPair
from edged.engine.attention.packed_batch import pack
from edged.engine.attention.paged import IMPLEMENTATION, attention_over, attention_pass
from edged.engine.kv.store import KvStore
from edged.engine.model.layer_access import LayerTap, PagedDecoder
from edged.engine.model.served_model import ServedModel
from edged.engine.model_runner import capture_plan_of, segments_of
from edged.settings.live import Live
from edged.settings.load import AlignSettings, FeedbackSettings, Settings
from tests.models import ARCHITECTURES, DEVICE, byte_tokenizer, tiny_model

BETA = 0.3
ROUNDING = 2e-5 if DEVICE.type == "cpu" else 3e-5
"""Largest share of a gradient that two orders of fp32 sums differ by: a GPU adds up more of them at once."""


def slow(*values: Any) -> Any:
    """Parameters that only the long run takes."""
    return pytest.param(*values, marks=pytest.mark.slow)


Gradients = dict[str, tuple[torch.Tensor, ...]]


def make_pairs(prompt: int, seed: int = 0, adapter: str = "ann") -> list[TokenPair]:
    rng = np.random.default_rng(seed)
    lengths = [(prompt, 13, 30), (prompt and prompt + 9, 21, 7)]
    return [
        TokenPair(
            10 * seed + i,
            adapter,
            *(tuple(rng.integers(3, 250, n).tolist()) for n in (p, c, r)),
            ref_chosen_logp=-20.0 - i,
            ref_rejected_logp=-31.0,
        )
        for i, (p, c, r) in enumerate(lengths)
    ]


def trained_adapter(model: ServedModel, align: AlignSettings, name: str = "ann") -> AdapterState:
    shapes = {name: (linear.in_features, linear.out_features) for name, linear in model.lora.linears.items()}
    spec = LoraSpec(shapes, align.rank, align.alpha, "base", "f", tuple(shapes))
    state = AdapterState(name, spec.form, Live(Settings(align=align)), DEVICE)
    generator = torch.Generator().manual_seed(sum(name.encode()))
    with torch.no_grad():
        for _, b in state.weights.values():
            b.copy_(torch.empty(b.shape).normal_(0.0, 0.05, generator=generator))
    state.version = 1
    return state


@dataclass
class Stepped:
    """What a step left behind, by adapter."""

    adapter_steps: dict[str, AdapterStep]
    gradients: dict[str, Gradients]
    before: dict[str, dict[str, torch.Tensor]]
    """Weights by PEFT's names."""

    def moved(self, adapter: str) -> torch.Tensor:
        """How far the optimizer took all weights."""
        now = self.adapter_steps[adapter].state.tensors()
        return torch.cat([(now[name] - value).flatten() for name, value in self.before[adapter].items()])


def take_step(
    base: PreTrainedModel,
    pairs: dict[str, list[TokenPair]],
    window: int,
    chunk: int,
    preempt_at: tuple[int, ...] = (),
    recompute: Recompute = "full",
    broken: str = "",
    suspicion: OutlierDetector | None = None,
    cut_to: Callable[[], int] = lambda: 0,
    ahead: Callable[[], bool] = lambda: False,
    begun: dict[str, AdapterState] | None = None,
    **settings: Any,
) -> Stepped:
    """Run all pieces as the engine does: packed forward in chunks of `chunk`, then unit by unit.

    Before the units of the numbers `preempt_at` the step loses its pages. The weights of `broken` are not finite.
    Every adapter's pairs are judged by `suspicion`. Of each unit `cut_to` says how many rows are computed at once.
    Before each unit `ahead` says whether a chunk of the next group's forward comes first.
    `settings` are those of the loss and, unless the adapters have `begun` before, of their steps.
    """
    fixed = {"rank": 4, "alpha": 8.0, "beta": BETA, "window_tokens": window, "loss_threshold": 0.0}
    align = AlignSettings(**fixed | {"sft_weight": 0.0} | settings)
    base.requires_grad_(False).to(DEVICE).set_attn_implementation(IMPLEMENTATION)
    model = ServedModel(base)
    model.attach_lora(align, slots=4)
    kv = model.new_kv(80, 8, steps=1)
    tap, decoder = LayerTap(model), PagedDecoder(model, kv)
    states = begun or {name: trained_adapter(model, align, name) for name in pairs}
    if broken:
        next(iter(states[broken].weights.values()))[1].data[0] = float("nan")
    slots = {name: slot for slot, name in enumerate(pairs, 1)}
    for name, state in states.items():
        model.lora.load(slots[name], state.served, state.form.scalings)
    free = list(range(1, 80))
    adapter_steps = [AdapterStep(state, pairs[name], [], suspicion) for name, state in states.items()]
    step = DpoStep(adapter_steps, decoder, align, lambda pages: free.extend(pages.tolist()), 10_000, recompute)
    captured: dict[str, Gradients] = {}
    before = {name: state.tensors() for name, state in states.items()}
    for state in states.values():
        capture_gradients(state, captured)
    ran = 0
    while not step.finished:
        if step.micro_batch.tokens_left or (ahead() and may_look_ahead(step)):
            compute_chunk(step.packing, chunk, model, kv, tap, slots, free)
        elif (ran := ran + 1) in preempt_at:
            step.restart()
        else:
            step.run_unit(cut_to())
    assert sorted(free) == list(range(1, 80)), "the step gave all pages back"
    return Stepped(step.adapter_steps, captured, before)


def compute_chunk(
    micro_batch: MicroBatch,
    chunk: int,
    model: ServedModel,
    kv: KvStore,
    tap: LayerTap,
    slots: dict[str, int],
    free: list[int],
) -> None:
    """Compute the next `chunk` tokens of a micro-batch as the engine does, on pages from `free`."""
    n = min(chunk, micro_batch.tokens_left)
    taken = micro_batch.next_pieces(n)
    segments = segments_of(taken, slots, 8, lambda k: np.array([free.pop() for _ in range(k)]), (1, 2))
    with torch.inference_mode():
        batch = pack(segments, kv, DEVICE)
        tap.arm([capture_plan_of(micro_batch, taken, segments, DEVICE)])
        with attention_pass(attention_over(batch, kv)), model.lora.packed(batch.runs):
            model.forward(batch.input_ids, batch.position_ids, batch.logit_rows)
        tap.arm([])
    micro_batch.advance(n)


def may_look_ahead(step: DpoStep) -> bool:
    """Whether a step has tokens of its next group to compute, after it was let."""
    step.look_ahead()
    return step.packing.tokens_left > 0


def capture_gradients(state: AdapterState, into: dict[str, Gradients]) -> None:
    """Have the mean gradient of the state's next step kept in `into`."""
    take = state.step

    def step(gradients: Gradients, pairs: int, *more: float) -> float:
        into[state.name] = {name: tuple(each.cpu() / pairs for each in own) for name, own in gradients.items()}
        return take(gradients, pairs, *more)

    state.step = step  # type: ignore[method-assign]


def unit_gradients(
    base: PreTrainedModel, pairs: list[TokenPair], window: int, chunk: int, **how: Any
) -> tuple[Gradients, AdapterStep, dict[str, torch.Tensor]]:
    """Gradient, member and weights (before it) of one adapter's step."""
    made = take_step(base, {"ann": pairs}, window, chunk, **how)
    return made.gradients["ann"], made.adapter_steps["ann"], made.before["ann"]


def peft_model(base: PreTrainedModel, targets: str | list[str] = "all-linear", config: PeftConfig | None = None) -> Any:
    base.set_attn_implementation("eager")
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(base, config or lora)


def load_weights(model: Any, weights: dict[str, torch.Tensor]) -> None:
    own = dict(model.named_parameters())
    for key, value in weights.items():
        # Over a quantized base TRL would have them in bfloat16.
        own[_in_peft(key)].data = value.clone()


def _in_peft(key: str) -> str:
    """A saved weight's name in a PEFT model."""
    if key.endswith("lora_magnitude_vector"):
        return f"{key}.default.weight"
    return key.replace(".weight", ".default.weight") if ".lora_" in key else f"{key}.default"


def gradients_of(model: Any, weights: dict[str, torch.Tensor]) -> Gradients:
    """What `backward` left in a PEFT model, by edged's names."""
    named, found = dict(model.named_parameters()), {}
    for key in weights:
        name = re.sub(r"\.(lora_[AB]\.weight|lora_magnitude_vector|ia3_l)$", "", key).removeprefix("base_model.model.")
        found[name] = (*found.get(name, ()), named[_in_peft(key)].grad)
    return found


def trl_gradients(
    base: PreTrainedModel,
    pairs: list[TokenPair],
    weights: dict[str, torch.Tensor],
    folder: Path,
    loss: str = "sigmoid",
    sft_weight: float = 0.0,
    label_smoothing: float = 0.0,
    targets: str | list[str] = "all-linear",
    config: PeftConfig | None = None,
) -> tuple[Gradients, float]:
    """TRL's own loss function over a PEFT model with the same weights, by autograd."""
    model = peft_model(base, targets, config)
    rows = {"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}
    args = DPOConfig(
        output_dir=str(folder),
        beta=BETA,
        loss_type=[loss, "sft"],
        loss_weights=[1.0, sft_weight],
        label_smoothing=label_smoothing,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        disable_dropout=True,
    )
    trainer = DPOTrainer(model, args=args, train_dataset=Dataset.from_dict(rows), processing_class=byte_tokenizer())
    load_weights(trainer.model, weights)
    width = max(len(p.prompt) + max(len(p.chosen), len(p.rejected)) for p in pairs)
    ids, attention, completion = [], [], []
    for answer in ("chosen", "rejected"):
        for pair in pairs:
            tokens = [*pair.prompt, *getattr(pair, answer)]
            pad = width - len(tokens)
            ids.append([*tokens, *[0] * pad])
            attention.append([1] * len(tokens) + [0] * pad)
            completion.append([0] * len(pair.prompt) + [1] * len(getattr(pair, answer)) + [0] * pad)
    inputs = {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor(attention),
        "completion_mask": torch.tensor(completion),
        "ref_chosen_logps": torch.tensor([p.ref_chosen_logp for p in pairs]),
        "ref_rejected_logps": torch.tensor([p.ref_rejected_logp for p in pairs]),
    }
    # Not in train mode, which makes bitsandbytes compute 8-bit products in another way.
    trainer.model.eval()
    trainer.precompute_ref_logps = True
    value = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
    value.backward()
    return gradients_of(trainer.model, weights), float(value)


def worst_error(got: Gradients, wanted: Gradients) -> float:
    pairs = [(g, w) for name in wanted for g, w in zip(got[name], wanted[name], strict=True)]
    return max(float((g - w).norm() / w.norm()) for g, w in pairs)


# With its graph kept a pair must fit a window: 1 and 16 are too small, 70 holds one pair and 500 both.
WINDOWS = [
    *((window, "full") for window in (1, 16, 500)),
    *((window, "none") for window in (16, 70, 500)),
    *((window, "selective") for window in (70, 500)),
]
QUICK = {("llama", 0, 1, "full"), *(("llama", 19, *window) for window in WINDOWS[1:]), ("gemma2", 19, 16, "full"),
         ("gemma2", 0, 70, "none"), ("gemma2", 19, 500, "selective")}  # fmt: skip
CASES = [
    case if case in QUICK else slow(*case)
    for case in ((kind, prompt, *window) for kind in ("llama", "gemma2") for prompt in (0, 19) for window in WINDOWS)
]


@pytest.mark.parametrize(("kind", "prompt", "window", "recompute"), CASES)
def test_unit_gradients_equal_trls(kind: str, prompt: int, window: int, recompute: Recompute, tmp_path: Path) -> None:
    pairs = make_pairs(prompt)
    got, step, weights = unit_gradients(tiny_model(kind), pairs, window, chunk=23, recompute=recompute)
    wanted, loss = trl_gradients(tiny_model(kind), pairs, weights, tmp_path)
    assert step.loss == pytest.approx(loss, rel=1e-5)
    assert worst_error(got, wanted) <= ROUNDING


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("targets", [["layers.1.self_attn.q_proj", "layers.1.mlp.down_proj"], ["q_proj", "v_proj"]])
def test_linears_without_adapters_are_passed_through(targets: list[str], recompute: Recompute, tmp_path: Path) -> None:
    how = {"recompute": recompute, "target_modules": targets}
    got, _, weights = unit_gradients(tiny_model(), make_pairs(19), 16 if recompute == "full" else 500, 23, **how)
    wanted, _ = trl_gradients(tiny_model(), make_pairs(19), weights, tmp_path, targets=targets)
    assert len(got) == (2 if "q_proj" not in targets else 6)
    assert worst_error(got, wanted) <= ROUNDING


@pytest.mark.parametrize("seed", [3, *map(slow, range(3))])
@pytest.mark.parametrize(("kind", "window"), [("llama", 500), ("gemma2", 37)])
def test_wherever_units_are_cut_gradients_equal_trls(kind: str, window: int, seed: int, tmp_path: Path) -> None:
    pairs, generator = make_pairs(19), random.Random(seed)
    cut = partial(generator.choice, [0, 1, 5, 16, 48, 400])
    got, step, weights = unit_gradients(tiny_model(kind), pairs, window, 23, preempt_at=(3, 9, 20), cut_to=cut)
    wanted, loss = trl_gradients(tiny_model(kind), pairs, weights, tmp_path)
    assert step.loss == pytest.approx(loss, rel=1e-5)
    assert worst_error(got, wanted) <= ROUNDING
    whole = take_step(tiny_model(kind), {"ann": pairs}, window, 23)
    assert worst_error(got, whole.gradients["ann"]) <= ROUNDING


@pytest.mark.parametrize("seed", [1, *map(slow, (0, 2))])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_forwards_that_are_computed_ahead_of_the_backward_before_them_change_no_gradient(kind: str, seed: int) -> None:
    # Four groups of a pair each.
    pairs = [*make_pairs(19), *make_pairs(12, seed=1)]
    wanted, plain, _ = unit_gradients(tiny_model(kind), pairs, 16, 11)
    generator, begun = random.Random(seed), []

    def ahead() -> bool:
        begun.append(generator.random() < 0.5)
        return begun[-1]

    got, step, _ = unit_gradients(tiny_model(kind), pairs, 16, 11, preempt_at=(9, 30), ahead=ahead)
    assert any(begun)
    assert [outcome.pair.pair_id for outcome in step.outcomes] == [pair.pair_id for pair in pairs]
    assert step.loss == pytest.approx(plain.loss, rel=1e-6)
    assert worst_error(got, wanted) <= 1e-6


def test_ipo_gradients_equal_trls(tmp_path: Path) -> None:
    pairs = make_pairs(19)
    got, step, weights = unit_gradients(tiny_model("llama"), pairs, 16, chunk=500, loss="ipo")
    wanted, loss = trl_gradients(tiny_model("llama"), pairs, weights, tmp_path, loss="ipo")
    assert step.loss == pytest.approx(loss, rel=1e-5)
    assert worst_error(got, wanted) <= ROUNDING


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_with_the_chosen_answers_nll_beside_them_gradients_equal_trls(
    loss: str, recompute: Recompute, tmp_path: Path
) -> None:
    pairs = make_pairs(19)[:1]
    window = 16 if recompute == "full" else 500
    how = {"loss": loss, "sft_weight": 0.7}
    got, _, weights = unit_gradients(tiny_model("llama"), pairs, window, chunk=23, recompute=recompute, **how)
    wanted, _ = trl_gradients(tiny_model("llama"), pairs, weights, tmp_path, **how)
    plain, _ = trl_gradients(tiny_model("llama"), pairs, weights, tmp_path, loss)
    assert worst_error(got, wanted) <= ROUNDING
    assert worst_error(plain, wanted) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_twenty_steps_lose_what_trls_loss_and_torchs_adamw_lose(loss: str, tmp_path: Path) -> None:
    pairs = make_pairs(19)
    how = {"learning_rate": 2e-3, "micro_batch_pairs": 2, "loss": loss}
    states: dict[str, AdapterState] | None = None
    weights: dict[str, torch.Tensor] = {}
    ours, theirs = [], []
    for _ in range(20):
        made = take_step(tiny_model("llama"), {"ann": pairs}, 16, 23, begun=states, **how)
        states = states or {"ann": made.adapter_steps["ann"].state}
        ours.append(made.adapter_steps["ann"].loss)
        if not weights:
            weights = {name: value.clone().requires_grad_() for name, value in made.before["ann"].items()}
            optimizer = torch.optim.AdamW(weights.values(), lr=2e-3, weight_decay=0.0)
        now = {name: value.detach() for name, value in weights.items()}
        gradients, value = trl_gradients(tiny_model("llama"), pairs, now, tmp_path, loss)
        theirs.append(value)
        for name, both in gradients.items():
            for part, gradient in zip("AB", both, strict=True):
                weights[f"base_model.model.{name}.lora_{part}.weight"].grad = gradient
        torch.nn.utils.clip_grad_norm_(weights.values(), MAX_GRAD_NORM)
        optimizer.step()
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours[-1] < 0.7 * ours[0]


def three_users() -> dict[str, list[TokenPair]]:
    """One has two pairs, the others one each; their adapters differ, and the base has scored nothing yet."""
    pairs = {"ann": make_pairs(19), "bob": make_pairs(12, 1, "bob")[:1], "cyd": make_pairs(7, 2, "cyd")[1:]}
    return {
        name: [replace(pair, ref_chosen_logp=None, ref_rejected_logp=None) for pair in own]
        for name, own in pairs.items()
    }


def scored_by_base(base: PreTrainedModel, pairs: list[TokenPair]) -> list[TokenPair]:
    """The pairs with transformers' own reference log-probabilities."""

    @torch.no_grad()
    def logp(prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
        logps = base(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return float(logps.gather(1, torch.tensor(answer)[:, None]).sum())

    return [
        replace(p, ref_chosen_logp=logp(p.prompt, p.chosen), ref_rejected_logp=logp(p.prompt, p.rejected))
        for p in pairs
    ]


# 16 tokens are less than a pair, 60 hold parts of two users' pairs, 500 hold all.
WAYS = pytest.mark.parametrize(
    ("window", "recompute"), [(16, "full"), (60, "full"), (500, "full"), (500, "none"), (500, "selective")]
)


@WAYS
@pytest.mark.parametrize(("kind", "loss"), [("llama", "sigmoid"), slow("gemma2", "ipo")])
def test_adapters_that_are_stepped_together_get_what_each_would_get_alone(
    kind: str, loss: str, window: int, recompute: Recompute, tmp_path: Path
) -> None:
    pairs = three_users()
    together = take_step(tiny_model(kind), pairs, window, 50, loss=loss, recompute=recompute)
    for name, own in pairs.items():
        alone = take_step(tiny_model(kind), {name: own}, window, 50, loss=loss, recompute=recompute)
        wanted, value = trl_gradients(
            tiny_model(kind), scored_by_base(tiny_model(kind), own), together.before[name], tmp_path, loss
        )
        assert worst_error(together.gradients[name], wanted) <= ROUNDING
        adapter_step, single = together.adapter_steps[name], alone.adapter_steps[name]
        assert adapter_step.loss == pytest.approx(value, rel=1e-5)
        assert (adapter_step.trained, adapter_step.state.version) == (len(own), 2)
        assert adapter_step.grad_norm == pytest.approx(single.grad_norm, rel=1e-4)
        assert [outcome.pair.pair_id for outcome in adapter_step.outcomes] == [pair.pair_id for pair in own]
        for score, other in zip(adapter_step.scores, single.scores, strict=True):
            assert (score.adapter, score.pair_id, score.version) == (name, other.pair_id, 1)
            assert score.chosen_logp == pytest.approx(other.chosen_logp, rel=1e-5)
            assert score.reward_margin == pytest.approx(other.reward_margin, rel=1e-4)
        moved, wanted_move = together.moved(name), alone.moved(name)
        assert float((moved - wanted_move).norm() / wanted_move.norm()) <= 1e-3


@WAYS
def test_a_member_whose_weights_are_not_finite_does_not_touch_the_others(window: int, recompute: Recompute) -> None:
    pairs = three_users()
    whole = take_step(tiny_model("llama"), pairs, window, 50, recompute=recompute)
    broken = take_step(tiny_model("llama"), pairs, window, 50, recompute=recompute, broken="bob")
    assert broken.adapter_steps["bob"].error == "loss is nan"
    assert broken.adapter_steps["bob"].state.version == 1
    for name in ("ann", "cyd"):
        assert broken.adapter_steps[name].error == ""
        assert worst_error(broken.gradients[name], whole.gradients[name]) <= ROUNDING


def test_a_member_whose_gradient_is_not_finite_does_not_touch_the_others() -> None:
    pairs = three_users()
    whole = take_step(tiny_model("llama"), pairs, 500, 50)
    pairs["bob"] = [replace(pairs["bob"][0], weight=float("inf"))]
    broken = take_step(tiny_model("llama"), pairs, 500, 50)
    assert broken.adapter_steps["bob"].error == "gradient norm is nan"
    assert not broken.moved("bob").any()
    for name in ("ann", "cyd"):
        torch.testing.assert_close(broken.moved(name), whole.moved(name))


@WAYS
def test_a_step_of_several_that_lost_its_pages_counts_nothing_twice(window: int, recompute: Recompute) -> None:
    calm = take_step(tiny_model("llama"), three_users(), window, 1000, recompute=recompute)
    shaken = take_step(tiny_model("llama"), three_users(), window, 1000, recompute=recompute, preempt_at=(2, 9, 20, 33))
    for name, adapter_step in shaken.adapter_steps.items():
        assert (adapter_step.trained, len(adapter_step.scores)) == (
            calm.adapter_steps[name].trained,
            len(adapter_step.fresh),
        )
        assert worst_error(shaken.gradients[name], calm.gradients[name]) <= ROUNDING


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the profiler's bytes are those of the processor")
def test_memory_while_stepping_grows_with_one_layers_window_not_with_depth_times_length() -> None:
    """Peak bytes of one pair's backward units, beyond the layers' inputs, which are kept by design."""

    def extra_bytes(layers: int, length: int) -> int:
        align = AlignSettings(rank=4, alpha=8.0, window_tokens=16, loss_threshold=0.0)
        base = tiny_model("llama", num_hidden_layers=layers, vocab_size=259).requires_grad_(False).to(DEVICE)
        base.set_attn_implementation(IMPLEMENTATION)
        model = ServedModel(base)
        model.attach_lora(align, slots=1)
        kv = model.new_kv(80, 8)
        decoder, tap = PagedDecoder(model, kv), LayerTap(model)
        state = trained_adapter(model, align)
        pair = TokenPair(1, "ann", tuple(range(3, 23)), (5,) * length, (9,) * length)
        step = DpoStep([AdapterStep(state, [pair], [])], decoder, align, lambda pages: None, 10_000)
        taken = step.micro_batch.next_pieces(step.micro_batch.tokens_left)
        free = iter(range(1, 80))
        segments = segments_of(taken, {"ann": 0}, 8, lambda k: np.array([next(free) for _ in range(k)]))
        with torch.inference_mode():
            batch = pack(segments, kv, DEVICE)
            tap.arm([capture_plan_of(step.micro_batch, taken, segments, DEVICE)])
            with attention_pass(attention_over(batch, kv)):
                model.forward(batch.input_ids, batch.position_ids, batch.logit_rows)
            tap.arm([])
        step.micro_batch.advance(step.micro_batch.tokens_left)
        state.step = lambda gradients, n, *more: 0.0  # type: ignore[method-assign]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            while not step.finished:
                step.run_unit()
        live = peak = 0
        for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
            if event.name() == "[memory]":
                live += event.nbytes()
                peak = max(peak, live)
        return peak

    short, deep, long = extra_bytes(2, 60), extra_bytes(8, 60), extra_bytes(2, 120)
    assert deep <= 1.1 * short, "more layers need no more memory"
    # Twice the answers: the head's gradients, the upstream and one layer's K/V accumulators double; the graph does not.
    assert long <= 1.9 * short


@pytest.mark.parametrize("recompute", ["full", "selective", "none"])
@pytest.mark.parametrize("window", [16, 60, 200], ids=["a group per pair", "groups of a window", "one group"])
def test_a_step_that_lost_its_pages_counts_nothing_twice(window: int, recompute: Recompute) -> None:
    pairs = make_pairs(12)
    wanted, calm, _ = unit_gradients(tiny_model("llama"), pairs, window, 1000)
    # In its heads, early and late in its backward pass, and, with two groups, in the second one.
    preempt_at = (2, 9, 20, 33)
    got, shaken, _ = unit_gradients(
        tiny_model("llama"), pairs, window, 1000, preempt_at=preempt_at, recompute=recompute
    )
    assert [(outcome.pair.pair_id, outcome.trained) for outcome in shaken.outcomes] == [(0, True), (1, True)]
    assert len(shaken.scores) == 2
    assert (shaken.trained, shaken.loss) == (calm.trained, pytest.approx(calm.loss))
    for name, gradients in wanted.items():
        for one, other in zip(gradients, got[name], strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_keeping_the_graph_changes_no_gradient(kind: str) -> None:
    pairs = make_pairs(19)
    recomputed, _, _ = unit_gradients(tiny_model(kind), pairs, 16, 1000)
    kept, step, _ = unit_gradients(tiny_model(kind), pairs, 500, 1000, recompute="none")
    assert worst_error(kept, recomputed) <= ROUNDING
    assert step.trained == 2


@WAYS
def test_an_outlying_pair_is_left_out_as_if_it_had_not_been_in_the_step(window: int, recompute: Recompute) -> None:
    good = make_pairs(19)
    # By the reference, the adapter has moved 900 nats to the wrong side.
    poison = replace(make_pairs(12, seed=3)[0], ref_chosen_logp=900.0, ref_rejected_logp=-31.0)
    wanted, alone, _ = unit_gradients(tiny_model("llama"), good, window, 50, recompute=recompute)
    suspicion = OutlierDetector(FeedbackSettings())
    suspicion.restore(OutlierHistory(losses=[1.001 * max(outcome.loss for outcome in alone.outcomes)] * 64), 0.0)
    mixed = [good[0], poison, good[1]]
    got, step, _ = unit_gradients(tiny_model("llama"), mixed, window, 50, recompute=recompute, suspicion=suspicion)
    assert [outcome.trained for outcome in step.outcomes] == [True, False, True]
    assert step.outcomes[1].verdict.why.startswith("outlying: its loss is ")
    assert worst_error(got, wanted) <= ROUNDING
    assert (step.trained, step.loss) == (alone.trained, pytest.approx(alone.loss, rel=1e-5))
    assert step.grad_norm == pytest.approx(alone.grad_norm, rel=1e-4)
