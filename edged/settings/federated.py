"""The settings `[federated]`: rounds of adapters that boxes make together."""

from typing import Annotated, Literal

from pydantic import Field

from edged.settings.access import Section, setting

Count = Annotated[int, Field(ge=1)]


class FederatedSettings(Section):
    """Adapters that boxes make together: docs/federated.md."""

    enabled: bool = setting(False, "take part in rounds, with users who agree; off: nothing is opened or sent")
    aggregation: Literal["sum", "single"] = setting(
        "sum", "records are for sums alone, or may also be seen one by one (single)"
    )
    clip: float = setting(0.4, "largest L2 norm of a record", gt=0.0, allow_inf_nan=False)
    noise: float = setting(
        0.0, "least standard deviation of the noise in a sum, over clip; 0: no guarantee", ge=0.0, allow_inf_nan=False
    )
    max_epsilon: float = setting(8.0, "epsilon over a user's life, of rounds with noise", gt=0.0)
    delta: float = setting(1e-6, "delta of that epsilon", gt=0.0, lt=1.0)
    min_pairs: Count = setting(16, "learned pairs without which a user takes no part")
    local_pairs: int = setting(24, "latest pairs of a user that a round learns", ge=1, le=64)
    max_rounds: Count = setting(1, "rounds that a user ever takes part in")
    min_participants: Count = setting(10, "records of a sum without which this box gives none")
    min_interval_h: float = setting(24.0, "hours between two rounds of this box that a hub asks for", ge=0.0)
    max_update_mb: Count = setting(64, "largest record or start / 2^20")
    when: Literal["idle", "always"] = setting("idle", "when the box offers itself: while nothing else runs, or always")
