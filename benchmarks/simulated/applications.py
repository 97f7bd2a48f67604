"""Completion times of whole applications under Justitia and its rivals, in virtual time.

    python -m benchmarks.simulated.applications [--device rtx-6000-ada] [--model llama-3-8b] [--memory-mb 4096]
                                      [--applications 300]
                                      [--minutes 6,9,18] [--policies ...] [--error 1] [--elephant] [--json]

Ten kinds of applications, as graphs whose calls are sent when those before have ended; lengths are drawn around the
means of their groups' public records (Hermes). 72 % are small, 26 % medium, 2 % large, as in Justitia 5.1. `justitia`
and `srjf` know each application's cost, wrong by a factor drawn from 1 / --error to --error; `vtc` gives each
application a counter; `parrot` serves applications in the order in which they came; `srjf` the one with the least left
to do. All enter in order over the policy mace.
With --elephant: one summary by map and reduce, then 60 to 600 mice, one each second, as in Justitia 5.3.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from benchmarks.support.command import SEED, finish, flag, option, parse, say
from edged.engine.request import Request
from edged.engine.sampling.params import Sampling
from edged.lab.simulator.hardware import SimulatedHardware
from edged.lab.simulator.plan import SimulationPlan
from edged.lab.simulator.runner import START_S, SimulatedEngine
from edged.scheduler.fairness.justitia import JustitiaOrder
from edged.scheduler.fairness.virtual_time import call_cost
from edged.scheduler.policies.base import Order
from edged.scheduler.task import ServingTask
from edged.settings.load import FairnessSettings, Settings

Stage = tuple[int, int, float]
"""Mean tokens of prompt and answer, and calls side by side."""
KINDS: dict[str, tuple[list[Stage], float]] = {
    "EV": ([(838, 97, 1), (267, 29, 2.9)], 1),
    "CC": ([(372, 71, 1), (326, 197, 3)], 1),
    "KBQAV": ([(742, 103, 1), (369, 23, 5.1), (585, 169, 5.1)], 1),
    "FV": ([(1168, 39, 1)], 2.2),
    "ALFWI": ([(2040, 137, 1)], 16.6),
    "PE": ([(1868, 103, 1), (572, 458, 1)], 1),
    "CG": ([(678, 227, 1)], 1.4),
    "SC": ([(600, 300, 10)], 1),
    "MRS": ([(425, 186, 21), (1459, 598, 2.6), (1463, 706, 1)], 1),
    "DM": (
        [
            *((1562, 963, 2), (2666, 462, 20), (2666, 462, 20), (3444, 989, 2)),
            *((2640, 457, 20), (2640, 457, 20), (2461, 946, 1), (2647, 440, 20)),
        ],
        1,
    ),
}
"""Stages of each kind, and the mean number of times that they are gone through."""
SIZES = {"small": ["EV", "FV", "CC", "ALFWI", "KBQAV"], "medium": ["PE", "CG", "SC"], "large": ["MRS", "DM"]}
MIX = {"small": 0.72, "medium": 0.26, "large": 0.02}
MICE = ("KBQAV", "CC", "ALFWI")
POLICIES = ("justitia", "vtc", "parrot", "srjf")
_LOOK_S = 0.02
_SPREAD = 0.3
"""Of the logarithm of lengths."""


@dataclass
class Work:
    """One application: when it comes, and its calls (prompt, answer) stage by stage."""

    name: str
    at_s: float
    stages: list[list[tuple[int, int]]]
    open: int = 0
    next: int = 0
    end_s: float = 0.0
    late_s: float | None = None
    """Seconds by which it ended later than under fair sharing; None where the order does not know."""

    @property
    def run(self) -> str:
        """Name of its run."""
        return f"{self.name}@{self.at_s}"

    @property
    def cost(self) -> float:
        """KV token-iterations of all its calls."""
        return sum(call_cost(*call) for call in chain.from_iterable(self.stages))

    @property
    def seconds(self) -> float:
        """Its completion time."""
        return self.end_s - self.at_s


def drawn(kind: str, name: str, at_s: float, chance: random.Random, context: int) -> Work:
    """Return an application of a kind, its lengths drawn and cut to the context."""
    stages, rounds = KINDS[kind]

    def about(mean: float) -> int:
        return max(1, round(mean * chance.lognormvariate(-(_SPREAD**2) / 2, _SPREAD)))

    def calls(stage: Stage) -> list[tuple[int, int]]:
        prompt, answer, count = stage
        side = max(1, int(count) + (chance.random() < count % 1))
        return [(min(about(prompt), context // 2), min(about(answer), context // 2 - 1)) for _ in range(side)]

    times = max(1, int(rounds) + (chance.random() < rounds % 1))
    return Work(name, at_s, [calls(stage) for _ in range(times) for stage in stages])


def load(count: int, seconds: float, seed: int, context: int) -> list[Work]:
    """Return applications of the mix, at even chances over the seconds."""
    chance = random.Random(seed)
    moments = sorted(chance.uniform(0.0, seconds) for _ in range(count))
    rarer = [size for size in ("medium", "large") for _ in range(round(MIX[size] * count))]
    sizes = ["small"] * (count - len(rarer)) + rarer
    chance.shuffle(sizes)
    kinds = [chance.choice(SIZES[size]) for size in sizes]
    pairs = enumerate(zip(kinds, moments, strict=True))
    return [drawn(kind, f"{kind}-{number}", at_s, chance, context) for number, (kind, at_s) in pairs]


class RankedOrder(JustitiaOrder):
    """Runs by another rank than their tags."""

    def __init__(self, fairness: FairnessSettings, row_order: Order, rank: Callable[[RankedOrder, str], float]) -> None:
        super().__init__(fairness, row_order)
        self._rank = rank

    def flow_key(self, flow: Hashable) -> float:
        """Return the run's rank."""
        return self._rank(self, str(flow)) if str(flow) in self.clock.applications else 0.0

    def first(self, flows: Mapping[Hashable, list[ServingTask]], most: int) -> list[ServingTask]:
        """Return the next prompts by the rank of their runs."""
        return list(islice(chain.from_iterable(flows[flow] for flow in sorted(flows, key=self.flow_key)), most))


