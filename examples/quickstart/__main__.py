"""`tools/quickstart`: edged's main job, live in the terminal."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.live import Live

from edged.client.client import Client, DaemonError
from examples.quickstart.daemon import TemporaryDaemon
from examples.quickstart.lessons import DEMO, LENGTHS, Lesson
from examples.quickstart.people import Crowd, Exam
from examples.quickstart.screen import Moment, closing, live_screen, plain_line

ROOT = Path(__file__).parents[2]
REFRESH_S = 0.5
PLAIN_REFRESH_S = 5.0
SETTLE_S = 15.0
"""Longest wait for the last pairs to be learned before the second exam."""
EXAM_QUESTIONS = 8
MIN_WIDTH = 96
"""Least width of a terminal for the live screen; a narrower one gets plain lines."""
MAX_WIDTH = 140
PICTURE_WIDTH = 110


@contextlib.contextmanager
def signals_put_off() -> Iterator[None]:
    """Have signals that end the program come at the end: a process that has begun is known by then."""
    caught: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: caught.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if caught:
            signal.raise_signal(caught[0])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", default="demo", show_default=True, help="demo, smollm2 (made by tools/smollm2), or a folder.")
@click.option(
    "--seconds",
    type=click.FloatRange(5),
    help=f"Length of the live part [{DEMO.seconds:g}; other models {LENGTHS.seconds:g}].",
)
@click.option(
    "--rate",
    type=click.FloatRange(0.1),
    help=f"Background requests per second [{DEMO.requests_per_s:g}; other models {LENGTHS.requests_per_s:g}].",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Other questions, other moments.")
@click.option(
    "--picture", type=click.Path(dir_okay=False, path_type=Path), help="Save the live screen's last state as SVG."
)
@click.option("--keep", is_flag=True, help="Leave the daemon running at the end.")
def main(model: str, seconds: float | None, rate: float | None, seed: int, picture: Path | None, keep: bool) -> None:
    """Start a daemon in a temporary folder, let two users with opposite tastes teach it while other requests keep
    coming, and show what each of them gets in the end."""
    lesson = DEMO if model == "demo" else LENGTHS
    served = model if model == "demo" else str(model_folder(model))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    console = Console(highlight=False)
    daemon, kept = None, False
    try:
        with signals_put_off():
            daemon = TemporaryDaemon("--model", served)
        console.print(f"starting the daemon with the model {model} ...")
        console.print(f"ready after {daemon.wait_until_ready():.1f} s on {daemon.socket}")
        with daemon.client() as client:
            broken = show(
                console, daemon, client, lesson, seconds or lesson.seconds, rate or lesson.requests_per_s, seed, picture
            )
        kept = keep
        go_on(console, daemon if keep else None)
        if broken:
            click.echo(f"edged: the adapter broke the language: {broken[0]}", err=True)
            sys.exit(1)
    except DaemonError as error:
        click.echo(f"edged: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("stopped; the daemon and its folder are removed", err=True)
        sys.exit(130)
    finally:
        if daemon is not None and not kept:
            daemon.remove()


def model_folder(model: str) -> Path:
    """Return the folder of a model; SmolLM2's is made once, among the user's caches."""
    if model != "smollm2":
        folder = Path(model).expanduser().resolve()
        if not (folder / "config.json").is_file():
            raise click.UsageError(f'"{model}" has no config.json: give demo, smollm2, or a folder of save_pretrained')
        return folder
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edged" / "SmolLM2-135M-Instruct"
    if not folder.is_dir():
        made = subprocess.run([ROOT / "tools" / "smollm2", folder])
        if made.returncode:
            sys.exit(2)
    return folder


def show(
    console: Console,
    daemon: TemporaryDaemon,
    client: Client,
    lesson: Lesson,
    seconds: float,
    rate: float,
    seed: int,
    picture: Path | None,
) -> list[str]:
    """Show the exam, the live part, the exam again, and the changes. Returns the broken answers of the second exam."""
    exam = Exam.sit(daemon, seed, EXAM_QUESTIONS, lesson)
    crowd = Crowd(daemon, seed, rate, lesson)
    crowd.start()
    try:
        if console.is_terminal and console.width >= MIN_WIDTH:
            watch(console, client, crowd, seconds)
        else:
            report(console, client, crowd, seconds)
        if picture:
            save_picture(picture, live_screen(read(client, lesson, seconds, seconds), crowd, PICTURE_WIDTH))
    finally:
        crowd.stop()
    settle(client)
    for taste in lesson.tastes:
        exam.repeat(daemon, taste.user)
    closing(console, exam, read(client, lesson, seconds, seconds))
    return [text for texts in exam.after.values() for text in exam.broken(texts)]


def watch(console: Console, client: Client, crowd: Crowd, seconds: float) -> None:
    """Show the live screen for `seconds`."""
    started = time.monotonic()
    width = min(console.width, MAX_WIDTH)
    with Live(console=console, auto_refresh=False, screen=console.height < 40) as live:
        while (elapsed := time.monotonic() - started) < seconds:
            live.update(live_screen(read(client, crowd.lesson, elapsed, seconds), crowd, width), refresh=True)
            _check(crowd)
            time.sleep(REFRESH_S)


def report(console: Console, client: Client, crowd: Crowd, seconds: float) -> None:
    """Print the same as plain lines."""
    console.print(crowd.lesson.pace)
    started = time.monotonic()
    while (elapsed := time.monotonic() - started) < seconds:
        time.sleep(min(PLAIN_REFRESH_S, seconds - elapsed))
        console.print(plain_line(read(client, crowd.lesson, time.monotonic() - started, seconds)), soft_wrap=True)
        _check(crowd)


def save_picture(path: Path, screen: RenderableType) -> None:
    """Write the screen as an SVG image."""
    recorder = Console(record=True, width=PICTURE_WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
    recorder.print(screen)
    recorder.save_svg(str(path), title="tools/quickstart")


def read(client: Client, lesson: Lesson, elapsed_s: float, total_s: float) -> Moment:
    """Read all values of the screen from the daemon."""
    known = {item["adapter"] for item in client.get("/v1/adapters")["adapters"]}
    adapters: dict[str, dict[str, Any]] = {
        taste.user: client.get(f"/v1/adapters/{taste.user}") for taste in lesson.tastes if taste.user in known
    }
    return Moment(elapsed_s, total_s, client.get("/v1/status"), adapters)


def settle(client: Client) -> None:
    """Wait until the feedback is learned, at most SETTLE_S."""
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end and client.get("/v1/status")["queue"]["finetune"]:
        time.sleep(0.2)


def go_on(console: Console, daemon: TemporaryDaemon | None) -> None:
    """Print the commands to try next."""
    commands = [
        ("edged chat --user ada", "talk; /up, /down, /edit, /regen and /pick teach ada's adapter"),
        ("edged metrics", "a verdict per user, and the figures behind it"),
        ("edged status --watch", "what the daemon does now"),
    ]
    if daemon is None:
        commands.insert(
            0, ("edged serve", "starts a daemon of your own; tools/quickstart --keep leaves this one running")
        )
        console.print("\nThe daemon and its temporary folder are removed now. How to go on:")
    else:
        commands.append((f"kill {daemon.process.pid}; rm -r {daemon.folder}", "ends it"))
        console.print(f"\nThe daemon keeps running on {daemon.socket}. How to go on:")
        console.print(f"  export EDGED_SOCKET={daemon.socket}", soft_wrap=True)
    console.print("  source .venv/bin/activate")
    for command, what in commands:
        console.print(f"  [bold]{command}[/]  [dim]# {what}[/]", soft_wrap=True)


def _check(crowd: Crowd) -> None:
    if crowd.failure:
        raise DaemonError(crowd.failure)


if __name__ == "__main__":
    main()
