"""Rows of a fleet's simulation, and one run of a row: a load, boxes, a policy and where pairs are learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from edged.lab.simulator.fleet import Conversations, SimulatedFleet, Teaching
from edged.lab.simulator.hardware import SimulatedHardware
from edged.lab.simulator.plan import SimulationPlan
from edged.placement.forecast import response_s
from edged.placement.homes import rendezvous
from edged.placement.node import NodeView, RoutedRequest
from edged.placement.policies import POLICIES
from edged.placement.policy import Placement, PlacementPolicy
from edged.placement.stages import StagedNode, StagedPlan, StagedTask, length_consistency, place, score
from edged.scheduler.cost.model import CostModel
from edged.scheduler.cost.profile import Noise
from edged.scheduler.reader import Pace
from edged.settings.load import Settings

NOISE = Noise(jitter=0.15, decode_after_chunk=0.25)
_BURST = 64
"""Requests of the burst that a box's capacity is measured by."""


@dataclass(slots=True)
class LemixBoxes:
    """LeMix' Eq. 3 where a node has one GPU: Eq. 1 is then the constant -tau, and R is a box's forecast."""

    literal: bool
    tolerance_s: float = 0.05
    lambda_2: float = 0.1
    _nodes: dict[str, StagedNode] = field(default_factory=dict)

    def place(self, arrival: RoutedRequest, nodes: Sequence[NodeView], now: float) -> Placement:
        """Rank by Eq. 3; mended, the numerator is above zero, as in `edged.placement.stages.Lemix`."""
        task = StagedTask(now, arrival.num_bytes)
        known = {node.name: self._nodes.setdefault(node.name, StagedNode(node.name, 1, 0.0, 0.0)) for node in nodes}
        forecasts = {node.name: response_s(node, arrival) for node in nodes}
        lengths = {name: length_consistency(staged, task) for name, staged in known.items()}
        profit = -self.tolerance_s if self.literal else 1.0 - self.lambda_2 * min(lengths.values())
        scores = {name: score(profit, lengths[name], forecasts[name], 1.0, self.lambda_2) for name in known}
        ranking = sorted(known, key=lambda name: (-scores[name], name))
        chosen = known[ranking[0]]
        chosen.tasks.clear()
        place(chosen, task, StagedPlan(0.0, forecasts[ranking[0]], (now,), (now,), ()))
        return Placement(tuple(ranking), forecasts)


@dataclass(slots=True)
class ByHome:
    """Every user's requests at one node by hash."""

    def place(self, arrival: RoutedRequest, nodes: Sequence[NodeView], now: float) -> Placement:
        """Rank by the user's hash."""
        ranking = rendezvous(arrival.user or "", [node.name for node in nodes])
        return Placement(tuple(ranking), {node.name: response_s(node, arrival) for node in nodes})


ROWS: dict[str, tuple[Callable[[], PlacementPolicy], Teaching]] = {
    "fleet": (POLICIES["fleet"], "writer"),
    "fleet-at-home": (POLICIES["fleet"], "home"),
    "fleet-where-answered": (POLICIES["fleet"], "answered"),
    "homes": (ByHome, "home"),
    **{name: (policy, "answered") for name, policy in POLICIES.items() if name != "fleet"},
    "separate": (POLICIES["round-robin"], "separate"),
    "lemix-paper": (lambda: LemixBoxes(literal=True), "placed"),
    "lemix": (lambda: LemixBoxes(literal=False), "placed"),
}
"""The rows by name: the policy of requests, and where pairs are learned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCase:
    """One run: a row at a load, a share of what the boxes answer of a burst together."""

    settings: Settings
    policy: str
    load: float
    seed: int = 0
    device: str = "agx-orin-32gb-maxn"
    model: str = "mistral-3b"
    speeds: tuple[float, ...] = (1.0,) * 4
    """One box for each: its speed over the device's."""
    misjudged: float = 1.0
    """Factor by which the first box's prices are reported too high, the second's too low, and so on in turns."""
    seconds: float = 120.0
    pairs: float = 0.2
    """Share of answers that give a preference pair."""
    zipf: float = 1.1
    pace: Pace | None = None

    def plan(self) -> SimulationPlan:
        """Return the plan of one box."""
        return SimulationPlan(
            trace="talks", settings=self.settings, device=self.device, model=self.model, seconds=self.seconds,
            seed=self.seed, pace=self.pace,
        )  # fmt: skip

    def hardware(self, speed: float, noise: Noise = NOISE) -> SimulatedHardware:
        """Return a box of so many times the device's speed, whose scheduler knows that."""
        known = SimulatedHardware.of(self.plan())
        device, prices = known.device, known.device.guess().prices
        units = {kind: (once / speed, token / speed) for kind, (once, token) in prices.units.items()}
        forward = tuple(price / speed for price in prices.forward)
        slowed = replace(
            device,
            noise=noise,
            overhead_s=device.overhead_s / speed,
            forward_s=lambda load: device.forward_s(load) / speed,
            unit_s=lambda unit: device.unit_s(unit) / speed,
            guess=lambda: CostModel(replace(prices, forward=forward, units=units)),
        )
        return replace(known, device=slowed)


def capacity_per_s(case: FleetCase) -> float:
    """Return the requests a second that a box of speed 1 answers of a burst of such talks, and learns nothing."""
    fleet = SimulatedFleet(case.plan(), [case.hardware(1.0, Noise())], POLICIES["round-robin"](), "answered")
    talks = list(islice(Conversations(zipf=case.zipf).arrivals(10.0, 1e6, 99, 0.0), _BURST))
    return _BURST / fleet.burst_s(talks)


def run_fleet(case: FleetCase) -> dict[str, Any]:
    """Play one case. Raises DeviceError, ModelRefused."""
    policy, teaching = ROWS[case.policy]
    rate_per_s = case.load * capacity_per_s(case) * sum(case.speeds)
    off = [(case.misjudged, 1.0 / case.misjudged)[number % 2] for number in range(len(case.speeds))]
    boxes = [case.hardware(speed) for speed in case.speeds]
    fleet = SimulatedFleet(case.plan(), boxes, policy(), teaching, off)
    talks = Conversations(zipf=case.zipf).arrivals(rate_per_s, case.seconds, case.seed, case.pairs)
    return {"policy": case.policy, "load": case.load, "seed": case.seed, "rate_per_s": rate_per_s} | fleet.play(
        list(talks), case.seconds
    )
