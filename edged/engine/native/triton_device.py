"""The check whether Triton's kernels can run on a device."""

import importlib.util

import torch

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def why_not(device: torch.device, dtype: torch.dtype) -> str:
    """Return why no kernel can run on `device` in `dtype`; "" if they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed: pip install triton"
    if device.type != "cuda":
        return f"Triton has no kernels for {device.type}"
    if dtype not in _DTYPES:
        return f"{dtype} is none of {', '.join(map(str, _DTYPES))}"
    if dtype != torch.float32 and torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than sm_80"
    return ""
