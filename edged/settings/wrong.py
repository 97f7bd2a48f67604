"""Messages about a wrong value or name, in settings and in other files: light to import, unlike the settings."""

import difflib
from collections.abc import Iterable
from typing import Any

_DEMANDS = {
    **{
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "string_type": "text",
        "list": "a list",
        "tuple": "a list",
    },
    **{"greater_than_equal": "at least {ge}", "greater_than": "more than {gt}", "less_than_equal": "at most {le}"},
    **{"less_than": "less than {lt}", "finite": "a finite number", "dict": "a table", "model": "a table"},
}
"""Beginnings of pydantic's kinds of errors, and what each demands; a kind takes the first that fits."""


def demand(item: Any) -> str:
    """Put what a validation error demands into plain words."""
    kind, bounds = item["type"], item.get("ctx", {})
    for beginning, words in _DEMANDS.items():
        if kind.startswith(beginning):
            return f"it must be {words.format(**bounds)}"
    return str(item["msg"])


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint at the names in `known` that may have been meant by `name`."""
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return f'did you mean "{near[0]}"?' if near else "known: " + ", ".join(known)
