"""Spatial sharing (FlexLLM 8.2): serving has a part of the device and fine-tuning the other, at the same time."""

from edged.scheduler.cost.model import CostModel
from edged.scheduler.planning.bin_builder import BinBuilder
from edged.scheduler.policies.base import Row
from edged.scheduler.policies.flexllm import CoServing, SloBudget
from edged.scheduler.policies.hybrid import SMALLEST_CHUNK
from edged.scheduler.policies.options import SloOptions


class SpatialSharing(CoServing):
    """Serving as if it were alone, and beside its forward a step that is predicted to take as long again.

    So does half of a device that knows nothing of the other half: what serving loses to it was not planned for.
    """

    def room(self, builder: BinBuilder, cost: CostModel) -> tuple[float, int]:
        """Return twice the forward's seconds, or those of an iteration with nobody to serve."""
        limit_s, at_least = super().room(builder, cost)
        return limit_s if at_least else 2.0 * cost.forward_s(builder.load), SMALLEST_CHUNK


SPATIAL = Row(
    "spatial",
    "FlexLLM 8.2, spatial sharing: a step as long as the forward and at the same time; on a real device after it",
    fill=SpatialSharing,
    finetune_share=SloBudget,
    two_streams=True,
    options=SloOptions,
)
