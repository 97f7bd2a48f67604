"""The MACE policy: serving and fine-tuning share each iteration, by priority, memory and latency budget."""

from dataclasses import replace

from edged.scheduler.planning.queues import by_deadline
from edged.scheduler.policies.base import Order, ReaderDue, Row
from edged.scheduler.policies.hybrid import Hybrid
from edged.scheduler.policies.mace.admission import MaceAdmission
from edged.scheduler.policies.mace.finetune_share import MaceFinetuneShare
from edged.scheduler.policies.mace.lending import ReaderFinetuneShare
from edged.scheduler.policies.mace.length import FairLength
from edged.scheduler.policies.mace.triage import PatientAdmission, Triage


class ByDeadline(Order):
    """Earliest deadline first."""

    key = staticmethod(by_deadline)


MACE_PAPER = Row(
    "mace-paper",
    "MACE 4 with deadlines and paces: what `mace` is measured against",
    fill=Hybrid,
    order=ByDeadline,
    admission=MaceAdmission,
    finetune_share=MaceFinetuneShare,
    prunes=True,
)
MACE = replace(
    MACE_PAPER,
    name="mace",
    summary="MACE 4: priorities, best-fit hybrid bins within a latency budget, cache management; "
    "readers' slack is lent to fine-tuning",
    fill=FairLength,
    order=Triage,
    admission=PatientAdmission,
    finetune_share=ReaderFinetuneShare,
    due=ReaderDue,
)
