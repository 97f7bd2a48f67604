"""Boxes and when they are there: read from files, or synthesised in place of the paper's traces."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from edged.federated.signature import Capacity

DAY_S = 86400.0
STAND_INS = (
    "stand-ins, synthesised: campaigns after the list of Venn's public code, their boxes a fortieth and their rounds "
    "a hundredth; of boxes that no file gives, log-normal speeds (40 tokens/s, sigma 0.6, in 8 classes) and 8 to 64 "
    "GB (correlation 0.5); of hours that no file gives, 4 days of 5, most in the evening, for 4 h (log-normal, sigma "
    "0.5); answers after 120 s at 40 tokens/s (log-normal, sigma 0.25)"
)
"""What reports say of their loads."""
_SPEEDS = (10, 15, 20, 30, 40, 60, 80, 120)
_MEDIAN_SPEED, _SPEED_SIGMA = 40.0, 0.6
_MEMORIES_MB = ((-0.52, 8192), (0.39, 16384), (1.28, 32768), (math.inf, 65536))
"""Memories below quantiles of the normal distribution: 30, 35, 25 and 10 % of the boxes."""
_CORRELATION = 0.5
_PRESENT = 0.8
_PEAK_HOUR, _CONCENTRATION, _HOUR_SIGMA = 21.0, 1.0, 1.0
_STAY_S, _STAY_SIGMA, _MAX_STAY_S = 4 * 3600.0, 0.5, 12 * 3600.0
_RESPONSE_S, _RESPONSE_SIGMA = 120.0, 0.25


class FleetError(ValueError):
    """A file of boxes cannot be used, or a load cannot be served by them; the message says what to give."""


@dataclass(frozen=True, slots=True)
class Session:
    """A time in which a box is there; a round that begins in it would have its answer after `response_s`."""

    start_s: float
    end_s: float
    box: str
    capacity: Capacity
    response_s: float


def draw_boxes(number: int, seed: int) -> list[Capacity]:
    """Synthesise so many boxes."""
    chance, boxes = random.Random(f"boxes {seed}"), []
    for _ in range(number):
        fast, other = chance.gauss(), chance.gauss()
        rich = _CORRELATION * fast + math.sqrt(1 - _CORRELATION**2) * other
        speed = math.log(_MEDIAN_SPEED) + _SPEED_SIGMA * fast
        boxes.append(
            Capacity(
                memory_mb=next(memory for below, memory in _MEMORIES_MB if rich < below),
                tokens_per_s=min(_SPEEDS, key=lambda each: abs(math.log(each) - speed)),
            )
        )
    return boxes


def draw_sessions(boxes: Sequence[Capacity], seed: int) -> Iterator[Session]:
    """Yield sessions of the boxes without end, in order."""
    chance = random.Random(f"sessions {seed}")
    hours = [(chance.vonmisesvariate(0.0, _CONCENTRATION) * 12 / math.pi + _PEAK_HOUR) % 24 for _ in boxes]
    for day in count():
        sessions = []
        for number, capacity in enumerate(boxes):
            if chance.random() < _PRESENT:
                hour = min(max(0.0, hours[number] + chance.gauss(0, _HOUR_SIGMA)), 24.0)
                start_s = DAY_S * day + 3600 * hour
                stay_s = min(_MAX_STAY_S, _STAY_S * chance.lognormvariate(0, _STAY_SIGMA))
                sessions.append(_session(start_s, start_s + stay_s, str(number), capacity, chance))
        yield from sorted(sessions, key=lambda session: session.start_s)


def _session(start_s: float, end_s: float, box: str, capacity: Capacity, chance: random.Random) -> Session:
    response_s = _RESPONSE_S * _MEDIAN_SPEED / capacity.tokens_per_s * chance.lognormvariate(0, _RESPONSE_SIGMA)
    return Session(start_s, end_s, box, capacity, response_s)


def read_boxes(path: Path) -> list[Capacity]:
    """Read boxes from a CSV file with the columns memory_mb and tokens_per_s. Raises FleetError."""
    boxes = [Capacity(int(memory), speed) for _, (memory, speed) in _rows(path, "memory_mb", "tokens_per_s")]
    if not all(box.tokens_per_s for box in boxes):
        raise FleetError(f"{path} has a box of 0 tokens_per_s: give its speed, or leave it out")
    return boxes


def read_sessions(path: Path, boxes: Sequence[Capacity], seed: int) -> Iterator[Session]:
    """Yield sessions from a CSV file with the columns box (a row of the boxes, from 0), start_s and end_s, over and
    over, in order.

    Raises FleetError.
    """
    chance, rows = random.Random(f"sessions {seed}"), []
    for line, (box, start_s, end_s) in _rows(path, "box", "start_s", "end_s"):
        if end_s <= start_s or not (box.is_integer() and box < len(boxes)):
            raise FleetError(
                f"{path}, line {line}: box {box:g} from {start_s:g} to {end_s:g}: give one of the boxes 0 to "
                f"{len(boxes) - 1} and an end after the start"
            )
        rows.append((start_s, end_s, int(box)))
    period_s = math.ceil(max(end_s for _, end_s, _ in rows) / DAY_S) * DAY_S
    for past_s in count(0.0, period_s):
        for start_s, end_s, number in sorted(rows):
            yield _session(past_s + start_s, past_s + end_s, str(number), boxes[number], chance)


def _rows(path: Path, *columns: str) -> list[tuple[int, list[float]]]:
    """Read a CSV file's numbers with the numbers of their lines. Raises FleetError."""
    rows = []
    with path.open(newline="", errors="replace") as file:
        reader = csv.DictReader(file)
        for row in reader:
            try:
                numbers = [float(row[column]) for column in columns]
                if not all(0 <= number < math.inf for number in numbers):
                    raise ValueError
            except (KeyError, TypeError, ValueError):
                given = ",".join(str(row.get(column)) for column in columns)
                way_out = f"give numbers of at least 0 as {','.join(columns)}, which the first line names"
                raise FleetError(f'{path}, line {reader.line_num} has "{given}": {way_out}') from None
            rows.append((reader.line_num, numbers))
    if not rows:
        raise FleetError(f"{path} has no rows: give a first line {','.join(columns)}, and others below it")
    return rows
