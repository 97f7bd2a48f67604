"""The feed of a node: one stream of its events, over which its load and new versions come."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import StreamReader
from pydantic import ValidationError

from edged.fleet.keeper import CarryFailed, Keeper
from edged.fleet.members import Member, Members

_CONNECT_S = 2.0
_RETRY_S = (0.2, 2.0)
"""Seconds until a lost feed is opened again: at first, and at most."""
_UNREACHED = 2
"""Attempts in a row without a connection, after which answers that are awaited from a node end."""
_SILENT_S = 10.0
"""Seconds of silence after which a feed is opened anew; a daemon says something each 200 ms."""
_DOUBT_S = 0.5
"""Seconds between two looks whether a silent node still takes connections."""


async def follow(keeper: Keeper, member: Member, session: aiohttp.ClientSession) -> None:
    """Keep a node's feed open and take in what it says, until cancelled."""
    members = keeper.members
    wait_s, unreached = _RETRY_S[0], 0
    while True:
        try:
            await _read_while_reached(keeper, member, session)
            problem = "its feed ended"
        except (_Refused, CarryFailed) as error:
            problem, unreached = str(error), 0
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            problem, unreached = f"its connection broke: {str(error) or type(error).__name__}", unreached + 1
        if member.connected:
            wait_s, unreached = _RETRY_S[0], 0
        elif unreached >= _UNREACHED:
            members.cut(member)
        members.lose(member, problem)
        await asyncio.sleep(wait_s)
        wait_s = min(2.0 * wait_s, _RETRY_S[1])


class _Refused(Exception):
    """A node answers, and not with a feed."""


async def _read_while_reached(keeper: Keeper, member: Member, session: aiohttp.ClientSession) -> None:
    """Read a node's feed; all that is awaited from one that is silent ends as soon as it takes no connection either.

    A busy or stopped one takes connections: its kernel does. One without power or network does not, and tells nobody.
    """
    reading, doubting = (
        asyncio.create_task(_read(keeper, member, session)),
        asyncio.create_task(_doubt(keeper.members, member)),
    )
    try:
        await asyncio.wait({reading, doubting}, return_when=asyncio.FIRST_COMPLETED)
        await (doubting if doubting.done() else reading)
    finally:
        reading.cancel()
        doubting.cancel()


async def _doubt(members: Members, member: Member) -> None:
    """Raise OSError or TimeoutError, once a silent node takes no connection, and end what is awaited from it."""
    url = urlsplit(member.url)
    while True:
        await asyncio.sleep(_DOUBT_S)
        if members.state(member) == "stale":
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(url.hostname, url.port), _CONNECT_S)
            except (OSError, TimeoutError):
                members.cut(member)
                raise
            writer.close()


async def _read(keeper: Keeper, member: Member, session: aiohttp.ClientSession) -> None:
    members, timeout = keeper.members, aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENT_S)
    async with session.get(f"{member.url}/v1/events?events=load,version,changed,lease", timeout=timeout) as response:
        if response.status != 200:
            raise _Refused(f"it answers {response.status}: {await told(response)}")
        # Before anything is asked of it: nobody is served who was forgotten while it was away.
        await keeper.forget_before(member)
        async with session.get(f"{member.url}/v1/leases", timeout=timeout) as listed:
            if listed.status != 200:
                raise _Refused(f"its adapters cannot be listed: {listed.status}: {await told(listed)}")
            try:
                keeper.listed(member.name, json.loads(await listed.read())["leases"])
            except (KeyError, TypeError) as error:
                raise _Refused(f"its list of adapters cannot be read ({type(error).__name__})") from None
        async for name, data in events(response.content):
            try:
                if name == "load":
                    members.take(member, data)
                elif name == "version":
                    keeper.published(member.name, data["adapter"], data["version"], data["reason"])
                elif name == "changed":
                    keeper.changed(member.name, data["adapter"])
                elif name == "lease":
                    keeper.leased(member.name, data["adapter"], (data["epoch"], data["node"]), data["version"])
            except (ValidationError, KeyError) as error:
                way_out = "it and the ingress need one version of edged"
                raise _Refused(f"its reports cannot be read ({type(error).__name__}): {way_out}") from None


async def told(response: aiohttp.ClientResponse) -> str:
    """Return the message of a node's error."""
    try:
        return str(json.loads(await response.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.reason or "no reason"


async def events(content: StreamReader) -> AsyncIterator[tuple[str, Any]]:
    """Yield (name, data) of each server-sent event; comments are skipped. Raises ValueError for what is no JSON."""
    name = ""
    async for line in content:
        field, _, value = line.decode().rstrip("\r\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)
