"""Mixers: modules that keep a state from token to token, as a convolution, a gated delta rule or Mamba-2.

transformers' mixers ask their cache for the state before and give it the one after. Here a mixer's `forward` is called
for one text at a time, or for the decodes of many as one batch, each time with a `State` in the cache's place.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from edged.align.dpo.decoder import Branches, LoraRows
from edged.engine.attention.packed_batch import PackedBatch, Segment
from edged.engine.attention.paged import AttentionByLayer, BranchAttention, PagedAttention, pass_under_way
from edged.engine.kv.state import ZEROS, SlotStates, StateSize, StateStore, Steps
from edged.engine.lora.linear import LoraSlots
from edged.engine.lora.runs import Run
from edged.engine.lora.segments import NO_SLOT, LoraSegments
from edged.engine.model.loading import ModelRefused
from edged.tensors.device_copy import upload

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names that transformers' modules give their cache, the deprecated ones last."""


class State:
    """One module's states of some texts, in the place of transformers' `Cache`: None before the first token.

    None is written in place but the recurrence's by Mamba-2, where it computes a single token, and `SlotStates`.
    """

    def __init__(
        self, conv: torch.Tensor | SlotStates | None = None, recurrent: torch.Tensor | SlotStates | None = None
    ) -> None:
        """`conv` is [n, channels, kernel], `recurrent` [n, ...]."""
        self.conv, self.recurrent = conv, recurrent

    def get_conv_state(self, *_: Any, **__: Any) -> torch.Tensor | SlotStates | None:
        """Return the latest inputs of the convolution."""
        return self.conv

    def get_recurrent_state(self, *_: Any, **__: Any) -> torch.Tensor | SlotStates | None:
        """Return the recurrence's state."""
        return self.recurrent

    def update_conv_state(
        self, conv_states: torch.Tensor, *_: Any, conv_kernel_size: int | None = None, **__: Any
    ) -> torch.Tensor:
        """Keep the latest of the inputs [n, channels, tokens]; returns them behind those from before."""
        size = conv_kernel_size or conv_states.shape[-1]
        assert not isinstance(self.conv, SlotStates), "a single token's is not asked for"
        before = conv_states.new_zeros(*conv_states.shape[:-1], size) if self.conv is None else self.conv
        whole = torch.cat((before, conv_states), dim=-1)
        self.conv = whole[..., -size:]
        return whole

    def update_recurrent_state(self, recurrent_states: Any, *_: Any, **__: Any) -> Any:
        """Keep a new state; None where a kernel has stored it."""
        self.recurrent = recurrent_states
        return recurrent_states

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        """Return whether single tokens are not to be written into the convolution's state."""
        return not isinstance(self.conv, SlotStates)

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Return whether there were tokens before."""
        return self.conv is not None or self.recurrent is not None


class StateSpy:
    """The part of a spy cache that mixers ask: it records the sizes of what they keep.

    It has no state for them, or zeros for recurrences whose sizes are known from `before`.
    """

    def __init__(self, *arguments: Any, before: Mapping[nn.Module, StateSize] | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._before, self._read = before or {}, set[nn.Module]()
        self._inside: list[nn.Module] = []
        """The modules that are being computed, the innermost last."""
        self._states: dict[nn.Module, StateSize] = {}
        """Sizes of the states that modules keep, in the order of their layers."""

    @contextmanager
    def _following(self, model: nn.Module) -> Iterator[None]:
        """Follow which modules of a model are computed."""

        def leave(module: nn.Module, _args: Any, out: Any) -> None:
            self._inside.pop()
            if module in self._states and isinstance(out, tuple) and sum(item is not None for item in out) > 1:
                raise ModelRefused(f"{type(module).__name__} keeps a state and returns several tensors")

        handles = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(lambda entered, _args: self._inside.append(entered)))
            handles.append(module.register_forward_hook(leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if unread := [module for module, size in self._before.items() if size.recurrent and module not in self._read]:
            raise ModelRefused(
                f"{type(unread[0]).__name__} keeps a state from which it does not go on by several tokens, as Mamba-1"
            )

    def _keep(self, kind: str, shape: tuple[int, ...]) -> None:
        module = self._inside[-1]
        size = self._states.get(module, StateSize((), ()))
        if getattr(size, kind):
            raise ModelRefused(f"{type(module).__name__} keeps several {kind} states, and edged has a slot for one")
        self._states[module] = replace(size, **{kind: shape})

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        """Return None: no token was before."""

    def get_recurrent_state(self, *_: Any, **__: Any) -> torch.Tensor | None:
        """Return None, or zeros that tell when they are read."""
        module = self._inside[-1]
        shape = self._before[module].recurrent if module in self._before else ()
        device = next(module.parameters()).device
        return _telling(torch.zeros(1, *shape, device=device), partial(self._read.add, module)) if shape else None

    def update_conv_state(
        self, conv_states: torch.Tensor, *_: Any, conv_kernel_size: int | None = None, **__: Any
    ) -> torch.Tensor:
        """Record the size of a state, and return what came."""
        self._keep("conv", (conv_states.shape[1], conv_kernel_size or conv_states.shape[2]))
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Record the size of a state, and return what came."""
        self._keep("recurrent", tuple(recurrent_states.shape[1:]))
        return recurrent_states

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        """See `State`."""
        return True

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Return False: no token was before."""
        return False


def _telling(tensor: torch.Tensor, tell: Callable[[], None]) -> torch.Tensor:
    """Return the same tensor, which calls `tell` when anything is computed with it."""

    class Telling(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tell()
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    return tensor.as_subclass(Telling)


class _Part(NamedTuple):
    """Rows of a packed batch that a mixer computes at once: `rows` of one text, or decodes of many as one batch."""

    rows: slice | torch.Tensor | None
    """None: all rows."""
    decodes: bool
    before: torch.Tensor
    after: torch.Tensor
    """Slots of the states before and after, [1] or [decodes]."""
    lora: LoraSegments | None
    """The adapters of these rows; None where those of the whole batch are in place."""


class Mixer:
    """The `forward` of a module that keeps a state, in the place of its own."""

    def __init__(self, module: nn.Module, index: int) -> None:
        """`index` is its number among the model's mixers."""
        self.own, self._index = module.forward, index
        named = inspect.signature(module.forward).parameters
        self._cache = next(name for name in CACHE_NAMES if name in named)
        self.lora: LoraSlots | None = None
        """The model's adapters, once they are attached."""
        self.steps: Steps = {}
        """Kernels for decodes, once a trial has shown that they work."""
        module.forward = self

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute the packed rows or pairs of the pass under way, [1, tokens, hidden] -> [1, tokens, hidden].

        All other arguments (mask, cache, bounds of packed texts) are the mixer's own, of texts that are not cut.
        """
        current = pass_under_way()
        if isinstance(current, PagedAttention | AttentionByLayer):
            return self._packed(hidden_states, current)
        if isinstance(current, BranchAttention):
            return self._trained(hidden_states, current.branches)
        return self.own(hidden_states, *args, **kwargs)

    def _run(self, hidden: torch.Tensor, state: State, lora: LoraSegments | None) -> Any:
        with self.lora.runs.only(lora) if lora is not None and self.lora is not None else nullcontext():
            return self.own(hidden, **{self._cache: state})

    def _packed(self, hidden: torch.Tensor, current: PagedAttention | AttentionByLayer) -> Any:
        states = current.kv.states
        assert states is not None
        if current.parts is None:
            current.parts = _parts_of(current.batch, self.lora, hidden.device)
        outs = []
        for part in current.parts:
            own = hidden if part.rows is None else hidden[:, part.rows]
            outs.append(self.compute(own, part, states, self._index))
        if len(outs) == 1:
            return outs[0]

        def scatter(outs: Sequence[torch.Tensor]) -> torch.Tensor:
            whole = outs[0].new_empty(1, hidden.shape[1], outs[0].shape[2])
            for part, out in zip(current.parts, outs, strict=True):
                whole[:, part.rows] = out
            return whole

        return _joined(outs, scatter)

    def compute(self, hidden: torch.Tensor, part: _Part, states: StateStore, index: int) -> Any:
        """Compute a part's rows [1, rows, hidden] with the states that module `index` of `states` has."""
        state = State(*states.read(index, part.before, part.after, self.steps if part.decodes else {}))
        out = self._run(hidden.transpose(0, 1) if part.decodes else hidden, state, part.lora)
        states.write(index, part.after, state.conv, state.recurrent)
        return _joined([out], lambda own: own[0].transpose(0, 1)) if part.decodes else out

    def _trained(self, hidden: torch.Tensor, branches: Sequence[Branches]) -> Any:
        """Compute whole pairs with autograd: the prompt, and each answer from the state after it."""
        pieces = [(branch, piece) for branch in branches for piece in branch.pieces]
        # By splits: each slice would have a gradient as large as the whole.
        parts = hidden.split([piece.stop - piece.start for _, piece in pieces], dim=1)
        outs, prompt = [], State()
        training = () if self.lora is None else self.lora.runs.training
        for (branch, piece), own in zip(pieces, parts, strict=True):
            state, tokens = State(prompt.conv, prompt.recurrent) if piece.position else State(), own.shape[1]
            if piece.position and tokens == 1:
                # Mamba-2 would write the state of a single token into that before, which autograd needs. Of two tokens
                # the first is the same.
                own = own.expand(-1, 2, -1)
            rows = _rows_of(training, branch.first + piece.start, own.shape[1])
            outs.append(_joined([self._run(own, state, rows)], partial(_first, tokens)))
            if piece.start == 0:
                prompt = state
        return _joined(outs, partial(torch.cat, dim=1))


