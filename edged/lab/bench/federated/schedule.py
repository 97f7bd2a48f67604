"""Campaigns that share boxes, event by event: stand-ins for Venn's workloads, and the device scheduler as it is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from statistics import fmean, median
from typing import Any

from edged.federated.campaigns import Campaign
from edged.federated.device_scheduler import DeviceScheduler
from edged.federated.policies import POLICIES
from edged.federated.signature import Capacity
from edged.lab.bench.federated.devices import (
    DAY_S,
    STAND_INS,
    FleetError,
    Session,
    draw_boxes,
    draw_sessions,
    read_boxes,
    read_sessions,
)

REQUIREMENTS = {
    "general": Capacity(),
    "compute": Capacity(tokens_per_s=60),
    "memory": Capacity(memory_mb=32768),
    "resource": Capacity(memory_mb=32768, tokens_per_s=60),
}
"""Venn's four: any box, a fast one, one with much memory, one with both."""
_USUAL_DEMAND, _USUAL_SHARE = 12, 0.5
_DEMANDS, _ROUNDS = (1, 38), (5, 40)
"""Half of the campaigns have the usual demand, the others one between these (log-uniform).

Venn's public code lists 33 campaigns: of 500 boxes a round about half of them, of 20 to 1,500 the others, and of 530 to
4,000 rounds.
"""
TOY = "toy"
_GAP_S = 1800.0
_DEADLINE_S, _DEADLINE_PER_BOX_S = (300.0, 1000.0), 100.0
_MAX_DAYS = 400


def _mean(low: float, high: float) -> float:
    return (high - low) / math.log(high / low)


def _log_uniform(chance: random.Random, low: float, high: float) -> int:
    return round(math.exp(chance.uniform(math.log(low), math.log(high))))


_MEAN_DEMAND = _USUAL_SHARE * _USUAL_DEMAND + (1 - _USUAL_SHARE) * _mean(*_DEMANDS)
_MEAN_TOTAL = _MEAN_DEMAND * _mean(*_ROUNDS)
WORKLOADS: dict[str, Callable[[int, int], bool]] = {
    "even": lambda demand, rounds: True,
    "small": lambda demand, rounds: demand * rounds < _MEAN_TOTAL,
    "large": lambda demand, rounds: demand * rounds >= _MEAN_TOTAL,
    "low": lambda demand, rounds: demand < _MEAN_DEMAND,
    "high": lambda demand, rounds: demand >= _MEAN_DEMAND,
    **{name: lambda demand, rounds: True for name in REQUIREMENTS},
}
"""Which campaigns a workload has (Venn 4.5.1); half of those of a requirement's name ask for that one (4.5.4)."""


def draw_campaigns(workload: str, number: int, seed: int, declares_rounds: bool) -> list[Campaign]:
    """Synthesise a workload's campaigns; they come by a Poisson process after a day in which boxes are counted."""
    chance, now = random.Random(f"campaigns {seed}"), DAY_S
    campaigns: list[Campaign] = []
    while len(campaigns) < number:
        usual = chance.random() < _USUAL_SHARE
        demand, rounds = (_log_uniform(chance, *bounds) for bounds in (_DEMANDS, _ROUNDS))
        demand = _USUAL_DEMAND if usual else demand
        weights = [3.0 if name == workload else 1.0 for name in REQUIREMENTS]
        requires = chance.choices(list(REQUIREMENTS.values()), weights)[0]
        if not WORKLOADS[workload](demand, rounds):
            continue
        least_s, most_s = _DEADLINE_S
        campaigns.append(
            Campaign(
                name=str(len(campaigns)), submitted_s=now, requires=requires, demand=demand, rounds=rounds,
                deadline_s=min(most_s, max(least_s, _DEADLINE_PER_BOX_S * demand)), declares_rounds=declares_rounds,
            )
        )  # fmt: skip
        now += chance.expovariate(1 / _GAP_S)
    return campaigns


