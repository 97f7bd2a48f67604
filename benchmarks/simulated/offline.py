"""The fewest late first tokens that one server could have had, had it known every arrival before.

The server computes one prompt at a time, alone on the device, may put it aside for another at no cost, and does nothing
else. `exact` tries all sets of prompts; for more of them the optimum lies between `reachable` and `at_most`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

MAX_EXACT = 14
"""Most jobs that `exact` is meant for: it looks at every set of them that can be in time."""


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt: when it comes, when its first token is due, and how long it takes alone; seconds."""

    released_s: float
    due_s: float
    work_s: float


def feasible(jobs: Sequence[Job]) -> bool:
    """Return whether all jobs can be in time: they are if they are by earliest due date, with preemption."""
    waiting: list[tuple[float, float]] = []
    coming = sorted(jobs, key=lambda job: job.released_s)
    now, index = 0.0, 0
    while waiting or index < len(coming):
        if not waiting:
            now = max(now, coming[index].released_s)
        while index < len(coming) and coming[index].released_s <= now:
            heapq.heappush(waiting, (coming[index].due_s, coming[index].work_s))
            index += 1
        due_s, left_s = heapq.heappop(waiting)
        next_s = coming[index].released_s if index < len(coming) else float("inf")
        worked_s = min(left_s, next_s - now)
        now += worked_s
        if now > due_s + 1e-9:
            return False
        if worked_s < left_s:
            heapq.heappush(waiting, (due_s, left_s - worked_s))
    return True


def exact(jobs: Sequence[Job]) -> int:
    """Return the most jobs in time, by trying all sets of them."""

    def most(chosen: list[Job], rest: Sequence[Job], best: int) -> int:
        if len(chosen) + len(rest) <= best:
            return best
        if not rest:
            return len(chosen)
        if feasible(with_next := [*chosen, rest[0]]):
            best = max(best, most(with_next, rest[1:], best))
        return most(chosen, rest[1:], best)

    return most([], jobs, 0)


def reachable(jobs: Sequence[Job]) -> int:
    """Return a number of jobs in time that a schedule reaches."""
    return len(chosen(jobs))


def chosen(jobs: Sequence[Job]) -> list[Job]:
    """Return jobs that can all be in time: the shortest are taken first."""
    found: list[Job] = []
    for job in sorted(jobs, key=lambda job: job.work_s):
        if feasible([*found, job]):
            found.append(job)
    return found


def at_most(jobs: Sequence[Job]) -> int:
    """Return an upper bound of the most jobs in time, which is exact where all come at once.

    Of the jobs within a window of time at least those are late that Moore and Hodgson (1968) find when all of these
    come at its beginning. Windows that do not overlap share no job, so their late jobs add up; the best sequence of
    windows is found by dynamic programming.
    """
    late_until: dict[float, int] = {}
    by_due = sorted(jobs, key=lambda job: job.due_s)
    for begin_s in sorted({job.released_s for job in jobs}):
        # Windows that begin later end later, too, so those before this one are complete.
        before = max((late for end_s, late in late_until.items() if end_s <= begin_s), default=0)
        taken: list[float] = []
        busy_s, late = 0.0, 0
        for job in by_due:
            if job.released_s < begin_s:
                continue
            heapq.heappush(taken, -job.work_s)
            busy_s += job.work_s
            if begin_s + busy_s > job.due_s + 1e-9:
                busy_s += heapq.heappop(taken)
                late += 1
                late_until[job.due_s] = max(late_until.get(job.due_s, 0), before + late)
    return len(jobs) - max(late_until.values(), default=0)
