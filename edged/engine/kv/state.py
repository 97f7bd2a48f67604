"""States of layers: what convolutions and recurrences keep of all tokens before, in one slot for each sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from edged.align.dpo.layout import Piece
from edged.cache.page_pool import OutOfPages

STREAM_SLOTS = 2
"""Slots of an open step: one for the prompt of the pair under way, one for the answer that goes on from it."""
_MOST_COPIES = 16
"""Copies of states that are kept for later prompts to go on from, where so many sequences may run."""
ZEROS = 0
"""The slot that every sequence begins from; it is never written."""
SlotPair = tuple[int, int]
"""The slot that holds the state before some tokens, and the one that takes the state after them."""


@dataclass(frozen=True, slots=True)
class StateSize:
    """Shapes of one module's state of one sequence, () where it keeps none of the kind.

    `conv` is [channels, kernel], in the dtype of computation; `recurrent` is in fp32, since rounding adds up in it.
    """

    conv: tuple[int, ...]
    recurrent: tuple[int, ...]

    @property
    def width(self) -> int:
        """Numbers of each token that a recurrence reads: of the convolution, and of its heads on both sides."""
        return self.conv[0] + self.recurrent[0] * sum(self.recurrent[1:]) if self.conv and self.recurrent else 0


def state_bytes(sizes: Sequence[StateSize], dtype: torch.dtype) -> int:
    """Return the bytes of one slot: a sequence's states of all modules."""
    return sum(
        dtype.itemsize * prod(size.conv) * bool(size.conv) + 4 * prod(size.recurrent) * bool(size.recurrent)
        for size in sizes
    )


def slots_for(sequences: int, steps: int, copies: int) -> int:
    """Return the number of slots for running sequences, open steps and copies, the zeros, and graphs' padding."""
    return sequences + STREAM_SLOTS * steps + copies + 2


def copies_for(sequences: int, shares_prefixes: bool) -> int:
    """Return the number of copies of states that are kept for later prompts, beside so many running sequences."""
    return min(sequences, _MOST_COPIES) if shares_prefixes else 0


def slots_of(piece: Piece, prompt: int, slots: SlotPair) -> SlotPair:
    """Return the slots before and after a piece of a pair with `prompt` tokens, whose stream has `slots`.

    Its prompt ends in the first one and its answers in the second; the state after the prompt stays for each of them.
    """
    own = slots[0] if piece.start < prompt else slots[1]
    if piece.position == 0:
        return ZEROS, own
    return (slots[0] if piece.position == prompt else own), own


class SlotStates(NamedTuple):
    """One module's states of some texts where they lie, for a kernel that works in the slots."""

    store: torch.Tensor
    """States by slot, [slots, ...]."""
    before: torch.Tensor
    after: torch.Tensor
    """Slots of the states before and after, [n] each, int64."""
    step: Callable[..., Any]
    """The kernel: it is given these and what the model's own function is given."""


Steps = Mapping[str, Callable[..., Any]]
"""Kernels that work in the slots, by what they change: "conv" or "recurrent"."""


class StateStore:
    """The states of all modules, by slot: tensors [slots, *`StateSize`]. The engine thread alone changes them."""

    def __init__(self, slots: int, sizes: Sequence[StateSize], dtype: torch.dtype, device: torch.device) -> None:
        self._conv, self._recurrent = (
            [torch.zeros(slots, *shape, dtype=kind, device=device) if shape else None for shape in shapes]
            for kind, shapes in (
                (dtype, [size.conv for size in sizes]),
                (torch.float32, [size.recurrent for size in sizes]),
            )
        )
        self.padding = slots - 1
        """The slot that rows of padding write to; it is never read."""
        self.slots = slots - 2
        """Number of slots that sequences and steps can take."""
        self._free = list(range(self.slots, ZEROS, -1))

    def report(self) -> dict[str, int]:
        """Return the status' part on slots."""
        each = sum(tensor[ZEROS].nbytes for tensor in self.tensors)
        return {"slots": self.slots, "free": len(self._free), "bytes_per_slot": each}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of all modules, [slots, ...] each."""
        return [tensor for tensor in (*self._conv, *self._recurrent) if tensor is not None]

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def acquire(self) -> int:
        """Take a slot. Raises OutOfPages where all are held."""
        if not self._free:
            raise OutOfPages(1, 0)
        return self._free.pop()

    def release(self, slots: Sequence[int]) -> None:
        """Give slots back; what they hold is never read again."""
        self._free += slots

    def copy(self, source: int, target: int) -> None:
        """Copy the states of all modules from one slot into another."""
        for store in self.tensors:
            store[target].copy_(store[source])

    def read(
        self, module: int, before: torch.Tensor, after: torch.Tensor, steps: Steps
    ) -> list[torch.Tensor | SlotStates | None]:
        """Return a module's states in slots `before` [n], of its convolution and of its recurrence: copies [n, ...], or
        where they lie if there is a kernel for them in `steps`, which stores the new ones in `after`."""
        kinds = (("conv", self._conv[module]), ("recurrent", self._recurrent[module]))
        return [
            store
            if store is None
            else SlotStates(store, before, after, steps[kind])
            if kind in steps
            else store.index_select(0, before)
            for kind, store in kinds
        ]

    def write(self, module: int, slots: torch.Tensor, *states: torch.Tensor | SlotStates | None) -> None:
        """Store a module's states [n, ...] in `slots` [n], which differ; of its convolution and of its recurrence.

        What a kernel has stored (`SlotStates`, or None) is there.
        """
        for store, new in zip((self._conv[module], self._recurrent[module]), states, strict=True):
            if store is not None and isinstance(new, torch.Tensor):
                store.index_copy_(0, slots, new.to(store.dtype))
