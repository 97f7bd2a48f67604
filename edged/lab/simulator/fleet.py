"""Several simulated boxes behind one placement policy, in one virtual time."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Literal

from edged.align.feedback.pair import TokenPair
from edged.lab.bench.figures import SLO_FACTOR
from edged.lab.bench.traces import Arrival
from edged.lab.simulator.hardware import SimulatedHardware
from edged.lab.simulator.plan import SimulationPlan
from edged.lab.simulator.runner import START_S, Coming
from edged.lab.simulator.simulation import Simulation, lone_ttft_s, pairs_of
from edged.placement.homes import rendezvous
from edged.placement.node import NodeLoad, NodeView, RoutedRequest, blocks_of
from edged.placement.policy import PlacementPolicy
from edged.placement.writers import sooner_writer

REPORT_S = 0.2
"""Time between two reports of a node, and the age of the oldest that a placement sees."""
FLOOR_S, TOKEN_S = 0.3, 0.1
"""A first token is in time within 5 times the prompt alone, or FLOOR_S; an answer is good with TOKEN_S a token, too."""
MOVE_S, VERSION_S = 3.0, 0.5
"""Way of an adapter with its optimizer's state, and of a version's weights alone: 300 and 50 MB at 1 Gbit/s."""
LEASE_S = 10.0
"""Least time between two moves of a user's writer."""
SYNC_PAIRS = 100
"""Pairs between two synchronisations of `separate` (LeMix V-B)."""
_DRAIN_S, _LONGEST_BURST_S = 120.0, 86_400.0
_TOKEN_BYTES = 4

