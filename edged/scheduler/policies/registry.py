"""All policies by name: what `scheduler.policy` and `--policy` choose from.

Owns the names' meaning. `edged.settings.load` lists the same names, so that a misspelt one is refused with the
settings.
"""

from __future__ import annotations

from edged.scheduler.policies.adainf import AdaInf
from edged.scheduler.policies.base import Policy
from edged.scheduler.policies.ekya import Ekya
from edged.scheduler.policies.fcfs import Fcfs
from edged.scheduler.policies.mace.ablations import MaceBin, MacePrefix, MacePriority, MacePrune
from edged.scheduler.policies.mace.policy import Mace
from edged.scheduler.policies.periodic_async import PeriodicAsync
from edged.scheduler.policies.sync import Sync

_ALL: tuple[type[Policy], ...] = (
    Mace,
    Fcfs,
    Ekya,
    AdaInf,
    PeriodicAsync,
    Sync,
    MaceBin,
    MacePrefix,
    MacePrune,
    MacePriority,
)
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in _ALL}
