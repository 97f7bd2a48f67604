"""Take the pictures in docs/images: the page with the demo model, taught by two users under load, and `edged doctor`.

    .venv/bin/python tools/screenshots.py page
    sudo .venv/bin/python tools/screenshots.py doctor --config /etc/edged/edged.toml

The page needs Chromium (`--browser`). Must not show anything that was not measured: the page's daemon runs as
`tools/quickstart` runs it, and the doctor's picture is what the command wrote.
"""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import click
from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console
from rich.text import Text

import checkout  # noqa: F401
from examples.quickstart.daemon import TemporaryDaemon
from examples.quickstart.people import Crowd

USER = "ada"
QUESTIONS = ("How do I boil potatoes?", "What should I wear for a walk to the lake?")
SWITCHES = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
DESKTOP, PHONE = (1360, 960), (390, 844)
TERMINAL_COLUMNS = 120
FOLDER = click.option(
    "--folder", type=click.Path(file_okay=False, path_type=Path), default="docs/images", show_default=True
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Take the pictures in docs/images."""


@main.command(context_settings={"ignore_unknown_options": True})
@FOLDER
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def doctor(folder: Path, options: tuple[str, ...]) -> None:
    """Write doctor.svg: what `edged doctor OPTIONS` says of this box."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "edged.cli", "doctor", *options]
    terminal = {"FORCE_COLOR": "1", "COLUMNS": str(TERMINAL_COLUMNS), "TERM": "xterm-256color"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | terminal)
    recorder = Console(record=True, width=TERMINAL_COLUMNS, file=io.StringIO(), highlight=False)
    recorder.print(Text.from_ansi(f"$ sudo edged doctor\n{done.stdout.rstrip()}"))
    recorder.save_svg(str(folder / "doctor.svg"), title="edged doctor")


@main.command()
@FOLDER
@click.option("--browser", default="/usr/bin/chromium", show_default=True, help="Chromium's program.")
@click.option(
    "--seconds", type=click.FloatRange(1), default=90.0, show_default=True, help="How long users teach before."
)
@click.option("--rate", type=click.FloatRange(0.1), default=2.0, show_default=True, help="Other requests per second.")
@click.option("--seed", type=int, default=1, show_default=True)
def page(folder: Path, browser: str, seconds: float, rate: float, seed: int) -> None:
    """Write page-desktop.png and page-phone.png to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    address = f"127.0.0.1:{_free_port()}"
    daemon = TemporaryDaemon("--listen", address)
    try:
        daemon.wait_until_ready()
        crowd = Crowd(daemon, seed, rate)
        crowd.start()
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(executable_path=browser, args=list(SWITCHES))
            desktop = _open(chromium, address, DESKTOP, "light")
            time.sleep(seconds)
            _talk(desktop)
            desktop.screenshot(path=folder / "page-desktop.png")
            desktop.close()
            phone = _open(chromium, address, PHONE, "dark")
            time.sleep(10)
            phone.evaluate("scrollTo(0, document.querySelector('.learning').offsetTop - 6)")
            phone.wait_for_timeout(1500)
            phone.screenshot(path=folder / "page-phone.png")
            chromium.close()
        crowd.stop()
    finally:
        daemon.remove()


def _open(chromium: Browser, address: str, size: tuple[int, int], scheme: str) -> Page:
    page = chromium.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    page.goto(f"http://{address}/")
    page.get_by_label("as", exact=True).fill(USER)
    page.keyboard.press("Tab")
    return page


def _talk(page: Page) -> None:
    """Ask, pick, and ask again."""
    for number, question in enumerate(QUESTIONS, 1):
        page.get_by_label("Your message").fill(question)
        page.keyboard.press("Enter")
        page.locator(f".answer[aria-busy=false] >> nth={number - 1}").wait_for()
        if number < len(QUESTIONS):
            page.get_by_role("button", name="Pick answer A").click()
    # Until a tested version stands beside the untrained one.
    page.wait_for_function("document.querySelector('#after').value !== '0'", timeout=120_000)
    page.wait_for_timeout(1000)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
