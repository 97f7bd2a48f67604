"""A multipart form, read in order and piece by piece; all but a file's content is bounded before it is parsed."""

import re
from email.parser import HeaderParser
from email.utils import collapse_rfc2231_value

from aiohttp import StreamReader

_PIECE = 1 << 16
_MAX_HEAD = 4096
"""Bytes of a part's header, and of what follows the form."""
_BOUNDARY = re.compile(r'(?:^|;)\s*boundary=(?:"([^"]{1,70})"|([^\s";]{1,70}))\s*(?:;|$)', re.IGNORECASE)


class FormReader:
    """The parts of a form: `next` goes to one, `read` returns its content."""

    def __init__(self, content: StreamReader, content_type: str) -> None:
        """Read `content`, whose header Content-Type is given. Raises ValueError where that has no boundary."""
        if (found := _BOUNDARY.search(content_type)) is None:
            raise ValueError("its Content-Type has no boundary")
        self._mark = b"\r\n--" + (found[1] or found[2]).encode()
        self._content = content
        # The first boundary begins the body, as if after a line.
        self._buffer = bytearray(b"\r\n")
        self._ended = False
        self._in_part = True
        """Whether the mark that ends a part, or what would be before the first one, is to come."""

    async def next(self) -> tuple[str, str | None] | None:
        """Return the name of the next part and that of its file, if it is one; None after the last.

        Raises ValueError.
        """
        if await self.read():
            raise ValueError("something stands before its first boundary, or a part was left")
        await self._fill(_MAX_HEAD)
        if self._buffer.startswith(b"--"):
            if len(self._buffer) > _MAX_HEAD:
                raise ValueError("it goes on after its last boundary")
            return None
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator or len(head) > _MAX_HEAD:
            raise ValueError(f"the header of a part is longer than {_MAX_HEAD} bytes, or has no end")
        self._buffer, self._in_part = rest, True
        return _names(head.decode("utf-8", "replace"))

    async def read(self) -> bytes:
        """Return the next piece of a part's content; b"" at its end. Raises ValueError where the form breaks off."""
        if not self._in_part:
            return b""
        await self._fill(_PIECE)
        end = self._buffer.find(self._mark)
        if end == -1 and self._ended:
            raise ValueError("it breaks off before its last boundary")
        piece = bytes(self._buffer[: len(self._buffer) - len(self._mark) + 1 if end == -1 else end])
        del self._buffer[: len(piece)]
        if not piece:
            self._in_part = False
            del self._buffer[: len(self._mark)]
        return piece

    async def _fill(self, size: int) -> None:
        """Have more than `size` bytes in the buffer, or all that are left."""
        while len(self._buffer) <= size and not self._ended:
            piece = await self._content.read(_PIECE)
            self._buffer += piece
            self._ended = not piece


def _names(head: str) -> tuple[str, str | None]:
    """Return the name of a part and that of its file by its header. Raises ValueError."""
    fields = HeaderParser().parsestr(head.lstrip("\r\n"))
    try:
        name, filename = fields.get_param("name", header="Content-Disposition"), fields.get_filename()
    except TypeError:  # parameters in pieces, some of which have no number
        name = None
    if name is None:
        raise ValueError("a part has no Content-Disposition with a name")
    return collapse_rfc2231_value(name), filename
