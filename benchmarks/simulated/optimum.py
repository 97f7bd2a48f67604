"""How near to the offline optimum each policy comes, on every load that is known here.

    python -m benchmarks.simulated.optimum [--loads bursts,chat] [--policies mace,fcfs] [--traces FOLDER] [--seeds 8]
                                           [--seconds 300] [--output FILE]

Virtual time on a device whose times vary. "In time": within five times the prompt's own forward. The optimum lies
between two numbers. *Reached* is the most that any row had in time, the clairvoyant one among them. It knows which
prompts to give up, serves the others by their deadlines, packs and decodes as the device does, and trains nothing.
*At most* counts for each prompt the tokens alone that no prompt before it began with, at the rate of full iterations,
and no decodes: no schedule has more. Values are medians over the seeds, in brackets the smallest and the largest.
`--traces` has `azure-llm-2023-conv.csv` and `mooncake-conversation.jsonl`; loads of a missing file are left out.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.simulated.frontier import QOE, TBT_P99, TTFT_P99, load_of, played, spread
from benchmarks.simulated.offline import Job, at_most, chosen
from benchmarks.support.command import finish, keep, markdown, names, option, parse, say
from edged.lab.bench.arrivals import Arrivals
from edged.lab.bench.figures import SLO_FACTOR
from edged.lab.bench.summary import ATTAINMENT, PAIRS, REQUESTS_IN_TIME
from edged.lab.bench.traces import Arrival, RequestTrace, TraceRow, read_trace
from edged.lab.simulator.hardware import SimulatedHardware
from edged.lab.simulator.plan import SimulationPlan
from edged.lab.simulator.runner import START_S
from edged.lab.simulator.simulation import lone_ttft_s
from edged.scheduler.policies.base import Order, Row
from edged.scheduler.policies.hybrid import Hybrid
from edged.scheduler.policies.mace.policy import MACE
from edged.scheduler.policies.registry import ROWS
from edged.scheduler.reader import TOKENS_PER_WORD, Pace
from edged.scheduler.task import ServingTask
from edged.settings.load import load_settings

ORIN, ADA = "agx-orin-32gb-maxn", "rtx-6000-ada"
WORDS_PER_S = 6.0
POLICIES = ["fcfs", "mace-letter", "mace-paper", "flexllm", "andes", "mace"]
FIGURES = (ATTAINMENT, REQUESTS_IN_TIME, PAIRS, QOE, TTFT_P99, TBT_P99)
_SLOWER = (1.0, 1.2, 1.45, 1.8)
"""How much longer than alone prompts are taken to need, when those to give up are chosen: decodes run beside them."""
_BLOCK = 16
"""Tokens by which beginnings are compared."""


# -- loads -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, at some rates a second: a trace's name, or what draws one by a seed."""

    trace: str | Callable[[random.Random], RequestTrace]
    rates: tuple[float, ...]
    arrivals: str | None = None
    device: str = ORIN
    read: bool = False


def documents(chance: random.Random) -> RequestTrace:
    """Draw bursts of a dozen long documents, which come within three seconds; a burst every 36 s on average."""
    rows, at_s = [], 0.0
    for _ in range(40):
        for _ in range(12):
            begins_s = at_s + chance.uniform(0.0, 3.0)
            rows.append(TraceRow(begins_s, chance.randint(2400, 3600), chance.randint(40, 120)))
        at_s += chance.uniform(20.0, 52.0)
    return _trace("documents", rows)


def agents(chance: random.Random) -> RequestTrace:
    """Draw agents whose every call has the last one's prompt, and more, as its beginning, with pauses between them."""
    rows, at_s = [], 0.0
    for agent in range(120):
        now, blocks = at_s, chance.randint(6, 14)
        for _ in range(chance.randint(4, 12)):
            shared = tuple(agent * 1000 + number for number in range(blocks))
            rows.append(TraceRow(now, 128 * blocks, chance.randint(20, 90), shared))
            blocks += chance.randint(1, 5)
            now += chance.uniform(4.0, 16.0)
        at_s += chance.expovariate(1 / 12.0)
    return _trace("agents", rows, 128)


def documents_beside_chat(chance: random.Random) -> RequestTrace:
    """Draw a user of long documents beside others who chat."""
    rows, at_s = [], 0.0
    for _ in range(1500):
        long = chance.random() < 0.06
        prompt = chance.randint(2400, 3600) if long else chance.randint(60, 400)
        rows.append(TraceRow(at_s, prompt, chance.randint(30, 110)))
        at_s += chance.expovariate(1.0)
    return _trace("documents beside chat", rows)


