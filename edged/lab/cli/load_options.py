"""Option types of commands that make a load: several values in one option, and the readers of answers."""

from collections.abc import Collection, Iterable
from typing import Any

import click

ABOVE_ZERO = click.FloatRange(0.0, min_open=True)
SHARE = click.FloatRange(0.0, 1.0)
_ANDES_TOKENS_PER_S = {"andes-text": 4.8, "andes-speech": 3.3}
"""Mean speeds of people who read and who listen (Andes, Tables 2.1 and 2.2)."""


class Values(click.ParamType):
    """A click type for several values in one option, separated by commas; `count` is their number where it is fixed.

    Equal ones count once where the number is open, unless they are no choice among `distinct` ones.
    """

    name = "list"

    def __init__(self, each: click.ParamType, count: int | None = None, distinct: bool = True) -> None:
        self._each, self._count, self._distinct = each, count, distinct

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        values = tuple(self._each.convert(part.strip(), param, ctx) for part in value.split(",") if part.strip())
        if not values or (self._count and len(values) != self._count):
            self.fail(f"{value!r}: give {self._count or 'one or more'} values, separated by commas", param, ctx)
        return values if self._count or not self._distinct else tuple(dict.fromkeys(values))


class Readers(click.ParamType):
    """A click type for the speed of readers; "off" becomes None."""

    name = "readers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from edged.scheduler.reader import TOKENS_PER_WORD, Pace

        if not isinstance(value, str) or value == "off":
            return None if value == "off" else value
        tokens_per_s = _ANDES_TOKENS_PER_S.get(value)
        if tokens_per_s is None:
            tokens_per_s = TOKENS_PER_WORD * float(click.FloatRange(0.5, 100.0)(value, param, ctx))
        return Pace(tokens_per_s)


readers_option = click.option(
    "--readers",
    "pace",
    type=Readers(),
    default="6",
    metavar="SPEED",
    help="Words a second of those who read the answers; andes-text (4.8 tokens/s), andes-speech (3.3), or off.",
)


def demand_known(kind: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise UsageError with the nearest name for the first of `given` that is not in `known`."""
    from edged.settings.wrong import nearest

    for name in given:
        if name not in known:
            raise click.UsageError(f'no {kind} "{name}": {nearest(name, known)}')
