"""Refused starts: how they are reported, and how long they wait under systemd, ever longer.

Must not import anything slow: settings that are wrong are refused before torch is imported.
"""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from edged.http.sockets import ListenError, answer_refusals
from edged.runtime import logs
from edged.runtime.systemd import notify
from edged.settings.load import LogSettings

log = logging.getLogger("edged")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 5.0, 300.0
_TOLD_MARGIN_S = 60.0
"""Seconds that systemd is asked to wait beyond the refusal's wait."""
REFUSED = "start refused"
"""Beginning of the status that systemd shows while a refusal waits."""
_COUNT_FILE = "refused-starts"
"""File that outlives the process, with the number of starts refused since the last one that served."""


def refuse_start(message: str, settings: LogSettings, environ: Mapping[str, str]) -> int:
    """Report `message`, the way out included; under systemd then wait, the longer the more starts were refused.

    Returns the exit code. SIGTERM ends the waiting; requests on systemd's sockets meanwhile get the message as well.
    """
    message = logs.without_secrets(message)
    if logs.writes_json(settings, environ, sys.stderr):
        logs.event(log, logging.ERROR, "start_refused", message)
    else:
        print(f"edged: {message}", file=sys.stderr, flush=True)
    if wait_s := _wait_s(environ):
        ends_s = time.monotonic() + wait_s
        status = f"STATUS={REFUSED}, tried again in {wait_s:.0f} s: {' '.join(message.split())}"
        notify(f"{status}\nEXTEND_TIMEOUT_USEC={(wait_s + _TOLD_MARGIN_S) * 1e6:.0f}", environ)
        # The refusal may be of these very sockets.
        with contextlib.suppress(ListenError, OSError):
            asyncio.run(answer_refusals(message, wait_s, environ))
        time.sleep(max(0.0, ends_s - time.monotonic()))
    return 1


def start_succeeded(environ: Mapping[str, str]) -> None:
    """Forget the starts that were refused."""
    if file := _count_file(environ):
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def _wait_s(environ: Mapping[str, str]) -> float:
    """Count this refusal and return its wait: the first in a row has none, the others twice that of the one before.

    0 where systemd does not start this again, or the count cannot be kept.
    """
    file = _count_file(environ)
    if file is None:
        return 0.0
    try:
        known = file.read_text("utf-8") if file.exists() else ""
        refused = 1 + (int(known) if known.isascii() and known.isdigit() else 0)
        file.write_text(str(refused), "utf-8")
    except OSError:
        return 0.0
    return min(_FIRST_WAIT_S * 2.0 ** min(refused - 2, 30), _LONGEST_WAIT_S) if refused > 1 else 0.0


def _count_file(environ: Mapping[str, str]) -> Path | None:
    folder = (environ.get("RUNTIME_DIRECTORY") or environ.get("STATE_DIRECTORY") or "").split(":")[0]
    return Path(folder) / _COUNT_FILE if folder and environ.get("NOTIFY_SOCKET") else None
