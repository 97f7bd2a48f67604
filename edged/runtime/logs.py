"""The log: one line per event that an operator needs, JSON under systemd, plain on a terminal."""

import json
import logging
import os
import threading
import time
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

from edged.runtime.printable import printable
from edged.runtime.token_bucket import TokenBucket
from edged.settings.load import LogSettings, Settings

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the present task works for; every line that it causes carries it."""

_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
"""Priorities of syslog by level; journald takes them from a prefix `<N>` (sd-daemon(3))."""
_SECRET_ENDS = ("TOKEN", "PASSWORD", "SECRET", "API_KEY")
_SHORTEST_SECRET = 6
"""Least length of a secret: shorter ones would blank out parts of ordinary words."""
_HIDDEN = "***"


def event(log: logging.Logger, level: int, name: str, message: str, *, exc_info: bool = False, **fields: Any) -> None:
    """Log one line about an event: `message` for people, `name` and `fields` for programs.

    With `exc_info` the exception that is being handled is a part of it.
    """
    log.log(level, message, exc_info=exc_info, extra={"event": name, "fields": fields}, stacklevel=2)


def first_line(error: BaseException, *, with_kind: bool = False) -> str:
    """Return the first line of an error's text, or else its kind; `with_kind`: the kind, then the line."""
    said, kind = str(error).strip().partition("\n")[0][:400], type(error).__name__
    return f"{kind}: {said}" if with_kind and said else said or kind


def set_up(settings: LogSettings, secrets: Collection[str], environ: Mapping[str, str], stream: TextIO) -> None:
    """Send all lines of this process to `stream`, in the form that the settings and `environ` ask for.

    May be called again, as when settings change; `secrets` never appear from then on.
    """
    handler = _Handler(stream, secrets)
    # For people: the time, the level, the logger, the sentence, the request.
    handler.setFormatter(
        _JsonLines(_is_journal(stream, environ))
        if writes_json(settings, environ, stream)
        else _PlainLines("%(asctime)s %(levelname)s %(name)s: %(message)s%(of_request)s")
    )
    take_down()
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("edged").setLevel(settings.level.upper())
    logging.captureWarnings(True)
    threading.excepthook = _log_thread_failure


def take_down() -> None:
    """Remove the handler of `set_up`."""
    root = logging.getLogger()
    for handler in [known for known in root.handlers if isinstance(known, _Handler)]:
        root.removeHandler(handler)


def without_secrets(text: str) -> str:
    """Return `text` as a line of the log would show it, for use elsewhere."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Handler):
            text = handler.redact(text)
    return text


def writes_json(settings: LogSettings, environ: Mapping[str, str], stream: TextIO) -> bool:
    """Whether lines on `stream` are JSON: as the settings say, else where systemd collects them."""
    if settings.format != "auto":
        return settings.format == "json"
    # A shell on a terminal may have systemd's variables too: what it starts is for people.
    return _is_journal(stream, environ) or ("INVOCATION_ID" in environ and not stream.isatty())


def secrets_of(settings: Settings, environ: Mapping[str, str]) -> set[str]:
    """Return the secrets that must never be logged: tokens among the settings, and those of the environment."""
    found = {settings.api.token, *(value for name, value in environ.items() if name.upper().endswith(_SECRET_ENDS))}
    return {secret for secret in found if len(secret) >= _SHORTEST_SECRET}


class Sparing:
    """A rate limit of like events, which lets few through: `burst` at once, then one every `every_s` of each `key`."""

    def __init__(self, burst: int, every_s: float) -> None:
        self._burst, self._every_s = burst, every_s
        self._lock = threading.Lock()
        self._state: dict[str, tuple[TokenBucket, int]] = {}

    def left_out(self, key: str, now: float | None = None) -> int | None:
        """Return how many were left out since the last one let through; None when this one is left out."""
        now = time.monotonic() if now is None else now
        with self._lock:
            bucket, missed = self._state.get(key) or (TokenBucket(self._burst, self._burst * self._every_s), 0)
            held_back = bucket.wait_s(now) > 0.0
            self._state[key] = bucket, missed + 1 if held_back else 0
            if held_back:
                return None
            bucket.take(now)
            return missed


class _Handler(logging.StreamHandler[TextIO]):
    """The handler of `set_up`, which a later call replaces. Its lines name their request, and no secret."""

    def __init__(self, stream: TextIO, secrets: Collection[str]) -> None:
        super().__init__(stream)
        # The longest first: one may be a part of another.
        forms = {form for secret in secrets for form in (secret, json.dumps(secret)[1:-1])}
        self._secrets = sorted(forms, key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        own = getattr(record, "fields", {}).get("request_id") or request_id.get()
        record.request_id, record.of_request = own, f" [{own}]" if own else ""
        return self.redact(super().format(record))

    def redact(self, text: str) -> str:
        """Return `text` with every secret blanked out."""
        for secret in self._secrets:
            text = text.replace(secret, _HIDDEN)
        return text


class _PlainLines(logging.Formatter):
    """The format for people: a line, and a traceback's lines, indented; no text begins a line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # another formatter's
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record)).replace("\n", "\\n")

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return printable(super().formatException(ei)).replace("\n", "\n  ")


class _JsonLines(logging.Formatter):
    """The format for programs: one JSON object a line. `prefixed` lines begin with the level as journald reads it."""

    def __init__(self, prefixed: bool) -> None:
        super().__init__()
        self._prefixed = prefixed

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if name := getattr(record, "event", ""):
            line["event"] = name
        if of_request := getattr(record, "request_id", ""):
            line["request_id"] = of_request
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        text = printable(json.dumps(line, ensure_ascii=False, default=str))
        return f"<{_PRIORITIES.get(record.levelno, 5)}>{text}" if self._prefixed else text


def _is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether `stream` is the journal's, as `JOURNAL_STREAM` names it (systemd.exec(5))."""
    try:
        there = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environ.get("JOURNAL_STREAM") == f"{there.st_dev}:{there.st_ino}"


def _log_thread_failure(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_value is None or isinstance(failure.exc_value, SystemExit):
        return
    name = failure.thread.name if failure.thread else "?"
    caught = (failure.exc_type, failure.exc_value, failure.exc_traceback)
    logging.getLogger("edged").error("the thread %s ended with an exception", name, exc_info=caught)
