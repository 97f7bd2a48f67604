"""LeMix' own setting, event by event: nodes whose GPUs are the stages of a pipeline, and tasks that serve or train.

A stage runs one forward or backward at a time, in the order in which they became ready. Times are Table II's, in
proportion to the square of a task's length, with noise. Nothing is decoded, and nothing fills memory.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from heapq import heappop, heappush
from statistics import fmean, median
from typing import Any

from edged.placement.stages import Lemix, StagedNode, StagedPlan, StagedTask, deprioritised, place, plan

STAGES, NODES = 2, 4
SLO_FACTOR = 5.0
"""A first token is in time within so many of the model's forwards (LeMix VI-A)."""
LUF_S = 0.076
"""Seconds of a decision by lowest utilization (LeMix Table III)."""
SYNC_TASKS = 100
"""Training tasks between two synchronisations of SEPARATE's weights (LeMix V-B)."""
LINK_BYTES_PER_S = 12.5e9
"""Bytes a second in which weights are synchronised: 100 Gbit/s. The paper's text gives no figure."""
_MEAN_LENGTH = 100
_MISJUDGED = 1.3
_NOISES = 0.05, 0.1, 0.2
_PROFILED = 10
"""Tasks of the profiled lengths that each node begins with: without any, LC is 0, and literally a node gets none."""
_BURST_S, _BURST_SHARE, _BURST_FACTOR = 40.0, 0.2, 3.0


@dataclass(frozen=True, slots=True)
class StagedModel:
    """A model of LeMix' Table II: size, and seconds of a forward and a backward through all stages."""

    size_gb: float
    forward_s: float
    backward_s: float


MODELS = {
    "gpt-400m": StagedModel(1.0, 0.03, 0.04),
    "gpt-1.4b": StagedModel(2.3, 0.08, 0.09),
    "gpt-2.5b": StagedModel(4.5, 0.12, 0.14),
    "llama-8b": StagedModel(13.0, 0.11, 0.15),
    "llama-13b": StagedModel(26.0, 0.24, 0.36),
    "llama-70b": StagedModel(132.0, 0.73, 1.05),
}


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition: how it differs from a steady load on equal nodes of known speed."""

    speeds: tuple[float, ...] = (1.0,) * NODES
    eta_errors: tuple[float, ...] = (1.0,) * NODES
    """The coefficients that the scheduler believes, over the true ones."""
    bursts: bool = False
    """Whether a fifth of each 40 s has 3 times the rate, and the rest half of it."""


CONDITIONS = {
    "steady": Condition(),
    "bursts": Condition(bursts=True),
    "wrong-eta": Condition(eta_errors=(_MISJUDGED, 1 / _MISJUDGED) * (NODES // 2)),
    "unequal": Condition(speeds=(1.0, 1.0, 1 / 2, 1 / 3)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedLoad:
    """A load: a share of the tasks trains; `load` is the work over what the nodes can do, `rate_per_s` instead of it
    sets tasks a second."""

    model: str
    training_share: float
    load: float | None = None
    rate_per_s: float | None = None
    condition: str = "steady"
    tasks: int = 600
    sigma: float = 0.6
    """Of the logarithm of lengths: HH-RLHF's squares have the same coefficient of variation."""
    seed: int = 0
    noise: float | None = None
    """Standard deviation of the logarithm of a time over its coefficient; None: 5 to 20 %, by seed."""

    def rate(self) -> float:
        """Return the tasks a second."""
        if self.rate_per_s is not None:
            return self.rate_per_s
        model, speeds = MODELS[self.model], CONDITIONS[self.condition].speeds
        task_s = (model.forward_s + self.training_share * model.backward_s) / STAGES
        return (self.load or 1.0) * sum(speeds) / task_s

    def arrivals(self) -> Iterator[StagedTask]:
        """Yield the tasks by a Poisson process."""
        chance, rate, now = random.Random(f"stages {self.seed}"), self.rate(), 0.0
        bursts = CONDITIONS[self.condition].bursts
        for _ in range(self.tasks):
            rest = (1 - _BURST_FACTOR * _BURST_SHARE) / (1 - _BURST_SHARE)
            factor = (_BURST_FACTOR if now % _BURST_S < _BURST_SHARE * _BURST_S else rest) if bursts else 1.0
            now += chance.expovariate(rate * factor)
            length = max(1, round(_MEAN_LENGTH * chance.lognormvariate(-(self.sigma**2) / 2, self.sigma)))
            yield StagedTask(now, length, trains=chance.random() < self.training_share)


