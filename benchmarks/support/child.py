"""A side's process: `python -m benchmarks.support.child MODULE NAME ARGUMENTS...` runs MODULE with the rest.

Owns what must happen before numpy and torch are imported: edged's own sides ("edged", "edged with ...") are prepared as
`edged serve` is; the others run as their users run them.
"""

from __future__ import annotations

import runpy
import sys

from edged.runtime.process import prepare, restart_in_huge_pages


def main() -> None:
    """Become the side."""
    module, name = sys.argv[1:3]
    if name.startswith("edged"):
        restart_in_huge_pages()
        prepare()
    sys.argv = [module, *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
