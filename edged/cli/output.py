"""Output of the commands: JSON, tables, progress, number formats, a screen that refreshes."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from edged.runtime.printable import printable

Renderable = Any
"""Anything that rich prints; rich is imported only where it is used, as importing it would slow down --help."""
PIPE_WIDTH = 140
"""Least width, in characters, of a table that goes to a file or pipe."""


def echo(text: str = "", nl: bool = True, err: bool = False, **style: Any) -> None:
    """Print a text, of whatever origin, on stdout or stderr; no character of it controls the terminal."""
    click.secho(printable(text), nl=nl, err=err, **style)


def print_json(value: Any) -> None:
    """Print `value` as JSON on stdout."""
    echo(json.dumps(value, indent=2, ensure_ascii=False))


def make_console() -> Any:
    """Return rich's console on stdout, at least PIPE_WIDTH wide if stdout is a file or pipe."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(PIPE_WIDTH, console.width))


def print_text(text: Any) -> None:
    """Print a string as it is and anything else with rich; of a list, each item; None prints nothing."""
    for part in text if isinstance(text, list) else [text]:
        if isinstance(part, str):
            echo(part)
        elif part is not None:
            make_console().print(_Printable(part))


class _Printable:
    """A renderable for rich in whose texts no character controls the terminal."""

    def __init__(self, renderable: Renderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        for segment in console.render(self._renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def make_table(*columns: str, rows: Iterable[Sequence[Any]] = (), fold: bool = False, **style: Any) -> Renderable:
    """Return rich's table, title and caption left-aligned.

    Columns whose name begins with ">" are right-aligned; `fold` wraps long cells anywhere instead of cutting them.
    """
    from rich.table import Table

    table = Table(title_justify="left", caption_justify="left", **style)
    for name in columns:
        side: Any = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=side, overflow="fold" if fold else "ellipsis")
    for row in rows:
        table.add_row(*row)
    return table


def show_progress(line: str) -> None:
    """Print one line on stderr; on a terminal the next call overwrites it, and "" clears it."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{printable(line)}", nl=False, err=True)
    elif line:
        echo(line, err=True)


@contextmanager
def progress_bar(what: str, quiet: bool = False) -> Iterator[Callable[[int, int | None, str], None]]:
    """Show a progress bar on stderr if that is a terminal; yields a function of (done, total, description)."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=quiet or not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, now: bar.update(task, completed=done, total=total, description=printable(now))


def number(value: Any, digits: int = 2, unit: str = "") -> str:
    """Format a number with its unit; None is a dash."""
    if value is None:
        return "–"
    # Adding zero turns a rounded -0.0 into 0.0.
    text = f"{value:,}" if isinstance(value, int) else f"{round(value, digits) + 0.0:,.{digits}f}"
    return f"{text} {unit}" if unit else text


def percent(share: Any) -> str:
    """Format a share of 0..1 in percent; None is a dash."""
    return "–" if share is None else f"{100 * share:.0f} %"


def moment(text: str | None) -> str:
    """Format a time stamp of the API (ISO, UTC) to the second; None is a dash."""
    return text[:19].replace("T", " ") if text else "–"


def short(text: str, most: int = 60) -> str:
    """Return a text on one line of at most `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


def size(size_bytes: int) -> str:
    """Format a number of bytes: 512 B, 3.4 MiB."""
    value, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def duration(seconds: float) -> str:
    """Format seconds: 45 s, 3 min 20 s, 2 h 5 min, 4 d 3 h."""
    whole = int(seconds)
    for size, unit, smaller, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {small_unit}"
    return f"{whole} s"


def show(
    fetch: Callable[[], dict[str, Any]],
    render: Callable[[dict[str, Any]], Renderable],
    line: Callable[[dict[str, Any]], str],
    *,
    as_json: bool,
    watch: bool,
    interval: float,
) -> None:
    """Show `fetch()` once, or with `watch` until Ctrl-C: a live screen on a terminal, else one `line` per refresh.

    With `as_json` every refresh is one JSON document (one line each when watching). `interval` is in seconds.
    """
    if not watch:
        return print_json(fetch()) if as_json else print_text(render(fetch()))
    console = make_console()
    try:
        while as_json or not console.is_terminal:
            data = fetch()
            echo(json.dumps(data, ensure_ascii=False) if as_json else line(data))
            time.sleep(interval)
        from rich.live import Live

        with Live(_Printable(render(fetch())), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(_Printable(render(fetch())), refresh=True)
    except KeyboardInterrupt:
        return None
