"""Checks of the box: power mode, jtop, swap, the clock."""

from __future__ import annotations

import re
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

from edged.cli.doctor.finding import Examination, Finding, doubtful, fine, output_of
from edged.cli.doctor.installed import in_place_of

_JTOP_SOCKET = "run/jtop.sock"
_MUCH_SWAPPED = 0.25
_LIMITED_BELOW = 0.95
"""Of a GPU's default power limit."""


def power(it: Examination) -> Finding | None:
    """nvpmodel on a Jetson, the power limit of another GPU."""
    if it.jetson:
        code, text = output_of(["nvpmodel", "-q"], it.left_s(3.0))
        if not code and (mode := re.search(r"NV Power Mode: *(\S+)", text)):
            return fine(mode[1])
        seen = text.splitlines()[0] if text else "nvpmodel tells no mode"
        return doubtful(seen, "run `sudo nvpmodel -q`: NVIDIA's package nvidia-l4t-nvpmodel has it")
    if not (limits := _power_limits()):
        return None
    now_w, default_w = limits
    seen = f"limit {now_w:.0f} W, by default {default_w:.0f} W"
    if now_w < _LIMITED_BELOW * default_w:
        return doubtful(seen, f"raise it with `sudo nvidia-smi -pl {default_w:.0f}`, if it is not meant")
    return fine(seen)


def _power_limits() -> tuple[float, float] | None:
    """(enforced, default) in watts of the first GPU; None where NVML tells none."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        now_mw = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)
        return now_mw / 1e3, pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1e3
    except pynvml.NVMLError:
        return None


def jtop(it: Examination) -> Finding | None:
    """Whether jtop's service answers, where there should be one."""
    if not it.jetson:
        return None
    path = it.root / _JTOP_SOCKET
    if not path.exists():
        way_out = "`sudo pip3 install -U jetson-stats`, then `sudo systemctl restart jtop.service`"
        return doubtful("its service is not there: no temperatures, power or clocks", way_out)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(it.left_s(2.0))
        try:
            with in_place_of(it.account):
                client.connect(str(path))
        except PermissionError:
            user = it.account.name if it.account else "USER"
            whom = f"the service's user, {user}" if it.account else "this user"
            way_out = f"`sudo usermod -aG jtop {user}` for the user that edged runs as, and restart edged"
            return doubtful(f"{path} may not be opened by {whom}", way_out)
        except OSError as error:
            return doubtful(f"{path}: {error}", "`sudo systemctl restart jtop.service`")
    return fine("its service answers")


def swap(it: Examination) -> Finding:
    """Swap that compresses the memory it is to save, or that is in use."""
    areas = [line.split() for line in it.read("proc/swaps").splitlines()[1:]]
    total, used = (sum(int(area[column]) << 10 for area in areas) for column in (2, 3))
    names = ", ".join(Path(area[0]).name for area in areas)
    seen = f"{total / 2**30:.1f} GiB ({names}), {used / 2**30:.1f} GiB used" if areas else "none"
    if it.jetson and any("zram" in area[0] for area in areas):
        way_out = (
            "`sudo systemctl disable --now nvzramconfig`, and a swap file on NVMe instead: "
            "zram takes the memory that GPU and processor share"
        )
        return doubtful(seen, way_out)
    if total and used > _MUCH_SWAPPED * total:
        return doubtful(seen, "end other programs, or serve a smaller model: what is swapped out is slow")
    return fine(seen)


def clock(it: Examination) -> Finding:
    """A clock that is in the past, as a box without a battery has it after a power cut, or that nobody sets."""
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