def toy() -> tuple[list[Campaign], Iterator[Session]]:
    """Return Venn's Figure 4.3: a box each second, the odd ones fit for all three campaigns, the even ones for one."""
    begin_s, kinds = 3600, (Capacity(), REQUIREMENTS["compute"])
    campaigns = [
        Campaign(
            name=name, submitted_s=begin_s, requires=requires, demand=demand, rounds=1, deadline_s=1.0, overcommit=1.0
        )
        for name, requires, demand in (("keyboard", kinds[0], 3), ("emoji-1", kinds[1], 4), ("emoji-2", kinds[1], 4))
    ]
    # Boxes that came before the campaigns are counted, and gone.
    sessions = (
        Session(second, begin_s - 0.5 if second < begin_s else math.inf, str(second), kinds[second % 2], 0.0)
        for second in count(1)
        if second != begin_s
    )
    return campaigns, sessions


@dataclass(slots=True)
class CampaignRun:
    """A campaign's way through a simulation."""

    campaign: Campaign
    rounds_left: int
    delays_s: list[float] = field(default_factory=list)
    """Seconds from each request until it had its boxes."""
    responses_s: list[float] = field(default_factory=list)
    """Seconds from each dispatch to the round's end, of rounds that succeeded."""
    aborted: int = 0
    completion_s: float = 0.0


class ScheduleSimulation:
    """A simulation of one workload under one policy; boxes serve once in 24 hours."""

    def __init__(self, campaigns: Sequence[Campaign], policy: str, seed: int, tiers: int) -> None:
        self.runs = [CampaignRun(campaign, campaign.rounds) for campaign in campaigns]
        self._scheduler = DeviceScheduler(POLICIES[policy], random.Random(f"schedule {seed}"), tiers)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._present: dict[str, Session] = {}
        self._rested_s: dict[str, float] = {}
        self._owner = {run.campaign.name: run for run in self.runs}
        self._left = len(self.runs)

    def play(self, sessions: Iterable[Session]) -> list[CampaignRun]:
        """Play until all campaigns have ended. Raises FleetError where they do not."""
        for run in self.runs:
            self._at(run.campaign.submitted_s, partial(self._open, run))
        for session in sessions:
            while self._left and self._events and self._events[0][0] <= session.start_s:
                now, _, event = heappop(self._events)
                event(now)
                self._dispatch(now)
            if not self._left or session.start_s > _MAX_DAYS * DAY_S:
                break
            self._arrive(session, session.start_s)
            self._dispatch(session.start_s)
        if self._left:
            raise FleetError(f"{self._left} campaigns have not ended after {_MAX_DAYS} days: give more boxes")
        return self.runs

    def _at(self, moment: float, event: Callable[[float], None]) -> None:
        heappush(self._events, (moment, next(self._order), event))

    def _arrive(self, session: Session, now: float) -> None:
        """Check a box in; one that served within 24 hours waits until they are over, if it stays."""
        if session.box in self._present and self._present[session.box].end_s > now:
            return
        ready_s = self._rested_s.get(session.box, now)
        if ready_s > now:
            if ready_s < session.end_s:
                self._at(ready_s, partial(self._arrive, session))
            return
        self._present[session.box] = session
        self._scheduler.check_in(session.box, session.capacity, now)
        self._at(session.end_s, lambda _: self._scheduler.leave(session.box, session.capacity))

    def _open(self, run: CampaignRun, now: float) -> None:
        self._scheduler.request(run.campaign, run.rounds_left, now)

    def _dispatch(self, now: float) -> None:
        """Start the rounds whose requests are full."""
        for request in self._scheduler.full:
            campaign, run = request.campaign, self._owner[request.campaign.name]
            run.delays_s.append(now - request.opened_s)
            boxes = [self._present[box] for box in request.granted]
            self._rested_s.update((box.box, now + DAY_S) for box in boxes)
            answering = [box for box in boxes if now + box.response_s <= box.end_s]
            answering.sort(key=lambda box: box.response_s)
            last_s = answering[campaign.needed - 1].response_s if len(answering) >= campaign.needed else math.inf
            self._at(now + min(last_s, campaign.deadline_s), partial(self._end, run, last_s))
            if answering:
                # Late answers count for nothing but the times.
                self._at(now + answering[-1].response_s, partial(self._learn, campaign, answering))
        self._scheduler.full.clear()

    def _learn(self, campaign: Campaign, boxes: Sequence[Session], now: float) -> None:
        for box in boxes:
            self._scheduler.answered(campaign, box.capacity, box.response_s)

    def _end(self, run: CampaignRun, last_s: float, now: float) -> None:
        """End a round and ask for the next one, or for the same again."""
        if last_s > run.campaign.deadline_s:
            run.aborted += 1
        else:
            run.responses_s.append(last_s)
            run.rounds_left -= 1
        if run.rounds_left:
            self._open(run, now)
        else:
            run.completion_s = now - run.campaign.submitted_s
            self._scheduler.ended(run.campaign)
            self._left -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleLoad:
    """A workload of so many campaigns and boxes, for a number of seeds; files take the place of synthesised boxes."""

    workload: str
    campaigns: int
    boxes: int
    seeds: int
    tiers: int
    declares_rounds: bool
    devices: Path | None = None
    trace: Path | None = None

    def draw(self, seed: int) -> tuple[list[Campaign], Iterator[Session]]:
        """Return the campaigns and the boxes' sessions. Raises FleetError."""
        if self.workload == TOY:
            return toy()
        boxes = read_boxes(self.devices) if self.devices else draw_boxes(self.boxes, seed)
        sessions = read_sessions(self.trace, boxes, seed) if self.trace else draw_sessions(boxes, seed)
        campaigns = draw_campaigns(self.workload, self.campaigns, seed, self.declares_rounds)
        for name, requires in REQUIREMENTS.items():
            able = sum(box.meets(requires) for box in boxes)
            asked = max((campaign.asked for campaign in campaigns if campaign.requires == requires), default=0)
            if able < asked:
                told = f'{able} of {len(boxes)} boxes meet the requirement "{name}", and a round asks for {asked}'
                raise FleetError(f"{told}: give more boxes")
        return campaigns, sessions


