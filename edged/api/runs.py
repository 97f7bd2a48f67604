"""Runs of applications: what a call says that it belongs to, which runs are open, and what those that ended cost."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from multidict import CIMultiDictProxy

from edged.api.requests import RUN_NAME, ChatRequest, CompletionRequest
from edged.demand.predictor import MAX_TYPES, DemandPredictor, features_of
from edged.http.errors import bad_request
from edged.observe.observer import Histogram
from edged.scheduler.fairness.virtual_time import call_cost
from edged.settings.access import USER_NAME
from edged.settings.fairness import FairnessSettings
from edged.store import Store, StoreError, utc_now, utc_text
from edged.store.application_runs import add_run, forget_runs, latest_runs, salt

log = logging.getLogger("edged.api")
APPLICATION_HEADER, RUN_HEADER = "X-Edged-Application", "X-Edged-Run"
CLIENTS_HEADERS = ("x-session-id", "x-session-affinity", "x-claude-code-session-id", "session-id", "session_id")
"""Headers in which clients name the run that a call belongs to, without being told to."""
_TRACE = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
"""`traceparent` of W3C Trace Context."""
_MAX_OPEN = 1024
"""Open runs of one user; calls of further ones are runs of their own."""
_STORED = np.float16
"""Counts of words and logarithms of sizes are small."""
_COLUMNS = ("user", "application", "predicted", "cost", "calls", "prompt_tokens", "answer_tokens", "late_s", "sharer")
"""Fields of a run that its row has under the same names."""
_MAX_TYPES, _MAX_ENDED = 1024, 256
"""(User, type) pairs that are kept, and the latest ended runs of each."""
_SECONDS = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0)
_BOUNDS = {
    "edged_application_seconds": _SECONDS,
    "edged_fair_lateness_seconds": (0.0, *_SECONDS),
    "edged_demand_error_ratio": (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 20.0),
}
"""Bounds of the histograms of ended runs."""


@dataclass(frozen=True, slots=True)
class RunNames:
    """The type of application and the run that a call belongs to; `run` is "" for a run of its own."""

    application: str
    run: str


def names_of(headers: CIMultiDictProxy[str], body: ChatRequest | CompletionRequest) -> RunNames:
    """Return what a call says: its own headers, then `metadata`, then what clients send for sessions and traces.

    Raises ApiError (400) for names that cannot be used, and for two that differ.
    """
    application = _named(headers, APPLICATION_HEADER, body.labels, "application")
    if application and not USER_NAME.fullmatch(application):
        raise _unusable(application, "a type of application", "1 to 64 of letters, digits and . _ @ -")
    run = _named(headers, RUN_HEADER, body.labels, "run")
    if run and not RUN_NAME.fullmatch(run):
        raise _unusable(run, "a run", "1 to 128 of letters, digits and . _ : @ / + = -")
    return RunNames(application or _type_of(body), run or _session(headers, body))


def _named(headers: CIMultiDictProxy[str], header: str, labels: Mapping[str, str], key: str) -> str:
    return _one(
        {**{value: header for value in headers.getall(header, ())}, **_said(labels.get(key), f"metadata.{key}")}
    )


def _said(value: str | None, where: str) -> dict[str, str]:
    return {value: where} if value else {}


def _one(named: dict[str, str]) -> str:
    """Return the one name of {name: where it stands}; "" for none. Raises ApiError (400) for several."""
    if len(named) > 1:
        shown = " and ".join(f"{where} {name[:40]!r}" for name, where in named.items())
        raise bad_request(f"{shown} differ: send one", next(iter(named.values())))
    return next(iter(named), "")


def _unusable(name: str, what: str, allowed: str) -> Exception:
    return bad_request(f"{name[:40]!r} cannot name {what}: use {allowed}", "metadata")


def _session(headers: CIMultiDictProxy[str], body: ChatRequest | CompletionRequest) -> str:
    """Return the run by the headers of sessions, else the cache key or the trace; "" without any of them."""
    named = {value: name for name in reversed(CLIENTS_HEADERS) for value in headers.getall(name, ())}
    run = _one(named) or body.prompt_cache_key or ""
    if not run and (trace := _TRACE.fullmatch(headers.get("traceparent", ""))):
        run = trace[1]
    # Other programs' names are as they please.
    return run if RUN_NAME.fullmatch(run) or not run else hashlib.sha256(run.encode()).hexdigest()[:32]


def _type_of(body: ChatRequest | CompletionRequest) -> str:
    """Return the type of a call that names none: agents have one system message each."""
    if isinstance(body, CompletionRequest):
        return "text"
    first = body.messages[0].plain()
    return (
        f"agent-{hashlib.sha256(first['content'].encode()).hexdigest()[:12]}" if first["role"] == "system" else "chat"
    )


@dataclass(slots=True, eq=False)
class ApplicationRun:
    """A run from its first call on."""

    key: str
    """Its name in the engine; "" for a single answer that belongs to none."""
    user: str
    application: str
    name: str
    begun_s: float
    predicted: float
    features: np.ndarray | None = None
    """Of its first call, where demand is learned."""
    calls: int = 0
    open_calls: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    cost: float = 0.0
    ended_s: float = 0.0
    late_s: float = 0.0
    sharer: str | None = None
    """The name under which its requests take turns, for whom its demand is learned; None: the user's."""

    @property
    def seconds(self) -> float:
        """Seconds from its first call to the end of its last one."""
        return max(0.0, self.ended_s - self.begun_s)

    def report(self) -> dict[str, Any]:
        """Return it as `GET /v1/applications/{type}` shows it."""
        names = ("calls", "open_calls", "prompt_tokens", "answer_tokens", "cost", "predicted", "late_s")
        shown = {name: getattr(self, name) for name in names}
        return {"run": self.name, "user": self.user, "seconds": self.seconds, **shown}


