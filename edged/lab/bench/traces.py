"""Recorded request traces, and their scaling to a load that fits one machine."""

import csv
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import TypeVar

import numpy as np

Record = TypeVar("Record")
Draw = Callable[[random.Random, int], int]
"""A function that draws a length by its mean."""

POISSON, LOGNORMAL = "poisson", "lognormal"
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
_MOONCAKE_BLOCK_TOKENS = 512
_MOONCAKE_TICK_S = 3.0
_DRAWN_ROWS = 20_000
_LOGNORMAL_SIGMA = 1.0
"""Standard deviation of a drawn length's logarithm: one in a hundred is over six times the mean."""
_POISSON_TOKENS = (256, 64)
"""Means of a prompt and of an output."""
_FITTING_PERCENT = 95.0
"""Lengths are scaled so that this share of a trace's requests fits the context; longer ones are cut."""


class TraceError(ValueError):
    """A trace cannot be read or used; the message names the file, the line and what is expected there."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request. `blocks` are the ids of its prompt's blocks: equal ids stand for equal tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Requests in order of arrival, the first at 0 s. `block_tokens` is 0 if the trace has no shared prefixes."""

    name: str
    rows: tuple[TraceRow, ...]
    block_tokens: int = 0

    @property
    def rate_per_s(self) -> float:
        """Mean arrivals per second as recorded."""
        return (len(self.rows) - 1) / max(self.rows[-1].at_s, 1e-9)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a load that fits the machine: `at_s` is counted from the load's start."""

    at_s: float
    prompt_ids: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class PromptIds:
    """The token ids of a load's prompts: random ones of `ids`, the same for the same seed, as far as the context goes.

    A prompt and its output together have at most `context_tokens`.
    """

    context_tokens: int
    ids: range
    seed: int = 0


