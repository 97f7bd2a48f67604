"""HTTP connections with time limits: for a header to arrive and for a full send buffer to be read.

The application limits the time of a body.
"""

import asyncio
import logging
import socket
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from edged.api.errors import ApiError
from edged.api.sockets import BACKLOG
from edged.settings.load import LimitSettings

log = logging.getLogger("edged.api")
_ACCEPTED_AT_ONCE = 8
"""Connections that are accepted between two looks at the others: many that come at once do not hold up who talks."""


class Connection(web.RequestHandler):
    """An aiohttp connection that is dropped when its first header or the reading of an answer takes too long.

    Unread bytes are buffered up to the transport's high-water mark (64 KiB); beyond it the handler waits.
    """

    __slots__ = ("_header_timer", "_limits", "_stall_timer")

    def __init__(self, manager: web.Server, loop: asyncio.AbstractEventLoop, limits: LimitSettings):
        options: dict[str, Any] = {"keepalive_timeout": limits.idle_s, "access_log": None}
        super().__init__(manager, loop=loop, **options)
        self._limits = limits
        self._header_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        reason = f"no header came within limits.header_s = {self._limits.header_s:g} s"
        self._header_timer = self._loop.call_later(self._limits.header_s, self._drop, reason)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.header_came()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def header_came(self) -> None:
        """Stop the header's timer: the first request is known; for later ones `limits.idle_s` holds."""
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        reason = f"it did not read for limits.stalled_s = {self._limits.stalled_s:g} s"
        self._stall_timer = self._loop.call_later(self._limits.stalled_s, self._drop, reason)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer a request that aiohttp could not parse with an ApiError, and log no traceback."""
        if status >= 500 or exc is None or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        # The bytes are not logged: a header may hold a token.
        log.info("a request could not be read: %s", type(exc).__name__)
        long = "the address or a header is longer than 8190 bytes"
        problem = long if isinstance(exc, LineTooLong) else "it is no HTTP"
        answer = ApiError(status, f"the request could not be read: {problem}", code="bad_http").response()
        answer.force_close()
        return answer

    def _drop(self, reason: str) -> None:
        if self.transport is not None:
            log.info("a client was dropped: %s", reason)
            self.transport.abort()


class Site(web.SockSite):
    """A listening socket whose connections are `Connection`s."""

    def __init__(self, runner: web.AppRunner, listener: socket.socket, limits: LimitSettings) -> None:
        super().__init__(runner, listener, backlog=BACKLOG)
        self._listener, self._limits = listener, limits

    async def start(self) -> None:
        """Accept connections."""
        await web.BaseSite.start(self)
        loop, manager = asyncio.get_running_loop(), self._runner.server
        assert manager is not None

        def connection() -> Any:
            return Connection(manager, loop, self._limits)

        self._server = await loop.create_server(connection, sock=self._listener, backlog=_ACCEPTED_AT_ONCE)
        # For asyncio the one number is both.
        self._listener.listen(self._backlog)
