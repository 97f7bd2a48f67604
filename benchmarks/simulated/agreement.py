"""Whether a simulation can be believed: this machine's own profile, simulated, beside a measured replay.

    python -m benchmarks.simulated.agreement TRACE PAIRS --model DIR [--rate 4] [--seconds 60] [--policies fcfs,mace]
                                    [--readers 6] [--rounds 3] [--profile FILE] [--quick] [--output FILE]

Each round measures a profile of this machine (`edged profile`, unless --profile names one), then replays the trace
while learning the pairs (`edged bench replay`), policies in turns, and simulates the same requests and pairs with the
profile's times. A machine's own speed moves from minute to minute: the simulated device is as much slower than the
profile as the engine found the machine during the replay, by part of an iteration (the report's
`scheduler.times_usual`), and a request is in time by the replay's own measures of prompts alone. Nothing is held out
for tests, which a simulation leaves out. Printed: medians over the rounds with the smallest and the largest, and of
simulated over measured in each.
"""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.support.command import (
    FORMAT,
    MODEL,
    PAIRS,
    READERS,
    SEED,
    existing_file,
    finish,
    names,
    option,
    pace_of,
    parse,
    say,
)
from edged.lab.bench.compare import ComparedLoad, RunFailed, call
from edged.lab.bench.replay import load_pairs
from edged.lab.bench.traces import RequestTrace, read_trace
from edged.lab.simulator.hardware import SimulatedHardware
from edged.lab.simulator.plan import SimulationPlan
from edged.lab.simulator.roofline import Device
from edged.lab.simulator.simulation import Simulation
from edged.scheduler.cost.error import PARTS
from edged.scheduler.policies.registry import ROWS
from edged.settings.load import Settings, load_settings
from edged.text.tokenizer import Tokenizer

_PROFILING_S = 600.0
FIGURES = (
    ("output tokens/s", ("throughput", "output_tokens_per_s")),
    ("prompt tokens/s", ("throughput", "prompt_tokens_per_s")),
    ("first tokens in time (%)", ("slo", "ttft_within_factor_share")),
    ("requests in time (%)", ("slo", "requests_in_time_share")),
    ("TTFT p50 (ms)", ("ttft_ms", "p50")),
    ("TTFT p95 (ms)", ("ttft_ms", "p95")),
    ("TBT p50 (ms)", ("tbt_ms", "p50")),
    ("TBT p95 (ms)", ("tbt_ms", "p95")),
    ("iterations", ("scheduler", "iterations")),
    ("mean iteration (ms)", ("iterations", "mean_ms")),
    ("prompts over the profile", ("scheduler", "times_usual", "prefill")),
    ("decodes over the profile", ("scheduler", "times_usual", "decode")),
    ("units over the profile", ("scheduler", "times_usual", "units")),
    ("a mean prompt alone (ms)", ("slo", "forward_ms_of_mean_prompt")),
    ("fine-tune tokens/s", ("finetune", "tokens_per_s")),
    ("pairs trained", ("finetune", "pairs_trained")),
    ("steps", ("finetune", "steps")),
    ("pair to version p50 (ms)", ("finetune", "latency_ms", "p50")),
)


def main() -> None:
    """Measure, simulate, print."""
    options = parse(
        __doc__,
        option("trace", "as for edged bench replay"),
        PAIRS,
        FORMAT,
        MODEL,
        option("--policies", "by comma", ["fcfs", "mace"], type=names(ROWS)),
        option("--rate", "requests per second", 4.0),
        option("--retrain-rate", "pairs per request", 0.5, least=0),
        READERS,
        option("--seconds", "of the load", 60.0, 3.0),
        option("--rounds", "of a profile, replays and simulations", 3),
        SEED,
        option("--profile", "this machine's (default: every round begins by measuring one)", type=existing_file),
        quick="a quick profile and a short load",
    )
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        report: dict[str, dict[str, list[dict[str, Any]]]] = {
            policy: {"measured": [], "simulated": []} for policy in options.policies
        }
        try:
            for number in range(options.rounds):
                say(f"round {number + 1} of {options.rounds}")
                profile, config = begin_round(options, Path(folder))
                for policy, sides in report.items():
                    sides["measured"].append(replayed(options, config, policy))
                    sides["simulated"].append(simulated(options, profile, config, policy, sides["measured"][-1]))
        except RunFailed as error:
            raise SystemExit(str(error)) from None
    finish(options, report, "\n".join(line for policy, sides in report.items() for line in table(policy, **sides)))


def begin_round(options: Namespace, folder: Path) -> tuple[Path, Path]:
    """Return a round's profile, measured if the options name none, and the settings that name it."""
    profile = options.profile
    if profile is None:
        profile = folder / "profile.json"
        quick = ["--quick"] if options.quick else []
        command = ["edged", "profile", "--model", str(options.model), "--output", str(profile), "--json", *quick]
        call(command, _PROFILING_S, say)
    config = folder / "settings.toml"
    # Neither tests nor passes in idle time are simulated.
    own = "[guard]\nheld_out_share = 0.0\n[align]\nidle_passes = 0\n"
    config.write_text(f"[scheduler]\nprofile = {json.dumps(str(profile.resolve()))}\n{own}")
    return profile, config


