"""Want of memory: which errors mean it, and how large fine-tune steps may be after it.

Owns both answers. Must not know what the memory went to, nor when a step runs.
"""

from __future__ import annotations

import torch

from edged.config import AlignSettings

_SAID_BY_ALLOCATORS = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""In RuntimeErrors: CUDA's libraries and torch's allocator for the CPU have no exception of their own."""
_MOST_STRIKES = 6
_GROWS_AFTER = 8
"""Steps that must have gone well before they may be larger again."""
_LONGEST_PAUSE_S = 60.0


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that an allocator had nothing left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID_BY_ALLOCATORS)


class StepSize:
    """How many pairs a step may take: half as many when memory ran out, twice as many after some steps.

    Each time in a row is followed by a pause twice as long.
    """

    def __init__(self, align: AlignSettings) -> None:
        self.pairs = align.micro_batch_pairs
        self.strikes = 0
        """How often memory ran out since a step ended well, or was given up."""
        self.first_pause_s = 0.5
        self.graphs_fail = False
        """Whether a step failed with its graph kept, as for want of memory: none is kept for a while."""
        self._whole = align
        self._went_well = 0

    def configure(self, align: AlignSettings) -> None:
        """Take over other settings for the steps to come; after want of memory they are no larger than they were."""
        whole = self.pairs == self._whole.micro_batch_pairs
        self.pairs = align.micro_batch_pairs if whole else min(self.pairs, align.micro_batch_pairs)
        self._whole, self.graphs_fail = align, False

    @property
    def align(self) -> AlignSettings:
        """The settings that the next step's pairs are drawn by."""
        if self.pairs == self._whole.micro_batch_pairs:
            return self._whole
        return self._whole.model_copy(update={"micro_batch_pairs": self.pairs, "joint_adapters": 1})

    @property
    def exhausted(self) -> bool:
        """Whether a single pair, tried again and again, finds no memory: then it is that pair's matter."""
        return self.pairs == 1 and self.strikes >= _MOST_STRIKES

    @property
    def pause_s(self) -> float:
        """How long to wait before the next step."""
        return min(_LONGEST_PAUSE_S, self.first_pause_s * 2.0 ** max(0, self.strikes - 1)) if self.strikes else 0.0

    def shrink(self) -> None:
        """Memory ran out in a step."""
        self.pairs = max(1, self.pairs // 2)
        self.strikes += 1
        self.distrust_graphs()

    def distrust_graphs(self) -> None:
        """A step failed with its graph kept: those that follow go without, until enough of them went well."""
        self.graphs_fail, self._went_well = True, 0

    def give_up(self) -> None:
        """The pair that found no memory is not tried again; the next one has all its chances."""
        self.strikes = 0

    def grow(self) -> None:
        """A step ended well."""
        self.strikes = 0
        self._went_well += 1
        if self._went_well >= _GROWS_AFTER:
            self._went_well = 0
            self.pairs = min(self._whole.micro_batch_pairs, 2 * self.pairs)
            self.graphs_fail = self.graphs_fail and self.pairs < self._whole.micro_batch_pairs
