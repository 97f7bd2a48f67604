"""The settings `[starts]`: adapters of people alike, with which users may begin."""

from typing import Annotated, Literal

from pydantic import Field

from edged.settings.access import Section, setting


class StartSettings(Section):
    """Adapters that new users may begin with: docs/starts.md."""

    choose: Literal["own-pairs", "off"] = setting(
        "own-pairs", "from 4 pairs of a user on, the start that fits them becomes the user's adapter; off: none does"
    )
    default: str = setting("", "start that users without pairs are served from their first request on; empty: none")
    max: Annotated[int, Field(ge=1, le=64)] = setting(8, "starts that are kept: each is scored on each new user")