def read_trace(source: str, seed: int = 0) -> RequestTrace:
    """Read a trace from a file: Azure's or BurstGPT's CSV, Mooncake's JSONL; or draw one with Poisson arrivals.

    "poisson" has prompts of 128-384 tokens and outputs of 32-96; "lognormal:PROMPT:OUTPUT" heavy-tailed lengths of
    these means. Raises TraceError.
    """
    if source == POISSON:
        return _drawn(source, random.Random(seed), lambda chance, mean: chance.randint(mean // 2, mean * 3 // 2))
    if source.startswith(f"{LOGNORMAL}:"):
        return _lognormal(source, random.Random(seed))
    path = Path(source)
    read = {".csv": _csv, ".jsonl": _mooncake}.get(path.suffix.lower())
    if read is None:
        raise TraceError(
            f'trace "{source}" has no known format: give an Azure or BurstGPT .csv, a Mooncake .jsonl, "{POISSON}" or '
            f'"{LOGNORMAL}:PROMPT:OUTPUT"'
        )
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows, block_tokens = read(path.name, file)
    except OSError as error:
        raise TraceError(f'trace "{source}" cannot be read: {error.strerror or error}') from None
    except UnicodeDecodeError as error:
        raise TraceError(f'trace "{source}" is not UTF-8 text: {error.reason} at byte {error.start}') from None
    if len(rows) < 2:
        raise TraceError(f'trace "{source}" has {len(rows)} requests: at least two are needed to tell a rate')
    rows.sort(key=lambda row: row.at_s)
    start = rows[0].at_s
    return RequestTrace(path.stem, tuple(replace(row, at_s=row.at_s - start) for row in rows), block_tokens)


def length_scale(trace: RequestTrace, context_tokens: int) -> float:
    """Return the factor, at most 1, that makes 95 % of the trace's requests fit `context_tokens`."""
    totals = [row.prompt_tokens + row.output_tokens for row in trace.rows]
    return min(1.0, context_tokens / float(np.percentile(totals, _FITTING_PERCENT)))


def scale_trace(
    trace: RequestTrace, prompts: PromptIds, *, rate_per_s: float, seconds: float, times_s: Sequence[float] = ()
) -> list[Arrival]:
    """Return the trace's first `rate_per_s * seconds` requests, squeezed or stretched into `seconds`, or at `times_s`
    where these are given.

    Gaps and lengths keep their proportions; requests that are still too long keep the start of their prompt. Equal
    blocks of the trace become equal tokens. A load longer than the trace ends with it.
    """
    wanted = len(times_s) or max(1, round(rate_per_s * seconds))
    rows = trace.rows[:wanted]
    span = trace.rows[wanted].at_s if wanted < len(trace.rows) else rows[-1].at_s + 1.0 / trace.rate_per_s
    stretch = len(rows) / rate_per_s / max(span, 1e-9)
    load = scale_rows(rows, prompts, length_scale(trace, prompts.context_tokens), trace.block_tokens)
    moments = times_s or [arrival.at_s * stretch for arrival in load]
    return [replace(arrival, at_s=at_s) for arrival, at_s in zip(load, moments, strict=False)]


def burst_of(trace: RequestTrace, requests: int, prompts: PromptIds) -> list[Arrival]:
    """Return `requests` sampled from the whole trace, within a second, with other tokens than a load of the same
    seed."""
    rows = random.Random(prompts.seed).sample(trace.rows, requests)
    sample = replace(trace, rows=tuple(sorted(rows, key=lambda row: row.at_s)))
    return scale_trace(sample, replace(prompts, seed=prompts.seed + 1), rate_per_s=requests, seconds=1.0)


def scale_rows(rows: Iterable[TraceRow], prompts: PromptIds, scale: float, block_tokens: int) -> list[Arrival]:
    """Return the rows with their lengths, and the length of their blocks, times `scale`, at their own times.

    Requests that are still too long for the context keep the start of the prompt.
    """
    whole_block = max(1, round(block_tokens * scale))
    # A list, so that the prompts of a long load share their int objects.
    known_ids, fresh = list(prompts.ids), count()

    def draw(kind: int, number: int, num_tokens: int) -> tuple[int, ...]:
        """Draw random tokens, always the same for the same kind and number."""
        drawn = np.random.default_rng((prompts.seed, kind, number)).integers(0, len(known_ids), num_tokens)
        return tuple(known_ids[index] for index in drawn.tolist())

    def prompt_of(blocks: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        """Return a prompt that starts with the blocks' tokens; rounding may leave a tail, which belongs to the last
        block."""
        if not blocks:
            return draw(0, next(fresh), num_tokens)
        ids = tuple(chain(*(draw(1, block, whole_block) for block in blocks[: max(1, num_tokens // whole_block)])))
        return (ids + draw(2, blocks[-1], max(0, num_tokens - len(ids))))[:num_tokens]

    arrivals = []
    for row in rows:
        prompt, output = scaled_lengths(row, scale, prompts.context_tokens)
        arrivals.append(Arrival(row.at_s, prompt_of(row.blocks, prompt), output))
    return arrivals


def scaled_lengths(row: TraceRow, scale: float, context_tokens: int) -> tuple[int, int]:
    """Return (prompt, output) tokens, at least one each, that fit the context together."""
    output = min(max(1, round(row.output_tokens * scale)), context_tokens - 1)
    return min(max(1, round(row.prompt_tokens * scale)), context_tokens - output), output


def _drawn(name: str, generator: random.Random, draw: Draw, means: tuple[int, int] = _POISSON_TOKENS) -> RequestTrace:
    """Draw independent arrivals, one a second, with lengths by their means."""
    rows, at_s = [], 0.0
    for _ in range(_DRAWN_ROWS):
        prompt, output = (draw(generator, mean) for mean in means)
        rows.append(TraceRow(at_s, prompt, output))
        at_s += generator.expovariate(1.0)
    return RequestTrace(name, tuple(rows))


def _lognormal(source: str, generator: random.Random) -> RequestTrace:
    """Draw a trace whose lengths are lognormal with the means that its name tells."""
    try:
        prompt, output = (int(mean) for mean in source.split(":")[1:])
        if min(prompt, output) < 1:
            raise ValueError
    except ValueError:
        way_out = f"give {LOGNORMAL}:PROMPT:OUTPUT, such as {LOGNORMAL}:1000:200"
        raise TraceError(f'trace "{source}" does not tell its mean lengths: {way_out}') from None

    def draw(chance: random.Random, mean: int) -> int:
        return max(1, round(mean * chance.lognormvariate(-0.5 * _LOGNORMAL_SIGMA**2, _LOGNORMAL_SIGMA)))

    return _drawn(source, generator, draw, (prompt, output))


def _csv(name: str, lines: Iterator[str]) -> tuple[list[TraceRow], int]:
    """Parse a CSV trace, told by its header: Azure's times of day, or BurstGPT's seconds; prompt and output lengths."""
    reader = csv.DictReader(lines)
    header = reader.fieldnames or ()
    burstgpt = set(_BURSTGPT_COLUMNS) <= set(header)
    at, prompt, output = _BURSTGPT_COLUMNS if burstgpt else _AZURE_COLUMNS
    missing = [column for column in (at, prompt, output) if column not in header]
    if missing:
        known = f"an Azure trace has {', '.join(_AZURE_COLUMNS)}, one of BurstGPT {', '.join(_BURSTGPT_COLUMNS)}"
        raise TraceError(f"{name} has no column {', '.join(missing)}: {known}")

    def parse(record: dict[str, str]) -> TraceRow:
        at_s = float(record[at]) if burstgpt else datetime.fromisoformat(record[at]).timestamp()
        return TraceRow(at_s, int(record[prompt]), int(record[output]))

    rows = _parsed(name, ((reader.line_num, record) for record in reader), parse)
    # BurstGPT keeps requests that failed, without an output.
    return [row for row in rows if row.output_tokens or not burstgpt], 0


def _mooncake(name: str, lines: Iterator[str]) -> tuple[list[TraceRow], int]:
    """Parse Mooncake's traces: milliseconds, lengths, and an id for every block of 512 prompt tokens."""

    def parse(line: str) -> TraceRow:
        record = json.loads(line)
        blocks = tuple(int(block) for block in record["hash_ids"])
        at_s = float(record["timestamp"]) / 1e3
        return TraceRow(at_s, int(record["input_length"]), int(record["output_length"]), blocks)

    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    return _spread(_parsed(name, numbered, parse)), _MOONCAKE_BLOCK_TOKENS


def _spread(rows: list[TraceRow]) -> list[TraceRow]:
    """Spread the requests of each tick of Mooncake's clock (3 s) evenly over it."""
    ticks: dict[float, list[TraceRow]] = {}
    for row in rows:
        ticks.setdefault(row.at_s, []).append(row)
    starts = sorted(ticks)
    result = []
    for start, end in zip(starts, [*starts[1:], starts[-1] + _MOONCAKE_TICK_S], strict=True):
        gap = (end - start) / len(ticks[start])
        result += [replace(row, at_s=start + index * gap) for index, row in enumerate(ticks[start])]
    return result


def _parsed(name: str, records: Iterable[tuple[int, Record]], parse: Callable[[Record], TraceRow]) -> list[TraceRow]:
    """Parse a file's records, each with the number of its line, into rows. Raises TraceError."""
    rows = []
    for number, record in records:
        try:
            row = parse(record)
            if row.prompt_tokens < 1 or row.output_tokens < 0 or any(block < 0 for block in row.blocks):
                raise ValueError(f"{row.prompt_tokens} prompt and {row.output_tokens} output tokens")
        except (KeyError, TypeError, ValueError) as error:
            detail = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise TraceError(f"{name}, line {number}: not a request of this trace: {detail}") from None
        rows.append(row)
    return rows
