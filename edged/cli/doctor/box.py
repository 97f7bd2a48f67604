"""Checks of the machine and its device: power mode, jtop, swap, the clock; the GPU, its driver, whether this torch can
use it, and whether the model fits.

Must not import torch.
"""

import os
import re
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

from edged.cli.doctor.check import lacks_for_triton
from edged.cli.doctor.finding import Examination, Finding, broken, doubtful, fine, in_place_of, output_of
from edged.cli.output import size
from edged.engine.native import INSTALL_AGAIN, why_not_built

_MUCH_SWAPPED = 0.25
"""Share of swap above which its use is reported."""
_LIMITED_BELOW = 0.95
"""Share of a GPU's default power limit below which the limit is reported."""
_NODES = ("dev/nvidia0", "dev/nvhost-gpu", "dev/nvgpu", "dev/nvmap")
"""Device nodes of a GPU, on desktops and on Jetsons."""
_CUDA_TORCH = (
    "install a torch that is built for this GPU: on a Jetson one of https://pypi.jetson-ai-lab.io, as "
    "docs/operations.md says, else `pip install torch`"
)


def power(it: Examination) -> Finding | None:
    """Check nvpmodel's power mode on a Jetson, or the power limit of another GPU."""
    if it.jetson:
        code, text = output_of(["nvpmodel", "-q"], it.left_s(3.0))
        if not code and (mode := re.search(r"NV Power Mode: *(\S+)", text)):
            return fine(mode[1])
        seen = text.splitlines()[0] if text else "nvpmodel tells no mode"
        return doubtful(seen, "run `sudo nvpmodel -q`: NVIDIA's package nvidia-l4t-nvpmodel has it")
    import pynvml

    try:
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        now_w = pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3
        default_w = pynvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1e3
    except pynvml.NVMLError:
        return None
    seen = f"limit {now_w:.0f} W, by default {default_w:.0f} W"
    if now_w < _LIMITED_BELOW * default_w:
        return doubtful(seen, f"raise it with `sudo nvidia-smi -pl {default_w:.0f}`, if it is not meant")
    return fine(seen)


def jtop(it: Examination) -> Finding | None:
    """Check that jtop's service answers, on a Jetson."""
    if not it.jetson:
        return None
    path = it.root / "run/jtop.sock"
    if not path.exists():
        way_out = "`sudo pip3 install -U jetson-stats`, then `sudo systemctl restart jtop.service`"
        return doubtful("its service is not there: no temperatures, power or clocks", way_out)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(it.left_s(2.0))
        try:
            with in_place_of(it.account):
                client.connect(str(path))
        except PermissionError:
            user = it.account.pw_name if it.account else "USER"
            whom = f"the service's user, {user}" if it.account else "this user"
            way_out = f"`sudo usermod -aG jtop {user}` for the user that edged runs as, and restart edged"
            return doubtful(f"{path} may not be opened by {whom}", way_out)
        except OSError as error:
            return doubtful(f"{path}: {error}", "`sudo systemctl restart jtop.service`")
    return fine("its service answers")


def swap(it: Examination) -> Finding:
    """Check for zram swap on a Jetson, which takes the memory that it should save, and for much swap in use."""
    areas = [line.split() for line in it.read("proc/swaps").splitlines()[1:]]
    total, used = (sum(int(area[column]) << 10 for area in areas) for column in (2, 3))
    names = ", ".join(Path(area[0]).name for area in areas)
    seen = f"{total / 2**30:.1f} GiB ({names}), {used / 2**30:.1f} GiB used" if areas else "none"
    if it.jetson and any("zram" in area[0] for area in areas):
        way_out = "`sudo systemctl disable --now nvzramconfig`, and a swap file on NVMe instead: "
        return doubtful(seen, f"{way_out}zram takes the memory that GPU and processor share")
    if total and used > _MUCH_SWAPPED * total:
        return doubtful(seen, "end other programs, or serve a smaller model: what is swapped out is slow")
    return fine(seen)