def run_schedule(load: ScheduleLoad, policies: Sequence[str], on_run: Callable[[int], None]) -> dict[str, Any]:
    """Play the same load under each policy, for each seed, and return the report; `on_run` hears how many runs ended.

    Figures are medians over the seeds, of means over campaigns or rounds. Raises FleetError.
    """
    runs: dict[str, list[list[CampaignRun]]] = {policy: [] for policy in policies}
    ended = count(1)
    for seed in range(load.seeds):
        campaigns, source = load.draw(seed)
        drawn: list[Session] = []
        for policy in policies:
            simulation = ScheduleSimulation(campaigns, policy, seed, load.tiers)
            runs[policy].append(simulation.play(_again(drawn, source)))
            on_run(next(ended))
    return {
        "workload": load.workload,
        "campaigns": len(campaigns),
        "seeds": load.seeds,
        "tiers": load.tiers,
        "declared_rounds": load.declares_rounds,
        "stand_ins": None if load.workload == TOY else STAND_INS,
        "policies": {policy: _figures(own, runs.get("random")) for policy, own in runs.items()},
    }


def _again(drawn: list[Session], source: Iterator[Session]) -> Iterator[Session]:
    """Yield what was drawn already, then more of the source."""
    yield from tuple(drawn)
    for session in source:
        drawn.append(session)
        yield session


def _figures(own: list[list[CampaignRun]], random_runs: list[list[CampaignRun]] | None) -> dict[str, Any]:
    """Return a policy's figures over the seeds."""
    return {
        "jct_s": median(_jct_s(runs) for runs in own),
        "over_random": _over(own, random_runs),
        "by_seed": [_jct_s(runs) for runs in own],
        "delay_s": median(fmean(delay_s for run in runs for delay_s in run.delays_s) for runs in own),
        "response_s": median(fmean(last_s for run in runs for last_s in run.responses_s) for runs in own),
        "aborted": median(sum(run.aborted for run in runs) for runs in own),
        "over_random_by_requirement": {
            name: _over(*(_asking(requires, each) for each in (own, random_runs)))
            for name, requires in REQUIREMENTS.items()
        },
    }


def _jct_s(runs: Iterable[CampaignRun]) -> float:
    return fmean(run.completion_s for run in runs)


def _asking(requires: Capacity, runs: list[list[CampaignRun]] | None) -> list[list[CampaignRun]] | None:
    """Return the runs of campaigns that ask for this."""
    return runs and [[run for run in seed if run.campaign.requires == requires] for seed in runs]


def _over(own: list[list[CampaignRun]] | None, others: list[list[CampaignRun]] | None) -> float | None:
    """Return how many times longer campaigns take under the others, in the median of the seeds that have any."""
    pairs = zip(own or (), others or (), strict=False)
    ratios = [_jct_s(there) / _jct_s(here) for here, there in pairs if here]
    return median(ratios) if ratios else None
