"""Several nodes' metrics as one document, and their events as one stream."""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping, Sequence

import aiohttp
from aiohttp import StreamReader

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{)?(.*)")
_WAITING = 64
"""Pieces of events that may wait for a client that reads slowly."""


def merge_metrics(texts: Mapping[str, str]) -> str:
    """Join texts in Prometheus' format: each sample with a label `node`, each family with its head once."""
    families: dict[str, list[str]] = {}
    heads: dict[str, list[str]] = {}
    for node, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                if line not in heads.setdefault(family, []):
                    heads[family].append(line)
            elif sample := _SAMPLE.match(line):
                labelled = f'{{node="{node}",{sample[3]}' if sample[2] else f'{{node="{node}"}}{sample[3]}'
                families.setdefault(family, []).append(sample[1] + labelled)
    lines = (line for family, samples in families.items() for line in (*heads.get(family, ()), *samples))
    return "\n".join(lines) + "\n"


async def merge_events(sources: Sequence[tuple[str, StreamReader]]) -> AsyncGenerator[bytes, None]:
    """Yield whole events of several streams as they come, each with `node` in its data; ends with the last stream.

    Ids are left out: a stream that was lost cannot be resumed at several nodes.
    """
    queue: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING)

    async def read(node: str, content: StreamReader) -> None:
        event = b""
        try:
            async for line in content:
                if line.startswith(b"data: {"):
                    line = b'data: {"node":"' + node.encode() + b'",' + line.removeprefix(b"data: {")
                event += b"" if line.startswith(b"id:") else line
                if line == b"\n":
                    await queue.put(event)
                    event = b""
        except (aiohttp.ClientError, ValueError, OSError):
            pass  # a node that went away, or a line longer than its buffer
        await queue.put(None)

    tasks = [asyncio.create_task(read(*source)) for source in sources]
    try:
        for _ in sources:
            while (event := await queue.get()) is not None:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
