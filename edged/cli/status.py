"""The commands `edged status`, the daemon's current state, and `edged metrics`, how well adapters predict users."""

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import click

from edged.cli.options import json_option, with_client
from edged.cli.output import Renderable, duration, make_table, number, percent, show, size
from edged.cli.plot import line_plot, sparkline
from edged.cli.store import describe
from edged.cli.story import story_line, story_screen
from edged.client.client import Client, DaemonError

BINS = 32
"""Number of iterations that the daemon reports."""
USERS = 8
"""Number of users of whom the screen tells how well their readers are served, the worst first."""
BIN_ROWS = (
    ("prefill", "prefill_tokens", "cyan", "tok"),
    ("decode", "decode_tokens", "green", "tok"),
    ("fine-tune", "finetune_tokens", "magenta", "tok"),
    ("units", "finetune_units", "magenta", "units"),
    ("latency", "latency_ms", "yellow", "ms"),
)
PLOT_SIZE = (36, 6)
"""Columns and rows of a plot."""
FIRST_PAIR = 10
"""First pair of a curve: means over fewer pairs say little."""

NO_ADAPTER = 'no adapter yet: feedback creates one, e.g. in "edged chat --user NAME"'
LANGUAGE = {
    "held_out_kl_nats": "KL {:.2f} nats/token",
    "neutral_nll_change": "neutral text {:+.1%}",
    "chosen_logratio_per_token_recent": "chosen answers {:+.2f} nats/token",
    "answer_tokens_recent": "{:.0f} tokens an answer",
    "answer_repetition_recent": "{:.0%} repeated",
}


