"""`GET /metrics` and `GET /v1/trace` of a real daemon."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from pathlib import Path

import httpx2
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from edged.observe.catalogue import CATALOGUE
from tests.api.live import LiveDaemon, crowd, running, started
from tests.models import save_tiny
from tests.observe.test_trace import check_format

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
NOT_ON_EVERY_BOX = {
    *("edged_temperature_celsius", "edged_temperature_limit_celsius", "edged_power_watts", "edged_gpu_memory_bytes"),
    *("edged_adapter_kl_nats", "edged_adapter_neutral_nll_change_ratio"),  # of tested adapters
    "edged_adapter_liked_ratio",  # of adapters whose taste was judged
    *("edged_iteration_slack_seconds", "edged_heap_bytes", "edged_energy_joules_total", "edged_memory_pressure_ratio"),
}


def scrape(http: httpx2.Client) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = http.get("/metrics").text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_families(text)
        for sample in family.samples
    }


def value(http: httpx2.Client, name: str, **labels: str) -> float:
    return scrape(http)[name, frozenset(labels.items())]


def teach(http: httpx2.Client, user: str) -> None:
    answer = http.post(
        "/v1/completions", json={"prompt": "hello", "user": user, "n": 2, "max_tokens": 8, "ignore_eos": True}
    ).json()
    rating = {"completion_id": answer["id"], "choice": 0, "signal": "chosen"}
    assert http.post("/v1/feedback", json=rating).status_code == 200


def test_what_is_exposed_is_what_the_catalogue_names(http: httpx2.Client) -> None:
    teach(http, "ann")
    deadline = time.monotonic() + 30.0
    while "edged_adapter_win_rate_ratio" not in http.get("/metrics").text:
        assert time.monotonic() < deadline, "no pair was scored"
        time.sleep(0.05)
    answer = http.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    exposed = {family.name: family for family in text_families(answer.text)}
    # Prometheus' text gives counters and infos without their suffix.
    names = {metric.name: metric for metric in CATALOGUE}
    found = {name if name in names else f"{name}_total" for name in exposed}
    assert found <= names.keys()
    assert names.keys() - found <= NOT_ON_EVERY_BOX
    for family in exposed.values():
        metric = names.get(family.name) or names[f"{family.name}_total"]
        assert family.documentation == metric.help
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)


def test_openmetrics_is_given_to_who_asks_for_it(http: httpx2.Client) -> None:
    answer = http.get("/metrics", headers={"Accept": OPENMETRICS})
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.text.endswith("# EOF\n")
    kinds = {family.name: family.type for family in openmetrics_families(answer.text)}
    assert kinds["edged_tokens"] == "counter"
    assert kinds["edged_build"] == "info"
    assert kinds["edged_ttft_seconds"] == "histogram"


def wait_until_quiet(http: httpx2.Client) -> None:
    """Versions that were taught before may be tested still, and asked for an answer."""
    deadline, quiet = time.monotonic() + 30.0, 0
    while quiet < 10:
        assert time.monotonic() < deadline
        quiet = quiet + 1 if not any(http.get("/v1/status").json()["queue"].values()) else 0
        time.sleep(0.05)


def test_tokens_and_requests_are_counted(http: httpx2.Client) -> None:
    wait_until_quiet(http)
    before = scrape(http)
    for _ in range(3):
        http.post("/v1/completions", json={"prompt": "count me", "max_tokens": 5, "logit_bias": {"2": -100}})
    after = scrape(http)

    def grown(name: str, **labels: str) -> float:
        key = name, frozenset(labels.items())
        return after[key] - before[key]

    interactive = {"class": "interactive"}
    assert grown("edged_ttft_seconds_count", **interactive) == 3
    assert grown("edged_tbt_seconds_count", **interactive) == 3 * 4
    assert grown("edged_tokens_total", kind="output") == 3 * 5
    assert grown("edged_requests_total", outcome="length") == 3
    assert grown("edged_decision_seconds_count") >= 3 * 5


def test_what_the_engine_itself_refuses_is_counted(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    with running(tmp_path / "run", model, serving__max_queue=1, serving__max_sequences=1) as live, live.http() as http:
        # An answer that ends by itself would make room before the queue is full.
        body = {"prompt": "x", "n": 12, "max_tokens": 64, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).status_code == 429
        assert value(http, "edged_requests_total", outcome="refused") == 1
        assert value(http, "edged_queue_limit_requests") == 1


def test_requests_that_wait_and_those_that_are_refused_before_the_engine_are_counted(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny", max_position_embeddings=8192)
    settings = {"serving__max_sequences": 1, "serving__max_queue": 4}
    with running(tmp_path / "run", model, **settings) as live, live.http() as http, crowd(live.socket, 12):
        deadline = time.monotonic() + 30.0
        # One runs; the engine's queue has one more, admission three: together what the limit says.
        told = (0.0, 0.0)
        while told != (4, 7):
            assert time.monotonic() < deadline, f"waiting, refused of 12: {told}"
            time.sleep(0.05)
            waiting = value(http, "edged_queue_requests", stage="waiting")
            told = waiting, value(http, "edged_requests_total", outcome="refused")
        assert value(http, "edged_queue_limit_requests") == 4
        status = live.status()
        assert (status["outcomes"]["refused"], status["queue"]["waiting"]) == (7, 4)


def test_adapters_are_named_as_far_as_the_setting_allows(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    with running(tmp_path / "run", model, metrics__adapters=1) as live, live.http() as http:
        for user in ("ann", "bob", "cid"):
            teach(http, user)
        deadline = time.monotonic() + 30.0
        while value(http, "edged_adapters", place="known") < 3:
            assert time.monotonic() < deadline, "not all pairs reached the engine"
            time.sleep(0.05)
        found = scrape(http)
    shown = {dict(labels)["adapter"] for name, labels in found if name.startswith("edged_adapter_")}
    assert len(shown) == 2
    assert shown - {"ann", "bob", "cid"} == {"other"}


def test_while_the_model_is_loading_only_that_is_told(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    with started(tmp_path / "run", model, download_s=5.0) as live, live.http() as http:
        found = {}
        while not found:
            assert live.process.is_alive(), live.log
            with contextlib.suppress(httpx2.TransportError):
                found = scrape(http)
        assert found == {("edged_ready", frozenset()): 0.0}
        live.wait_until_ready()
        assert value(http, "edged_ready") == 1.0


def test_a_database_that_fails_is_counted_and_hides_nothing_else(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    with running(tmp_path / "run", model) as live, live.http() as http:
        assert value(http, "edged_store_errors_total") == 0
        with sqlite3.connect(live.data / "edged.db") as db:
            db.execute("DROP TABLE alignment_metrics")
        teach(http, "ann")
        found = scrape(http)
        assert found["edged_store_errors_total", frozenset()] > 0
        assert found["edged_ready", frozenset()] == 1


def test_a_trace_of_the_latest_seconds_is_valid(http: httpx2.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "trace me", "max_tokens": 6, "user": "ann"}).json()
    document = json.loads(http.get("/v1/trace?seconds=60").text)
    check_format(document["traceEvents"])
    assert document["displayTimeUnit"] == "ms"
    assert document["otherData"]["iterations"] >= 6
    tracks = [event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"]
    assert any(answer["id"] in track and track.endswith(" ann") for track in tracks), answer["id"]


def test_a_trace_of_a_time_without_work_has_no_slices(daemon: LiveDaemon, http: httpx2.Client) -> None:
    assert daemon.idle()
    document = json.loads(http.get("/v1/trace?seconds=0.0001").text)
    assert {event["ph"] for event in document["traceEvents"]} == {"M"}


@pytest.mark.parametrize("text", ["0", "-1", "601", "nan", "inf", "soon", ""])
def test_seconds_that_cannot_be_are_refused(http: httpx2.Client, text: str) -> None:
    answer = http.get("/v1/trace", params={"seconds": text})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "seconds"
