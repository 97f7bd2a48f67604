"""HTTP connections with time limits (for a header to arrive, for a full send buffer to be read) and turns by account.

The application limits the time of a body.
"""

import asyncio
import json
import logging
import select
import socket
import ssl
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

from aiohttp import EMPTY_PAYLOAD, StreamReader, web
from aiohttp.http_exceptions import ContentEncodingError, LineTooLong
from aiohttp.http_parser import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy

from edged.http.access import unix_peer
from edged.http.errors import ApiError
from edged.http.loop_shares import LoopShare, LoopShares, LoopWork
from edged.http.sockets import BACKLOG
from edged.runtime import logs
from edged.settings.load import LimitSettings

log = logging.getLogger("edged.api")
_ACCEPTED_AT_ONCE = 8
"""Connections that are accepted between two looks at the others: many that come at once do not hold up who talks."""
_ACCEPT_AGAIN_S = 1.0
"""Delay after a connection for which nothing was free."""
_MAX_WAITING = 1024
"""Requests and connections of one account that may wait for their turn: beyond it new connections are refused."""

_TELL_AGAIN_S = 60.0
_SHORT_CHUNK, _SLICE = 64, 4096
"""Bytes of a chunk that is too short to come in thousands, and of what is parsed before the next look for such."""
_MAX_FRAMING, _CONTENT = 4096, 8
"""Bytes of a body's chunk marks: so many, and one for every so many of its content."""
_DISCARD_S, _DISCARD_PAUSE_S = 10.0, 0.01
"""Time for which the rest of a refused body is dropped, and time between two pieces of it."""


