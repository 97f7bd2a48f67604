"""The cost model's first prices: a profile that was measured here, or else a roofline from what the device says."""

from __future__ import annotations

import logging
import os
import platform
from dataclasses import replace
from pathlib import Path

import torch

from edged.engine.model.served_model import ServedModel
from edged.engine.native.library import FEW_ROWS, kernels
from edged.scheduler.cost.model import CostModel, Prices, roofline
from edged.scheduler.cost.profile import ProfileError, Subject, find_profile
from edged.settings.load import ModelSettings
from edged.tensors.cpu_threads import CpuThreads

log = logging.getLogger("edged.engine")

_CPU_RATES = (4e10, 8e9)
"""Operations and bytes per second. Constants: the first eight iterations set the level of all prices whatever they
were, and measuring would cost every start what they cost once."""
_UNKNOWN_CUDA_RATES = (2e13, 2e11)
_REACHED_OPERATIONS, _REACHED_BYTES = 0.5, 0.8
"""Of a GPU's peaks: what large products and copies come to."""
_TENSOR_OPERATIONS = {7: 1024, 8: 2048, 9: 4096, 10: 8192, 12: 1024}
"""By major compute capability: operations of a multiprocessor's tensor cores in a cycle, at 16 bits (dense)."""
_CONSUMER_OPERATIONS = {(8, 6): 1024, (8, 9): 1024}
_PLAIN_OPERATIONS = 256
"""The same of its 128 plain cores, at 32 bits."""


def subject_of(model: ServedModel, name: str, settings: ModelSettings, threads: CpuThreads | None) -> Subject:
    """What runs here: a profile of anything else does not fit it."""
    stored = getattr(model.model.config, "quantization_config", None)
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", "")
    quantization = settings.quantize or str(getattr(method, "value", method) or "")
    return Subject(
        model=name,
        fingerprint=model.fingerprint,
        device=device_name(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=quantization,
        threads=threads.most if threads is not None else 0,
    )


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's and how many of its cores this process may use."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{_processor()} {len(os.sched_getaffinity(0))} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(names, "") or platform.processor() or platform.machine()


def guess_of(model: ServedModel) -> Prices:
    """A roofline of the model on its device."""
    operations, bandwidth = _CPU_RATES if model.device.type == "cpu" else _cuda_rates(model.device, model.dtype)
    shape = model.shape
    prices = roofline(shape.parameters, operations, bandwidth, shape.layers, model.dtype.itemsize)
    # The compiled kernels end at a number of tokens, where a step costs more at once. Where they are not used it does
    # not, and that price is learned to be small.
    return replace(prices, knee_tokens=FEW_ROWS) if model.device.type == "cpu" and kernels() else prices


def _cuda_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Operations and bytes per second from the clocks and widths that the driver tells (kHz, bits)."""
    told = torch.cuda.get_device_properties(device)
    clock_khz, memory_khz = getattr(told, "clock_rate", 0), getattr(told, "memory_clock_rate", 0)
    width_bits = getattr(told, "memory_bus_width", 0)
    per_cycle = _PLAIN_OPERATIONS
    if dtype.itemsize <= 2:
        known = _TENSOR_OPERATIONS.get(told.major, _PLAIN_OPERATIONS)
        per_cycle = _CONSUMER_OPERATIONS.get((told.major, told.minor), known)
    operations = told.multi_processor_count * clock_khz * 1e3 * per_cycle * _REACHED_OPERATIONS
    # Two transfers a cycle.
    bandwidth = 2 * memory_khz * 1e3 * width_bits / 8 * _REACHED_BYTES
    return operations or _UNKNOWN_CUDA_RATES[0], bandwidth or _UNKNOWN_CUDA_RATES[1]


def first_cost_model(model: ServedModel, subject: Subject, setting: str, data_dir: Path | None) -> CostModel:
    """From the profile that `setting` names or the data folder has for `subject`; a roofline where there is none.

    A profile of something else, or one that cannot be read, is refused with one line in the log.
    """
    guess = guess_of(model)
    try:
        found = find_profile(setting, data_dir, subject)
    except ProfileError as error:
        log.warning("%s; latencies are guessed and learned (edged profile measures them)", error)
        found = None
    if found is None:
        return CostModel(guess)
    path, profile = found
    log.info("latencies come from the profile %s of %s", path, profile.created_at)
    return CostModel.from_profile(profile, guess, str(path))
