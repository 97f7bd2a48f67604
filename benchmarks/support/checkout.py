"""The checkout's path for child processes, since it is not installed."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(**further: str) -> dict[str, str]:
    """Return this process's environment, with `benchmarks` and `examples` importable."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **further}
