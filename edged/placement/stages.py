"""LeMix' forecast of a node whose GPUs are stages of a pipeline: Algorithm 1 to the letter, and Eq. 1 to 4."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class StagedTask:
    """A batch of `size` queries of `length` tokens, with its planned times by stage, in seconds."""

    arrival_s: float
    length: int
    size: int = 1
    trains: bool = False
    start_forward: list[float] = field(default_factory=list)
    end_forward: list[float] = field(default_factory=list)
    start_backward: list[float] = field(default_factory=list)
    end_backward: list[float] = field(default_factory=list)


@dataclass(slots=True)
class StagedNode:
    """A node of `stages` GPUs whose forward and backward of a task take eta * size * length^2 a stage (LeMix IV-A)."""

    name: str
    stages: int
    forward_eta: float
    backward_eta: float
    tasks: list[StagedTask] = field(default_factory=list)
    """Tasks in order of placing; the last one is the paper's task_prev. Those before it may go once they have ended."""
    training: list[StagedTask] = field(default_factory=list)
    """Tasks whose backward no later forward has been planned behind yet."""
    lengths: list[float] = field(default_factory=lambda: [0, 0.0, 0.0])
    """Number, sum and sum of squares of the lengths of all tasks that were placed there."""

    def forward_s(self, task: StagedTask) -> float:
        """Seconds of a task's forward in one stage."""
        return self.forward_eta * task.size * task.length**2

    def backward_s(self, task: StagedTask) -> float:
        """Seconds of a task's backward in one stage."""
        return self.backward_eta * task.size * task.length**2


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """The result of Algorithm 1: idleness increased II and response time R in seconds, and forward times by stage."""

    idle_s: float
    response_s: float
    start_forward: tuple[float, ...]
    end_forward: tuple[float, ...]
    passed: tuple[StagedTask, ...]
    """Training tasks whose whole backward lies before this forward."""


def plan(node: StagedNode, task: StagedTask) -> StagedPlan:
    """Plan a task's forward at a node: LeMix Algorithm 1. Its line 15 sums backwards between two forwards anew in
    each stage, as II of a stage is the gap less what filled it."""
    before = node.tasks[-1] if node.tasks else None
    pending, idle_s = list(node.training), 0.0
    starts: list[float] = []
    ends: list[float] = []
    passed: list[StagedTask] = []
    for stage in range(node.stages):
        free_s = before.end_forward[stage] if before else task.arrival_s
        start = max(ends[-1] if ends else task.arrival_s, free_s)
        end, offset, left = start + node.forward_s(task), 0.0, []
        for other in pending:
            if end <= other.start_backward[stage]:
                left.append(other)
                continue
            start = max(start, other.end_backward[stage])
            end = start + node.forward_s(task)
            if free_s <= other.start_backward[stage]:
                offset += node.backward_s(other)
            if stage == 0:
                passed.append(other)
            else:
                left.append(other)
        pending = left
        idle_s += start - free_s - offset
        starts.append(start)
        ends.append(end)
    return StagedPlan(idle_s, ends[-1] - task.arrival_s, tuple(starts), tuple(ends), tuple(passed))


def place(node: StagedNode, task: StagedTask, planned: StagedPlan) -> None:
    """Put a task on a node as planned; where it trains its backward follows, from the last stage to the first."""
    task.start_forward, task.end_forward = list(planned.start_forward), list(planned.end_forward)
    node.training = [other for other in node.training if other not in planned.passed]
    if task.trains:
        at, starts, ends = task.end_forward[-1], [0.0] * node.stages, [0.0] * node.stages
        for stage in reversed(range(node.stages)):
            busy = max((other.end_backward[stage] for other in node.training), default=0.0)
            starts[stage] = max(at, busy, task.end_forward[stage])
            at = ends[stage] = starts[stage] + node.backward_s(task)
        task.start_backward, task.end_backward = starts, ends
        node.training.append(task)
    node.tasks.append(task)
    node.lengths = [known + new for known, new in zip(node.lengths, (1, task.length, task.length**2), strict=True)]


def idleness_profit(node: StagedNode, task: StagedTask, planned: StagedPlan, tolerance_s: float) -> float:
    """LeMix Eq. 1: IP = -max(II / S - (a - a of the task before), tau). With one stage it is -tau for any tau >= 0."""
    gap_s = task.arrival_s - node.tasks[-1].arrival_s if node.tasks else 0.0
    return -max(planned.idle_s / node.stages - gap_s, tolerance_s)


def length_consistency(node: StagedNode, task: StagedTask) -> float:
    """LeMix Eq. 2, whose text is cut: read as the normal density of the task's length among those of the node.

    0 where these are all alike, or none.
    """
    count, total, squares = node.lengths
    mean = total / max(1, count)
    deviation = math.sqrt(max(0.0, squares / max(1, count) - mean**2))
    if not deviation:
        return 0.0
    return math.exp(-0.5 * ((task.length - mean) / deviation) ** 2) / (deviation * math.sqrt(2.0 * math.pi))


def score(profit: float, consistency: float, response_s: float, lambda_1: float, lambda_2: float) -> float:
    """LeMix Eq. 3: f = (IP + lambda2 LC) / (lambda1 R); the node with the largest gets the task."""
    return (profit + lambda_2 * consistency) / (lambda_1 * response_s)


@dataclass(frozen=True, slots=True)
class Lemix:
    """LeMix' choice of a node: `literal` by Eq. 3, else mended, with the numerator less the least of all nodes.

    Literal with tau > 0 the numerator is below zero wherever LC is small, so that the slowest node wins.
    """

    tolerance_s: float = 0.0
    lambda_1: float = 1.0
    lambda_2: float = 0.1
    literal: bool = True

    def choose(self, task: StagedTask, nodes: Sequence[StagedNode]) -> tuple[StagedNode, StagedPlan]:
        """Return the node with the largest score, the first of equal ones, and the task's plan there."""
        plans = [plan(node, task) for node in nodes]
        profits = [
            idleness_profit(node, task, planned, self.tolerance_s) for node, planned in zip(nodes, plans, strict=True)
        ]
        lengths = [length_consistency(node, task) for node in nodes]
        if not self.literal:
            least = min(profit + self.lambda_2 * own for profit, own in zip(profits, lengths, strict=True))
            # All above zero, so that a shorter response always counts.
            profits = [profit - least + 1.0 for profit in profits]
        scores = [
            score(profit, own, planned.response_s, self.lambda_1, self.lambda_2)
            for profit, own, planned in zip(profits, lengths, plans, strict=True)
        ]
        best = max(range(len(nodes)), key=lambda index: (scores[index], -index))
        return nodes[best], plans[best]


def deprioritised(task: StagedTask, nodes: Iterable[StagedNode], target_s: float) -> bool:
    """LeMix Eq. 4: whether training gives way, as the next inference `task` would be late at every node.

    `target_s` is tau_R, such as five times the latency of an inference alone.
    """
    soonest = min(
        max((other.end_forward[-1] for other in node.tasks), default=task.arrival_s) + node.forward_s(task)
        for node in nodes
    )
    return soonest - task.arrival_s > target_s
