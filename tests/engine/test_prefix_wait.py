"""Requests that wait together and begin alike are prefilled once, and none of them waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edged.align.feedback.pair import VersionSaved
from edged.engine.sequence import SequenceStatus
from tests.engine.harness import BuiltEngine, Client, random_ids, random_pairs, request, running_engine, wait_idle
from tests.engine.test_engine import generated
from tests.models import tiny_model

PAGE = 8


@contextmanager
def held_still(engine: BuiltEngine) -> Iterator[None]:
    """What is submitted inside is in the engine's inbox together."""
    gate = threading.Event()
    engine.built.commands.post(lambda: gate.wait(30) and None)
    try:
        yield
    finally:
        gate.set()


def at_a_chunk(engine: BuiltEngine, name: str, tokens: int, then: Any) -> None:
    """Call `then` on the engine thread when request `name` has computed `tokens` of its prompt, or more."""
    serving, runner = engine.built.sequences, engine.built.runner
    run, done = runner.run, threading.Event()

    def watched(*arguments: Any, **named: Any) -> Any:
        work = run(*arguments, **named)
        sequence = serving._by_request.get(name)
        if sequence is not None and sequence.computed >= tokens and not done.is_set():
            done.set()
            then(sequence)
        return work

    runner.run = watched  # type: ignore[method-assign]


def test_tenants_neither_wait_for_each_other_nor_find_what_another_computed(tmp_path: Path) -> None:
    prompt = random_ids(20 * PAGE + 3, 1)
    with running_engine(tmp_path, serving__max_batch_tokens=64) as (engine, client):
        with held_still(engine):
            for name, tenant in (("a1", "ann"), ("b1", "bob"), ("a2", "ann")):
                engine.submit(replace(request(name, prompt, tokens=4), tenant=tenant))
        client.wait(lambda: len(client.finished) == 3)
        assert engine.status()["totals"]["followers"] == 1
        engine.submit(replace(request("c1", prompt, tokens=4), tenant="cy"))
        client.wait(lambda: "c1" in client.finished)
    cached = {name: event.cached_tokens for name, event in client.finished.items()}
    assert cached == {"a1": 0, "b1": 0, "a2": 20 * PAGE, "c1": 0}
    assert client.ids("a1") == client.ids("b1") == client.ids("a2") == client.ids("c1")


def held_back(engine: BuiltEngine) -> int:
    """How many sequences wait for a prefix."""
    return sum(each.status is SequenceStatus.WAITING_PREFIX for each in engine.built.sequences.by_task.values())


def test_requests_that_wait_together_compute_their_common_prefix_once(tmp_path: Path) -> None:
    common = random_ids(25 * PAGE, 1)
    prompts = [common + random_ids(5 + i, 10 + i) for i in range(12)]
    with running_engine(tmp_path, serving__max_batch_tokens=64) as (engine, client):
        with held_still(engine):
            for i, prompt in enumerate(prompts):
                engine.submit(request(f"r{i}", prompt, tokens=4))
        client.wait(lambda: len(client.finished) == len(prompts))
        status = engine.status()
    assert status["totals"]["prompt_tokens"] == len(common) + sum(len(prompt) - len(common) for prompt in prompts)
    assert status["prefix"]["hit_tokens"] == 11 * len(common)
    assert status["totals"]["followers"] == 11
    model = tiny_model()
    for i, prompt in enumerate(prompts):
        assert client.ids(f"r{i}") == generated(model, prompt, 4)[0]


def test_a_follower_goes_on_when_its_own_part_is_computed(tmp_path: Path) -> None:
    common = random_ids(4 * PAGE, 1)
    with running_engine(tmp_path, serving__max_batch_tokens=40) as (engine, client):
        held: list[int] = []
        at_a_chunk(
            engine,
            "long",
            4 * PAGE,
            lambda sequence: engine.built.commands.post(lambda: held.append(held_back(engine))),
        )
        with held_still(engine):
            engine.submit(request("long", common + random_ids(40 * PAGE, 2), tokens=2))
            engine.submit(request("short", common + random_ids(PAGE * 41, 3), tokens=2))
        client.wait(lambda: len(client.finished) == 2)
        assert held == [0], "the rest of the long prompt is not waited for"
        assert client.finished["short"].cached_tokens == len(common)


def test_one_that_comes_when_its_part_is_computed_does_not_wait(tmp_path: Path) -> None:
    common = random_ids(4 * PAGE, 1)
    with running_engine(tmp_path, serving__max_batch_tokens=40) as (engine, client):
        held: list[int] = []

        def come() -> None:
            engine.built.sequences.add(
                request("late", common + random_ids(5 * PAGE, 3), tokens=2), time.monotonic() + 60.0
            )
            held.append(held_back(engine))

        at_a_chunk(engine, "long", 5 * PAGE, lambda sequence: engine.built.commands.post(come))
        engine.submit(request("long", common + random_ids(40 * PAGE, 2), tokens=2))
        client.wait(lambda: len(client.finished) == 2)
        assert held == [0]
        assert client.finished["late"].cached_tokens == len(common)


