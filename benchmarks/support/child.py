"""The process of a side: `python -m benchmarks.support.child MODULE NAME ARGUMENTS...` runs MODULE's `be_side`.

edged's own sides ("edged", "edged with ...") are prepared as `edged serve` is, before numpy and torch are imported; the
others run as their users run them.
"""

from __future__ import annotations

import importlib
import sys

from edged.runtime.process import prepare, restart_in_huge_pages


def main() -> None:
    """Run the side."""
    module, name = sys.argv[1:3]
    if name.startswith("edged"):
        restart_in_huge_pages()
        prepare()
    importlib.import_module(module).be_side(*sys.argv[2:])


if __name__ == "__main__":
    main()
