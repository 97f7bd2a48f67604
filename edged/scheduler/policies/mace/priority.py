"""MACE's priorities (section 4.1), derived from one setting: how long serving may starve fine-tuning."""

import math

from edged.scheduler.policies.options import MaceOptions
from edged.settings.load import SchedulerSettings

DECODE_BASE, PREFILL_BASE, FINETUNE_BASE = 2.0, 1.0, 0.0
DECODE_GROWTH, PREFILL_GROWTH, FINETUNE_GROWTH = 0.5, 2.0, 3.0
"""Priority gained over one `finetune_max_wait_s`; prefill and fine-tuning then are at 3, the most of serving."""
MAX_LOSS = PREFILL_BASE - FINETUNE_BASE
"""The most that a loss adds: by its loss alone a fine-tune task never passes a request that just arrived."""


class Priorities:
    """`P_w(wait) = pi_w + delta_w * wait`, plus `gamma * L_DPO` for fine-tuning.

    pi: decode > prefill > fine-tune; delta the other way round (per second). The wait of a serving task counts up to
    `finetune_max_wait_s`, so that a fine-tune task that waited as long outranks all of them, however old they are.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        """Derive the priorities under which fine-tuning waits at most `finetune_max_wait_s`."""
        self._max_wait_s, self._gamma = settings.finetune_max_wait_s, MaceOptions.of(settings).gamma

    def decode(self, wait_s: float) -> float:
        """Return the priority of a decode whose request arrived `wait_s` ago."""
        return DECODE_BASE + DECODE_GROWTH * min(wait_s / self._max_wait_s, 1.0)

    def prefill(self, wait_s: float) -> float:
        """Return the priority of a prefill whose request arrived `wait_s` ago."""
        return PREFILL_BASE + PREFILL_GROWTH * min(wait_s / self._max_wait_s, 1.0)

    def finetune(self, wait_s: float, loss: float) -> float:
        """Return the priority of a fine-tune task that has not run for `wait_s` and whose DPO loss was `loss`."""
        gain = self._gamma * loss if 0.0 < loss < math.inf else 0.0
        return FINETUNE_BASE + FINETUNE_GROWTH * wait_s / self._max_wait_s + (gain if gain < MAX_LOSS else MAX_LOSS)
