"""The user box: whose names it offers, and what it says of another's before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from edged.settings.access import token_hash
from examples.quickstart.daemon import free_port
from tests.api.live import LiveDaemon, running
from tests.models import save_tiny
from tests.page.browser import PATIENT_MS, Person, accessible, chromium, opened

TOKENS = [
    {"name": "phone", "roles": ["use", "train"], "users": ["ann", "team-*"]},
    {"name": "reader", "roles": ["use"], "users": ["ann"]},
    {"name": "watcher", "roles": ["use"], "users": ["ben"]},
    {"name": "desk", "roles": ["admin"], "users": []},
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module", autouse=True)
def daemon(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[LiveDaemon]:
    """With tokens that are their own names; `ben` has learned something."""
    folder = tmp_path_factory.mktemp("speaker")
    model = save_tiny(folder / "tiny", max_position_embeddings=512)
    tokens = [{**token, "sha256": token_hash(str(token["name"]))} for token in TOKENS]
    settings = {
        "api__listen": f"127.0.0.1:{port}",
        "access__tokens": json.dumps(tokens),
        "serving__default_max_tokens": 8,
    }
    with running(folder / "run", model, **settings) as live:
        with live.http() as http:
            pair = {"user": "ben", "prompt": "?", "chosen": "a b c", "rejected": "d e f"}
            http.post("/v1/feedback", json=pair).raise_for_status()
        yield live


@contextmanager
def shown_to(token: str, browser: Browser, port: int, remembered: str | None = None) -> Iterator[Page]:
    """The page as the holder of a token has it; `remembered` is the name of an earlier visit."""
    with opened(browser, port, expected="401") as page:
        page.get_by_role("textbox", name="Token").fill(token)
        if remembered is not None:
            page.evaluate("name => localStorage.setItem('edged-user', name)", remembered)
        page.keyboard.press("Enter")
        expect(page.locator("#connection")).to_have_text("live")
        yield page


def test_somebody_begins_under_a_name_of_its_own(browser: Browser, port: int) -> None:
    with shown_to("phone", browser, port, remembered="guest") as page:
        expect(page.get_by_label("as", exact=True)).to_have_value("ann")
        expect(page.locator("#serving")).to_have_text("base, learning")
        assert page.locator("#users option").evaluate_all("all => all.map(each => each.value)") == ["ann"]
        answer = Person(page).asks("How do I cook rice?")
        expect(answer.locator(".facts-line")).to_contain_text("tokens in")


def test_an_admin_begins_as_a_guest(browser: Browser, port: int) -> None:
    with shown_to("desk", browser, port) as page:
        expect(page.get_by_label("as", exact=True)).to_have_value("guest")


def test_a_question_under_anothers_name_is_not_sent(browser: Browser, port: int) -> None:
    with shown_to("phone", browser, port) as page:
        person, field = Person(page), page.get_by_label("as", exact=True)
        expect(field).to_have_value("ann")
        person.is_called("ben")
        expect(page.locator("#user-problem")).to_have_text('"ben" is not for you: you may speak for ann, team-*.')
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(page.locator("#serving")).to_be_hidden()
        accessible(page)
        person.box.fill("Who is it?")
        person.box.press("Enter")
        expect(field).to_be_focused()
        expect(page.locator("article")).to_have_count(0)
        assert person.box.input_value() == "Who is it?"
        person.is_called("team-one")
        expect(page.locator("#user-problem")).to_be_hidden()
        answer = person.asks("Who is it?")
        expect(answer.locator(".facts-line")).to_contain_text("tokens in")


def test_who_may_not_teach_is_promised_no_learning(browser: Browser, port: int) -> None:
    with shown_to("reader", browser, port) as page:
        expect(page.locator("#serving")).to_have_text("base")
        answer = Person(page).asks("How do I cook rice?")
        expect(answer.locator(".candidate")).to_have_count(1)
        expect(answer.get_by_role("button", name="Good")).to_have_count(0)


@pytest.mark.parametrize(("token", "buttons"), [("watcher", 0), ("desk", 1)])
def test_going_back_is_offered_to_who_may(token: str, buttons: int, browser: Browser, port: int) -> None:
    with shown_to(token, browser, port) as page:
        Person(page).is_called("ben")
        expect(page.locator("#versions tr.current")).to_contain_text("serving", timeout=PATIENT_MS)
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.get_by_role("button", name="Go back to version 0")).to_have_count(buttons, timeout=PATIENT_MS)
        expect(page.get_by_text("Your role may not go back.")).to_have_count(1 - buttons)


def test_a_question_waits_until_the_page_knows_who_asks(browser: Browser, port: int) -> None:
    def refuse(route: Route) -> None:
        route.fulfill(status=503, json={"error": {"message": "not yet", "code": "loading"}})

    with opened(browser, port, expected="401|503") as page:
        page.route("**/v1/events*", refuse)
        page.route("**/v1/status", refuse, times=1)
        page.get_by_role("textbox", name="Token").fill("phone")
        page.keyboard.press("Enter")
        expect(page.locator("#connection")).to_have_text("not yet", timeout=PATIENT_MS)
        person = Person(page)
        person.box.fill("How do I cook rice?")
        person.box.press("Enter")
        expect(page.locator("#user-problem")).to_have_text("not yet")
        person.box.press("Enter")
        expect(person.answer.locator(".facts-line")).to_contain_text("tokens in", timeout=PATIENT_MS)
        expect(page.get_by_label("as", exact=True)).to_have_value("ann")
