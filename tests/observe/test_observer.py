"""Histograms know every event since start, though the engine keeps only the latest."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from edged.engine.stats import counters
from edged.engine.stats.counters import LatencyRing
from edged.observe.catalogue import CATALOGUE, Samples
from edged.observe.observer import Histogram, Observer
from edged.scheduler.task import ServiceClass
from tests.engine.harness import random_ids, random_pairs, request, running_engine, wait_idle


def values(samples: Samples) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and labels, as a scraper reads them."""
    families = text_string_to_metric_families(generate_latest(samples).decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_a_value_is_counted_in_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    histogram.observe([0.5, 1.0, 1.5, 4.0, 9.0])
    histogram.observe([])
    histogram.observe([2.0])
    buckets, total = histogram.buckets()
    assert buckets == [("1.0", 2), ("2.0", 4), ("4.0", 5), ("+Inf", 6)]
    assert total == pytest.approx(18.0)


def test_waits_are_numbered_and_read_from_where_a_reader_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "WAITS_KEPT", 4)
    ring = LatencyRing()
    assert ring.since(0) == ring.latest(3) == []
    for index in range(6):
        ring.add(float(index), index % 2 == 0, ServiceClass.INTERACTIVE)
    assert [number for number, _, _, _ in ring.since(4)] == [6, 5]
    assert [number for number, _, _, _ in ring.since(0)] == [6, 5, 4, 3]
    assert ring.since(6) == []
    assert ring.latest(1) == [(6, 5.0, False, ServiceClass.INTERACTIVE)]


def test_waits_are_read_whole_while_others_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "WAITS_KEPT", 64)
    ring, classes, done = LatencyRing(), list(ServiceClass), threading.Event()

    def add() -> None:
        while not done.is_set():
            number = ring.count + 1
            ring.add(float(number), number % 3 == 0, classes[number % 2])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    writer = threading.Thread(target=add)
    writer.start()
    try:
        while ring.count < 20_000:
            for number, seconds, met, service in ring.since(0):
                assert (seconds, met, service) == (float(number), number % 3 == 0, classes[number % 2])
            latest = [number for number, *_ in ring.latest(8)]
            assert latest == list(range(max(latest, default=0), 0, -1))[: len(latest)]
            assert len(latest) <= 8
    finally:
        done.set()
        writer.join()
        sys.setswitchinterval(before)


def test_every_token_and_iteration_is_in_a_histogram_once(tmp_path: Path) -> None:
    observer = Observer()
    with running_engine(tmp_path) as (engine, client):
        engine.submit_pairs(random_pairs(8))
        for index in range(3):
            engine.submit(request(f"r{index}", random_ids(20, index), tokens=6))
            observer.drain(engine)
        client.wait(lambda: len(client.finished) == 3)
        wait_idle(engine)
    observer.readings(engine)
    seen, records = values(Samples(observer.readings(engine))), engine.iterations()
    of = (("class", "interactive"),)
    assert seen["edged_ttft_seconds_count", of] == 3
    assert seen["edged_tbt_seconds_count", of] == 3 * 5
    assert seen["edged_tbt_seconds_bucket", (*of, ("le", "+Inf"))] == 3 * 5
    assert seen["edged_ttft_seconds_sum", of] > 0
    assert seen["edged_ttft_seconds_count", (("class", "batch"),)] == 0
    met = sum(seen["edged_slo_tokens_total", (*of, ("result", r), ("target", "tbt"))] for r in ("met", "missed"))
    assert met == 3 * 5
    for mix in ("serving", "finetune", "hybrid"):
        mine = [record.elapsed_s for record in records if record.mix == mix]
        assert seen["edged_iteration_seconds_count", (("mix", mix),)] == len(mine)
        assert seen["edged_iteration_seconds_sum", (("mix", mix),)] == pytest.approx(sum(mine))
    assert engine.status()["busy"]["iterations"] == {
        mix: sum(record.mix == mix for record in records) for mix in ("serving", "finetune", "hybrid")
    }
    assert seen["edged_decision_seconds_count", ()] == len(records)
    assert seen["edged_records_lost_total", (("record", "token"),)] == 0
    assert seen["edged_bin_units", ()] >= 0


def test_records_that_were_overwritten_unseen_are_counted_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "WAITS_KEPT", 4)
    with running_engine(tmp_path) as (engine, client):
        engine.submit(request("r", random_ids(20, 1), tokens=12))
        client.wait(lambda: "r" in client.finished)
    seen = values(Samples(Observer().readings(engine)))
    assert seen["edged_tbt_seconds_count", (("class", "interactive"),)] == 4
    assert seen["edged_records_lost_total", (("record", "token"),)] == 11 - 4


def test_names_follow_prometheus_conventions() -> None:
    names = [metric.name for metric in CATALOGUE]
    # OpenMetrics knows a counter by its name without the suffix.
    families = {name.removesuffix("_total").removesuffix("_info") for name in names}
    assert len(families) == len(names)
    for metric in CATALOGUE:
        assert metric.name.startswith("edged_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not any(unit in metric.name for unit in ("_ms", "_mb", "_percent"))


def test_a_sample_needs_the_labels_of_its_metric() -> None:
    with pytest.raises(ValueError, match="edged_ready"):
        values(Samples({"edged_ready": {"surplus": 1}}))
    with pytest.raises(ValueError, match="edged_unknown"):
        Samples({"edged_unknown": 1})
