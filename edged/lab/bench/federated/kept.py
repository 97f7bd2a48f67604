"""Kept results: a bench that is stopped goes on from what it computed."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


class Kept:
    """Results by name under a folder of their own for each plan: those of another plan are never taken for these."""

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        told = json.dumps(plan, sort_keys=True)
        self._folder = folder / hashlib.sha256(told.encode()).hexdigest()[:16]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._write("plan.json", lambda draft: draft.write_text(told, "utf-8"))

    def _write(self, name: str, write: Callable[[Path], Any]) -> None:
        """Write a file wholly or not at all."""
        draft = self._folder / f".{name}"
        write(draft)
        os.replace(draft, self._folder / name)

    def figures(self, name: str) -> Any:
        """Return what was kept under this name; None: nothing."""
        path = self._folder / f"{name}.json"
        return json.loads(path.read_text("utf-8")) if path.exists() else None

    def keep_figures(self, name: str, figures: Any) -> Any:
        """Keep what JSON can hold; returns it."""
        self._write(f"{name}.json", lambda draft: draft.write_text(json.dumps(figures), "utf-8"))
        return figures

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return the tensor that was kept under this name."""
        path = self._folder / f"{name}.safetensors"
        return load_file(path)["kept"] if path.exists() else None

    def keep_tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Keep a tensor; returns it."""
        self._write(f"{name}.safetensors", lambda draft: save_file({"kept": tensor.contiguous()}, draft))
        return tensor