def _joined(outs: Sequence[Any], join: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> Any:
    """Join a mixer's outputs for some rows each, tensors or tuples of one and Nones."""
    if isinstance(outs[0], tuple):
        return tuple(_joined(items, join) for items in zip(*outs, strict=True))
    return join(outs) if isinstance(outs[0], torch.Tensor) else None


def _first(tokens: int, outs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the first tokens of one output."""
    return outs[0][:, :tokens]


def parts_of_decodes(before: torch.Tensor, after: torch.Tensor) -> list[_Part]:
    """Return the one part of a batch of decodes alone, whose states are in slots `before` [n] and go to `after` [n]."""
    return [_Part(None, True, before, after, None)]


def _parts_of(batch: PackedBatch, lora: LoraSlots | None, device: torch.device) -> list[_Part]:
    """Cut a packed batch: single tokens of different texts are one part, everything else a part for each segment.

    Pieces of one preference pair follow each other.
    """
    # A text begins from the slot of zeros, which nothing changes.
    users = Counter(
        slot for segment in batch.segments for slot in {segment.states[1], segment.states[0] or segment.states[1]}
    )
    together = [segment for segment in batch.decodes if max(users[slot] for slot in segment.states) == 1]
    numbers = set(map(id, together))
    alone = [segment for segment in batch.segments if id(segment) not in numbers]
    groups = [*([together] if together else []), *([segment] for segment in alone)]
    assert ZEROS not in users, "every text has slots of its own"
    tables = [[segment.states[side] for segment in group] for group in groups for side in (0, 1)]
    moved = upload([np.array(table, np.int64) for table in tables], device)
    parts = []
    for group, before, after in zip(groups, moved[::2], moved[1::2], strict=True):
        decodes = group is together
        rows: slice | torch.Tensor | None = None
        if len(groups) > 1:
            rows = torch.tensor([each.start for each in group], device=device) if decodes else group[0].rows
        part = lora.part_of_batch(_runs_of(group)) if lora is not None and batch.runs and rows is not None else None
        parts.append(_Part(rows, decodes, before, after, part))
    return parts


def _runs_of(segments: Sequence[Segment]) -> list[Run]:
    """Return the runs under one adapter of segments whose rows follow each other."""
    runs, stop = [], 0
    for slot, group in groupby(segments, lambda segment: segment.slot):
        start, stop = stop, stop + sum(len(segment.token_ids) for segment in group)
        runs.append((start, stop, slot))
    return [run for run in runs if run[2] != NO_SLOT]


def _rows_of(training: Sequence[LoraRows], start: int, count: int) -> LoraSegments:
    """Return the adapter of `count` rows of one pair, the first of which is `start`, with autograd."""
    part = LoraSegments()
    part.training = [replace(each, start=0, stop=count) for each in training if each.start <= start < each.stop]
    return part


def wrap_mixers(modules: Sequence[nn.Module]) -> list[Mixer]:
    """Have each of these modules computed by a `Mixer`."""
    return [Mixer(module, index) for index, module in enumerate(modules)]
