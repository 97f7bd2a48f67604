"""The LRU cache of adapter states in memory, and which of their versions are due to be written to disk.

Only the engine thread may use it, except for `load` and `build`, which any thread may call: reading an adapter must not
stall an iteration.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import islice

import torch

from edged.align.adapters.adapter import AdapterFiles, AdapterState, CopiedVersion
from edged.align.adapters.form import AdapterForm, LoraSpec
from edged.settings.live import Live
from edged.settings.load import Settings

log = logging.getLogger("edged.align")


@dataclass(slots=True)
class _Place:
    """A resident state; `saved` is the version last handed over for writing, `written` the newest one on disk."""

    state: AdapterState
    saved: int
    written: int
    saved_at_s: float = -math.inf


class AdapterCache:
    """The adapters of one base model; `tidy` drops resident states beyond `align.max_loaded_adapters` where it can."""

    def __init__(self, spec: LoraSpec, settings: Live[Settings], device: torch.device, files: AdapterFiles) -> None:
        self.spec, self.files, self._settings, self._device = spec, files, settings, device
        self._places: OrderedDict[str, _Place] = OrderedDict()
        self.versions: dict[str, int] = {}
        """Current version by adapter; 0 for an adapter that has not learned yet."""
        self.is_withdrawn: Callable[[str], bool] = lambda adapter: False
        """Whether an adapter's current version is bad: nothing begins with it, as if it were not in memory."""
        self._problems: set[str] = set()
        """Problems with files that are in the log already. The loader's thread adds to it, too: at worst one is logged
        twice."""
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
        """The adapter's current version; 0 for one that has not learned or does not exist."""
        return self.versions.get(adapter or "", 0)

    def resident(self, adapter: str) -> bool:
        """Whether the adapter's state is in memory, so that `get` reads no files."""
        return adapter in self._places and not self.is_withdrawn(adapter)

    @property
    def crowded(self) -> bool:
        """Whether more than `align.max_loaded_adapters` states are resident."""
        return len(self._places) > self._settings.current.align.max_loaded_adapters

    @property
    def count(self) -> int:
        """Number of resident states."""
        return len(self._places)

    def get(self, adapter: str) -> AdapterState:
        """The adapter's state; one that is not resident is read from disk on the calling thread."""
        place = self._places.get(adapter)
        if place is None:
            self.adopt(self.load(adapter))
            place = self._places[adapter]
        self._places.move_to_end(adapter)
        return place.state

    def peek(self, adapter: str) -> AdapterState | None:
        """The adapter's state if it is resident; does not count as a use."""
        return self._places[adapter].state if self.resident(adapter) else None

    @property
    def output_factors(self) -> bool:
        """Whether any resident adapter multiplies outputs, as DoRA does, and IA3 where it does not multiply inputs."""
        sizes = [(place.state.form.kind, *place.state.form.shapes.values()) for place in self._places.values()]
        return any(kind == "DoRA" or (kind == "IA3" and any(out != 1 for out, _ in shapes)) for kind, *shapes in sizes)

    def build(
        self,
        adapter: str,
        weights: Mapping[str, torch.Tensor] | None = None,
        moments: Mapping[str, torch.Tensor] | None = None,
        form: AdapterForm | None = None,
    ) -> AdapterState:
        """A state of the adapter with these weights, by PEFT's names, and AdamW's moments (None: untrained, new).

        Its form is by default that of the settings. Any thread may call it. Its version is 0, unless `replace` gives it
        a number. Raises AdapterError on a mismatch.
        """
        state = AdapterState(
            adapter, form or self.spec.form, self._settings, self._device, weights is None, self.spec.row_norms
        )
        # A damaged version on disk keeps its number: no new version overwrites it.
        state.newest_number = max(self.files.versions(adapter), default=0)
        if weights is not None:
            state.restore(weights, 0, moments)
        return state

    def build_trial(self, name: str, weights: Mapping[str, torch.Tensor], number: int) -> AdapterState:
        """A state that no adapter has, of the settings' form; slots know it by name and number. Any thread may call."""
        state = AdapterState(name, self.spec.form, self._settings, self._device, begin=False)
        state.restore(weights, number)
        return state

    def load(self, adapter: str) -> AdapterState:
        """The newest undamaged version from disk, or the untrained adapter; problems of newer versions are logged."""
        version = self._newest(adapter)
        if not version:
            return self.build(adapter)
        snapshot = self.files.read(adapter, version)
        state = self.build(adapter, snapshot.weights, snapshot.optimizer, snapshot.form)
        state.version = version
        return state

    def adopt(self, state: AdapterState) -> None:
        """Make a loaded state resident, unless the adapter has a resident one."""
        if state.name not in self._places:
            self.versions[state.name] = state.version
            self._places[state.name] = _Place(state, state.version, state.version)

    def replace(self, state: AdapterState, after: int = 0) -> None:
        """Make a built state the adapter's, under the next version number, which is due to be written now.

        The number is also greater than `after`. Until it is on disk a power cut would bring back the version that it
        replaces.
        """
        before, place = self.version(state.name), self._places.get(state.name)
        if place is None:
            place = self._places[state.name] = _Place(state, before, before)
        state.version = state.newest_number = max(before, after, state.newest_number, place.state.newest_number) + 1
        place.state, place.saved_at_s = state, -math.inf

    def forget(self, adapter: str) -> None:
        """Remove the adapter; its files are hidden until `files.forget` removes them."""
        self._places.pop(adapter, None)
        self._kept = [copied for copied in self._kept if copied.adapter != adapter]
        self.versions.pop(adapter, None)
        self.files.hide(adapter)

    def tidy(self, busy: Collection[str], most: int | None = None) -> list[str]:
        """Drop the least recently used states beyond the bound that are on disk and not `busy`; returns their names.

        The bound is `most`, by default `align.max_loaded_adapters`.
        """
        bound = self._settings.current.align.max_loaded_adapters if most is None else most
        idle = (n for n, place in self._places.items() if place.written == place.state.version and n not in busy)
        dropped = list(islice(idle, max(0, len(self._places) - bound)))
        for name in dropped:
            del self._places[name]
        return dropped

    # -- saving ------------------------------------------------------------------------------------------------------

    def save_soon(self, adapter: str) -> None:
        """Make the adapter's current version due to be written now."""
        self._places[adapter].saved_at_s = -math.inf

    def keep(self, copied: CopiedVersion) -> None:
        """Queue an earlier version to be written, if it is not on disk, so that it can be restored."""
        if copied.version not in self.files.versions(copied.adapter):
            self._kept.append(copied)

    def next_save_s(self, every_s: float) -> float | None:
        """Time (seconds) at which the next unsaved version is due to be written; None when all are saved."""
        if self._kept:
            return -math.inf
        due = [place.saved_at_s + every_s for place in self._places.values() if place.state.version != place.saved]
        return min(due, default=None)

    def to_save(self, now: float, every_s: float) -> CopiedVersion | None:
        """A copy of the version that has been due longest; None when none is due.

        It counts as saved from here on, until `save_ended` reports a failure.
        """
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
        """The newest version of an adapter that is known to be on disk; that of a state that was dropped always is."""
        place = self._places.get(adapter)
        return place.written if place is not None else self.versions.get(adapter, 0)

    def save_ended(self, adapter: str, version: int, written: bool) -> None:
        """Record that a version is on disk, or could not be `written` and is due again."""
        place = self._places.get(adapter)
        if place is not None and written:
            place.written = max(place.written, version)
        elif place is not None:
            place.saved = -1
