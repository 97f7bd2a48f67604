"""A finding, a row of the table of checks, and the circumstances of looking."""

from __future__ import annotations

import os
import pwd
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from edged.cli.doctor.probe import Probe
from edged.settings.load import Settings

State = Literal["ok", "warn", "fail"]
EXIT_CODES: dict[State, int] = {"ok": 0, "warn": 1, "fail": 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """What was `seen` of a thing; unless it is fine, the way out."""

    name: str
    state: State
    seen: str
    way_out: str = ""


# The check's row has the name.
fine = partial(Finding, "", "ok")  # nothing to do
doubtful = partial(Finding, "", "warn")  # edged works, but not as well or not for as long as it could
broken = partial(Finding, "", "fail")  # edged cannot start, or something was lost


def worst(findings: Sequence[Finding]) -> State:
    """The worst state of all."""
    return max((finding.state for finding in findings), key=lambda state: EXIT_CODES[state], default="ok")


@dataclass(frozen=True, slots=True)
class Examination:
    """Which edged is looked at, and how long that may take."""

    settings: Settings
    data_dir: Path
    sockets: tuple[Path, ...]
    """Where the daemon listens, in order of preference."""
    least_free_bytes: int
    within_s: float
    root: Path = Path("/")
    """Of /proc, /sys, /etc, /run and /dev, as a recorded tree has them elsewhere."""
    account: pwd.struct_passwd | None = None
    """Whose rights to files and sockets count, where root looks at the installed service; None: one's own."""
    begun_s: float = field(default_factory=time.monotonic)
    probe: Probe | None = None
    """What is asked of torch meanwhile."""
    running: bool = False
    """Whether the daemon runs."""
    model_dir: Path | None = None
    """None where the model is not here."""

    @property
    def torch(self) -> Mapping[str, Any]:
        """torch and the device, as the probe found them; empty where it was not done in time."""
        return self.probe.lines(self.left_s(self.within_s))[0] if self.probe else {}

    @property
    def needs(self) -> Mapping[str, Any]:
        """The model's needs of memory, as the probe found them; empty where it was not done in time."""
        return self.probe.lines(self.left_s(self.within_s))[1] if self.probe else {}

    def left_s(self, most: float) -> float:
        """How long one check may take: `most`, or what is left."""
        return max(0.1, min(most, self.within_s - (time.monotonic() - self.begun_s)))

    def read(self, path: str) -> str:
        """The text of a file of the system; "" where it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").replace("\0", " ").strip()
        except OSError:
            return ""

    @property
    def jetson(self) -> bool:
        """Whether the box is one."""
        return bool(self.read("etc/nv_tegra_release")) or "tegra" in self.read("proc/device-tree/compatible")


@dataclass(frozen=True, slots=True)
class Check:
    """A row of the table of checks: what is looked at, and how; None where there is nothing to say of it."""

    name: str
    run: Callable[[Examination], Finding | None]

    def finding(self, it: Examination) -> Finding | None:
        """A check that breaks is a finding, too, and does not keep the others."""
        try:
            found = self.run(it)
        except Exception as error:
            found = broken(f"the check itself failed: {type(error).__name__}: {error}", "report this")
        return found and replace(found, name=self.name)


def output_of(command: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """(exit code, what it wrote) of a program; (127, reason) where it is not there or does not end."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return 127, f"{command[0]} did not end within {timeout_s:.0f} s"
    except OSError as error:
        return 127, f"{command[0]}: {error.strerror}"
    return ended.returncode, (ended.stdout + ended.stderr).strip()


@contextmanager
def in_place_of(account: pwd.struct_passwd | None) -> Iterator[None]:
    """With the account's rights to files and sockets, which only root can take; None: with one's own.

    Root itself may write everywhere: what it tries says nothing of the service. All threads change with it.
    """
    if account is None:
        yield
        return
    group, groups = os.getegid(), os.getgroups()
    os.setgroups(os.getgrouplist(account.pw_name, account.pw_gid))
    os.setegid(account.pw_gid)
    os.seteuid(account.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)
