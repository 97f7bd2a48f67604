"""Plugins: what comes under edged's groups of entry points, `edged.policies` and `edged.commands`.

Other packages bring them, and so does edged's own laboratory, which nothing else of edged imports.
"""

import logging
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from typing import TypeVar

log = logging.getLogger("edged")
Kind = TypeVar("Kind")
_OWN = "edged"


class PluginError(Exception):
    """A package brings something that cannot be used; the message names both."""


def own(group: str) -> dict[str, EntryPoint]:
    """Return edged's own entry points of a group by name; none where it is not installed."""
    try:
        points = distribution(_OWN).entry_points.select(group=group)
    except PackageNotFoundError:
        return {}
    return {point.name: point for point in points}


def others(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group that other packages have, by name."""
    return {point.name: point for point in entry_points(group=group) if point.dist is None or point.dist.name != _OWN}


def load(point: EntryPoint, kind: type[Kind]) -> Kind:
    """Import what an entry point names. Raises PluginError where that fails, or is no `kind`."""
    package = point.dist.name if point.dist is not None else point.value
    try:
        loaded = point.load()
    except Exception as error:
        raise PluginError(f'"{point.name}" of the package {package} cannot be loaded: {error!r}') from error
    if not isinstance(loaded, kind):
        raise PluginError(f'"{point.name}" of the package {package} is a {type(loaded).__name__}, no {kind.__name__}')
    return loaded


def load_others(group: str, kind: type[Kind]) -> dict[str, Kind]:
    """Return what other packages bring under a group, by name; of what cannot be used the log has the reason."""
    usable = {}
    for name, point in others(group).items():
        try:
            usable[name] = load(point, kind)
        except PluginError as error:
            log.warning("%s", error)
    return usable
