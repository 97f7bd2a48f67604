"""A listener that asks for no token is not for web pages of other sites."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port

from edged.api.app import make_app
from edged.api.services import Lifecycle
from edged.settings.load import ApiSettings, Settings


async def answer(
    headers: dict[str, str], token: str = "", unix: Path | None = None, path: str = "/v1/status"
) -> tuple[int, str | None]:
    """Status and error code of the answer to a request with these headers."""
    runner = web.AppRunner(make_app(Settings(api=ApiSettings(token=token)), Lifecycle()))
    await runner.setup()
    port = unused_port()
    site = web.UnixSite(runner, str(unix)) if unix else web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    connector = aiohttp.UnixConnector(str(unix)) if unix else aiohttp.TCPConnector()
    try:
        async with aiohttp.ClientSession(connector=connector) as client:
            url = f"http://127.0.0.1:{port}{path}"
            headers = {name: value.replace("PORT", str(port)) for name, value in headers.items()}
            async with client.get(url, headers=headers) as response:
                body = await response.json() if response.content_type == "application/json" else {}
                return response.status, body.get("error", {}).get("code")
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Host": "localhost:PORT"},
        {"Host": "[::1]:PORT"},
        {"Origin": "http://127.0.0.1:PORT"},
        {"Host": "localhost:PORT", "Origin": "http://localhost:PORT"},
    ],
)
async def test_programs_and_the_listeners_own_pages_are_served(headers: dict[str, str]) -> None:
    assert (await answer(headers))[0] == 503, "the model is being loaded"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "evil.example"}, "forbidden_host"),
        ({"Host": "evil.example:PORT", "Origin": "http://evil.example:PORT"}, "forbidden_host"),
        ({"Host": "127.0.0.1.evil.example"}, "forbidden_host"),
        ({"Host": "[::1"}, "forbidden_host"),
        ({"Host": ""}, "forbidden_host"),
        ({"Origin": "https://evil.example"}, "forbidden_origin"),
        ({"Origin": "http://127.0.0.1:1"}, "forbidden_origin"),
        ({"Origin": "null"}, "forbidden_origin"),
    ],
)
async def test_other_sites_pages_are_refused(headers: dict[str, str], code: str) -> None:
    assert await answer(headers) == (403, code)


NAVIGATED = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
@pytest.mark.parametrize("path", ["/v1/status", "/v1/backup", "/", "/page/main.js"])
async def test_other_sites_pages_embed_nothing(site: str, path: str) -> None:
    embedded = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    assert await answer(embedded, path=path) == (403, "forbidden_site")
    framed = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
    assert await answer(framed, path=path) == (403, "forbidden_site")


async def test_a_link_leads_to_the_page_and_nowhere_else() -> None:
    assert (await answer({"Sec-Fetch-Site": "cross-site", **NAVIGATED}, path="/"))[0] == 200
    assert await answer({"Sec-Fetch-Site": "cross-site", **NAVIGATED}, path="/v1/backup") == (403, "forbidden_site")
    for site in ("none", "same-origin"):
        assert (await answer({"Sec-Fetch-Site": site, **NAVIGATED}))[0] == 503, "the model is being loaded"


async def test_a_token_is_proof_enough() -> None:
    foreign = {"Host": "box.example", "Origin": "https://box.example"}
    assert (await answer(foreign, token="secret"))[1] == "invalid_api_key", "the token alone decides"


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "edged"},
        {"Host": ""},
        {"Host": "[::1]:8137"},
        {"Host": "192.168.1.5:8137", "Origin": "http://192.168.1.5:8137"},
        {"Host": "localhost:8137", "Origin": "http://localhost:8137", "Sec-Fetch-Site": "same-origin"},
    ],
)
async def test_programs_and_the_forwarded_page_use_the_unix_socket(tmp_path: Path, headers: dict[str, str]) -> None:
    assert (await answer(headers, unix=tmp_path / "s"))[0] == 503, "the model is being loaded"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "evil.example:8137"}, "forbidden_host"),
        ({"Host": "evil.example:8137", "Origin": "http://evil.example:8137"}, "forbidden_host"),
        ({"Host": "localhost:8137", "Origin": "https://evil.example"}, "forbidden_origin"),
        ({"Host": "localhost:8137", "Origin": "null"}, "forbidden_origin"),
        ({"Host": "localhost:8137", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "image"}, "forbidden_site"),
    ],
)
async def test_other_sites_pages_are_refused_over_a_forwarded_unix_socket_whatever_the_token(
    tmp_path: Path, headers: dict[str, str], code: str
) -> None:
    assert await answer(headers, unix=tmp_path / "s") == (403, code)
    assert await answer(headers, unix=tmp_path / "s", token="secret") == (403, code)


LISTED = ("app://obsidian.md", "https://chat.example")


async def asked(method: str, headers: dict[str, str], token: str = "") -> tuple[int, dict[str, str]]:
    """Status and headers of the answer to a page where two sites' pages may use edged."""
    settings = Settings(api=ApiSettings(token=token, browser_origins=list(LISTED)))
    runner, port = web.AppRunner(make_app(settings, Lifecycle())), unused_port()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        async with (
            aiohttp.ClientSession() as client,
            client.request(method, f"http://127.0.0.1:{port}/v1/chat/completions", headers=headers) as response,
        ):
            return response.status, dict(response.headers)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("token", ["", "secret"])
@pytest.mark.parametrize("origin", [*LISTED, "APP://obsidian.md"])
async def test_a_listed_sites_pages_ask_first_and_read_the_answer(token: str, origin: str) -> None:
    wants = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}
    status, told = await asked("OPTIONS", {"Origin": origin, **wants, "Sec-Fetch-Site": "cross-site"}, token)
    assert status == 204
    assert told["Access-Control-Allow-Origin"] == origin
    assert told["Access-Control-Allow-Headers"] == wants["Access-Control-Request-Headers"]
    assert "POST" in told["Access-Control-Allow-Methods"]
    sent = {"Origin": origin, "Authorization": f"Bearer {token}", "Sec-Fetch-Site": "cross-site"}
    status, told = await asked("POST", sent, token)
    assert status == 503, "the model is being loaded, and the page may read that"
    assert (told["Access-Control-Allow-Origin"], told["Vary"]) == (origin, "Origin")
    assert "X-Request-Id" in told["Access-Control-Expose-Headers"]


@pytest.mark.parametrize(
    "origin", ["https://chat.example.evil", "http://chat.example", "null", "https://other.example"]
)
async def test_pages_of_other_sites_get_no_leave(origin: str) -> None:
    wants = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    for token, statuses in (("", (403, 403)), ("secret", (503, 401))):
        for method, wanted in zip(("OPTIONS", "POST"), statuses, strict=True):
            status, told = await asked(method, wants, token)
            assert status == wanted
            assert "Access-Control-Allow-Origin" not in told


async def test_a_rebound_name_is_refused_whatever_its_origin() -> None:
    status, _ = await asked("POST", {"Host": "evil.example", "Origin": LISTED[0]})
    assert status == 403


@pytest.mark.parametrize("origin", ["*", "https://chat.example/", "chat.example", "null"])
def test_an_origin_is_written_as_browsers_send_it(origin: str) -> None:
    with pytest.raises(ValueError, match="browser_origins"):
        ApiSettings(browser_origins=[origin])
