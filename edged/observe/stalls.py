"""The monitor of stalls: how late the event loop wakes, how long the database's writer is taken, and by what."""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from edged.observe.observer import Histogram
from edged.runtime import logs
from edged.store.database import WriteTimes

log = logging.getLogger("edged")

STALL_S = 0.25
"""Stalls of this length or more are logged, at most one of each kind every `LOG_EVERY_S`."""
LOG_EVERY_S = 10.0
WAKE_EVERY_S = 0.05
_DEPTH = 6
"""Innermost frames of the event loop's thread that a log line names."""
_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LOOP, _WRITER = "edged_event_loop_stall_seconds", "edged_writer_stall_seconds"


class StallMonitor:
    """Stalls since start. `watch` runs on the event loop, `wrote` on the writer's thread, `readings` on any."""

    def __init__(self) -> None:
        self._loop = Histogram(_BOUNDS)
        self._writer = {part: Histogram(_BOUNDS) for part in ("waited", "ran", "commit")}
        self._sparing = logs.Sparing(1, LOG_EVERY_S)
        self._due_s = time.monotonic()
        """The time at which the event loop was to wake `watch`."""
        self._seen = (0.0, "")
        """A time of that kind that had passed, and where the loop's thread then was."""

    def readings(self) -> dict[str, Any]:
        """Return the metrics of stalls."""
        return {
            _LOOP: {(): self._loop.buckets()},
            _WRITER: {part: histogram.buckets() for part, histogram in self._writer.items()},
        }

    async def watch(self) -> None:
        """Measure, until cancelled, how late the event loop wakes this task.

        A thread looks where the loop is while it is late, which the loop itself cannot tell afterwards.
        """
        stopping = threading.Event()
        looks = (threading.get_ident(), stopping)
        threading.Thread(target=self._look, args=looks, name="edged-stalls", daemon=True).start()
        try:
            while True:
                due_s = self._due_s = time.monotonic() + WAKE_EVERY_S
                await asyncio.sleep(WAKE_EVERY_S)
                late_s = max(0.0, time.monotonic() - due_s)
                if late_s >= STALL_S:
                    self._tell_loop(due_s, late_s)
                self._loop.observe([late_s])
        finally:
            stopping.set()

    def wrote(self, writes: Sequence[WriteTimes], commit_s: float) -> None:
        """Take in a group of writes that shared a commit (see `Store.on_writes`)."""
        took_s = commit_s + sum(write.ran_s for write in writes)
        waited_s = max(write.waited_s for write in writes)
        if max(took_s, waited_s) >= STALL_S:
            longest = max(writes, key=lambda write: write.ran_s)
            message = (
                f"the database's writer stood still: {len(writes)} writes took {took_s:.2f} s, of which {longest.job} "
                f"{longest.ran_s:.2f} s, the lock and the disk {commit_s:.2f} s; they had waited up to {waited_s:.2f} s"
            )
            times = {"seconds": took_s, "waited_s": waited_s, "ran_s": longest.ran_s, "commit_s": commit_s}
            self._tell("writer_stalled", message, times, writes=len(writes), job=longest.job)
        self._writer["waited"].observe([write.waited_s for write in writes])
        self._writer["ran"].observe([write.ran_s for write in writes])
        self._writer["commit"].observe([commit_s])

    def _look(self, thread: int, stopping: threading.Event) -> None:
        while not stopping.wait(STALL_S / 2):
            due_s = self._due_s
            if time.monotonic() - due_s >= STALL_S / 2 and due_s != self._seen[0]:
                # The frame is kept no longer than this: what the loop drops is to be freed on its own thread.
                self._seen = due_s, _place(sys._current_frames().get(thread))

    def _tell_loop(self, due_s: float, late_s: float) -> None:
        seen_s, place = self._seen
        where = place if seen_s == due_s else "a call that let no other thread look"
        self._tell(
            "event_loop_stalled", f"the event loop stood still for {late_s:.2f} s in {where}", {"seconds": late_s}
        )

    def _tell(self, event: str, message: str, times_s: dict[str, float], **fields: Any) -> None:
        missed = self._sparing.left_out(event)
        if missed is not None:
            fields |= {name: round(seconds, 3) for name, seconds in times_s.items()}
            logs.event(log, logging.WARNING, event, message, left_out=missed, **fields)


def _place(frame: FrameType | None) -> str:
    """Return the innermost frames, the innermost first, as `function (file:line)`."""
    names: list[str] = []
    while frame is not None and len(names) < _DEPTH:
        names.append(f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(names)
