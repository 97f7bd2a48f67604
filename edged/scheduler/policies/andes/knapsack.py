"""The knapsack of readers (Andes 2.4): who is served where not all fit, and who gives way, as pure functions."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from edged.scheduler.reader import Reader
from edged.scheduler.task import Task

_SIZES = 4
"""Batch sizes that are tried, about: in between, gains hardly change."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A request with a reader that asks to be served: the pages that it holds or needs, and the QoE that this gains."""

    task: Task
    reader: Reader
    pages: int
    gain: float
    runs: bool
    """Whether it is in memory; else it waits."""

    @property
    def rank(self) -> tuple[float, bool, float, int]:
        """Its place: by gain per page (Eq. 2.6), those that run before those that wait, then who runs dry first."""
        return -self.gain / max(1, self.pages), not self.runs, self.reader.dry_s, self.task.task_id


def total(contenders: Iterable[Contender]) -> float:
    """Return the QoE that serving all of them gains."""
    return sum([one.gain for one in contenders])


def batch_sizes(
    needs: Iterable[int], pages: int, slots: int, token_s: Callable[[int], float], fastest_s: float
) -> range:
    """Return the numbers of contenders of which one may be the best to serve at once, the largest first (2.4.2).

    None is more than fit, by the pages that each `needs`, or more than `slots`; none is less than the most of which
    all get a token within `fastest_s`, where `token_s` of them is how long one takes.
    """
    most = min(max(0, slots), bisect_right(list(accumulate(sorted(needs))), pages))
    fast = bisect_right(range(1, most + 1), fastest_s, key=token_s)
    return range(most, max(1, fast) - 1, -max(1, (most - fast) // (_SIZES - 1)))


def pack(ranked: Sequence[Contender], pages: int, most: int) -> list[Contender]:
    """Return those of `ranked` contenders, at most so many, who are served within `pages`.

    Where Algorithm 1 ends, at the first who does not fit, this passes over them. If one alone gains more than all who
    were chosen so, that one goes first.
    """
    served = _filled(ranked, pages, most)
    fits = [one for one in ranked if one.pages <= pages]
    best = max(fits, key=lambda one: one.gain, default=None)
    if best is not None and best.gain > total(served):
        return _filled([best, *(one for one in ranked if one is not best)], pages, most)
    return served


def _filled(ranked: Iterable[Contender], pages: int, most: int) -> list[Contender]:
    served: list[Contender] = []
    for one in ranked:
        if len(served) >= most:
            break
        if one.pages <= pages:
            served.append(one)
            pages -= one.pages
    return served


def fewest(lowest: Iterable[Contender], pages: int, least: int) -> list[Contender] | None:
    """Return the victims, at least so many, whose `pages` suffice: from the `lowest` up, without the needless.

    None where all of them do not suffice.
    """
    victims: list[Contender] = []
    for one in lowest:
        if pages <= 0 and len(victims) >= least:
            break
        victims.append(one)
        pages -= one.pages
    if pages > 0 or len(victims) < least:
        return None
    for one in reversed(victims[:]):
        if pages + one.pages <= 0 and len(victims) > least:
            victims.remove(one)
            pages += one.pages
    return victims
