"""Averages of records, and the starts that they make: start' = start + mean."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from edged.federated.privacy import Tensors

A, B = ".lora_A.weight", ".lora_B.weight"
"""Ends of PEFT's names."""


def seeded_a(campaign: str, name: str, shape: tuple[int, int]) -> np.ndarray:
    """Return the matrix A (rank, inputs) with which a campaign's new start begins, equal on all boxes.

    It is uniform as PEFT's Kaiming initialization; the stream of PCG64's bits is the same in all versions of numpy.
    """
    seed = int.from_bytes(hashlib.sha256(f"{campaign}/{name}".encode()).digest())
    bits = np.random.PCG64(seed).random_raw(math.prod(shape))
    uniform = (bits >> np.uint64(11)) * 2.0**-53
    return ((2.0 * uniform - 1.0) / math.sqrt(shape[1])).reshape(shape).astype(np.float32)


def new_start(campaign: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Return the weights of a campaign's new start, which answers as the base: A seeded by its name, B zero."""
    return {
        name: seeded_a(campaign, name, (shape[0], shape[1])) if name.endswith(A) else np.zeros(shape, np.float32)
        for name, shape in shapes.items()
    }


def mean(deltas: Sequence[Tensors]) -> dict[str, np.ndarray]:
    """Return the mean of records' tensors, in float32, each of which counts the same. They have the same names."""
    total = {name: each.astype(np.float64) for name, each in deltas[0].items()}
    for delta in deltas[1:]:
        for name in total:
            total[name] += delta[name]
    return {name: (each / len(deltas)).astype(np.float32) for name, each in total.items()}


def moved(start: Tensors, by: Tensors) -> dict[str, np.ndarray]:
    """Return a start whose B is moved by what records say on the mean."""
    return {name: each + by[name] if name in by else each for name, each in start.items()}


def read_start(folder: Path) -> tuple[dict[str, np.ndarray], float]:
    """Read a PEFT folder's weights, in float32, and its alpha.

    Raises OSError, SafetensorError, ValueError and KeyError. `check_weights` is to be next.
    """
    config = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    weights = load_file(folder / "adapter_model.safetensors")
    return {name: each.astype(np.float32) for name, each in weights.items()}, float(config["lora_alpha"])


def write_start(folder: Path, start: Tensors, alpha: float) -> None:
    """Write a start as a PEFT folder, which `edged starts add` takes. Raises OSError."""
    linears = sorted(name.removeprefix("base_model.model.").removesuffix(B) for name in start if name.endswith(B))
    rank = next(each.shape[0] for name, each in start.items() if name.endswith(A))
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0}
    config |= {"bias": "none", "target_modules": linears, "base_model_name_or_path": None}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(start), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1), "utf-8")
