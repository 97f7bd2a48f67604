"""The plan of a DPO step: groups of pairs that are computed together (micro-batches), and the units of each.

It has no tensors, so that a simulated step is planned as a real one.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Literal

from edged.align.dpo.layout import Layout
from edged.align.feedback.pair import TokenPair
from edged.scheduler.task import CUTTABLE_UNITS
from edged.settings.load import AlignSettings

Recompute = Literal["full", "selective", "none"]
"""The part of its layers' forwards that a backward computes again: all, what Algorithm 1 drops (`lean.py`), or none."""
Work = tuple[str, int]
"""A unit's kind and the number of tokens (for "step", adapters) it covers: see `edged.scheduler.task.Unit`."""

_HEAD_LOGITS = 1 << 23
"""Logits that a head unit may hold at once: 32 MiB in fp32."""


class StepPlan:
    """The groups of a step's pairs, one after the other, and the current group's units.

    The units are first "graph", one a layer, where the graph is kept; then windows of predictions, "score" for the
    reference and "head" for the policy; then the backward, "grad" through a kept graph or else "layer", which
    recomputes the layer; and after the last group's the optimizers' "step". Where layers keep states "pairs" takes the
    place of "layer": its windows end at pairs' ends, and are not cut.
    """

    def __init__(
        self,
        pairs: Sequence[TokenPair],
        needs_reference: Callable[[TokenPair], bool],
        align: AlignSettings,
        layers: int,
        vocab_size: int,
        max_tokens: int,
        keeps_graph: bool,
        adapters: int = 1,
        keeps_states: bool = False,
    ) -> None:
        """`max_tokens` bounds the tokens that a group's forward by one policy puts into the KV cache.

        With `keeps_graph` groups of at most a window keep their graph, or its costly results: no product is computed
        twice.
        """
        self.needs_reference, self.keeps_graph = needs_reference, keeps_graph
        self.head_size = head_window_size(align.window_tokens, vocab_size)
        self._align, self._window, self._layers, self._adapters = align, align.window_tokens, layers, adapters
        self._keeps_states = keeps_states
        self._groups = groups_of(pairs, min((1 if keeps_graph else 2) * align.window_tokens, max_tokens))
        self.groups_done = -1
        self.next_group()

    @property
    def following(self) -> Sequence[TokenPair]:
        """The next group's pairs, whose packed forward may be computed ahead: the weights stay until the step ends."""
        return self._groups[0] if self._groups and not self.keeps_graph else ()

    def next_group(self) -> None:
        """Make the next group the current one."""
        self.pairs = self._groups.pop(0)
        self.groups_done += 1
        self._rows = sum(pair.num_tokens for pair in self.pairs)
        self.graphed = self.keeps_graph and self._rows <= self._window
        """Whether the current group's graph is kept."""
        self.restart()

    def restart(self) -> None:
        """Start the current group again: plan all its units."""
        forward: list[Work] = [("graph", self._rows)] * (self._layers if self.graphed else 0)
        for kind, pairs in (("score", filter(self.needs_reference, self.pairs)), ("head", self.pairs)):
            scored = sum(sum(Layout.of(pair, self._align).scored_tokens) for pair in pairs)
            forward += [(kind, min(self.head_size, scored - at)) for at in range(0, scored, self.head_size)]
        ends = list(accumulate((pair.num_tokens for pair in self.pairs), initial=0))
        self.begin_backward(list(pairwise(ends)))
        self.units[:0] = forward

    def begin_backward(self, active: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Plan the backward over the rows `active` of each pair, which the losses leave; returns its windows."""
        if self.graphed:
            # A kept graph is one window: the backward of a layer covers all its rows at once.
            kind, windows = "grad", [(0, self._rows)] * bool(active)
        elif self._keeps_states:
            kind, windows = "pairs", whole_pairs(active, self._window)
        else:
            kind, windows = "layer", windows_of(active, self._window)
        self.units: list[Work] = [(kind, stop - start) for start, stop in windows] * self._layers
        """Units of the group that are left after its forward, as far as they are known before the losses."""
        if not self._groups:
            self.units.append(("step", self._adapters))
        return windows

    def take_unit(self, most: int = 0) -> Work:
        """Take the next unit off the plan; where `most` is given and it can be cut, only that many of its last rows."""
        kind, rows = self.units[0]
        if kind in CUTTABLE_UNITS and 0 < most < rows:
            self.units[0] = kind, rows - most
            return kind, most
        return self.units.pop(0)

    @property
    def scored(self) -> bool:
        """Whether all predictions of the group are scored."""
        return not self.units or self.units[0][0] not in ("graph", "score", "head")

    @property
    def group_ended(self) -> bool:
        """Whether nothing but the optimizers' unit is left of the group."""
        return not self.units or self.units[0][0] == "step"

    @property
    def last_group(self) -> bool:
        """Whether no other group follows."""
        return not self._groups


def head_window_size(window_tokens: int, vocab_size: int) -> int:
    """Number of predictions per head unit: the window, or fewer where the vocabulary's logits would be large."""
    return max(8, min(window_tokens, _HEAD_LOGITS // vocab_size))


def groups_of(pairs: Sequence[TokenPair], most: int) -> list[list[TokenPair]]:
    """Split pairs into groups of at most `most` tokens: few enough rows to keep, enough for full windows."""
    groups: list[list[TokenPair]] = []
    room = 0
    for pair in pairs:
        if not groups or pair.num_tokens > room:
            groups.append([])
            room = most
        groups[-1].append(pair)
        room -= pair.num_tokens
    return groups


def whole_pairs(active: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Windows of whole pairs, last first: neighbours share one of at most `size` rows; a longer pair has its own."""
    windows: list[tuple[int, int]] = []
    for start, stop in active:
        if windows and windows[-1][1] == start and stop - windows[-1][0] <= size:
            windows[-1] = (windows[-1][0], stop)
        else:
            windows.append((start, stop))
    return windows[::-1]


def windows_of(active: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Windows of at most `size` over the active kept rows, last first; neighbours share windows, gaps end them."""
    runs: list[tuple[int, int]] = []
    for start, stop in active:
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return [(max(start, last - size), last) for start, stop in reversed(runs) for last in range(stop, start, -size)]
