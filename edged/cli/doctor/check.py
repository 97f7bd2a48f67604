"""The check process: a process that imports torch and transformers for the checks, as that may be slow or fail.

`python -P -m edged.cli.doctor.check` reads settings from stdin and writes four lines of JSON: on torch and the device,
on memory, on the model's tokens, and on what was tried on the device. Other modules import nothing but `CheckProcess`
and `lacks_for_triton` from here.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edged.runtime import logs
from edged.settings.load import Settings

CONTEXT_TOKENS = 4096
"""Tokens of K/V that should fit, if model.max_context_tokens is not set."""


class CheckProcess:
    """The running process, started by the constructor; `lines` waits for its results."""

    def __init__(self, settings: Settings, model: Path | None, tries: bool = False) -> None:
        """Start the process; without a `model` it inspects torch and the device alone.

        It `tries` the device only if asked: beside a daemon there may be no memory for that.
        """
        self._found: list[dict[str, Any]] = []
        # -P: root may run this in any folder, and must not import modules that other users left there.
        command = [sys.executable, "-P", "-m", "edged.cli.doctor.check"]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True)
        assert self._process.stdin is not None
        with self._process.stdin as asked:
            about = {"settings": settings.model_dump(), "model": str(model) if model else "", "tries": tries}
            json.dump(about, asked)
        self._process.stdin = None

    def lines(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return [torch and device, memory, tokens, trials], each empty if it did not arrive in time.

        Later calls return the same.
        """
        if not self._found:
            try:
                text, _ = self._process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                text, _ = self._process.communicate()
            self._found = [*(json.loads(line) for line in text.splitlines() if line.endswith("}")), {}, {}, {}, {}]
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

    from edged.engine.model.loading import ModelRefused
    from edged.profiler.memory import plan_memory

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
        "architecture": plan["architecture"],
        "parameters": plan["parameters"],
        "experts": plan["experts"],
        "lora_linears": plan["adapter"]["linears"],
        "fits": plan["fits"],
        "dtype": plan["dtype"],
        "context_tokens": context,
        "needed_bytes": sum(parts.values()) - parts["system"] + plan["context_bytes"],
        "state_bytes": parts["states"],
        "total_bytes": total,
        "available_bytes": None if own else int(box.available),
    }


def _tokens(settings: Settings, model: Path) -> dict[str, Any]:
    """Return what in the tokenizer's files does not fit the model."""
    from edged.text.tokenizer import Tokenizer, TokenizerError

    about = settings.model
    loaded = (model, about.trust_remote_code, about.chat_template_kwargs, about.response_template)
    try:
        tokenizer = Tokenizer.load(*loaded)
        form = tokenizer.form
        return {
            "problems": tokenizer.problems(),
            "tools": tokenizer.writes_tools,
            "response_template": form is not None,
            "calls": form is not None and form.has_calls,
            "reasoning": form is not None and form.has_reasoning,
        }
    except TokenizerError as error:
        return {"refused": str(error)}


def _trials(settings: Settings, device: dict[str, Any]) -> dict[str, str]:
    """Return why what edged does on the device fails, by what was tried; "" for what works."""
    import torch

    wanted, kind = settings.model.device, settings.model.dtype
    cuda = bool(device["cuda"]) and wanted != "cpu"
    where = (wanted if wanted.startswith("cuda") else "cuda:0") if cuda else "cpu"
    kind = ("bfloat16" if cuda else "float32") if kind == "auto" else kind

    def multiply() -> None:
        ones = torch.ones(64, 64, dtype=getattr(torch, kind), device=where)
        if (found := float((ones @ ones)[0, 0])) != 64.0:
            raise ArithmeticError(f"a product of ones gives {found:g} instead of 64")

    def run_kernel() -> None:
        from edged.tensors.triton_trial import try_triton

        try_triton(where)

    def quantize() -> None:
        from edged.engine.model.served_model import ServedModel
        from edged.models import demo_model_dir

        ServedModel.load(demo_model_dir(), settings.model).check_device()

    found = {"dtype": kind, "product": _why_not(multiply)}
    if cuda and device["triton"]:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TRITON_CACHE_DIR"] = cache
            found["triton"] = _why_not(run_kernel)
    if settings.model.quantize:
        found["quantized"] = _why_not(quantize)
    return found


def _why_not(trial: Callable[[], None]) -> str:
    try:
        trial()
    except Exception as error:  # what drivers, compilers and packages raise
        return logs.first_line(error, with_kind=True)
    return ""


def lacks_for_triton() -> list[str]:
    """Return Debian's packages that lack for Triton to compile: it makes a module of Python in C for each kernel."""
    compiler = any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang"))))
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return [*([] if compiler else ["gcc"]), *([] if header.is_file() else [f"python{version}-dev"])]


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    settings = Settings.model_validate(asked["settings"])
    device = _device(settings.model.device)
    print(json.dumps(device), flush=True)
    model = Path(asked["model"])
    print(json.dumps(_memory(settings, model, device) if asked["model"] else {}), flush=True)
    print(json.dumps(_tokens(settings, model) if asked["model"] else {}), flush=True)
    print(json.dumps(_trials(settings, device) if asked["tries"] else {}), flush=True)
