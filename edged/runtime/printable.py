"""Text of others on a terminal and in the log."""

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for tab and newline, other ends of lines, turns of direction, and halves of pairs."""


def printable(text: str) -> str:
    r"""Return a text in which characters that a terminal obeys are written as JSON has them: \u001b for ESC.

    Newlines and tabs stay.
    """
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
