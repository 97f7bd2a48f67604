"""Lists, status, metrics and events of all nodes of a fleet, asked at once, each with its node."""

import asyncio
import contextlib
import json
import logging

import aiohttp
from aiohttp import web

from edged.fleet.feeds import told
from edged.fleet.ingress import Ingress, adapter_in
from edged.fleet.members import Member
from edged.fleet.merging import merge_events, merge_metrics
from edged.http.access import ON_BEHALF, caller_of
from edged.http.connections import has_begun
from edged.http.errors import ApiError
from edged.http.json_format import Json, json_answer

log = logging.getLogger("edged.fleet")

_SILENT_S = 60.0
"""Longest silence of a node's events, which has a heartbeat every 15 s."""


async def _each(ingress: Ingress, request: web.Request) -> dict[str, bytes]:
    """Ask all nodes that are there, at once; returns their answers by name."""

    async def one(member: Member) -> tuple[str, bytes | None]:
        try:
            async with ingress.ask(request, member) as found:
                if found.status != 200:
                    log.warning(
                        "node %s answers %s with %d: %s", member.name, request.path, found.status, await told(found)
                    )
                    return member.name, None
                return member.name, await found.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return member.name, None

    if not (there := ingress.there()):
        await ingress.members.some()
        there = ingress.there()
    answers = await asyncio.gather(*map(one, there))
    found = {name: answer for name, answer in answers if answer is not None}
    if not found:
        raise ApiError(503, f"no node could answer {request.path}: try again", code="no_node")
    return found


async def models(ingress: Ingress, request: web.Request) -> web.StreamResponse:
    """Every model once."""
    found: dict[str, Json] = {}
    for answer in (await _each(ingress, request)).values():
        found = {item["id"]: item for item in json.loads(answer)["data"]} | found
    return json_answer({"object": "list", "data": [found[name] for name in sorted(found)]})


async def model(ingress: Ingress, request: web.Request) -> web.StreamResponse:
    """One model: the base at any node, an adapter at its home."""
    adapter = adapter_in(request.match_info["id"], ingress.members.model)
    if adapter is not None:
        return await ingress.relay_to(request, ingress.members.homes.of(adapter), None)
    return await ingress.relay_to(request, (await ingress.members.some())[0].name, None)


async def adapters(ingress: Ingress, request: web.Request) -> web.StreamResponse:
    """Every adapter once, with its home; with a node that has a copy where the home is away."""
    found: dict[str, Json] = {}
    for node, data in (await _each(ingress, request)).items():
        for item in json.loads(data)["adapters"]:
            if item["adapter"] not in found or ingress.members.homes.of(item["adapter"]) == node:
                found[item["adapter"]] = {**item, "node": node}
    return json_answer({"adapters": list(found.values())})


async def status(ingress: Ingress, request: web.Request) -> web.StreamResponse:
    """The status of each node that is there, and the base model of all."""
    nodes = {name: json.loads(data) for name, data in (await _each(ingress, request)).items()}
    return json_answer({"model": {"name": ingress.members.model}, "nodes": nodes})


async def metrics(ingress: Ingress, request: web.Request) -> web.StreamResponse:
    """The metrics of all nodes, with a label `node`."""
    texts = {name: data.decode() for name, data in (await _each(ingress, request)).items()}
    return web.Response(text=merge_metrics(texts), headers={"Content-Type": "text/plain; version=0.0.4"})


async def events(ingress: Ingress, request: web.Request) -> web.StreamResponse:
    """The events of all nodes that are there, each with its node."""
    there, own = ingress.there(), asyncio.current_task()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    async with contextlib.AsyncExitStack() as opened:
        ingress.event_streams.add(own)
        opened.callback(ingress.event_streams.discard, own)
        sources = []
        for member in there:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=2.0, sock_read=_SILENT_S)
            headers = {ON_BEHALF: caller_of(request).forwarded()}
            asked = ingress.session.get(member.url + request.path_qs, headers=headers, timeout=timeout)
            found = await opened.enter_async_context(asked)
            if found.status != 200:
                raise ApiError(found.status, await told(found))
            sources.append((member.name, found.content))
        await response.prepare(request)
        has_begun(request)
        async with contextlib.aclosing(merge_events(sources)) as merged:
            with contextlib.suppress(ConnectionResetError):
                async for piece in merged:
                    await response.write(piece)
    return response
