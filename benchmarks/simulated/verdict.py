"""The verdict on defaults: pairs of `scheduler.policy` and `fairness.policy` on chat, bursts and agents together.

    python -m benchmarks.simulated.verdict TRACE [--devices agx-orin-32gb-maxn,...] [--pairs mace,mace+vtc,...]
                                  [--loads chat,bursts,agents] [--seconds 120] [--seeds 0,1,2] [--output FILE]

In virtual time. chat: the trace at half the rate of a burst, read along at 6 words a second; bursts: long prompts whose
arrivals crowd; both by eight users, of whom each asks half as often as the one before, every second request with a pair
that is trained five times. agents: applications whose calls wait for each other. Each run is told by its shares of
the best of its device, load and seed: of requests in time, of first tokens in time, of pairs trained, of applications'
mean completion time. The verdict is by the geometric mean of the means of requests, pairs and applications; beside it
stand the one with first tokens for requests, and the one in which chat's requests are in time if their readers never
wait (a quality of experience of 0.95). Cells in which every seed has less than 0.9 of the best requests in time,
or of the completion time, are named.
"""

from __future__ import annotations

import random
import statistics
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.simulated.applications import Play, load
from benchmarks.simulated.frontier import cell, played, spread
from benchmarks.support.command import finish, keep, markdown, names, option, parse, say
from edged.engine.request import Request
from edged.lab.bench.arrivals import Arrivals
from edged.lab.bench.summary import ATTAINMENT, MEAN_TBT, PAIRS, REQUESTS_IN_TIME, ReportFigure
from edged.lab.bench.traces import Arrival
from edged.lab.simulator.hardware import SimulatedHardware
from edged.lab.simulator.plan import SimulationPlan
from edged.lab.simulator.simulation import Simulation
from edged.scheduler.policies.registry import ROWS
from edged.scheduler.reader import TOKENS_PER_WORD, Pace
from edged.settings.load import Settings

DEVICES = {
    "agx-orin-32gb-maxn": ("mistral-3b", 0.4, 0.34, 4.0),
    "agx-orin-32gb-50w": ("mistral-3b", 0.4, 0.33, 4.0),
    "agx-orin-32gb-40w": ("mistral-3b", 0.38, 0.3, 4.5),
    "agx-orin-32gb-30w": ("mistral-3b", 0.25, 0.14, 8.0),
    "agx-orin-64gb-maxn": ("mistral-3b", 0.46, 0.49, 3.0),
    "agx-orin-64gb-50w": ("mistral-3b", 0.4, 0.33, 4.0),
    "agx-orin-64gb-30w": ("mistral-3b", 0.25, 0.14, 8.0),
    "rtx-6000-ada": ("llama-3-8b", 1.1, 2.1, 0.8),
    "a100-sxm-80gb": ("llama-3.1-8b", 1.66, 1.5, 0.6),
    "h200": ("llama-3.1-8b", 3.5, 4.1, 0.3),
}
"""By device: the model, half of the requests a second that a burst of chat and of long prompts reaches, and the minutes
in which the applications come."""
PAIRS_OF_POLICIES = "fcfs,mace-paper,mace,andes,flexllm,ekya,adainf,mace+vtc,mace+justitia"
LOADS = ("chat", "bursts", "agents")
USERS = 8
QOE = ReportFigure("readers.qoe_mean", "QoE", 3)
READERS = ReportFigure("readers.qoe_95_share", "QoE at least 0.95", 3)
JCT = ReportFigure("mean_s", "applications' mean s", 1)
FIGURES = {"chat": (ATTAINMENT, REQUESTS_IN_TIME, QOE, READERS, MEAN_TBT, PAIRS), "agents": (JCT,)}
FIGURES["bursts"] = tuple(figure for figure in FIGURES["chat"] if figure not in (QOE, READERS))
SERVING = ("requests", "first tokens", "readers")
SHARES = (*SERVING, "training", "agents")
_FAR = 0.9


class SharedSimulation(Simulation):
    """A simulation whose requests are of several users."""

    def _request(self, number: int, arrival: Arrival) -> Request:
        chance = random.Random(f"user {self._plan.seed} {number}")
        user = chance.choices(range(USERS), [0.5**user for user in range(USERS)])[0]
        return replace(super()._request(number, arrival), fairness_key=f"user-{user}")


def settings_of(pair: str, **sections: Any) -> Settings:
    """Return the default settings but for a pair of policies."""
    policy, _, fairness = pair.partition("+")
    chosen = {"scheduler": {"policy": policy}, "fairness": {"policy": fairness or "off"}}
    return Settings.model_validate({**chosen, **sections})


def served(options: Namespace, device: str, kind: str, pair: str, seed: int) -> dict[str, Any]:
    """Return the report of a load of chat or of bursts."""
    model, chat_rate, burst_rate, _ = DEVICES[device]
    chat = kind == "chat"
    plan = SimulationPlan(
        trace=options.trace if chat else "lognormal:2200:26",
        device=device,
        model=model,
        settings=settings_of(pair, align={"epochs": 5}),
        rate_per_s=chat_rate if chat else burst_rate,
        arrivals=None if chat else Arrivals.parse("gamma:3"),
        retrain_rate=0.5,
        seconds=options.seconds,
        seed=seed,
        pace=Pace(6.0 * TOKENS_PER_WORD) if chat else None,
    )
    return played(plan, noisy=True, simulation=SharedSimulation)


