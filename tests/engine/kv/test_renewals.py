"""A talk goes on as quickly after a lesson as before it: its K/V are computed again while nobody is served."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import BuiltEngine, Client, random_ids, random_pairs, request, running_engine, wait_idle
from tests.models import STATEFUL


def teach(engine: BuiltEngine, client: Client, first_id: int = 1) -> None:
    """Have the adapter "ann" learn pairs, until its new version serves."""
    before = engine.version("ann") or 0
    engine.submit_pairs(random_pairs(4, first_id=first_id))
    client.wait(lambda: (engine.version("ann") or 0) > before)
    # The step that published it is over.
    engine.commands.ask(lambda: None).result()


def renewals(engine: BuiltEngine) -> int:
    return int(engine.status()["totals"]["renewals"])


def at_rest(engine: BuiltEngine) -> bool:
    return not any(engine.status()["queue"].values())


@pytest.mark.parametrize("kind", ["llama", "gemma2", *STATEFUL])
def test_the_next_turn_finds_the_talk_under_the_new_version(kind: str, tmp_path: Path) -> None:
    settings = {"cache__memory_mb": 16} if kind in STATEFUL else {}
    with running_engine(tmp_path, kind, **settings) as (engine, client):
        talk = random_ids(60, 1)
        engine.submit(request("first", talk, 12, "ann"))
        client.wait(lambda: "first" in client.finished)
        teach(engine, client)
        wait_idle(engine)
        assert renewals(engine) >= 1
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


@contextmanager
def at_its_64th_token(engine: BuiltEngine, happens: Callable[[], object]) -> Iterator[list[int]]:
    """Have something happen once a renewal has computed so much; yields how much each of its iterations began with."""
    run, computed, happened = engine.runner.run, list[int](), list[bool]()

    def watched(plan: Any, sequences: Any, *arguments: Any, **named: Any) -> Any:
        renewal = next((each for each in sequences.values() if each.request.delivery == "none"), None)
        if renewal is not None:
            computed.append(renewal.computed)
            if renewal.computed >= 64 and not happened:
                happened.append(True)
                happens()
        return run(plan, sequences, *arguments, **named)

    engine.runner.run = watched  # type: ignore[method-assign]
    yield computed
    engine.runner.run = run  # type: ignore[method-assign]


LONG = {"serving__max_batch_tokens": 32, "cache__memory_mb": 16}


def test_what_is_asked_ends_it_and_finds_what_it_computed(tmp_path: Path) -> None:
    with running_engine(tmp_path, **LONG) as (engine, client):
        talk = random_ids(400, 1)
        engine.submit(request("first", talk, 4, "ann"))
        client.wait(lambda: "first" in client.finished)
        turn = request("next", [*talk, *random_ids(8, 2)], 4, "ann")
        with at_its_64th_token(engine, lambda: engine.submit(turn)):
            teach(engine, client)
            client.wait(lambda: "next" in client.finished)
        assert 64 <= client.finished["next"].cached_tokens < 400


def test_what_the_daemon_asks_for_itself_neither_ends_it_nor_takes_its_place(tmp_path: Path) -> None:
    with running_engine(tmp_path, **LONG) as (engine, client):
        talk = random_ids(400, 1)
        engine.submit(request("first", talk, 4, "ann"))
        client.wait(lambda: "first" in client.finished)
        probe = replace(request("probe", random_ids(40, 2), 4, "ann"), fairness_key="(versions)")
        with at_its_64th_token(engine, lambda: engine.submit(probe)):
            teach(engine, client)
            client.wait(lambda: "probe" in client.finished)
            wait_idle(engine)
        teach(engine, client, first_id=9)
        wait_idle(engine)
        engine.submit(request("next", [*talk, *random_ids(8, 3)], 4, "ann"))
        client.wait(lambda: "next" in client.finished)
        assert client.finished["next"].cached_tokens >= 392


@pytest.mark.parametrize("what", ["forgotten", "a stop"])
def test_it_ends_where_it_has_become_vain(what: str, tmp_path: Path) -> None:
    with running_engine(tmp_path, **LONG) as (engine, client):
        engine.submit(request("first", random_ids(400, 1), 4, "ann"))
        client.wait(lambda: "first" in client.finished)

        def happens() -> None:
            if what == "forgotten":
                engine.forget("ann")
            else:
                threading.Thread(target=engine.stop, args=(30.0,)).start()

        with at_its_64th_token(engine, happens) as computed:
            teach(engine, client)
            client.wait(lambda: computed and computed[-1] >= 64 and (what == "a stop" or at_rest(engine)))
            if what == "a stop":
                engine.stop(30.0)
        assert computed[-1] < 200


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


def test_without_shared_prefixes_there_is_nothing_to_find(tmp_path: Path) -> None:
    with running_engine(tmp_path, cache__share_across="none") as (engine, client):
        engine.submit(request("first", random_ids(60, 1), 4, "ann"))
        client.wait(lambda: "first" in client.finished)
        teach(engine, client)
        client.wait(lambda: at_rest(engine))
        assert renewals(engine) == 0


def test_an_old_talk_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edged.engine.renewals._GOES_ON_S", 0.0)
    with running_engine(tmp_path) as (engine, client):
        engine.submit(request("first", random_ids(60, 1), 4, "ann"))
        client.wait(lambda: "first" in client.finished)
        teach(engine, client)
        engine.submit(request("next", random_ids(60, 1), 4, "ann"))
        client.wait(lambda: "next" in client.finished)
        assert renewals(engine) == 0
        assert client.finished["next"].cached_tokens == 0
