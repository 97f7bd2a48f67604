"""What the quarantine costs honest users, and what an attack does with it and without.

Owns one run of an engine over a stream of pairs, part by part, and what became of them. Must not know tables.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edged.align.pair import PairRetired, PairScored, Record, TokenPair, VersionPublished
from edged.config import Settings
from edged.engine.engine import Engine

_LONGEST_S = 900.0
"""A part that takes longer has gone wrong."""


class PoisoningError(RuntimeError):
    """A run did not come to its end; the message says where."""


@dataclass
class Ledger:
    """What the engine's records say: each pair's latest state, the latest held-out test, versions by their reason."""

    states: dict[int, PairRetired] = field(default_factory=dict)
    tests: dict[int, dict[int, float]] = field(default_factory=dict)
    """Reward margins of held-out pairs by version."""
    versions: list[VersionPublished] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, records: list[Record]) -> None:
        """The engine's callback."""
        with self.changed:
            for record in records:
                if isinstance(record, PairRetired):
                    self.states[record.pair_id] = record
                elif isinstance(record, PairScored) and record.split == "held_out":
                    self.tests.setdefault(record.version, {})[record.pair_id] = record.reward_margin
                elif isinstance(record, VersionPublished):
                    self.versions.append(record)
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Until `condition` holds. Raises PoisoningError."""
        with self.changed:
            if not self.changed.wait_for(condition, _LONGEST_S):
                raise PoisoningError(f"{what} was not done after {_LONGEST_S:g} s")

    def settled(self, ids: Sequence[int]) -> bool:
        """Whether each of these pairs has an outcome."""
        return all(pair in self.states and self.states[pair].state != "queued" for pair in ids)

    def counts(self, pairs: Sequence[TokenPair]) -> dict[str, int]:
        """How many of the pairs are in each state."""
        found: dict[str, int] = {}
        for pair in pairs:
            state = self.states[pair.pair_id].state
            found[state] = found.get(state, 0) + 1
        return found


def flipped(pairs: Sequence[TokenPair]) -> list[TokenPair]:
    """The same pairs with the opposite preference."""
    return [replace(pair, chosen=pair.rejected, rejected=pair.chosen) for pair in pairs]


def run_parts(
    model: Path, settings: Settings, parts: dict[str, Sequence[TokenPair]], held_out: Sequence[TokenPair] = ()
) -> dict[str, Any]:
    """Submit part after part, each when the one before is learned; what became of each part's pairs.

    With `held_out` pairs, which no adapter trains on, each part has the reward accuracy on them after it. Raises
    PoisoningError, and what building an engine raises.
    """
    ledger = Ledger()
    report: dict[str, Any] = {"parts": {}}
    with tempfile.TemporaryDirectory(prefix="edged-") as folder:
        engine = Engine.build(settings, model, lambda events: None, ledger.take, Path(folder))
        engine.start()
        try:
            engine.submit_pairs([replace(pair, state="held_out") for pair in held_out])
            for name, pairs in parts.items():
                engine.submit_pairs(list(pairs))
                report["parts"][name] = _finish(engine, ledger, name, pairs, len(held_out))
        finally:
            engine.stop(0.0)
    report["reasons"] = sorted({record.reason for record in ledger.states.values() if record.state == "quarantined"})
    report["rolled_back"] = [version.reason for version in ledger.versions if version.reason.startswith("guard:")]
    return report


def _finish(engine: Engine, ledger: Ledger, name: str, pairs: Sequence[TokenPair], held_out: int) -> dict[str, Any]:
    ids = [pair.pair_id for pair in pairs]
    ledger.wait(lambda: ledger.settled(ids), f"part {name}")
    done: dict[str, Any] = {"pairs": len(pairs), "states": ledger.counts(pairs)}
    if held_out:
        adapter = pairs[0].adapter
        ledger.wait(lambda: _tested(engine, ledger, adapter, held_out), f"the held-out test after part {name}")
        margins = ledger.tests[max(ledger.tests)]
        done["held_out_accuracy"] = sum(margin > 0 for margin in margins.values()) / len(margins)
        done["version"] = engine.adapters()[adapter]
    return done


def _tested(engine: Engine, ledger: Ledger, adapter: str, held_out: int) -> bool:
    """Whether the version that is served was tested, or is one that the guard brought back."""
    version = engine.adapters().get(adapter, 0)
    if ledger.versions and ledger.versions[-1].reason.startswith("guard:") and ledger.versions[-1].version == version:
        return True
    return len(ledger.tests.get(version, ())) >= held_out