Teaching = Literal["answered", "placed", "home", "writer", "separate"]
"""Where a pair is learned: where its answer was given; where the policy places it; at the user's home by hash; at the
user's writer, which moves; at nodes that do nothing else. In the first two each node has versions of its own."""


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

    def __init__(
        self,
        plan: SimulationPlan,
        hardware: Sequence[SimulatedHardware],
        policy: PlacementPolicy,
        teaching: Teaching = "writer",
        misjudged: Sequence[float] = (),
    ) -> None:
        """One box for each of `hardware`; `misjudged` has what each node's reported prices are off by."""
        self._plan, self._hardware, self._policy, self._teaching = plan, hardware, policy, teaching
        nodes = [Simulation(plan, each, lambda _line: None) for each in hardware]
        self.nodes = {f"n{number}": node for number, node in enumerate(nodes)}
        self._misjudged = dict(zip(self.nodes, misjudged or [1.0] * len(nodes), strict=True))
        self.views = {name: NodeView(name, self._load(name), START_S, token_bytes=_TOKEN_BYTES) for name in self.nodes}
        self.placed: list[tuple[str, str, float, FleetArrival]] = []
        """Node, request, forecast of its first token, arrival."""
        self.moves = 0
        self._writers: dict[str, str] = {}
        self._pairs = pairs_of(plan)
        self._learning: dict[int, tuple[str, str]] = {}
        """User and node of each pair that is not learned yet."""
        self._versions: Counter[str] = Counter()
        """Versions of each user that the nodes were told of."""
        self._moved_s: defaultdict[str, float] = defaultdict(lambda: -math.inf)
        """When the adapter of each user that moved is at its writer."""
        self._unsynchronised: list[tuple[str, str]] = []
        self._open: deque[tuple[str, str, float]] = deque()
        """Node, request and forecast of answers that have not told how long they took."""
        self._next_report_s = START_S

    def play(self, load: Sequence[FleetArrival], seconds: float) -> dict[str, Any]:
        """Serve the load and wait for its answers; returns the figures, whose units are in their names."""
        for item in load:
            self._until(START_S + item.arrival.at_s)
            self._place(item)
        last_s = START_S + seconds + _DRAIN_S
        while self._next_report_s <= last_s and (self._open or self._learning):
            self._until(self._next_report_s)
        return self._report()

    def burst_s(self, load: Sequence[FleetArrival]) -> float:
        """Return the seconds in which all that came at once is answered."""
        for item in load:
            self._place(replace(item, arrival=replace(item.arrival, at_s=0.0)))
        for node in self.nodes.values():
            node.engine.run(_LONGEST_BURST_S, drained=True)
        return max(node.engine.now for node in self.nodes.values()) - START_S

    @property
    def serving(self) -> list[NodeView]:
        """The nodes that serve."""
        views = list(self.views.values())
        return views[1:] if self._teaching == "separate" else views

    def _load(self, name: str) -> NodeLoad:
        load, off = self.nodes[name].engine.load(), self._misjudged[name]
        return load.model_copy(update={"forward_prices": tuple(off * price for price in load.forward_prices)})

    def _until(self, now: float) -> None:
        """Run all boxes up to a moment, with their reports at the times between."""
        while self._next_report_s <= now:
            for name, node in self.nodes.items():
                node.engine.run(self._next_report_s)
                self.views[name].take(self._load(name), self._next_report_s)
            self._observe()
            self._publish(self._next_report_s)
            self._next_report_s += REPORT_S

    def _observe(self) -> None:
        """Calibrate forecasts by the answers that have ended."""
        for _ in range(len(self._open)):
            name, sent, forecast_s = self._open.popleft()
            answer = self.nodes[name].recorder.answers[sent]
            if not answer.whole:
                self._open.append((name, sent, forecast_s))
            elif answer.ttft_s is not None:
                self.views[name].observe(forecast_s, answer.ttft_s, answer.token_s[-1] - answer.token_s[0])

    def _publish(self, now: float) -> None:
        """Send versions that are new since the last report to the nodes that read them."""
        for pair_id, place in list(self._learning.items()):
            # A pair on its way to another writer is at none.
            pair = self.nodes[place[1]].recorder.pairs.get(pair_id)
            if pair is not None and pair.learned_s is not None:
                del self._learning[pair_id]
                self._unsynchronised.append(place)
        if self._teaching in ("answered", "placed"):
            self._unsynchronised.clear()
        if len(self._unsynchronised) < (SYNC_PAIRS if self._teaching == "separate" else 1):
            return
        for user, name in dict.fromkeys(self._unsynchronised):
            self._versions[user] += 1
            for reader in self.nodes.keys() - {name}:
                self._come(reader, now + VERSION_S, partial(self.nodes[reader].engine.learning.adopt, user))
        self._unsynchronised.clear()

    def _come(self, name: str, at_s: float, happen: Callable[[], None]) -> None:
        """Let something happen at a node at a moment, before what comes there later."""
        coming = self.nodes[name].engine.commands.coming
        later = [event for event in coming if event.at_s > at_s]
        for _ in later:
            coming.pop()
        coming.extend([Coming(at_s, happen), *later])

    def _place(self, item: FleetArrival) -> None:
        now, ids = START_S + item.arrival.at_s, item.arrival.prompt_ids
        text = b"".join(token.to_bytes(_TOKEN_BYTES, "little") for token in ids)
        # Another version shares no K/V.
        owner = f"{item.user} {self._versions[item.user]}"
        request = RoutedRequest(len(text), blocks_of(owner, text), item.user)
        placement = self._policy.place(request, self.serving, now)
        name = placement.ranking[0]
        node, view = self.nodes[name], self.views[name]
        view.send(request, now)
        node.engine.run(now)
        sent = node._submit(item.arrival, now, item.user)
        self.placed.append((name, sent, placement.forecasts[name], item))
        self._open.append((name, sent, placement.forecasts[name]))
        if item.gives_pair:
            self._teach(item.user, replace(next(self._pairs), adapter=item.user), name, now)

    def _teach(self, user: str, pair: TokenPair, answered: str, now: float) -> None:
        """Queue a pair where it is to be learned."""
        match self._teaching:
            case "placed":
                request = RoutedRequest(pair.num_tokens * _TOKEN_BYTES)
                name = self._policy.place(request, self.serving, now).ranking[0]
            case "home":
                name = rendezvous(user, self.nodes)[0]
            case "writer":
                waiting = sum(each == user for each, _ in self._learning.values())
                name = before = self._writers.setdefault(user, rendezvous(user, self.nodes)[0])
                if now - self._moved_s[user] >= LEASE_S - MOVE_S:
                    name = sooner_writer(before, waiting, self.views.values(), MOVE_S, coming=1)
                if before != name:
                    self._move(user, before, name, now)
            case "separate":
                name = "n0"
            case _:
                name = answered
        # After a move the adapter must be there first.
        self._send_pair(pair, name, max(now, self._moved_s[user]), now)

    def _send_pair(self, pair: TokenPair, name: str, at_s: float, sent_s: float) -> None:
        self._learning[pair.pair_id] = pair.adapter, name
        self.views[name].pairs_coming.append(at_s)
        self._come(name, at_s, partial(self.nodes[name].engine.learning.submit, pair, sent_s))

    def _move(self, user: str, before: str, name: str, now: float) -> None:
        """Hand a user's queued pairs over with the adapter."""
        self.moves += 1
        self._writers[user] = name
        self._moved_s[user] = now + MOVE_S
        source = self.nodes[before].engine
        source.run(now)
        known = dict(source.learning.pairs)
        for pair in source.learning.withdraw(user):
            self._send_pair(pair, name, self._moved_s[user], known[pair.pair_id].sent_s)

    def _report(self) -> dict[str, Any]:
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
        pairs = [pair for node in self.nodes.values() for pair in node.recorder.pairs.values()]
        learned = [pair.learned_s - pair.sent_s for pair in pairs if pair.learned_s is not None]
        waits = sorted(learned) + [None] * (len(pairs) - len(learned))
        return {
            "requests": len(self.placed),
            "in_time_share": in_time / count,
            "good_share": good / count,
            "ttft_p50_s": median(firsts) if firsts else None,
            "forecast_error_p50": median(errors) if errors else None,
            "pairs": len(pairs),
            "pairs_learned": len(learned),
            "learned_p50_s": waits[len(waits) // 2] if waits else None,
            "learned_p95_s": waits[int(0.95 * len(waits))] if waits else None,
            "writers_moved": self.moves,
            "hit_share": self._hit_share(),
            "nodes": {
                name: {
                    "requests": sum(name == each for each, *_ in self.placed),
                    "pairs": len(node.recorder.pairs),
                }
                for name, node in self.nodes.items()
            },
        }

    def _hit_share(self) -> float:
        stats = [node.engine.trie.stats for node in self.nodes.values()]
        return sum(each.hit_tokens for each in stats) / max(1, sum(each.prompt_tokens for each in stats))
