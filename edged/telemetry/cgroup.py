"""The control group (version 2) of this process: its memory limits and its memory pressure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Bound(NamedTuple):
    """The tightest memory limit of a control group and its ancestors."""

    available_bytes: int
    """Bytes left below the limit; reclaimable page cache counts as left, as it does in MemAvailable."""
    total_bytes: int


class ControlGroup:
    """A control group with its ancestors, innermost first."""

    def __init__(self, folder: Path, root: Path) -> None:
        """`folder` lies in `root`, where the hierarchy is mounted."""
        self._folders = [folder, *folder.parents][: len(folder.relative_to(root).parts)]

    @classmethod
    def own(cls, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> ControlGroup | None:
        """Return this process's group; None without version 2, or in its root group, which has no limits."""
        lines = _text(proc / "self/cgroup").splitlines()
        path = next((line[3:] for line in lines if line.startswith("0::")), "/")
        folder = root / path.lstrip("/")
        return cls(folder, root) if path != "/" and (folder / "memory.current").is_file() else None

    def bound(self) -> Bound | None:
        """The tightest of `memory.max` and `memory.high`; None where there is no limit."""
        bounds = []
        for folder in self._folders:
            used = _number(folder / "memory.current")
            for most in (_number(folder / "memory.max"), _number(folder / "memory.high")):
                if most is not None and used is not None:
                    bounds.append(Bound(max(0, most - max(0, used - _reclaimable(folder))), most))
        return min(bounds, default=None)

    def pressure(self) -> float | None:
        """`some avg10` of `memory.pressure` in percent."""
        return pressure_percent(self._folders[0] / "memory.pressure", "some")


def pressure_percent(path: Path, kind: str) -> float | None:
    """`avg10` of the line `kind` ("some", "full") of a file of pressure stall information; None without such a file."""
    # A kernel without CONFIG_PSI, or one booted without psi=1, has no such file or refuses to read it.
    found = re.search(rf"^{kind} avg10=([\d.]+)", _text(path), re.MULTILINE)
    return float(found[1]) if found else None


def _text(path: Path) -> str:
    """The text of a file; "" where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The number in a file; None for "max" or no file."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _reclaimable(folder: Path) -> int:
    """Bytes of inactive page cache."""
    found = re.search(r"^inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
    return int(found[1]) if found else 0
