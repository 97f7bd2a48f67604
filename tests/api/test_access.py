"""Other accounts of the box: each speaks for itself, sees its own, and learns nothing of the others.

These clients connect under another uid, which the daemon hears of from the kernel.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from aiohttp import web
from click.testing import CliRunner

from edged.api.app import make_app
from edged.api.routes import ROUTES
from edged.api.services import Lifecycle, Services
from edged.cli.main import cli
from edged.settings.load import Settings
from edged.store.jobs.jobs import NO_ADAPTERS
from tests.api.accounts import ANN, BOB, Client, account, open_folder, root_only
from tests.api.live import LiveDaemon, running
from tests.models import save_tiny
from tests.test_daemon import tcp_port

pytestmark = root_only
SCRAPER = "bin"
"""One more account that every Linux has."""
PAIR = {"prompt": "q", "chosen": "good", "rejected": "bad"}


@pytest.fixture(scope="module")
def daemon() -> Iterator[LiveDaemon]:
    with open_folder() as folder:
        save_tiny(folder / "tiny", max_position_embeddings=512)
        settings = {"api__socket_mode": "0666", "store__save_every_s": 0.05, "cache__share_across": "user"}
        with running(folder / "run", folder / "tiny", **settings, api__listen="127.0.0.1:0") as live:
            for name in (ANN, BOB):
                with live.http() as http:
                    for i in range(6):
                        pair = {"user": name, "prompt": f"{name} {i}", "chosen": f"good {i}", "rejected": f"bad {i}"}
                        assert http.post("/v1/feedback", json=pair).status_code == 200
            wait_until_on_disk(live, ANN, BOB)
            yield live


def wait_until_on_disk(live: LiveDaemon, *names: str) -> None:
    deadline = time.monotonic() + 30
    with live.http() as http:
        while any(http.get(f"/v1/adapters/{name}/export").status_code != 200 for name in names):
            assert time.monotonic() < deadline, live.log
            time.sleep(0.05)


@pytest.fixture
def ann(daemon: LiveDaemon) -> Client:
    return Client(ANN, daemon.socket)


@pytest.fixture
def bob(daemon: LiveDaemon) -> Client:
    return Client(BOB, daemon.socket)


def test_an_account_asks_and_teaches_under_its_own_name(ann: Client) -> None:
    answer = ann.ask(user=ANN)
    assert answer.status == 200
    assert ann.post("/v1/feedback", {"completion_id": answer.json["id"], "signal": "up"}).status == 200
    assert ann.post("/v1/feedback", {"user": ANN, **PAIR}).status == 200
    assert ann.ask(model=f"tiny:{ANN}").status == 200
    assert ann.ask().status == 200, "the base model is nobody's"


def test_a_refusal_names_the_user_the_caller_and_the_rule(ann: Client) -> None:
    answer = ann.ask(user=BOB)
    assert answer.status == 403
    assert answer.code == "forbidden_user"
    message = answer.json["error"]["message"]
    assert f'user "{BOB}" is not for peer "{ANN}" (uid 65534), who may speak for {ANN}' in message
    assert "no rule of [access]" in message


@pytest.mark.parametrize("name", [BOB, "neverwas"])
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", {"prompt": "a", "user": "NAME"}),
        ("POST", "/v1/completions", {"prompt": "a", "model": "tiny:NAME"}),
        ("POST", "/v1/completions", {"prompt": "a", "model": "tiny:NAME", "user": ANN}),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "user": "NAME"}),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "model": "tiny:NAME"}),
        ("POST", "/v1/responses", {"input": "a", "user": "NAME"}),
        ("POST", "/v1/responses", {"input": "a", "model": "tiny:NAME"}),
        ("GET", "/v1/models/tiny:NAME", None),
        ("POST", "/v1/feedback", {"user": "NAME", **PAIR}),
        ("POST", "/v1/feedback", {"user": "NAME", "completion_id": "cmpl-0", "signal": "up"}),
        ("GET", "/v1/feedback?user=NAME", None),
        ("GET", "/v1/adapters/NAME", None),
        ("POST", "/v1/adapters/NAME/rollback", {"version": 0}),
        ("GET", "/v1/adapters/NAME/export", None),
        ("DELETE", "/v1/adapters/NAME", None),
    ],
)
def test_every_route_refuses_another_user_whether_it_exists_or_not(
    ann: Client, method: str, path: str, body: dict[str, object] | None, name: str
) -> None:
    sent = json.loads(json.dumps(body).replace("NAME", name))
    answer = ann.call(method, path.replace("NAME", name), sent)
    assert (answer.status, answer.code) == (403, "forbidden_user")


def test_another_users_completion_looks_like_one_that_never_was(ann: Client, bob: Client) -> None:
    mine = bob.ask(user=BOB).json["id"]
    theirs = ann.post("/v1/feedback", {"completion_id": mine, "signal": "up"})
    never = ann.post("/v1/feedback", {"completion_id": "cmpl-" + "0" * 32, "signal": "up"})
    assert (theirs.status, theirs.code) == (never.status, never.code) == (404, "unknown_completion")
    assert theirs.json["error"]["message"].replace(mine, "ID") == never.json["error"]["message"].replace(
        "cmpl-" + "0" * 32, "ID"
    )
    assert bob.post("/v1/feedback", {"completion_id": mine, "signal": "up"}).status == 200


def test_lists_show_ones_own(ann: Client, daemon: LiveDaemon) -> None:
    assert [item["adapter"] for item in ann.get("/v1/adapters").json["adapters"]] == [ANN]
    assert [item["id"] for item in ann.get("/v1/models").json["data"]] == ["tiny", f"tiny:{ANN}"]
    assert {line["user"] for line in ann.get("/v1/feedback").lines} == {ANN}
    with daemon.http() as http:
        assert {item["adapter"] for item in http.get("/v1/adapters").json()["adapters"]} >= {ANN, BOB}


def test_the_status_names_nobody_else_while_another_learns(ann: Client, daemon: LiveDaemon) -> None:
    seen: set[str] = set()
    deadline = time.monotonic() + 20
    with daemon.http() as http:
        while BOB not in seen and time.monotonic() < deadline:
            for i in range(20):
                pair = {"user": BOB, "prompt": f"s{time.monotonic()}", "chosen": f"good {i}", "rejected": "bad"}
                http.post("/v1/feedback", json=pair)
            for _ in range(10):
                seen |= set(http.get("/v1/status").json()["finetune"]["active_adapters"])
                assert BOB not in ann.get("/v1/status").json["finetune"]["active_adapters"]
    assert BOB in seen


def test_an_own_adapter_can_be_read_taken_back_and_forgotten(bob: Client, daemon: LiveDaemon) -> None:
    assert bob.get(f"/v1/adapters/{BOB}").json["adapter"] == BOB
    assert bob.get(f"/v1/adapters/{BOB}/export").status == 200
    assert bob.post(f"/v1/adapters/{BOB}/rollback", {"version": 0}).status == 200


def test_an_adapter_is_exported_by_its_user_alone_who_cannot_read_the_data_folder(daemon: LiveDaemon) -> None:
    daemon.data.chmod(0o700)
    with open_folder() as home:
        home.chmod(0o777)
        for name, code in ((ANN, 1), (BOB, 0)):
            command = ["adapters", "export", BOB, "--output", str(home / name), "--socket", str(daemon.socket)]
            with account(name):
                with pytest.raises(PermissionError):
                    list(daemon.data.iterdir())
                result = CliRunner().invoke(cli, command)
            assert result.exit_code == code, result.output
        assert [path.name for path in home.iterdir()] == [BOB]
        assert {path.name for path in (home / BOB).iterdir()} == {
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
        }


async def test_a_route_without_a_role_is_for_admins() -> None:
    lifecycle = Lifecycle()
    app = make_app(Settings(), lifecycle)

    async def secret(request: web.Request) -> web.Response:
        return web.Response(text="secret")

    app.router.add_get("/v1/new", secret)
    jobs = SimpleNamespace(adapters=NO_ADAPTERS)
    feed = SimpleNamespace(close=lambda: None)
    parts = SimpleNamespace(engine=SimpleNamespace(error=None), feed=feed, job_runner=jobs)
    lifecycle.phase, lifecycle.services = "ready", cast(Services, parts)
    runner = web.AppRunner(app)
    await runner.setup()
    with open_folder() as folder:
        await web.UnixSite(runner, str(folder / "s")).start()
        (folder / "s").chmod(0o666)
        try:
            refused = await asyncio.to_thread(Client(ANN, folder / "s").get, "/v1/new")
            assert (refused.status, refused.code) == (403, "forbidden_role")
            assert (await asyncio.to_thread(Client("root", folder / "s").get, "/v1/new")).data == b"secret"
        finally:
            await runner.cleanup()


def test_every_role_belongs_to_a_route_that_is_there() -> None:
    routes = make_app(Settings(), Lifecycle()).router.routes()
    served = {(route.method, route.resource.canonical) for route in routes if route.resource}
    assert {(route.method, route.name) for route in ROUTES} <= served


def test_a_prefix_of_another_tenant_is_not_found_and_ones_own_is(ann: Client, bob: Client) -> None:
    secret = "the code of the safe is " + "4711 " * 20

    def cached(client: Client, **fields: object) -> int:
        usage = client.ask(prompt=secret, **fields).json["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(ann) == 0
    assert cached(ann) > 0
    assert cached(bob) == 0
    assert cached(bob) > 0


def test_loopback_callers_are_known_by_the_owner_of_their_socket(daemon: LiveDaemon) -> None:
    over_tcp = Client(ANN, tcp_port(daemon.process.pid or 0))
    assert over_tcp.ask(user=ANN).status == 200
    refused = over_tcp.ask(user=BOB)
    assert (refused.status, refused.code) == (403, "forbidden_user")
    assert over_tcp.get(f"/v1/adapters/{BOB}").status == 403


def test_a_client_that_closes_at_once_over_tcp_is_not_taken_for_root(daemon: LiveDaemon) -> None:
    port = tcp_port(daemon.process.pid or 0)
    daemon.signal(signal.SIGSTOP)
    try:
        raw = Client(ANN, port).connected()
        raw.sendall(f"DELETE /v1/adapters/{BOB} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        raw.close()
        assert unowned(port), "the socket lives on without an owner"
    finally:
        daemon.signal(signal.SIGCONT)
    assert daemon.idle()
    with daemon.http() as http:
        assert http.get(f"/v1/adapters/{BOB}").status_code == 200


def unowned(port: int) -> list[str]:
    """Uids of half-closed sockets towards `port` that no process owns any more; Linux before 6.16 shows 0."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    half_closed = ("04", "05")
    return [line[7] for line in lines if line[2].endswith(f":{port:04X}") and line[3] in half_closed and line[9] == "0"]


