"""Records of iterations as a trace in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open.

One process of the trace is the engine (iterations, decisions, forwards, units), one is the requests and one
fine-tuning, with a track for every task.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
`ts` and `dur` are microseconds, of the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from edged.engine.stats.counters import Label
from edged.engine.stats.iterations import Iteration, IterationShare
from edged.scheduler.task import Kind

Event = dict[str, Any]
ENGINE, REQUESTS, FINETUNING = 1, 2, 3
"""The trace's processes."""
ITERATIONS, DECISIONS, FORWARDS, UNITS = 1, 2, 3, 4
"""The engine's tracks."""
_PROCESSES = {ENGINE: "edged engine", REQUESTS: "requests", FINETUNING: "fine-tuning"}
_TRACKS = {ITERATIONS: "iterations", DECISIONS: "decisions", FORWARDS: "forwards", UNITS: "units"}


class Tracer:
    """Turns records into events; it remembers which tasks have a named track already."""

    def __init__(self, labels: Iterable[Label]) -> None:
        """`labels` say which request and adapter a task is of; a task without one is shown by its number."""
        self._labels: Mapping[int, tuple[str, str]] = {task: (request, adapter) for task, request, adapter in labels}
        self._named: set[int] = set()

    def events(self, records: Iterable[Iteration]) -> Iterator[list[Event]]:
        """The events of each of `records` (oldest first) in turn, all sorted by `ts`."""
        held = _head()
        for record in records:
            held += self._iteration(record)
            held.sort(key=lambda event: event["ts"])
            # A decision may be made while the iteration before runs, but is never begun earlier.
            begun = _us(record.started_s)
            ready = sum(event["ts"] < begun for event in held)
            yield held[:ready]
            held = held[ready:]
        yield held

    def _iteration(self, record: Iteration) -> Iterator[Event]:
        started, end = record.started_s, record.started_s + record.elapsed_s
        yield _slice(ENGINE, DECISIONS, "plan", started - record.decision_s, started, number=record.number)
        yield _slice(ENGINE, ITERATIONS, record.mix, started, end, **_facts(record))
        units = _units(record)
        forward_end = units[0] if units else end
        forward = max(started, forward_end - record.forward_s), forward_end
        if record.forward_s:
            tokens = {str(kind): record.tokens(kind) for kind in Kind}
            yield _slice(ENGINE, FORWARDS, "forward", *forward, **tokens)
        for (kind, tokens_of_unit, _), (begin, until) in zip(record.units, pairwise(units), strict=False):
            yield _slice(ENGINE, UNITS, kind, begin, until, tokens=tokens_of_unit)
        first_unit = 0
        for member in record.members:
            mine = range(first_unit, first_unit + member.units)
            first_unit = mine.stop
            yield from self._member(record, member, forward, units, mine)
        for task in record.preempted:
            request, adapter = self._labels.get(task, ("", ""))
            yield _instant("preempted", started, task=task, request=request, adapter=adapter)
        yield from _counters(record)

    def _member(
        self, record: Iteration, member: IterationShare, forward: tuple[float, float], units: list[float], mine: range
    ) -> Iterator[Event]:
        process = FINETUNING if member.kind is Kind.FINETUNE else REQUESTS
        request, adapter = self._labels.get(member.task_id, ("", ""))
        if member.task_id not in self._named:
            self._named.add(member.task_id)
            name = " ".join(part for part in (request or f"task {member.task_id}", adapter) if part)
            yield _name(process, member.task_id, "thread_name", name, forward[0])
        if member.tokens:
            facts = {"tokens": member.tokens, "context": member.context, "adapter": adapter, "class": member.service}
            yield _slice(process, member.task_id, member.kind, *forward, iteration=record.number, **facts)
        for index in mine:
            kind, tokens, _ = record.units[index]
            begin, until = units[index : index + 2]
            yield _slice(process, member.task_id, kind, begin, until, tokens=tokens, iteration=record.number)


def _units(record: Iteration) -> list[float]:
    """When each unit began, and when the last one ended; they are the iteration's last part. Empty without units."""
    if not record.units:
        return []
    end = record.started_s + record.elapsed_s
    edges = [max(record.started_s, end - sum(seconds for _, _, seconds in record.units))]
    for _, _, seconds in record.units:
        edges.append(min(end, edges[-1] + seconds))
    return edges


def _facts(record: Iteration) -> dict[str, Any]:
    """What is shown of an iteration that is clicked on."""
    return {
        "number": record.number,
        "members": record.member_count,
        "budget_ms": None if record.budget_s is None else record.budget_s * 1e3,
        "predicted_ms": record.predicted_s * 1e3,
        "forward_ms": record.forward_s * 1e3,
        "prefill_ms": record.prefill_s * 1e3,
        "decode_ms": record.decode_s * 1e3,
        "finetune_ms": record.finetune_s * 1e3,
    }


def _counters(record: Iteration) -> Iterator[Event]:
    yield _counter("free pages", record, pages=record.free_pages)
    yield _counter("waiting requests", record, requests=record.waiting)
    yield _counter("tokens", record, **{str(kind): record.tokens(kind) for kind in Kind})
    yield _counter("latency ms", record, latency=record.elapsed_s * 1e3)
    if record.budget_s is not None:
        yield _counter("budget ms", record, budget=record.budget_s * 1e3)


def _head() -> list[Event]:
    """Names of processes and of the engine's tracks, in the order in which they are shown."""
    events = []
    for process, name in _PROCESSES.items():
        events.append(_name(process, 0, "process_name", name))
        events.append(_event("M", "process_sort_index", process, 0, 0.0, args={"sort_index": process}))
    for track, name in _TRACKS.items():
        events.append(_name(ENGINE, track, "thread_name", name))
        events.append(_event("M", "thread_sort_index", ENGINE, track, 0.0, args={"sort_index": track}))
    return events


def _name(process: int, track: int, what: str, name: str, at_s: float = 0.0) -> Event:
    return _event("M", what, process, track, _us(at_s), args={"name": name})


def _slice(process: int, track: int, slice_name: str, begin_s: float, end_s: float, /, **args: Any) -> Event:
    begin, end = _us(begin_s), _us(end_s)
    return {**_event("X", str(slice_name), process, track, begin, args=args), "dur": round(max(0.0, end - begin), 3)}


def _instant(name: str, at_s: float, /, **args: Any) -> Event:
    # Of the whole process: it is seen wherever one looks.
    return {**_event("i", name, ENGINE, ITERATIONS, _us(at_s), args=args), "s": "p"}


def _counter(name: str, record: Iteration, /, **values: float) -> Event:
    return _event("C", name, ENGINE, ITERATIONS, _us(record.started_s), args=values)


def _event(phase: str, name: str, process: int, track: int, ts: float, args: dict[str, Any]) -> Event:
    return {"ph": phase, "name": name, "pid": process, "tid": track, "ts": ts, "args": args}


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)
