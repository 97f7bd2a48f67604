"""Checks of the device: the GPU, its driver, whether this torch can use it, and whether the model fits.

Must not import torch.
"""

from __future__ import annotations

import os
import re

from edged.cli.doctor.finding import Examination, Finding, broken, doubtful, fine, gib
from edged.engine.native import INSTALL_AGAIN, why_not_built

_NODES = ("dev/nvidia0", "dev/nvhost-gpu", "dev/nvgpu", "dev/nvmap")
"""A GPU's, on desktops and on Jetsons."""
_CUDA_TORCH = "install a torch that is built for CUDA: on a Jetson NVIDIA's own wheel, else `pip install torch`"


def gpu_there(it: Examination) -> bool:
    """Whether the box has an NVIDIA GPU, whatever torch says."""
    return it.jetson or any((it.root / node).exists() for node in _NODES)


def device(it: Examination) -> Finding:
    """The device that the model will run on."""
    wanted, found = it.settings.model.device, it.torch
    if not found:
        return doubtful("torch could not be imported in time", 'try `python -c "import torch"`')
    if found["cuda"]:
        major, minor = found["capability"]
        whose = "shared with the box" if found["integrated"] else "of its own"
        return fine(f"{found['gpu']}, compute capability {major}.{minor}, {gib(found['gpu_bytes'])} {whose}")
    if wanted.startswith("cuda"):
        way_out = 'see "torch" and "driver" here, or set model.device = "auto"'
        return broken(f'model.device = "{wanted}", and torch sees no GPU', way_out)
    if gpu_there(it):
        way_out = 'see "torch" and "driver" here; the group that owns /dev/nvidia* or /dev/nvhost-* may be missing'
        return doubtful("there is an NVIDIA GPU, and torch does not see it: the processor is used", way_out)
    return fine(f"no GPU: the processor, {len(os.sched_getaffinity(0))} cores")


def driver(it: Examination) -> Finding | None:
    """The driver of a GPU that is there."""
    if not gpu_there(it):
        return None
    if release := re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", it.read("proc/driver/nvidia/version")):
        return fine(release[1])
    if l4t := it.read("etc/nv_tegra_release"):
        return fine("L4T " + ".".join(re.findall(r"R(\d+).*?REVISION: ([\d.]+)", l4t)[0]) if "R" in l4t else l4t)
    return broken("a GPU is there, and no driver of it is loaded", "install NVIDIA's driver, then restart")


def torch_build(it: Examination) -> Finding | None:
    """Whether torch was built for the GPU that is there."""
    if not (found := it.torch):
        return None
    seen = f"{found['torch']}, " + (f"CUDA {found['cuda_build']}" if found["cuda_build"] else "built for processors")
    if gpu_there(it) and not found["cuda_build"]:
        return broken(f"{seen}, though a GPU is there", _CUDA_TORCH)
    if found["cuda"] and not _compiled_for(found["capability"], found["architectures"]):
        major, minor = found["capability"]
        return doubtful(f"{seen}, without kernels for compute capability {major}.{minor}", _CUDA_TORCH)
    return fine(seen)


def triton(it: Examination) -> Finding | None:
    """What edged's kernels for the GPU need, where that is used."""
    if not it.torch or not it.torch["cuda"]:
        return None
    if it.torch["triton"]:
        return fine("installed: kernels for attention and adapters, captured decode iterations")
    return doubtful("not installed: the GPU is used without edged's kernels for it", "pip install triton")


def kernels(it: Examination) -> Finding | None:
    """The compiled kernels, where the processor computes."""
    if not it.torch or it.torch["cuda"] or gpu_there(it):
        return None
    if why_not := why_not_built():
        return doubtful(why_not, INSTALL_AGAIN)
    return fine("compiled: layers, attention and adapters' updates of decode steps on the processor")


def _compiled_for(capability: list[int], architectures: list[str]) -> bool:
    """Binaries run on the same major version from their minor one on; PTX on everything later."""
    major, minor = capability
    for architecture in architectures:
        kind, _, digits = architecture.partition("_")
        number = re.match(r"\d+", digits)
        if number is None:
            continue
        built = divmod(int(number[0]), 10)
        if (kind == "compute" and built <= (major, minor)) or (built[0] == major and built[1] <= minor):
            return True
    return False


def memory(it: Examination) -> Finding | None:
    """Whether the model with its adapters, a step and a context fits: at all, and now if nobody runs it yet."""
    if not (found := it.needs):
        return None
    if problem := found.get("problem"):
        return broken(problem, "serve another model, or change what it names")
    needed, total, available = found["needed_bytes"], found["total_bytes"], found["available_bytes"]
    seen = f"{gib(needed)} are needed in {found['dtype']} with {found['context_tokens']:,} tokens of context"
    less = 'model.quantize = "nf4", fewer align.max_loaded_adapters, or a smaller model'
    if not found["fits"]:
        return broken(f"{seen}; the device has {gib(total)}", less)
    if not it.running and available is not None and needed > available:
        return doubtful(f"{seen}; {gib(available)} are available now", f"end other programs; or {less}")
    return fine(f"{seen}; " + (gib(total) if available is None else f"{gib(available)} of {gib(total)} available"))
