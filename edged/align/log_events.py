"""The log lines of the learning loop's records."""

import logging
from collections.abc import Sequence
from typing import Any

from edged.align.feedback.pair import Record, StepSkipped, VersionPublished, VersionSaved
from edged.runtime import logs
from edged.store.rows import field_values

log = logging.getLogger("edged.align")
_VERSION_BURST, _VERSION_EVERY_S = 3, 60.0
"""Rate limit, by adapter, of lines on trained versions: a user who keeps giving feedback makes one every second."""

_PUBLISHED = ("adapter", "version", "parent", "reason", "pairs", "loss")
"""Fields of a version that are logged."""
_TAKEN_BACK = ("rollback", "guard")
"""Prefixes of the reasons of restored versions; others are trained, imported, rebuilt or introduced."""


class LogEvents:
    """The logger of one engine's records."""

    def __init__(self) -> None:
        self._trained = logs.Sparing(_VERSION_BURST, _VERSION_EVERY_S)

    def tell(self, records: Sequence[Record]) -> None:
        """Log the records that are worth a line; may be called on any thread."""
        for record in records:
            match record:
                case VersionPublished():
                    self._published(record)
                case StepSkipped():
                    logs.event(
                        log,
                        logging.WARNING,
                        "step_skipped",
                        f"{len(record.pair_ids)} pairs of {record.adapter} were not learned: {record.reason}",
                        **{**field_values(record), "pair_ids": list(record.pair_ids)},
                    )
                case VersionSaved(adapter, version):
                    message = f"version {version} of {adapter} is on disk"
                    logs.event(log, logging.DEBUG, "saved", message, adapter=adapter, version=version)

    def _published(self, record: VersionPublished) -> None:
        level, name, left_out = logging.INFO, "version", 0
        if record.reason == "trained":
            missed = self._trained.left_out(record.adapter)
            if missed is None:
                return
            left_out = missed
        elif record.reason.startswith(_TAKEN_BACK):
            level, name = logging.WARNING, "rollback"
        elif record.reason.startswith("trained: "):
            level, name = logging.WARNING, "preferences_changed"
        message = f"{record.adapter} is served by version {record.version}: {record.reason}"
        fields: dict[str, Any] = {field: getattr(record, field) for field in _PUBLISHED}
        fields["step_s"] = round(record.step_s, 3)
        if left_out:
            message, fields["left_out"] = f"{message} ({left_out} versions before it are not told)", left_out
        logs.event(log, level, name, message, **fields)