def test_nobody_waits_for_a_prompt_that_has_become_late(tmp_path: Path) -> None:
    common = random_ids(4 * PAGE, 1)
    prompts = {
        "late": (common + random_ids(40 * PAGE, 2), 15.0),
        "other": (random_ids(20 * PAGE, 3), 0.0),
        "short": (common + random_ids(5, 4), 0.0),
    }
    # A target is at least 10 s, and a late prompt waits for twice its own before it goes first.
    with running_engine(tmp_path, serving__max_batch_tokens=40, scheduler__ttft_floor_ms=10_000) as (engine, client):

        def come() -> None:
            for name, (prompt, ago_s) in prompts.items():
                engine.built.sequences.add(request(name, prompt, tokens=2), time.monotonic() - ago_s)

        engine.built.commands.post(come)
        client.wait(lambda: len(client.finished) == len(prompts))
    assert client.finished["short"].cached_tokens == 0
    assert list(client.finished)[-1] == "late"


def test_nested_prefixes_are_computed_once_each(tmp_path: Path) -> None:
    root, branch = random_ids(10 * PAGE, 1), random_ids(10 * PAGE, 2)
    prompts = [root + random_ids(12, 3), root + branch + random_ids(5, 4), root + branch + random_ids(6, 5)]
    with running_engine(tmp_path, serving__max_batch_tokens=32) as (engine, client):
        with held_still(engine):
            for i, prompt in enumerate(prompts):
                engine.submit(request(f"r{i}", prompt, tokens=2))
        client.wait(lambda: len(client.finished) == 3)
        assert engine.status()["totals"]["prompt_tokens"] == len(root) + len(branch) + 12 + 5 + 6


@pytest.mark.parametrize("how", ["cancelled", "failed", "preempted"])
def test_a_leader_that_does_not_get_there_leaves_its_followers_to_the_next(how: str, tmp_path: Path) -> None:
    common = random_ids(30 * PAGE, 1)
    prompts = [common + random_ids(5, 10 + i) for i in range(4)]
    with running_engine(tmp_path, serving__max_batch_tokens=32) as (engine, client):
        serving = engine.built.sequences
        ends = {
            "cancelled": lambda sequence: serving.cancel("r0", "cancelled", time.monotonic()),
            "failed": lambda sequence: serving.fail([sequence.task.task_id], "made to fail", time.monotonic()),
            "preempted": lambda sequence: serving.preempt(sequence.task.task_id, time.monotonic()),
        }

        held: list[int] = []

        def end_now(sequence: Any) -> None:
            ends[how](sequence)
            held.append(held_back(engine))

        def end(sequence: Any) -> None:
            # After the iteration, as the engine itself would.
            engine.built.commands._commands.appendleft(lambda: end_now(sequence))

        at_a_chunk(engine, "r0", 8 * PAGE, end)
        with held_still(engine):
            for i, prompt in enumerate(prompts):
                engine.submit(request(f"r{i}", prompt, tokens=4))
        client.wait(lambda: len(client.finished) == len(prompts))
        status = engine.status()
        assert held == [2], "the next leader goes on at once, the others wait for it"
        assert held_back(engine) == 0
    assert client.finished["r0"].reason == {"cancelled": "cancelled", "failed": "error", "preempted": "length"}[how]
    # At most twice: the next leader may have begun beside one that starts again.
    assert status["totals"]["prompt_tokens"] < 2 * len(common) + 4 * 20
    model = tiny_model()
    for i, prompt in enumerate(prompts[1:], 1):
        assert client.ids(f"r{i}") == generated(model, prompt, 4)[0]


def test_an_engine_that_stops_ends_those_who_wait(tmp_path: Path) -> None:
    common = random_ids(50 * PAGE, 1)
    with running_engine(tmp_path, serving__max_batch_tokens=16) as (engine, client):
        with held_still(engine):
            for i in range(4):
                engine.submit(request(f"r{i}", common + random_ids(5, i), tokens=4))
        engine.stop(0.0)
        assert {event.reason for event in client.finished.values()} == {"cancelled"}
        assert len(client.finished) == 4


def learn(engine: BuiltEngine, client: Client, adapter: str, seed: int) -> None:
    version = engine.adapters().get(adapter, 0)
    engine.submit_pairs(random_pairs(4, adapter, seed, first_id=100 * seed))
    client.wait(lambda: engine.adapters().get(adapter, 0) > version)
    wait_idle(engine)


