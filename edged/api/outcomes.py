"""The outcomes of the latest requests and pairs: a daemon that answers none of them is not healthy."""

import re
from collections import deque
from collections.abc import Sequence
from itertools import takewhile
from typing import Literal

from edged.align.feedback.pair import PairRetired, Record

_KEPT = 100
"""Number of the latest requests, and of the latest pairs, that are looked at."""
_FEWEST = 5
"""Fewest of them that are worth a sentence."""
_MAX_CHARS = 300
"""Longest reason that is kept."""


class LatestOutcomes:
    """How the latest requests and pairs ended; any thread may call it."""

    def __init__(self) -> None:
        self._latest = {kind: deque[tuple[str, str]](maxlen=_KEPT) for kind in ("requests", "pairs")}
        """(Tenant, or adapter, and the reason of a failure) of each."""

    def note(self, kind: Literal["requests", "pairs"], tenant: str, failure: str) -> None:
        """Note how a request or pair ended: `failure` is the reason, "" for success."""
        self._latest[kind].append((tenant, failure[:_MAX_CHARS]))

    def on_records(self, records: Sequence[Record]) -> None:
        """Note the pairs among records of training."""
        for record in records:
            if isinstance(record, PairRetired) and record.state in ("trained", "learnt", "skipped"):
                self.note("pairs", record.adapter, record.reason or "skipped" if record.state == "skipped" else "")

    def problems(self, reasons: bool = True) -> list[str]:
        """Return a sentence for each kind whose latest ones failed alike, numbers aside; with the reason or without.

        Failures of one tenant alone are not told while others' requests go well.
        """
        found = []
        for kind, latest in self._latest.items():
            ended = list(latest)
            failed = list(takewhile(lambda end: end[1], reversed(ended)))
            tenants, ways = {tenant for tenant, _ in failed}, {re.sub(r"\d+", "#", reason) for _, reason in failed}
            fine = any(not reason and tenant not in tenants for tenant, reason in ended)
            if len(failed) >= _FEWEST and len(ways) == 1 and (len(tenants) > 1 or not fine):
                told = f"the latest {len(failed)} {kind} all failed alike"
                found.append(f"{told}: {failed[0][1]}" if reasons else told)
        return found
