"""A cell of settings that change at run time."""

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Live(Generic[T]):
    """A cell with the settings in force: a part keeps the cell, and reads `current` each time it decides."""

    current: T
