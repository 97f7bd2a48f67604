"""Decodes of layers with a state, by kernels that work in the slots: the gated delta rule, and a convolution over time.

transformers' mixers call both as functions of their module. From a start on, a call whose state is a `SlotStates` goes
to that one's kernel, and every other to the function as it was.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from itertools import chain
from typing import Any

import torch

from edged.engine.kv.state import ZEROS, SlotStates, StateSize, StateStore, Steps
from edged.engine.model.mixers import Mixer, parts_of_decodes
from edged.engine.model.served_model import ServedModel
from edged.engine.native.library import CSlots, kernels
from edged.runtime import logs

_ROUNDINGS, _LEAST_TOLERANCE = 4, 1e-5
"""Largest difference in the trial, in roundings of the largest number; and as a share, where sums differ by more."""


def _native_rule(
    states: SlotStates,
    key_heads: int,
    qkv: Sequence[torch.Tensor],
    gates: Sequence[torch.Tensor],
    normed: bool,
    out: torch.Tensor,
) -> None:
    sizes, where = (key_heads, *states.store.shape[1:]), [(rows.data_ptr(), rows.stride(0)) for rows in qkv]
    given = (*chain(*where), *(gate.data_ptr() for gate in gates), normed, out.data_ptr())
    _library().edged_delta_rule(_slots(states), *sizes, *given, torch.get_num_threads())


def _native_convolution(
    states: SlotStates, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, out: torch.Tensor
) -> None:
    weights = weight.data_ptr(), None if bias is None else bias.data_ptr()
    given = (*states.store.shape[1:], *weights, silu, x.data_ptr(), x.stride(0), out.data_ptr())
    _library().edged_convolution(_slots(states), *given, torch.get_num_threads())


def _library() -> ctypes.CDLL:
    library = kernels()
    assert library is not None
    return library


def _slots(states: SlotStates) -> Any:
    store, before, after, _ = states
    return ctypes.byref(CSlots(store.data_ptr(), before.data_ptr(), after.data_ptr(), len(before), store.stride(0)))


NATIVE: Steps = {"conv": _native_convolution, "recurrent": _native_rule}
"""The kernels on the CPU, float32."""


def _rule(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def rule(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **named: Any) -> Any:
        states = named.get("initial_state")
        if not isinstance(states, SlotStates):
            return own(query, key, value, **named)
        # All are [n, 1, heads, size], the gates [n, 1, heads].
        gates, normed = (named["g"].float().contiguous(), named["beta"].contiguous()), named["use_qk_l2norm_in_kernel"]
        out = torch.empty_like(value, memory_format=torch.contiguous_format)
        states.step(states, query.shape[2], [_rows_of(each) for each in (query, key, value)], gates, normed, out)
        return out, None

    return rule


def _convolution(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def convolution(x: torch.Tensor, states: Any, weight: Any, bias: Any = None, activation: str | None = None) -> Any:
        if not isinstance(states, SlotStates):
            return own(x, states, weight, bias, activation)
        if activation not in (None, "silu", "swish"):
            raise ValueError(f"the convolution's activation is {activation}")
        # x is [n, channels, 1], the weight [channels, kernel].
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        states.step(states, _rows_of(x), weight, bias, activation is not None, out)
        return out

    return convolution


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return [n, ...] as [n, numbers] whose rows are contiguous, without a copy if they are."""
    rows = x.flatten(1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


_FUNCTIONS = {
    "conv": ("causal_conv1d_update", _convolution),
    "recurrent": ("torch_recurrent_gated_delta_rule", _rule),
}
"""Names of the functions in modules of transformers', and what stands for them, by what they change."""


def step_in_slots(model: ServedModel, steps: Steps) -> str:
    """Let decodes pass the mixers of `model` by those of `steps` that fit; return why some do not, or ""."""
    reason = ""
    for mixer, size in zip(model.mixers, model.states, strict=True):
        namespace = str(mixer.own.__module__)
        fitting = {kind: step for kind, step in steps.items() if getattr(size, kind) and _called_in(namespace, kind)}
        if fitting:
            reason = _tried(model, mixer, size, fitting) or reason
    return reason


@cache
def _called_in(namespace: str, kind: str) -> bool:
    """Whether a module of transformers' has the function for states of this kind, which looks for slots from now on."""
    name, wrap = _FUNCTIONS[kind]
    own = getattr(sys.modules[namespace], name, None)
    if own is not None:
        setattr(sys.modules[namespace], name, wrap(own))
    return own is not None


@torch.inference_mode()
def _tried(model: ServedModel, mixer: Mixer, size: StateSize, steps: Steps) -> str:
    """Let `mixer` use `steps` if three decodes agree with the model's own way; else return what is wrong."""
    device, generator = model.device, torch.Generator(model.device).manual_seed(0)
    own, in_slots = (StateStore(6, [size], model.dtype, device) for _ in range(2))
    for a, b in zip(own.tensors, in_slots.tensors, strict=True):
        b[ZEROS + 1 :] = a[ZEROS + 1 :].normal_(generator=generator)
    hidden = torch.randn(1, 3, model.shape.hidden_size, generator=generator, device=device).to(model.dtype)
    # A text's first token, one that goes on from a state, one that goes on from another's copy.
    (part,) = parts_of_decodes(*(torch.tensor(slots, device=device) for slots in ([ZEROS, 2, 3], [1, 2, 4])))
    wanted = _first(mixer.compute(hidden, part, own, 0)), *own.tensors
    mixer.steps, bound = steps, max(_ROUNDINGS * torch.finfo(model.dtype).eps, _LEAST_TOLERANCE)
    try:
        got = _first(mixer.compute(hidden, part, in_slots, 0)), *in_slots.tensors
        # Not "above": a NaN is above nothing.
        if all(float((a - b).abs().max()) <= bound * float(b.abs().max()) for a, b in zip(got, wanted, strict=True)):
            return ""
        reason = "its kernels give wrong numbers here"
    except Exception as error:
        # Triton, its compiler, the device and mixers of other kinds raise what they like.
        reason = f"its kernels do not run here: {logs.first_line(error)}"
    mixer.steps = {}
    return reason


def _first(out: Any) -> torch.Tensor:
    """Return the one tensor that a mixer returns, alone or with Nones."""
    found: torch.Tensor = next(each for each in (out if isinstance(out, tuple) else (out,)) if each is not None)
    return found.float()
