"""Want of memory: which errors mean it, how large fine-tune steps may be after it, and what is not tried again."""

import math
from collections.abc import Hashable

import torch

from edged.settings.live import Live
from edged.settings.load import AlignSettings, Settings

_SAID_BY_ALLOCATORS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "NVML_SUCCESS ==",
)
"""In RuntimeErrors: CUDA's libraries and torch's allocator for the CPU have no exception of their own. cuBLAS does not
initialize where its handle finds no memory; torch's allocator for CUDA asks NVML about a process that found none, and
fails an assertion where NVML cannot tell, as on a Jetson."""
_MOST_TRIES = 6
"""Of what finds no memory alone."""
_GROWS_AFTER = 8
"""Steps that must have gone well before they may be larger again."""
_LONGEST_PAUSE_S, _MOST_DOUBLINGS = 60.0, 30


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that an allocator had nothing left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID_BY_ALLOCATORS)


class StepSize:
    """How many pairs a step may take: half as many when memory ran out, twice as many after some steps.

    Each time in a row is followed by a pause twice as long.
    """

    def __init__(self, settings: Live[Settings]) -> None:
        self._settings = settings
        self.strikes = 0
        """How often memory ran out since a step ended well."""
        self.first_pause_s = 0.5
        self._most_pairs = math.inf
        """Pairs that a step had when memory was last found for it; infinite where it was not short."""
        self._failed_with_graph: AlignSettings | None = None
        """The settings under which a step failed with its graph kept, as for want of memory."""
        self._went_well = 0
        self._wells = 0
        """Steps that ended well, ever."""
        self._tried: dict[Hashable, tuple[int, int]] = {}
        """What found no memory alone: how often, and `_wells` at the first time."""

    @property
    def pairs(self) -> int:
        """Most pairs of the next step: as set, or fewer after want of memory."""
        return int(min(self._settings.now.align.micro_batch_pairs, self._most_pairs))

    @property
    def graphs_fail(self) -> bool:
        """Whether no step keeps its graph for a while: one failed with it under the present settings."""
        return self._failed_with_graph is self._settings.now.align

    @property
    def align(self) -> AlignSettings:
        """The settings that the next step's pairs are drawn by."""
        whole = self._settings.now.align
        less: dict[str, float] = {}
        if self.pairs < whole.micro_batch_pairs or self.strikes:
            less = {"micro_batch_pairs": self.pairs, "joint_adapters": 1}
        if self.pairs == 1 and self.strikes:
            less["replay_share"] = 0.0
        return whole.model_copy(update=less) if less else whole

    def hopeless(self, what: Hashable, others_first: bool = True) -> bool:
        """Count that `what`, a pair's id say, found no memory alone; whether it is not to be tried again.

        That is so after a few times; with `others_first` only if another step found memory since the first of them:
        until then it may be anybody's want, which ends.
        """
        tries, wells = self._tried.get(what, (0, self._wells))
        self._tried[what] = tries + 1, wells
        if tries + 1 < _MOST_TRIES or (others_first and self._wells == wells):
            return False
        self.forgive(what)
        return True

    def forgive(self, what: Hashable) -> None:
        """It found memory after all: nothing is counted against it."""
        self._tried.pop(what, None)

    @property
    def pause_s(self) -> float:
        """How long to wait before the next step."""
        if not self.strikes:
            return 0.0
        # Want of memory may last for days: a number of strikes that no float can hold as a power.
        return min(_LONGEST_PAUSE_S, self.first_pause_s * 2.0 ** min(self.strikes - 1, _MOST_DOUBLINGS))

    def shrink(self) -> None:
        """Memory ran out in a step."""
        self._most_pairs = max(1, self.pairs // 2)
        self.strikes += 1
        self.distrust_graphs()

    def distrust_graphs(self) -> None:
        """A step failed with its graph kept: those that follow go without, until enough of them went well."""
        self._failed_with_graph, self._went_well = self._settings.now.align, 0

    def grow(self) -> None:
        """A step ended well."""
        self.strikes = 0
        self._wells += 1
        self._went_well += 1
        if self._went_well >= _GROWS_AFTER:
            self._went_well = 0
            self._most_pairs = 2 * self.pairs
            if self._most_pairs >= self._settings.now.align.micro_batch_pairs:
                self._most_pairs, self._failed_with_graph = math.inf, None
