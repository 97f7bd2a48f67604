"""Several simulated boxes behind one placement policy, in one virtual time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from edged.bench.figures import SLO_FACTOR
from edged.bench.traces import Arrival
from edged.placement.node import NodeView, RoutedRequest, blocks_of
from edged.placement.policy import PlacementPolicy
from edged.simulator.hardware import SimulatedHardware
from edged.simulator.plan import SimulationPlan
from edged.simulator.runner import START_S
from edged.simulator.simulation import Simulation, lone_ttft_s

REPORT_S = 0.2
"""Time between two reports of a node, and the age of the oldest that a placement sees."""
FLOOR_S, TOKEN_S = 0.3, 0.1
"""A first token is in time within 5 times the prompt alone, or FLOOR_S; an answer is good with TOKEN_S a token, too."""
_DRAIN_S = 120.0
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Conversations:
    """A load of users who talk: Zipf's law says who asks next, and each prompt has the talk so far before it."""

    users: int = 40
    zipf: float = 1.1
    turn_tokens: int = 150
    answer_tokens: int = 80
    longest: int = 1500
    """Tokens after which a user begins anew."""

    def arrivals(self, rate_per_s: float, seconds: float, seed: int, pair_share: float) -> Iterator[FleetArrival]:
        """Yield requests by a Poisson process; lengths are lognormal with sigma 0.8."""
        chance = random.Random(f"conversations {seed}")
        weights = [1.0 / (rank + 1) ** self.zipf for rank in range(self.users)]
        talks: list[list[int]] = [[] for _ in range(self.users)]
        now = chance.expovariate(rate_per_s)
        while now < seconds:
            user = chance.choices(range(self.users), weights)[0]
            turn, answer = (max(1, round(chance.lognormvariate(-0.32, 0.8) * mean)) for mean in
                            (self.turn_tokens, self.answer_tokens))  # fmt: skip
            talk = talks[user]
            talk += (chance.randrange(30_000) for _ in range(turn))
            arrival = Arrival(now, tuple(talk), answer)
            yield FleetArrival(f"user{user}", arrival, chance.random() < pair_share)
            talk += (chance.randrange(30_000) for _ in range(answer))
            if len(talk) > self.longest:
                talk.clear()
            now += chance.expovariate(rate_per_s)


@dataclass(frozen=True, slots=True)
class FleetArrival:
    """A request of a fleet's load, and whether its answer gives a preference pair."""

    user: str
    arrival: Arrival
    gives_pair: bool


class SimulatedFleet:
    """Boxes that run the engine's own loop in virtual time, and a policy that places each request on one of them."""

    def __init__(self, plan: SimulationPlan, hardware: Sequence[SimulatedHardware], policy: PlacementPolicy) -> None:
        """One box for each of `hardware`. Pairs are learned where their answer was given."""
        self._plan, self._hardware, self._policy = plan, hardware, policy
        nodes = [Simulation(plan, each, lambda _line: None) for each in hardware]
        self.nodes = {f"n{number}": node for number, node in enumerate(nodes)}
        self.views = {
            name: NodeView(name, node.engine.load(), START_S, token_bytes=_TOKEN_BYTES)
            for name, node in self.nodes.items()
        }
        self.placed: list[tuple[str, str, float, FleetArrival]] = []
        """Node, request, forecast of its first token, arrival."""
        self._next_report_s = START_S

    def play(self, load: Sequence[FleetArrival], seconds: float) -> dict[str, Any]:
        """Serve the load and wait for its answers; returns the figures, whose units are in their names."""
        for item in load:
            self._until(START_S + item.arrival.at_s)
            self._place(item)
        for node in self.nodes.values():
            node.engine.run(START_S + seconds + _DRAIN_S, drained=True)
        return self._report(seconds)

    def _until(self, now: float) -> None:
        """Run all boxes up to a moment, with their reports at the times between."""
        while self._next_report_s <= now:
            for name, node in self.nodes.items():
                node.engine.run(self._next_report_s)
                self.views[name].take(node.engine.load(), self._next_report_s)
            self._next_report_s += REPORT_S

    def _place(self, item: FleetArrival) -> None:
        now, ids = START_S + item.arrival.at_s, item.arrival.prompt_ids
        text = b"".join(token.to_bytes(_TOKEN_BYTES, "little") for token in ids)
        request = RoutedRequest(len(text), blocks_of(item.user, text), item.user)
        placement = self._policy.place(request, list(self.views.values()), now)
        name = placement.ranking[0]
        node, view = self.nodes[name], self.views[name]
        view.send(request, now)
        node.engine.run(now)
        sent = node._submit(item.arrival, now)
        self.placed.append((name, sent, placement.forecasts[name], item))
        if item.gives_pair:
            node.engine.learning.submit(next(node._pairs), now)

    def _report(self, seconds: float) -> dict[str, Any]:
        # A prompt's target is the same wherever it is placed.
        first_box = self._hardware[0].device
        most = self._plan.settings.serving.max_batch_tokens
        in_time = good = 0
        firsts, errors = [], []
        for name, sent, forecast_s, item in self.placed:
            answer = self.nodes[name].recorder.answers[sent]
            first_s = answer.ttft_s
            if first_s is None:
                continue
            firsts.append(first_s)
            errors.append(abs(forecast_s - first_s) / first_s)
            early = first_s <= max(SLO_FACTOR * lone_ttft_s(first_box, len(item.arrival.prompt_ids), most), FLOOR_S)
            in_time += early
            good += early and answer.whole and answer.tpot_s <= TOKEN_S
        count = max(1, len(self.placed))
        learned = [
            pair.learned_s - pair.sent_s
            for node in self.nodes.values()
            for pair in node.recorder.pairs.values()
            if pair.learned_s is not None
        ]
        return {
            "requests": len(self.placed),
            "in_time_share": in_time / count,
            "good_share": good / count,
            "ttft_p50_s": median(firsts) if firsts else None,
            "forecast_error_p50": median(errors) if errors else None,
            "pairs_learned": len(learned),
            "learned_p95_s": sorted(learned)[int(0.95 * len(learned))] if learned else None,
            "requests_per_node": [sum(name == each for each, *_ in self.placed) for name in self.nodes],
        }
