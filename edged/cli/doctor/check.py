"""The check process: a process that imports torch and transformers for the checks, as that may be slow or fail.

`python -P -m edged.cli.doctor.check` reads settings from stdin and writes three lines of JSON: on torch and the device,
on memory, and on the model's tokens. Other modules import nothing but `CheckProcess` from here.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from edged.settings.load import Settings

CONTEXT_TOKENS = 4096
"""Tokens of K/V that should fit, if model.max_context_tokens is not set."""


class CheckProcess:
    """The running process, started by the constructor; `lines` waits for its results."""

    def __init__(self, settings: Settings, model: Path | None) -> None:
        """Start the process; without a `model` it inspects torch and the device alone."""
        self._found: list[dict[str, Any]] = []
        # -P: root may run this in any folder, and must not import modules that other users left there.
        command = [sys.executable, "-P", "-m", "edged.cli.doctor.check"]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True)
        assert self._process.stdin is not None
        with self._process.stdin as asked:
            json.dump({"settings": settings.model_dump(), "model": str(model) if model else ""}, asked)
        self._process.stdin = None

    def lines(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return [torch and device, memory, tokens], each empty if it did not arrive in time.

        Later calls return the same.
        """
        if not self._found:
            try:
                text, _ = self._process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                text, _ = self._process.communicate()
            self._found = [*(json.loads(line) for line in text.splitlines() if line.endswith("}")), {}, {}, {}]
        return self._found


def _device(wanted: str) -> dict[str, Any]:
    """Return torch's version and CUDA build, and the properties of the GPU that it sees."""
    import torch

    build = {"torch": torch.__version__, "cuda_build": torch.version.cuda or "", "cuda": torch.cuda.is_available()}
    if not build["cuda"]:
        return build
    gpu = torch.cuda.get_device_properties(torch.device(wanted if wanted.startswith("cuda") else "cuda:0"))
    return {
        **build,
        "gpu": gpu.name,
        "capability": [gpu.major, gpu.minor],
        "architectures": torch.cuda.get_arch_list(),
        "integrated": bool(getattr(gpu, "is_integrated", False)),
        "gpu_bytes": gpu.total_memory,
        "triton": importlib.util.find_spec("triton") is not None,
    }


def _memory(settings: Settings, model: Path, device: dict[str, Any]) -> dict[str, Any]:
    """Return the memory that serving and training need, by the engine's memory plan, and the device's memory."""
    import psutil

    from edged.bench.memory import plan_memory
    from edged.engine.model.loading import ModelRefused

    box = psutil.virtual_memory()
    cuda = bool(device["cuda"]) and settings.model.device != "cpu"
    own = cuda and not device["integrated"]
    total = int(device["gpu_bytes"] if own else box.total)
    context = settings.model.max_context_tokens or CONTEXT_TOKENS
    try:
        plan = plan_memory(model, settings, "cuda" if cuda else "cpu", total, context)
    except ModelRefused as error:
        return {"problem": str(error)}
    parts = plan["parts"]
    return {
        "fits": plan["fits"],
        "dtype": plan["dtype"],
        "context_tokens": context,
        "needed_bytes": sum(parts.values()) - parts["system"] + plan["context_bytes"],
        "total_bytes": total,
        "available_bytes": None if own else int(box.available),
    }


def _tokens(settings: Settings, model: Path) -> dict[str, Any]:
    """Return what in the tokenizer's files does not fit the model."""
    from edged.text.tokenizer import Tokenizer, TokenizerError

    try:
        return {"problems": Tokenizer.load(model, settings.model.trust_remote_code).problems()}
    except TokenizerError as error:
        return {"refused": str(error)}


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    settings = Settings.model_validate(asked["settings"])
    device = _device(settings.model.device)
    print(json.dumps(device), flush=True)
    if asked["model"]:
        print(json.dumps(_memory(settings, Path(asked["model"]), device)), flush=True)
        print(json.dumps(_tokens(settings, Path(asked["model"]))), flush=True)
