"""The MACE policy: serving and fine-tuning share each iteration, by priority, memory and latency budget."""

from edged.scheduler.policies.base import ReaderDue, Row
from edged.scheduler.policies.mace.lending import ReaderFinetuneShare
from edged.scheduler.policies.mace.length import FairLength
from edged.scheduler.policies.mace.triage import PatientAdmission, Triage
from edged.scheduler.policies.options import MaceOptions

MACE = Row(
    "mace",
    "MACE 4: priorities, best-fit hybrid bins within a latency budget, cache management; "
    "readers' slack is lent to fine-tuning",
    fill=FairLength,
    order=Triage,
    admission=PatientAdmission,
    finetune_share=ReaderFinetuneShare,
    due=ReaderDue,
    prunes=True,
    options=MaceOptions,
)