@pytest.mark.parametrize("on_update", ["hot", "pin"])
def test_a_version_that_comes_meanwhile_frees_the_followers_from_the_old_one(on_update: str, tmp_path: Path) -> None:
    settings = {"guard__held_out_share": 0.0, "align__learning_rate": 0.05, "serving__on_update": on_update}
    common = random_ids(30 * PAGE, 1)
    with running_engine(tmp_path, serving__max_batch_tokens=32, **settings) as (engine, client):
        learn(engine, client, "ann", 1)
        client.wait(lambda: bool(client.of(VersionSaved)))
        learn(engine, client, "ann", 2)

        def publish(sequence: Any) -> None:
            # The first version once more, while the leader is in the middle of its prompt.
            versions = engine.built.trainer.versions
            engine.built.commands._commands.appendleft(
                lambda: versions.replace(versions.read("ann", 1), "rollback to 1")
            )

        at_a_chunk(engine, "r0", 8 * PAGE, publish)
        with held_still(engine):
            for i in range(4):
                engine.submit(request(f"r{i}", common + random_ids(5, 10 + i), tokens=6, adapter="ann"))
            engine.submit(request("base", common + random_ids(5, 20), tokens=6))
        client.wait(lambda: len(client.finished) == 5)
        assert [client.finished[f"r{i}"].version for i in (1, 2, 3)] == [3, 3, 3]
        assert client.finished["base"].cached_tokens == 0, "nothing is shared with an adapter"
        assert client.finished["r1"].cached_tokens == 0, "what the leader computed was the old version's"
        assert [client.finished[f"r{i}"].cached_tokens for i in (2, 3)] == [len(common), len(common)]
        engine.submit(request("alone", common + random_ids(5, 12), tokens=6, adapter="ann"))
        client.wait(lambda: "alone" in client.finished)
        assert client.ids("alone") == client.ids("r2")


def test_the_first_version_parts_an_adapter_from_the_base_that_it_shared_with(tmp_path: Path) -> None:
    settings = {"guard__held_out_share": 0.0, "align__learning_rate": 0.05}
    common = random_ids(30 * PAGE, 1)
    with running_engine(tmp_path, serving__max_batch_tokens=16, **settings) as (engine, client):
        with held_still(engine):
            engine.submit(request("ann", common + random_ids(5, 2), tokens=4, adapter="ann"))
            engine.submit(request("base", common + random_ids(5, 3), tokens=4))
            engine.submit(request("next", common + random_ids(5, 4), tokens=4, adapter="ann"))
            engine.submit_pairs(random_pairs(4, "ann", 1))
        client.wait(lambda: len(client.finished) == 3)
        assert {event.reason for event in client.finished.values()} == {"length"}
    assert client.ids("base") == generated(tiny_model(), common + random_ids(5, 3), 4)[0]


def test_a_forgotten_adapter_keeps_nobody_waiting(tmp_path: Path) -> None:
    settings = {"guard__held_out_share": 0.0, "align__learning_rate": 0.05}
    common = random_ids(30 * PAGE, 1)
    with running_engine(tmp_path, serving__max_batch_tokens=32, **settings) as (engine, client):
        learn(engine, client, "ann", 1)
        with held_still(engine):
            for i in range(3):
                engine.submit(request(f"r{i}", common + random_ids(5, i), tokens=4, adapter="ann"))
            forgotten = engine.forget("ann")
        forgotten.result(10)
        client.wait(lambda: len(client.finished) == 3)
        assert {event.reason for event in client.finished.values()} == {"length"}


def test_without_prefix_sharing_nobody_waits(tmp_path: Path) -> None:
    common = random_ids(10 * PAGE, 1)
    with running_engine(tmp_path, cache__share_across="none") as (engine, client):
        with held_still(engine):
            for i in range(3):
                engine.submit(request(f"r{i}", common + random_ids(5, i), tokens=4))
        client.wait(lambda: len(client.finished) == 3)
        assert engine.status()["totals"]["followers"] == 0
        assert engine.status()["totals"]["prompt_tokens"] == 3 * (len(common) + 5)


def test_plans_made_ahead_stay_right_when_followers_come_in(tmp_path: Path) -> None:
    common = random_ids(20 * PAGE, 1)
    prompts = [common[: (3 + 2 * i) * PAGE] + random_ids(20, 10 + i) for i in range(8)]
    model = tiny_model()
    with running_engine(tmp_path, serving__max_batch_tokens=24) as (engine, client):
        engine.loop.plans_ahead = True
        with held_still(engine):
            for i, prompt in enumerate(prompts):
                engine.submit(request(f"r{i}", prompt, tokens=20))
        client.wait(lambda: len(client.finished) == len(prompts))
        assert engine.status()["totals"]["plans_foreseen"] > 10
    for i, prompt in enumerate(prompts):
        assert client.ids(f"r{i}") == generated(model, prompt, 20)[0]
