"""Messages to systemd about the daemon's life, and its watchdog: sd_notify(3), sd_watchdog_enabled(3).

Without systemd nothing is sent.
"""

import asyncio
import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping

from edged.runtime import logs

log = logging.getLogger("edged")

_EXTEND_EVERY_S, _EXTEND_BY_S = 10.0, 60.0
_LONGEST_START_S = 3600.0
"""Longest start that systemd is asked to wait for: a download over a slow line may take long."""
_STOP_MARGIN_S = 30.0
"""Seconds of a stop beyond the drain: adapters are saved and the database is closed."""
_TOLD_EVERY_S = 5.0
_HUNG_AFTER_S = 60.0
"""Seconds of silence after which the log has a line, where there is no watchdog."""


def notify(state: str, environ: Mapping[str, str]) -> None:
    """Send `state` (lines of `NAME=VALUE`) to systemd's socket. A missing receiver is no error."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier, contextlib.suppress(OSError):
        # A full queue must not hold up the event loop.
        notifier.setblocking(False)
        notifier.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)


def watchdog_s(environ: Mapping[str, str], pid: int) -> float | None:
    """Return the seconds without a sign of life after which systemd restarts `pid`; None where it does not watch it."""
    microseconds, meant = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not microseconds.isdigit() or not int(microseconds) or meant not in ("", str(pid)):
        return None
    return int(microseconds) / 1e6


class ServiceManager:
    """The messages of one daemon to systemd."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._watchdog_s = watchdog_s(environ, os.getpid())
        self._status = ""

    async def busy(self, doing: str) -> None:
        """Report, until cancelled, what is being done before requests are served, and ask for the time it takes."""
        started = time.monotonic()
        while (seconds := time.monotonic() - started) < _LONGEST_START_S:
            self._tell(f"STATUS={doing} for {seconds:.0f} s", f"EXTEND_TIMEOUT_USEC={_EXTEND_BY_S * 1e6:.0f}")
            await asyncio.sleep(_EXTEND_EVERY_S)

    def ready(self, status: str) -> None:
        """Report that requests are served, from now on or again after `reloading`."""
        self._status = status
        self._tell("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """Report that settings are being read again; `ready` ends that."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, drain_s: float) -> None:
        """Report that nothing new is begun and running answers have `drain_s`."""
        status = f"STATUS=stopping: running answers have {drain_s:g} s"
        self._tell("STOPPING=1", status, f"EXTEND_TIMEOUT_USEC={(drain_s + _STOP_MARGIN_S) * 1e6:.0f}")

    async def watch(self, last_sign_s: Callable[[], float], status: Callable[[], str]) -> None:
        """Feed the watchdog, until cancelled, with the engine's signs of life, and report the status.

        `last_sign_s` is when the engine last did something, on the monotonic clock; "now" where it has nothing to do.
        The watchdog is fed only after a new one, so that a hung device call starves it.
        """
        every_s = min(_TOLD_EVERY_S, self._watchdog_s / 4.0 if self._watchdog_s else math.inf)
        hung_after_s = self._watchdog_s / 2.0 if self._watchdog_s else _HUNG_AFTER_S
        then = "the watchdog will restart the service" if self._watchdog_s else "no watchdog restarts it"
        fed_s, hung = -math.inf, False
        while True:
            sign_s = last_sign_s()
            if self._watchdog_s and sign_s > fed_s:
                fed_s = sign_s
                self._tell("WATCHDOG=1")
            silent_s = time.monotonic() - sign_s
            was_hung, hung = hung, silent_s > hung_after_s
            if hung and not was_hung:
                message = f"the engine has shown no sign of life for {silent_s:.0f} s: {then}"
                logs.event(log, logging.ERROR, "engine_hung", message, silent_s=round(silent_s, 1))
            elif was_hung and not hung:
                logs.event(log, logging.WARNING, "engine_back", "the engine goes on")
            now = f"no sign of life from the engine for {silent_s:.0f} s" if hung else status()
            if now != self._status:
                self._status = now
                self._tell(f"STATUS={now}")
            await asyncio.sleep(every_s)

    def _tell(self, *assignments: str) -> None:
        notify("\n".join(assignments), self._environ)
