"""Runs of applications: what calls say, what joins them, and what is told of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from edged.api.requests import ChatRequest, CompletionRequest
from edged.api.runs import ApplicationRun, ApplicationRuns, RunNames, names_of
from edged.http.errors import ApiError
from edged.scheduler.fairness.virtual_time import call_cost
from edged.settings.live import Live
from edged.settings.load import FairnessSettings, Settings
from edged.store import Store, StoreError, maintenance
from edged.store.adapters import forget_adapters
from edged.store.application_runs import MAX_RUNS, latest_runs
from edged.store.maintenance import Maintenance
from tests.api.live import LiveDaemon, running
from tests.models import save_tiny

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def names(headers: list[tuple[str, str]], **body: Any) -> RunNames:
    messages = body.pop("messages", [{"role": "user", "content": "hello"}])
    request = ChatRequest.checked({"messages": messages, **body})
    return names_of(CIMultiDictProxy(CIMultiDict(headers)), request)


@pytest.mark.parametrize(
    ("headers", "body", "run"),
    [
        ([("X-Edged-Run", "r-1"), ("X-Session-Id", "s-1")], {"prompt_cache_key": "c-1"}, "r-1"),
        ([("X-Session-Id", "s-1")], {"metadata": {"run": "m-1"}}, "m-1"),
        ([("X-Claude-Code-Session-Id", "cc-1")], {"prompt_cache_key": "c-1"}, "cc-1"),
        ([("session_id", "s-2")], {}, "s-2"),
        ([("X-Session-Id", "same"), ("session-id", "same")], {}, "same"),
        ([("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01")], {"prompt_cache_key": "c-1"}, "c-1"),
        ([("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01")], {}, TRACE),
        ([("traceparent", "00-" + "0" * 32 + "-00f067aa0ba902b7-01")], {}, ""),
        ([("traceparent", "nonsense")], {}, ""),
        ([("x-client-request-id", "r-1")], {}, ""),
    ],
)
def test_the_first_name_that_is_there_is_the_run(
    headers: list[tuple[str, str]], body: dict[str, Any], run: str
) -> None:
    assert names(headers, **body).run == run


def test_the_names_of_other_programs_may_be_any_text() -> None:
    run = names([], prompt_cache_key="a key with spaces").run
    assert len(run) == 32
    assert run == names([], prompt_cache_key="a key with spaces").run


def test_the_type_is_what_is_said_or_the_agents_system_message() -> None:
    assert names([("X-Edged-Application", "mail")], metadata={"application": "mail"}).application == "mail"
    assert names([], metadata={"application": "wiki"}).application == "wiki"
    agent = [{"role": "system", "content": "You fix code."}, {"role": "user", "content": "a"}]
    other = [{"role": "system", "content": "You fix code."}, {"role": "user", "content": "b"}]
    assert names([], messages=agent).application == names([], messages=other).application
    assert names([]).application == "chat"
    text = CompletionRequest.checked({"prompt": "once"})
    assert names_of(CIMultiDictProxy(CIMultiDict()), text).application == "text"


@pytest.mark.parametrize(
    ("headers", "body", "told"),
    [
        ([("X-Edged-Run", "a"), ("X-Edged-Run", "b")], {}, "differ"),
        ([("X-Edged-Run", "a")], {"metadata": {"run": "b"}}, "differ"),
        ([("X-Edged-Application", "a")], {"metadata": {"application": "b"}}, "differ"),
        ([("X-Session-Id", "a"), ("X-Claude-Code-Session-Id", "b")], {}, "differ"),
        ([("X-Edged-Run", "a b")], {}, "cannot name a run"),
        ([("X-Edged-Run", "a" * 129)], {}, "cannot name a run"),
        ([("X-Edged-Application", "a/b")], {}, "cannot name a type"),
        ([], {"metadata": ["a"]}, "metadata"),
        ([], {"metadata": {"run": 3}}, "metadata"),
        ([], {"metadata": {str(number): "a" for number in range(17)}}, "metadata"),
    ],
)
def test_names_that_differ_or_cannot_be_used_are_refused(
    headers: list[tuple[str, str]], body: dict[str, Any], told: str
) -> None:
    with pytest.raises(ApiError, match=told) as caught:
        names(headers, **body)
    assert caught.value.status == 400


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "edged.db")
    yield store
    store.close()


def runs_of(store: Store, policy: str = "justitia") -> tuple[ApplicationRuns, Clock]:
    clock, settings = Clock(), FairnessSettings.model_validate({"policy": policy, "idle_s": 10.0})
    return ApplicationRuns(lambda: settings, store, lambda _: 1.5, clock), clock


def call(runs: ApplicationRuns, user: str, name: str, request: str = "req", choices: int = 1) -> ApplicationRun:
    return runs.begin(user, RunNames("mail", name), request, ("sort my mail", 100, choices, 200))


def test_calls_of_one_run_are_one_until_nothing_came_for_a_while(store: Store) -> None:
    runs, clock = runs_of(store)
    first = call(runs, "ann", "r")
    runs.end(first, 100, [20])
    clock.now = 9.0
    assert call(runs, "ann", "r") is first
    runs.end(first, 150, [30])
    clock.now = 18.0
    assert call(runs, "ann", "r") is first
    runs.end(first, 10, [1])
    clock.now = 29.0
    assert call(runs, "ann", "r") is not first
    assert first.cost == call_cost(100, 20) + call_cost(150, 30) + call_cost(10, 1)
    assert (first.calls, first.late_s) == (3, 1.5)


def test_a_run_with_an_open_call_stays_open_however_long_it_takes(store: Store) -> None:
    runs, clock = runs_of(store)
    first = call(runs, "ann", "r")
    clock.now = 1000.0
    assert call(runs, "ann", "r") is first


def test_nobody_joins_anothers_run(store: Store) -> None:
    runs, _ = runs_of(store)
    assert call(runs, "ann", "r").key != call(runs, "bob", "r").key


def test_a_call_without_a_run_stands_for_itself_with_all_its_choices(store: Store) -> None:
    runs, clock = runs_of(store)
    alone = call(runs, "ann", "")
    assert alone.key == ""
    runs.end(alone, 100, [5])
    many = call(runs, "ann", "", "req-2", choices=4)
    assert many.key == "ann/req-2"
    runs.end(many, 100, [5] * 4)
    clock.now = 11.0
    (told,) = runs.types(lambda _: True)
    assert (told["runs"], told["open"]) == (2, 0)


def test_beyond_1024_open_runs_calls_stand_for_themselves(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    runs, _ = runs_of(store)
    for number in range(1024):
        call(runs, "ann", f"r-{number}")
    assert [call(runs, "ann", f"s-{number}").key for number in range(3)] == ["", "", ""]
    assert call(runs, "ann", "r-5").key == "ann/r-5"
    assert call(runs, "bob", "r").key == "bob/r"
    assert sum("more than 1024 open runs" in record.message for record in caplog.records) == 1


def test_demand_is_what_runs_of_the_type_have_cost(store: Store) -> None:
    runs, _ = runs_of(store)
    for _ in range(5):
        runs.end(call(runs, "ann", ""), 100, [40])
    assert call(runs, "ann", "").predicted == call_cost(100, 40)
    assert runs_of(store, "vtc")[0].begin("ann", RunNames("mail", ""), "r", ("a", 1, 1, 1)).predicted == 0.0


def test_a_predictor_that_fails_leaves_the_median(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, _ = runs_of(store)

    def fail(*_: str) -> None:
        raise FloatingPointError("no gradient")

    monkeypatch.setattr("edged.api.runs.DemandPredictor.train", fail)
    for _ in range(25):
        runs.end(call(runs, "ann", ""), 100, [40])
    assert call(runs, "ann", "").predicted == call_cost(100, 40)


async def test_one_sharers_runs_change_nothing_of_what_anothers_are_expected_to_cost(store: Store) -> None:
    runs, _ = runs_of(store)

    def run(user: str, sharer: str, kind: str, answer: int) -> ApplicationRun:
        begun = runs.begin(user, RunNames(kind, ""), "req", ("sort my mail", 100, 1, 200), sharer)
        runs.end(begun, 100, [answer])
        return begun

    for number in range(5):
        run(f"user-{number}", "app", "chat", 40)
    assert run("user-9", "app", "chat", 40).predicted == call_cost(100, 40), "an application's users teach together"
    for number in range(200):
        run("eve", "eve", "chat" if number % 2 else f"invented-{number}", 4000)
    assert run("user-9", "app", "chat", 40).predicted == call_cost(100, 40)
    assert run("bob", "bob", "chat", 40).predicted == call_cost(100, 100), "nothing is known of bob's runs"
    assert await runs.forget("chat", lambda user: user == "nobody") == 0
    assert await runs.forget("chat", lambda user: user == "eve") == 100
    assert run("user-9", "app", "chat", 40).predicted == call_cost(100, 40)
    again, _ = runs_of(store)
    begun = again.begin("user-8", RunNames("chat", ""), "req", ("sort my mail", 100, 1, 200), "app")
    assert begun.predicted == call_cost(100, 40), "also after a restart"


async def test_one_sees_own_runs_alone_and_what_is_forgotten_is_gone(store: Store) -> None:
    runs, clock = runs_of(store)
    for user in ("ann", "bob"):
        runs.end(call(runs, user, "r"), 100, [40])
    clock.now = 11.0
    assert [told["user"] for told in runs.types(lambda user: user == "ann")] == ["ann"]
    assert [told["user"] for told in runs.runs("mail", lambda _: True)] == ["ann", "bob"]
    store.write(lambda db: forget_adapters(db, "bob")).result()
    await runs.forget_user("bob")
    assert [told["user"] for told in runs.runs("mail", lambda _: True)] == ["ann"]
    assert await runs.forget("mail", lambda user: user == "bob") == 0
    assert await runs.forget("mail") == 1
    assert runs.types(lambda _: True) == []
    assert runs_of(store)[0].types(lambda _: True) == []


async def test_what_could_not_be_forgotten_is_still_shown(store: Store) -> None:
    runs, _ = runs_of(store)
    runs.end(call(runs, "ann", ""), 100, [40])
    store.close()
    with pytest.raises(StoreError):
        await runs.forget("mail")
    assert [told["user"] for told in runs.types(lambda _: True)] == ["ann"]


def test_a_restart_knows_ended_runs_and_what_they_cost(store: Store) -> None:
    runs, _ = runs_of(store)
    for answer in (10, 20, 30, 40, 50):
        runs.end(call(runs, "ann", ""), 100, [answer])
    store.write(lambda _: None).result()
    again, _ = runs_of(store)
    assert again.runs("mail", lambda _: True) == runs.runs("mail", lambda _: True)
    assert call(again, "ann", "").predicted == call(runs, "ann", "").predicted == call_cost(100, 30)


def test_a_call_has_the_same_features_after_a_restart(store: Store) -> None:
    features = [call(runs_of(store)[0], "ann", "r").features for _ in range(2)]
    assert features[0] is not None
    assert (features[0] == features[1]).all()


def test_a_run_whose_client_left_before_the_first_token_teaches_nothing(store: Store) -> None:
    runs, _ = runs_of(store)
    for answers in ([], [0]):
        runs.end(call(runs, "ann", ""), 100, answers)
    assert store.write(latest_runs).result() == []
    assert [run["cost"] for run in runs.runs("mail", lambda _: True)] == [0.0, 0.0]


def test_nothing_is_stored_where_demand_is_not_learned(store: Store) -> None:
    runs, _ = runs_of(store, "off")
    runs.end(call(runs, "ann", ""), 100, [40])
    assert store.write(latest_runs).result() == []


async def test_of_who_is_forgotten_open_runs_leave_nothing_and_demand_is_that_of_the_others(store: Store) -> None:
    runs, clock = runs_of(store)
    for user, answer in (("ann", 1000), ("ann", 1000), *(("bob", 40),) * 3):
        runs.end(call(runs, user, ""), 100, [answer])
    still_open = [call(runs, "ann", "r"), call(runs, "ann", "")]
    assert call(runs, "bob", "").predicted == call_cost(100, 40)
    store.write(lambda db: forget_adapters(db, "ann")).result()
    await runs.forget_user("ann")
    for run in still_open:
        runs.end(run, 100, [1000])
    clock.now = 20.0
    runs.sweep()
    assert {row["user"] for row in store.write(latest_runs).result()} == {"bob"}
    for _ in range(2):
        runs.end(call(runs, "bob", ""), 100, [50])
    assert call(runs, "bob", "").predicted == call_cost(100, 40)


def test_of_types_that_callers_invent_the_latest_runs_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "MAX_ROWS", 5)
    runs, _ = runs_of(store)
    for number in range(8):
        begun = runs.begin("ann", RunNames(f"type-{number}", ""), f"req-{number}", ("sort my mail", 100, 1, 200))
        runs.end(begun, 100, [1])
    store.write(lambda _: None).result()
    assert Maintenance(store, Live(Settings())).sweep() == {"application_runs": 3}
    assert [row["run"] for row in store.read(latest_runs)] == [f"req-{number}" for number in range(3, 8)]


def test_of_a_type_the_latest_runs_are_kept(store: Store) -> None:
    runs, _ = runs_of(store)
    for number in range(MAX_RUNS + 5):
        runs.end(call(runs, "ann", "", f"req-{number}"), 100, [1])
    store.write(lambda _: None).result()
    assert Maintenance(store, Live(Settings())).sweep() == {"application_runs": 5}
    rows = store.read(latest_runs)
    assert (len(rows), rows[0]["run"]) == (MAX_RUNS, "req-5")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    folder = tmp_path_factory.mktemp("runs")
    model = save_tiny(folder / "tiny", max_position_embeddings=512)
    settings = {"fairness__policy": "justitia", "fairness__idle_s": 1.0}
    with running(folder / "run", model, **settings) as live:
        yield live


def ask(http: httpx2.Client, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    sent = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "user": "ann", **body}
    answer = http.post("/v1/chat/completions", json=sent, headers=headers or {})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_daemon_tells_of_runs_and_forgets_them(daemon: LiveDaemon) -> None:
    with daemon.http() as http:
        for _ in range(3):
            ask(http, {"X-Edged-Application": "mail", "X-Edged-Run": "monday"}, n=2)
        ask(http, metadata={"application": "mail", "run": "tuesday"}, user="bob")
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            told = http.get("/v1/applications").json()["applications"]
            if sum(item["runs"] for item in told) == 2:
                break
        known = {item["user"]: item for item in told}
        assert (known["ann"]["calls_p50"], known["bob"]["calls_p50"]) == (3, 1)
        runs = http.get("/v1/applications/mail").json()["runs"]
        assert [(run["run"], run["calls"]) for run in runs] == [("monday", 3), ("tuesday", 1)]
        assert all(run["cost"] > 0 and run["predicted"] > 0 for run in runs)
        assert http.get("/v1/status").json()["fairness"]["policy"] == "justitia"
        assert http.delete("/v1/applications/mail").json() == {"application": "mail", "runs": 2}
        assert http.get("/v1/applications/mail").status_code == 404
        assert http.delete("/v1/applications/mail").json()["error"]["code"] == "unknown_application"


def test_a_daemon_refuses_names_that_differ(daemon: LiveDaemon) -> None:
    with daemon.http() as http:
        body = {"messages": [{"role": "user", "content": "hello"}], "metadata": {"run": "a"}}
        answer = http.post("/v1/chat/completions", json=body, headers={"X-Edged-Run": "b"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Edged-Run")


def test_the_openai_client_names_its_run(daemon: LiveDaemon) -> None:
    with daemon.http() as http:
        daemon.openai().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=3, user="cy",
            metadata={"application": "wiki"}, extra_headers={"X-Session-Id": "s-7"},
        )  # fmt: skip
        runs = http.get("/v1/applications/wiki").json()["runs"]
        assert [(run["run"], run["user"]) for run in runs] == [("s-7", "cy")]


def test_runs_end_though_nobody_calls(daemon: LiveDaemon) -> None:
    with daemon.http() as http:
        ask(http, {"X-Edged-Run": "last"}, user="dora")
        deadline = time.monotonic() + 30.0
        while 'edged_applications{state="idle"} 0' not in http.get("/metrics").text:
            assert time.monotonic() < deadline, "the run stays open"
            time.sleep(0.05)
