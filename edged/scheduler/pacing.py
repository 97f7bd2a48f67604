"""How fast prompts must be computed to meet their TTFT targets, and how much time they leave for other work.

Owns that arithmetic over prompts in the order of their deadlines. Must not know queues, bins or policies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from edged.scheduler.task import Task

MARGIN = 0.5
"""Share of the time until a deadline that is planned with: requests still to come need the rest.

Simulated on four devices near their capacity, 0.5 met more TTFT targets than 0.15, 0.3, 0.7 or 1.
"""


def needed_tokens(prompts: Sequence[Task], now: float, base_s: float, token_s: float, most: int) -> int:
    """Prompt tokens, up to `most`, that this iteration must compute so that at its pace every prompt is in time.

    The pace is the largest of (tokens up to a prompt's end) / (time until it is due). An iteration of n prompt tokens
    takes `base_s + n * token_s`, so n / (base_s + n * token_s) = pace gives n. A prompt that cannot be in time any
    more asks for as much as there is.
    """
    pace, ahead = 0.0, 0
    for task in prompts:
        ahead += task.tokens
        slack_s = MARGIN * (task.deadline_s - now)
        if slack_s <= ahead * token_s:
            return most
        pace = max(pace, ahead / slack_s)
    spare = 1.0 - pace * token_s
    return math.ceil(pace * base_s / spare) if pace * base_s < most * spare else most


def slack_s(prompts: Sequence[Task], granted: Mapping[Task, int], now: float, token_s: float) -> float:
    """Seconds that may pass before the prompts, less the tokens `granted` to them now, must run without a break.

    inf without prompts; below zero when it is too late for one of them.
    """
    least_s, ahead = math.inf, 0
    for task in prompts:
        ahead += task.tokens - granted.get(task, 0)
        least_s = min(least_s, MARGIN * (task.deadline_s - now) - ahead * token_s)
    return least_s
