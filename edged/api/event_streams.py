"""The event feed and its readers: iterations, status, versions, their answers, scored pairs and outcomes.

Everything runs on the event loop's thread, except the methods of `Feed` that tell something: any thread may call them.
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

EventName = Literal["iterations", "status", "version", "answer", "pair", "outcomes", "changed", "lease", "load"]
EVENTS: tuple[EventName, ...] = get_args(EventName)
POLL_S = 0.2
_STATUS_EVERY = 5
"""Polls between two status events."""
MAX_BACKLOG = 2000
"""The most iterations that a stream can begin with."""
_WAITING = 64
"""Events that may wait for a reader: ten seconds' worth. A reader that is further behind is dropped."""


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """An event of the feed. `adapter` names the adapter it is about, None for all; a stream can be resumed at `id`."""

    name: EventName
    data: dict[str, Any]
    adapter: str | None = None
    id: str = ""


class EventReader:
    """An open stream: the names of the events that it takes, and the queue of those that wait to be sent."""

    def __init__(
        self, wants: Collection[str], sees: Callable[[str], bool], drop: Callable[[], None], owner: str
    ) -> None:
        """`sees` says whether it may see an adapter, `drop` aborts its connection, `owner` is the reading tenant."""
        self.wants, self.sees, self.owner, self._drop = wants, sees, owner, drop
        self.waiting: asyncio.Queue[Event | None] = asyncio.Queue(_WAITING)
        """Events to be sent; None ends the stream."""

    def offer(self, event: Event | None) -> None:
        """Queue an event, if it is for this reader; None ends the stream after what waits."""
        if event and (event.name not in self.wants or (event.adapter is not None and not self.sees(event.adapter))):
            return
        try:
            self.waiting.put_nowait(event)
        except asyncio.QueueFull:
            self._drop()


class Feed:
    """All event streams of a daemon. While any is open, one task polls the engine; otherwise nothing runs."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        iterations: Callable[[int], Sequence[Iteration]],
        status: Callable[[], dict[str, Any]],
        load: Callable[[], dict[str, Any]],
    ) -> None:
        """`iterations` returns the records after a number, and `load` the load, both without blocking; `status` the
        body of the status route.
        """
        self._loop, self._iterations, self._status, self._load = loop, iterations, status, load
        self._life = int(time.time() * 1e3)
        """The start time (ms), in event ids: the iterations of an earlier daemon had the same numbers."""
        self.readers: set[EventReader] = set()
        """Open streams."""
        self._last_number = 0
        """Number of the last iteration that was published."""
        self._poller: asyncio.Task[None] | None = None

    async def join(self, reader: EventReader, resume_id: str = "", backlog: int = 0) -> None:
        """Send a reader the status at once, and all events from now on, until it is removed from `readers`.

        The stream begins with the iterations after the event `resume_id`, if this daemon sent that, else with the
        latest `backlog` ones; never with more than MOST_BACKLOG.
        """
        self._catch_up()
        if self._poller is None:
            self._poller = self._loop.create_task(self._poll(), name="edged-feed")
        self.readers.add(reader)
        if "load" in reader.wants:
            reader.offer(Event("load", self._load()))
        if "status" in reader.wants:
            reader.offer(Event("status", await asyncio.to_thread(self._status)))
        resumed = self._number_of(resume_id)
        since = max(self._last_number - backlog if resumed is None else resumed, self._last_number - MAX_BACKLOG)
        missed = [record for record in self._iterations(max(0, since)) if record.number <= self._last_number]
        if missed:
            reader.offer(self._iterations_event(missed))

    def close(self) -> None:
        """End all streams."""
        for reader in self.readers:
            reader.offer(None)

    def on_records(self, records: Sequence[Record]) -> None:
        """Publish versions and scores among records of the learning loop; returns at once."""
        self._tell(_learning_events(records) if self.readers else [])

    def tell_outcomes(self, records: Sequence[Record]) -> None:
        """Publish the outcomes of pairs, once they are on disk; returns at once."""
        pairs: dict[str, list[dict[str, Any]]] = {}
        for record in records if self.readers else ():
            if isinstance(record, PairRetired) and (record.version or record.state != "trained"):
                told = {"pair_id": record.pair_id, "state": record.state, "reason": record.reason}
                pairs.setdefault(record.adapter, []).append(told)
        self._tell([_event("outcomes", adapter, pairs=found) for adapter, found in pairs.items()])

    def tell_answer(self, adapter: str, version: int) -> None:
        """Publish that the answer of an adapter's version, for people to compare, is on disk; returns at once."""
        self._tell([_event("answer", adapter, version=version)])

    def tell_changed(self, adapter: str) -> None:
        """Publish that pairs of an adapter came, or its user's words changed, so that copies are behind."""
        self._tell([_event("changed", adapter)])

    def tell_lease(self, adapter: str, node: str, epoch: int, version: int) -> None:
        """Publish which node this one takes for an adapter's writer, and the version that it has itself."""
        self._tell([_event("lease", adapter, node=node, epoch=epoch, version=version)])

    def tell_load(self) -> None:
        """Publish the load, on the event loop's thread."""
        if any("load" in reader.wants for reader in self.readers):
            self._publish([Event("load", self._load())])

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
                self.tell_load()
                if polls % _STATUS_EVERY == 0 and any("status" in reader.wants for reader in self.readers):
                    self._publish([Event("status", await asyncio.to_thread(self._status))])
        except Exception:
            log.exception("the event streams end: there is nothing to tell")
            self.close()
        finally:
            self._poller = None

    def _catch_up(self) -> None:
        """Publish the iterations since the last published one."""
        if records := self._iterations(self._last_number):
            self._last_number = records[-1].number
            self._publish([self._iterations_event(records)] if self.readers else [])

    def _publish(self, events: Sequence[Event]) -> None:
        for reader, event in product(list(self.readers), events):
            reader.offer(event)

    def _iterations_event(self, records: Sequence[Iteration]) -> Event:
        unix_s = time.time() - time.monotonic()
        data = {"iterations": [_iteration(record, unix_s) for record in records]}
        return Event("iterations", data, id=f"{self._life}-{records[-1].number}")

    def _number_of(self, resume_id: str) -> int | None:
        """The iteration that an event's id names; None for an id that this daemon did not make."""
        life, _, number = resume_id.partition("-")
        known = life == str(self._life) and number.isascii() and number.isdigit() and len(number) < 16
        return int(number) if known else None


def _iteration(record: Iteration, unix_s: float) -> dict[str, Any]:
    """The JSON object of an iteration; `unix_s` is the Unix time at which the monotonic clock was 0."""
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
    """Return events for new versions and for the first scores of pairs."""
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
    """Make an event about an adapter, with the present time."""
    return Event(name, {"adapter": adapter, **data, "at_s": time.time()}, adapter)
