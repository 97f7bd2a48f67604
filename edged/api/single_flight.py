"""Work that is done for one caller at a time, for it takes room on the disk.

Used on the event loop's thread.
"""

from __future__ import annotations

from edged.api.errors import ApiError

_RETRY_AFTER_S = 5.0


class SingleFlight:
    """Taken by one request at a time; the others are turned away, for waiting they would hold a connection."""

    def __init__(self, what: str) -> None:
        """`what` as messages name the work, such as "import"."""
        self._what, self._taken = what, False

    def take(self) -> None:
        """Raises ApiError (429) while it is taken."""
        if self._taken:
            raise ApiError(
                429,
                f"another {self._what} is being made: try again when it is done",
                code=f"{self._what}_busy",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._taken = True

    def end(self) -> None:
        """Let the next one begin."""
        self._taken = False