def watched(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--watch`, `--interval` and `--json`, the options of `output.show`."""
    interval = click.option("--interval", type=click.FloatRange(0.1), default=1.0, help="Seconds per refresh.")
    watch = click.option("--watch", "-w", is_flag=True, help="Refresh until Ctrl-C.")
    return watch(interval(json_option(command)))


@click.command()
@click.option("--all", "-a", "everything", is_flag=True, help="Speed, queues, pages, bins, the box as well.")
@watched
@with_client
def status(client: Client, everything: bool, **how: Any) -> None:
    """What the daemon does now, in one line, and what is not as it should be; with --all or --watch all the rest."""
    shown = screen if everything or how["watch"] else summed_up
    show(lambda: client.get("/v1/status"), _or_of_nodes(shown), _or_of_nodes(line), **how)


def _or_of_nodes(render: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """Return `render`, which shows a box's status; of a fleet's ingress each node's verdict is shown."""

    def shown(data: dict[str, Any]) -> Any:
        if "nodes" not in data:
            return render(data)
        return "\n".join(f"{name}: {node['verdict']}" for name, node in data["nodes"].items())

    return shown


def line(data: dict[str, Any]) -> str:
    """Return the status in one line of plain text."""
    queue, rates, latency = data["queue"], data["rates"], data["latency"]
    return (
        f"{data['verdict']}  waiting {queue['waiting']}  prefill {queue['prefill']}  decode {queue['decode']}  "
        f"fine-tune {queue['finetune']}  {number(rates['output_tokens_per_s'], 0)} tok/s  "
        f"TTFT p50 {number(latency['ttft_ms']['p50'], 0)} ms  TBT p50 {number(latency['tbt_ms']['p50'], 1)} ms  "
        f"pairs queued {data['finetune']['pairs_queued']}  trained {data['finetune']['pairs_trained']}"
    )


def screen(data: dict[str, Any]) -> Renderable:
    """Return the status as one screen."""
    from rich.console import Group

    return Group(headline(data), facts(data), bins_panel(data))


def summed_up(data: dict[str, Any]) -> Renderable:
    """Return the heading, and of the figures those alone that say what is wrong or held back."""
    from rich.console import Group

    table = make_table("", "", fold=True, box=None, show_header=False, padding=(0, 2, 0, 0))
    table.columns[0].style = "dim"
    trouble_rows(table, data)
    governors = data["governors"]
    if governors["enabled"] and (governors["memory"]["holds"] or governors["power"]["reasons"]):
        governor_rows(table, governors)
    return Group(headline(data), *([table] if table.row_count else []), "edged status --all tells the rest")


def headline(data: dict[str, Any]) -> Renderable:
    """Return the heading of the screen: version, uptime, model, device, context."""
    from rich.text import Text

    model = data["model"]
    return Text.assemble(
        (f"{data['verdict'][0].upper()}{data['verdict'][1:]}.\n", "bold red" if data["degraded"] else "bold green"),
        ("edged ", "bold"),
        f"{data['version']}  up {duration(data['uptime_s'])}\n",
        (f"{model['name']}", "bold"),
        f"  {model['architecture']}, {_count(model['parameters'])} parameters, {model['dtype']} on {model['device']}, "
        f"context {number(model['max_context_tokens'])} tokens, LoRA on {percent(model['adapted_share'])} of layers",
    )


def facts(data: dict[str, Any]) -> Renderable:
    """Return the status figures as a table with two (name, value) pairs a row."""
    queue, rates, latency, totals = data["queue"], data["rates"], data["latency"], data["totals"]
    pages, prefix, tuning, slo = data["pages"], data["prefix"], data["finetune"], data["slo"]
    table = make_table("", "", "", "", fold=True, box=None, show_header=False, padding=(0, 2, 0, 0))
    table.columns[0].style = table.columns[2].style = "dim"
    trouble_rows(table, data)
    now = f"{queue['waiting']} waiting, {queue['prefill']} in prefill, {queue['decode']} in decode"
    speed = f"{number(rates['output_tokens_per_s'], 0)} tok/s, {number(rates['requests_per_s'], 1)} requests/s"
    table.add_row("requests", now, "output", speed)
    table.add_row("TTFT", _quantiles(latency["ttft_ms"], 0), "TBT", _quantiles(latency["tbt_ms"], 1))
    met = f"TTFT {percent(slo['ttft_attainment'])}, TBT {percent(slo['tbt_attainment'])}"
    table.add_row("in time", met, "iteration", _quantiles(latency["iteration_ms"], 1))
    if data["readers"]["qoe_mean"] is not None:
        reader_rows(table, data["readers"], data["scheduler"]["lent_s"])
    active = f" (now: {', '.join(tuning['active_adapters'])})" if tuning["active_adapters"] else ""
    active = f" ({tuning['practising']} practises)" if tuning["practising"] else active
    pairs = f"{tuning['pairs_queued']} pairs queued, {tuning['pairs_trained']} trained, {tuning['steps']} steps"
    speed = f"{number(rates['pairs_per_s'], 2)} pairs/s, {number(rates['finetune_tokens_per_s'], 0)} tok/s"
    table.add_row("fine-tuning", pairs + active, "learning", speed)
    free = f"{number(pages['free'])} of {number(pages['total'])} free, {number(pages['cached'])} cached prefixes"
    pruned = f", {number(totals['pruned_pages'])} returned by pruning" if totals["pruned_pages"] else ""
    hits = f"{percent(prefix['hit_share'])} of {number(prefix['prompt_tokens'])} prompt tokens"
    table.add_row("pages", free + pruned, "prefix hits", hits)
    table.add_row("prefixes", f"{number(prefix['hit_tokens'])} tokens saved", "offloaded", _offloaded(prefix))
    policy = f"{data['scheduler']['policy']}, {number(data['scheduler']['decision_ms_p50'], 3)} ms a decision"
    table.add_row("scheduler", policy, "cost model", _predictions(data["cost_model"]))
    done = f"{number(totals['requests'])} requests, {number(totals['output_tokens'])} tokens out"
    table.add_row("in all", done, "preempted", number(totals["preemptions"]))
    chosen = f"choices {number(totals['candidate_tokens'])} ({number(totals['candidates_dropped'])} dropped)"
    drafts = f"{number(totals['drafted_tokens'])} tokens, {number(totals['drafted_right'])} right"
    table.add_row("spare room", f"fine-tuning {number(totals['finetune_tokens'])} tokens, {chosen}", "drafts", drafts)
    box_rows(table, data["device"])
    governor_rows(table, data["governors"])
    stored = data["store"]
    table.add_row("database", describe(stored), "feedback", f"{number(stored['rows']['pairs'])} pairs")
    return table


def reader_rows(table: Renderable, readers: dict[str, Any], lent_s: float) -> None:
    """Add rows for how well the latest readers were served, and of the users among them those who were served worst."""
    well = f"QoE {number(readers['qoe_mean'], 3)}, p5 {number(readers['qoe_p5'], 3)}"
    well += f", {percent(readers['qoe_95_share'])} at least 0.95"
    table.add_row("readers", well, "", f"{duration(lent_s)} lent to fine-tuning")
    users = sorted(readers["users"].items(), key=lambda item: item[1]["qoe_mean"])
    told = [f"{user} {number(read['qoe_mean'], 3)} ({number(read['answers'])})" for user, read in users[:USERS]]
    told += [f"{len(users) - USERS} more"] if len(users) > USERS else []
    if told:
        table.add_row("QoE by user", ", ".join(told), "", "")


def trouble_rows(table: Renderable, data: dict[str, Any]) -> None:
    """Add rows for degraded parts, paused learning, quarantined pairs and trust_remote_code; none if all is well."""
    tuning = data["finetune"]
    for sentence in data["degraded"]:
        table.add_row("degraded", sentence, style="red")
    standstill = "" if tuning["enabled"] else "paused, or off (align.enabled)"
    if not standstill and tuning["held"]:
        standstill = "held back by a governor, whose reason is below"
    if why := tuning["reason"] or standstill:
        table.add_row("not learning", why)
    held = data["quarantine"]["pairs"]
    if held is None:
        table.add_row("quarantine", "unknown: the database cannot be read")
    elif held:
        alarm = f" (alarm: {', '.join(tuning['alarms'])})" if tuning["alarms"] else ""
        table.add_row("quarantine", f"{held} pairs wait for a decision{alarm}")
    if data["model"]["trust_remote_code"]:
        table.add_row("warning", "model.trust_remote_code is on: the model's own Python code runs here")


def box_rows(table: Renderable, device: dict[str, Any]) -> None:
    """Add rows for CPU, memory, temperature, GPU and power, as far as the machine reports them."""
    heat = "" if device["temperature_c"] is None else f", {device['temperature_c']:.0f} °C"
    if heat and device["temperature_limit_c"] is not None:
        heat += f" of at most {device['temperature_limit_c']:.0f} °C"
    pressure = device["memory_pressure_some_percent"]
    waited = "" if pressure is None else f", {number(pressure, 0)} % of the time waited for"
    free = f"{size(device['memory_available_bytes'])} of {size(device['memory_total_bytes'])} free"
    cpu = f"{number(device['cpu_percent'], 0)} % of {device['cpu_count']} cores{heat}"
    table.add_row("box", cpu, "memory", f"{size(device['process_rss_bytes'])} used here, {free}{waited}")
    gpu = [] if device["gpu_percent"] is None else [f"{number(device['gpu_percent'], 0)} % busy"]
    if device["gpu_clock_hz"] and device["gpu_clock_max_hz"]:
        gpu.append(f"{device['gpu_clock_hz'] / 1e6:.0f} of {device['gpu_clock_max_hz'] / 1e6:.0f} MHz")
    watts = None if device["power_w"] is None else number(device["power_w"], 1, "W")
    power = list(filter(None, (watts, device["power_mode"], device["on_battery"] and "on battery")))
    if gpu or power:
        table.add_row("GPU", ", ".join(gpu) or "–", "power", ", ".join(power) or "–")


def governor_rows(table: Renderable, governors: dict[str, Any]) -> None:
    """Add rows for what the governors hold back and why, and for energy where it can be measured."""
    if not governors["enabled"]:
        table.add_row("governors", "off (governor.enabled)", "", "")
        return
    memory, power, energy = governors["memory"], governors["power"], governors["energy"]
    reasons, nothing = "; ".join(power["reasons"]), "nothing held back"
    held = f"holds {', '.join(memory['holds'])}: {memory['reason']}" if memory["holds"] else nothing
    share = f"fine-tuning {percent(power['finetune_share'])} of the time: {reasons}" if reasons else nothing
    table.add_row("for neighbours", held, "for heat, power", share)
    if energy is not None:
        token, pair = (number(energy[f"joules_per_{of}"], 2, "J") for of in ("output_token", "pair"))
        table.add_row("energy", f"{token} a token, {pair} a pair", "", "")


def _offloaded(prefix: dict[str, Any]) -> str:
    """Return the state of the KV offload: pages of evicted prefixes that are kept, and tokens restored."""
    offload = prefix["spill"]
    if offload["kind"] == "off":
        return f"nothing, {number(prefix['evicted_pages'])} pages dropped"
    pages = f"{number(offload['pages'])} of {number(offload['capacity'])} pages ({offload['kind']})"
    return f"{pages}, {number(prefix['restored_tokens'])} tokens restored"


def bins_panel(data: dict[str, Any], columns: int = BINS) -> Renderable:
    """Return a panel of sparklines of the last iterations' bins: one column each, the newest on the right."""
    from rich.panel import Panel
    from rich.table import Table

    bins = data["bins"]
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True, min_width=10)
    for title, key, colour, unit in BIN_ROWS:
        values = [item[key] for item in bins]
        last = number(values[-1], 1) if values else "–"
        table.add_row(title, f"[{colour}]{sparkline(values, columns):>{columns}}[/]", f"{last} {unit}")
    return Panel(table, title=f"bins (last {columns} iterations)", title_align="left", border_style="dim", expand=False)


def _predictions(cost: dict[str, Any]) -> str:
    """Return the cost model's error by kind, the source of its first prices, and the device's drift and slowness."""
    known = [(kind, value) for kind, value in cost["mape_percent_by_kind"].items() if value is not None]
    errors = ", ".join(f"{kind} {number(value, 0)} %" for kind, value in known) or "nothing predicted yet"
    source = "a guess" if cost["source"] == "guess" else cost["source"].rsplit("/", 1)[-1]
    speed = f"drift {number(cost['drift'])}, slowness {number(cost['slowness'])}"
    return f"off by {errors}; {source} and {number(cost['iterations'])} iterations, {speed}"


def _quantiles(values: dict[str, Any], digits: int) -> str:
    return ", ".join(f"{name} {number(values[name], digits, 'ms')}" for name in ("p50", "p95"))


def _count(value: int | None) -> str:
    """Format a number of parameters: 1.5 B, 135 M, 40 k."""
    if value is None:
        return "–"
    units = ((10**9, "B"), (10**6, "M"), (10**3, "k"))
    return next((f"{value / size:.1f} {unit}" for size, unit in units if value >= size), str(value))


@click.command()
@click.argument("user", required=False)
@click.option("--story", is_flag=True, help="What USER's adapter learned when, what waits, answers side by side.")
@click.option("--versions", nargs=2, type=click.IntRange(0), metavar="A B", help="Whose answers the story shows.")
@watched
@with_client
def metrics(client: Client, user: str | None, story: bool, versions: tuple[int, int] | None, **how: Any) -> None:
    """How well each adapter knows its user, or USER's: a verdict, reward accuracy and more.

    All are means over the pairs as they came, each scored by the adapter before it is trained on. CLPD is the mean of
    log p(chosen) - log p(rejected) in nats; the reward margin is the same against the base model, times beta.
    """
    if (versions and not story) or (story and not user):
        raise click.UsageError("edged metrics USER --story [--versions A B] tells a user's story")
    if user and story:
        path = f"/v1/adapters/{quote(user, safe='')}/story"
        return show(lambda: client.get(path), lambda data: story_screen(data, versions), story_line, **how)
    with_series = not how["as_json"]
    return show(lambda: fetch_metrics(client, user, with_series=with_series), metrics_screen, metrics_line, **how)


def fetch_metrics(client: Client, user: str | None = None, *, with_series: bool) -> dict[str, Any]:
    """Fetch `{"adapters": [summary, ...]}`, each `with_series` if asked. Raises DaemonError for an unknown `user`."""
    adapters = client.get("/v1/adapters")["adapters"]
    if user:
        known = ", ".join(item["adapter"] for item in adapters) or "none yet"
        adapters = [item for item in adapters if item["adapter"] == user]
        if not adapters:
            raise DaemonError(f'no adapter is called "{user}": it appears with the first pair (known: {known})')
    if with_series:
        adapters = [client.get(f"/v1/adapters/{quote(item['adapter'], safe='')}") for item in adapters]
    return {"adapters": adapters}


def metrics_line(data: dict[str, Any]) -> str:
    """Return all adapters' metrics in one line of plain text."""
    return (
        "  |  ".join(
            f"{verdict(item)}; {item['pairs_trained']}/{item['pairs_seen']} pairs, reward accuracy "
            f"{_share(item, 'reward_accuracy')}, win rate {_share(item, 'win_rate')}, CLPD "
            f"{number(item['clpd_recent'], 1)} nats"
            for item in data["adapters"]
        )
        or "no adapter yet"
    )


def metrics_screen(data: dict[str, Any]) -> Renderable:
    """Return the verdicts, the table, then a plot for every adapter with enough pairs."""
    from rich.console import Group
    from rich.text import Text

    if not data["adapters"]:
        return Text(NO_ADAPTER)
    plots = [drawn for item in data["adapters"] if (drawn := metrics_plot(item))]
    return Group(*(Text(verdict(item)) for item in data["adapters"]), metrics_table(data["adapters"]), *plots)


def beliefs(item: dict[str, Any]) -> str:
    """Return what a taste model believes in a line, such as `likes: short (9 of 10 agree); avoids: "you" (5 of 6)`."""
    said: dict[str, list[str]] = {"likes": [], "avoids": []}
    for each in item.get("beliefs") or ():
        said["likes" if each["likes"] else "avoids"].append(f"{each['text']} ({each['agree']} of {each['of']})")
    return "; ".join(f"{word}: {', '.join(lines)}" for word, lines in said.items() if lines)


def verdict(item: dict[str, Any]) -> str:
    """Return one adapter's verdict with its name and version, its quarantined pairs, and its language figures."""
    known = ", ".join(form.format(item[key]) for key, form in LANGUAGE.items() if item.get(key) is not None)
    parts = (f"{item['adapter']} v{item['version']}: {item['verdict']}", held(item), known and f"language: {known}")
    return "; ".join(filter(None, parts))


def held(item: dict[str, Any]) -> str:
    """Return how many of an adapter's pairs are quarantined, why, and the command that releases them; "" if none."""
    return item["held"] and f"{item['held']}; if this was you: edged quarantine release --user {item['adapter']}"


def _share(item: dict[str, Any], key: str) -> str:
    """Format a share of the recent pairs with its 95 % interval: 86 % (74 to 93)."""
    interval = item[f"{key}_recent_interval"]
    ends = f" ({100 * interval[0]:.0f} to {100 * interval[1]:.0f})" if interval else ""
    return percent(item[f"{key}_recent"]) + ends


def metrics_table(adapters: list[dict[str, Any]]) -> Renderable:
    """Return a table with one row per adapter: means over the last 50 pairs."""
    from rich.box import SIMPLE_HEAD

    return make_table(
        *("adapter", ">pairs", ">reward acc.", ">win rate", ">margin", ">loss", ">held out", ">CLPD"),
        rows=map(_metrics_row, adapters),
        fold=True,
        box=SIMPLE_HEAD,
        caption="pairs trained/seen; means over the last 50 pairs (in brackets: 95 % intervals), each scored before it "
        "was trained on; held out: reward accuracy; KL and CLPD in nats",
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def _metrics_row(item: dict[str, Any]) -> list[str]:
    return [
        f"{item['adapter']} v{item['version']}",
        f"{item['pairs_trained']}/{item['pairs_seen']}",
        *(_share(item, key) for key in ("reward_accuracy", "win_rate")),
        *(number(item[f"{key}_recent"]) for key in ("reward_margin", "loss")),
        f"{percent(item['held_out_reward_accuracy'])}, KL {number(item['held_out_kl_nats'])}",
        number(item["clpd_recent"], 1),
    ]


def metrics_plot(item: dict[str, Any]) -> Renderable | None:
    """Plot an adapter's running reward accuracy, win rate and CLPD over its pairs; None for too few pairs."""
    from rich.columns import Columns
    from rich.panel import Panel
    from rich.text import Text

    series = [point for point in item.get("series", ()) if point["pair"] >= FIRST_PAIR]
    if len(series) < 2:
        return None
    win, clpd, accuracy = ([point[key] for point in series] for key in ("win_rate", "clpd", "reward_accuracy"))
    plots = (
        ("reward accuracy", "yellow", line_plot(accuracy, *PLOT_SIZE, ends=(0.0, 1.0), guide=0.5)),
        ("win rate", "green", line_plot(win, *PLOT_SIZE, ends=(0.0, 1.0), guide=0.5)),
        ("CLPD in nats", "cyan", line_plot(clpd, *PLOT_SIZE, guide=0.0)),
    )
    columns = [Text("\n".join([title, *rows]), style=colour, no_wrap=True) for title, colour, rows in plots]
    title, drawn = f"{item['adapter']}, pairs {series[0]['pair']} to {series[-1]['pair']}", Columns(columns, (0, 2))
    return Panel(drawn, title=title, title_align="left", border_style="dim", expand=False)
