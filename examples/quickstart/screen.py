"""The screens of the quickstart: live, plain lines without a terminal, and the closing page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from edged.cli.output import number, percent
from edged.cli.plot import line_plot
from edged.cli.status import BINS, FIRST_PAIR, bins_panel, headline, held
from examples.quickstart.lessons import Taste
from examples.quickstart.people import Crowd, Exam, Exchange

PLOT_HEIGHT = 5
SERVING_WIDTH = 46
BINS_MARGIN = 28
"""Width of the bins' panel in columns, without the bars."""
EXCHANGE_LINES = (("?", "bold"), ("+", ""), ("-", "dim strike"))
LINES_EACH = 2
CURVES = (("reward accuracy", "reward_accuracy", "cyan"), ("win rate", "win_rate", "green"))


@dataclass(frozen=True)
class Moment:
    """A reading of all values on the screen: `adapters` by user, with their series; empty until the first pair."""

    elapsed_s: float
    total_s: float
    status: dict[str, Any]
    adapters: dict[str, dict[str, Any]]


def live_screen(moment: Moment, crowd: Crowd, width: int) -> RenderableType:
    """Return the whole screen, `width` columns wide."""
    progress = Table.grid(padding=(0, 1), expand=True)
    progress.add_column(ratio=1)
    progress.add_column(justify="right")
    left = max(0.0, moment.total_s - moment.elapsed_s)
    progress.add_row(
        ProgressBar(total=moment.total_s, completed=min(moment.elapsed_s, moment.total_s)), f"{left:.0f} s left"
    )
    half = (width - 2) // 2
    users = [
        _user_panel(taste, moment.adapters.get(taste.user), crowd.exchanges[taste.user], half)
        for taste in crowd.lesson.tastes
    ]
    top = Table.grid(padding=(0, 1))
    top.add_row(
        _serving_panel(moment.status), bins_panel(moment.status, min(BINS, width - SERVING_WIDTH - BINS_MARGIN))
    )
    side_by_side = Table.grid(padding=(0, 1))
    side_by_side.add_row(*users)
    return Group(headline(moment.status), progress, Text(crowd.lesson.pace, style="dim"), top, side_by_side)


def plain_line(moment: Moment) -> str:
    """Return the same values in one line."""
    status = moment.status
    rates, latency, last = status["rates"], status["latency"], (status["bins"] or [{}])[-1]
    filling = "/".join(number(last.get(f"{kind}_tokens")) for kind in ("prefill", "decode", "finetune"))
    parts = [
        f"[{moment.elapsed_s:3.0f} s] {number(rates['output_tokens_per_s'], 0)} tok/s, "
        f"TTFT {number(latency['ttft_ms']['p50'], 0)} ms, TBT {number(latency['tbt_ms']['p50'], 1)} ms, "
        f"queue {status['queue']['waiting']}, bin {filling} tokens of prefill/decode/fine-tune"
    ]
    parts += [
        f"{user} v{item['version']} {item['pairs_trained']}/{item['pairs_seen']} pairs, {item['verdict']}"
        for user, item in moment.adapters.items()
    ]
    return "; ".join(parts)


def closing(console: Console, exam: Exam, moment: Moment) -> None:
    """Print the closing page: per user one question's answers before and after, a summary of all, and what edged
    says of itself."""
    for taste in exam.lesson.tastes:
        index = exam.shown(taste)
        before, after = exam.before, exam.after[taste.user]
        item = moment.adapters.get(taste.user)
        body = Table.grid(padding=(0, 2))
        body.add_column(style="dim")
        body.add_row("question", exam.questions[index])
        body.add_row("before", before[index])
        body.add_row("after", Text(after[index], style=taste.colour))
        body.add_row(
            "in all",
            f"{len(after)} questions that were new: taste met {exam.liking(taste, before):+.2f} before, "
            f"{exam.liking(taste, after):+.2f} after (-2: the opposite, or broken; +2: fully)",
        )
        if exam.lesson.judges_fluency:
            broken = len(exam.broken(after))
            fluent = f"{len(after) - broken} of {len(after)} are fluent"
            body.add_row("language", f"[red]{fluent}: the adapter broke the others[/]" if broken else fluent)
        if item:
            body.add_row("verdict", Text(item["verdict"]))
            body.add_row("edged believes", Text(believed(taste.user, item)))
        if item and item["pairs_quarantined"]:
            body.add_row("held", Text(held(item)))
        console.print(Panel(body, title=f"{taste.user} likes {taste}", title_align="left", border_style=taste.colour))


