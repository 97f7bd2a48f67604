"""Kernels in C for decode steps on the CPU: few operations, each about as long as reading its data.

The kernels are compiled when edged is installed. Without a C compiler torch computes everything.
"""

import importlib.util
from pathlib import Path

INTERFACE = "edged_interface_6"
"""The interface's version, named in `attention.c`; a library without this name is older or newer."""
NOT_BUILT = "edged was installed without a C compiler"
OTHER_VERSION = "the compiled kernels are of another version of edged"
INSTALL_AGAIN = "install gcc, then edged again: without its compiled kernels the processor decodes at half the speed"


def shared_library() -> Path | None:
    """Return the path of the compiled kernels, if they exist; imports nothing large."""
    found = importlib.util.find_spec(f"{__name__}._kernels")
    return Path(found.origin) if found is not None and found.origin is not None else None


def why_not_built() -> str:
    """Return why there are no kernels to load; "" if there are. Loads nothing."""
    path = shared_library()
    if path is None:
        return NOT_BUILT
    return "" if INTERFACE.encode() in path.read_bytes() else OTHER_VERSION