class Connection(web.RequestHandler):
    """An aiohttp connection that is dropped when its first header or the reading of an answer takes too long.

    Unread bytes are buffered up to the transport's high-water mark (64 KiB); beyond it the handler waits.
    """

    __slots__ = (
        *("_account", "_answering", "_body", "_discards", "_framing", "_header_timer", "_limits", "_lost"),
        *("_shares", "_stall_timer", "_work"),
    )

    def __init__(
        self,
        manager: web.Server,
        loop: asyncio.AbstractEventLoop,
        limits: LimitSettings,
        shares: LoopShares,
        account: Hashable,
    ):
        options: dict[str, Any] = {"keepalive_timeout": limits.idle_s, "access_log": None}
        # What is left of a body is dropped here, and none is unpacked.
        options |= {"lingering_time": 0.0, "auto_decompress": False}
        super().__init__(manager, loop=loop, **options)
        made = manager.request_factory
        self._request_factory = lambda message, *parts: made(_as_text(message), *parts)
        self._limits, self._shares, self._account = limits, shares, account
        self._header_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._work: LoopWork[Any] | None = None
        self._body: StreamReader = EMPTY_PAYLOAD
        """The body that arrives."""
        self._framing = 0
        """Bytes that arrived for it, without its own."""
        self._discards, self._lost = False, asyncio.Event()
        self._answering = False

    @property
    def is_idle(self) -> bool:
        """Whether every request was answered to the last byte, and nothing of another has come, unread bytes included.

        A client that has connected and said nothing yet is waited for, as long as a header may take.
        """
        if self.transport is None:
            return True
        waits = self._header_timer is not None or self._answering or self._messages
        return not (waits or self.transport.get_write_buffer_size() or _polled(self._socket, select.POLLIN))

    @property
    def _socket(self) -> socket.socket:
        assert self.transport is not None
        found: socket.socket = self.transport.get_extra_info("socket")
        return found

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        with self._counted():
            super().connection_made(transport)
            reason = f"no header came within {self._limits.header_s:g} s (limits.patience)"
            self._header_timer = self._loop.call_later(self._limits.header_s, self._drop, reason)

    def connection_lost(self, exc: BaseException | None) -> None:
        with self._counted():
            super().connection_lost(exc)
            self._lost.set()
            self._header_came()
            if self._stall_timer is not None:
                self._stall_timer.cancel()

    def data_received(self, data: bytes) -> None:
        with self._counted():
            if self._discards:
                # Not as fast as it comes: nobody needs it.
                self._pause_transport_reading()
                self._loop.call_later(_DISCARD_PAUSE_S, self._resume_transport_reading)
                return
            # Short chunks cost the parser a hundred times as much as their bytes: they are looked for after each slice.
            size = len(data) if data.count(b"\r\n") * _SHORT_CHUNK < len(data) else _SLICE
            for first in range(0, len(data) or 1, size or 1):
                part = data[first : first + size]
                super().data_received(part)
                self._bound_framing(len(part))
                if self._discards:
                    return

    def _bound_framing(self, received: int) -> None:
        """Have a body refused that is mostly marks of chunks; `received` bytes of it came, or of what is before it."""
        body = self._messages[-1][1] if self._messages else self._body
        if body is self._body:
            self._framing += received
        else:
            self._body, self._framing = body, body.total_bytes
        framing = self._framing - body.total_bytes
        # While the reader is behind, some of what came is not parsed yet.
        if not (body.is_eof() or self._reading_paused) and framing > _MAX_FRAMING + body.total_bytes // _CONTENT:
            self._discards = True
            message = f"the body came in chunks of a few bytes: send at least {_SHORT_CHUNK} in each"
            body.set_exception(ApiError(400, message, code="short_chunks"))

    async def _handle_request(self, request: web.BaseRequest, *more: Any) -> tuple[web.StreamResponse, bool]:
        """Handle a request, from its first look at the header to the last byte, when it is its account's turn."""
        self._header_came()
        self._answering = True
        try:
            self._work = LoopWork(partial(super()._handle_request, request, *more))
            answered = await self._shares.of(self._account).run(self._work)
            if not request.content.is_eof():
                await self._discard_rest()
            return answered
        finally:
            self._answering = False
            self._shares.of(self._account)

    async def _discard_rest(self) -> None:
        """Drop what is left of a refused body: its client may read the answer only when it has sent all, or not."""
        self._discards = True
        if self.transport is not None and self.transport.can_write_eof():
            # The client may have gone already.
            with suppress(OSError):
                self.transport.write_eof()
        self._resume_transport_reading()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._lost.wait(), _DISCARD_S)

    def has_begun(self) -> None:
        """Count no more of the present request for its account."""
        if self._work is not None:
            self._work.settle()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the time within for the account."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            self._shares.of(self._account).take(time.thread_time() - began_s)

    def _header_came(self) -> None:
        """Stop the header's timer: the first request is known; for later ones the time between requests holds."""
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        reason = f"it did not read for {self._limits.stalled_s:g} s (limits.patience)"
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
        if isinstance(exc, ContentEncodingError):
            told = "its Content-Encoding cannot be decoded here: send it plain, or as gzip or deflate"
            answer = ApiError(415, told, code="unknown_encoding").response()
            answer.force_close()
            return answer
        long = "the address or a header is longer than 8190 bytes"
        problem = long if isinstance(exc, LineTooLong) else "it is no HTTP"
        answer = ApiError(status, f"the request could not be read: {problem}", code="bad_http").response()
        answer.force_close()
        return answer

    def _drop(self, reason: str) -> None:
        if self.transport is not None:
            log.info("a client was dropped: %s", reason)
            self.transport.abort()


def _as_text(message: RawRequestMessage) -> RawRequestMessage:
    """Return a request's head with text in each header; aiohttp writes bytes that are not UTF-8 as half surrogates."""
    headers = message.headers
    if all(value.isascii() for value in headers.values()):
        return message
    read = CIMultiDictProxy(CIMultiDict((name, _header_text(value)) for name, value in headers.items()))
    return message._replace(headers=read)


def _header_text(value: str) -> str:
    """Read a header's value as UTF-8, or else as Latin-1, which HTTP once was in."""
    data = value.encode("utf-8", "surrogateescape")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def has_begun(request: web.Request) -> None:
    """Tell that a request's answer has begun, which is made at another's pace: no more of it counts for its account."""
    if isinstance(request.protocol, Connection):
        request.protocol.has_begun()