@dataclass(slots=True)
class _Work:
    """A forward, or what is left of a backward in units; without a task, weights that are loaded."""

    task: StagedTask | None
    seconds: float
    units: int = 0
    """Units of a backward that are left in this stage; 0 for a forward."""


@dataclass(slots=True)
class SimulatedNode:
    """A node as it is, beside what the scheduler believes of it."""

    belief: StagedNode
    speed: float
    queues: list[list[tuple[bool, float, int, _Work]]] = field(default_factory=lambda: [[] for _ in range(STAGES)])
    running: list[bool] = field(default_factory=lambda: [False] * STAGES)
    busy_s: float = 0.0
    open_tasks: int = 0
    placed: int = 0
    ended_s: float = 0.0
    updates: int = 0
    """Training tasks that its weights have seen."""
    responses_s: list[float] = field(default_factory=list)


Choice = Callable[[StagedTask, "StagedCluster"], tuple[SimulatedNode, StagedPlan | None]]


@dataclass(frozen=True, slots=True)
class StagePolicy:
    """A row: how a node is chosen, and what else differs."""

    choose: Callable[[], Choice]
    deprioritises: bool = False
    """Whether training waits while the next inference would be late everywhere: Eq. 4."""
    units: int = 1
    """Units of a backward in each stage; more than one let forwards go first."""
    decision_s: float = 0.0
    synchronises: bool = False
    """Whether weights travel from nodes that train to those that serve, which pause."""


def _lemix(tolerance_s: float = 0.0, lambda_2: float = 0.1, literal: bool = False, blind: bool = False) -> Choice:
    """Choose by Eq. 3; `blind` to lengths: without an offline profile, all tasks are taken to be the mean one."""
    scores = Lemix(tolerance_s, 1.0, lambda_2, literal)

    def choose(task: StagedTask, cluster: StagedCluster) -> tuple[SimulatedNode, StagedPlan | None]:
        length, task.length = task.length, _MEAN_LENGTH if blind else task.length
        belief, planned = scores.choose(task, [node.belief for node in cluster.nodes])
        task.length = length
        return next(node for node in cluster.nodes if node.belief is belief), planned

    return choose


def _least_response(task: StagedTask, cluster: StagedCluster) -> tuple[SimulatedNode, StagedPlan | None]:
    plans = [plan(node.belief, task) for node in cluster.nodes]
    best = min(range(len(plans)), key=lambda number: plans[number].response_s)
    return cluster.nodes[best], plans[best]


def _least(key: Callable[[SimulatedNode], float]) -> Choice:
    return lambda _task, cluster: (min(cluster.nodes, key=key), None)


def _in_turns(train_nodes: Callable[[StagedCluster], int]) -> Choice:
    """Choose in turns among the first nodes for training and the others for serving; of 0, among all."""
    turns = {False: 0, True: 0}

    def choose(task: StagedTask, cluster: StagedCluster) -> tuple[SimulatedNode, StagedPlan | None]:
        split = train_nodes(cluster)
        kind = task.trains and split > 0
        own = cluster.nodes if not split else cluster.nodes[:split] if kind else cluster.nodes[split:]
        turns[kind] += 1
        return own[(turns[kind] - 1) % len(own)], None

    return choose


def _by_formula(cluster: StagedCluster) -> int:
    """N_train = floor(N alpha + 0.5) (LeMix VI-A); at least one of each kind, where the formula gives none."""
    return min(NODES - 1, max(1, int(NODES * cluster.load.training_share + 0.5)))


def _by_rate(cluster: StagedCluster) -> int:
    """Three nodes train under 50 requests a second, else two (LeMix II-B)."""
    return 3 if sum(cluster.now - at_s < 1.0 for at_s in cluster.recent) < 50 else 2


