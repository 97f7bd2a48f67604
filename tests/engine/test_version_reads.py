"""While a version is read to take another's place, the engine serves and learns; and what can come meanwhile."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from edged.align.adapters.adapter import UnknownAdapter
from edged.align.feedback.outliers import OutlierHistory
from edged.align.feedback.pair import PairRetired, VersionPublished, VersionSaved
from edged.align.guard import AdapterHealth
from edged.align.jobs import JobPlan
from edged.align.versions import UnknownVersion
from edged.settings.load import AlignSettings
from tests.engine.harness import BuiltEngine, Client, random_ids, random_pairs, request, running_engine, wait_idle

SAVED: dict[str, Any] = {"store__save_every_s": 0.001, "store__keep_versions": 50, "guard__held_out_share": 0.0}
PROMPT = random_ids(30, 1)


class SlowDisk:
    """A disk from which versions are read once `gate` is open; `reading` is set when one is asked for."""

    def __init__(self, engine: BuiltEngine) -> None:
        self.reading, self.gate = threading.Event(), threading.Event()
        self._load = engine.adapter_files.load

    def load(self, adapter: str, version: int) -> Any:
        self.reading.set()
        assert self.gate.wait(60)
        return self._load(adapter, version)


@contextmanager
def slow_disk(engine: BuiltEngine) -> Iterator[SlowDisk]:
    disk = SlowDisk(engine)
    engine.adapter_files.load = disk.load  # type: ignore[method-assign]
    try:
        yield disk
    finally:
        disk.gate.set()


def learn(engine: BuiltEngine, client: Client, adapter: str = "ann", versions: int = 1) -> None:
    """The adapter learns so many versions more, each of which is on disk."""
    for _ in range(versions):
        version, first = engine.adapters().get(adapter, 0) + 1, 1 + 2 * len(client.of(PairRetired))
        engine.submit_pairs(random_pairs(2, adapter, seed=first, first_id=first))
        client.wait(lambda version=version: (adapter, version) in saved(client))
    wait_idle(engine)


def saved(client: Client) -> set[tuple[str, int]]:
    return {(record.adapter, record.version) for record in client.of(VersionSaved)}


def ask(engine: BuiltEngine, client: Client, name: str, adapter: str | None = None) -> tuple[int, list[int]]:
    """The version and the tokens of an answer."""
    engine.submit(request(name, PROMPT, adapter=adapter))
    client.wait(lambda: name in client.finished)
    assert not client.finished[name].error
    return client.finished[name].version, client.ids(name)


def withdraw(engine: BuiltEngine, adapter: str = "ann") -> None:
    """The guard finds that the current version is bad."""
    engine.built.commands.ask(lambda: engine.built.trainer.versions.withdraw(adapter, "guard: a test")).result(20)


def same_weights(engine: BuiltEngine, adapter: str, version: int) -> bool:
    expected = engine.adapter_files.load(adapter, version).weights
    found = engine.weights(adapter).result(20)[1]
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_others_are_answered_and_learn_while_a_version_is_read_for_a_rollback(tmp_path: Path) -> None:
    with running_engine(tmp_path, **SAVED) as (engine, client):
        learn(engine, client, versions=3)
        learn(engine, client, "bob")
        with slow_disk(engine) as disk:
            back = engine.rollback("ann", 1)
            assert disk.reading.wait(30)
            assert ask(engine, client, "base")[0] == 0
            assert ask(engine, client, "ann", "ann")[0] == 3, "until then the version before it serves"
            learn(engine, client, "bob")
            assert not back.done()
        assert back.result(30) == engine.adapters()["ann"] == 4
        assert engine.adapter_files.versions("ann")[-1] == 4
        assert same_weights(engine, "ann", 1)
        assert client.of(VersionPublished)[-1].restored == 1


def test_an_adapter_that_left_memory_is_rolled_back_without_being_read_on_the_engine_thread(tmp_path: Path) -> None:
    with running_engine(tmp_path, align__max_loaded_adapters=1, **SAVED) as (engine, client):
        learn(engine, client, versions=2)
        learn(engine, client, "bob")
        cache = engine.built.trainer.adapter_cache
        ask(engine, client, "bob", "bob")
        client.wait(lambda: not cache.resident("ann"))
        readers: set[str] = set()
        read = engine.adapter_files.read

        def noted(adapter: str, version: int) -> Any:
            readers.add(threading.current_thread().name)
            return read(adapter, version)

        engine.adapter_files.read = noted  # type: ignore[method-assign]
        assert engine.rollback("ann", 1).result(30) == 3
        assert "edged-engine" not in readers
        assert same_weights(engine, "ann", 1)


def test_a_withdrawn_version_answers_nobody_while_the_one_before_it_is_read_and_others_go_on(tmp_path: Path) -> None:
    with running_engine(tmp_path, serving__max_sequences=2, **SAVED) as (engine, client):
        learn(engine, client)
        good = ask(engine, client, "before", "ann")[1]
        learn(engine, client)
        for name in ("long", "longer"):
            engine.submit(request(name, PROMPT, 400))
        client.wait(lambda: len(client.tokens) == 3)
        engine.submit(request("queued", PROMPT, adapter="ann"))
        with slow_disk(engine) as disk:
            withdraw(engine)
            assert disk.reading.wait(30)
            engine.cancel("long")
            engine.submit(request("new", PROMPT, adapter="ann"))
            engine.submit_pairs(random_pairs(2, "ann", seed=9, first_id=900))
            ask(engine, client, "base")
            ask(engine, client, "base again")
            assert not {"queued", "new"} & client.tokens.keys()
            assert engine.adapters()["ann"] == 2, "nothing is trained on what was withdrawn"
        client.wait(lambda: {"queued", "new"} <= client.finished.keys())
        client.wait(lambda: engine.adapters()["ann"] == 4)
    assert client.of(VersionPublished)[2].restored == 1
    answered = {client.finished[name].version for name in ("queued", "new")}
    assert answered <= {3, 4}
    for name in ("queued", "new"):
        assert client.finished[name].version == 4 or client.ids(name) == good


@pytest.mark.parametrize("change", ["a job begins", "a job begins and ends", "a job ends"])
def test_a_withdrawn_version_answers_nobody_whatever_becomes_of_a_job_meanwhile(tmp_path: Path, change: str) -> None:
    with running_engine(tmp_path, **SAVED) as (engine, client):
        learn(engine, client, versions=2)
        job = JobPlan("job", "ann", AlignSettings(), 64, 16, 1, 0)

        def on_engine(work: Callable[[], Any]) -> None:
            engine.commands.ask(work).result(20)

        if change == "a job ends":
            on_engine(lambda: engine.trainer.start_job(job))
        with slow_disk(engine) as disk:
            withdraw(engine)
            assert disk.reading.wait(30)
            if change != "a job ends":
                on_engine(lambda: engine.trainer.start_job(job))
            if change != "a job begins":
                on_engine(lambda: engine.trainer.end_job("ann"))
            engine.submit(request("new", PROMPT, adapter="ann"))
            ask(engine, client, "base")
            ask(engine, client, "base again")
            assert "new" not in client.tokens
        client.wait(lambda: "new" in client.finished)
        if change == "a job begins":
            on_engine(lambda: engine.trainer.end_job("ann"))
        assert ask(engine, client, "after", "ann")[0] == client.finished["new"].version == 3


def test_a_rollback_of_an_adapter_that_is_forgotten_meanwhile_says_so_and_brings_nothing_back(tmp_path: Path) -> None:
    with running_engine(tmp_path, **SAVED) as (engine, client):
        learn(engine, client, versions=2)
        with slow_disk(engine) as disk:
            back = engine.rollback("ann", 1)
            assert disk.reading.wait(30)
            engine.forget("ann").result(30)
            with pytest.raises(UnknownAdapter):
                back.result(30)
            client.records.clear()
            engine.submit_pairs(random_pairs(2, first_id=100))
        client.wait(lambda: ("ann", 1) in saved(client))
        ask(engine, client, "after", "ann")
        assert engine.adapters() == {"ann": 1}
        assert [record.reason for record in client.of(VersionPublished)] == ["trained"]


def test_forgetting_an_adapter_whose_version_was_withdrawn_leaves_nothing_waiting(tmp_path: Path) -> None:
    with running_engine(tmp_path, **SAVED) as (engine, client):
        learn(engine, client, versions=2)
        with slow_disk(engine) as disk:
            withdraw(engine)
            assert disk.reading.wait(30)
            engine.submit(request("waits", PROMPT, adapter="ann"))
            engine.forget("ann").result(30)
        client.wait(lambda: "waits" in client.finished)
        assert client.finished["waits"].version == 0
        assert ask(engine, client, "after", "ann")[0] == 0
        assert "ann" not in engine.adapters()


def test_a_version_that_is_learnt_meanwhile_is_taken_back_with_those_before_it(tmp_path: Path) -> None:
    with running_engine(tmp_path, **SAVED) as (engine, client):
        learn(engine, client, versions=2)
        with slow_disk(engine) as disk:
            back = engine.rollback("ann", 1)
            assert disk.reading.wait(30)
            learn(engine, client)
        assert back.result(30) == 4
        published = client.of(VersionPublished)[-1]
        assert (published.parent, published.restored) == (3, 1)
        assert same_weights(engine, "ann", 1)


def test_what_an_operator_rolls_back_to_stays_when_the_guard_has_read_another(tmp_path: Path) -> None:
    with running_engine(tmp_path, **SAVED) as (engine, client):
        learn(engine, client, versions=3)
        with slow_disk(engine) as disk:
            withdraw(engine)
            assert disk.reading.wait(30)
            # Already on its way before the guard's: as if the loader had read it first.
            versions = engine.built.trainer.versions
            engine.built.commands.ask(
                lambda: versions.replace(engine.built.trainer.adapter_cache.build("ann"), "rollback to 0", 0)
            ).result(20)
            assert ask(engine, client, "at once", "ann")[0] == 4
        assert ask(engine, client, "after", "ann")[0] == 4
        assert [record.reason for record in client.of(VersionPublished)][3:] == ["rollback to 0"]


@pytest.mark.parametrize("who", ["operator", "guard"])
def test_a_stop_waits_for_what_takes_a_versions_place(tmp_path: Path, who: str) -> None:
    with running_engine(tmp_path, **SAVED) as (engine, client):
        learn(engine, client, versions=2)
        with slow_disk(engine) as disk:
            back = engine.rollback("ann", 1) if who == "operator" else withdraw(engine)
            assert disk.reading.wait(30)
            stopping = threading.Thread(target=engine.stop, args=(5.0,))
            stopping.start()
            client.wait(lambda: engine.commands.stopping)
            disk.gate.set()
            stopping.join(60)
        assert back is None or back.result(0) == 3
        assert engine.adapter_files.versions("ann")[-1] == 3
        assert client.of(VersionPublished)[-1].restored == 1


@pytest.mark.parametrize("when", ["before", "while it is read"])
def test_a_rollback_to_a_damaged_version_is_refused_and_the_current_one_serves_on(tmp_path: Path, when: str) -> None:
    with running_engine(tmp_path, **SAVED) as (engine, client):
        learn(engine, client, versions=2)
        file = engine.adapter_files.path("ann", 1) / "adapter_model.safetensors"
        check = engine.adapter_files.check

        def spoil(*which: Any) -> Path:
            folder = check(*which)
            file.write_bytes(file.read_bytes()[:100])
            return folder

        if when == "before":
            file.write_bytes(b"no tensors")
        else:
            engine.adapter_files.check = spoil  # type: ignore[method-assign]
        with pytest.raises(UnknownVersion, match='adapter "ann" has no version 1 that can be read'):
            engine.rollback("ann", 1).result(30)
        assert ask(engine, client, "after", "ann")[0] == engine.adapters()["ann"] == 2


def test_a_withdrawn_version_goes_on_where_nothing_can_be_read_and_is_tested_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_engine(tmp_path, **SAVED) as (engine, client):
        learn(engine, client, versions=2)
        cache = engine.built.trainer.adapter_cache
        build = cache.build

        def full(*_: Any) -> Any:
            raise MemoryError("no room")

        cache.build = full  # type: ignore[method-assign]
        withdraw(engine)
        assert ask(engine, client, "after", "ann")[0] == 2
        cache.build = build  # type: ignore[method-assign]
        assert engine.built.trainer.pair_queues["ann"].guard.health is AdapterHealth.SUSPECT
        withdraw(engine)
        client.wait(lambda: engine.adapters()["ann"] == 3)
    assert "version 2 of ann stays" in caplog.text


def test_gradients_of_another_form_are_not_compared_with_those_before(tmp_path: Path) -> None:
    with running_engine(tmp_path, feedback__quarantine=True, **SAVED) as (engine, client):
        learn(engine, client)
        trainer = engine.built.trainer
        detector, weights = trainer.pair_queues["ann"].detector, engine.weights("ann").result(20)[1]

        def published(imported: bool) -> float:
            detector.restore(OutlierHistory(norms=[1.0] * 40), 0.0)
            assert detector.max_norm() < math.inf
            form = replace(trainer.adapter_cache.get("ann").form, imported=imported)
            trainer.versions.replace(trainer.adapter_cache.build("ann", weights, form=form), "imported")
            return detector.max_norm()

        same, other = (engine.commands.ask(partial(published, imported)).result(20) for imported in (False, True))
        assert same < other == math.inf
