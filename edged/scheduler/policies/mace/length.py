"""The length of MACE's iterations: prompts make them no longer than is good for those who may come meanwhile."""

from bisect import bisect, insort
from collections import deque
from itertools import accumulate

from edged.scheduler.cost.prices import Load
from edged.scheduler.planning.bin_builder import BinBuilder
from edged.scheduler.policies.hybrid import Hybrid
from edged.scheduler.task import Kind, Task

LATEST = 64
"""Number of the latest requests that stand for those who may come next."""
FEW = 16
"""Number of requests from which on theirs are the targets to come; as many as are missing are in no hurry."""
PLACES = (0, 1, 2, 4, 8, 16, 32)
"""Places among the latest requests' targets, the least first, for which lengths are weighed."""


class FairLength(Hybrid):
    """Hybrid iterations whose length has the least share of requests late.

    A request that comes while an iteration runs waits for its end, and then for one as long: within one of L seconds
    all are late whose target is below L, and of those with a target T up to 2 L the share (2 L - T) / L. But the
    shorter iterations are, the more often the weights are read and decodes computed: where n tokens take longer by a
    factor, so much fewer of the prompts that are waiting are in time. The sum of both shares is least for the chosen L.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._targets: list[float] = []
        """Targets of the latest requests, in seconds, in their order."""
        self._sums = [0.0]
        """Sums of the first n `_targets`."""

    def arrived(self, task: Task, now: float) -> None:
        """Note a request's target; candidates and practice are nobody's requests."""
        if task.kind is Kind.PREFILL and not task.candidate:
            self._latest.append(task.deadline_s - task.arrival_s)
            insort(self._targets, self._latest[-1])
            if len(self._latest) > LATEST:
                del self._targets[bisect(self._targets, self._latest.popleft()) - 1]
            self._sums = [0.0, *accumulate(self._targets)]

    def most_tokens(self, builder: BinBuilder) -> int:
        """Return the most prompt tokens of the iteration beside the decodes that `builder` has."""
        cost, most, targets = self.cost, builder.tokens_left, self._targets
        token_s, fixed_s = cost.token_s, cost.priced_s(builder.load) or cost.pass_s
        free = cost.free_tokens(builder.load if builder.load.decodes else Load(decodes=1))
        longest_s = fixed_s + max(0, most - free) * token_s
        if not targets or most <= 0 or longest_s <= 0.0:
            return most
        best, found, rate = self._late(longest_s), most, most / longest_s
        for length_s in (targets[place] / 2.0 for place in PLACES[: len(targets).bit_length()]):
            if length_s >= longest_s:
                break
            tokens = free + int((length_s - fixed_s) / token_s)
            if tokens <= 0 or length_s <= 0.0:
                continue
            share = self._late(length_s) + max(0.0, 1.0 - tokens / length_s / rate)
            if share < best:
                best, found = share, min(most, tokens)
        return found

    def _late(self, length_s: float) -> float:
        """Return the share of the latest requests that would be late, had they come in an iteration so long."""
        targets, sums = self._targets, self._sums
        below, partly = bisect(targets, length_s), bisect(targets, 2.0 * length_s)
        return (below + 2.0 * (partly - below) - (sums[partly] - sums[below]) / length_s) / max(FEW, len(targets))
