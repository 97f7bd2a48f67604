"""`edged metrics`: how well each user's adapter predicts their preferences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from edged.cli.options import interval_option, json_option, with_client
from edged.cli.output import make_table, number, percent, show
from edged.cli.plot import line_plot
from edged.client.client import Client, DaemonError

if TYPE_CHECKING:
    from rich.console import RenderableType

PLOT_WIDTH = 36
PLOT_HEIGHT = 6
FIRST_PAIR = 10
"""Where curves begin: means over fewer pairs say nothing."""

NO_ADAPTER = 'no adapter yet: feedback creates one, e.g. in "edged chat --user NAME"'
LANGUAGE = {
    "held_out_kl_nats": "KL {:.2f} nats/token",
    "neutral_nll_change": "neutral text {:+.1%}",
    "chosen_logratio_per_token_recent": "chosen answers {:+.2f} nats/token",
    "answer_tokens_recent": "{:.0f} tokens an answer",
    "answer_repetition_recent": "{:.0%} repeated",
}


@click.command()
@click.option("--user", "-u", metavar="NAME", help="Only this user's adapter.")
@click.option("--watch", "-w", is_flag=True, help="Refresh until Ctrl-C.")
@interval_option
@json_option
@with_client
def metrics(client: Client, user: str | None, watch: bool, interval_s: float, as_json: bool) -> None:
    """How well each adapter knows its user: a verdict, reward accuracy and more.

    All are means over the pairs as they came, each scored by the adapter before it is trained on. CLPD is the mean of
    log p(chosen) - log p(rejected) in nats; the reward margin is the same against the base model, times beta.
    """

    def fetch() -> dict[str, Any]:
        return fetch_metrics(client, user, with_series=not as_json)

    show(fetch, screen, line, as_json=as_json, watch=watch, interval_s=interval_s)


def fetch_metrics(client: Client, user: str | None = None, *, with_series: bool) -> dict[str, Any]:
    """`{"adapters": [summary, ...]}`, each with its `series` when asked. Raises DaemonError for an unknown `user`."""
    adapters = client.get("/v1/adapters")["adapters"]
    if user:
        known = ", ".join(item["adapter"] for item in adapters) or "none yet"
        adapters = [item for item in adapters if item["adapter"] == user]
        if not adapters:
            raise DaemonError(f'no adapter is called "{user}": it appears with the first pair (known: {known})')
    if with_series:
        adapters = [client.get(f"/v1/adapters/{quote(item['adapter'], safe='')}") for item in adapters]
    return {"adapters": adapters}


def line(data: dict[str, Any]) -> str:
    """One line of plain text per refresh."""
    return (
        "  |  ".join(
            f"{verdict(item)}; {item['pairs_trained']}/{item['pairs_seen']} pairs, reward accuracy "
            f"{_share(item, 'reward_accuracy')}, win rate {_share(item, 'win_rate')}, CLPD "
            f"{number(item['clpd_recent'], 1)} nats"
            for item in data["adapters"]
        )
        or "no adapter yet"
    )


def screen(data: dict[str, Any]) -> RenderableType:
    """The verdicts, the table, then a plot for every adapter with pairs enough."""
    from rich.console import Group
    from rich.text import Text

    if not data["adapters"]:
        return Text(NO_ADAPTER)
    plots = [drawn for item in data["adapters"] if (drawn := plot(item))]
    return Group(*(Text(verdict(item)) for item in data["adapters"]), table(data["adapters"]), *plots)


def verdict(item: dict[str, Any]) -> str:
    """One adapter's verdict, with the adapter's name and version, what is held of it, and its language's health."""
    known = ", ".join(form.format(item[key]) for key, form in LANGUAGE.items() if item.get(key) is not None)
    parts = (f"{item['adapter']} v{item['version']}: {item['verdict']}", held(item), known and f"language: {known}")
    return "; ".join(filter(None, parts))


def held(item: dict[str, Any]) -> str:
    """How many of an adapter's pairs are held, why, and the step that settles it; "" where there are none."""
    count, name = item["pairs_quarantined"], item["adapter"]
    if not count:
        return ""
    pairs = f"{count} pair{'s' * (count > 1)} of {name} {'are' if count > 1 else 'is'} held"
    return f"{pairs} ({item['quarantine_reason']}); if this was you: edged quarantine release --user {name}"


def _share(item: dict[str, Any], key: str) -> str:
    """A share of the recent pairs with its interval: 86 % (74 to 93)."""
    interval = item[f"{key}_recent_interval"]
    ends = f" ({100 * interval[0]:.0f} to {100 * interval[1]:.0f})" if interval else ""
    return percent(item[f"{key}_recent"]) + ends


def table(adapters: list[dict[str, Any]]) -> RenderableType:
    """One row per adapter: means over the last pairs."""
    from rich.box import SIMPLE_HEAD

    return make_table(
        *("adapter", ">pairs", ">reward acc.", ">win rate", ">margin", ">loss", ">held out", ">CLPD"),
        rows=map(_row, adapters),
        fold=True,
        box=SIMPLE_HEAD,
        caption="pairs trained/seen; means over the last 50 pairs (in brackets: 95 % intervals), each scored before it "
        "was trained on; held out: reward accuracy; KL and CLPD in nats",
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def _row(item: dict[str, Any]) -> list[str]:
    return [
        f"{item['adapter']} v{item['version']}",
        f"{item['pairs_trained']}/{item['pairs_seen']}",
        *(_share(item, key) for key in ("reward_accuracy", "win_rate")),
        *(number(item[f"{key}_recent"]) for key in ("reward_margin", "loss")),
        f"{percent(item['held_out_reward_accuracy'])}, KL {number(item['held_out_kl_nats'])}",
        number(item["clpd_recent"], 1),
    ]


def plot(item: dict[str, Any], width: int = PLOT_WIDTH, height: int = PLOT_HEIGHT) -> RenderableType | None:
    """An adapter's running reward accuracy, win rate and CLPD over its pairs, side by side; None for too few pairs."""
    from rich.columns import Columns
    from rich.panel import Panel
    from rich.text import Text

    series = [point for point in item.get("series", ()) if point["pair"] >= FIRST_PAIR]
    if len(series) < 2:
        return None
    win, clpd, accuracy = ([point[key] for point in series] for key in ("win_rate", "clpd", "reward_accuracy"))
    plots = (
        ("reward accuracy", "yellow", line_plot(accuracy, width, height, low=0.0, high=1.0, guide=0.5)),
        ("win rate", "green", line_plot(win, width, height, low=0.0, high=1.0, guide=0.5)),
        ("CLPD in nats", "cyan", line_plot(clpd, width, height, guide=0.0)),
    )
    columns = [Text("\n".join([title, *rows]), style=colour, no_wrap=True) for title, colour, rows in plots]
    return Panel(
        Columns(columns, padding=(0, 2)),
        title=f"{item['adapter']}, pairs {series[0]['pair']} to {series[-1]['pair']}",
        title_align="left",
        border_style="dim",
        expand=False,
    )
