"""What a source of readings is."""

from __future__ import annotations

from typing import Any, Protocol


class SourceAbsent(RuntimeError):
    """The source cannot be read on this box, or not now; the message says why and what to do."""


class Source(Protocol):
    """Reads some fields of a `Reading`; one thread uses it."""

    name: str

    def read(self) -> dict[str, Any]:
        """Values by the `Reading`'s names, None where unknown. Raises SourceAbsent; then `close` is called."""
        ...

    def close(self) -> None:
        """Let go of what is open; `read` opens it anew."""
        ...
