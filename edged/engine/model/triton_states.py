"""Triton kernels that change states in their slots: the same as `state_steps` has on the CPU, in any dtype.

Numbers are rounded where the model's own functions round them; states of recurrences and sums are in float32.
"""

import importlib.util
from collections.abc import Sequence
from itertools import chain

import torch

from edged.engine.kv.state import SlotStates, Steps

_VALUES = 32
"""Columns of a head's state that one program has."""
_CHANNELS = 128
"""Channels of one program of the convolution."""

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    # Tables of slots lie anywhere in what is uploaded: their alignment must not make another variant.
    @triton.jit(do_not_specialize=["before", "after"])
    def _delta_rule(
        states,
        before,
        after,
        query,
        query_row,
        key,
        key_row,
        value,
        value_row,
        decay,
        beta,
        out,
        GROUP: tl.constexpr,
        KEYS: tl.constexpr,
        KEYS_PAD: tl.constexpr,
        VALUES: tl.constexpr,
        BLOCK: tl.constexpr,
        NORMED: tl.constexpr,
    ) -> None:
        row, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
        i, j = tl.arange(0, KEYS_PAD), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        key_there, value_there = i < KEYS, j < VALUES
        at = head // GROUP * KEYS + i
        q = tl.load(query + row * query_row + at, mask=key_there, other=0.0).to(tl.float32)
        k = tl.load(key + row * key_row + at, mask=key_there, other=0.0).to(tl.float32)
        if NORMED:
            q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6)
            k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        q *= KEYS**-0.5
        v = tl.load(value + row * value_row + head * VALUES + j, mask=value_there, other=0.0).to(tl.float32)
        gate = row * heads + head
        place = (head * KEYS + i[:, None]) * VALUES + j[None, :]
        there = key_there[:, None] & value_there[None, :]
        slot = tl.load(before + row) * heads * KEYS * VALUES
        state = tl.load(states + slot + place, mask=there, other=0.0) * tl.exp(tl.load(decay + gate))
        delta = (v - tl.sum(state * k[:, None], 0)) * tl.load(beta + gate).to(tl.float32)
        state += k[:, None] * delta[None, :]
        slot = tl.load(after + row) * heads * KEYS * VALUES
        tl.store(states + slot + place, state, mask=there)
        tl.store(out + gate * VALUES + j, tl.sum(state * q[:, None], 0), mask=value_there)

    @triton.jit(do_not_specialize=["before", "after"])
    def _convolve(
        states,
        before,
        after,
        x,
        x_row,
        weight,
        bias,
        out,
        COUNT: tl.constexpr,
        TAPS: tl.constexpr,
        TAPS_PAD: tl.constexpr,
        BLOCK: tl.constexpr,
        BIASED: tl.constexpr,
        SILU: tl.constexpr,
    ) -> None:
        row = tl.program_id(0).to(tl.int64)
        channel, tap = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TAPS_PAD)
        there = channel < COUNT
        kind: tl.constexpr = states.dtype.element_ty
        place, known = channel[:, None] * TAPS + tap[None, :], there[:, None] & (tap < TAPS)[None, :]
        past = known & (tap < TAPS - 1)[None, :]
        state = tl.load(states + tl.load(before + row) * COUNT * TAPS + place + 1, mask=past, other=0.0)
        new = tl.load(x + row * x_row + channel, mask=there, other=0.0).to(kind)
        state = tl.where((tap == TAPS - 1)[None, :], new[:, None], state)
        # Another thread may yet have to read what this one writes.
        tl.debug_barrier()
        tl.store(states + tl.load(after + row) * COUNT * TAPS + place, state, mask=known)
        weights = tl.load(weight + place, mask=known, other=0.0).to(tl.float32)
        total = tl.sum(state.to(tl.float32) * weights, 1)
        if BIASED:
            total += tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
        if SILU:
            total = total.to(kind).to(tl.float32)
            total = total / (1.0 + tl.exp(-total))
        tl.store(out + row * COUNT + channel, total, mask=there)


def _launch_rule(
    states: SlotStates,
    key_heads: int,
    qkv: Sequence[torch.Tensor],
    gates: Sequence[torch.Tensor],
    normed: bool,
    out: torch.Tensor,
) -> None:
    _, heads, keys, values = states.store.shape
    pads = {"KEYS_PAD": triton.next_power_of_2(keys), "BLOCK": min(_VALUES, triton.next_power_of_2(values))}
    given = (*states[:3], *chain(*((rows, rows.stride(0)) for rows in qkv)), *gates, out)
    sizes = {"GROUP": heads // key_heads, "KEYS": keys, "VALUES": values, "NORMED": normed, **pads}
    _delta_rule[(len(out), heads, triton.cdiv(values, pads["BLOCK"]))](*given, **sizes)


def _launch_convolution(
    states: SlotStates, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, out: torch.Tensor
) -> None:
    _, count, taps = states.store.shape
    given = (*states[:3], x, x.stride(0), weight, weight if bias is None else bias, out)
    sizes = {"COUNT": count, "TAPS": taps, "TAPS_PAD": triton.next_power_of_2(taps), "BLOCK": _CHANNELS}
    _convolve[(len(x), triton.cdiv(count, _CHANNELS))](*given, **sizes, BIASED=bias is not None, SILU=silu)


TRITON: Steps = {"conv": _launch_convolution, "recurrent": _launch_rule}
"""The kernels on a GPU."""