@pytest.fixture(scope="module")
def ruled() -> Iterator[LiveDaemon]:
    """One where account `nobody` is an application that speaks for all ann's, `daemon` may only ask, `bin` scrapes."""
    rules = [
        {"peers": [f"user:{ANN}"], "roles": ["use", "train"], "users": ["ann*", "bo"]},
        {"peers": ["gid:1"], "roles": ["use"]},
        {"peers": [f"user:{SCRAPER}"], "roles": ["metrics"]},
    ]
    with open_folder() as folder:
        save_tiny(folder / "tiny", max_position_embeddings=512)
        with running(folder / "run", folder / "tiny", api__socket_mode="0666", access__rules=json.dumps(rules)) as live:
            yield live


def test_a_rule_says_for_whom_an_application_speaks(ruled: LiveDaemon) -> None:
    application = Client(ANN, ruled.socket)
    assert application.ask(user="ann").status == 200
    assert application.ask(user="ann.smith").status == 200
    assert application.ask(user="bo").status == 200
    refused = application.ask(user="bob")
    assert "ann*, bo (access.rules[0])" in refused.json["error"]["message"]
    assert application.ask(user=ANN).status == 403, "the rule replaces the default"


def test_a_peer_without_the_role_is_told_which_it_needs(ruled: LiveDaemon) -> None:
    reader = Client(BOB, ruled.socket)
    asked = reader.ask(user=BOB)
    assert asked.status == 200
    for answer in (
        reader.post("/v1/feedback", {"completion_id": asked.json["id"], "signal": "up"}),
        reader.post("/v1/feedback", {"user": BOB, **PAIR}),
        reader.get("/v1/feedback"),
        reader.call("DELETE", f"/v1/adapters/{BOB}"),
        reader.post(f"/v1/adapters/{BOB}/rollback", {"version": 0}),
        reader.get(f"/v1/adapters/{BOB}/export"),
    ):
        assert (answer.status, answer.code) == (403, "forbidden_role")
        assert 'needs the role "train"' in answer.json["error"]["message"]