def completed(options: Namespace, device: str, pair: str, seed: int) -> dict[str, Any]:
    """Return the mean completion time of applications."""
    model, *_, minutes = DEVICES[device]
    cache = {"share_across": "none", "pruning": "off", "memory_mb": 4096}
    settings = settings_of(pair, cache=cache)
    hardware = SimulatedHardware.of(SimulationPlan(trace="", settings=settings, device=device, model=model))
    works = load(options.applications, 60.0 * minutes, seed, 8192)
    play = Play(settings.fairness.policy, hardware, settings, 1.0, works)
    return {JCT.path: statistics.mean(work.seconds for work in play.run())}


def measured(options: Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each run."""
    for device in options.devices:
        for kind in options.loads:
            for pair in options.pairs:
                for seed in options.seeds:
                    say(f"{device} {kind} {pair} {seed}")
                    agents = kind == "agents"
                    report = (
                        completed(options, device, pair, seed) if agents else served(options, device, kind, pair, seed)
                    )
                    figures = {figure.path: figure.of(report) for figure in FIGURES[kind]}
                    yield {"device": device, "load": kind, "pair": pair, "seed": seed, **figures}


def shares(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each run's figures as shares of the best of its device, load and seed."""
    for row in rows:
        beside = [other for other in rows if all(other[key] == row[key] for key in ("device", "load", "seed"))]
        found = {key: row[key] for key in ("device", "load", "pair", "seed")}
        if row["load"] == "agents":
            yield {**found, "agents": min(other[JCT.path] for other in beside) / row[JCT.path]}
            continue
        readers = READERS if row["load"] == "chat" else REQUESTS_IN_TIME
        figures = (REQUESTS_IN_TIME, ATTAINMENT, readers, PAIRS)
        for name, figure in zip((*SERVING, "training"), figures, strict=True):
            best = max(other[figure.path] for other in beside)
            found[name] = row[figure.path] / best if best else 1.0
        yield found


def verdict(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the pairs of policies, the best first: their mean shares, and the cells in which they are far behind."""
    found = list(shares(rows))
    ranking = []
    for pair in dict.fromkeys(row["pair"] for row in rows):
        own = [row for row in found if row["pair"] == pair]
        means = {
            name: statistics.mean(values) for name in SHARES if (values := [row[name] for row in own if name in row])
        }
        cells: dict[str, list[float]] = {}
        for row in own:
            cells.setdefault(f"{row['device']} {row['load']}", []).append(
                row["agents" if "agents" in row else "requests"]
            )
        far = [cell for cell, values in cells.items() if max(values) < _FAR]
        scores = {
            f"by {name}": statistics.geometric_mean(
                [means[key] for key in (name, "training", "agents") if key in means]
            )
            if all(means.values())
            else 0.0
            for name in SERVING
            if name in means
        }
        ranking.append({"pair": pair, **means, **scores, "far_behind": far})
    return sorted(ranking, key=lambda row: -row["by requests"])


def tables(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table for each load, and of the verdict."""
    for kind in dict.fromkeys(row["load"] for row in rows):
        lines = []
        here = [row for row in rows if row["load"] == kind]
        for device, pair in dict.fromkeys((row["device"], row["pair"]) for row in here):
            own = [row for row in here if (row["device"], row["pair"]) == (device, pair)]
            lines.append([device, f"`{pair}`", *(cell(f, spread([row[f.path] for row in own])) for f in FIGURES[kind])])
        yield from (f"**{kind}**", "", *markdown(["device", "pair", *(f.title for f in FIGURES[kind])], lines), "")
    ranking = verdict(rows)
    columns = [name for name in (*SHARES, *(f"by {name}" for name in SERVING)) if name in ranking[0]]
    lines = [
        [f"`{row['pair']}`", *(f"{row[name]:.3f}" for name in columns), ", ".join(row["far_behind"])] for row in ranking
    ]
    yield from markdown(["pair", *columns, "every seed below 0.9 of the best"], lines)


def main() -> None:
    """Simulate, print."""
    options = parse(
        __doc__,
        option("trace", "of chat, as for edged bench simulate"),
        option("--devices", "by comma", list(DEVICES), type=names(DEVICES)),
        option("--pairs", "POLICY or POLICY+FAIRNESS, by comma", PAIRS_OF_POLICIES.split(","), type=pairs_of),
        option("--loads", "by comma", list(LOADS), quick=["chat"], type=names(LOADS)),
        option("--seconds", "of chat and bursts", 120.0, 20.0),
        option("--applications", "how many", 40, quick=5),
        option("--seeds", "by comma", [0, 1, 2], quick=[0], type=lambda text: [*map(int, text.split(","))]),
        quick="a short chat",
    )
    rows: list[dict[str, Any]] = []
    for row in measured(options):
        rows.append(row)
        keep(options, {"rows": rows})
    finish(options, {"rows": rows, "verdict": verdict(rows)}, "\n".join(tables(rows)))


def pairs_of(text: str) -> list[str]:
    """Parse pairs of policies, POLICY or POLICY+FAIRNESS, separated by commas."""
    pairs = text.split(",")
    for pair in pairs:
        names(ROWS)(pair.partition("+")[0])
        settings_of(pair)
    return pairs


if __name__ == "__main__":
    main()
