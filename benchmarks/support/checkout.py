"""The checkout, which is not installed: processes that run its modules are told where it is."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(**further: str) -> dict[str, str]:
    """This process's environment, in which `benchmarks` and `examples` can be imported."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **further}
