"""Which linears of a model are given the same input, as their names tell.

Owns the names. Must not know what is made of it.
"""

from __future__ import annotations

from collections.abc import Iterable

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""What transformers' decoders call linears of one parent that are given the same input."""


def siblings(names: Iterable[str]) -> list[list[str]]:
    """Paths of modules, those with one input together and in the order of `_SIBLINGS`, everything else alone."""
    groups: dict[str, list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        first = next((group[0] for group in _SIBLINGS if leaf in group), None)
        groups.setdefault(name if first is None else f"{parent}.{first}", []).append(name)
    order = {leaf: place for group in _SIBLINGS for place, leaf in enumerate(group)}
    return [sorted(group, key=lambda name: order.get(name.rpartition(".")[2], 0)) for group in groups.values()]
