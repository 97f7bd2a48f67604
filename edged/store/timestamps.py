"""How the database writes moments: ISO-8601 text in UTC, so that text order is time order."""

import time
from datetime import UTC, datetime


def utc_now() -> datetime:
    """The present moment with its time zone."""
    # One clock for all: datetime.now reads another one than what a test or a soak puts in the place of time.time.
    return datetime.fromtimestamp(time.time(), UTC)


def utc_text(moment: datetime) -> str:
    """`moment` as `2025-01-31T12:00:00.123456+00:00`. Raises ValueError for a moment without a time zone."""
    if moment.tzinfo is None:
        raise ValueError(f"moment {moment} has no time zone: pass datetime.now(UTC)")
    return moment.astimezone(UTC).isoformat(timespec="microseconds")
