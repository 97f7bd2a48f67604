"""`GET /v1/events`: what happens reaches whoever watches, once, and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from edged.align.feedback.pair import PairScored, VersionPublished
from edged.api import event_streams as feeds
from edged.api.app import make_app
from edged.api.event_streams import Event, EventReader, Feed
from edged.api.services import Lifecycle, Services
from edged.settings.load import Settings
from edged.store.jobs.jobs import NO_ADAPTERS
from tests.api.accounts import open_folder, root_only
from tests.api.live import LiveDaemon, running
from tests.models import save_tiny

HELLO = [{"role": "user", "content": "hello"}]


class Stream:
    """An open stream of events."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    async def next(self, name: str = "") -> dict[str, Any]:
        """The next event (of that name): its data, with its `id`. Raises EOFError at the end."""
        while True:
            fields: dict[str, str] = {}
            while line := (await self._content.readline()).decode().rstrip("\n"):
                key, _, fields[key] = line.partition(": ")
            if not fields and self._content.at_eof():
                raise EOFError
            if "data" in fields and name in ("", fields["event"]):
                return {"event": fields["event"], "id": fields.get("id", ""), **json.loads(fields["data"])}

    async def numbers(self, count: int) -> list[int]:
        """The numbers of the next iterations, at least `count`."""
        found: list[int] = []
        while len(found) < count:
            found += [record["number"] for record in (await self.next("iterations"))["iterations"]]
        return found


