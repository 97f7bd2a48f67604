"""The fingerprint of a base model: a hash of all that decides what it computes from a text.

What was learned on one base is not used with another. The hash covers the weights as they were loaded, in their dtype
and quantization, and whole files: weights, tokenizer and the model's own code; of the config what changes anything.
"""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from edged.runtime.durable import write_whole
from edged.store.data_dir import ADAPTERS_FOLDER, sha256_of

_WHOLE = ("*.safetensors", "tokenizer.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.py")
"""Files that are hashed whole. A chat template is none: it writes prompts, and pairs have those that were served."""
_SILENT = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
"""Keys of config.json that do not change what is computed; the dtype in force shows in the loaded weights."""
_KNOWN = "base_files.json"
"""What a data folder knows of models' files: their hashes by size and time, and the first ones of older bases."""


def files_digest(model_dir: Path, data_dir: Path) -> str:
    """Return the hash of a model's files. Those that `data_dir` knows by their size and time are not read again."""
    known = _read(data_dir)
    hashes: dict[str, list[Any]] = known.setdefault("files", {})
    before, digest = json.dumps(known), hashlib.sha256(_config(model_dir))
    for path in sorted({path for pattern in _WHOLE for path in model_dir.glob(pattern)}):
        # The hub's cache has links to files that are named by their contents.
        file = path.resolve()
        stat = file.stat()
        mark = [stat.st_size, stat.st_mtime_ns]
        if hashes.get(str(file), [])[:2] != mark:
            hashes[str(file)] = [*mark, sha256_of(file)]
        digest.update(f"{path.name} {hashes[str(file)][2]}\n".encode())
    if json.dumps(known) != before:
        _write(data_dir, known)
    return digest.hexdigest()


def base_fingerprint(weights: str, files: str, data_dir: Path) -> str:
    """Return the fingerprint of a base by that of its loaded `weights` and the digest of its `files`.

    In a data folder from when `weights` alone was the fingerprint, the first files seen with them keep it.
    """
    if (data_dir / ADAPTERS_FOLDER / weights).is_dir():
        known = _read(data_dir)
        first: dict[str, str] = known.setdefault("first", {})
        if weights not in first:
            first[weights] = files
            _write(data_dir, known)
        if first[weights] == files:
            return weights
    return hashlib.sha256(f"{weights} {files}".encode()).hexdigest()[:16]


def _config(model_dir: Path) -> bytes:
    config = json.loads((model_dir / "config.json").read_text("utf-8"))
    return json.dumps({key: config[key] for key in sorted(config.keys() - _SILENT)}, sort_keys=True).encode()


def _read(data_dir: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((data_dir / _KNOWN).read_text("utf-8")))
    return {}


def _write(data_dir: Path, known: dict[str, Any]) -> None:
    # Where it cannot be written the files are read again at the next start.
    with contextlib.suppress(OSError):
        data_dir.mkdir(parents=True, exist_ok=True)
        write_whole(data_dir / _KNOWN, json.dumps(known))
