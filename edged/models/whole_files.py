"""Files of models and adapters that are not what their authors wrote: Git LFS's pointers, downloads that broke off.

Must not import torch.
"""

import json
from collections.abc import Sequence
from pathlib import Path

_POINTER = b"version https://git-lfs.github.com/spec/"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The longest header that safetensors reads."""
TEXTS = ("*.json", "*.jinja", "*.model", "*.txt")
READ = (*TEXTS, "*.safetensors")
"""Files of a model that are read."""


def why_not_whole(path: Path) -> str:
    """Return why a file is not the one that was meant, and the way out; "" where nothing speaks against it.

    Of a safetensors file its header is read. Raises OSError.
    """
    with path.open("rb") as file:
        start = file.read(len(_POINTER))
        if start == _POINTER:
            return f"{path.name} is a Git LFS pointer, not the file: run `git lfs pull` where it was cloned"
        if path.suffix != ".safetensors":
            return ""
        size, length = path.stat().st_size, int.from_bytes(start[:_LENGTH_BYTES], "little")
        needed = _LENGTH_BYTES + length
        if length <= _MAX_HEADER_BYTES and needed <= size:
            file.seek(_LENGTH_BYTES)
            try:
                header = json.loads(file.read(length))
                needed += max(each["data_offsets"][1] for name, each in header.items() if name != "__metadata__")
            except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
                return ""  # its reader says what is wrong
    # A longer header is no header at all.
    broke_off = length <= _MAX_HEADER_BYTES and size < needed
    return f"{path.name} broke off: {size:,} of {needed:,} bytes are there: download it again" if broke_off else ""


def demand_whole(folder: Path, patterns: Sequence[str] = READ) -> None:
    """Raise ValueError for the first of a model's files that is not whole, and OSError for one that cannot be read."""
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file()):
        if problem := why_not_whole(path):
            raise ValueError(problem)
