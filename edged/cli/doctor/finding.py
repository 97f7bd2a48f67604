"""The types of the checks: Finding, Check (a row of the table of checks) and Examination (the input of all checks)."""

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

from edged.cli.doctor.check import CheckProcess
from edged.settings.load import Settings

State = Literal["ok", "warn", "fail"]
EXIT_CODES: dict[State, int] = {"ok": 0, "warn": 1, "fail": 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: what was `seen`, and a remedy (`way_out`) unless the state is "ok"."""

    name: str
    state: State
    seen: str
    way_out: str = ""


# The name is filled in from the check's row.
fine = partial(Finding, "", "ok")  # nothing to do
doubtful = partial(Finding, "", "warn")  # edged works, but not as well or not for as long as it could
broken = partial(Finding, "", "fail")  # edged cannot start, or something was lost


def worst(findings: Sequence[Finding]) -> State:
    """Return the worst state among the findings."""
    return max((finding.state for finding in findings), key=lambda state: EXIT_CODES[state], default="ok")


@dataclass(frozen=True, slots=True)
class Examination:
    """The input of all checks: settings, paths and state of the installation that is checked, and the time limit."""

    settings: Settings
    data_dir: Path
    sockets: tuple[Path, ...]
    """Unix sockets on which the daemon listens, in order of preference."""
    min_free_bytes: int
    within_s: float
    root: Path = Path("/")
    """Parent folder of /proc, /sys, /etc, /run and /dev; another one for a recorded tree."""
    account: pwd.struct_passwd | None = None
    """Account whose access rights are checked, when root checks the installed service; None: the caller's."""
    begun_s: float = field(default_factory=time.monotonic)
    checks: CheckProcess | None = None
    """The process that inspects torch while other checks run."""
    running: bool = False
    """Whether the daemon runs."""
    model_dir: Path | None = None
    """The model's directory; None if the model is not on this machine."""

    @property
    def torch(self) -> Mapping[str, Any]:
        """The check process's facts on torch and the device; empty if it did not finish in time."""
        return self.checks.lines(self.left_s(self.within_s))[0] if self.checks else {}

    @property
    def needs(self) -> Mapping[str, Any]:
        """The check process's facts on the model's memory requirement; empty if it did not finish in time."""
        return self.checks.lines(self.left_s(self.within_s))[1] if self.checks else {}

    @property
    def tokens(self) -> Mapping[str, Any]:
        """The check process's facts on the model's tokens; empty if it did not finish in time."""
        return self.checks.lines(self.left_s(self.within_s))[2] if self.checks else {}

    @property
    def trials(self) -> Mapping[str, str]:
        """Why what was tried on the device failed; empty beside a running daemon, or if it did not finish in time."""
        return self.checks.lines(self.left_s(self.within_s))[3] if self.checks else {}

    def left_s(self, most: float) -> float:
        """Return the time limit of one check in seconds: `most`, or what is left of `within_s`, at least 0.1."""
        return max(0.1, min(most, self.within_s - (time.monotonic() - self.begun_s)))

    def read(self, path: str) -> str:
        """Return the text of a system file, relative to `root`; "" if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").replace("\0", " ").strip()
        except OSError:
            return ""

    @property
    def jetson(self) -> bool:
        """Whether the machine is a Jetson."""
        return bool(self.read("etc/nv_tegra_release")) or "tegra" in self.read("proc/device-tree/compatible")


@dataclass(frozen=True, slots=True)
class Check:
    """A row of the table of checks: its name and its function, which returns None where it does not apply."""

    name: str
    run: Callable[[Examination], Finding | None]

    def finding(self, it: Examination) -> Finding | None:
        """Run the check; an exception becomes a finding, so that the other checks still run."""
        try:
            found = self.run(it)
        except Exception as error:
            found = broken(f"the check itself failed: {type(error).__name__}: {error}", "report this")
        return found and replace(found, name=self.name)


def output_of(command: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Run a program and return (exit code, stdout and stderr); (127, reason) if it is missing or times out."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return 127, f"{command[0]} did not end within {timeout_s:.0f} s"
    except OSError as error:
        return 127, f"{command[0]}: {error.strerror}"
    return ended.returncode, (ended.stdout + ended.stderr).strip()


@contextmanager
def in_place_of(account: pwd.struct_passwd | None) -> Iterator[None]:
    """Switch to the account's access rights within the context, which needs root; None: keep the caller's.

    Root may write everywhere, so its own rights would say nothing about the service's. The switch affects all threads.
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