def _trace(name: str, rows: list[TraceRow], block_tokens: int = 0) -> RequestTrace:
    return RequestTrace(name, tuple(sorted(rows, key=lambda row: row.at_s)), block_tokens)


LOADS = {
    "bursts": Load("lognormal:2200:26", (0.17, 0.25, 0.5), "gamma:3"),
    "bursts of chat": Load("lognormal:600:60", (0.5, 0.8), "gamma:4"),
    "Azure's conversations in bursts": Load("azure-llm-2023-conv.csv", (0.25, 0.4), "gamma:3"),
    "chat": Load("poisson", (0.3, 0.6, 0.9)),
    "chat, read along": Load("poisson", (0.6, 0.9), read=True),
    "bursts of documents": Load(documents, (0.3, 0.4)),
    "agents": Load(agents, (0.4, 0.6)),
    "documents beside chat": Load(documents_beside_chat, (0.5, 0.7)),
    "Mooncake's conversations on an Ada": Load("mooncake-conversation.jsonl", (0.4, 0.6, 0.8), device=ADA),
}


# -- the clairvoyant row -----------------------------------------------------------------------------------------------


class ByHindsight(Order):
    """Prompts that are not given up by their deadlines, then the others."""

    kept: frozenset[float] = frozenset()
    """The moments at which those come that are not given up, in seconds from the load's start."""

    def flow(self, task: ServingTask) -> bool:
        """Return whether a prompt is given up."""
        return round(task.arrival_s - START_S, 6) not in self.kept

    def flow_key(self, flow: Any) -> float:
        """Return the place of those that are given up, or are not."""
        return float(flow)

    def key(self, task: ServingTask) -> tuple[float, int]:
        """Return a prompt's deadline."""
        return task.deadline_s, task.task_id


class ShortIterations(Hybrid):
    """Iterations that leave room for somebody who comes."""

    def most_tokens(self, builder: Any) -> int:
        """Return the most prompt tokens of an iteration."""
        return min(builder.tokens_left, 256)


def clairvoyants(jobs: Sequence[Job]) -> Iterator[Row]:
    """Yield rows that know which of `jobs` to give up, by several guesses of what decodes take."""
    for slower, fill in product(_SLOWER, (MACE.fill, ShortIterations)):
        kept = chosen([replace(job, work_s=slower * job.work_s) for job in jobs])
        moments = frozenset(round(job.released_s, 6) for job in kept)
        yield replace(MACE, fill=fill, order=type("Hindsight", (ByHindsight,), {"kept": moments}))


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """A load at a rate, by a seed."""

    load: Load
    trace: RequestTrace
    rate: float
    seconds: float
    seed: int

    def plan(self, policy: str) -> SimulationPlan:
        """Return the plan of a run."""
        return SimulationPlan(
            trace=self.trace.name,
            device=self.load.device,
            model="mistral-3b",
            settings=load_settings(None, overrides={"scheduler.policy": policy}),
            rate_per_s=self.rate,
            arrivals=Arrivals.parse(self.load.arrivals),
            retrain_rate=0.5,
            seconds=self.seconds,
            seed=self.seed,
            pace=Pace(WORDS_PER_S * TOKENS_PER_WORD) if self.load.read else None,
        )

    def played(self, policy: str, row: Row | None = None, learns: bool = True) -> dict[str, Any]:
        """Return the report of a run, with `row` in place of the policy's own."""
        plan = self.plan(policy) if learns else replace(self.plan(policy), retrain_rate=0.0)
        with patch.dict(ROWS, {policy: row or ROWS[policy]}):
            return played(plan, noisy=True, trace=self.trace)

    def jobs(self) -> tuple[list[Job], list[Job]]:
        """Return the load's prompts as they take alone, and as they take at the least."""
        plan = self.plan("fcfs")
        hardware, most = SimulatedHardware.of(plan), plan.settings.serving.max_batch_tokens
        load = load_of(plan, hardware, self.trace)
        token_s, alone, least = lone_ttft_s(hardware.device, most, most) / most, list[Job](), list[Job]()
        for arrival, known in zip(load, known_beginnings(load), strict=True):
            num_tokens = len(arrival.prompt_ids)
            alone_s = lone_ttft_s(hardware.device, num_tokens, most)
            due_s, new = arrival.at_s + SLO_FACTOR * alone_s, num_tokens - known
            alone.append(Job(arrival.at_s, due_s, alone_s * new / num_tokens))
            least.append(Job(arrival.at_s, due_s, token_s * new))
        return alone, least


