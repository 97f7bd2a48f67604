"""The engine keeps to its limits between iterations, and nobody's answer changes by that."""

from __future__ import annotations

import mmap
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from edged.align.feedback.pair import PairRetired
from edged.cache import pruning_budget
from edged.engine.kv.store import KvStore
from edged.governors.limits import EngineLimits
from tests.engine.harness import BuiltEngine, Client, random_ids, random_pairs, request, running_engine

CPU = torch.device("cpu")
BIG = {"cache__memory_mb": 64, "cache__page_size": 16, "serving__max_sequences": 8}


def answer(engine: BuiltEngine, client: Client, *requests: Any) -> list[list[int]]:
    for one in requests:
        engine.submit(one)
    names = [one.request_id for one in requests]
    client.wait(lambda: all(name in client.finished for name in names))
    assert all(client.finished[name].reason == "length" for name in names)
    return [client.ids(name) for name in names]


def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def pages(engine: BuiltEngine) -> dict[str, int]:
    return engine.status()["pages"]


def test_cached_pages_are_given_up_down_to_the_limit_and_come_back(tmp_path: Path) -> None:
    with running_engine(tmp_path, **BIG) as (engine, client):
        prompts = [random_ids(200, seed) for seed in range(6)]
        first = answer(engine, client, *(request(f"a{n}", ids) for n, ids in enumerate(prompts)))
        total, cached = pages(engine)["total"], pages(engine)["cached"]
        assert cached >= 6 * 12
        engine.limit(EngineLimits(pages=40))
        until(lambda: pages(engine)["retired"] == total - 40, "pages were not given up")
        assert pages(engine)["cached"] == 40
        assert engine.limits.use().resident_pages <= 41
        # Answers do not depend on it, whether their prefixes are still there or not, and wait for each other's pages.
        assert answer(engine, client, *(request(f"b{n}", ids) for n, ids in enumerate(prompts))) == first
        engine.limit(EngineLimits())
        until(lambda: pages(engine)["retired"] == 0, "pages did not come back")
        assert answer(engine, client, *(request(f"c{n}", ids) for n, ids in enumerate(prompts))) == first


def test_running_answers_move_and_go_on(tmp_path: Path) -> None:
    with running_engine(tmp_path, **BIG) as (engine, client):
        prompts = [random_ids(60, seed) for seed in range(8)]
        alone = answer(engine, client, *(request(f"a{n}", ids, 200) for n, ids in enumerate(prompts)))
        # What is cached lies below what comes now.
        answer(engine, client, *(request(f"x{n}", random_ids(200, 100 + n)) for n in range(8)))
        for n, ids in enumerate(prompts):
            engine.submit(request(f"b{n}", [3, *ids[1:]], 200))
        engine.submit(request("b", prompts[0], 200))
        client.wait(lambda: len(client.tokens["b3"]) > 20)
        for limit in (130, 100, 300, 90, None):
            engine.limit(EngineLimits(pages=limit))
            mark = len(client.tokens["b"]) + len(client.tokens["b3"])
            client.wait(
                lambda mark=mark: (
                    len(client.tokens["b"]) + len(client.tokens["b3"]) > mark + 10 or len(client.finished) >= 25
                )
            )
        client.wait(lambda: len(client.finished) == 25)
        assert client.ids("b") == alone[0]


def test_pages_that_find_no_memory_to_be_moved_with_stay_and_are_moved_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_engine(tmp_path, **BIG) as (engine, client):
        (alone,) = answer(engine, client, request("a", random_ids(60, 1), 200))
        move, left = engine.built.runner.kv.move_pages, [3]

        def move_pages(moved: dict[int, int]) -> None:
            left[0] -= 1
            if left[0] >= 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")
            move(moved)

        monkeypatch.setattr(engine.built.runner.kv, "move_pages", move_pages)
        # What is cached lies below what comes now.
        answer(engine, client, *(request(f"x{n}", random_ids(200, 100 + n)) for n in range(8)))
        engine.submit(request("b", [3, *random_ids(60, 1)[1:]], 200))
        engine.submit(request("c", random_ids(60, 1), 200))
        client.wait(lambda: len(client.tokens["c"]) > 20)
        engine.limit(EngineLimits(pages=60))
        client.wait(lambda: {"b", "c"} <= client.finished.keys())
        until(lambda: pages(engine)["total"] - pages(engine)["retired"] <= 60, "pages were not given back")
        assert left[0] < 0
        assert client.ids("c") == alone


def test_a_request_larger_than_the_limit_is_answered_all_the_same(tmp_path: Path) -> None:
    with running_engine(tmp_path, **BIG) as (engine, client):
        prompt = random_ids(300, 1)
        (free,) = answer(engine, client, request("a", prompt, 60))
        engine.limit(EngineLimits(pages=0))
        until(lambda: pages(engine)["retired"] == pages(engine)["total"] - 1, "pages were not given up")
        assert answer(engine, client, request("b", prompt, 60)) == [free]
        until(lambda: pages(engine)["retired"] == pages(engine)["total"] - 1, "pages were not given up again")


