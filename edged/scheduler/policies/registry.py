"""All policies by name: what `scheduler.policy` and `--policy` choose from.

Other packages bring theirs as entry points of the group `edged.policies`, each a `Row`.
"""

from edged.runtime.plugins import load_all
from edged.scheduler.policies.adainf import ADAINF
from edged.scheduler.policies.andes.policy import ANDES, ANDES_PLAIN
from edged.scheduler.policies.base import Row
from edged.scheduler.policies.ekya import EKYA
from edged.scheduler.policies.flexllm import FLEXLLM, FLEXLLM_BEHIND, FLEXLLM_STATIC, FLEXLLM_WHOLE
from edged.scheduler.policies.mace.ablations import MACE_BIN, MACE_PREFIX, MACE_PRIORITY, MACE_PRUNE
from edged.scheduler.policies.mace.letter import MACE_LETTER
from edged.scheduler.policies.mace.policy import MACE, MACE_PAPER
from edged.scheduler.policies.periodic_async import PERIODIC_ASYNC
from edged.scheduler.policies.phased import FCFS
from edged.scheduler.policies.spatial import SPATIAL
from edged.scheduler.policies.sync import SYNC
from edged.scheduler.policies.temporal import TEMPORAL, TEMPORAL_DYNAMIC

_ALL = (
    *(
        MACE,
        MACE_PAPER,
        MACE_LETTER,
        ANDES,
        FCFS,
        FLEXLLM,
        EKYA,
        ADAINF,
        PERIODIC_ASYNC,
        SYNC,
        TEMPORAL,
        TEMPORAL_DYNAMIC,
        SPATIAL,
    ),
    *(MACE_BIN, MACE_PREFIX, MACE_PRUNE, MACE_PRIORITY, FLEXLLM_STATIC, FLEXLLM_WHOLE, FLEXLLM_BEHIND, ANDES_PLAIN),
)
ROWS: dict[str, Row] = {row.name: row for row in (*load_all("edged.policies", Row).values(), *_ALL)}