def clock(it: Examination) -> Finding:
    """Check that the clock is synchronized and not behind edged's files, as without a battery after a power cut."""
    now = time.time()
    known = [Path(__file__), it.data_dir / "edged.db", it.data_dir / "edged.db-wal"]
    newest = max(path.stat().st_mtime for path in known if path.exists())
    seen, last = (datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M UTC") for at_s in (now, newest))
    if newest > now + 60.0:
        way_out = "`sudo timedatectl set-ntp true`: store.keep_days and the log's times go by it"
        return doubtful(f"{seen}, but edged's files were written at {last}", way_out)
    _, synchronized = output_of(["timedatectl", "show", "--property=NTPSynchronized", "--value"], it.left_s(2.0))
    if synchronized == "no":
        return doubtful(f"{seen}, not synchronized", "`sudo timedatectl set-ntp true`, if the box has a network")
    return fine(seen)


def gpu_there(it: Examination) -> bool:
    """Whether the machine has an NVIDIA GPU, independently of torch."""
    return it.jetson or any((it.root / node).exists() for node in _NODES)


def device(it: Examination) -> Finding:
    """Check the device that the model will run on."""
    wanted, found = it.settings.model.device, it.torch
    if not found:
        return doubtful("torch could not be imported in time", 'try `python -c "import torch"`')
    if found["cuda"]:
        major, minor = found["capability"]
        whose = "shared with the box" if found["integrated"] else "of its own"
        return fine(f"{found['gpu']}, compute capability {major}.{minor}, {size(found['gpu_bytes'])} {whose}")
    if wanted.startswith("cuda"):
        way_out = 'see "torch" and "driver" here, or set model.device = "auto"'
        return broken(f'model.device = "{wanted}", and torch sees no GPU', way_out)
    if gpu_there(it):
        way_out = 'see "torch" and "driver" here; the group that owns /dev/nvidia* or /dev/nvhost-* may be missing'
        return doubtful("there is an NVIDIA GPU, and torch does not see it: the processor is used", way_out)
    return fine(f"no GPU: the processor, {len(os.sched_getaffinity(0))} cores")


def driver(it: Examination) -> Finding | None:
    """Check that an NVIDIA GPU has its driver loaded."""
    if not gpu_there(it):
        return None
    if release := re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", it.read("proc/driver/nvidia/version")):
        return fine(release[1])
    if l4t := it.read("etc/nv_tegra_release"):
        return fine("L4T " + ".".join(re.findall(r"R(\d+).*?REVISION: ([\d.]+)", l4t)[0]) if "R" in l4t else l4t)
    return broken("a GPU is there, and no driver of it is loaded", "install NVIDIA's driver, then restart")


def torch_build(it: Examination) -> Finding | None:
    """Check that torch was built for CUDA and for the GPU's compute capability."""
    if not (found := it.torch):
        return None
    seen = f"{found['torch']}, " + (f"CUDA {found['cuda_build']}" if found["cuda_build"] else "built for processors")
    if gpu_there(it) and not found["cuda_build"]:
        return broken(f"{seen}, though a GPU is there", _CUDA_TORCH)
    if found["cuda"] and not _compiled_for(found["capability"], found["architectures"], it.jetson):
        major, minor = found["capability"]
        return doubtful(f"{seen}, without kernels for compute capability {major}.{minor}", _CUDA_TORCH)
    if why := it.trials.get("product"):
        way_out = _CUDA_TORCH if found["cuda"] else "`pip install --force-reinstall torch`"
        return broken(f"{seen}: a product in {it.trials['dtype']} fails ({why})", way_out)
    return fine(seen)


def triton(it: Examination) -> Finding | None:
    """Check that Triton is installed where CUDA is used: edged's GPU kernels need it."""
    if not it.torch or not it.torch["cuda"]:
        return None
    if why := it.trials.get("triton"):
        lacking = lacks_for_triton()
        other = 'set model.kernels = "torch"'
        way_out = (
            f"`sudo apt install {' '.join(lacking)}`" if lacking else f"install the Triton of this torch, or {other}"
        )
        return broken(f"installed, and a kernel fails ({why})", way_out)
    if it.torch["triton"]:
        return fine("installed: kernels for attention and adapters, captured decode iterations")
    return doubtful("not installed: the GPU is used without edged's kernels for it", "pip install triton")


def quantized(it: Examination) -> Finding | None:
    """Check that a model can be quantized as the settings want it."""
    kind = it.settings.model.quantize
    if not kind or "quantized" not in it.trials:
        return None
    if why := it.trials["quantized"]:
        way_out = "`pip install 'edged[quantized]'` in edged's environment, or another model.quantize"
        return broken(f"a model in {kind} fails ({why})", way_out)
    return fine(f"a small model in {kind} was computed")


def kernels(it: Examination) -> Finding | None:
    """Check that edged's CPU kernels are compiled, where the model runs on the CPU."""
    if not it.torch or it.torch["cuda"] or gpu_there(it):
        return None
    if why_not := why_not_built():
        return doubtful(why_not, INSTALL_AGAIN)
    return fine("compiled: layers, attention and adapters' updates of decode steps on the processor")


def _compiled_for(capability: list[int], architectures: list[str], jetson: bool) -> bool:
    """Whether kernels for these architectures run on a GPU of this (major, minor) compute capability.

    Binaries (sm) run on the same major version from their minor one on, a Jetson's on it alone; PTX (compute) on
    everything later.
    """
    major, minor = capability
    for kind, digits in re.findall(r"(sm|compute)_(\d+)", " ".join(architectures)):
        built = divmod(int(digits), 10)
        if built == (major, minor) or (kind == "compute" and built <= (major, minor)):
            return True
        if not jetson and built[0] == major and built[1] <= minor:
            return True
    return False


def memory(it: Examination) -> Finding | None:
    """Check that the model with its adapters, a DPO step and a context fits the device, and what is available now.

    Available memory counts only while the daemon does not run.
    """
    if not (found := it.needs) or "problem" in found:
        return None
    needed, total, available = found["needed_bytes"], found["total_bytes"], found["available_bytes"]
    seen = f"{size(needed)} are needed in {found['dtype']} with {found['context_tokens']:,} tokens of context"
    if states := found.get("state_bytes"):
        seen += f" and {size(states)} of layers' states (prefixes are not reused, K/V is not pruned)"
    kind = "int4" if found.get("experts") else "nf4"
    less = f'model.quantize = "{kind}", fewer align.max_loaded_adapters, or a smaller model'
    if not found["fits"]:
        return broken(f"{seen}; the device has {size(total)}", less)
    if not it.running and available is not None and needed > available:
        return doubtful(f"{seen}; {size(available)} are available now", f"end other programs; or {less}")
    return fine(f"{seen}; " + (size(total) if available is None else f"{size(available)} of {size(total)} available"))
