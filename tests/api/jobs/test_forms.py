"""A form is read as clients write it, however its bytes arrive, and all around a file's content is bounded."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from hypothesis import given
from hypothesis import strategies as st

from edged.api.jobs.forms import FormReader

TYPE = "multipart/form-data; boundary=XbX"
FILE = b'--XbX\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'


async def read(body: bytes, content_type: str = TYPE, size: int = 1 << 20) -> list[tuple[str, str | None, bytes]]:
    """The parts of a form that arrives in pieces of so many bytes."""
    protocol: Any = SimpleNamespace(
        connected=True, pause_reading=lambda: None, resume_reading=lambda resume_parser=True: None
    )
    content = StreamReader(cast(BaseProtocol, protocol), 1 << 16, loop=asyncio.get_running_loop())
    for first in range(0, len(body), size):
        content.feed_data(body[first : first + size])
    content.feed_eof()
    form, parts = FormReader(content, content_type), []
    while (part := await form.next()) is not None:
        whole = b""
        while piece := await form.read():
            whole += piece
        parts.append((*part, whole))
    return parts


@given(
    st.lists(st.binary(max_size=300) | st.sampled_from([b"\r\n--XbX"[:end] for end in range(7)]), max_size=5),
    st.integers(1, 400),
)
def test_the_content_is_what_was_sent_however_it_arrives(contents: list[bytes], size: int) -> None:
    wanted = [content for content in contents if b"\r\n--XbX" not in b"\r\n" + content]
    body = b"".join(FILE + content + b"\r\n" for content in wanted) + b"--XbX--\r\n"
    assert asyncio.run(read(body, size=size)) == [("file", "a.jsonl", content) for content in wanted]


async def test_a_file_of_many_pieces_is_whole() -> None:
    content = b"\r\n--Xb" * 100_000
    assert await read(FILE + content + b"\r\n--XbX--", size=70_001) == [("file", "a.jsonl", content)]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (b'name="file"; filename="a b;c.jsonl"', "a b;c.jsonl"),
        (b'name="file"; filename="\\"a\\".jsonl"', '"a".jsonl'),
        (b"name=file; filename=a", "a"),
        (b"name=\"file\"; filename*=UTF-8''%c3%a9", "é"),
        ('name="file"; filename="é"'.encode(), "é"),
        (b'name="file"; filename="x\xff.jsonl"', "x\N{REPLACEMENT CHARACTER}.jsonl"),
        (b"name=\"file\"; filename*=UTF-8''%ff", "\N{REPLACEMENT CHARACTER}"),
        (b'name="file"', None),
    ],
)
async def test_the_name_of_a_file_is_text(fields: bytes, wanted: str | None) -> None:
    body = b"--XbX\r\nX: y\r\ncontent-disposition: form-data; " + fields + b"\r\n\r\nx\r\n--XbX--\r\n"
    assert await read(body) == [("file", wanted, b"x")]


async def test_a_boundary_is_taken_as_it_is_written() -> None:
    body = b'--a:b\r\nContent-Disposition: form-data; name="n"\r\n\r\nx\r\n--a:b--\r\n'
    assert await read(body, 'multipart/form-data; charset=utf-8; Boundary="a:b"') == [("n", None, b"x")]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "breaks off"),
        (b"\n" * 100_000 + FILE, "before its first boundary"),
        (b"preamble\r\n" + FILE + b"x\r\n--XbX--", "before its first boundary"),
        (FILE + b"x", "breaks off"),
        (FILE + b"x" * 100_000, "breaks off"),
        (b"--XbX\r\n" + b"a:b\r\n" * 10_000, "longer than 4096"),
        (b"--XbX\r\nContent-Disposition: form-data", "has no end"),
        (b"--XbX\r\nContent-Disposition: form-data\r\n\r\nx\r\n--XbX--", "Content-Disposition with a name"),
        (b"--XbX\r\n\r\nx\r\n--XbX--", "Content-Disposition with a name"),
        (FILE + b"x\r\n--XbX--" + b"\n" * 5000, "goes on after"),
        (
            b"--XbX\r\nContent-Disposition: form-data; name=file; filename*=a; filename*0=b\r\n\r\nx\r\n--XbX--",
            "Content-Disposition with a name",
        ),
    ],
)
async def test_what_is_no_form_is_refused(body: bytes, told: str) -> None:
    for size in (7, 1 << 20):
        with pytest.raises(ValueError, match=told):
            await read(body, size=size)


@pytest.mark.parametrize(
    "content_type",
    ["multipart/form-data", "multipart/form-data; boundary=", 'multipart/form-data; boundary="' + "a" * 71 + '"'],
)
async def test_a_form_without_a_usable_boundary_is_refused(content_type: str) -> None:
    with pytest.raises(ValueError, match="has no boundary"):
        await read(b"", content_type)