def _left(order: RankedOrder, run: str) -> float:
    known = order.clock.applications[run]
    return known.cost - known.served


RANKS: dict[str, Callable[[RankedOrder, str], float]] = {
    "parrot": lambda order, run: float(run.rpartition("@")[2]),
    "srjf": _left,
}


@dataclass
class Play:
    """Applications under one policy, on a simulated device."""

    policy: str
    hardware: SimulatedHardware
    settings: Settings
    error: float
    works: list[Work]
    _open: dict[str, Work] = field(default_factory=dict)
    _count: int = 0

    def run(self) -> list[Work]:
        """Send each application's calls, and return when all have ended."""
        known = self.policy if self.policy in ("off", "vtc") else "justitia"
        fairness = FairnessSettings.model_validate({"policy": known, "by": "application", "idle_s": 1.0})
        engine = SimulatedEngine(self.settings.model_copy(update={"fairness": fairness}), self.hardware)
        scheduler = engine.scheduler
        if (rank := RANKS.get(self.policy)) is not None:
            order = RankedOrder(fairness, scheduler.policy.row_order, rank)
            scheduler.policy.take_order(order)
            order.configure(scheduler.policy.row_order.settings, scheduler.cost)
            scheduler.queues.refile(order)
        coming = sorted(self.works, key=lambda work: work.at_s, reverse=True)
        while coming or self._open:
            while coming and START_S + coming[-1].at_s <= engine.now:
                self._send(engine, coming.pop())
            if engine.recorder.open_requests < len(self._open):
                self._follow(engine)
            idle = not self._open and coming
            engine.run(START_S + coming[-1].at_s + 1e-6 if idle else engine.now + _LOOK_S)
        assert not scheduler.degraded, scheduler.degraded
        if known == "justitia":
            for work in self.works:
                work.late_s = scheduler.late_s(work.run)
        return self.works

    def _send(self, engine: SimulatedEngine, work: Work) -> None:
        calls, work.next = work.stages[work.next], work.next + 1
        work.open = len(calls)
        run = work.run
        known = work.cost * self.error ** random.Random(f"error {run}").uniform(-1.0, 1.0)
        for prompt, answer in calls:
            self._count += 1
            name = f"call-{self._count}"
            engine.recorder.expect(name, engine.now, prompt)
            sampling = Sampling(max_tokens=answer, seed=self._count, ignore_eos=True)
            request = Request(name, (1,) * prompt, sampling, fairness_key=run, run=run, run_cost=known)
            self._open[name] = work
            engine.submit(request)

    def _follow(self, engine: SimulatedEngine) -> None:
        answers = engine.recorder.answers
        for name in [name for name in self._open if answers[name].finish is not None]:
            work = self._open.pop(name)
            work.open -= 1
            work.end_s = max(work.end_s, answers.pop(name).token_s[-1] - START_S)
            if not work.open and work.next < len(work.stages):
                self._send(engine, work)


