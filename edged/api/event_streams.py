"""Who watches the daemon, and what they are told: iterations, status, versions, scored pairs, outcomes.

Everything runs on the event loop's thread, but for `Feed.tell`, which any thread may call.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, get_args

from edged.align.feedback.pair import PairRetired, PairScored, Record, VersionPublished
from edged.engine.stats.iterations import Iteration

log = logging.getLogger("edged.api")

EventName = Literal["iterations", "status", "version", "pair", "outcomes"]
EVENTS: tuple[EventName, ...] = get_args(EventName)
POLL_S = 0.2
_STATUS_EVERY = 5
"""Polls between two status events."""
MOST_BACKLOG = 2000
"""Iterations that a stream can begin with."""
_WAITING = 64
"""Events that may wait for a reader: ten seconds' worth. One that is further behind is dropped."""


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """Something to tell; `adapter` is whose it is, None everybody's. `id` is where a stream can be resumed."""

    name: EventName
    data: dict[str, Any]
    adapter: str | None = None
    id: str = ""


class Reader:
    """One open stream: which events it takes, and those that wait to be sent."""

    def __init__(
        self, wants: Collection[str], sees: Callable[[str], bool], drop: Callable[[], None], owner: str
    ) -> None:
        """`sees` tells whether it may hear of an adapter; `drop` cuts its connection; `owner` is whose stream it is."""
        self.wants, self.sees, self.owner, self._drop = wants, sees, owner, drop
        self.waiting: asyncio.Queue[Event | None] = asyncio.Queue(_WAITING)
        """Events to be sent; None ends the stream."""

    def offer(self, event: Event | None) -> None:
        """Have an event sent, if it is for this reader; None ends the stream behind what waits."""
        if event and (event.name not in self.wants or (event.adapter is not None and not self.sees(event.adapter))):
            return
        try:
            self.waiting.put_nowait(event)
        except asyncio.QueueFull:
            self._drop()


class Feed:
    """All streams of a daemon. While there are any, one task polls the engine; otherwise nothing runs."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        iterations: Callable[[int], Sequence[Iteration]],
        status: Callable[[], dict[str, Any]],
    ) -> None:
        """`iterations` gives the records after a number and returns at once; `status` the body of the status route."""
        self._loop, self._iterations, self._status = loop, iterations, status
        self._life = int(time.time() * 1e3)
        """Tells this daemon's iterations from those of the one before it, whose numbers began at 1 as well."""
        self.readers: set[Reader] = set()
        """Open streams."""
        self._told = 0
        """The last iteration that the readers have."""
        self._poller: asyncio.Task[None] | None = None

    async def join(self, reader: Reader, resume_id: str = "", backlog: int = 0) -> None:
        """Tell a reader the status at once, and everything from now on, until it is taken out of `readers`.

        It begins with the iterations after the event `resume_id`, if that is of this daemon's life, else with the
        latest `backlog` ones; never with more than MOST_BACKLOG.
        """
        self._catch_up()
        if self._poller is None:
            self._poller = self._loop.create_task(self._poll(), name="edged-feed")
        self.readers.add(reader)
        reader.offer(Event("status", await asyncio.to_thread(self._status)))
        resumed = self._number_of(resume_id)
        since = max(self._told - backlog if resumed is None else resumed, self._told - MOST_BACKLOG)
        missed = [record for record in self._iterations(max(0, since)) if record.number <= self._told]
        if missed:
            reader.offer(self._iterations_event(missed))

    def close(self) -> None:
        """End all streams."""
        for reader in self.readers:
            reader.offer(None)

    def tell(self, records: Sequence[Record]) -> None:
        """Pass on what the learning loop leaves behind; returns at once."""
        self._tell(_learning_events(records) if self.readers else [])

    def tell_outcomes(self, records: Sequence[Record]) -> None:
        """Pass on what became of pairs, once that is on disk; returns at once."""
        pairs: dict[str, list[dict[str, Any]]] = {}
        for record in records if self.readers else ():
            if isinstance(record, PairRetired):
                told = {"pair_id": record.pair_id, "state": record.state, "reason": record.reason}
                pairs.setdefault(record.adapter, []).append(told)
        self._tell([_event("outcomes", adapter, pairs=found) for adapter, found in pairs.items()])

    def _tell(self, events: Sequence[Event]) -> None:
        if events:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon is at its end
                self._loop.call_soon_threadsafe(self._publish, events)

    async def _poll(self) -> None:
        try:
            polls = 0
            while self.readers:
                await asyncio.sleep(POLL_S)
                polls += 1
                self._catch_up()
                if polls % _STATUS_EVERY == 0:
                    self._publish([Event("status", await asyncio.to_thread(self._status))])
        except Exception:
            log.exception("the event streams end: there is nothing to tell")
            self.close()
        finally:
            self._poller = None

    def _catch_up(self) -> None:
        """Tell all readers what the engine has done since it was told last."""
        if records := self._iterations(self._told):
            self._told = records[-1].number
            self._publish([self._iterations_event(records)] if self.readers else [])

    def _publish(self, events: Sequence[Event]) -> None:
        for reader, event in product(list(self.readers), events):
            reader.offer(event)

    def _iterations_event(self, records: Sequence[Iteration]) -> Event:
        unix_s = time.time() - time.monotonic()
        data = {"iterations": [_iteration(record, unix_s) for record in records]}
        return Event("iterations", data, id=f"{self._life}-{records[-1].number}")

    def _number_of(self, resume_id: str) -> int | None:
        """The iteration that an event's id names; None where it is not of this life."""
        life, _, number = resume_id.partition("-")
        known = life == str(self._life) and number.isascii() and number.isdigit() and len(number) < 16
        return int(number) if known else None


def _iteration(record: Iteration, unix_s: float) -> dict[str, Any]:
    """A record as the stream shows it; `unix_s` is the Unix time at which the monotonic clock began."""
    parts = {f"{part}_ms": getattr(record, f"{part}_s") * 1e3 for part in ("decision", "prefill", "decode", "finetune")}
    values = {**record.report(), **parts, "predicted_ms": record.predicted_s * 1e3}
    return {
        "number": record.number,
        "at_s": round(unix_s + record.started_s, 4),
        **{name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()},
        "preempted": len(record.preempted),
        "free_pages": record.free_pages,
    }


def _learning_events(records: Sequence[Record]) -> list[Event]:
    """New versions, and the first scores of pairs."""
    events = []
    for record in records:
        match record:
            case VersionPublished():
                events.append(_event("version", record.adapter, version=record.version, reason=record.reason))
            case PairScored(split="prequential"):
                difference = record.chosen_logp - record.rejected_logp
                scores = {"win": difference > 0.0, "delta_nats": difference, "reward_margin": record.reward_margin}
                pair = {"pair_id": record.pair_id, "version": record.version}
                events.append(_event("pair", record.adapter, **pair, **scores))
    return events


def _event(name: EventName, adapter: str, **data: Any) -> Event:
    """Something that has just happened to an adapter."""
    return Event(name, {"adapter": adapter, **data, "at_s": time.time()}, adapter)