def replayed(options: Namespace, config: Path, policy: str) -> dict[str, Any]:
    """Run a replay and return its report."""
    workload = ComparedLoad(
        trace=options.trace,
        model=str(options.model),
        seconds=options.seconds,
        pairs=str(options.pairs),
        pair_format=options.format,
        config=str(config),
    )
    command = workload.command(policy, options.retrain_rate, options.rate, options.seed)
    readers = f"{options.readers:g}" if options.readers else "off"
    return call([*command, "--readers", readers], options.seconds, say)


class SameTargets(Simulation):
    """A simulation whose latency targets are those of a replay, not those of the simulated device."""

    alone_ms: Sequence[tuple[int, float]]

    def _lone_ttft(self, trace: RequestTrace) -> Callable[[float], float]:
        counts, ms = zip(*self.alone_ms, strict=True)
        return lambda tokens: float(np.interp(tokens, counts, ms)) / 1e3


def simulated(options: Namespace, profile: Path, config: Path, policy: str, measured: dict[str, Any]) -> dict[str, Any]:
    """Simulate the load that was `measured`, with its longest context, speed and targets; return the report."""
    settings = load_settings(config, overrides={"scheduler.policy": policy})
    model = settings.model.model_copy(update={"max_context_tokens": measured["model"]["max_context_tokens"]})
    plan = SimulationPlan(
        trace=options.trace,
        device=str(profile),
        model=str(options.model),
        settings=settings.model_copy(update={"model": model}),
        rate_per_s=options.rate,
        retrain_rate=options.retrain_rate,
        seconds=options.seconds,
        seed=options.seed,
        pair_lengths=list(lengths(options, settings)),
        pace=pace_of(options),
    )
    hardware = SimulatedHardware.of(plan)
    device = slowed(hardware.device, measured["scheduler"]["times_usual"])
    run = SameTargets(plan, replace(hardware, device=device), say)
    run.alone_ms = measured["slo"]["alone_ms"]
    return run.play(read_trace(plan.trace, plan.seed))


def slowed(device: Device, times: dict[str, float | None]) -> Device:
    """Return a device on which each part of an iteration takes so many times longer; None for those that do not run."""
    slower = {part: times[part] or 1.0 for part in PARTS}
    return replace(
        device,
        forward_s=lambda load: slower[load.part] * device.forward_s(load),
        unit_s=lambda unit: slower["units"] * device.unit_s(unit),
        # What decodes take longer after a chunk is in the measured times.
        noise=device.noise.model_copy(update={"decode_after_chunk": 0.0}),
        overhead_s=slower["decode"] * device.overhead_s,
        rest_s=slower["decode"] * device.rest_s,
    )


def lengths(options: Namespace, settings: Settings) -> Iterator[tuple[int, int, int]]:
    """Yield the (prompt, chosen, rejected) tokens of the file's pairs."""
    pairs, _ = load_pairs(options.pairs, options.format, Tokenizer.load(options.model), settings.align.max_pair_tokens)
    for pair in pairs:
        yield len(pair.prompt), len(pair.chosen), len(pair.rejected)


def table(policy: str, measured: Sequence[dict[str, Any]], simulated: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Return one line for each figure: medians over the rounds, and of the rounds' own ratios."""
    yield f"{policy}\n{'':<28}{'measured':>12}{'(spread)':>18}{'simulated':>12}{'ratio':>8}{'(spread)':>14}"
    for name, path in FIGURES:
        rounds = [(figure(a, path), figure(b, path)) for a, b in zip(measured, simulated, strict=True)]
        values = [value for value, _ in rounds if value is not None]
        guesses = [guess for _, guess in rounds if guess is not None]
        ratios = [guess / value for value, guess in rounds if value and guess is not None]
        digits = 2 if "times_usual" in path else 1
        shown = [f"{median(numbers):.{digits}f}" if numbers else "-" for numbers in (values, guesses)]
        spread = f"({min(values):.1f}-{max(values):.1f})" if values else ""
        ratio = f"{median(ratios):8.2f}{f'({min(ratios):.2f}-{max(ratios):.2f})':>14}" if ratios else f"{'-':>8}"
        yield f"{name:<28}{shown[0]:>12}{spread:>18}{shown[1]:>12}{ratio}"


def figure(report: dict[str, Any], path: Sequence[str]) -> float | None:
    """Return a number of a report; shares in percent."""
    value: Any = report
    for key in path:
        value = value[key]
    return 100.0 * value if value is not None and path[-1].endswith("_share") else value


if __name__ == "__main__":
    main()
