"""Instruction counts of pieces of Python, which load on the machine does not change.

`python -m benchmarks.support.callgrind MODULE` is the counted process: it runs what MODULE's `pieces` returns. Imports
run uninstrumented: counting is switched on (through vgdb, valgrind's own remote control) once the process is ready, and
set to zero before each piece. Hash seeds are fixed and OpenMP has one thread. Hardware counters are not used: virtual
machines often hide them, and a count of theirs cannot be compared with one of callgrind's.
"""

from __future__ import annotations

import gc
import importlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from benchmarks.support.checkout import environment

_PROGRAMS = ("valgrind", "vgdb")
_NOTHING = "nothing"
"""Name of an empty piece of every process, which measures the cost of the conversation itself."""
_READY = "ready"


class CountFailed(RuntimeError):
    """Instructions could not be counted; the message says why."""


def missing_program() -> str | None:
    """Return a program that counting needs and this machine lacks, or None."""
    return next((name for name in _PROGRAMS if shutil.which(name) is None), None)


class Counter:
    """A process under callgrind that counts a module's pieces. Raises CountFailed."""

    def __init__(self, module: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="edged-count-")
        self._dumps = 0
        self._process = subprocess.Popen(
            [
                "valgrind",
                "--tool=callgrind",
                "--quiet",
                "--instr-atstart=no",
                f"--callgrind-out-file={self._folder.name}/out",
                sys.executable,
                "-m",
                "benchmarks.support.callgrind",
                module,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(PYTHONHASHSEED="0", OMP_NUM_THREADS="1"),
        )
        try:
            self._expect(_READY)
            self._control("instrumentation", "on")
            self._overhead = 0
            self.count(_NOTHING)  # warm-up: the first conversation is longer than the others
            self._overhead = self.count(_NOTHING)
        except BaseException:
            self.close()
            raise

    def count(self, piece: str) -> int:
        """Return the instructions of one piece, without those of the conversation."""
        assert self._process.stdin is not None
        self._control("zero")
        try:
            self._process.stdin.write(piece + "\n")
            self._process.stdin.flush()
        except OSError:
            self._fail(piece)
        self._expect(piece)
        self._control("dump")
        self._dumps += 1
        return _total(Path(self._folder.name) / f"out.{self._dumps}") - self._overhead

    def _expect(self, line: str) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != line:
            self._fail(line)

    def _fail(self, piece: str) -> None:
        self._process.kill()
        errors = (self._process.communicate()[1] or "").strip()[-2000:] or "it wrote nothing to stderr"
        raise CountFailed(f'the counted process failed at "{piece}": {errors}')

    def _control(self, *command: str) -> None:
        done = subprocess.run(["vgdb", f"--pid={self._process.pid}", *command], capture_output=True, text=True)
        if done.returncode:
            raise CountFailed(f"vgdb {' '.join(command)}: {done.stderr.strip()[-2000:]}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def __enter__(self) -> Counter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _total(dump: Path) -> int:
    """Return the total of a callgrind dump."""
    for line in dump.read_text().splitlines():
        if line.startswith("totals:"):
            return int(line.split()[1])
    raise CountFailed(f"{dump} has no line of totals")


def serve(pieces: Mapping[str, Callable[[], None]]) -> None:
    """Run pieces by name in the counted process, until there are no more questions."""
    gc.collect()
    gc.freeze()
    gc.disable()
    print(_READY, flush=True)
    for line in sys.stdin:
        name = line.strip()
        if name != _NOTHING:
            pieces[name]()
        print(name, flush=True)


if __name__ == "__main__":
    serve(importlib.import_module(sys.argv[1]).pieces())
