"""Kernels that change states in their slots compute what transformers' functions do, and touch no other slot.

Where no GPU is, Triton's kernels run in its interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from edged.engine.attention.paged import IMPLEMENTATION
from edged.engine.kv.state import ZEROS, SlotStates, Steps
from edged.engine.model.served_model import ServedModel
from edged.engine.model.state_steps import _FUNCTIONS, NATIVE, step_in_slots
from edged.engine.native.library import kernels, why_no_kernels
from tests.engine.harness import random_ids, request, running_engine
from tests.engine.test_engine import generated
from tests.models import tiny_model

CPU = torch.device("cpu")
# transformers' own, but where the state is in slots.
CONVOLUTION, RULE = (wrap(getattr(qwen, name)) for name, wrap in _FUNCTIONS.values())


def native() -> tuple[Steps, torch.device]:
    if kernels() is None:
        pytest.skip(why_no_kernels())
    return NATIVE, CPU


def triton() -> tuple[Steps, torch.device]:
    pytest.importorskip("triton")
    from edged.engine.model.triton_states import TRITON

    return TRITON, torch.device("cuda" if torch.cuda.is_available() else "cpu")


KERNELS = pytest.mark.parametrize("kernels_of", [native, triton])
BEFORE, AFTER = torch.tensor([ZEROS, 4, 3, 7]), torch.tensor([1, 4, 6, 2])
"""A first token, one in place, one from a copy, one from a broken state."""
HERE = slice(0, 3)
"""Texts whose states are whole."""


class Rule:
    """Single tokens of four texts, and states of eight slots; the one in slot 7 is broken."""

    def __init__(self, key_heads: int, heads: int, keys: int, values: int, device: torch.device) -> None:
        random = torch.Generator().manual_seed(0)
        made = partial(torch.randn, generator=random)
        self.states = made(8, heads, keys, values).to(device)
        self.states[ZEROS], self.states[7] = 0.0, float("nan")
        # As a convolution's output is cut: a row is followed by others' numbers.
        sizes = [key_heads * keys, key_heads * keys, heads * values]
        parts = made(4, 1, sum(sizes)).to(device).split(sizes, dim=-1)
        self.qkv = [part.unflatten(-1, (-1, size)) for part, size in zip(parts, (keys, keys, values), strict=True)]
        self.g, self.beta = -made(4, 1, heads).abs().to(device), made(4, 1, heads).sigmoid().to(device)

    def stepped(self, step: Callable[..., Any], rows: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs of these texts, and all slots."""
        store, own = self.states.clone(), [part[rows] for part in self.qkv]
        before, after = (table[rows].to(store.device) for table in (BEFORE, AFTER))
        named = {"g": self.g[rows], "beta": self.beta[rows], "initial_state": SlotStates(store, before, after, step)}
        out, _ = RULE(*own, **named, use_qk_l2norm_in_kernel=True)
        return out, store


@KERNELS
@pytest.mark.parametrize("shape", [(2, 4, 16, 16), (1, 3, 24, 40), (2, 2, 5, 7)])
def test_the_gated_delta_rule_is_that_of_transformers(shape: tuple[int, int, int, int], kernels_of: Any) -> None:
    steps, device = kernels_of()
    rule = Rule(*shape, device)
    named = {"g": rule.g, "beta": rule.beta, "initial_state": rule.states[BEFORE.to(device)]}
    wanted, new = RULE(*rule.qkv, **named, output_final_state=True, use_qk_l2norm_in_kernel=True)
    got, store = rule.stepped(steps["recurrent"])
    torch.testing.assert_close((got[HERE], store[AFTER[HERE]]), (wanted[HERE], new[HERE]), atol=2e-6, rtol=1e-5)
    assert got[3].isnan().all()
    assert store[2].isnan().all()
    for slot in (ZEROS, 3, 5):
        assert torch.equal(store[slot], rule.states[slot])


