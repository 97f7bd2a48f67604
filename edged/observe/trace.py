"""Records of iterations as a trace in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open.

One process of the trace is the engine (iterations, decisions, forwards, units), one is the requests and one
fine-tuning, with a track for every task.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
`ts` and `dur` are microseconds, of the monotonic clock.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
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

_Unit = tuple[str, float, float, int]
"""A unit's kind, beginning, end and tokens."""


class Tracer:
    """A converter of records into events; it remembers which tasks have a named track already."""

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
        started, end, units = record.started_s, record.started_s + record.elapsed_s, _units(record)
        yield _slice(ENGINE, DECISIONS, "plan", started - record.decision_s, started, number=record.number)
        yield _slice(ENGINE, ITERATIONS, record.mix, started, end, **_facts(record))
        computed = units[0][1] if units else end
        forward = max(started, computed - record.forward_s), computed
        if record.forward_s:
            yield _slice(ENGINE, FORWARDS, "forward", *forward, **_tokens(record))
        for kind, begin, until, num_tokens in units:
            yield _slice(ENGINE, UNITS, kind, begin, until, tokens=num_tokens)
        left = iter(units)
        for member in record.members:
            yield from self._member(record, member, forward, list(islice(left, member.units)))
        for task in record.preempted:
            request, adapter = self._labels.get(task, ("", ""))
            # Of the whole process: it is seen wherever one looks.
            event = _event("i", "preempted", started, args={"task": task, "request": request, "adapter": adapter})
            yield {**event, "s": "p"}
        counters: dict[str, Mapping[str, float]] = {
            "free pages": {"pages": record.free_pages},
            "waiting requests": {"requests": record.waiting},
            "tokens": _tokens(record),
            "latency ms": {"latency": record.elapsed_s * 1e3},
            "budget ms": {} if record.budget_s is None else {"budget": record.budget_s * 1e3},
        }
        yield from (_event("C", name, started, args=values) for name, values in counters.items() if values)

    def _member(
        self, record: Iteration, member: IterationShare, forward: tuple[float, float], units: list[_Unit]
    ) -> Iterator[Event]:
        track = (FINETUNING if member.kind is Kind.FINETUNE else REQUESTS), member.task_id
        request, adapter = self._labels.get(member.task_id, ("", ""))
        if member.task_id not in self._named:
            self._named.add(member.task_id)
            name = " ".join(part for part in (request or f"task {member.task_id}", adapter) if part)
            yield _event("M", "thread_name", forward[0], *track, args={"name": name})
        if member.num_tokens:
            facts = {
                "tokens": member.num_tokens,
                "context": member.context,
                "adapter": adapter,
                "class": member.service,
            }
            yield _slice(*track, member.kind, *forward, iteration=record.number, **facts)
        for kind, begin, until, num_tokens in units:
            yield _slice(*track, kind, begin, until, tokens=num_tokens, iteration=record.number)


def _units(record: Iteration) -> list[_Unit]:
    """Place the units, which are the iteration's last part, one after the other up to its end."""
    end = record.started_s + record.elapsed_s
    begin, units = max(record.started_s, end - sum(seconds for _, _, seconds in record.units)), []
    for kind, num_tokens, seconds in record.units:
        units.append((kind, begin, min(end, begin + seconds), num_tokens))
        begin = units[-1][2]
    return units


def _facts(record: Iteration) -> dict[str, Any]:
    """The details of an iteration, which the viewer shows on a click."""
    return {
        "number": record.number,
        "members": record.member_count,
        "budget_ms": None if record.budget_s is None else record.budget_s * 1e3,
        "predicted_ms": record.predicted_s * 1e3,
        **{f"{part}_ms": getattr(record, f"{part}_s") * 1e3 for part in ("forward", "prefill", "decode", "finetune")},
    }


def _tokens(record: Iteration) -> dict[str, int]:
    return {str(kind): record.num_tokens(kind) for kind in Kind}


def _head() -> list[Event]:
    """Names of processes and of the engine's tracks, in the order in which they are shown."""
    shown = [("process", process, 0, name) for process, name in _PROCESSES.items()]
    shown += [("thread", ENGINE, track, name) for track, name in _TRACKS.items()]
    return [
        _event("M", f"{what}_{fact}", 0.0, process, track, args={key: value})
        for what, process, track, name in shown
        for fact, key, value in (("name", "name", name), ("sort_index", "sort_index", track or process))
    ]


def _slice(process: int, track: int, slice_name: str, begin_s: float, end_s: float, /, **args: Any) -> Event:
    event = _event("X", slice_name, begin_s, process, track, args=args)
    return {**event, "dur": round(max(0.0, _us(end_s) - event["ts"]), 3)}


def _event(
    phase: str, name: str, at_s: float, process: int = ENGINE, track: int = ITERATIONS, *, args: Mapping[str, Any]
) -> Event:
    return {"ph": phase, "name": str(name), "pid": process, "tid": track, "ts": _us(at_s), "args": args}


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)
