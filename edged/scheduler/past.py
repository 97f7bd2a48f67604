"""What a policy may know of the iterations before: when fine-tuning was last caught up, and what ran last.

Owns that record, so that policies stay functions of what they are given. Must not know who uses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edged.scheduler.task import Kind, Plan


@dataclass(slots=True)
class Past:
    """Written once per iteration, when its plan is settled; a plan that is only foreseen leaves no trace."""

    began_s: float | None = None
    """The first iteration: fixed intervals are counted from it."""
    caught_up_s: float = -math.inf
    """The latest iteration before which no fine-tune task was left to do; the first one counts as such."""
    tuning: bool = False
    """Whether there was any fine-tune task before the latest iteration."""
    tuned: bool = False
    """The latest iteration in which anything ran began with fine-tuning: it served nobody."""

    def begin(self, now: float, tuning: bool) -> None:
        """An iteration is about to be planned; `tuning` tells whether there is any fine-tune task."""
        if self.began_s is None:
            self.began_s = self.caught_up_s = now
        self.tuning = tuning
        if not tuning:
            self.caught_up_s = now

    def arrive(self, now: float) -> None:
        """The only fine-tune task comes: an engine that rested till now was caught up; after a step it is the next."""
        if not self.tuning and self.began_s is not None:
            self.caught_up_s = now

    def settle(self, plan: Plan) -> None:
        """This plan will run."""
        if plan.grants:
            self.tuned = plan.grants[0].task.kind is Kind.FINETUNE

    def interval_start_s(self, now: float, every_s: float) -> float:
        """When the present interval of `every_s` seconds began."""
        began_s = now if self.began_s is None else self.began_s
        return began_s + math.floor((now - began_s) / every_s) * every_s