class ApplicationRuns:
    """The open and the latest ended runs of all users; used on the event loop alone.

    Where demand is learned, ended runs are stored: a restart knows them again.
    """

    def __init__(
        self,
        settings: Callable[[], FairnessSettings],
        store: Store,
        late_s: Callable[[str], float] = lambda _: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`late_s` returns how much later a run of this key ended than under fair sharing."""
        self._settings, self._store, self._late_s, self._clock = settings, store, late_s, clock
        self.open: OrderedDict[str, ApplicationRun] = OrderedDict()
        """Open runs by key, the one whose last call is longest ago first."""
        self._open_of: dict[str, int] = {}
        self._begun: set[ApplicationRun] = set()
        """Runs that are not closed, with those that have no key."""
        self._ended: OrderedDict[tuple[str, str], deque[ApplicationRun]] = OrderedDict()
        self.demand = OrderedDict[str, DemandPredictor]()
        """What each sharer's runs cost, the one whose last run ended longest ago first."""
        self._salt = store.read(salt)
        self._trainer: Executor = ThreadPoolExecutor(1, "edged-demand")
        self._histograms = {name: Histogram(bounds) for name, bounds in _BOUNDS.items()}
        self._warned = False
        for row in store.read(latest_runs):
            self._learn(row)
            fields = {name: row[name] for name in _COLUMNS}
            self._keep(ApplicationRun("", name=row["run"], begun_s=0.0, ended_s=row["seconds"], **fields))

    def begin(
        self, user: str, names: RunNames, request: str, call: tuple[str, int, int, int], sharer: str | None = None
    ) -> ApplicationRun:
        """Count a call as begun; returns its run. `call`: its text, prompt tokens, choices and `max_tokens`."""
        self.sweep()
        text, prompt, choices, max_tokens = call
        name = names.run if self._open_of.get(user, 0) < _MAX_OPEN or f"{user}/{names.run}" in self.open else ""
        if names.run and not name and not self._warned:
            self._warned = True
            log.warning("%s has more than %d open runs: calls of others stand for themselves", user, _MAX_OPEN)
        # The choices of one request belong together, whatever it says.
        key = f"{user}/{name}" if name else f"{user}/{request}" if choices > 1 else ""
        run = self.open.get(key) if key else None
        if run is None:
            begun = (key, user, names.application, name or request, self._clock(), 0.0)
            run = ApplicationRun(*begun, sharer=sharer)
            if self._settings().policy == "justitia":
                otherwise = choices * call_cost(prompt, max_tokens / 2)
                run.features = features_of(text, prompt, choices, max_tokens, self._salt)
                demand = self.demand.get(sharer or user, DemandPredictor())
                run.predicted = demand.predict(names.application, run.features, otherwise)
            self._begun.add(run)
            if key:
                self.open[key] = run
                self._open_of[user] = self._open_of.get(user, 0) + 1
        run.calls += 1
        run.open_calls += 1
        return run

    def end(self, run: ApplicationRun, prompt: int, answers: list[int]) -> None:
        """Count a call as ended, with the tokens of its prompt and of each answer."""
        run.open_calls -= 1
        run.ended_s = self._clock()
        run.prompt_tokens += prompt
        run.answer_tokens += sum(answers)
        run.cost += sum(call_cost(prompt, answer) for answer in answers)
        if run.key in self.open:
            self.open.move_to_end(run.key)
        elif not run.open_calls:
            self._close(run)

    def sweep(self) -> None:
        """Close the runs of which nothing came for `fairness.idle_s`."""
        oldest_s = self._clock() - self._settings().idle_s
        for run in list(self.open.values()):
            if run.open_calls:
                continue
            if run.ended_s > oldest_s:
                break
            del self.open[run.key]
            self._open_of[run.user] -= 1
            if not self._open_of[run.user]:
                del self._open_of[run.user]
            self._close(run)

    def _close(self, run: ApplicationRun) -> None:
        self._begun.discard(run)
        run.late_s = self._late_s(run.key)
        features, run.features = run.features, None
        # Of a run without a token, whose client left, nothing is to be learned.
        if features is not None and run.cost:
            demand = self._observe(run.sharer or run.user, run.application, features, run.cost)
            self._write(run, features)
            self._histograms["edged_demand_error_ratio"].observe([abs(run.predicted / run.cost - 1.0)])
            if demand.due(run.application):
                self._trainer.submit(self._train, demand, run.application)
        self._keep(run)
        for name, value in zip(_BOUNDS, (run.seconds, run.late_s), strict=False):
            self._histograms[name].observe([value])

    def _keep(self, run: ApplicationRun) -> None:
        ended = self._ended.setdefault((run.user, run.application), deque(maxlen=_MAX_ENDED))
        self._ended.move_to_end((run.user, run.application))
        if len(self._ended) > _MAX_TYPES:
            self._ended.popitem(last=False)
        ended.append(run)

    def _write(self, run: ApplicationRun, features: np.ndarray) -> None:
        row = {
            "created_at": utc_text(utc_now()),
            "run": run.name,
            "seconds": run.seconds,
            "features": features.astype(_STORED).tobytes(),
            **{name: getattr(run, name) for name in _COLUMNS},
        }
        try:
            self._store.write(partial(add_run, row=row))
        except StoreError as error:
            log.warning("a run of %s is not stored, and is not known after a restart: %s", run.application, error)

    def _learn(self, row: Mapping[str, Any]) -> None:
        features = np.frombuffer(row["features"], _STORED).astype(np.float32)
        self._observe(row["sharer"] or row["user"], row["application"], features, row["cost"])

    def _observe(self, sharer: str, application: str, features: np.ndarray, cost: float) -> DemandPredictor:
        """Learn what a sharer's run cost; too many types make the sharer that has most of them forget its oldest."""
        demand = self.demand.setdefault(sharer, DemandPredictor())
        self.demand.move_to_end(sharer)
        demand.observe(application, features, cost)
        if sum(map(len, self.demand.values())) > MAX_TYPES:
            most = max(self.demand, key=lambda each: len(self.demand[each]))
            self.demand[most].drop_oldest()
            if not self.demand[most]:
                del self.demand[most]
        return demand

    def readings(self) -> dict[str, Any]:
        """Return the metrics of runs; any thread may ask."""
        calls = [run.open_calls for run in list(self.open.values())]
        states = {"active": sum(map(bool, calls)), "idle": calls.count(0)}
        shown = {name: {(): histogram.buckets()} for name, histogram in self._histograms.items()}
        return {"edged_applications": states, **shown}

    def _train(self, demand: DemandPredictor, application: str) -> None:
        try:
            if demand.due(application):
                demand.train(application)
        except Exception:
            log.exception("the demand of %s could not be learned: its median counts", application)

    async def forget(self, application: str, sees: Callable[[str], bool] = lambda _: True) -> int:
        """Forget ended runs of a type, and what was learned from them; returns how many. `sees` says of whom.

        What others' runs taught stays. Raises StoreError.
        """
        gone = [key for key in self._ended if key[1] == application and sees(key[0])]
        if not gone:
            return 0
        users = [user for user, _ in gone]
        await asyncio.wrap_future(self._store.write(partial(forget_runs, application=application, users=users)))
        return await self._forget(gone)

    async def _forget(self, gone: list[tuple[str, str]]) -> int:
        """Forget ended runs by (user, type), whose rows are deleted; returns how many."""
        runs = [run for key in gone for run in self._ended.pop(key, ())]
        taught = {(run.sharer or run.user, run.application) for run in runs}
        rows = await asyncio.to_thread(self._store.read, latest_runs) if taught else []
        for sharer, application in taught:
            if sharer in self.demand:
                self.demand[sharer].forget(application)
                if not self.demand[sharer]:
                    del self.demand[sharer]
        for row in rows:
            if (row["sharer"] or row["user"], row["application"]) in taught:
                self._learn(row)
        return len(runs)

    async def forget_user(self, user: str) -> None:
        """Forget a user's ended runs, whose rows are deleted already, and what was learned from them.

        Raises StoreError.
        """
        for run in self._begun:
            if run.user == user:
                run.features = None
        await self._forget([key for key in self._ended if key[0] == user])

    def types(self, sees: Callable[[str], bool]) -> list[dict[str, Any]]:
        """Return the types of applications that `sees` allows, by user, the latest last."""
        self.sweep()
        open_runs: dict[tuple[str, str], int] = {}
        for run in self.open.values():
            open_runs[run.user, run.application] = open_runs.get((run.user, run.application), 0) + 1
        keys = [key for key in dict.fromkeys([*self._ended, *open_runs]) if sees(key[0])]
        return [self._type(key, open_runs.get(key, 0)) for key in keys]

    def _type(self, key: tuple[str, str], open_runs: int) -> dict[str, Any]:
        ended = self._ended.get(key, deque())

        def middle(name: str) -> float | None:
            return statistics.median(getattr(run, name) for run in ended) if ended else None

        seconds = [run.seconds for run in ended]
        return {
            "application": key[1],
            "user": key[0],
            "open": open_runs,
            "runs": len(ended),
            "calls_p50": middle("calls"),
            "cost_p50": middle("cost"),
            "predicted_p50": middle("predicted"),
            "seconds_p50": statistics.median(seconds) if seconds else None,
            "late_s_max": max((run.late_s for run in ended), default=None),
        }

    def runs(self, application: str, sees: Callable[[str], bool]) -> list[dict[str, Any]]:
        """Return the open and the latest ended runs of a type that `sees` allows, by their users."""
        self.sweep()
        ended = [run for key, known in self._ended.items() if key[1] == application for run in known]
        return [
            run.report() for run in (*ended, *self.open.values()) if run.application == application and sees(run.user)
        ]
