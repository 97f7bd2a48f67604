"""All policies by name: what `scheduler.policy` and `--policy` choose from.

Owns the names' meaning. `edged.config` lists the same names, so that a misspelt one is refused with the settings.
"""

from __future__ import annotations

from edged.scheduler.ablations import MacePrefix, MacePriority, MacePrune
from edged.scheduler.adainf import AdaInf
from edged.scheduler.ekya import Ekya
from edged.scheduler.fcfs import Fcfs
from edged.scheduler.mace import Mace
from edged.scheduler.mace_bin import MaceBin
from edged.scheduler.periodic_async import PeriodicAsync
from edged.scheduler.policy import Policy
from edged.scheduler.sync import Sync

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
