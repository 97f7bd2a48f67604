"""Fine-tuning files: JSON lines of chats, completions or preferences, in the shapes of `row_shapes`.

An example is one pair or, for a chat, one for each assistant turn that is scored. A pair is a dict as in
`edged.align.feedback.pair_formats`; without `rejected` its answer alone is learned, and one without `chosen` is bad.
"""

import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from edged.align.feedback.pair_formats import file_problem, parse_object
from edged.align.feedback.row_shapes import Example, FormatError, Pair, parse_row

_LONGEST = 1 << 20
"""Bytes of the longest line."""
_MAX_TOLD, _MAX_CHARS = 20, 200
"""Bad lines that are told, and characters of each."""
_WORK_S = 0.01
"""Seconds after which a check lets others have the interpreter for as long."""
_ENTRY = struct.Struct("=qq")
"""An example's offset and line in the index."""


_METHODS = {"preferences": "dpo", "answers": "supervised", "ratings": "kto"}
"""The method that learns files of a kind; of preferences others do, too."""


class BadFile(ValueError):
    """A file that cannot be learned from; the message has its first bad lines."""


class ExampleFile:
    """The examples of a checked file, read by number; the index of its lines is a file, too, of no name."""

    def __init__(
        self,
        path: Path,
        folder: Path,
        method: str,
        stopped: Callable[[], bool] = lambda: False,
        demand: Callable[[Pair], None] = lambda _pair: None,
    ) -> None:
        """Check every line; `method` says which kind of examples is wanted. The index is in `folder`.

        `demand` raises ValueError for a pair that the model cannot take. Raises BadFile, and OSError. The check ends
        early where it is `stopped`: `go_on` goes on with it.
        """
        self._path, self._method, self._demand, self._count, self._bad = path, method, demand, 0, 0
        self._lines, self._problems = _lines_of(path), list[str]()
        self.complete = False
        """Whether all lines are checked."""
        self._shape = (0, "")
        """The first example's line, and the field that names the shape of all."""
        self.taken = Counter[str]()
        """Number of examples by what was read of them in other fields than usual."""
        self._index = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        try:
            with path.open("rb") as file:
                if problem := file_problem(file):
                    raise BadFile(problem)
            self.go_on(stopped)
        except BaseException:
            self._index.close()
            raise

    def go_on(self, stopped: Callable[[], bool]) -> None:
        """Check the lines that are left, until it is `stopped`. Raises BadFile, and OSError."""
        problems, began_s = self._problems, time.monotonic()
        while not stopped():
            number, offset, line = next(self._lines, (0, 0, b""))
            if not line:
                self.complete = True
                break
            try:
                self._check_shape(number, line, self._method)
            except ValueError as error:  # FormatError, or of `demand`
                self._bad += 1
                if self._bad <= _MAX_TOLD:
                    problems.append(f"line {number}: {str(error)[:_MAX_CHARS]}")
            else:
                self._count += 1
                self._index.write(_ENTRY.pack(offset, number))
            if (worked_s := time.monotonic() - began_s) > _WORK_S:
                time.sleep(worked_s)
                began_s = time.monotonic()
        if not self.complete:
            return
        if self._bad > _MAX_TOLD:
            problems.append(f"and {self._bad - _MAX_TOLD} more")
        if not (self._bad or self._count):
            problems = ["it has no examples"]
        if problems:
            raise BadFile("; ".join(problems))

    def _check_shape(self, number: int, line: bytes, method: str) -> None:
        example = parse_example(line)
        shape, (first, wanted) = example.shape, self._shape
        if (method, shape) == ("kto", "completion"):
            raise FormatError('it has no "label": true or false')
        if wanted and shape != wanted:
            raise FormatError(f'it is of another format ("{shape}") than line {first} ("{wanted}"): use one per file')
        learned_by = _METHODS[example.kind]
        if (method if method in ("supervised", "kto") else "dpo") != learned_by:
            raise FormatError(f'"{shape}" is of a file of {example.kind}, which {learned_by} learns: use that method')
        for pair in example.pairs:
            self._demand(pair)
        if not wanted:
            self._shape = number, shape
        if example.taken:
            self.taken[example.taken] += 1

    def __len__(self) -> int:
        return self._count

    @property
    def index_bytes(self) -> int:
        """Bytes that the index takes on the disk."""
        return self._count * _ENTRY.size

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[int, list[Pair]]]:
        """Yield (line, pairs) of the examples of these numbers, from 0. Raises OSError."""
        with self._path.open("rb") as file:
            for number in numbers:
                self._index.seek(number * _ENTRY.size)
                offset, line = _ENTRY.unpack(self._index.read(_ENTRY.size))
                file.seek(offset)
                yield line, parse_example(file.readline(_LONGEST)).pairs

    def close(self) -> None:
        """Give the index's room back."""
        self._index.close()


def _lines_of(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number from 1, offset, line) of the lines that are not blank; one that is too long is cut."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_LONGEST):
            offset, number = file.tell() - len(line), number + 1
            rest = line
            while len(rest) == _LONGEST and not rest.endswith(b"\n"):
                rest = file.readline(_LONGEST)
            if line.strip():
                yield number, offset, line


def parse_example(line: bytes) -> Example:
    """Return what a line teaches. Raises FormatError."""
    if len(line) == _LONGEST and not line.endswith(b"\n"):
        raise FormatError(f"it is longer than {_LONGEST} bytes: split it")
    row = parse_object(line)
    return parse_row(row)
