"""A real Chromium, and the page in it as a person has it: what it must never do fails the test at its end."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
SWITCHES = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DESKTOP, PHONE = {"width": 1280, "height": 860}, {"width": 360, "height": 740}
_WATCH_POLICY = (
    "addEventListener('securitypolicyviolation', e => console.error('policy:', e.violatedDirective, e.blockedURI))"
)
PATIENT_MS = 60_000
"""Nothing is timed: a busy machine may take long."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser; the test is skipped where there is none."""
    if not Path(CHROMIUM).exists():
        pytest.skip(f"there is no Chromium at {CHROMIUM}: install it, or name it in CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(SWITCHES))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, port: int, path: str = "/", expected: str = "(?!)", **context: Any) -> Iterator[Page]:
    """The page of a daemon on loopback. Nothing but `expected` may be in the console, and nothing asked for elsewhere.

    What the page's policy refuses, and exceptions, are messages in the console too.
    """
    with browser.new_context(viewport=context.pop("viewport", DESKTOP), **context) as session:
        page = session.new_page()
        page.set_default_timeout(PATIENT_MS)
        expect.set_options(timeout=PATIENT_MS)
        problems: list[str] = []
        requests: set[str] = set()
        page.on(
            "console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.add(urlsplit(request.url).netloc))
        page.add_init_script(_WATCH_POLICY)
        page.goto(f"http://127.0.0.1:{port}{path}")
        yield page
        unexpected = [problem for problem in problems if not re.search(expected, problem)]
        assert not unexpected, unexpected
        # The icon is a data URL.
        assert requests - {""} == {f"127.0.0.1:{port}"}


class Person:
    """What somebody does on the page."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.box = page.get_by_label("Your message")
        self.answers = page.locator("article.answer[aria-busy=false]")

    @property
    def answer(self) -> Any:
        """The latest answer."""
        return self.answers.last

    def is_called(self, name: str) -> Person:
        """Type a name into the user box."""
        self.page.get_by_label("as", exact=True).fill(name)
        self.page.keyboard.press("Tab")
        return self

    def asks(self, question: str) -> Any:
        """Send a question; returns the whole answer."""
        before = self.answers.count()
        self.box.fill(question)
        self.box.press("Enter")
        expect(self.answers).to_have_count(before + 1, timeout=PATIENT_MS)
        return self.answer

    def wants_one_answer(self) -> Person:
        """Untick "two answers"."""
        self.page.get_by_label("two answers").uncheck()
        return self

    def picks(self, letter: str) -> None:
        """Pick a candidate of the latest answer, and have it noted."""
        self.answer.get_by_role("button", name=f"Pick answer {letter}").click()
        self.reads(r"^Pairs? [\d, ]+ for ")

    def reads(self, note: str) -> None:
        """Wait for what the page says below the latest answer."""
        expect(self.answer.locator(".note")).to_have_text(re.compile(note), timeout=PATIENT_MS)


def accessible(page: Page) -> None:
    """No serious violation that axe-core finds; elements that it cannot judge are not counted."""
    found = Axe().run(page)
    bad = [
        (item["id"], [node["target"] for node in item["nodes"]])
        for item in found.response["violations"]
        if item["impact"] in ("serious", "critical", "moderate")
    ]
    assert bad == []


def fits(page: Page) -> None:
    """Nothing is wider than the window."""
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= page.evaluate("innerWidth"), width
