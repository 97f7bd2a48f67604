"""The adapters' states in memory, most recently used last, and their way to disk and back.

The engine thread alone uses it, but for `load`, which any thread may call: reading an adapter must not stall an
iteration.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice

import torch

from edged.align.adapters.adapter import AdapterFiles, AdapterState, CopiedVersion, LoraSpec
from edged.settings.live import Live
from edged.settings.load import Settings

log = logging.getLogger("edged.align")


@dataclass(slots=True)
class _Place:
    """A resident state; `saved` is the version that was last handed to the disk, `written` the last that got there."""

    state: AdapterState
    saved: int
    written: int
    saved_at_s: float = -math.inf


class AdapterCache:
    """All adapters of one base model. At most `align.max_loaded_adapters` stay resident when `tidy` can drop others."""

    def __init__(self, spec: LoraSpec, settings: Live[Settings], device: torch.device, files: AdapterFiles) -> None:
        self.spec, self.files, self._settings, self._device = spec, files, settings, device
        self._places: OrderedDict[str, _Place] = OrderedDict()
        self.versions: dict[str, int] = {}
        """Current version by adapter; 0 is an adapter that has not learned yet."""
        self._problems: set[str] = set()
        """What was wrong with files, and is in the log."""
        self._kept: list[CopiedVersion] = []
        for name in files.adapters():
            self.versions[name] = self._newest(name)

    def _newest(self, adapter: str) -> int:
        version, problems = self.files.newest(adapter)
        for problem in problems:
            if problem not in self._problems:
                log.warning("%s: an older version is used", problem)
                self._problems.add(problem)
        return version

    # -- states ------------------------------------------------------------------------------------------------------

    def version(self, adapter: str | None) -> int:
        """The adapter's current version; 0 when it has not learned, or is not there at all."""
        return self.versions.get(adapter or "", 0)

    def resident(self, adapter: str) -> bool:
        """Whether `get` need not read files."""
        return adapter in self._places

    @property
    def crowded(self) -> bool:
        """Whether there are more than `align.max_loaded_adapters`."""
        return len(self._places) > self._settings.now.align.max_loaded_adapters

    @property
    def count(self) -> int:
        """States in memory."""
        return len(self._places)

    def get(self, adapter: str) -> AdapterState:
        """The adapter's state, read from disk here and now when it is not resident."""
        place = self._places.get(adapter)
        if place is None:
            self.adopt(self.load(adapter))
            place = self._places[adapter]
        self._places.move_to_end(adapter)
        return place.state

    def peek(self, adapter: str) -> AdapterState | None:
        """The state, when it is resident, without counting as a use of it."""
        place = self._places.get(adapter)
        return place.state if place is not None else None

    def load(self, adapter: str) -> AdapterState:
        """The newest whole version from disk, or the untrained adapter; what is wrong with newer ones is logged."""
        state = AdapterState(adapter, self.spec, self._settings, self._device)
        # What cannot be used on disk keeps its number: a new version never takes its place.
        state.newest_number = max(self.files.versions(adapter), default=0)
        version = self._newest(adapter)
        if version:
            snapshot = self.files.read(adapter, version)
            state.restore(snapshot.weights, version, snapshot.optimizer)
        return state

    def adopt(self, state: AdapterState) -> None:
        """Make a loaded state resident, unless one is already."""
        if state.name not in self._places:
            self.versions[state.name] = state.version
            self._places[state.name] = _Place(state, state.version, state.version)

    def reset(self, adapter: str) -> AdapterState:
        """Put the untrained adapter in the place of the present state."""
        number = self.get(adapter).newest_number
        state = self._places[adapter].state = AdapterState(adapter, self.spec, self._settings, self._device)
        state.newest_number = number
        return state

    def forget(self, adapter: str) -> None:
        """Remove the adapter; its files are not found any more, and wait for `files.forget`."""
        self._places.pop(adapter, None)
        self._kept = [copied for copied in self._kept if copied.adapter != adapter]
        self.versions.pop(adapter, None)
        self.files.hide(adapter)

    def tidy(self, busy: Collection[str], most: int | None = None) -> list[str]:
        """Drop the least recently used states beyond the bound that are on disk and not `busy`; who was dropped.

        The bound is `most`, or as set.
        """
        bound = self._settings.now.align.max_loaded_adapters if most is None else most
        idle = (n for n, place in self._places.items() if place.written == place.state.version and n not in busy)
        dropped = list(islice(idle, max(0, len(self._places) - bound)))
        for name in dropped:
            del self._places[name]
        return dropped

    # -- saving ------------------------------------------------------------------------------------------------------

    def hurry(self, adapter: str) -> None:
        """Its present version is due to be written now."""
        self._places[adapter].saved_at_s = -math.inf

    def keep(self, copied: CopiedVersion) -> None:
        """Have an earlier version written, if it is not on disk: it may be gone back to."""
        if copied.version not in self.files.versions(copied.adapter):
            self._kept.append(copied)

    def next_save_s(self, every_s: float) -> float | None:
        """When the next unsaved version is due to be written; None when all are."""
        if self._kept:
            return -math.inf
        due = [place.saved_at_s + every_s for place in self._places.values() if place.state.version != place.saved]
        return min(due, default=None)

    def to_save(self, now: float, every_s: float) -> CopiedVersion | None:
        """A copy of the version that is due for the longest time, which counts as saved from here on, until
        `save_ended` says otherwise; None when none is due."""
        if self._kept:
            return self._kept.pop(0)
        unsaved = [place for place in self._places.values() if place.state.version != place.saved]
        place = min(unsaved, key=lambda place: place.saved_at_s, default=None)
        if place is None or now < place.saved_at_s + every_s:
            return None
        copied = place.state.copied()
        place.saved, place.saved_at_s = copied.version, now
        return copied

    def written(self, adapter: str) -> int:
        """The newest version of an adapter that is known to be on disk; one that left memory is there."""
        place = self._places.get(adapter)
        return place.written if place is not None else self.versions.get(adapter, 0)

    def save_ended(self, adapter: str, version: int, written: bool) -> None:
        """A version is on disk, or could not be written: then it is due again."""
        place = self._places.get(adapter)
        if place is not None and written:
            place.written = max(place.written, version)
        elif place is not None:
            place.saved = -1
