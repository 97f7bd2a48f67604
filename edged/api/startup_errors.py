"""Requests that come while a start is refused: each is answered with 503, so that nobody waits for what does not come.

Imports nothing slow.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from edged.api.sockets import BACKLOG, inherited_sockets

_FOR_STRANGERS = "edged could not start: whoever runs this box finds the reason in its log"
_SILENT = logging.Logger("edged.api.startup_errors", logging.CRITICAL + 1)
"""aiohttp would tell of every request that it cannot read, with a traceback."""


async def answer_refusals(message: str, wait_s: float, environ: Mapping[str, str]) -> None:
    """For `wait_s`, answer on the sockets of systemd's; those who come over TCP are not told `message`.

    Raises ListenError where systemd's sockets cannot be used, OSError where they cannot be listened on.
    """
    ends_s = asyncio.get_running_loop().time() + wait_s
    runner = web.ServerRunner(web.Server(_handler(message, ends_s), logger=_SILENT), shutdown_timeout=0.0)
    await runner.setup()
    try:
        for item in inherited_sockets(environ, os.getpid()):
            await web.SockSite(runner, item, backlog=BACKLOG).start()
        await asyncio.sleep(ends_s - asyncio.get_running_loop().time())
    finally:
        await runner.cleanup()


def _handler(message: str, ends_s: float) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    async def refuse(request: web.BaseRequest) -> web.StreamResponse:
        connection = request.transport.get_extra_info("socket") if request.transport else None
        local = connection is not None and connection.family == socket.AF_UNIX
        told = f"edged could not start: {message}" if local else _FOR_STRANGERS
        error = {"message": told, "type": "server_error", "param": None, "code": "start_refused"}
        left_s = max(1.0, ends_s - asyncio.get_running_loop().time())
        return web.json_response({"error": error}, status=503, headers={"Retry-After": str(math.ceil(left_s))})

    return refuse
