"""All policies by name: what `scheduler.policy` and `--policy` choose from.

More come as entry points of the group `edged.policies`, each a `Row`: the laboratory's, and other packages'.
"""

from collections import UserDict
from importlib.metadata import EntryPoint
from typing import Any

from edged.runtime import plugins
from edged.scheduler.policies.andes.policy import ANDES
from edged.scheduler.policies.base import Row
from edged.scheduler.policies.flexllm import FLEXLLM
from edged.scheduler.policies.mace.policy import MACE
from edged.scheduler.policies.phased import FCFS

_GROUP = "edged.policies"
_ALL = (
    MACE,
    ANDES,
    FCFS,
    FLEXLLM,
)


class PolicyTable(UserDict[str, Row]):
    """Rows by name; one of the laboratory is imported when it is asked for, and not before."""

    def __getitem__(self, name: str) -> Row:
        row: Row | EntryPoint = self.data[name]
        if isinstance(row, EntryPoint):
            row = self.data[name] = plugins.load(row, Row)
        return row


_OWN: dict[str, Any] = {row.name: row for row in _ALL} | plugins.own(_GROUP)
ROWS = PolicyTable(_OWN)
ROWS |= {name: row for name, row in plugins.load_others(_GROUP, Row).items() if name not in ROWS}