POLICIES: dict[str, StagePolicy] = {
    "separate": StagePolicy(lambda: _in_turns(_by_formula), synchronises=True),
    "separate-2-2": StagePolicy(lambda: _in_turns(lambda _: 2), synchronises=True),
    "separate-1-3": StagePolicy(lambda: _in_turns(lambda _: 3), synchronises=True),
    "separate-dynamic": StagePolicy(lambda: _in_turns(_by_rate), synchronises=True),
    "naive-mix": StagePolicy(lambda: _in_turns(lambda _: 0)),
    "mix-luf": StagePolicy(lambda: _least(lambda node: node.busy_s), decision_s=LUF_S),
    "mix-luf-free": StagePolicy(lambda: _least(lambda node: node.busy_s)),
    "least-loaded": StagePolicy(lambda: _least(lambda node: node.open_tasks)),
    "lemix-literal": StagePolicy(lambda: _lemix(literal=True), deprioritises=True),
    "lemix": StagePolicy(_lemix, deprioritises=True),
    "lemix-no-profile": StagePolicy(lambda: _lemix(blind=True), deprioritises=True),
    "lemix-no-priority": StagePolicy(_lemix),
    "lemix-no-length": StagePolicy(lambda: _lemix(lambda_2=0.0), deprioritises=True),
    "lemix-lengths": StagePolicy(lambda: _lemix(0.0, 200.0, literal=True), deprioritises=True),
    "least-response": StagePolicy(lambda: _least_response),
    "least-response-eq4": StagePolicy(lambda: _least_response, deprioritises=True),
    "units": StagePolicy(lambda: _least_response, deprioritises=True, units=8),
    "lengths-units": StagePolicy(lambda: _lemix(0.0, 200.0, literal=True), deprioritises=True, units=8),
}
"""The rows by name."""


def with_weights(literal: bool, tolerance_s: float, lambda_2: float) -> StagePolicy:
    """Return LeMix' row with other weights of Eq. 1 and 3. lambda1 divides all scores alike, and chooses nothing."""
    return StagePolicy(lambda: _lemix(tolerance_s, lambda_2, literal), deprioritises=True)


