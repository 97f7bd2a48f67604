"""The `edged` command in a process that is forked from one that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(["edged.daemon", "tests.frozen"])


def write_to(log: Path) -> None:
    """Have this process write what it says to the end of a file."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _run(arguments: list[str], log: Path, environment: dict[str, str], clock_s: int) -> None:
    os.environ.clear()
    os.environ.update(environment)
    write_to(log)
    if clock_s:
        now = time.time
        time.time = lambda: now() + clock_s
    import torch

    from edged.cli.main import main

    torch.set_num_threads(1)
    # Under another name, so that it does not begin anew in huge pages.
    sys.argv = [__file__, *arguments]
    main()


class Command:
    """A running `edged ARGUMENTS`, as `subprocess.Popen` has it, whose clock is ahead by `clock_s`."""

    def __init__(self, arguments: list[str], log: Path, environment: dict[str, str], clock_s: int = 0) -> None:
        self._process = forked.Process(target=_run, args=(arguments, log, environment, clock_s), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        assert code is not None, f"process {self.pid} still runs after {timeout} s"
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
