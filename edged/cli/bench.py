"""`edged bench`: measure this machine with recorded loads. The engine runs inside the command; no daemon is asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edged.cli.compare import compare
from edged.cli.options import (
    pair_format_option,
    policy_option,
    rate_option,
    retrain_rate_option,
    seed_option,
    shown,
    trace_option,
)
from edged.cli.output import make_table, number, percent, show_progress
from edged.cli.settings import load_settings
from edged.cli.simulate import simulate
from edged.client.client import DaemonError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from edged.bench.replay import Progress, ReplayPlan

    Replay = Callable[[ReplayPlan, Progress], dict[str, Any]]


@click.group()
def bench() -> None:
    """Measure this machine with recorded loads, or simulate another."""


@bench.command()
@trace_option
@click.option(
    "--pairs", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Preference pairs, in the order in which users give them.",
)  # fmt: skip
@pair_format_option
@click.option("--model", "-m", default="demo", show_default=True, metavar="DIR", help="As for edged serve.")
@click.option("--config", "-c", type=click.Path(path_type=Path), help="TOML file with further settings.")
@policy_option
@rate_option
@retrain_rate_option
@click.option("--seconds", type=click.FloatRange(1.0), default=60.0, show_default=True, help="How long to send.")
@seed_option
@shown
def replay(
    model: str, config: Path | None, policy: str | None, run: Replay | None = None, **load: Any
) -> tuple[dict[str, Any], Callable[[], RenderableType]]:
    """Replay a request trace while learning from preference pairs, and report latency, throughput and alignment.

    Arrivals keep the trace's proportions at --rate requests per second; lengths are scaled into the model's context.
    A share of the requests, --retrain-rate, comes with a preference pair.
    """
    from edged.runtime.process import prepare

    prepare()
    from transformers.utils import logging as transformers_logging

    from edged.bench.replay import ReplayPlan
    from edged.bench.replay import replay as run_replay
    from edged.models.source import find_model

    transformers_logging.disable_progress_bar()
    settings = load_settings(config, overrides={"model.path": model, "scheduler.policy": policy})
    try:
        plan = ReplayPlan(model_dir=find_model(settings.model)[0], settings=settings, **load)
        report = (run or run_replay)(plan, show_progress)
    except OSError as error:
        raise DaemonError(str(error)) from None
    return report, lambda: screen(report)


@bench.command()
@click.option(
    "--model", "-m", required=True, type=click.Path(exists=True, path_type=Path), metavar="DIR_OR_CONFIG",
    help="A model's directory, or a config.json alone (configs/models has some).",
)  # fmt: skip
@click.option("--quantize", default="", metavar="KIND", help="As model.quantize: nf4, llm-int8, int8 or int4.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option(
    "--device-memory", type=click.FloatRange(0.0, min_open=True), metavar="GIB",
    help="Memory of the box, or of its GPU where that has its own; default: what is here.",
)  # fmt: skip
@click.option("--context", type=click.IntRange(1), default=8192, show_default=True, help="Tokens of K/V that must fit.")
@click.option("--config", "-c", type=click.Path(path_type=Path), help="TOML file with further settings.")
@shown
def memory(
    model: Path, quantize: str, device: Any, device_memory: float | None, context: int, config: Path | None
) -> Any:
    """Say whether a model fits a box, with K/V pages, adapters and training, from its configuration alone.

    Nothing is loaded or downloaded. Exits with 1 when it does not fit.
    """
    from edged.runtime.process import prepare

    prepare()
    import torch

    from edged.bench.memory import plan_memory
    from edged.engine.model.memory_model import total_bytes

    memory_bytes = int(device_memory * 2**30) if device_memory else total_bytes(torch.device(device))
    overrides = {"model.quantize": quantize or None, "model.max_context_tokens": context}
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
}


def memory_screen(plan: dict[str, Any]) -> RenderableType:
    """The plan as a table in MiB."""
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


def screen(report: dict[str, Any]) -> RenderableType:
    """The report as one table of what was measured."""
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
    """What was measured: a label and its values."""
    slo, finetune, throughput = report["slo"], report["finetune"], report["throughput"]
    alignment, prefix, scheduler = report["alignment"], report["prefix"], report["scheduler"]

    def latency(name: str) -> str:
        values = report[name]
        return ", ".join(f"{key} {number(values[key], 0, 'ms')}" for key in ("p50", "p95", "p99"))

    def metric(name: str, unit: str = "") -> str:
        recent = alignment[f"{name}_recent"]
        return f"{number(alignment[name], 3, unit)} (last 50 pairs {number(recent, 3, unit)})"

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
            "SLO attainment",
            f"{percent(slo['ttft_within_factor_share'])} of first tokens within {slo['ttft_factor']:.0f}x the forward "
            f"latency ({percent(slo['ttft_within_factor_or_floor_share'])} within that or "
            f"{slo['ttft_floor_ms']:.0f} ms)",
        ),
        (
            "fine-tuning",
            f"{finetune['pairs_trained']} of {finetune['pairs_sent']} pairs in {finetune['steps']} steps, "
            f"{finetune['tokens_per_s']:.0f} tokens/s",
        ),
        ("win rate", metric("win_rate")),
        ("CLPD", metric("clpd_nats", "nats")),
        ("reward accuracy", metric("reward_accuracy")),
        ("reward margin", metric("reward_margin")),
        ("prefix hits", f"{percent(prefix['hit_share'])} of {number(prefix['prompt_tokens'])} prompt tokens"),
        (
            "scheduler",
            f"{scheduler['iterations']} iterations, decision "
            f"{number(scheduler['decision_ms_p50'], 3, 'ms')}, cost model off by "
            f"{number(scheduler['cost_model_mape_percent'], 0)} %, "
            f"{scheduler['preemptions']} preemptions",
        ),
    ]


bench.add_command(compare)
bench.add_command(simulate)