@KERNELS
@pytest.mark.parametrize(("channels", "taps"), [(40, 4), (200, 3)])
@pytest.mark.parametrize("activation", ["silu", None])
def test_the_convolution_is_that_of_transformers(
    channels: int, taps: int, activation: str | None, kernels_of: Any
) -> None:
    steps, device = kernels_of()
    made = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    states, x, weight = (made(*shape).to(device) for shape in ((8, channels, taps), (4, channels, 1), (channels, taps)))
    states[ZEROS], states[7], bias = 0.0, float("nan"), weight[:, 0].contiguous() if taps == 3 else None
    new, store = states[BEFORE.to(device)], states.clone()
    wanted = CONVOLUTION(x, new, weight, bias, activation)
    slots = SlotStates(store, BEFORE.to(device), AFTER.to(device), steps["conv"])
    got = CONVOLUTION(x, slots, weight, bias, activation)
    torch.testing.assert_close(got[HERE], wanted[HERE], atol=2e-6, rtol=1e-5)
    assert torch.equal(store[AFTER[HERE]], new[HERE])
    assert store[2, :, :-1].isnan().all()
    for slot in (ZEROS, 3, 5):
        assert torch.equal(store[slot], states[slot])


def test_a_texts_bits_do_not_depend_on_its_neighbours_or_on_threads() -> None:
    rule, before, results = Rule(2, 4, 24, 40, CPU), torch.get_num_threads(), []
    step = native()[0]["recurrent"]
    try:
        for threads, rows in ((1, slice(None)), (3, slice(None)), (2, slice(1, 2))):
            torch.set_num_threads(threads)
            out, store = rule.stepped(step, rows)
            results.append((out[1 if rows == slice(None) else 0], store[4]))
    finally:
        torch.set_num_threads(before)
    for got in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got, results[0], strict=True))


def served(kind: str, device: torch.device, **changes: Any) -> ServedModel:
    base = tiny_model(kind, **changes).requires_grad_(False).to(device)
    base.set_attn_implementation(IMPLEMENTATION)
    return ServedModel(base)


@KERNELS
@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "falcon_h1"])
def test_mixers_that_call_the_functions_use_the_kernels(kind: str, kernels_of: Any) -> None:
    steps, device = kernels_of()
    model = served(kind, device)
    assert step_in_slots(model, steps) == ""
    fitting = {"conv", "recurrent"} if kind == "qwen3_5_text" else {"conv"}
    assert all(set(mixer.steps) == fitting for mixer in model.mixers)


def test_a_kernel_that_does_not_agree_is_left_out_and_so_is_an_activation_that_it_does_not_know() -> None:
    steps, model = native()[0], served("qwen3_5_text", CPU)
    wrong = {**steps, "recurrent": lambda *given: (steps["recurrent"](*given), given[-1].add_(1))}
    assert step_in_slots(model, wrong) == "its kernels give wrong numbers here"
    assert all(mixer.steps == {} for mixer in model.mixers)
    model = served("qwen3_5_text", CPU, hidden_act="gelu")
    assert step_in_slots(model, steps) == "its kernels do not run here: the convolution's activation is gelu"
    assert all(mixer.steps == {} for mixer in model.mixers)


@pytest.mark.parametrize("setting", [True, False])
def test_answers_are_generates_with_the_kernels_and_without(
    setting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native()
    monkeypatch.setenv("EDGED_KERNELS", f"cpu_kernels={setting}")
    prompts = [random_ids(count, count) for count in (20, 3, 41)]
    with running_engine(tmp_path, "qwen3_5_text", model__device="cpu") as (engine, client):
        assert all(bool(mixer.steps) == setting for mixer in engine.model.mixers)
        assert "states" not in engine.status()["paths"]["why_not"]
        for i, prompt in enumerate(prompts):
            engine.submit(request(f"r{i}", prompt, tokens=12, logprobs=1))
        client.wait(lambda: len(client.finished) == len(prompts))
    model = tiny_model("qwen3_5_text")
    for i, prompt in enumerate(prompts):
        ids, logps = generated(model, prompt, 12)
        assert client.ids(f"r{i}") == ids
        got = torch.tensor([event.logprob for event in client.tokens[f"r{i}"]])
        torch.testing.assert_close(got, logps, atol=1e-4, rtol=0)
