"""JSON from outside: parsed by the standard library, whose parser keeps the interpreter to itself from start to end.

So the parts of a text are counted first, and one that would take longer than about 20 ms is refused.
"""

import json
import re
from typing import Any

_MAX_NODES = 1 << 15
"""Objects, lists, keys and fractions of a text: 10,000 messages of a text each, and hundreds of tools, have fewer."""
_MAX_ENTRIES = 1 << 18
"""Further values: a prompt may be a list of tokens."""
_WHOLE = 2.0**53
"""Doubles below have their own integer."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def loads(text: str, **options: Any) -> Any:
    """Parse a text by `json.loads`, which `options` go to; a float without a fraction, such as 512.0, is an integer.

    Raises ValueError for what is no JSON, has half a surrogate pair, or more parts than fit in a short time.
    """
    plain = text.replace("\\\\", "").replace('\\"', "") if "\\" in text else text
    # Every string is two quotes; what stands between two strings is structure.
    too_many = plain.count('"') > 2 * _MAX_ENTRIES
    bare = "" if too_many else "".join(plain.split('"')[::2])
    if too_many or sum(map(bare.count, "[{:.eE")) > _MAX_NODES or bare.count(",") > _MAX_ENTRIES:
        raise ValueError(f"more than {_MAX_NODES} objects, lists and keys, or {_MAX_ENTRIES} values: split it")
    try:
        value = json.loads(text, parse_float=_number, **options)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("half a surrogate pair (\\ud800 to \\udfff), which is no character") from None
    return value


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if -_WHOLE < number < _WHOLE and number.is_integer() else number
