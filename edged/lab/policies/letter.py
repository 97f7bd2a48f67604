"""MACE 4 to the letter: priorities and Algorithm 1, without the deadlines and paces that edged adds."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from edged.scheduler.cost.model import CostModel
from edged.scheduler.planning.bin_builder import BinBuilder
from edged.scheduler.policies.base import FinetuneShare, Order, Row
from edged.scheduler.policies.hybrid import Hybrid
from edged.scheduler.policies.mace.admission import MaceAdmission
from edged.scheduler.policies.mace.packing import Item
from edged.scheduler.policies.options import MaceOptions, QuantumOptions
from edged.scheduler.task import FINETUNE, FinetuneTask, IterationResult, Plan, ServingTask, Task
from edged.settings.load import SchedulerSettings


class WholeIterations(Hybrid):
    """Every decode, and of the prompts in the bin as many tokens as fit, however long it takes."""

    paced = False


class AdmissionByPriority(MaceAdmission):
    """MACE 4.1 and Algorithm 1, under which best fit may put anybody off at any age."""

    def _asking(
        self, builder: BinBuilder, tuning: list[FinetuneTask], waiting: Iterable[ServingTask], due: bool, now: float
    ) -> Iterator[Item]:
        return (replace(item, patient=True) for item in super()._asking(builder, tuning, waiting, due, now))


class QuantumShare(FinetuneShare):
    """A quantum of fine-tuning in every iteration: the step is in the bin once it has memory.

    Its priority grows from when it last ran.
    """

    def __init__(self) -> None:
        self._ran_s: float | None = None

    def configure(self, settings: SchedulerSettings, cost: CostModel) -> None:
        """Take the quantum."""
        super().configure(settings, cost)
        self._quantum_s = QuantumOptions.of(settings).idle_quantum_ms / 1e3

    def arrived(self, task: Task, now: float) -> None:
        """Start the wait of the first task."""
        if task.kind is FINETUNE and self._ran_s is None:
            self._ran_s = now

    def completed(self, plan: Plan, result: IterationResult, finetune_s: float, now: float) -> None:
        """End the wait where fine-tuning has run."""
        if finetune_s > 0.0:
            self._ran_s = now

    def waited_s(self, now: float) -> float:
        """Return the time since fine-tuning ran."""
        return 0.0 if self._ran_s is None else now - self._ran_s

    def limit_s(self, builder: BinBuilder, now: float) -> float:
        """Return the time of what serves, and a quantum."""
        return builder.plan.predicted_forward_s + self._quantum_s


MACE_LETTER = Row(
    "mace-letter",
    "MACE 4 to the letter: priorities and Algorithm 1, no deadlines",
    fill=WholeIterations,
    order=Order,
    admission=AdmissionByPriority,
    finetune_share=QuantumShare,
    prunes=True,
    options=MaceOptions,
)