def test_who_scrapes_metrics_reads_them_and_nothing_else(ruled: LiveDaemon) -> None:
    scraper = Client(SCRAPER, ruled.socket)
    answer = scraper.get("/metrics")
    assert answer.status == 200
    assert b"edged_ready 1" in answer.data
    for route in ROUTES:
        if route.role not in ("anybody", "metrics"):
            path = route.name.replace("{name}", SCRAPER).replace("{", "").replace("}", "")
            refused = scraper.call(route.method, path, {})
            assert (refused.status, refused.code) == (403, "forbidden_role"), route
    for other in (ANN, BOB):
        assert Client(other, ruled.socket).get("/metrics").code == "forbidden_role"


def test_who_may_not_train_teaches_nothing_by_the_next_turn(ruled: LiveDaemon) -> None:
    talk = [{"role": "user", "content": "Name a big city, please"}]

    def learns(client: Client, user: str) -> bool:
        first = client.post("/v1/chat/completions", {"messages": talk, "user": user, "max_tokens": 8, "seed": 1}).json
        answer = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        again = [*talk, answer, {"role": "user", "content": "No, I meant a small city"}]
        assert client.post("/v1/chat/completions", {"messages": again, "user": user, "max_tokens": 8}).status == 200
        return signals(ruled, user) > 0

    assert learns(Client(ANN, ruled.socket), "ann")
    assert not learns(Client(BOB, ruled.socket), BOB)


def signals(live: LiveDaemon, user: str) -> int:
    import sqlite3

    with sqlite3.connect(f"file:{live.data}/edged.db?mode=ro", uri=True) as db:
        return int(db.execute("SELECT count(*) FROM signals WHERE user = ?", [user]).fetchone()[0])


def test_root_and_the_daemons_own_account_are_admins(ruled: LiveDaemon) -> None:
    assert os.geteuid() == 0
    with ruled.http() as http:
        body = {"prompt": "a", "max_tokens": 1, "user": "whoever"}
        assert http.post("/v1/completions", json=body).status_code == 200
