"""`GET /` and `GET /page/{name}`: the files of the web page.

They hold no data, and need no token.
"""

import asyncio

from aiohttp import web

from edged.http.errors import ApiError
from edged.page import INDEX, NAMES, page_file

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # Revalidated each time, and sent only when it has changed: an upgrade reaches open browsers at once.
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


async def page(request: web.Request) -> web.Response:
    """The page."""
    return await _send(request, INDEX)


async def file(request: web.Request) -> web.Response:
    """A file of the page."""
    name = request.match_info["name"]
    if name not in NAMES:
        raise ApiError(404, f'the page has no file "{name[:80]}"', "name", "unknown_file")
    return await _send(request, name)


async def _send(request: web.Request, name: str) -> web.Response:
    found = await asyncio.to_thread(page_file, name)
    headers = {**_HEADERS, "ETag": f'"{found.tag}"'}
    shown = request.if_none_match or ()
    if any(tag.value == found.tag for tag in shown):
        return web.Response(status=304, headers=headers)
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        body, headers["Content-Encoding"] = found.body_gzip, "gzip"
    else:
        body = await asyncio.to_thread(found.plain)
    return web.Response(body=body, headers=headers, content_type=found.media_type, charset="utf-8")
