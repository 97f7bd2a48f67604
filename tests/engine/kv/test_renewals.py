"""A talk goes on as quickly after a lesson as before it: its K/V are computed again while nobody is served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.harness import BuiltEngine, Client, random_ids, random_pairs, request, running_engine
from tests.models import STATEFUL


def teach(engine: BuiltEngine, client: Client, first_id: int = 1) -> None:
    """Have the adapter "ann" learn pairs, until its new version serves."""
    before = engine.version("ann") or 0
    engine.submit_pairs(random_pairs(4, first_id=first_id))
    client.wait(lambda: (engine.version("ann") or 0) > before)


def renewals(engine: BuiltEngine) -> int:
    return int(engine.status()["totals"]["renewals"])


@pytest.mark.parametrize("kind", ["llama", "gemma2", *STATEFUL])
def test_the_next_turn_finds_the_talk_under_the_new_version(kind: str, tmp_path: Path) -> None:
    settings = {"cache__memory_mb": 16} if kind in STATEFUL else {}
    with running_engine(tmp_path, kind, **settings) as (engine, client):
        talk = random_ids(60, 1)
        engine.submit(request("first", talk, 12, "ann"))
        client.wait(lambda: "first" in client.finished)
        teach(engine, client)
        client.wait(lambda: renewals(engine) == 1 and not engine.status()["queue"]["decode"])
        turn = [*talk, *client.ids("first"), *random_ids(9, 2)]
        engine.submit(request("next", turn, 12, "ann"))
        client.wait(lambda: "next" in client.finished)
        found = client.finished["next"]
        assert found.version == 1
        assert found.cached_tokens >= 64
        totals = engine.status()["totals"]
        assert (totals["requests"], totals["candidates"], totals["output_tokens"]) == (2, 0, 24)
        assert set(client.finished) == set(client.tokens) == {"first", "next"}, "nobody hears of it"
        engine.submit(replace(request("alone", turn, 12, "ann"), tenant="of its own"))
        client.wait(lambda: "alone" in client.finished)
        assert client.finished["alone"].cached_tokens == 0
        assert client.ids("next") == client.ids("alone")


def test_what_is_asked_ends_it_and_goes_on_from_what_it_computed(tmp_path: Path) -> None:
    settings = {"serving__max_batch_tokens": 32, "cache__memory_mb": 16}
    with running_engine(tmp_path, **settings) as (engine, client):
        talk = random_ids(400, 1)
        engine.submit(request("first", talk, 4, "ann"))
        client.wait(lambda: "first" in client.finished)
        run = engine.runner.run
        asked: list[int] = []

        def interrupted(plan, sequences, *arguments, **named):  # type: ignore[no-untyped-def]
            renewal = next((each for each in sequences.values() if each.request.delivery == "none"), None)
            if renewal is not None and renewal.computed >= 64 and not asked:
                asked.append(renewal.computed)
                engine.submit(request("next", [*talk, *random_ids(8, 2)], 4, "ann"))
            return run(plan, sequences, *arguments, **named)

        engine.runner.run = interrupted  # type: ignore[method-assign]
        teach(engine, client)
        client.wait(lambda: "next" in client.finished)
        assert client.finished["next"].cached_tokens >= asked[0]
        assert client.finished["next"].cached_tokens < 400
        # What was ended goes on for the latest talk, which has no stale K/V any more.
        client.wait(lambda: not engine.status()["queue"]["prefill"])


def test_a_forgotten_talk_is_not_computed_again(tmp_path: Path) -> None:
    with running_engine(tmp_path) as (engine, client):
        teach(engine, client)
        engine.submit(request("first", random_ids(60, 1), 4, "ann"))
        client.wait(lambda: "first" in client.finished)
        engine.forget("ann").result()
        teach(engine, client, first_id=9)
        engine.submit(request("other", random_ids(60, 2), 4))
        client.wait(lambda: "other" in client.finished)
        assert renewals(engine) == 0


def test_an_old_talk_and_one_whose_prefixes_are_not_shared_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edged.engine.sequences._GOES_ON_S", 0.0)
    with running_engine(tmp_path) as (engine, client):
        engine.submit(request("first", random_ids(60, 1), 4, "ann"))
        client.wait(lambda: "first" in client.finished)
        teach(engine, client)
        engine.submit(request("next", random_ids(60, 1), 4, "ann"))
        client.wait(lambda: "next" in client.finished)
        assert renewals(engine) == 0
        assert client.finished["next"].cached_tokens == 0