class StagedCluster:
    """Nodes in virtual time under one policy."""

    def __init__(self, load: StagedLoad, policy: StagePolicy) -> None:
        condition, model = CONDITIONS[load.condition], MODELS[load.model]
        self.load, self.policy, self.now = load, policy, 0.0
        self.recent: deque[float] = deque(maxlen=50)
        """Moments of the latest arrivals."""
        # The mean of lengths' squares, which the coefficients are over.
        square = _MEAN_LENGTH**2 * math.exp(load.sigma**2)
        forward, backward = model.forward_s / STAGES / square, model.backward_s / STAGES / square
        self._true = forward, backward
        self.nodes = [
            SimulatedNode(StagedNode(f"n{number}", STAGES, forward * wrong / speed, backward * wrong / speed), speed)
            for number, (speed, wrong) in enumerate(zip(condition.speeds, condition.eta_errors, strict=True))
        ]
        for node in self.nodes:
            node.belief.lengths = [_PROFILED, _PROFILED * _MEAN_LENGTH, _PROFILED * square]
        self.target_s = SLO_FACTOR * model.forward_s
        self._choose = policy.choose()
        self._chance = random.Random(f"noise {load.seed}")
        self._noise = _NOISES[load.seed % len(_NOISES)] if load.noise is None else load.noise
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = self._trained = 0
        self._decided_s = 0.0
        self._held: deque[StagedTask] = deque()
        self._decisions_s: list[float] = []
        self._trainings_s: list[float] = []
        self._seen: list[float] = []

    def play(self, tasks: Iterable[StagedTask]) -> dict[str, Any]:
        """Run the tasks to the last one; returns the figures, whose units are in their names."""
        for task in tasks:
            self._at(task.arrival_s, partial(self._arrive, task))
        while self._events:
            self.now, _, happen = heappop(self._events)
            happen()
            while self._held and not self._late():
                self._dispatch(self._held.popleft())
        return self._report()

    def _at(self, moment: float, happen: Callable[[], None]) -> None:
        self._number += 1
        heappush(self._events, (moment, self._number, happen))

    def _arrive(self, task: StagedTask) -> None:
        self.recent.append(self.now)
        self._decided_s = max(self._decided_s, self.now) + self.policy.decision_s
        self._at(self._decided_s, partial(self._decide, task))

    def _decide(self, task: StagedTask) -> None:
        if task.trains and self.policy.deprioritises and (self._held or self._late()):
            self._held.append(task)
        else:
            self._dispatch(task)

    def _late(self) -> bool:
        """Whether an inference of the mean length that came now would be late at every node: Eq. 4."""
        return deprioritised(StagedTask(self.now, _MEAN_LENGTH), (node.belief for node in self.nodes), self.target_s)

    def _dispatch(self, task: StagedTask) -> None:
        begun = time.perf_counter()
        node, planned = self._choose(task, self)
        self._decisions_s.append(time.perf_counter() - begun)
        place(node.belief, task, planned or plan(node.belief, task))
        node.open_tasks += 1
        node.placed += 1
        self._ready(node, 0, _Work(task, self._true[0] * task.length**2))

    def _ready(self, node: SimulatedNode, stage: int, work: _Work) -> None:
        self._number += 1
        # Units give way to forwards; a backward that is one goes in its turn.
        heappush(node.queues[stage], (work.units > 0 and self.policy.units > 1, self.now, self._number, work))
        self._start(node, stage)

    def _start(self, node: SimulatedNode, stage: int) -> None:
        if node.running[stage] or not node.queues[stage]:
            return
        work = heappop(node.queues[stage])[-1]
        noise, seconds = self._noise, work.seconds
        if work.task is not None:
            seconds *= self._chance.lognormvariate(-0.5 * noise**2, noise) / node.speed
            node.busy_s += seconds
            if not work.units:
                work.task.start_forward[stage] = self.now
        node.running[stage] = True
        self._at(self.now + seconds, partial(self._end, node, stage, work))

    def _end(self, node: SimulatedNode, stage: int, work: _Work) -> None:
        node.running[stage], task = False, work.task
        if task is not None and not work.units:
            # Calibrated by what happened: Algorithm 2, line 14.
            task.end_forward[stage] = self.now
            if stage + 1 < STAGES:
                self._ready(node, stage + 1, _Work(task, work.seconds))
            elif task.trains:
                self._backward(node, stage, task)
            else:
                node.responses_s.append(self.now - task.arrival_s)
                self._seen.append(node.updates / self._trained if self._trained else 1.0)
                self._close(node, task)
        elif task is not None and work.units > 1:
            self._ready(node, stage, _Work(task, work.seconds, work.units - 1))
        elif task is not None:
            task.end_backward[stage] = self.now
            if stage:
                self._backward(node, stage - 1, task)
            else:
                self._learned(node, task)
        self._start(node, stage)

    def _backward(self, node: SimulatedNode, stage: int, task: StagedTask) -> None:
        units = self.policy.units
        self._ready(node, stage, _Work(task, self._true[1] * task.length**2 / units, units))

    def _learned(self, node: SimulatedNode, task: StagedTask) -> None:
        self._trainings_s.append(self.now - task.arrival_s)
        node.updates += 1
        self._trained += 1
        belief = node.belief
        belief.training = [other for other in belief.training if other is not task]
        self._close(node, task)
        if self.policy.synchronises and self._trained % SYNC_TASKS == 0:
            pause_s = MODELS[self.load.model].size_gb * 1e9 / LINK_BYTES_PER_S
            for other in self.nodes:
                if other.updates < self._trained:
                    other.updates = self._trained
                    for stage in range(STAGES):
                        self._ready(other, stage, _Work(None, pause_s))

    def _close(self, node: SimulatedNode, task: StagedTask) -> None:
        node.open_tasks -= 1
        node.ended_s = self.now
        tasks = node.belief.tasks
        # The last one stays as task_prev.
        node.belief.tasks = [other for other in tasks[:-1] if other is not task] + tasks[-1:]

    def _report(self) -> dict[str, Any]:
        responses = [each for node in self.nodes for each in node.responses_s]
        end_s = max(node.ended_s for node in self.nodes)
        busy = [node.busy_s for node in self.nodes]
        return {
            "in_time_share": sum(each <= self.target_s for each in responses) / max(1, len(responses)),
            "throughput_per_s": sum(node.placed for node in self.nodes) / end_s,
            "response_s": fmean(responses) if responses else None,
            "training_s": fmean(self._trainings_s) if self._trainings_s else None,
            "utilization_share": sum(busy) / (NODES * STAGES * end_s),
            "ended_s": end_s,
            "nodes_used": sum(node.placed > 0 for node in self.nodes),
            "updates_seen_share": fmean(self._seen) if self._seen else None,
            "decision_ms_p50": 1e3 * median(self._decisions_s),
            "response_by_node_s": [fmean(node.responses_s) if node.responses_s else None for node in self.nodes],
            "ended_by_node_s": [node.ended_s for node in self.nodes],
            "busy_by_node_s": [each / STAGES for each in busy],
        }


def play_stages(case: tuple[StagedLoad, str, tuple[float, float] | None]) -> dict[str, Any]:
    """Play one load under one row; the third is LeMix' tau and lambda2, where they are not the row's own."""
    load, name, weights = case
    policy = with_weights(name == "lemix-literal", *weights) if weights else POLICIES[name]
    return asdict(load) | {"policy": name} | StagedCluster(load, policy).play(load.arrivals())