def percentile(values: list[float], share: float) -> float:
    """Return the value below which a share of all lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def figures(name: str, works: list[Work], fair: list[Work] | None) -> dict[str, Any]:
    """Return a policy's completion times, and how they compare with those under `fair`."""
    seconds = [work.seconds for work in works]
    found = {"policy": name, "mean_s": statistics.mean(seconds), "p90_s": percentile(seconds, 0.9)}
    if fair is not None:
        ratios = [work.seconds / other.seconds for work, other in zip(works, fair, strict=True)]
        found |= {"no_later": sum(ratio <= 1.0 for ratio in ratios) / len(ratios), "worst": max(ratios)}
    return found


def suite(options: Any, hardware: SimulatedHardware, settings: Settings, minutes: float) -> dict[str, Any]:
    """Return the figures of all policies at one density."""
    context = min(settings.model.max_context_tokens or 8192, 8192)
    results: dict[str, list[Work]] = {}
    for policy in options.policies:
        works = load(options.applications, 60.0 * minutes, options.seed, context)
        began_s = time.monotonic()
        results[policy] = Play(policy, hardware, settings, options.error, works).run()
        mean = statistics.mean(work.seconds for work in works)
        say(f"{minutes:g} min, {policy}: mean {mean:.1f} s ({time.monotonic() - began_s:.0f} s)")
    rows = [figures(policy, works, results.get("vtc")) for policy, works in results.items()]
    return {"minutes": minutes, "policies": rows}


def elephant(options: Any, hardware: SimulatedHardware, settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield how long a summary by map and reduce and the mice behind it take, by the number of mice (Justitia 5.3)."""
    for mice in options.mice:
        for policy in options.policies:
            chance = random.Random(options.seed)
            works = [drawn("MRS", "MRS", 0.0, chance, 8192)]
            works += [drawn(chance.choice(MICE), f"mouse-{n}", 1.0 + n, chance, 8192) for n in range(mice)]
            first, *others = Play(policy, hardware, settings, options.error, works).run()
            mean_s = statistics.mean(work.seconds for work in others)
            found = {
                "mice": mice,
                "policy": policy,
                "elephant_s": first.seconds,
                "late_s": first.late_s,
                "mice_s": mean_s,
            }
            say(_told_elephant(found))
            yield found


def told(report: dict[str, Any]) -> str:
    """Return the report as lines."""
    lines = []
    for density in report["densities"]:
        lines.append(f"{report['applications']} applications in {density['minutes']:g} min")
        lines.append(f"{'policy':<12}{'mean JCT':>10}{'P90':>10}{'no later than vtc':>20}{'worst':>8}")
        for row in density["policies"]:
            late = f"{100 * row['no_later']:>18.0f} %{row['worst']:>8.2f}" if "no_later" in row else ""
            lines.append(f"{row['policy']:<12}{row['mean_s']:>8.1f} s{row['p90_s']:>8.1f} s{late}")
    return "\n".join(lines + [_told_elephant(row) for row in report["elephant"]])


def _told_elephant(row: dict[str, Any]) -> str:
    late = "" if row["late_s"] is None else f" ({row['late_s']:.1f} s later than under fair sharing)"
    return (
        f"{row['mice']} mice, {row['policy']}: the elephant {row['elephant_s']:.1f} s{late}, mice {row['mice_s']:.1f} s"
    )


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    """Simulate and print."""
    options = parse(
        __doc__,
        option("--device", "configs/devices", "rtx-6000-ada"),
        option("--model", "configs/models", "llama-3-8b"),
        option("--memory-mb", "of K/V pages / 2^20", 4096),
        option("--applications", "how many", 300, quick=30),
        option("--minutes", "within which they come", [6.0, 9.0, 18.0], quick=[1.0], type=_numbers),
        option("--policies", "to compare", list(POLICIES), type=lambda text: text.split(",")),
        option("--error", "most by which a known cost is wrong: 2 is from half to twice the real one", 1.0, least=1),
        flag("--elephant", "a long application before many short ones, instead of the suite"),
        option(
            "--mice", "with --elephant", [60, 150, 300, 600], quick=[10], type=lambda text: [*map(int, text.split(","))]
        ),
        SEED,
        quick="few applications",
    )
    settings = Settings.model_validate(
        {"cache": {"share_across": "none", "pruning": "off", "memory_mb": options.memory_mb}}
    )
    plan = SimulationPlan(trace="", settings=settings, device=options.device, model=options.model)
    hardware = SimulatedHardware.of(plan)
    report = {
        "device": options.device,
        "model": options.model,
        "kv_tokens": hardware.pages * settings.cache.page_size,
        "applications": options.applications,
        "error": options.error,
        "densities": [] if options.elephant else [suite(options, hardware, settings, at) for at in options.minutes],
        "elephant": list(elephant(options, hardware, settings)) if options.elephant else [],
    }
    finish(options, report, told(report))


if __name__ == "__main__":
    main()
