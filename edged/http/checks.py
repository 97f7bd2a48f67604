"""Checks that every request passes, whatever its route: the site that it comes from, and its body."""

import asyncio
import ipaddress
from urllib.parse import urlsplit

from aiohttp import web

from edged.http.access import is_loopback
from edged.http.errors import ApiError, bad_request
from edged.http.sockets import over_tcp

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
        message = f"the body did not come within limits.body_s = {body_s:g} s"
        raise ApiError(408, message, code="body_too_slow") from None


def refuse_other_sites(request: web.Request, own_name: str, has_tokens: bool) -> None:
    """Refuse web pages of other sites on a listener that asks for no token. Raises ApiError (403).

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
    if origin is not None and origin.lower() != f"http://{host.lower()}":
        raise ApiError(403, f'web pages of "{origin[:200]}" may not use edged{way_out}', code="forbidden_origin")
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
