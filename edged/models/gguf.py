"""The metadata of GGUF files (ggml's docs/gguf.md): such a file is not served, and refused with ways out.

Must not import torch.
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ITEMS, _MAX_BYTES = 1 << 24, 1 << 28
"""More of either is no metadata."""


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def why_not_served(path: Path) -> str:
    """Return why a GGUF file is not served, with the name of the checkpoint that it was made of, where it says one."""
    try:
        said = metadata_of(path)
    except (OSError, ValueError, struct.error) as error:
        return f"is a GGUF file whose metadata cannot be read ({error}): download it again"
    return (
        f"is a GGUF file ({said.get('general.architecture', 'of no named architecture')}), whose blocks edged neither "
        f'multiplies nor trains over: `edged models convert "{path}" FOLDER` makes a checkpoint of it; or give '
        f'{plain_checkpoint(said)} as safetensors, and model.quantize = "int4" where that is too large'
    )


def plain_checkpoint(said: dict[str, Any]) -> str:
    """Return how the metadata of a GGUF file names the checkpoint that it was made of."""
    url, name = said.get("general.base_model.0.repo_url"), said.get("general.base_model.0.name")
    plain = str(url).removeprefix("https://huggingface.co/") if url else name or said.get("general.name")
    return f'"{plain}"' if plain else "the checkpoint that it was made of"


def metadata_of(path: Path) -> dict[str, Any]:
    """Return a GGUF file's strings and numbers by their keys; arrays are left out. Raises OSError and ValueError."""
    with path.open("rb") as file:
        magic, version, _tensors, count = struct.unpack("<4sIQQ", _read(file, 24))
        if magic != b"GGUF" or version not in (2, 3) or count > _MAX_ITEMS:
            raise ValueError(f"version {version}, {count} entries")
        found = {}
        for _ in range(count):
            key = _string(file)
            (kind,) = struct.unpack("<I", _read(file, 4))
            value = _value(file, kind)
            if kind != _ARRAY:
                found[key] = value
    return found


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        inner, count = struct.unpack("<IQ", _read(file, 12))
        if inner in _NUMBERS:
            file.seek(count * struct.calcsize(_NUMBERS[inner]), 1)
        elif count > _MAX_ITEMS:
            raise ValueError(f"an array of {count} entries")
        else:
            for _ in range(count):
                _value(file, inner)
        return None
    if kind not in _NUMBERS:
        raise ValueError(f"a value of type {kind}")
    return struct.unpack(f"<{_NUMBERS[kind]}", _read(file, struct.calcsize(_NUMBERS[kind])))[0]


def _string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", _read(file, 8))
    return _read(file, length).decode("utf-8", "replace")


def _read(file: BinaryIO, count: int) -> bytes:
    found = file.read(count) if count <= _MAX_BYTES else b""
    if len(found) < count:
        raise ValueError("it ends early")
    return found
