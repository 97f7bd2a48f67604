"""Interleaved measurement: implementations of one job take turns on one machine, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from benchmarks.support.checkout import environment
from benchmarks.support.command import say

_ERROR_TAIL_CHARS = 2000
LONGEST_WAIT_S = 600.0
"""Time limit of a benchmark for an engine's answer or step."""


class SideFailed(RuntimeError):
    """A side's process ended or sent nonsense; the message has the end of its stderr."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of repeated measurements; `low` and `high` are the quartiles (the extremes below 4 values)."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        if len(values) < 4:
            return cls(statistics.median(values), min(values), max(values), len(values))
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    @classmethod
    def read(cls, written: dict[str, float]) -> Spread:
        """Read the spread that `as_json` wrote."""
        return cls(written["median"], written["low"], written["high"], int(written["rounds"]))

    def as_json(self) -> dict[str, float]:
        """Return the spread with its number of rounds, as the reports have it."""
        return {"median": self.median, "low": self.low, "high": self.high, "rounds": self.count}

    def text(self, digits: int = 2) -> str:
        """Format as `1.31 (1.28-1.35)`."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Return the spread of the ratios of measurements that were taken in the same round."""
    return Spread.of([a / b for a, b in zip(over, under, strict=True)])


class Side:
    """One implementation in a process of its own, stopped (SIGSTOP) while another side has its turn.

    The process calls MODULE's `be_side` with ARGUMENTS (`benchmarks.support.child`), which answers through a
    `Conversation`.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str]) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.support.child", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment(TOKENIZERS_PARALLELISM="false"),
        )

    @property
    def pid(self) -> int:
        """The side's process id."""
        return self._process.pid

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Let the side work on `question` until it answers. Raises SideFailed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            answer = json.loads(line)
        except (OSError, json.JSONDecodeError):
            raise SideFailed(f"the side {self.name} failed on {question}: {self._last_words()}") from None
        self._process.send_signal(signal.SIGSTOP)
        if not isinstance(answer, dict):
            raise SideFailed(f"the side {self.name} answered {answer!r}")
        return answer

    def _last_words(self) -> str:
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-_ERROR_TAIL_CHARS:].strip() or "it wrote nothing to stderr"

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()


def sides_of(module: str, names: Iterable[str], job: Any) -> list[tuple[str, str, list[str]]]:
    """Return a module's sides for `open_sides`: `be_side` is called with a name and the job, a data class, as JSON."""
    return [(name, module, [name, json.dumps(asdict(job))]) for name in names]


@contextmanager
def open_sides(sides: Sequence[tuple[str, str, Sequence[str]]]) -> Iterator[list[Side]]:
    """Start every (name, module, arguments) and end them all at last."""
    with ExitStack() as stack:
        yield [stack.enter_context(Side(*side)) for side in sides]


OnAnswer = Callable[[int, str, dict[str, Any]], None]


def progress(
    shown: Callable[[dict[str, Any]], str], label: Callable[[int], str] = lambda number: f"round {number}"
) -> OnAnswer:
    """Return a callback that prints a line for each answer, such as `round 2: edged 1.31 s`; the first one is the
    warm-up."""
    return lambda number, name, answer: say(f"{label(number) if number else 'warm-up'}: {name} {shown(answer)}")


def take_turns(
    sides: Sequence[Side],
    questions: Iterable[dict[str, Any]],
    on_answer: OnAnswer = lambda _round, _name, _answer: None,
) -> dict[str, list[dict[str, Any]]]:
    """Ask every side every question, one side at a time; the order rotates, so that no side always runs first."""
    answers: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    for number, question in enumerate(questions):
        shift = number % len(sides)
        for side in [*sides[shift:], *sides[:shift]]:
            answer = side.ask(question)
            answers[side.name].append(answer)
            on_answer(number, side.name, answer)
    return answers


class Conversation:
    """The side's end of the conversation: JSON questions line by line on stdin, JSON answers on what was stdout.

    Everything else that the process prints from then on goes to stderr: libraries like to show progress bars.
    """

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def question(self) -> dict[str, Any]:
        """Wait for the next question; ends the process when there are no more."""
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        question: dict[str, Any] = json.loads(line)
        return question

    def answer(self, answer: dict[str, Any]) -> None:
        """Answer the last question."""
        self._replies.write(json.dumps(answer) + "\n")
        self._replies.flush()
