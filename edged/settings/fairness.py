"""The settings `[fairness]`: turns of users, or of runs of applications."""

import json
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from edged.settings.access import USER_NAME, Section, setting

RUN_HEADERS = ["x-session-id", "x-session-affinity", "x-claude-code-session-id", "session-id", "session_id"]
"""Headers in which clients name the run that a call belongs to."""
Weight = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class FairnessSettings(Section):
    """The turns of users or applications: docs/applications.md."""

    policy: Literal["off", "vtc", "justitia"] = setting(
        "off", "vtc: who had least service; justitia: whose work ends first under fair sharing; off: by arrival"
    )
    by: Literal["user", "application"] = setting("user", "justitia: what shares are of, users or runs of applications")
    weights: dict[str, Weight] = setting({}, 'shares of users, such as { ann = 2.0, "camera*" = 0.5 }; others: 1')
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

    @field_validator("weights", mode="before")
    @classmethod
    def _from_the_environment(cls, value: Any) -> Any:
        """Read the table as JSON where it comes from an environment variable."""
        try:
            return json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise PydanticCustomError("weights", "it is no JSON: {error}", {"error": str(error)}) from None

    @field_validator("weights")
    @classmethod
    def _name_users(cls, weights: dict[str, float]) -> dict[str, float]:
        for name in weights:
            if not USER_NAME.fullmatch(name.removesuffix("*") or "all"):
                message = '"{name}" names no user: give a name, or a name\'s beginning with "*"'
                raise PydanticCustomError("weights", message, {"name": name})
        return weights

    @field_validator("run_headers")
    @classmethod
    def _name_headers(cls, headers: list[str]) -> list[str]:
        for name in headers:
            if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
                raise PydanticCustomError("header", '"{name}" is no name of a header', {"name": name})
        return [name.lower() for name in headers]

    def weight(self, user: str) -> float:
        """Return a user's weight: by the name itself, else by the longest beginning that fits."""
        return _weight(tuple(self.weights.items()), user)


@lru_cache(maxsize=4096)
def _weight(weights: tuple[tuple[str, float], ...], user: str) -> float:
    exact = dict(weights).get(user)
    fitting = [(len(name), weight) for name, weight in weights if name[-1:] == "*" and user.startswith(name[:-1])]
    return exact if exact is not None else max(fitting, default=(0, 1.0))[1]
