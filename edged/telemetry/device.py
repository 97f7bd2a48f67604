"""The device monitor: it reads the state of the box once a second on a thread of its own."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from edged.telemetry.cgroup import ControlGroup
from edged.telemetry.host import Host
from edged.telemetry.jetson import Jetson, is_jetson
from edged.telemetry.nvml import Nvml
from edged.telemetry.reading import Reading, Source, SourceAbsent, merged

log = logging.getLogger("edged.telemetry")
EVERY_S = 1.0
TRY_AGAIN_S = 60.0
"""Seconds until a source that was absent is tried again."""


class DeviceMonitor:
    """A thread that takes a reading once a second. Any thread may use `latest`, `read` and `subscribe`."""

    def __init__(self, name: str, sources: Sequence[Source] | None = None, every_s: float = EVERY_S) -> None:
        """`name` is the compute device's, such as "cpu" or "cuda:0"; `sources` are this box's own where None.

        The first reading is there when this returns; more come after `start`.
        """
        self._name, self._every_s = name, every_s
        if sources is None:
            sources = (Host(cgroup=ControlGroup.own()), Jetson() if is_jetson() else Nvml(name, os.environ))
        self._sources = sources
        self._absent: dict[str, tuple[str, float]] = {}
        """By name of an absent source: the reason, and the monotonic time at which it is tried again."""
        self._subscribers: list[Callable[[Reading], None]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="edged-telemetry", daemon=True)
        self.latest = self._sample()

    def start(self) -> None:
        """Start the sampling thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the sampling thread and close the sources."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        for source in self._sources:
            source.close()

    def subscribe(self, hear: Callable[[Reading], None]) -> None:
        """Have `hear` called with every reading, on the sampler's thread; it must not block."""
        self._subscribers.append(hear)

    def read(self) -> dict[str, Any]:
        """Return the latest reading as the status shows it, with the reasons why sources are absent."""
        absent = {name: reason for name, (reason, _) in self._absent.copy().items()}
        return {"name": self._name, **self.latest.report(), "absent_sources": absent}

    def _run(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + self._every_s, time.monotonic())
            if self._stop.wait(due_s - time.monotonic()):
                return
            try:
                self.latest = self._sample()
                for hear in self._subscribers:
                    hear(self.latest)
            except OSError as error:
                # For instance no file descriptor is free: the next second may have one.
                log.warning("no reading could be taken: %s", error)
            except Exception:
                log.exception("a reading could not be taken or passed on")

    def _sample(self) -> Reading:
        now = time.monotonic()
        return merged(now, [self._ask(source, now) for source in self._sources])

    def _ask(self, source: Source, now: float) -> dict[str, Any]:
        """Return the values of a source; none while it is absent, which is logged once for each reason."""
        known, again_s = self._absent.get(source.name, ("", 0.0))
        if now < again_s:
            return {}
        try:
            part = source.read()
        except SourceAbsent as error:
            if str(error) != known:
                log.info("%s is not read: %s", source.name, error)
            self._absent[source.name] = (str(error), now + TRY_AGAIN_S)
            source.close()
            return {}
        if self._absent.pop(source.name, None):
            log.info("%s is read again", source.name)
        return part
