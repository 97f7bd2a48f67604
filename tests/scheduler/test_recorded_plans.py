"""Plans of every policy, task for task, are those that were recorded before.

    python -m tests.scheduler.test_recorded_plans

records those of policies that the file lacks. Where a policy was meant to change its entry is removed first, and the
difference belongs in the commit.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from unittest.mock import patch

import pytest

from edged.lab.bench.traces import read_trace
from edged.lab.simulator.hardware import SimulatedHardware
from edged.lab.simulator.plan import SimulationPlan
from edged.lab.simulator.simulation import Simulation
from edged.scheduler.policies.registry import ROWS
from edged.scheduler.reader import Pace
from edged.scheduler.task import Plan
from edged.settings.load import Settings

FILE = Path(__file__).with_name("recorded_plans.json")
PART = 200
"""Plans of which one sum is kept, so that a difference is found near its place."""
LOADS = {
    "half load": {"rate_per_s": 0.8, "retrain_rate": 0.5, "seconds": 45.0, "seed": 1},
    "overload": {"rate_per_s": 4.0, "retrain_rate": 0.3, "seconds": 25.0, "seed": 2},
    "little memory": {"rate_per_s": 1.5, "retrain_rate": 0.5, "seconds": 45.0, "seed": 3, "memory_mb": 90},
    "readers": {
        "rate_per_s": 1.5,
        "retrain_rate": 0.5,
        "seconds": 45.0,
        "seed": 4,
        "memory_mb": 400,
        "pace": Pace(8.3),
    },
    "fair shares": {"rate_per_s": 3.0, "retrain_rate": 0.3, "seconds": 25.0, "seed": 5, "fairness": "vtc"},
    "applications": {"rate_per_s": 3.0, "retrain_rate": 0.3, "seconds": 25.0, "seed": 6, "fairness": "justitia"},
}

FAST = ("little memory", "readers")
"""Loads that every run of the tests plays; the others are slow tests."""


def row(plan: Plan) -> list[object]:
    """What a plan has the engine do."""
    grants = [[grant.task.task_id, grant.num_tokens, grant.units] for grant in plan.grants]
    return [grants, [task.task_id for task in plan.preempt], plan.pages]


def recorded(policy: str, load: str) -> dict[str, object]:
    """Number and sums of a simulation's plans."""
    values = dict(LOADS[load])
    cache = {"memory_mb": values.pop("memory_mb", 0)}
    fairness = {"policy": values.pop("fairness", "off")}
    settings = Settings.model_validate({"scheduler": {"policy": policy}, "cache": cache, "fairness": fairness})
    plan = SimulationPlan(
        trace="poisson",
        device="agx-orin-32gb-maxn",
        model="mistral-3b",
        settings=settings,
        **values,  # type: ignore[arg-type]
    )
    simulation = Simulation(plan, SimulatedHardware.of(plan), lambda _line: None)
    scheduler, rows = simulation.engine.scheduler, []
    decide = scheduler.plan

    def watched(*arguments: object) -> Plan:
        made = decide(*arguments)  # type: ignore[arg-type]
        rows.append(row(made))
        return made

    scheduler.plan = watched  # type: ignore[method-assign, assignment]
    # What the engine computes again by itself is no policy's plan.
    with patch("edged.engine.renewals._GOES_ON_S", 0.0):
        simulation.play(read_trace("poisson", plan.seed))
    texts = [json.dumps(rows[start : start + PART]) for start in range(0, len(rows), PART)]
    return {"plans": len(rows), "sums": [hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts]}


@pytest.mark.parametrize("policy", sorted(ROWS))
@pytest.mark.parametrize(
    "load", [load if load in FAST else pytest.param(load, marks=pytest.mark.slow) for load in LOADS]
)
def test_a_policy_plans_what_it_planned_before(policy: str, load: str) -> None:
    assert recorded(policy, load) == json.loads(FILE.read_text())[policy][load]


if __name__ == "__main__":
    # What was recorded stays: remove it to have it recorded anew.
    known = json.loads(FILE.read_text())
    known |= {name: {load: recorded(name, load) for load in LOADS} for name in ROWS if name not in known}
    FILE.write_text(json.dumps({name: known[name] for name in sorted(ROWS)}, indent=1) + "\n")