def believed(user: str, item: dict[str, Any]) -> str:
    """Return what edged believes of a user's taste, in one line."""
    sides = (
        (word, [each["text"] for each in item["beliefs"] or [] if each["likes"] is likes])
        for word, likes in (("likes", True), ("does not like", False))
    )
    return "; ".join(f"{user} {word}: {', '.join(texts)}" for word, texts in sides if texts) or "nothing yet"


def _serving_panel(status: dict[str, Any]) -> RenderableType:
    queue, rates, latency, tuning = status["queue"], status["rates"], status["latency"], status["finetune"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    grid.add_row(
        "output", f"{number(rates['output_tokens_per_s'], 0)} tok/s, {number(rates['requests_per_s'], 1)} requests/s"
    )
    for title, key, digits in (("TTFT", "ttft_ms", 0), ("TBT", "tbt_ms", 1)):
        grid.add_row(
            title, f"p50 {number(latency[key]['p50'], digits)} ms, p95 {number(latency[key]['p95'], digits)} ms"
        )
    grid.add_row("queue", f"{queue['waiting']} waiting, {queue['prefill']} prefill, {queue['decode']} decode")
    grid.add_row("learning", f"{tuning['pairs_trained']} pairs, {tuning['steps']} steps, {queue['finetune']} queued")
    return Panel(grid, title="serving", title_align="left", border_style="dim", width=SERVING_WIDTH, height=7)


def _user_panel(taste: Taste, item: dict[str, Any] | None, exchange: Exchange, width: int) -> RenderableType:
    inside = width - 4
    series = [point for point in item["series"] if point["pair"] >= FIRST_PAIR] if item else []
    plots = []
    for title, key, colour in CURVES:
        values = [point[key] for point in series]
        rows = line_plot(values, inside // 2 - 1, PLOT_HEIGHT, ends=(0.0, 1.0), guide=0.5)
        heading = f"{title} {percent(values[-1] if values else None)}"
        plots.append(Text("\n".join([heading, *rows]), style=colour, no_wrap=True))
    facts, belief = "no pair yet", ""
    if item:
        belief = _fitted(f"believed: {believed(taste.user, item)}", inside, 1)
        kl, waiting = number(item["held_out_kl_nats"]), item["pairs_quarantined"]
        facts = f"v{item['version']}, {item['pairs_trained']}/{item['pairs_seen']} pairs trained, KL {kl} nats/token"
        facts += f", {waiting} held" if waiting else ""
    said = (exchange.question, exchange.chosen, exchange.rejected)
    lines = [
        Text(f"{mark} {_fitted(text, inside - 2, LINES_EACH)}", style=style or taste.colour)
        for (mark, style), text in zip(EXCHANGE_LINES, said, strict=True)
    ]
    return Panel(
        Group(Text(facts, style="dim"), Columns(plots, padding=(0, 1)), Text(belief, style="dim"), *lines),
        title=f"[{taste.colour}]{taste.user}[/] likes it {taste}",
        title_align="left",
        border_style="dim",
        width=width,
        height=PLOT_HEIGHT + LINES_EACH * len(EXCHANGE_LINES) + 5,
    )


def _fitted(text: str, width: int, lines: int) -> str:
    """Return `text` on one line, cut to the room of `lines` lines."""
    flat = " ".join(text.split())
    room = width * lines - 2
    return flat if len(flat) <= room else flat[: room - 1] + "…"
