"""Ablations: a policy with one of its parts taken away; MACE (6.3 and Table 1), Andes, and FlexLLM."""

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from edged.scheduler.planning.bin_builder import BinBuilder
from edged.scheduler.planning.queues import TaskQueues, by_arrival
from edged.scheduler.policies.andes.admission import ReaderAdmission
from edged.scheduler.policies.andes.policy import ANDES
from edged.scheduler.policies.base import FinetuneShare, Order
from edged.scheduler.policies.flexllm import FLEXLLM
from edged.scheduler.policies.hybrid import LOOK_AHEAD
from edged.scheduler.policies.mace.admission import MaceAdmission
from edged.scheduler.policies.mace.packing import Item
from edged.scheduler.policies.mace.policy import MACE
from edged.scheduler.policies.mace.triage import PatientAdmission
from edged.scheduler.task import FinetuneTask, ServingTask

MACE_PREFIX = replace(MACE, name="mace-prefix", summary="MACE/Prefix of 6.3", shares_prefixes=False)
MACE_PRUNE = replace(MACE, name="mace-prune", summary="MACE/Prune of 6.3", prunes=False)


class AdmissionByArrival(MaceAdmission):
    """Admission without priorities: no base, no growth with the wait, no reward for a loss.

    Deadlines order nobody, and a step comes before serving only when it is older than every request. Packing, chunks
    and the latency budget stay, and so does what fine-tuning is owed when it comes first. As in MACE, work moves a
    step's arrival towards now.
    """

    def _ranked(self, queues: TaskQueues, builder: BinBuilder, now: float) -> list[FinetuneTask]:
        return sorted(super()._ranked(queues, builder, now), key=lambda task: (not task.begun, by_arrival(task)))

    def _outranks_serving(
        self, builder: BinBuilder, queues: TaskQueues, first: FinetuneTask, finetune_share: FinetuneShare, now: float
    ) -> bool:
        serving = [grant.task for grant in queues.decodes[:1]] + (builder.prompts or queues.first(LOOK_AHEAD))
        return bool(serving) and by_arrival(first) < min(by_arrival(task) for task in serving)

    def _asking(
        self, builder: BinBuilder, tuning: list[FinetuneTask], waiting: Iterable[ServingTask], due: bool, now: float
    ) -> Iterator[Item]:
        own = super()._asking(builder, tuning, [], due, now)
        # Nobody is too late to be overtaken: deadlines count for nothing.
        prompts = (replace(item, patient=True) for item in super()._asking(builder, [], waiting, due, now))
        return heapq.merge(own, prompts, key=lambda item: by_arrival(item.task))


MACE_PRIORITY = replace(
    MACE, name="mace-priority", summary='Table 1\'s "PA"', order=Order, admission=AdmissionByArrival
)


class AdmissionInOrder(PatientAdmission):
    """MACE's admission without its bins."""

    bins = False


MACE_BIN = replace(MACE, name="mace-bin", summary="MACE/Bin of 6.3: tasks enter in order", admission=AdmissionInOrder)


class PlainReaderAdmission(ReaderAdmission):
    """The knapsack alone."""

    refines = False


ANDES_PLAIN = replace(
    ANDES, name="andes-plain", summary="Andes without the refiner (2.4.3)", admission=PlainReaderAdmission
)


class BatchBudget(FinetuneShare):
    """Iterations of at most `serving.max_batch_tokens`, however long, and one unit of the backward after them.

    So does FlexLLM's public code, whose backward step is a layer over a whole sequence: here over a window of
    `align.window_tokens`, which holds one.
    """

    max_units = 1

    def limit_s(self, builder: BinBuilder, now: float) -> float:
        """Return no limit."""
        return math.inf


FLEXLLM_STATIC = replace(
    FLEXLLM,
    name="flexllm-static",
    summary="FlexLLM's public code: a fixed cap of tokens, one unit of the backward an iteration",
    finetune_share=BatchBudget,
    cuts_windows=False,
    fills_ahead=False,
)
FLEXLLM_WHOLE = replace(
    FLEXLLM, name="flexllm-whole", summary="FlexLLM without windows of the backward that fit", cuts_windows=False
)
BEHIND = "FlexLLM 6.2: the forward of a group waits for the backward of the one before it"
FLEXLLM_BEHIND = replace(FLEXLLM, name="flexllm-behind", summary=BEHIND, fills_ahead=False)
