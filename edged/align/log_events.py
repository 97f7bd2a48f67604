"""What an operator is told of the learning loop's records."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from edged.align.feedback.pair import Record, StepSkipped, VersionPublished, VersionSaved
from edged.runtime import logs

log = logging.getLogger("edged.align")
_VERSION_BURST, _VERSION_EVERY_S = 3, 60.0
"""Of versions that training published, by adapter: a user who keeps giving feedback makes one every second."""

_TAKEN_BACK = ("rollback", "guard")
"""How reasons of versions begin that somebody went back to; others are trained, imported, rebuilt or introduced."""


class LogEvents:
    """The lines of one engine's records."""

    def __init__(self) -> None:
        self._trained = logs.Sparing(_VERSION_BURST, _VERSION_EVERY_S)

    def tell(self, records: Sequence[Record]) -> None:
        """Log what deserves it; to be called on any thread."""
        for record in records:
            match record:
                case VersionPublished(reason="trained"):
                    missed = self._trained.left_out(record.adapter)
                    if missed is not None:
                        self._published(record, logging.INFO, "version", missed)
                case VersionPublished() if record.reason.startswith(_TAKEN_BACK):
                    self._published(record, logging.WARNING, "rollback", 0)
                case VersionPublished() if record.reason.startswith("trained: "):
                    self._published(record, logging.WARNING, "preferences_changed", 0)
                case VersionPublished():
                    self._published(record, logging.INFO, "version", 0)
                case StepSkipped():
                    self._skipped(record)
                case VersionSaved():
                    logs.event(
                        log,
                        logging.DEBUG,
                        "saved",
                        f"version {record.version} of {record.adapter} is on disk",
                        adapter=record.adapter,
                        version=record.version,
                    )

    def _published(self, record: VersionPublished, level: int, name: str, missed: int) -> None:
        message = f"{record.adapter} is served by version {record.version}: {record.reason}"
        fields: dict[str, Any] = {
            "adapter": record.adapter,
            "version": record.version,
            "parent": record.parent,
            "reason": record.reason,
            "pairs": record.pairs,
            "loss": record.loss,
            "step_s": round(record.step_s, 3),
        }
        if missed:
            message, fields = f"{message} ({missed} versions before it are not told)", {**fields, "left_out": missed}
        logs.event(log, level, name, message, **fields)

    def _skipped(self, record: StepSkipped) -> None:
        logs.event(
            log,
            logging.WARNING,
            "step_skipped",
            f"{len(record.pair_ids)} pairs of {record.adapter} were not learned: {record.reason}",
            adapter=record.adapter,
            version=record.version,
            pair_ids=list(record.pair_ids),
            reason=record.reason,
        )
