"""Synchronous retraining, step by step: the middle row of MACE's Figure 1.

Kept of the figure: a step preempts the running decodes as soon as it comes and shares its iterations with nobody.
Unlike `edged.lab.policies.adainf`, which lets a whole queue of steps pass before it serves again, serving has an
iteration after each step, so a stream of feedback slows answers down and does not stop them.
"""

from edged.lab.policies.adainf import StepsFirst
from edged.scheduler.policies.base import Row


class StepsInTurn(StepsFirst):
    """A step runs alone to its end as soon as it has come; between two steps there is an iteration that serves."""

    in_turn = True


SYNC = Row("sync", 'MACE Figure 1, "sync": each step preempts decodes as it comes', fill=StepsInTurn)