class Site(web.BaseSite):
    """A listening socket whose connections are `Connection`s, opened in turns of their accounts."""

    def __init__(
        self,
        runner: web.AppRunner,
        listener: socket.socket,
        limits: LimitSettings,
        shares: LoopShares,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`tls` is for TCP alone."""
        super().__init__(runner, backlog=BACKLOG)
        self._tls = tls if listener.family != socket.AF_UNIX else None
        self._listener, self._limits, self._shares = listener, limits, shares
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._sparing = logs.Sparing(1, _TELL_AGAIN_S)

    @property
    def name(self) -> str:
        """The address, for logs."""
        return str(self._listener.getsockname())

    async def start(self) -> None:
        """Accept connections."""
        await super().start()
        self._listener.setblocking(False)
        self._listen()

    async def stop(self) -> None:
        """Accept no more, and close those that wait for their turn."""
        self._loop.remove_reader(self._listener)
        for task in self._opening:
            task.cancel()
        await super().stop()

    @property
    def is_idle(self) -> bool:
        """Whether no accepted connection is answered or waits."""
        server = self._runner.server
        assert server is not None
        connections = [each for each in server.connections if isinstance(each, Connection)]
        return not self._opening and all(connection.is_idle for connection in connections)

    def leave(self) -> None:
        """Accept no more and close connections: for a moment in which it `is_idle`. New ones wait in the queue."""
        self._loop.remove_reader(self._listener)
        server = self._runner.server
        assert server is not None
        for connection in server.connections:
            connection.force_close()
            if connection.transport is not None:
                connection.transport.close()

    def _listen(self) -> None:
        if self in self._runner.sites:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            began_s = time.thread_time()
            try:
                client, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Nothing is free for it: it stays in the queue, and the listener ready.
                self._loop.call_exception_handler({"message": "a connection was not accepted", "exception": error})
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_ACCEPT_AGAIN_S, self._listen)
                return
            client.setblocking(False)
            account = unix_peer(client)[0] if client.family == socket.AF_UNIX else address[0]
            share = self._shares.of(account)
            if share.waiting >= _MAX_WAITING:
                self._refuse(client, account)
            else:
                task = self._loop.create_task(self._open(client, account, share))
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)
            share.take(time.thread_time() - began_s)

    def _refuse(self, client: socket.socket, account: Hashable) -> None:
        with client, suppress(OSError):
            client.send(_too_many())
        if (missed := self._sparing.left_out(str(account))) is not None:
            who = f"uid {account}" if isinstance(account, int) else account
            message = f"{_MAX_WAITING} requests of {who} wait for their turn: new connections of it are refused"
            logs.event(log, logging.WARNING, "too_many_waiting", message, left_out=missed)

    async def _open(self, client: socket.socket, account: Hashable, share: LoopShare) -> None:
        """Open a connection when it is its account's turn; one whose client has gone by then is closed."""
        manager = self._runner.server
        assert manager is not None

        async def opened() -> None:
            if _is_left(client):
                client.close()
            else:
                protocol = partial(Connection, manager, self._loop, self._limits, self._shares, account)
                await self._loop.connect_accepted_socket(
                    protocol, client, ssl=self._tls, ssl_handshake_timeout=self._limits.header_s if self._tls else None
                )

        try:
            await share.run(LoopWork(opened))
        except BaseException as error:
            client.close()
            if not isinstance(error, OSError):
                raise


@cache
def _too_many() -> bytes:
    """The response to a connection that is not opened."""
    message = f"{_MAX_WAITING} requests of this account wait for their turn: try again when some were answered"
    body = json.dumps(ApiError(429, message, code="too_many_waiting").body())
    head = "HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close"
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def _is_left(client: socket.socket) -> bool:
    """Whether the client of a connection has closed its end."""
    return _polled(client, select.POLLRDHUP)


def _polled(client: socket.socket, event: int) -> bool:
    """Whether an event is seen at a socket now."""
    poll = select.poll()
    poll.register(client, event)
    return bool(poll.poll(0))
