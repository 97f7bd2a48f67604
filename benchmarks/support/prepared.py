"""Preparation of a benchmark's process as `edged serve` prepares its own, for benchmarks with an engine in process.

It must be imported before numpy and torch. It prepares only the main program: importing a benchmark for its functions
changes nothing.
"""

from __future__ import annotations

import sys

from edged.runtime.process import prepare, restart_in_huge_pages

_SPEC = sys.modules["__main__"].__spec__
if _SPEC is not None and _SPEC.parent == "benchmarks":
    restart_in_huge_pages()
    prepare()
