"""How an answer of many pieces ends when it has begun and cannot go on.

Owns that end. Must not know what is sent. An answer that can say itself what went wrong, such as a completion's events,
does so.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from aiohttp import web

log = logging.getLogger("edged.api")


@contextlib.contextmanager
def begun(request: web.Request, what: str) -> Iterator[None]:
    """While the pieces of `what` (such as "an export") are sent: no error leaves, for the status is sent already.

    That a client left is told; anything else is logged with its traceback, and closes the connection.
    """
    try:
        yield
    except ConnectionResetError:
        log.info("a client left in the middle of %s", what)
    except Exception:
        # Only its missing end can tell the client.
        log.exception("%s broke off", what)
        if request.transport is not None:
            request.transport.close()
