"""Checks that every request passes, whatever its route: the site that it comes from, and its body."""

import asyncio
import ipaddress
import zlib
from collections.abc import Collection
from urllib.parse import urlsplit

from aiohttp import web

from edged.http.errors import ApiError, bad_request
from edged.http.sockets import over_tcp
from edged.settings.addresses import is_loopback

PROBES = ("/healthz", "/readyz")
_NO_BODY = 64
"""Bytes of a body that are read and dropped where none is taken."""


def refuse_body(request: web.Request) -> None:
    """Raise ApiError (400) for a body where none is taken, before it is read; some clients send `{}` for none."""
    size = request.content_length
    if request.body_exists and (size is None or size > _NO_BODY):
        told = f"{request.method} {request.path[:200]} takes no body, and this one has "
        raise bad_request(told + ("chunks" if size is None else f"{size} bytes"), code="body_not_taken")


async def body_in_time(request: web.Request, body_s: float) -> None:
    """Read a request's body into memory. Raises ApiError (408) after `body_s` seconds."""
    try:
        async with asyncio.timeout(body_s):
            await request.read()
    except TimeoutError:
        message = f"the body did not come within {body_s:g} s (limits.patience)"
        raise ApiError(408, message, code="body_too_slow") from None


async def read_unpacked(request: web.Request) -> bytes:
    """Return a request's body, which may be gzip or deflate. Raises ApiError."""
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ("identity", "gzip", "deflate"):
        told = f'Content-Encoding "{encoding[:40]}" is not decoded: send the body plain, or as gzip or deflate'
        raise ApiError(415, told, code="unknown_encoding")
    data = await request.read()
    if encoding == "identity":
        return data
    # Either is known by its header.
    unpacking, most = zlib.decompressobj(zlib.MAX_WBITS | 32), request.client_max_size
    try:
        content = unpacking.decompress(data, most + 1)
    except zlib.error as error:
        raise bad_request(
            f"the body is not {encoding}, as Content-Encoding says: {error}", code="bad_encoding"
        ) from None
    if len(content) > most:
        told = f"the request body has more than {most} bytes, unpacked: api.max_body_kb allows no more"
        raise ApiError(413, told, code="body_too_large")
    if not unpacking.eof or unpacking.unused_data:
        told = f"the body is not one whole {encoding} stream, as Content-Encoding says: send it as one"
        raise bad_request(told, code="bad_encoding")
    return content


def preflight(request: web.Request, origins: Collection[str]) -> web.Response | None:
    """Return the answer to a browser that asks whether a page of one of the `origins` may send a request.

    None for all else.
    """
    asked = request.headers.get("Access-Control-Request-Method")
    if request.method != "OPTIONS" or asked is None or origin_among(request, origins) is None:
        return None
    wanted = request.headers.get("Access-Control-Request-Headers", "")
    return web.Response(
        status=204,
        headers={
            "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE",
            "Access-Control-Allow-Headers": wanted,
            "Access-Control-Allow-Private-Network": "true",
            "Access-Control-Max-Age": "600",
        },
    )


def origin_among(request: web.Request, origins: Collection[str]) -> str | None:
    """Return the site of the page that sends a request where it is one of the `origins`."""
    origin = request.headers.get("Origin")
    return origin if origin is not None and origin.lower() in origins else None


async def share_with_page(origins: Collection[str], request: web.Request, response: web.StreamResponse) -> None:
    """Let a page of one of the `origins` read a response, with its headers (a handler of `on_response_prepare`)."""
    if (origin := origin_among(request, origins)) is not None:
        named = ", ".join(name for name in response.headers if name.startswith("X-"))
        shown = {"Access-Control-Expose-Headers": named} if named else {}
        response.headers.update({"Access-Control-Allow-Origin": origin, **shown})
    if origins:
        # A cache must not give one site's answer to another.
        response.headers["Vary"] = "Origin"


def refuse_other_sites(request: web.Request, own_name: str, has_tokens: bool, origins: Collection[str] = ()) -> None:
    """Refuse web pages of other sites than `origins` on a listener that asks for no token. Raises ApiError (403).

    Those listeners are TCP without tokens, and the Unix socket, which people forward to their browsers by ssh. Browsers
    send a page's site in `Origin`. For a site whose name was pointed to this box (DNS rebinding) `Host` has that name:
    it must be loopback's or `own_name`, the host in `api.listen`; over the Unix socket, where programs make one up, any
    that is not an Internet name. Requests for what a page embeds or links to have no `Origin`: there browsers send
    `Sec-Fetch-Site`, and only a link to the page itself is followed.
    """
    tcp = over_tcp(request)
    if (tcp and has_tokens) or request.path in PROBES:
        return
    host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
    name, way_out = name_in(host), "; or set api.token" if tcp else ""
    if not (is_loopback(name) or (own_name and name == own_name) or (not tcp and _is_invented(name))):
        message = f'host "{host[:200]}" is not this box: use 127.0.0.1 or localhost{way_out}'
        raise ApiError(403, message, code="forbidden_host")
    if origin_among(request, origins) is not None:
        return
    if origin is not None and origin.lower() != f"http://{host.lower()}":
        listed = "name it in api.browser_origins"
        raise ApiError(
            403, f'web pages of "{origin[:200]}" may not use edged: {listed}{way_out}', code="forbidden_origin"
        )
    if request.headers.get("Sec-Fetch-Site", "").lower() in ("cross-site", "same-site") and not _follows_link(request):
        raise ApiError(403, f"web pages of other sites may not use edged{way_out}", code="forbidden_site")


def _follows_link(request: web.Request) -> bool:
    """Whether a browser navigates to edged's page in a top-level tab."""
    mode, target = (request.headers.get(f"Sec-Fetch-{name}", "") for name in ("Mode", "Dest"))
    return request.method == "GET" and request.path == "/" and (mode, target) == ("navigate", "document")


def name_in(host: str) -> str:
    """The host name in NAME or NAME:PORT; "" where there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_invented(host: str) -> bool:
    """Whether a host cannot be an Internet name: it has no dot, or is an address."""
    try:
        return "." not in host or bool(ipaddress.ip_address(host))
    except ValueError:
        return False
