"""Tables of settings by user: a key is a user's name, or the beginning of names with "*"."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

from edged.settings.access import USER_NAME

T = TypeVar("T")


def from_the_environment(value: Any) -> Any:
    """Read a table as JSON where it comes from an environment variable."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise PydanticCustomError("by_user", "it is no JSON: {error}", {"error": str(error)}) from None


def _name_users(table: dict[str, T]) -> dict[str, T]:
    for name in table:
        if not USER_NAME.fullmatch(name.removesuffix("*") or "all"):
            message = '"{name}" names no user: give a name, or a name\'s beginning with "*"'
            raise PydanticCustomError("by_user", message, {"name": name})
    return table


ByUser = Annotated[dict[str, T], BeforeValidator(from_the_environment), AfterValidator(_name_users)]


def value_of(table: Mapping[str, T], user: str) -> T | None:
    """Return a user's value: by the name itself, else by the longest beginning that fits; None where none does."""
    beginnings = [name for name in table if name[-1:] == "*" and user.startswith(name[:-1])]
    return table[user] if user in table else table[max(beginnings, key=len)] if beginnings else None
