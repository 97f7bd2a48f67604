"""The outcomes of the latest requests and pairs: a daemon that answers none of them is not healthy."""

import re
from collections import deque
from collections.abc import Sequence
from typing import Literal

from edged.align.feedback.pair import PairRetired, Record

_KEPT = 100
"""Number of the latest requests, and of the latest pairs, that are looked at."""
_FEWEST = 5
"""Fewest of them that are worth a sentence."""
_MAX_CHARS = 300
"""Longest reason that is kept."""


class LatestOutcomes:
    """The reasons for which the latest requests and pairs failed; any thread may call it."""

    def __init__(self) -> None:
        self._failures = {"requests": deque[str](maxlen=_KEPT), "pairs": deque[str](maxlen=_KEPT)}
        """The reasons since the latest success, by kind."""

    def note(self, kind: Literal["requests", "pairs"], failure: str) -> None:
        """Note how a request or pair ended: `failure` is the reason, "" for success."""
        if failure:
            self._failures[kind].append(failure[:_MAX_CHARS])
        else:
            self._failures[kind].clear()

    def on_records(self, records: Sequence[Record]) -> None:
        """Note the pairs among records of training."""
        for record in records:
            if isinstance(record, PairRetired) and record.state in ("trained", "learnt", "skipped"):
                self.note("pairs", record.reason or "skipped" if record.state == "skipped" else "")

    def problems(self, reasons: bool = True) -> list[str]:
        """Return a sentence for each kind whose latest ones failed alike, numbers aside; with the reason or without."""
        found = []
        for kind, failures in self._failures.items():
            latest = list(failures)
            if len(latest) >= _FEWEST and len({re.sub(r"\d+", "#", reason) for reason in latest}) == 1:
                told = f"the latest {len(latest)} {kind} all failed alike"
                found.append(f"{told}: {latest[-1]}" if reasons else told)
        return found
