"""Prefixes that were evicted come back from host memory or from disk, and no answer changes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from edged.engine.kv.offload import DiskOffload, HostOffload, KvOffload, pick_offload
from edged.engine.kv.store import KvStore, LayerHeads, PagedKv, store_of
from edged.settings.load import CacheSettings
from tests.engine.harness import BuiltEngine, random_ids, request, running_engine
from tests.engine.test_engine import generated, learned
from tests.models import tiny_model

CPU = torch.device("cpu")
KINDS = ["host", "disk"]
SMALL = {"cache__memory_mb": 1, "model__max_context_tokens": 240}
"""6 KiB a page of 8 tokens: 170 pages, of which a prompt here takes 20."""


def make_kv(dtype: torch.dtype = torch.float32) -> KvStore:
    kv = KvStore(6, 4, 3, 2, 8, dtype, CPU)
    kv.keys.normal_()
    kv.values.normal_()
    return kv


def make(kind: str, kv: PagedKv, folder: Path, capacity: int = 4) -> KvOffload:
    return HostOffload(kv, capacity) if kind == "host" else DiskOffload(kv, capacity, folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_page_comes_back_bit_for_bit_wherever_it_is_put(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    kv = make_kv(dtype)
    offload = make(kind, kv, tmp_path)
    keys, values = kv.keys.clone(), kv.values.clone()
    handles = [offload.save(page) for page in (1, 2, 4)]
    kv.keys.zero_()
    kv.values.zero_()
    for handle, page in zip(handles, (5, 0, 4), strict=True):
        assert handle is not None
        assert offload.load(handle, page)
    for source, target in ((1, 5), (2, 0), (4, 4)):
        for store, before in ((kv.keys, keys), (kv.values, values)):
            assert torch.equal(store[:, 2 * target : 2 * target + 2], before[:, 2 * source : 2 * source + 2])
    assert not kv.keys[:, 2:8].any(), "no other page was written"
    offload.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_of_layers_of_unlike_shapes_comes_back_in_all_of_them(kind: str, tmp_path: Path) -> None:
    kv = store_of([LayerHeads(4, 2, 8, 0), LayerHeads(4, 1, 24, 1), LayerHeads(4, 2, 8, 2)], 4, 4, torch.float32, CPU)
    parts = [(store.kv_heads, part.normal_()) for store in kv.stores for part in (store.keys, store.values)]
    before = [part.clone() for _, part in parts]
    offload = make(kind, kv, tmp_path)
    handle = offload.save(1)
    assert handle is not None
    for _, part in parts:
        part.zero_()
    assert offload.load(handle, 2)
    for (heads, part), was in zip(parts, before, strict=True):
        assert torch.equal(part[:, 2 * heads : 3 * heads], was[:, heads : 2 * heads])
        assert not part[:, : 2 * heads].any()
    offload.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_that_was_dropped_is_used_again(kind: str, tmp_path: Path) -> None:
    kv = make_kv()
    offload = make(kind, kv, tmp_path, capacity=1)
    first = offload.save(0)
    assert first is not None
    assert offload.full
    assert offload.save(1) is None
    offload.drop(first)
    second = offload.save(1)
    assert second is not None
    assert offload.save(2) is None
    assert offload.load(second, 5)
    assert torch.equal(kv.keys[:, 10:12], kv.keys[:, 2:4])
    offload.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_that_finds_no_memory_costs_no_place(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    kv = make_kv()
    offload = make(kind, kv, tmp_path)
    first = offload.save(0)
    assert first is not None
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", fails)
        for _ in range(20):
            assert offload.save(1) is None
            assert not offload.load(first, 5)
    offload.join()
    assert [offload.save(page) is not None for page in (1, 2, 3, 4)] == [True, True, True, False]
    assert offload.load(first, 5)
    assert torch.equal(kv.keys[:, 10:12], kv.keys[:, 0:2])
    offload.close()


def test_pages_are_read_into_buffers_in_turn_so_that_one_is_copied_while_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = make_kv()
    offload = DiskOffload(kv, 4, tmp_path)
    handles = [offload.save(page) for page in range(3)]
    read, used = os.preadv, list[int]()

    def noted(file: int, buffers: list[memoryview], offset: int) -> int:
        used.append(np.frombuffer(buffers[0], np.uint8).ctypes.data)
        return read(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    for handle in handles * 3:
        assert handle is not None
        assert offload.load(handle, 5)
    assert len(set(used[:8])) == 8
    assert used[8] == used[0]
    offload.close()


def test_the_file_has_no_name(tmp_path: Path) -> None:
    offload = make("disk", make_kv(), tmp_path / "new")
    offload.save(0)
    assert list((tmp_path / "new").iterdir()) == []
    offload.close()


def test_a_full_disk_ends_offloading_and_loses_only_the_copies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    offload = DiskOffload(make_kv(), 4, tmp_path)
    offload._file.close()
    offload._file = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115
    handle = offload.save(0)
    assert handle is not None
    assert not offload.load(handle, 1)
    assert "No space left on device" in caplog.text
    assert offload.save(2) is None
    offload.close()


def test_an_iteration_waits_for_a_disk_no_longer_than_it_may(tmp_path: Path) -> None:
    kv = make_kv()
    offload = DiskOffload(kv, 4, tmp_path, wait_s=1e-9)
    handle = offload.save(0)
    assert handle is not None
    assert not offload.load(handle, 1), "saving took this iteration's time"
    offload._written[handle].result()
    offload.join()
    assert offload.load(handle, 1), "the next one has its own"
    assert not offload.load(handle, 1)
    offload.close()


def test_where_pages_go_follows_the_settings_and_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kv = make_kv()
    assert pick_offload(kv, CacheSettings(), tmp_path) is None, "the CPU's memory is the box's own"
    assert pick_offload(kv, CacheSettings(offload="off"), tmp_path) is None
    host = pick_offload(kv, CacheSettings(offload="host", offload_mb=1), tmp_path)
    assert host is not None
    assert host.capacity == (1 << 20) // (2 * 3 * 2 * 4 * 8 * 4)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    less = pick_offload(kv, CacheSettings(offload="host", offload_mb=1), tmp_path)
    assert less is not None
    assert 0 < less.capacity < host.capacity, "others need memory, too"
    (tmp_path / "file").write_text("")
    assert pick_offload(kv, CacheSettings(offload="disk"), tmp_path / "file") is None
    assert "cache.offload disk is not possible" in caplog.text


def wait_for_the_disk(engine: BuiltEngine) -> None:
    """As long as it takes: an iteration's 20 ms may pass while something else runs."""
    offload = engine.built.runner.pages.offload
    if isinstance(offload, DiskOffload):
        offload._wait_s = offload._left_s = 30.0


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_same_after_a_round_trip_and_the_prefill_is_saved(kind: str, tmp_path: Path) -> None:
    first = random_ids(160, 1)
    with running_engine(tmp_path, cache__offload=kind, **SMALL) as (engine, client):
        wait_for_the_disk(engine)
        engine.submit(request("first", first, tokens=20))
        client.wait(lambda: "first" in client.finished)
        for i in range(12):
            engine.submit(request(f"other{i}", random_ids(160, 10 + i), tokens=4))
        client.wait(lambda: len(client.finished) == 13)
        before = engine.status()
        assert before["prefix"]["spill"]["pages"] > 20
        history = first + client.ids("first")
        engine.submit(request("again", history + random_ids(9, 2), tokens=20))
        client.wait(lambda: "again" in client.finished)
        after = engine.status()
    restored = after["prefix"]["restored_tokens"]
    assert restored >= 152
    assert client.finished["again"].cached_tokens >= restored
    computed = after["totals"]["prompt_tokens"] - before["totals"]["prompt_tokens"]
    assert computed == len(history) + 9 - client.finished["again"].cached_tokens
    assert client.ids("again") == generated(tiny_model(), history + random_ids(9, 2), 20)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_found_by_their_own_adapter_and_version_only(kind: str, tmp_path: Path) -> None:
    settings = {"guard__held_out_share": 0.0, "align__learning_rate": 0.05, "cache__offload": kind, **SMALL}
    prompt = random_ids(160, 1)
    with running_engine(tmp_path, **settings) as (engine, client):
        wait_for_the_disk(engine)

        def ask(name: str, adapter: str | None) -> int:
            engine.submit(request(name, prompt, tokens=8, adapter=adapter))
            client.wait(lambda: name in client.finished)
            return client.finished[name].cached_tokens

        def push_out(round_: int) -> None:
            for i in range(12):
                engine.submit(request(f"{round_}-{i}", random_ids(160, 100 * round_ + i), tokens=4))
            client.wait(lambda: all(f"{round_}-{i}" in client.finished for i in range(12)))

        learned(engine, client, "ann", 1, pairs=4)
        assert ask("ann", "ann") == 0
        push_out(1)
        assert ask("base", None) == 0
        push_out(2)
        restored = engine.status()["prefix"]["restored_tokens"]
        assert restored == 0
        assert ask("ann again", "ann") >= 152
        assert client.ids("ann again") == client.ids("ann")
        # Her latest talk is another one, which would be computed again under the new version.
        engine.submit(request("short", random_ids(12, 9), tokens=4, adapter="ann"))
        client.wait(lambda: "short" in client.finished)
        push_out(3)
        learned(engine, client, "ann", 2, pairs=4)
        assert ask("ann newer", "ann") == 0
        push_out(4)
        assert ask("base again", None) >= 152
        assert client.ids("base again") == client.ids("base") == generated(tiny_model(), prompt, 8)[0]


def test_preempted_sequences_get_back_what_they_computed(tmp_path: Path) -> None:
    prompts = [random_ids(40, seed) for seed in range(30)]
    settings = {"model__max_context_tokens": 120, "cache__memory_mb": 1, "cache__offload": "host"}
    with running_engine(tmp_path, **settings) as (engine, client):
        total = engine.status()["pages"]["total"]
        for i, prompt in enumerate(prompts):
            engine.submit(request(f"r{i}", prompt, tokens=60))
        client.wait(lambda: len(client.finished) == len(prompts))
        status = engine.status()
    assert status["totals"]["preemptions"] > 0
    assert status["prefix"]["restored_tokens"] > 0
    assert status["pages"]["free"] + status["pages"]["cached"] == total
    model = tiny_model()
    for i, prompt in enumerate(prompts):
        assert client.ids(f"r{i}") == generated(model, prompt, 60)[0]
