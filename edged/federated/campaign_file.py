"""The file in which a campaign is described (TOML), and its refusals, which boxes and hub share."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from edged.federated.campaigns import Campaign
from edged.federated.signature import Capacity
from edged.settings.access import refuse
from edged.settings.wrong import demand, nearest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,31}")
_MAX_BYTES = 1 << 16
Mode = Literal["sum", "single"]
Count = Annotated[int, Field(ge=1, le=1_000_000)]


class CampaignRefused(ValueError):
    """A campaign's file that is not taken; the message names the field, its value and the way out."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)


class Requirements(_Table):
    """The least that a box must have to take part."""

    memory_mb: Annotated[int, Field(ge=0)] = 0
    tokens_per_s: Annotated[float, Field(ge=0.0)] = 0.0
    participants: Count = 1


class CampaignFile(_Table):
    """A campaign: what is learned, on which boxes, and how their records become new starts."""

    name: str
    model: Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]
    """Fingerprint of the base and the LoRA's form, which `edged federated status` prints."""
    rank: Annotated[int, Field(ge=1, le=1024)]
    demand: Count
    """Boxes that a round needs."""
    rounds: Annotated[int, Field(ge=1, le=1000)] = 1
    deadline_s: Annotated[float, Field(ge=1.0, le=86400.0)] = 600.0
    """Seconds that a round may take from its dispatch on."""
    min_response: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Share of `demand` that must have answered by then."""
    overcommit: Annotated[float, Field(ge=1.0, le=10.0)] = 1.3
    """Boxes that are asked, over `demand`."""
    requires: Requirements = Requirements()
    starts: tuple[str, ...] = ()
    """Starts that are taught on, of which a box sends the one that it chose; none: a new one."""
    aggregation: Mode = "sum"
    """Whether records are only ever summed up under encryption, or seen one by one."""
    aggregate: Literal["mean", "median", "trimmed", "multi-krum"] = "mean"
    max_cohorts: Annotated[int, Field(ge=1, le=16)] = 4
    clip: Annotated[float, Field(gt=0.0)] | None = None
    """L2 norm to which a record is clipped; None: as each box has it, as in what follows."""
    noise: Annotated[float, Field(ge=0.0)] | None = None
    """Standard deviation of the noise in the sum, over the clip."""
    min_pairs: Count | None = None
    """Learned pairs without which a user takes no part."""

    @field_validator("name", "starts")
    @classmethod
    def _are_names(cls, names: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for name in (names,) if isinstance(names, str) else names:
            if not _NAME.fullmatch(name):
                refuse(f'"{name[:80]}" cannot be a name: use up to 32 letters, digits and "-"')
        if not isinstance(names, str) and len({*names}) < len(names):
            refuse("a start is named twice: name each once")
        return names

    @model_validator(mode="after")
    def _agrees(self) -> CampaignFile:
        if self.aggregation == "sum" and self.aggregate != "mean":
            refuse(f'aggregate = "{self.aggregate}" must see each record: take aggregation = "single", or "mean"')
        if self.aggregate == "multi-krum" and self.threshold < 3:
            refuse('aggregate = "multi-krum" compares records with each other: three are needed, raise demand')
        if self.noise and self.aggregation == "single":
            refuse('noise hides a person in a sum, not in a single record: take aggregation = "sum", or noise = 0')
        if self.noise and len(self.starts) > 1:
            refuse("with noise no box may choose by private pairs: name one start in starts, or none")
        return self

    @property
    def threshold(self) -> int:
        """Records with which a round succeeds: the noise of so many is that of the sum."""
        return self.campaign(0.0).needed

    def campaign(self, submitted_s: float) -> Campaign:
        """Return it for the scheduler; a file that says `rounds` lets it know them."""
        return Campaign(
            name=self.name,
            submitted_s=submitted_s,
            requires=Capacity(**self.requires.model_dump(), model=self.model),
            demand=self.demand,
            rounds=self.rounds,
            deadline_s=self.deadline_s,
            overcommit=self.overcommit,
            min_response=self.min_response,
            declares_rounds="rounds" in self.model_fields_set,
        )

    def table(self) -> dict[str, Any]:
        """Return what the file says, fit for JSON; `parse_campaign` reads it again."""
        return self.model_dump(mode="json", exclude_unset=True)


def read_campaign(path: Path) -> CampaignFile:
    """Read a campaign's file. Raises CampaignRefused that names the file, the field, its value and the way out."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise CampaignRefused(f'campaign file "{path}" has over {_MAX_BYTES} bytes: it is a short table')
        table = tomllib.loads(data.decode("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CampaignRefused(f'campaign file "{path}" cannot be read: {error}') from None
    return parse_campaign(table, f'campaign file "{path}"')


def parse_campaign(table: Mapping[str, Any], source: str = "the campaign") -> CampaignFile:
    """Check a campaign's table. Raises CampaignRefused that begins with `source`."""
    try:
        return CampaignFile.model_validate(table)
    except ValidationError as error:
        problems = "; ".join(_explain(item) for item in error.errors(include_url=False))
        raise CampaignRefused(f"{source}: {problems}") from None


def _explain(item: Any) -> str:
    dotted, value = ".".join(map(str, item["loc"])), repr(item["input"])[:80]
    if item["type"] == "missing":
        return f'"{dotted}" is missing: docs/federated.md has an example'
    if item["type"] == "extra_forbidden":
        fields: Any = Requirements if len(item["loc"]) > 1 else CampaignFile
        return f'unknown field "{dotted}": {nearest(str(item["loc"][-1]), fields.model_fields)}'
    if item["type"] == "literal_error":
        choices = get_args(CampaignFile.model_fields[dotted].annotation)
        return f'"{dotted}" = {value}: {nearest(str(item["input"]), choices)}'
    if item["type"] == "string_pattern_mismatch":
        return f'"{dotted}" = {value}: it must be the 64 hex digits that `edged federated status` prints'
    if not item["loc"]:
        return str(item["msg"])
    return f'"{dotted}" = {value}: {demand(item)}'