def test_no_more_sequences_run_than_are_allowed(tmp_path: Path) -> None:
    with running_engine(tmp_path, **BIG) as (engine, client):
        engine.limit(EngineLimits(sequences=2))
        most = 0
        for n in range(8):
            engine.submit(request(f"r{n}", random_ids(20, n), 30))
        while len(client.finished) < 8:
            most = max(most, engine.limits.use().running)
            time.sleep(0.001)
        assert 1 <= most <= 2


def test_fine_tuning_pauses_lets_go_and_goes_on(tmp_path: Path) -> None:
    with running_engine(tmp_path, **BIG, store__save_every_s=0.05, guard__held_out_share=0.0) as (engine, client):
        engine.submit_pairs(random_pairs(4))
        until(lambda: engine.status()["finetune"]["pairs_trained"] == 4, "it does not learn")
        until(lambda: engine.status()["finetune"]["adapters_loaded"] == 1, "the adapter is in memory")
        engine.limit(EngineLimits(finetune_share=0.0, release=True))
        until(lambda: engine.status()["finetune"]["adapters_loaded"] == 0, "the adapter did not leave memory")
        engine.submit_pairs(random_pairs(8, first_id=10))
        answer(engine, client, request("r", random_ids(20, 1), 60, adapter="ann"))
        status = engine.status()["finetune"]
        assert (status["held"], status["pairs_queued"], status["pairs_trained"]) == (True, 8, 4)
        engine.limit(EngineLimits())
        until(lambda: len(client.of(PairRetired)) >= 12, "it does not learn again")
        trained = [record.pair_id for record in client.of(PairRetired)]
        assert sorted(trained) == sorted([*range(1, 5), *range(10, 18)])


def test_a_share_of_the_time_is_kept_where_nobody_is_served(tmp_path: Path) -> None:
    with running_engine(
        tmp_path,
        **BIG,
        align__epochs=10**6,
        align__loss_threshold=0.0,
        guard__held_out_share=0.0,
        scheduler__options__idle_quantum_ms=5.0,
    ) as (engine, _):
        engine.limit(EngineLimits(finetune_share=0.25))
        engine.submit_pairs(random_pairs(8))
        until(lambda: engine.status()["busy"]["finetune_s"] > 0.1, "nothing was learnt")
        started, before = time.monotonic(), engine.status()["busy"]["finetune_s"]
        until(lambda: engine.status()["busy"]["finetune_s"] - before > 0.5, "too little was learnt")
        # Never above the share, but for what one iteration takes at a time: a slow machine only lowers it.
        assert (engine.status()["busy"]["finetune_s"] - before) / (time.monotonic() - started) < 0.5


def test_pruning_is_forced_where_memory_is_plenty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning_budget, "PRUNED_TOKENS", 32)
    monkeypatch.setattr(pruning_budget, "RECENT_TOKENS", 32)
    with running_engine(tmp_path, **BIG) as (engine, client):
        answer(engine, client, request("a", random_ids(100, 1), 200))
        assert engine.status()["pruning"]["prunings"] == 0
        engine.limit(EngineLimits(prune=True))
        answer(engine, client, request("b", random_ids(100, 2), 200))
        assert engine.status()["pruning"]["prunings"] > 0
        engine.limit(EngineLimits())
        until(
            lambda: not engine.status()["pruning"]["pressed"] or not engine.limits.use().running, "pruning is still on"
        )


def test_given_back_pages_leave_memory_and_the_others_stay() -> None:
    kv = KvStore(512, 16, 4, 8, 64, torch.float32, CPU)
    kv.keys.normal_()
    kv.values.normal_()
    kept = kv.keys[:, : 100 * 8].clone()
    before = psutil.Process().memory_info().rss
    kv.give_back(100)
    returned = before - psutil.Process().memory_info().rss
    whole = 2 * kv.keys.nbytes * 412 // 512
    assert returned > 0.9 * whole - 16 * mmap.PAGESIZE
    assert torch.equal(kv.keys[:, : 100 * 8], kept)
    assert not kv.keys[:, 100 * 8 :].any()


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_smaller_than_the_systems_are_given_back_only_as_far_as_nobody_else_lies_there(page_size: int) -> None:
    kv = KvStore(37, page_size, 3, 2, 8, torch.bfloat16, CPU)
    kv.keys.fill_(1.0)
    kv.give_back(5)
    assert bool((kv.keys[:, : 5 * 2] == 1.0).all())


def test_moved_pages_hold_what_they_held() -> None:
    kv = KvStore(8, 4, 3, 2, 8, torch.float32, CPU)
    kv.keys.normal_()
    kv.values.normal_()
    wanted = [
        (kv.keys[:, 2 * page : 2 * page + 2].clone(), kv.values[:, 2 * page : 2 * page + 2].clone()) for page in (5, 7)
    ]
    kv.move_pages({5: 1, 7: 0})
    for page, (keys, values) in zip((1, 0), wanted, strict=True):
        assert np.array_equal(kv.keys[:, 2 * page : 2 * page + 2], keys)
        assert np.array_equal(kv.values[:, 2 * page : 2 * page + 2], values)