def known_beginnings(load: Sequence[Arrival]) -> Iterator[int]:
    """Yield how many tokens each prompt begins with that an earlier one begins with, too; its last one is new."""
    seen: set[int] = set()
    for arrival in load:
        ids, place, known = arrival.prompt_ids, 0, 0
        for end in range(_BLOCK, len(ids), _BLOCK):
            place = hash((place, ids[end - _BLOCK : end]))
            known = end if place in seen else known
            seen.add(place)
        yield known


def measure(case: Case, policies: Sequence[str]) -> dict[str, Any]:
    """Return the figures of each policy, the share that the clairvoyant row reaches, and the bound."""
    alone, least = case.jobs()
    figures = {}
    for policy in policies:
        report = case.played(policy)
        figures[policy] = {figure.path: figure.of(report) for figure in FIGURES}
    hindsight = max(ATTAINMENT.of(case.played("mace", row, learns=False)) or 0.0 for row in clairvoyants(alone))
    reached = max(hindsight, *(each[ATTAINMENT.path] or 0.0 for each in figures.values()))
    return {"policies": figures, "reached": reached, "at_most": at_most(least) / len(least)}


def table(report: dict[str, Any]) -> str:
    """Return a Markdown table."""
    heads = ["load", "rate", "policy", "first tokens in time", "of what was reached", "of the most", "requests in time"]
    lines = []
    for each in report["loads"]:
        seeds = each["seeds"]
        bounds = [statistics.median(seed[key] for seed in seeds) for key in ("reached", "at_most")]
        case = [each["load"], f"{each['rate']:g}"]
        lines.append([*case, "offline optimum", "{:.3f} to {:.3f}".format(*bounds), *[""] * (2 + len(FIGURES) - 1)])
        for policy in seeds[0]["policies"]:
            told = {f.path: spread([seed["policies"][policy][f.path] for seed in seeds]) for f in FIGURES}
            share = told[ATTAINMENT.path]
            parts = [
                statistics.median(seed["policies"][policy][ATTAINMENT.path] / seed[key] for seed in seeds)
                for key in ("reached", "at_most")
            ]
            first = "–" if share is None else "{:.3f} ({:.2f} to {:.2f})".format(*share)
            rest = [(f, told[f.path]) for f in FIGURES[1:]]
            cells = ["–" if values is None else f"{values[0]:.{f.digits}f}" for f, values in rest]
            lines.append(["", "", f"`{policy}`", first, *(f"{part:.2f}" for part in parts), *cells])
    return "\n".join(markdown([*heads, *(figure.title for figure in FIGURES[2:])], lines))


def trace_of(load: Load, traces: Path, seed: int) -> RequestTrace | None:
    """Return a load's trace; None where its file is missing."""
    if callable(load.trace):
        return load.trace(random.Random(seed))
    path = traces / load.trace
    recorded = path.suffix in (".csv", ".jsonl")
    if recorded and not path.exists():
        return None
    return read_trace(str(path) if recorded else load.trace, seed)


def main() -> None:
    """Run the benchmark."""
    options = parse(
        __doc__,
        option("--loads", "by comma", list(LOADS), ["chat"], type=names(LOADS)),
        option("--policies", "by comma", POLICIES, ["fcfs", "mace"], type=names(ROWS)),
        option("--traces", "the folder of recorded traces", Path(), type=Path),
        option("--seconds", "of each load", 300.0, 60.0),
        option("--seeds", "loads, from seed 0 on", 8, 1),
        quick="chat alone, one seed",
    )
    report: dict[str, Any] = {"seconds": options.seconds, "loads": []}
    for name in options.loads:
        load = LOADS[name]
        traces = [trace_of(load, options.traces, seed) for seed in range(options.seeds)]
        if None in traces:
            say(f"{name} is left out: {options.traces / str(load.trace)} is missing")
            continue
        for rate in load.rates:
            say(f"{name}, {rate:g} a second")
            cases = [Case(load, trace, rate, options.seconds, seed) for seed, trace in enumerate(traces) if trace]
            seeds = [measure(case, options.policies) for case in cases]
            report["loads"].append({"load": name, "rate": rate, "seeds": seeds})
            keep(options, report)
    finish(options, report, table(report))


if __name__ == "__main__":
    main()
