"""Candidates run in room that nothing else needs, are dropped where it is wanted, and count as no requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edged.engine.request import Request
from tests.engine.harness import random_ids, request, running_engine


def candidate(name: str, prompt: tuple[int, ...], max_tokens: int = 8) -> Request:
    return replace(request(name, prompt, max_tokens), candidate=True)


def test_a_candidate_answers_as_any_request_and_counts_as_none(tmp_path: Path) -> None:
    prompt = random_ids(20, 1)
    with running_engine(tmp_path) as (engine, client):
        engine.submit(request("one", prompt, 8))
        engine.submit(candidate("two", prompt, 8))
        client.wait(lambda: {"one", "two"} <= client.finished.keys())
        status = engine.status()
    assert client.ids("one") == client.ids("two")
    assert client.finished["two"].reason == "length"
    totals = status["totals"]
    assert (totals["requests"], totals["output_tokens"]) == (1, 8)
    assert (totals["candidates"], totals["candidate_tokens"], totals["candidates_dropped"]) == (1, 8, 0)
    assert sum(status["outcomes"].values()) == 1


def test_candidates_are_dropped_where_a_request_finds_no_place(tmp_path: Path) -> None:
    with running_engine(tmp_path, serving__max_sequences=2) as (engine, client):
        engine.submit(request("long", random_ids(20, 1), 300))
        engine.submit(candidate("spare", random_ids(20, 2), 300))
        client.wait(lambda: engine.status()["queue"]["decode"] == 2)
        engine.submit(request("asked", random_ids(20, 3), 4))
        client.wait(lambda: "asked" in client.finished)
        assert client.finished["spare"].reason == "dropped"
        assert "long" not in client.finished
        assert engine.status()["totals"]["candidates_dropped"] == 1


def test_candidates_are_dropped_where_their_pages_are_wanted(tmp_path: Path) -> None:
    with running_engine(tmp_path, cache__memory_mb=1) as (engine, client):
        engine.submit(request("one", random_ids(16, 1), 480))
        for number in range(3):
            engine.submit(candidate(f"spare {number}", random_ids(16, 2 + number), 480))
        client.wait(lambda: "one" in client.finished, 120)
        reasons = [client.finished[f"spare {number}"].reason for number in range(3)]
        assert reasons.count("dropped") >= 1
        assert engine.status()["totals"]["preemptions"] == 0
    assert client.finished["one"].reason == "length"


def test_there_is_no_room_for_candidates_while_requests_wait(tmp_path: Path) -> None:
    with running_engine(tmp_path, serving__max_sequences=4) as (engine, client):
        assert engine.spare_rows(32, "ann") == 3
        for number in range(4):
            engine.submit(request(f"long {number}", random_ids(20, number), 200))
        client.wait(lambda: engine.status()["queue"]["decode"] == 4)
        assert engine.spare_rows(32, "ann") == 0


def test_a_cancelled_candidate_frees_its_pages(tmp_path: Path) -> None:
    with running_engine(tmp_path, cache__share_across="none") as (engine, client):
        free = engine.status()["pages"]["free"]
        engine.submit(candidate("spare", random_ids(20, 2), 300))
        client.wait(lambda: engine.status()["queue"]["decode"] == 1)
        engine.cancel("spare")
        client.wait(lambda: "spare" in client.finished)
        client.wait(lambda: engine.status()["pages"]["free"] == free)
