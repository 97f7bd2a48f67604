"""Settings in force for governors."""

from __future__ import annotations

from typing import Any

from edged.settings.live import Live
from edged.settings.load import GovernorSettings, Settings


def live(**values: Any) -> Live[Settings]:
    """All as by default but these of `[governor]`."""
    return Live(Settings(governor=GovernorSettings(**values)))
