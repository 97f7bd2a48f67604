"""The feed of a node that falls silent: one that still takes connections is waited for, another is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from edged.fleet.feeds import follow
from edged.fleet.ids import Ids
from edged.fleet.keeper import Keeper
from edged.fleet.members import Member, Members
from edged.fleet.state_file import StateFile
from edged.settings.fleet import FleetSettings
from tests.placement.nodes import REPORT


@contextlib.asynccontextmanager
async def silent_node(folder: Path) -> AsyncIterator[tuple[Members, Member, web.TCPSite]]:
    """A node that has told its load once, its listener, and the ingress' view of it."""

    async def events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(f"event: load\ndata: {json.dumps(REPORT)}\n\n".encode())
        await asyncio.sleep(1000)
        return response

    async def leases(request: web.Request) -> web.StreamResponse:
        return web.json_response({"leases": []})

    app = web.Application()
    app.add_routes([web.get("/v1/events", events), web.get("/v1/leases", leases)])
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    members = Members(
        FleetSettings(nodes={"a": url}, stale_s=0.1),
        *(StateFile(folder, "127.0.0.1:8136", what) for what in ("fleet", "members")),
    )
    member = members.by_name["a"]
    async with aiohttp.ClientSession() as session:
        feed = asyncio.create_task(follow(Keeper(members, Ids()), member, session))
        try:
            async with asyncio.timeout(9.0):
                await members.some()
                yield members, member, site
        finally:
            feed.cancel()
            await runner.cleanup()


async def test_a_silent_node_that_takes_no_connection_is_lost(tmp_path: Path) -> None:
    async with silent_node(tmp_path) as (_, member, site):
        # As a box without power, whose connections nobody has closed.
        await site.stop()
        await member.lost.wait()


async def test_a_silent_node_that_takes_connections_is_waited_for(tmp_path: Path) -> None:
    async with silent_node(tmp_path) as (members, member, _):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(member.lost.wait(), 2.0)
        assert members.state(member) == "stale"
