"""The settings `[fairness]`: turns of users, or of runs of applications."""

from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from edged.settings.access import Section, setting
from edged.settings.by_user import ByUser, value_of

RUN_HEADERS = ["x-session-id", "x-session-affinity", "x-claude-code-session-id", "session-id", "session_id"]
"""Headers in which clients name the run that a call belongs to."""
Weight = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class FairnessSettings(Section):
    """The turns of users or applications: docs/applications.md."""

    policy: Literal["off", "vtc", "justitia"] = setting(
        "off", "vtc: who had least service; justitia: whose work ends first under fair sharing; off: by arrival"
    )
    by: Literal["user", "application"] = setting("user", "justitia: what shares are of, users or runs of applications")
    weights: ByUser[Weight] = setting({}, 'shares of users, such as { ann = 2.0, "camera*" = 0.5 }; others: 1')
    input: Weight = setting(1.0, "vtc: service that a prompt's token counts for, once it is computed")
    output: Weight = setting(2.0, "vtc: service that an answer's token counts for")
    finetune: Literal["auto"] | Weight = setting(
        "auto", "service that a trained token counts for; auto: by time, as a prompt's tokens of the same time"
    )
    finetune_counter: Literal["own", "shared"] = setting(
        "own", "vtc: training counts by itself, or with the requests of the user whose pairs train"
    )
    idle_s: float = setting(10.0, "seconds after its last call in which a run is still open", gt=0.0)
    run_headers: list[str] = setting(RUN_HEADERS, "headers that name the run of an application that a call belongs to")

    @field_validator("run_headers")
    @classmethod
    def _name_headers(cls, headers: list[str]) -> list[str]:
        for name in headers:
            if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
                raise PydanticCustomError("header", '"{name}" is no name of a header', {"name": name})
        return [name.lower() for name in headers]

    def weight(self, user: str) -> float:
        """Return a user's weight: by the name itself, else by the longest beginning that fits."""
        weight = value_of(self.weights, user) if self.weights else None
        return 1.0 if weight is None else weight
