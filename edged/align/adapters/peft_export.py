"""The export of adapters: PEFT folders that name modules as the checkpoint's own class does.

A version's files have the names of the text decoder that is served, which may be a part of a wrapper with towers.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from edged.align.adapters.form import LoraSpec, peft_name
from edged.align.adapters.peft_import import CONFIG, WEIGHTS, plain_key
from edged.models.wrapper_names import text_name
from edged.store.archive import END, chunks, member

_LENGTH_BYTES = 8
"""Of a safetensors file: the length of its header, which comes next."""


def exported(folder: Path, spec: LoraSpec) -> Iterator[bytes]:
    """Yield a tar of a version's files that PEFT reads; being open, they stay readable if the version is removed.

    Raises OSError.
    """
    with (folder / CONFIG).open("rb") as config, (folder / WEIGHTS).open("rb") as weights:
        fields, length = config.read(), weights.read(_LENGTH_BYTES)
        header = weights.read(int.from_bytes(length, "little"))
        rest = os.fstat(weights.fileno()).st_size - _LENGTH_BYTES - len(header)
        if spec.wrapper:
            fields, header = _renamed(json.loads(fields), json.loads(header), spec)
        head = len(header).to_bytes(_LENGTH_BYTES, "little") + header
        yield from member(CONFIG, len(fields), [fields])
        yield from member(WEIGHTS, len(head) + rest, chain([head], chunks(weights)))
        yield END


def _renamed(config: dict[str, Any], tensors: Mapping[str, Any], spec: LoraSpec) -> tuple[bytes, bytes]:
    """Return the configuration and the safetensors header with the wrapper's names."""
    linears = {peft_name(linear, part): linear for linear in spec.shapes for part in ("A", "magnitude", "B", "")}
    names = {name: name.replace(linear, spec.exported(linear), 1) for name, linear in linears.items()}
    used = {linears[name] for name in tensors if name in linears}
    for field in ("target_modules", "feedforward_modules"):
        if field in config:
            # By their whole names: a tower may have linears with the same ends.
            config[field] = sorted(spec.exported(linear) for linear in used if _named(linear, config[field]))
    for field in ("rank_pattern", "alpha_pattern"):
        if field in config:
            config[field] = {_exported_key(key, spec): number for key, number in config[field].items()}
    header = json.dumps({names.get(name, name): place for name, place in tensors.items()}).encode()
    return json.dumps(config, indent=1).encode(), header + b" " * (-len(header) % _LENGTH_BYTES)


def _named(linear: str, ends: Collection[str]) -> bool:
    return any(f".{linear}".endswith(f".{end}") for end in ends)


def _exported_key(key: str, spec: LoraSpec) -> str:
    """Return a pattern's key for the wrapper: whole names of linears are others there, their ends are the same."""
    linear = text_name(plain_key(key))
    return spec.exported(linear) if linear in spec.shapes else key
