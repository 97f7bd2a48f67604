"""How long a federation's hub takes to decide: a plan of Venn's, a box that checks in, the scheduler's tick.

    python -m benchmarks.fleet.venn [--requests 1000] [--groups 20] [--boxes 100] [--campaigns 20] [--rounds 200]

A plan is of open requests in groups that other boxes meet each; it is made as one of them is withdrawn. A tick is all
that the hub's scheduler does every two seconds: boxes' answers are read, campaigns' files, and boxes are granted. How
long NVFlare takes to ask the boxes is not in it. Times are of the processor.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.support.command import finish, option, parse, table_of
from edged.federated.campaigns import Campaign
from edged.federated.device_scheduler import DeviceScheduler
from edged.federated.policies import POLICIES
from edged.federated.signature import Capacity, signature

MODEL = "ab" * 32
_GOALS_MS = {"plan": 2.0, "check-in": 0.02, "tick": 1000.0}


def _timed(act: Callable[[], Any]) -> float:
    began = time.process_time()
    act()
    return 1e3 * (time.process_time() - began)


def plans(requests: int, groups: int, rounds: int) -> tuple[list[float], list[float], int]:
    """Return milliseconds of plans and of check-ins between them, and the number of atoms."""
    chance, now = random.Random(0), 0.0
    asked = [Capacity(1 << 10 + at % 5, float(1 << at // 5), 1, MODEL) for at in range(groups)]
    boxes = [Capacity(1 << chance.randint(9, 16), float(1 << chance.randint(0, 8)), 1, MODEL) for _ in range(4000)]
    venn = DeviceScheduler(POLICIES["venn"], chance)

    def ask(number: int) -> Any:
        about: dict[str, Any] = {
            "name": str(number),
            "submitted_s": now,
            "requires": asked[number % groups],
            "demand": 10_000,
        }
        return venn.request(Campaign(**about, rounds=1, deadline_s=600.0), 1, now)

    for number in range(requests - 1):
        ask(number)
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        opened = ask(requests)
        for at in range(20):
            box = boxes[(20 * number + at) % len(boxes)]
            found[1].append(_timed(partial(venn.check_in, f"{number} {at}", box, now)))
        for name, capacity in list(opened.granted.items()):
            venn.leave(name, capacity)
        found[0].append(_timed(partial(venn.withdraw, opened, now)))
    return *found, len({signature(box, asked) for box in boxes})


def ticks(boxes: int, campaigns: int, rounds: int, root: Path) -> list[float]:
    """Return milliseconds of ticks of the hub's scheduler, whose boxes are stand-ins; none without NVFlare."""
    try:
        from nvflare.apis.fl_constant import ReservedKey
        from nvflare.apis.fl_context import FLContext
        from nvflare.apis.job_def import Job
    except ImportError:
        return []
    from edged.federated_nvflare.capacity import capacity_token
    from edged.federated_nvflare.scheduler import VennScheduler

    chance = random.Random(0)
    names = [SimpleNamespace(name=f"box-{number}") for number in range(boxes)]
    capacities = {each.name: Capacity(1 << chance.randint(9, 16), 32.0, 1, MODEL) for each in names}
    engine = SimpleNamespace(
        get_workspace=lambda: SimpleNamespace(get_root_dir=lambda: str(root)),
        get_clients=lambda: names,
        check_client_resources=lambda *_: {name: (True, capacity_token(own)) for name, own in capacities.items()},
        cancel_client_resources=lambda *_: None,
    )
    context = FLContext()
    context.set_prop(ReservedKey.ENGINE, engine, private=True, sticky=False)
    table = {"model": MODEL, "rank": 16, "demand": 2 * boxes}
    jobs = []
    for number in range(campaigns):
        meta = {"custom_props": {"edged": {**table, "name": f"campaign-{number}"}}}
        jobs.append(Job(str(number), {}, {"app": ["@ALL"]}, meta))
    scheduler, manager = VennScheduler(), SimpleNamespace(update_meta=lambda *_: None)
    return [_timed(lambda: scheduler._tick(manager, jobs, time.monotonic(), context)) for _ in range(rounds)]


def main() -> None:
    """Measure and print."""
    options = parse(
        __doc__,
        option("--requests", "open requests of a plan", 1000),
        option("--groups", "groups of them", 20),
        option("--boxes", "boxes that a tick asks", 100),
        option("--campaigns", "campaigns whose round waits in a tick", 20),
        option("--rounds", "plans and ticks", 200, least=2),
    )
    planned, checked, atoms = plans(options.requests, options.groups, options.rounds)
    with tempfile.TemporaryDirectory(prefix="edged-bench-") as folder:
        ticked = ticks(options.boxes, options.campaigns, options.rounds, Path(folder))
    found = {"plan": planned, "check-in": checked, "tick": ticked}
    rows = [
        {"what": what, "p50_ms": statistics.median(times), "p95_ms": statistics.quantiles(times, n=20)[-1],
         "max_ms": max(times), "goal_ms": _GOALS_MS[what]} for what, times in found.items() if times
    ]  # fmt: skip
    columns = {"": "{what}", "p50, ms": "{p50_ms:.4f}", "p95": "{p95_ms:.4f}", "most": "{max_ms:.4f}",
               "goal": "{goal_ms:g}"}  # fmt: skip
    given = {name: getattr(options, name) for name in ("requests", "groups", "boxes", "campaigns", "rounds")}
    shown = "\n".join([f"{atoms} atoms", *table_of(columns, rows)])
    finish(options, {**given, "atoms": atoms, "times": rows}, shown)


if __name__ == "__main__":
    main()
