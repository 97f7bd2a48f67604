"""A benchmark that runs an engine in its own process imports this first: the process is prepared as `edged serve` is.

It must happen before numpy and torch are imported, and only in the program itself: whoever imports a benchmark for its
functions stays as it is.
"""

from __future__ import annotations

import sys

from edged.runtime.process import prepare, restart_in_huge_pages

_SPEC = sys.modules["__main__"].__spec__
if _SPEC is not None and _SPEC.parent == "benchmarks":
    restart_in_huge_pages()
    prepare()