class Client:
    """Talks to a daemon over its socket."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    @asynccontextmanager
    async def stream(self, query: str = "", **headers: str) -> AsyncIterator[Stream]:
        async with self.session.get(f"/v1/events{query}", headers=headers) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            stream = Stream(response.content)
            assert await stream._content.readline() == b"retry: 2000\n"
            yield stream

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        async with self.session.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def get(self, path: str) -> dict[str, Any]:
        async with self.session.get(path) as response:
            return {"status": response.status, **await response.json()}

    async def ask(self, tokens: int = 8) -> None:
        await self.post("/v1/chat/completions", messages=HELLO, max_tokens=tokens, ignore_eos=True)

    async def teach(self, user: str) -> int:
        """Report a pair; returns its id."""
        pair = {"user": user, "messages": HELLO, "chosen": "Good morning.", "rejected": "yo"}
        return (await self.post("/v1/feedback", **pair))["pair_ids"][0]


@asynccontextmanager
async def client_of(daemon: LiveDaemon) -> AsyncIterator[Client]:
    connector = aiohttp.UnixConnector(str(daemon.socket))
    async with aiohttp.ClientSession("http://edged", connector=connector) as session:
        yield Client(session)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    """A daemon that keeps no pair out of training."""
    root = tmp_path_factory.mktemp("events")
    save_tiny(root / "tiny")
    with running(root / "run", root / "tiny", guard__held_out_share=0) as daemon:
        yield daemon


@pytest.fixture
async def client(live: LiveDaemon) -> AsyncIterator[Client]:
    async with client_of(live) as client:
        yield client


async def test_a_stream_begins_with_the_status_and_goes_on_telling_it(client: Client) -> None:
    shown = await client.get("/v1/status")
    async with client.stream() as stream:
        for _ in range(2):
            told = await stream.next("status")
            assert told.keys() - {"event", "id"} == shown.keys() - {"status"}


async def test_iterations_are_told_once_and_in_order(client: Client) -> None:
    await client.ask()
    async with client.stream("?events=iterations") as stream:
        before = (await client.get("/v1/status"))["totals"]["iterations"]
        await client.ask(tokens=24)
        numbers = await stream.numbers(24)
    assert numbers == list(range(before + 1, before + 1 + len(numbers)))


async def test_an_iteration_tells_what_was_in_it(client: Client) -> None:
    async with client.stream("?events=iterations") as stream:
        await client.ask()
        record = (await stream.next("iterations"))["iterations"][0]
    assert record["prefill_tokens"] > 0
    assert record["decode_tokens"] == record["finetune_tokens"] == record["finetune_units"] == 0
    assert 0 < record["prefill_ms"] <= record["latency_ms"]
    assert record.keys() >= {"at_s", "decision_ms", "budget_ms", "predicted_ms", "preempted", "free_pages"}


async def test_a_stream_goes_on_where_the_last_one_broke_off(client: Client) -> None:
    async with client.stream() as stream:
        await client.ask()
        last = await stream.next("iterations")
    seen = last["iterations"][-1]["number"]
    await client.ask()
    async with client.stream(**{"Last-Event-ID": last["id"]}) as stream:
        numbers = await stream.numbers(8)
    assert numbers == list(range(seen + 1, seen + 1 + len(numbers)))


async def test_a_stream_may_begin_with_what_was_before(client: Client) -> None:
    await client.ask()
    newest = (await client.get("/v1/status"))["totals"]["iterations"]
    async with client.stream("?backlog=3") as stream:
        assert (await stream.numbers(1)) == [newest - 2, newest - 1, newest]


@pytest.mark.parametrize("stale", ["1-5", "x", "", "999999999999-1", "-"])
async def test_the_place_in_another_daemons_stream_is_nowhere(client: Client, stale: str) -> None:
    await client.ask()
    async with client.stream("?events=iterations", **{"Last-Event-ID": stale}) as stream:
        before = (await client.get("/v1/status"))["totals"]["iterations"]
        await client.ask()
        assert (await stream.numbers(1))[0] == before + 1


async def test_a_pair_and_the_version_that_it_makes_are_told(client: Client) -> None:
    async with client.stream("?events=pair,version") as stream:
        pair_id = await client.teach("ada")
        pair, version = await stream.next(), await stream.next()
    while not (rows := (await client.get("/v1/adapters/ada"))["series"]):  # noqa: ASYNC110
        await asyncio.sleep(0.05)  # it is told at once, and on disk a moment later
    (row,) = rows
    assert pair["event"] == "pair"
    assert (pair["adapter"], pair["pair_id"], pair["version"]) == ("ada", pair_id, 0)
    assert pair["delta_nats"] == pytest.approx(row["logp_difference"])
    assert pair["reward_margin"] == pytest.approx(row["reward_margin"])
    assert pair["win"] == bool(row["win"])
    assert version["event"] == "version"
    assert (version["adapter"], version["version"], version["reason"]) == ("ada", 1, "trained")


async def test_what_became_of_a_pair_is_told_when_it_can_be_asked_for(client: Client) -> None:
    async with client.stream("?events=outcomes") as stream:
        pair_id = await client.teach("eda")
        told = await stream.next()
        (row,) = (await client.get("/v1/adapters/eda"))["versions"]
    assert (told["adapter"], told["pairs"]) == ("eda", [{"pair_id": pair_id, "state": "trained", "reason": ""}])
    assert row["version"] == 1


async def test_every_adapters_answer_to_its_first_prompt_is_told_and_can_be_asked_for(client: Client) -> None:
    users = {"fay", "gus", "hal"}
    async with client.stream("?events=answer") as stream:
        for user in sorted(users):
            await client.teach(user)
        told: set[tuple[str, int]] = set()
        while {adapter for adapter, _ in told} < users:
            event = await stream.next()
            # Other tests' adapters may answer, too.
            told |= {(event["adapter"], event["version"])} if event["adapter"] in users else set()
        stories = {user: await client.get(f"/v1/adapters/{user}/story") for user in users}
    assert told == {(user, 1) for user in users}
    assert all(story["answers"][-1]["answer"] is not None for story in stories.values())


async def test_a_rollback_is_told(client: Client) -> None:
    async with client.stream("?events=version") as stream:
        await client.teach("roll")
        while (told := await stream.next())["adapter"] != "roll":
            pass
        await client.post("/v1/adapters/roll/rollback", version=0)
        told = await stream.next()
    assert (told["adapter"], told["version"], told["reason"]) == ("roll", 2, "rollback to 0")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("events=status,noise", "events"),
        ("events=", "events"),
        ("backlog=-1", "backlog"),
        ("backlog=2001", "backlog"),
        ("backlog=²", "backlog"),
    ],
)
async def test_bad_wishes_are_named(client: Client, query: str, param: str) -> None:
    answer = await client.get(f"/v1/events?{query}")
    assert (answer["status"], answer["error"]["param"]) == (400, param)


async def test_streams_end_when_the_daemon_stops(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    with running(tmp_path / "run", model) as daemon:
        async with client_of(daemon) as client, client.stream() as stream:
            await stream.next("status")
            daemon.signal(signal.SIGTERM)
            with pytest.raises(EOFError):
                await stream.next("no such event")
        assert await asyncio.to_thread(daemon.wait) == 0, daemon.log


async def test_one_caller_has_a_share_of_the_streams_and_no_more(live: LiveDaemon) -> None:
    connector = aiohttp.UnixConnector(str(live.socket), limit=0)
    async with aiohttp.ClientSession("http://edged", connector=connector) as session:
        client = Client(session)
        streams = [client.stream("?events=version") for _ in range(8)]
        for stream in streams:
            await stream.__aenter__()
        answer = await client.get("/v1/events")
        assert (answer["status"], answer["error"]["code"]) == (429, "too_many_readers")
        assert "reads 8 streams of events already" in answer["error"]["message"]
        for stream in streams:
            await stream.__aexit__(None, None, None)
        while (await client.get("/v1/events?events=none"))["status"] != 400:
            pass


async def test_a_client_that_leaves_while_it_joins_is_gone(tmp_path: Path) -> None:
    lets_go = threading.Event()
    feed = Feed(asyncio.get_running_loop(), lambda since: [], lambda: {"waited": lets_go.wait(30)}, dict)
    lifecycle = Lifecycle(phase="ready")
    jobs = SimpleNamespace(adapters=NO_ADAPTERS)
    parts = SimpleNamespace(engine=SimpleNamespace(error=None), feed=feed, job_runner=jobs)
    lifecycle.services = cast(Services, parts)
    runner = web.AppRunner(make_app(Settings(), lifecycle), handler_cancellation=True)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(tmp_path / "s")).start()
        async with asyncio.timeout(10):
            _, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
            writer.write(b"GET /v1/events HTTP/1.1\r\nHost: edged\r\n\r\n")
            while not feed.readers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert len(feed.readers) == 1
            writer.close()
            while feed.readers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not lets_go.is_set(), "it was not waited for"
    finally:
        lets_go.set()
        await runner.cleanup()


@root_only
def test_clients_beyond_the_bound_are_turned_away() -> None:
    with open_folder() as folder:
        model = save_tiny(folder / "tiny")
        with running(folder / "run", model, api__socket_mode="0666") as daemon, ExitStack() as stack:
            for i in range(64):
                assert b" 200 OK" in first_line(stack, daemon, uid=40_000 + i // 8)
            assert b" 429 " in first_line(stack, daemon, uid=50_000)


def first_line(stack: ExitStack, daemon: LiveDaemon, uid: int) -> bytes:
    """Of the answer to an account that opens a stream and keeps it."""
    raw = stack.enter_context(socket.socket(socket.AF_UNIX))
    raw.settimeout(30)
    os.seteuid(uid)
    try:
        raw.connect(str(daemon.socket))
    finally:
        os.seteuid(0)
    raw.sendall(b"GET /v1/events?events=version HTTP/1.1\r\nHost: edged\r\n\r\n")
    return raw.recv(4096).partition(b"\r\n")[0]


# -- the feed alone ----------------------------------------------------------------------------------------------------


def scored(adapter: str, split: Any = "prequential") -> PairScored:
    return PairScored(1, adapter, 0, split, -1.0, -2.0, -1.5, -1.5, 0.1, 0.6)


async def told_to(sees: str) -> list[str]:
    """Adapters of whom a reader hears that may hear of `sees` alone."""
    feed = Feed(asyncio.get_running_loop(), lambda since: [], dict, dict)
    reader = EventReader({"pair", "version"}, lambda adapter: adapter == sees, lambda: None, "")
    await feed.join(reader)
    feed.on_records([scored("ada"), VersionPublished("ben", 1, 0, "trained"), scored("ben"), scored("ben", "held_out")])
    await asyncio.sleep(0)
    feed.close()
    heard = []
    while event := await reader.waiting.get():
        heard.append(f"{event.adapter} {event.name}")
    feed.readers.discard(reader)
    return heard


async def test_of_other_users_nothing_is_told() -> None:
    assert await told_to("ada") == ["ada pair"]
    assert await told_to("ben") == ["ben version", "ben pair"], "held-out scores are not of the series"
    assert await told_to("eve") == []


async def test_a_reader_that_does_not_read_is_dropped() -> None:
    dropped = asyncio.Event()
    reader = EventReader({"status"}, lambda adapter: True, dropped.set, "")
    for _ in range(feeds._WAITING):
        reader.offer(Event("status", {}))
    assert not dropped.is_set()
    reader.offer(Event("pair", {}))
    assert not dropped.is_set(), "it did not ask for that one"
    reader.offer(Event("status", {}))
    assert dropped.is_set()


async def test_nothing_runs_while_nobody_watches() -> None:
    asked = 0

    def iterations(since: int) -> list[Any]:
        nonlocal asked
        asked += 1
        return []

    feed = Feed(asyncio.get_running_loop(), iterations, dict, dict)
    reader = EventReader({"status"}, lambda adapter: True, lambda: None, "")
    await feed.join(reader)
    (poller,) = [task for task in asyncio.all_tasks() if task.get_name() == "edged-feed"]
    feed.readers.discard(reader)
    await poller
    asked_then = asked
    await asyncio.sleep(2 * feeds.POLL_S)
    assert asked == asked_then


@pytest.mark.slow
async def test_a_client_that_stands_still_is_cut_off(live: LiveDaemon) -> None:
    """The buffers of its connection fill, then what waits for it. Were it not dropped, it could read on for ever."""
    async with client_of(live) as client:
        while (await client.get("/v1/status"))["totals"]["iterations"] < feeds.MAX_BACKLOG:
            await client.ask(tokens=400)
        reader, writer = await asyncio.open_unix_connection(str(live.socket), limit=1024)
        writer.write(b"GET /v1/events?backlog=2000 HTTP/1.1\r\nHost: edged\r\n\r\n")
        await asyncio.sleep(2 * feeds._WAITING * feeds.POLL_S * feeds._STATUS_EVERY)
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionResetError):
                while await reader.read(1 << 20):
                    pass
        assert reader.at_eof() or isinstance(reader.exception(), ConnectionResetError)
        writer.close()
