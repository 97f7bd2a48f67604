"""The row of Andes, and whom it preempts."""

from dataclasses import replace

from edged.scheduler.cost.model import CostModel
from edged.scheduler.planning.queues import TaskQueues
from edged.scheduler.policies.andes.admission import ReaderAdmission
from edged.scheduler.policies.base import Victims
from edged.scheduler.policies.mace.policy import MACE
from edged.scheduler.policies.options import AndesOptions
from edged.scheduler.task import Kind, ServingTask
from edged.settings.load import SchedulerSettings

_FAST = 1e6
"""Tokens a second that no reader takes."""


class LeastGain(Victims):
    """Victims by what their readers gain per page, least first; of those without a reader, or preempted before, the
    latest arrival, after all others."""

    _now = 0.0

    def configure(self, settings: SchedulerSettings, cost: CostModel) -> None:
        """Take the span of which gains are told."""
        super().configure(settings, cost)
        self._horizon_s = AndesOptions.of(settings).reader_horizon_s

    def before(self, queues: TaskQueues, now: float) -> None:
        """Note the moment of which gains are told."""
        self._now = now

    def ranked(self, sequences: list[ServingTask]) -> list[ServingTask]:
        """Return sequences in their order."""
        latest = super().ranked(sequences)
        read = [task for task in latest if task.reader is not None and not task.preemptions]
        return sorted(read, key=self._gain) + [task for task in latest if task.reader is None or task.preemptions]

    def _gain(self, task: ServingTask) -> float:
        assert task.reader is not None
        starts_s = 0.0 if task.kind is Kind.DECODE else self.cost.prompt_s(task.num_tokens)
        gain = task.reader.gain(self._now, self._horizon_s, starts_s, _FAST)
        return gain / max(1, task.held_pages)


ANDES = replace(
    MACE,
    name="andes",
    summary="Andes 2.4: where memory is short, those are served whose readers gain most by it; else `mace`",
    admission=ReaderAdmission,
    victims=LeastGain,
    options=AndesOptions,
)
