"""Plugins: what other packages bring under edged's groups of entry points, `edged.policies` and `edged.commands`."""

import logging
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

log = logging.getLogger("edged")
Kind = TypeVar("Kind")


class PluginError(Exception):
    """A package brings something that cannot be used; the message names both."""


def found(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name."""
    return {point.name: point for point in entry_points(group=group)}


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


def load_all(group: str, kind: type[Kind]) -> dict[str, Kind]:
    """Return what all packages bring under a group, by name; of what cannot be used the log has the reason."""
    usable = {}
    for name, point in found(group).items():
        try:
            usable[name] = load(point, kind)
        except PluginError as error:
            log.warning("%s", error)
    return usable
