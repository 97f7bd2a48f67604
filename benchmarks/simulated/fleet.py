"""Placement policies beside each other: boxes that run the engine's own loop in virtual time, and people who talk.

    python -m benchmarks.simulated.fleet [--loads 0.75,0.9,1.05] [--seeds 3] [--seconds 300] [--policies fleet,...]
                               [--devices NAME,NAME,...] [--pairs 0.2] [--jobs 2] [--output FILE]

A load is a share of what the boxes answer of a burst, together. 40 users by Zipf's law each continue their own talk; a
share of answers gives a preference pair, which is learned where the answer was given; a new version voids the prefixes
of its box. Reports of load are up to 200 ms old. The row `homes` serves every user at a home by hash. In time: the
first token within 5 times the prompt alone, or 0.3 s; good: that, and at most 100 ms a token. Means over the seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.simulated.frontier import NOISE
from benchmarks.support.command import markdown, say
from edged.placement.forecast import response_s
from edged.placement.homes import rendezvous
from edged.placement.node import NodeView, RoutedRequest
from edged.placement.policies import POLICIES
from edged.placement.policy import Placement
from edged.settings.load import load_settings
from edged.simulator.fleet import Conversations, SimulatedFleet
from edged.simulator.hardware import SimulatedHardware
from edged.simulator.plan import SimulationPlan
from edged.simulator.runner import START_S

_MODEL = "mistral-3b"
_BURST = 64
FIGURES = ("in_time_share", "good_share", "ttft_p50_s", "learned_p95_s", "pairs_learned", "forecast_error_p50")


@dataclass(slots=True)
class Homes:
    """The row `homes`: every user's requests at one node by hash."""

    def place(self, arrival: RoutedRequest, nodes: Sequence[NodeView], now: float) -> Placement:
        """Rank by the user's hash."""
        ranking = rendezvous(arrival.user or "", [node.name for node in nodes])
        return Placement(tuple(ranking), {node.name: response_s(node, arrival) for node in nodes})


ROWS: dict[str, Any] = {**POLICIES, "homes": Homes}


def plan_of(device: str, seconds: float, seed: int) -> SimulationPlan:
    """The plan of one box, at the settings' defaults."""
    return SimulationPlan(
        trace="talks", settings=load_settings(), device=device, model=_MODEL, seconds=seconds, seed=seed
    )


def capacity_per_s(device: str) -> float:
    """Requests a second that one box answers of a burst of this load."""
    plan = plan_of(device, 60.0, 0)
    fleet = SimulatedFleet(plan, [SimulatedHardware.of(plan)], POLICIES["round-robin"]())
    talks = islice(Conversations().arrivals(10.0, 1e6, 99, 0.0), _BURST)
    fleet.play([replace(item, arrival=replace(item.arrival, at_s=0.0)) for item in talks], 0.0)
    return _BURST / (next(iter(fleet.nodes.values())).engine.now - START_S)


def noisy(plan: SimulationPlan) -> SimulatedHardware:
    """A box whose times vary as those of `benchmarks.simulated.frontier --noisy`."""
    hardware = SimulatedHardware.of(plan)
    return replace(hardware, device=replace(hardware.device, noise=NOISE))


def run(case: tuple[str, float, float, int, tuple[str, ...], float, float]) -> dict[str, Any]:
    """Play one policy at one rate and seed."""
    policy, load, rate, seed, devices, seconds, pairs = case
    plan = plan_of(devices[0], seconds, seed)
    fleet = SimulatedFleet(plan, [noisy(plan_of(device, seconds, seed)) for device in devices], ROWS[policy]())
    report = fleet.play(list(Conversations().arrivals(rate, seconds, seed, pairs)), seconds)
    return {"policy": policy, "load": load, "seed": seed, "rate_per_s": rate, **report}


def main() -> None:
    """Run all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="0.75,0.9,1.05")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--policies", default=",".join(ROWS))
    parser.add_argument("--devices", default=",".join(["agx-orin-32gb-maxn"] * 4))
    parser.add_argument("--pairs", type=float, default=0.2)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    devices = tuple(options.devices.split(","))
    known = {device: capacity_per_s(device) for device in set(devices)}
    whole = sum(known[device] for device in devices)
    loads, policies = [float(part) for part in options.loads.split(",")], options.policies.split(",")
    cases = [
        (policy, load, load * whole, seed, devices, options.seconds, options.pairs)
        for load, seed, policy in product(loads, range(options.seeds), policies)
    ]
    found = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for number, result in enumerate(pool.map(run, cases), 1):
            found.append(result)
            told = f"{result['policy']} at {result['load']}: {result['in_time_share']:.3f} in time"
            say(f"{number} of {len(cases)}: {told}")
    if options.output:
        report = {"devices": devices, "capacity_per_s": whole, "seconds": options.seconds, "runs": found}
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    rows = []
    for load, policy in product(loads, policies):
        runs = [result for result in found if (result["policy"], result["load"]) == (policy, load)]
        values = [[result[name] for result in runs if result[name] is not None] for name in FIGURES]
        rows.append((f"{load:g}", f"`{policy}`", *(f"{mean(value):.3f}" if value else "–" for value in values)))
    times = ("first token p50 (s)", "learned p95 (s)", "pairs learned", "forecast error p50")
    sys.stdout.write("\n".join(markdown(("load", "policy", "in time", "good", *times), rows)) + "\n")


if __name__ == "__main__":
    main()
