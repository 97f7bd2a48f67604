"""The settings `[fairness]`: turns of users, or of runs of applications."""

from typing import Annotated, Literal

from pydantic import Field

from edged.settings.access import Section, setting
from edged.settings.by_user import ByUser, value_of

Weight = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class FairnessSettings(Section):
    """The turns of users or applications: docs/applications.md."""

    policy: Literal["off", "vtc", "justitia"] = setting(
        "off", "vtc: who had least service; justitia: whose work ends first under fair sharing; off: by arrival"
    )
    by: Literal["user", "application"] = setting("user", "justitia: what shares are of, users or runs of applications")
    weights: ByUser[Weight] = setting({}, 'shares of users, such as { ann = 2.0, "camera*" = 0.5 }; others: 1')
    idle_s: float = setting(10.0, "seconds after its last call in which a run is still open", gt=0.0)

    def weight(self, user: str) -> float:
        """Return a user's weight: by the name itself, else by the longest beginning that fits."""
        weight = value_of(self.weights, user) if self.weights else None
        return 1.0 if weight is None else weight
