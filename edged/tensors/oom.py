"""Out-of-memory errors: how to recognize them, the size of fine-tune steps after them, and when retries end."""

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
"""Messages of RuntimeErrors: CUDA's libraries and torch's CPU allocator have no exception of their own. cuBLAS does not
initialize if its handle finds no memory; torch's CUDA allocator asks NVML about a process that found none, and fails
an assertion if NVML cannot tell, as on a Jetson."""
_MAX_TRIES = 6
"""Most tries of a pair that finds no memory alone."""
_MIN_WINDOW = 64
"""Least window of a job's step, in tokens."""
_GROWS_AFTER = 8
"""Successful steps before steps may be larger again."""
_LONGEST_PAUSE_S, _MAX_DOUBLINGS = 60.0, 30


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that an allocator ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID_BY_ALLOCATORS)


class StepSize:
    """The size of fine-tune steps in pairs: halved when memory runs out, doubled after some successful steps.

    Each failure in a row is followed by a pause twice as long.
    """

    def __init__(self, settings: Live[Settings]) -> None:
        self._settings = settings
        self.strikes = 0
        """Number of times that memory ran out since the last successful step."""
        self.first_pause_s = 0.5
        self._halvings = 0
        """Number of times that the window of a job's step is halved."""
        self._max_pairs = math.inf
        """Most pairs of a step by what memory allowed; infinite if memory was not short."""
        self._failed_with_graph: AlignSettings | None = None
        """The settings under which a step that kept its graph failed, for instance out of memory."""
        self._went_well = 0
        self._wells = 0
        """Number of successful steps since the start."""
        self._tried: dict[Hashable, tuple[int, int]] = {}
        """Tries of what found no memory alone, and `_wells` at the first try."""

    @property
    def pairs(self) -> int:
        """Most pairs of the next step: as set, or fewer after memory ran out."""
        return int(min(self._settings.current.align.micro_batch_pairs, self._max_pairs))

    @property
    def graphs_fail(self) -> bool:
        """Whether steps must not keep their graph for now, since one failed with it under the present settings."""
        return self._failed_with_graph is self._settings.current.align

    @property
    def align(self) -> AlignSettings:
        """The settings that the next step's pairs are drawn by."""
        whole = self._settings.current.align
        less: dict[str, float] = {}
        if self.pairs < whole.micro_batch_pairs or self.strikes:
            less = {"micro_batch_pairs": self.pairs, "joint_adapters": 1}
        if self.pairs == 1 and self.strikes:
            less["replay_share"] = 0.0
        return whole.model_copy(update=less) if less else whole

    def narrow(self, align: AlignSettings) -> AlignSettings:
        """Return the settings of a step whose pairs are given: its groups are smaller after memory ran out."""
        window = min(align.window_tokens, max(_MIN_WINDOW, align.window_tokens >> self._halvings))
        return align.model_copy(update={"window_tokens": window}) if self._halvings else align

    def hopeless(self, what: Hashable, others_first: bool = True, max_tries: int = _MAX_TRIES) -> bool:
        """Count that `what`, for instance a pair's id, found no memory alone; return whether to give it up.

        It is given up after `max_tries`; with `others_first` only if another step has succeeded since the first try:
        until then memory may be short for any step, which ends.
        """
        tries, wells = self._tried.get(what, (0, self._wells))
        self._tried[what] = tries + 1, wells
        if tries + 1 < max_tries or (others_first and self._wells == wells):
            return False
        self.forgive(what)
        return True

    def forgive(self, what: Hashable) -> None:
        """Reset the tries of `what`, which found memory after all."""
        self._tried.pop(what, None)

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next step."""
        if not self.strikes:
            return 0.0
        # Memory may be short for days: two to the power of so many strikes would overflow a float.
        return min(_LONGEST_PAUSE_S, self.first_pause_s * 2.0 ** min(self.strikes - 1, _MAX_DOUBLINGS))

    def shrink(self) -> None:
        """Record that memory ran out in a step."""
        self._max_pairs = max(1, self.pairs // 2)
        self._halvings = min(self._halvings + 1, _MAX_DOUBLINGS)
        self.strikes += 1
        self.distrust_graphs()

    def distrust_graphs(self) -> None:
        """Record that a step failed with its graph kept: the next ones keep none, until enough of them succeed."""
        self._failed_with_graph, self._went_well = self._settings.current.align, 0

    def grow(self) -> None:
        """Record that a step succeeded."""
        self.strikes = 0
        self._wells += 1
        self._went_well += 1
        if self._went_well >= _GROWS_AFTER:
            self._went_well = 0
            self._halvings = max(0, self._halvings - 1)
            self._max_pairs = 2 * self.pairs
            if self._max_pairs >= self._settings.current.align.micro_batch_pairs:
                self._max_pairs, self._failed_with_graph = math.inf, None
