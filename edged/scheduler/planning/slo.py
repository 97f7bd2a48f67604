"""Service-level objectives: TTFT and TBT targets by service class, and the pace of prompts that meets them."""

import math
from collections.abc import Sequence

from edged.scheduler.cost.model import CostModel
from edged.scheduler.cost.prices import Load
from edged.scheduler.task import ServiceClass, ServingTask, Task
from edged.settings.load import SchedulerSettings

BATCH_TARGETS = {"ttft": (50.0, 5.0), "tbt": (10.0, 0.5)}
"""Factor and floor, in seconds, of requests of the batch class: nobody waits for each of their tokens."""


class SloTargets:
    """TTFT and TBT targets in seconds: a factor times a priced latency, but at least a floor. They follow the learned
    prices, not the slowness of the moment."""

    def __init__(self, settings: SchedulerSettings, cost: CostModel) -> None:
        self._cost = cost
        self._targets: dict[tuple[ServiceClass, str], tuple[float, float]] = {
            (ServiceClass.INTERACTIVE, "tbt"): (settings.tbt_factor, settings.tbt_floor_ms / 1e3),
            (ServiceClass.INTERACTIVE, "ttft"): (settings.ttft_factor, settings.ttft_floor_ms / 1e3),
            **{(ServiceClass.BATCH, name): target for name, target in BATCH_TARGETS.items()},
        }

    def ttft_s(self, service: ServiceClass, num_tokens: int, context: int = 0) -> float:
        """Return the TTFT target of `num_tokens` after `context` others: a multiple of their own forward (MACE 6.3)."""
        factor, floor_s = self._targets[service, "ttft"]
        return max(floor_s, factor * self._cost.prompt_s(num_tokens, context))

    def tbt_s(self, service: ServiceClass, alone_s: float) -> float:
        """Return the TBT target of a decode: a multiple of `alone_s`, a forward of the present decodes alone."""
        factor, floor_s = self._targets[service, "tbt"]
        return max(floor_s, factor * alone_s)

    def impossible(self) -> list[str]:
        """Return a sentence for every target that this device cannot meet even for a request alone on it."""
        alone_s = self._cost.priced_s(Load(decodes=1))
        return [
            f"the {name.upper()} target of {service.value} requests is {factor:g} times the latency of a forward, or "
            f"{floor_s * 1e3:.3g} ms, but one token takes {alone_s * 1e3:.3g} ms here: it is missed as little as can "
            f"be; raise scheduler.{name}_factor to 1 or more, or scheduler.{name}_floor_ms"
            for (service, name), (factor, floor_s) in self._targets.items()
            # A prompt may be as long as to be late whatever the floor.
            if factor < 1.0 and (name == "ttft" or floor_s < alone_s)
        ]


MARGIN = 0.5
"""Share of the time until a deadline that is planned with: requests still to come need the rest.

Simulated on four devices near their capacity, 0.5 met more TTFT targets than 0.15, 0.3, 0.7 or 1.
"""


def required_tokens(prompts: Sequence[ServingTask], now: float, base_s: float, token_s: float, most: int) -> int:
    """Return the prompt tokens, up to `most`, that this iteration must compute to keep every prompt in time.

    The pace is the largest of (tokens up to a prompt's end) / (time until it is due). An iteration of n prompt tokens
    takes `base_s + n * token_s`, so n / (base_s + n * token_s) = pace gives n. A prompt that cannot be in time any
    more asks for as much as there is.
    """
    pace, ahead = 0.0, 0
    for task in prompts:
        ahead += task.num_tokens
        slack_s = MARGIN * (task.deadline_s - now)
        if slack_s <= ahead * token_s:
            return most
        rate = ahead / slack_s
        if rate > pace:
            pace = rate
    spare = 1.0 - pace * token_s
    return math.ceil(pace * base_s / spare) if pace * base_s < most * spare else most


def slack_s(prompts: list[ServingTask], granted: dict[Task, int], now: float, token_s: float, floor_s: float) -> float:
    """Return the seconds until the prompts, less the tokens `granted` to them now, must run without a break.

    inf without prompts; below zero when it is too late for one of them. The search ends at one below `floor_s`.
    """
    min_s, ahead = math.inf, 0
    for task in prompts:
        ahead += task.num_tokens
        if task in granted:
            ahead -= granted[task]
        left_s = MARGIN * (task.deadline_s - now) - ahead * token_s
        if left_s < min_s:
            min_s = left_s
            if left_s < floor_s:
                break
    return min_s
