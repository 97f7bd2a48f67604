"""What a safetensors file says of itself, and whether it is all there.

The format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

_MOST_HEADER_BYTES = 100_000_000


class Damaged(ValueError):
    """A file is not whole, or is no safetensors file; the message names it."""


def tensors_of(path: Path) -> dict[str, int]:
    """Number of elements by tensor name. Raises Damaged, also when the file's length is not what its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
                raise Damaged(f"{path.name} is cut off in its header, or is no safetensors file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        elements = {name: math.prod(entry["shape"]) for name, entry in header.items()}
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(f"{path.name} has no header that can be read") from None
    if size != 8 + length + end:
        raise Damaged(f"{path.name} has {size:,} bytes, its header says {8 + length + end:,}")
    return elements
