"""Loads checkpoints in a process of its own and prints how its memory grew: `loading_child.py DIR[:QUANTIZE] ...`.

Each is loaded in float32 on the CPU, and let go before the next.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import threading
from pathlib import Path

import torch

from edged.engine.attention.paged import IMPLEMENTATION
from edged.engine.model import quantization
from edged.engine.model.loading import load_pretrained
from edged.settings.load import ModelSettings


def private_bytes() -> int:
    """Memory that no file backs: what the system cannot take back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def measured(folder: str, quantize: str) -> dict[str, int]:
    before = peak = private_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    settings = ModelSettings(device="cpu", dtype="float32", quantize=quantize)
    model, _ = load_pretrained(folder, settings, IMPLEMENTATION)
    done.set()
    watcher.join()
    return {"weights": quantization.weight_bytes(model), "peak": peak - before}


def warm_up() -> None:
    """Imports, and what torch makes at its first product, are not what is measured."""
    for name in ("accelerate", "transformers.integrations.bitsandbytes", "transformers.integrations.torchao", "peft"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    torch.ones(512, 512) @ torch.ones(512, 512)


if __name__ == "__main__":
    warm_up()
    for case in sys.argv[1:]:
        print(json.dumps(measured(*case.split(":"))), flush=True)
