"""The relay: a request goes to a node as it is, and the node's bytes come back as they are."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from edged.fleet.members import Member
from edged.fleet.resume import ResumableAnswer
from edged.http.access import ON_BEHALF, caller_of
from edged.http.connections import has_begun
from edged.http.errors import ApiError
from edged.http.json_format import server_event

_OWN = frozenset(
    {
        *("host", "authorization", "connection", "content-length", "cookie", "expect", "keep-alive", "origin"),
        *("te", "trailer", "transfer-encoding", "upgrade", "accept-encoding", "forwarded", "proxy-authorization"),
        ON_BEHALF.lower(),
    }
)
"""Headers of a request that are the client's and the ingress' alone."""
_HOP = frozenset(
    {"connection", "content-length", "date", "keep-alive", "server", "set-cookie", "trailer", "transfer-encoding"}
)
"""Headers of an answer that are the node's and the ingress' alone."""
_CONNECT_S = 2.0
_TAIL = 512
"""Last bytes of an answer, in which its usage stands."""
_PROMPT_TOKENS = re.compile(rb'"(?:prompt|input)_tokens": ?(\d+)')


class NodeLost(Exception):
    """A node broke off before the first byte of its answer, or where the answer may go on: another may have it."""


@dataclass(slots=True)
class Timing:
    """The times of an answer: moments (the loop's clock), and the prompt's tokens where it told them."""

    sent_s: float
    first_s: float = 0.0
    ended_s: float = 0.0
    prompt_tokens: int = 0
    streamed: bool = False
    """Whether the first byte came with the first token."""


async def relay(
    request: web.Request,
    session: aiohttp.ClientSession,
    member: Member,
    body: bytes | AsyncIterable[bytes] | None,
    headers: Mapping[str, str] = MappingProxyType({}),
    learn: Callable[[bytes], None] = lambda head: None,
    elsewhere: bool = False,
    answer: ResumableAnswer | None = None,
) -> tuple[web.StreamResponse, Timing]:
    """Send a request to a node and stream its answer back, with `headers` besides its own.

    `learn` gets the first bytes of the answer before the client does. Raises NodeLost before the first byte; so it does
    where the node takes nothing for now (503) and the request may go `elsewhere`, where it stops, and where the rest of
    an `answer` may: its stream goes on in the response that has begun, and an answer that is no stream is sent once all
    of it came.
    """
    loop = asyncio.get_running_loop()
    sent = CIMultiDict((key, value) for key, value in request.headers.items() if key.lower() not in _OWN)
    sent[ON_BEHALF] = caller_of(request).forwarded()
    if isinstance(body, bytes):
        sent.pop("Content-Encoding", None)  # it was unpacked
    timing = Timing(loop.time())
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    asked = session.request(
        request.method,
        URL(member.url + request.rel_url.raw_path_qs, encoded=True),
        data=body,
        headers=sent,
        timeout=timeout,
        allow_redirects=False,
    )
    member.open += 1
    try:
        upstream = await _unless_lost(member, asked)
        member.relays.add(upstream)
        async with upstream:
            begun = answer.response if answer is not None else None
            if (elsewhere and upstream.status == 503) or (begun is not None and upstream.status != 200):
                raise NodeLost("it takes no requests for now")
            if answer is not None and upstream.status == 503 and await _stops(upstream):
                raise NodeLost("it stops")
            streamed = upstream.content_type == "text/event-stream"
            piece = await (upstream.content.readany() if streamed or answer is None else upstream.read())
            # A response's first event comes before its first token.
            timing.first_s, timing.streamed = loop.time(), streamed and answer is not None and answer.choices > 0
            learn(piece)
            if (response := begun) is None:
                response = _answer(upstream, {**headers, "X-Edged-Node": member.name})
                await response.prepare(request)
                has_begun(request)
            if answer is not None:
                answer.begin(response, member.name)
            await _stream(request, upstream, response, piece, timing, member.name, answer if streamed else None)
            timing.ended_s = loop.time()
            return response, timing
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        if timing.first_s:
            raise
        raise NodeLost(str(error) or type(error).__name__) from None
    finally:
        member.open -= 1
        member.relays = {item for item in member.relays if not item.closed}


async def _unless_lost(member: Member, asked: Awaitable[aiohttp.ClientResponse]) -> aiohttp.ClientResponse:
    """Return a node's answer once it begins. Raises ConnectionAbortedError where the node is lost before."""
    answer, lost = asyncio.ensure_future(asked), asyncio.ensure_future(member.lost.wait())
    try:
        await asyncio.wait({answer, lost}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ConnectionAbortedError("the node does not answer any more")
        return answer.result()
    finally:
        lost.cancel()
        answer.cancel()


def _answer(upstream: aiohttp.ClientResponse, headers: Mapping[str, str]) -> web.StreamResponse:
    response = web.StreamResponse(status=upstream.status, reason=upstream.reason)
    for key, value in upstream.headers.items():
        if key.lower() not in _HOP:
            response.headers.add(key, value)
    response.headers.update(headers)
    response.content_length = upstream.content_length
    return response


async def _stops(upstream: aiohttp.ClientResponse) -> bool:
    """Whether a node refuses a request since it is stopping; its answer can be read again."""
    try:
        return json.loads(await upstream.read())["error"]["code"] == "draining"
    except (ValueError, KeyError, TypeError):
        return False


async def _stream(
    request: web.Request,
    upstream: aiohttp.ClientResponse,
    response: web.StreamResponse,
    piece: bytes,
    timing: Timing,
    name: str,
    answer: ResumableAnswer | None,
) -> None:
    """Write an answer's bytes as they come; a stream whose node goes away, and that cannot go on, ends with an error.

    Raises NodeLost where another node may go on with the `answer`.
    """
    tail = b""
    try:
        while piece:
            tail = (tail + piece)[-_TAIL:]
            written = piece if answer is None else answer.take(piece)
            try:
                if written:
                    await response.write(written)
            except ConnectionResetError:
                return  # the client has left
            piece = await upstream.content.readany()
        await response.write_eof()
    except (aiohttp.ClientError, OSError) as error:
        with contextlib.suppress(ConnectionResetError):
            if answer is None or not (answer.ended or answer.may_go_on):
                await break_off(request, response, name)
            elif answer.ended:
                await response.write_eof()
            else:
                raise NodeLost(str(error) or type(error).__name__) from None
    if told := _PROMPT_TOKENS.search(tail):
        timing.prompt_tokens = int(told[1])


async def break_off(request: web.Request, response: web.StreamResponse, name: str) -> None:
    """Tell the client of a stream that its node is gone, or close the connection of an answer that is cut short."""
    if response.content_type == "text/event-stream":
        message = f'node "{name}" went away in the middle of this answer: ask again'
        await response.write(server_event(ApiError(503, message, code="node_lost").body()))
    elif request.transport is not None:
        request.transport.abort()
