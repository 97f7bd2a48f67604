"""The commands `edged bench`, which measures this machine with recorded loads or simulates another. The engine runs
inside the command, without a daemon."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from edged.cli.options import explain_os_errors, policy_option, seed_option, shown
from edged.cli.output import Renderable, echo, make_table, number, percent, show_progress
from edged.cli.profile import prepare_engine
from edged.cli.settings import load_settings
from edged.client.client import DaemonError
from edged.lab.cli.federated import federated
from edged.lab.cli.fleet import fleet
from edged.lab.cli.load_options import ABOVE_ZERO, SHARE, Values, readers_option

_FILE = click.Path(exists=True, dir_okay=False)
pair_format_option = click.option("--format", "pair_format", type=click.Choice(["hh", "trl", "edged"]), default="hh")
model_shape_option = click.option(
    "--model", "-m", required=True, type=click.Path(exists=True, path_type=Path), metavar="DIR_OR_CONFIG",
    help="A model's directory, a config.json alone (configs/models has some), or a GGUF file for its plain checkpoint.",
)  # fmt: skip
trace_option = click.option(
    "--trace", required=True, metavar="FILE",
    help='Azure or BurstGPT .csv, Mooncake .jsonl, "poisson", or "lognormal:PROMPT:OUTPUT" (mean tokens, heavy tails).',
)  # fmt: skip
arrivals_option = click.option(
    "--arrivals",
    metavar="PROCESS",
    help="Instead of the trace's own times: poisson, gamma:CV, or cyclic:INTENSITY:SHARE[:MINUTES] (bursts of "
    "INTENSITY times the rate for SHARE of each period).",
)
_RATE_HELP = "Requests per second; default: 70 % of a burst's."
rate_option = click.option("--rate", "rate_per_s", type=ABOVE_ZERO, help=_RATE_HELP)
retrain_rate_option = click.option("--retrain-rate", type=SHARE, default=0.1, help="Pairs per request.")


@click.group()
def bench() -> None:
    """Measure this machine with recorded loads, or simulate another."""


bench.add_command(federated)
bench.add_command(fleet)


@bench.command()
@trace_option
@arrivals_option
@click.option("--pairs", required=True, type=_FILE, help="Preference pairs, in the order in which users give them.")
@pair_format_option
@click.option("--model", "-m", default="demo", metavar="DIR", help="As for edged serve.")
@click.option("--config", "-c", type=click.Path(path_type=Path), help="TOML file with further settings.")
@policy_option
@rate_option
@retrain_rate_option
@readers_option
@click.option("--seconds", type=click.FloatRange(1.0), default=60.0, help="How long to send.")
@seed_option
@shown
def replay(
    model: str, pairs: str, config: Path | None, policy: str | None, arrivals: str | None, run: Any = None, **load: Any
) -> Any:
    """Replay a request trace while learning from preference pairs, and report latency, throughput and alignment.

    Arrivals keep the trace's proportions at --rate requests per second; lengths are scaled into the model's context.
    A share of the requests, --retrain-rate, comes with a preference pair.
    """
    prepare_engine()
    from edged.lab.bench.arrivals import Arrivals
    from edged.lab.bench.replay import ReplayPlan
    from edged.lab.bench.replay import replay as run_replay
    from edged.models import find_model

    settings = load_settings(config, overrides={"model.path": model, "scheduler.policy": policy})
    with explain_os_errors():
        model_dir = find_model(settings.model)[0]
        process = Arrivals.parse(arrivals)
        plan = ReplayPlan(model_dir=model_dir, settings=settings, pairs=Path(pairs), arrivals=process, **load)
        report = (run or run_replay)(plan, show_progress)
    return report, lambda: screen(report)


@bench.command()
@model_shape_option
@click.option("--quantize", metavar="KIND", help="As model.quantize: nf4, llm-int8, int8 or int4.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda")
@click.option(
    "--device-memory", type=click.FloatRange(0.0, min_open=True), metavar="GIB",
    help="Memory of the box, or of its GPU where that has its own; default: what is here.",
)  # fmt: skip
@click.option("--context", type=click.IntRange(1), default=8192, help="Tokens of K/V that must fit.")
@click.option("--config", "-c", type=click.Path(path_type=Path), help="TOML file with further settings.")
@shown
def memory(
    model: Path, quantize: str | None, device: Any, device_memory: float | None, context: int, config: Path | None
) -> Any:
    """Say whether a model fits a box, with K/V pages, adapters and training, from its configuration alone.

    Nothing is loaded or downloaded. Exits with 1 when it does not fit.
    """
    prepare_engine()
    import torch

    from edged.engine.model.memory_model import total_bytes
    from edged.profiler.memory import plan_memory

    memory_bytes = int(device_memory * 2**30) if device_memory else total_bytes(torch.device(device))
    overrides = {"model.quantize": quantize, "model.max_context_tokens": context}
    plan = plan_memory(model, load_settings(config, overrides=overrides), device, memory_bytes, context)
    return plan, lambda: memory_screen(plan), 0 if plan["fits"] else 1


_PARTS = {
    "system": "system, Python, libraries (assumed)",
    "weights": "weights",
    "weight_copies": "copies of weights for the CPU's products",
    "lora_slots": "LoRA slots ({active_adapters} adapters of rank {rank} at once)",
    "adapters": "adapters in memory ({loaded_adapters}: now, and to go back to)",
    "step": "open DPO steps",
    "kept_graph": "its kept graph",
    "iteration": "an iteration's activations and logits",
    "dequantized": "the one weight that is dequantized at a time",
    "decode_graphs": "captured decode iterations",
    "states": "states that layers keep of running sequences and open steps",
}


def memory_screen(plan: dict[str, Any]) -> Renderable:
    """Return the memory plan as a table in MiB."""
    kind = f", {plan['quantization']}" if plan["quantization"] else ""
    verdict = "fits" if plan["fits"] else "does not fit"
    table = make_table(
        *("part", ">MiB"),
        title=f"{plan['model']} ({plan['parameters'] / 1e9:.2f} G weights{kind}, {plan['dtype']} on {plan['device']}) "
        f"{verdict} {plan['device_bytes'] / 2**30:.1f} GiB with {plan['context_tokens']:,} tokens of K/V",
        caption=f"{plan['kv_tokens']:,} tokens of K/V fit in what is left "
        f"({plan['kv_bytes_per_1k_tokens'] / 2**20:.0f} MiB for 1,000)",
    )
    for name, size in plan["parts"].items():
        if size:
            table.add_row(_PARTS[name].format(**plan["adapter"]), f"{size / 2**20:,.0f}")
    table.add_row(f"K/V of {plan['context_tokens']:,} tokens", f"{plan['context_bytes'] / 2**20:,.0f}")
    table.add_row("left", f"{(plan['free_bytes'] - plan['context_bytes']) / 2**20:,.0f}", style="bold")
    return table


@bench.command()
@model_shape_option
@click.option(
    "--peft",
    type=click.Choice(["lora:all", "lora:down_proj", "ia3"]),
    default="lora:all",
    help="Linears with LoRA; or IA3, on those that PEFT names.",
)
@click.option("--tokens", type=click.IntRange(1), default=1024, help="Length of the sequence.")
@click.option("--window", "window_tokens", type=click.IntRange(1), default=256, help="As align.window_tokens.")
@shown
def activations(model: Path, peft: str, tokens: int, window_tokens: int) -> Any:
    """Say what training keeps of a forward, per token and layer, by what is left out (FlexLLM, Figure 13).

    Nothing is loaded or computed: a layer runs without memory. Rank 16, bfloat16.
    """
    prepare_engine()
    from edged.lab.bench.activations import account

    report = account(model, peft, tokens, window_tokens)
    columns = "kept for the backward", ">KiB a token and layer", ">MiB once", ">GB in all"
    table = make_table(*columns, title=f"{model}: {report['layers']} layers, {tokens:,} tokens, {peft}, bfloat16")
    for row in report["rows"]:
        each, once, total = row["bytes_per_token_layer"], row["once_bytes"], row["total_bytes"]
        table.add_row(row["kept"], f"{each / 1024:,.1f}", f"{once / 2**20:,.1f}", f"{total / 1e9:,.2f}")
    return report, table


@bench.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@trace_option
@arrivals_option
@click.option("--pairs", type=_FILE, help="As for edged bench replay; not for simulations.")
@pair_format_option
@click.option("--model", "-m", default="demo", metavar="DIR", help="As for edged serve.")
@click.option("--config", "-c", type=_FILE, help="TOML file with further settings.")
@click.option("--device", metavar="NAME", help="Simulate this device (edged bench simulate) instead of measuring.")
@click.option("--policies", type=Values(click.STRING), default="fcfs,mace", metavar="NAMES", help='Policies, or "all".')
@click.option("--retrain-rates", type=Values(SHARE), default="0.1", metavar="SHARES", help="Pairs per request.")
@click.option("--rates", type=Values(ABOVE_ZERO), metavar="RATES", help="Requests per second.")
@click.option(
    "--loads", type=Values(ABOVE_ZERO), metavar="SHARES",
    help="Rates as shares of the requests per second of a burst, which is measured once; default: 0.7.",
)  # fmt: skip
@click.option("--seeds", type=Values(click.IntRange(0)), default="0,1,2", metavar="NUMBERS")
@click.option("--seconds", type=click.FloatRange(1.0), default=60.0, help="How long each sends.")
@click.option("--jobs", type=click.IntRange(1), default=1, help="Simulations at once.")
@shown
def compare(
    folder: Path,
    policies: tuple[str, ...],
    retrain_rates: tuple[float, ...],
    rates: tuple[float, ...] | None,
    loads: tuple[float, ...] | None,
    seeds: tuple[int, ...],
    jobs: int,
    kind: Any = None,
    **load: Any,
) -> Any:
    """Run every policy at every retrain rate, request rate and seed, and compare their figures.

    Lists are separated by commas. Each run is a process of its own; policies take turns. FOLDER gets one JSON per run:
    called again, the command does only what is missing or failed.
    """
    from edged.lab.bench.arrivals import Arrivals
    from edged.lab.bench.compare import Axes, ComparedLoad
    from edged.lab.bench.compare import compare as run
    from edged.lab.bench.summary import Runs, summarise
    from edged.scheduler.policies.registry import ROWS

    if bool(load["pairs"]) == bool(load["device"]):
        raise DaemonError("give --pairs to measure this machine, or --device to simulate one, which learns nothing")
    if jobs > 1 and not load["device"]:
        raise DaemonError("--jobs is for simulations (--device): runs that are measured at once disturb each other")
    Arrivals.parse(load["arrivals"])
    workload = (kind or ComparedLoad)(**load)
    policies = tuple(ROWS) if policies == ("all",) else policies
    axes = Axes(policies, retrain_rates, seeds, rates or (), loads or (() if rates else (0.7,)))
    for policy in policies:
        load_settings(workload.config and Path(workload.config), overrides={"scheduler.policy": policy})
    with explain_os_errors():
        manifest = run(workload, axes, folder, show_progress, jobs)
        runs = Runs.read(folder)
    rows, capacity = summarise(runs), manifest["capacity_per_s"]

    def text() -> list[Renderable]:
        for name, reason in runs.failed.items():
            echo(f"{name} failed: {reason}", err=True)
        return list(tables(rows))

    return {"folder": str(folder), "capacity_per_s": capacity, "rows": rows, "failed": runs.failed}, text


_POLICIES_ABREAST = 6
"""Policies in one table: cells of more are not to be read on a terminal."""


def tables(rows: list[dict[str, Any]]) -> Iterator[Renderable]:
    """Yield for each load a sentence on every policy against the BASELINES that ran, and a table of medians."""
    from edged.lab.bench.summary import BASELINES, METRICS, PAIRS, THROUGHPUT, TTFT

    for point in dict.fromkeys((row["rate_per_s"], row["retrain_rate"], row["load"]) for row in rows):
        here = {
            row["policy"]: row["metrics"]
            for row in rows
            if (row["rate_per_s"], row["retrain_rate"], row["load"]) == point
        }
        bases = [base for base in BASELINES if base in here]

        def ratio(policy: str, metric: Any, base: str, here: Any = here) -> str:
            found = here[policy][metric.path][f"to_{base}"]
            return f"{found['median']:.2f}x" if found else ""

        for policy in here:
            for base in bases:
                known = [(metric.title, ratio(policy, metric, base)) for metric in (TTFT, THROUGHPUT, PAIRS)]
                if policy != base and (said := [f"{title} {times}" for title, times in known if times]):
                    yield f"{policy} against {base}: {', '.join(said)}"
        share = "" if point[2] is None else f" ({percent(point[2])} of a burst)"
        title = f"{point[0]:.2f} requests/s{share}, pairs with {percent(point[1])} of them; median (range) over seeds"
        if bases:
            title += f"; below: ratio to {' and '.join(bases)} at the same seeds"
        policies = list(here)
        for first in range(0, len(policies), _POLICIES_ABREAST):
            abreast = policies[first : first + _POLICIES_ABREAST]
            made = make_table("", *(f">{policy}" for policy in abreast), title=None if first else title, fold=True)
            for metric in METRICS:
                if any(metrics[metric.path]["value"] for metrics in here.values()):
                    cells = [middle(here[policy][metric.path]["value"], metric.digits) for policy in abreast]
                    ratios = [" ".join(ratio(policy, metric, base) for base in bases) for policy in abreast]
                    made.add_row(metric.title, *map("\n".join, zip(cells, ratios, strict=True)))
            yield made


def middle(value: dict[str, float] | None, digits: int) -> str:
    """Format a median with its range."""
    if value is None:
        return "–"
    median, low, high = (f"{value[key]:,.{digits}f}" for key in ("median", "low", "high"))
    return median if low == high else f"{median} ({low}–{high})"


@bench.command()
@trace_option
@arrivals_option
@click.option("--device", "-d", required=True, metavar="NAME|FILE", help="From configs/devices, or such a file.")
@click.option(
    "--model", "-m", required=True, metavar="NAME|FILE", help="From configs/models, or a directory or config.json."
)
@click.option("--quantize", metavar="KIND", help="As model.quantize: nf4, llm-int8, int8 or int4.")
@click.option("--config", "-c", type=click.Path(path_type=Path), help="TOML file with further settings.")
@policy_option
@rate_option
@retrain_rate_option
@click.option(
    "--pair-tokens", type=Values(click.IntRange(1), 3), default="100,60,60", metavar="PROMPT,CHOSEN,REJECTED",
    help="Mean lengths of a preference pair.",
)  # fmt: skip
@click.option(
    "--quote-tokens", type=click.IntRange(0), default=0, metavar="N",
    help="Answers are quotations of N tokens of their prompts, which drafts find; 0: answers have no text.",
)  # fmt: skip
@click.option(
    "--best-of", type=click.IntRange(1), default=1, metavar="N",
    help="Answers that are drawn of each request where they find room.",
)  # fmt: skip
@readers_option
@click.option("--seconds", type=click.FloatRange(1.0), default=60.0, help="Virtual time to send.")
@seed_option
@shown
def simulate(quantize: str | None, config: Path | None, policy: str | None, arrivals: str | None, **load: Any) -> Any:
    """Simulate a load with learning on a device that is not here, with edged's own scheduler and caches.

    The device's times come from a roofline over its file. Nothing is loaded or downloaded; answers and pairs have
    lengths and no contents, so nothing is said about alignment.
    """
    prepare_engine()
    from edged.lab.bench.arrivals import Arrivals
    from edged.lab.simulator.plan import SimulationPlan
    from edged.lab.simulator.simulation import simulate as run

    settings = load_settings(config, overrides={"scheduler.policy": policy, "model.quantize": quantize})
    report = run(SimulationPlan(settings=settings, arrivals=Arrivals.parse(arrivals), **load), show_progress)
    return report, lambda: screen(report)


def screen(report: dict[str, Any]) -> Renderable:
    """Return the replay's or simulation's report as one table."""
    load, model = report["load"], report["model"]
    title = (
        f"{load['trace']} on {model['name']} ({model['device']}, {model['dtype']}), policy {report['policy']}: "
        f"{load['rate_per_s']:.2f} requests/s for {load['seconds']:.0f} s, prompts of {load['mean_prompt_tokens']:.0f} "
        f"and answers of {load['mean_output_tokens']:.0f} tokens, pairs with {load['retrain_rate']:.0%} of them"
    )
    table = make_table("", "", rows=_rows(report), title=title, show_header=False)
    table.columns[0].style = "bold"
    return table


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the report's table: (label, formatted values)."""
    slo, finetune, throughput = report["slo"], report["finetune"], report["throughput"]
    alignment, prefix, scheduler = report["alignment"], report["prefix"], report["scheduler"]
    drafts, candidates = report["drafts"], report["candidates"]

    readers = report["readers"]
    reading = (
        [
            (
                "QoE",
                f"mean {number(readers['qoe_mean'], 3)} (by the paper {number(readers['qoe_paper_mean'], 3)}), "
                f"p5 {number(readers['qoe_p5'], 3)}, {percent(readers['qoe_95_share'])} at least 0.95; readers lent "
                f"{number(finetune['lent_s'], 1, 's')} to fine-tuning",
            )
        ]
        if readers
        else []
    )

    def latency(name: str) -> str:
        values = report[name]
        return ", ".join(f"{key} {number(values[key], 0, 'ms')}" for key in ("mean", "p50", "p95", "p99"))

    def metric(name: str, unit: str = "") -> str:
        recent = alignment[f"{name}_recent"]
        return f"{number(alignment[name], 3, unit)} (last 50 pairs {number(recent, 3, unit)})"

    learning = [
        (
            "fine-tuning",
            f"{finetune['pairs_trained']} of {finetune['pairs_sent']} pairs in {finetune['steps']} steps, "
            f"{finetune['trained_tokens_per_s']:.0f} trained tokens/s",
        ),
        (
            "submitted to learned",
            f"p50 {number(finetune['latency_ms']['p50'], 0, 'ms')}; {finetune['pairs_waiting']} not learned at the "
            "end, counted as longer than they waited",
        ),
    ]
    aligned = [
        ("win rate", metric("win_rate")),
        ("CLPD", metric("clpd_nats", "nats")),
        ("reward accuracy", metric("reward_accuracy")),
        ("reward margin", metric("reward_margin")),
    ]
    return [
        ("requests", ", ".join(f"{count} {name}" for name, count in report["requests"].items())),
        ("TTFT", latency("ttft_ms")),
        ("TBT", latency("tbt_ms")),
        (
            "throughput",
            f"{throughput['output_tokens_per_s']:.1f} output tokens/s, "
            f"{throughput['prompt_tokens_per_s']:.0f} prompt tokens/s, {throughput['requests_per_s']:.2f} requests/s",
        ),
        (
            "first tokens in time",
            f"{percent(slo['ttft_within_factor_share'])} within {slo['ttft_factor']:.0f}x the forward "
            f"latency ({percent(slo['ttft_within_factor_or_floor_share'])} within that or "
            f"{slo['ttft_floor_ms']:.0f} ms)",
        ),
        *reading,
        (
            "requests in time",
            f"{percent(slo['requests_in_time_share'])} with their first token, by the latter, and at most "
            f"{slo['tpot_target_ms']:.0f} ms per further token",
        ),
        *(learning if finetune["pairs_sent"] else []),
        *(aligned if alignment["win_rate"] is not None else []),
        *([("drafts", f"{drafts['tokens']} tokens, {drafts['right']} right")] if drafts["tokens"] else []),
        *([("candidates", f"{candidates['drawn']}, {candidates['dropped']} dropped")] if candidates["drawn"] else []),
        ("prefix hits", f"{percent(prefix['hit_share'])} of {number(prefix['prompt_tokens'])} prompt tokens"),
        (
            "scheduler",
            f"{scheduler['iterations']} iterations, decision "
            f"{number(scheduler['decision_ms_p50'], 3, 'ms')}, cost model off by "
            f"{number(scheduler['cost_model_mape_percent'], 0)} %, "
            f"{scheduler['preemptions']} preemptions",
        ),
    ]
