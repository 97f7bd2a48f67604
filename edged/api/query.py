"""Fields of a URL's query, checked."""

from __future__ import annotations

from aiohttp import web

from edged.api.errors import bad_request
from edged.settings.load import USER_NAME


def user_name(request: web.Request) -> str | None:
    """`?user=`, which must be a name. Raises ApiError."""
    user = request.query.get("user")
    if user is not None and not USER_NAME.fullmatch(user):
        raise bad_request(f'"{user[:80]}" cannot name a user', "user")
    return user


def integer(request: web.Request, name: str, default: int, least: int, most: int) -> int:
    """A whole number between two others. Raises ApiError."""
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and least <= int(text[:9]) <= most):
        raise bad_request(f'{name} = "{text[:40]}" is not a number from {least} to {most}', name)
    return int(text[:9])
