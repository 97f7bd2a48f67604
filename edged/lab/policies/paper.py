"""MACE 4 with deadlines and paces: what the rules of `mace` are measured against."""

from dataclasses import replace
from operator import attrgetter

from edged.scheduler.policies.base import Due, Order
from edged.scheduler.policies.hybrid import Hybrid
from edged.scheduler.policies.mace.admission import MaceAdmission
from edged.scheduler.policies.mace.finetune_share import MaceFinetuneShare
from edged.scheduler.policies.mace.policy import MACE


class ByDeadline(Order):
    """Earliest deadline first."""

    key = attrgetter("deadline_s", "task_id")


MACE_PAPER = replace(
    MACE,
    name="mace-paper",
    summary="MACE 4 with deadlines and paces: what `mace` is measured against",
    fill=Hybrid,
    order=ByDeadline,
    admission=MaceAdmission,
    finetune_share=MaceFinetuneShare,
    due=Due,
)
