"""What becomes of pairs and versions when learning does not go smoothly."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from edged.align.adapters.adapter import UnknownAdapter
from edged.align.feedback.pair import (
    PairRetired,
    PairScored,
    Record,
    StepSkipped,
    TokenPair,
    VersionPublished,
    VersionSaved,
    VersionTested,
)
from edged.engine.model_runner import RunnerOutput
from edged.scheduler.task import Plan
from edged.store import StoreError
from tests.align.test_guard import SETTINGS, score
from tests.engine.harness import BuiltEngine, Client, random_ids, random_pairs, request, running_engine, wait_idle


def test_a_pair_is_trained_on_for_its_epochs_and_scored_once(tmp_path: Path) -> None:
    settings = {"align__epochs": 3, "guard__held_out_share": 0.0, "align__loss_threshold": 0.0}
    with running_engine(tmp_path, **settings) as (engine, client):
        engine.submit_pairs(random_pairs(2))
        client.wait(lambda: len(client.of(PairRetired)) == 6)
    retired = client.of(PairRetired)
    assert [r.state for r in retired] == ["queued"] * 4 + ["trained"] * 2
    assert [r.epochs_done for r in retired] == [1, 1, 2, 2, 3, 3]
    assert len(client.of(PairScored)) == 2


def test_a_pair_whose_loss_is_under_the_threshold_ends_without_a_step(tmp_path: Path) -> None:
    with running_engine(tmp_path, align__loss_threshold=0.7, guard__held_out_share=0.0) as (engine, client):
        engine.submit_pairs(random_pairs(3))
        client.wait(lambda: len(client.of(PairRetired)) == 3)
        assert engine.adapters() == {"ann": 0}
    assert {r.state for r in client.of(PairRetired)} == {"learnt"}
    assert "under align.loss_threshold" in client.of(PairRetired)[0].reason


def test_a_diverged_adapter_is_taken_back_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edged.align.adapters.adapter.MAX_GRAD_NORM", 1e30)
    settings = {"align__learning_rate": 1e30, "guard__held_out_share": 0.0}
    prompt = random_ids(20, 1)
    with running_engine(tmp_path, **settings) as (engine, client):
        engine.submit(request("before", prompt, adapter="ann"))
        client.wait(lambda: "before" in client.finished)
        engine.submit(request("during", prompt, 400, adapter="ann"))
        engine.submit_pairs(random_pairs(8))
        client.wait(lambda: len(client.of(PairRetired)) == 8)
        wait_idle(engine)
        engine.submit(request("after", prompt, adapter="ann"))
        client.wait(lambda: "after" in client.finished)
    skipped = client.of(StepSkipped)
    assert skipped
    assert "loss is" in skipped[0].reason
    assert client.of(VersionPublished)[-1].reason.startswith("guard: loss is")
    assert client.ids("after") == client.ids("before"), "the untrained adapter answers again"
    assert client.finished["during"].reason == "error"
    assert "numbers that are not finite" in client.finished["during"].error


@pytest.mark.parametrize("loss", ["orpo", "dft"])
@pytest.mark.usefixtures("each_version_is_tested", "two_held_out_pairs_suffice")
def test_pairs_are_learned_scored_and_held_out_by_losses_of_other_texts_and_weights(loss: str, tmp_path: Path) -> None:
    settings = {"align__loss": loss, "guard__held_out_share": 0.5}
    bounds = {"guard__max_kl_nats": 100.0, "guard__max_nll_change": 100.0}
    with running_engine(tmp_path, **settings, **bounds) as (engine, client):
        engine.test_with([TokenPair(-1, "", (3, 4), (5, 6), (7, 8))])
        engine.submit_pairs(random_pairs(12))
        client.wait(lambda: len(client.of(PairRetired)) == 12 and client.of(VersionTested))
    assert {record.state for record in client.of(PairRetired)} == {"trained", "held_out"}
    scored = client.of(PairScored)
    assert {record.split for record in scored} == {"prequential", "held_out"}
    # Ids are about equally unlikely under random weights: 256 of them.
    assert all(record.loss > 4.0 for record in scored), "how much is left to learn"


@pytest.mark.usefixtures("two_held_out_pairs_suffice", "each_version_is_tested")
def test_a_version_that_strays_too_far_is_taken_back_and_later_steps_are_smaller(tmp_path: Path) -> None:
    settings = {
        "align__learning_rate": 0.05,
        "guard__held_out_share": 0.5,
        "guard__max_kl_nats": 0.001,
    }
    with running_engine(tmp_path, **settings) as (engine, client):
        engine.submit_pairs(random_pairs(8))
        client.wait(lambda: any(v.reason.startswith("guard: KL") for v in client.of(VersionPublished)))
        engine.submit_pairs(random_pairs(8, seed=5, first_id=100))
        client.wait(lambda: any(v.reason == "trained" and v.step_scale < 1 for v in client.of(VersionPublished)))
        client.wait(lambda: len(client.of(PairRetired)) == 16)
    versions = client.of(VersionPublished)
    taken_back = next(v for v in versions if v.reason.startswith("guard: KL"))
    assert taken_back.parent in {v.version for v in versions if v.reason == "trained"}
    assert taken_back.version > taken_back.parent
    assert taken_back.step_scale == 0.5
    assert {record.state for record in client.of(PairRetired)} <= {"trained", "held_out"}, "no pair is accused"


@pytest.mark.usefixtures("each_version_is_tested")
def test_a_good_version_that_fails_a_later_test_is_not_gone_back_to_for_ever(tmp_path: Path) -> None:
    """Held-out pairs and bounds change: the version that passed once may fail now, and everything built upon it."""
    settings = {
        "align__learning_rate": 0.05,
        "guard__held_out_share": 0.5,
        "guard__max_kl_nats": 1000.0,
        "guard__max_nll_change": 1000.0,
    }
    with running_engine(tmp_path, **settings) as (engine, client):
        engine.submit_pairs(random_pairs(8))
        client.wait(lambda: len(client.of(VersionTested)) >= 1)
        wait_idle(engine)
        strict = engine.settings.guard.model_copy(update={"max_kl_nats": 0.001})
        engine.configure(engine.settings.model_copy(update={"guard": strict})).result(20)
        engine.submit_pairs(random_pairs(4, seed=5, first_id=100))
        client.wait(lambda: any(version.restored == 0 for version in client.of(VersionPublished)), 20)
    taken_back = [version for version in client.of(VersionPublished) if version.reason.startswith("guard: KL")]
    assert len(taken_back) >= 2, "the one that had passed, too: nothing but the untrained one passes"


def test_pairs_wait_while_fine_tuning_is_paused_and_two_users_learn_apart(tmp_path: Path) -> None:
    with running_engine(tmp_path, guard__held_out_share=0.0) as (engine, client):
        engine.pause_finetuning(True)
        engine.submit_pairs(random_pairs(3, "ann") + random_pairs(3, "bob", seed=4, first_id=50))
        engine.submit(request("r", random_ids(9, 1)))
        client.wait(lambda: "r" in client.finished)
        assert engine.status()["finetune"]["pairs_queued"] == 6
        engine.pause_finetuning(False)
        client.wait(lambda: len(client.of(PairRetired)) == 6)
        wait_idle(engine)
        assert set(engine.adapters()) == {"ann", "bob"}
        assert min(engine.adapters().values()) >= 1


def test_pairs_that_were_read_before_another_node_learned_them_wait_for_nobody(tmp_path: Path) -> None:
    with running_engine(tmp_path, guard__held_out_share=0.0) as (engine, client):
        engine.submit_pairs(random_pairs(2))
        client.wait(lambda: len(client.of(PairRetired)) == 2)
        engine.follow("ann").result(10)
        engine.submit_pairs(random_pairs(3, seed=1, first_id=10) + random_pairs(2, "bob", seed=4, first_id=50))
        client.wait(lambda: len(client.of(PairRetired)) == 4)
        wait_idle(engine)
        # Who was forgotten begins anew, wherever the writer was.
        engine.forget("ann").result(10)
        engine.submit_pairs(random_pairs(2, seed=2, first_id=20))
        client.wait(lambda: len(client.of(PairRetired)) == 6)
        assert {each.pair_id for each in client.of(PairRetired)} == {1, 2, 50, 51, 20, 21}


def test_pairs_longer_than_the_batch_and_the_window_are_trained_in_chunks(tmp_path: Path) -> None:
    long = TokenPair(1, "ann", tuple(random_ids(90, 1)), (*random_ids(70, 2), 2), (*random_ids(60, 3), 2))
    settings = {"serving__max_batch_tokens": 16, "align__window_tokens": 20, "guard__held_out_share": 0.0}
    with running_engine(tmp_path, **settings) as (engine, client):
        engine.submit_pairs([long])
        client.wait(lambda: bool(client.of(PairRetired)))
        assert client.of(PairRetired)[0].state == "trained"
        wait_idle(engine)
        status = engine.status()["pages"]
        assert status["free"] + status["cached"] == status["total"]


def take_pages_of_steps(engine: BuiltEngine, times: int) -> list[int]:
    """Preempt the step under way in some iterations, as a scheduler short of pages would; returns whom it hit."""
    hit: list[int] = []
    rng = np.random.default_rng(0)
    plan_of = engine.built.scheduler.plan

    def plan(*arguments: Any) -> Plan:
        made = plan_of(*arguments)
        for task_id, open_step in engine.built.finetuning.by_task.items():
            task = open_step.task
            if task.held_pages and len(hit) < times and rng.random() < 0.5:
                hit.append(task_id)
                made.grants[:] = [grant for grant in made.grants if grant.task is not task]
                made.preempt.append(task)
        return made

    engine.built.scheduler.plan = plan  # type: ignore[method-assign]
    return hit


# The compiled kernels add up chunks of few tokens in another order than longer ones are, and AdamW makes much of that
# where a gradient is near zero: so with them only windows that are all short end the same.
@pytest.mark.parametrize(("window", "cpu_kernels"), [(7, True), (7, False), (400, False)])
def test_fine_tuning_that_loses_its_pages_starts_its_group_again_and_ends_the_same(
    tmp_path: Path, window: int, cpu_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = []
    monkeypatch.setenv("EDGED_KERNELS", f"cpu_kernels={cpu_kernels}")
    settings = {
        "align__window_tokens": window,
        "align__replay_share": 0.0,
        "guard__held_out_share": 0.0,
        "scheduler__options__idle_quantum_ms": 0.1,
        "align__recompute": "full",
    }
    for times in (0, 12):
        with running_engine(tmp_path, data=f"data-{times}", **settings) as (engine, client):
            hit = take_pages_of_steps(engine, times)
            engine.submit_pairs(random_pairs(4))
            client.wait(lambda: len(client.of(PairRetired)) == 4)
            wait_idle(engine)
            assert len(hit) == times
        assert sorted(record.pair_id for record in client.of(PairScored)) == [1, 2, 3, 4]
        weights.append(load_file(Path(client.of(VersionSaved)[-1].path) / "adapter_model.safetensors"))
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recompute", ["auto", "full"])
def test_with_requests_always_waiting_an_iteration_runs_one_piece_of_learning(tmp_path: Path, recompute: str) -> None:
    settings = {"guard__held_out_share": 0.0, "align__recompute": recompute, "align__window_tokens": 60}
    with running_engine(tmp_path, **settings) as (engine, client):
        run = engine.built.runner.run
        pieces: list[tuple[int, int]] = []

        def interrupted(*arguments: Any, **named: Any) -> RunnerOutput:
            named["interrupted"] = lambda: True
            work = run(*arguments, **named)
            pieces.append((len(work.finetuned), len(work.units)))
            return work

        engine.built.runner.run = interrupted  # type: ignore[method-assign]
        engine.submit_pairs(random_pairs(4, "ann") + random_pairs(4, "bob", seed=1, first_id=5))
        client.wait(lambda: len(client.of(PairRetired)) == 8)
    assert {record.state for record in client.of(PairRetired)} == {"trained"}
    assert sum(units for _, units in pieces) > 8
    assert any(forwards for forwards, _ in pieces) is (recompute == "full")
    assert all(units == 0 if forwards else units <= 1 for forwards, units in pieces), pieces


def test_a_forward_that_is_computed_beside_the_units_before_it_ends_in_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGED_KERNELS", "cpu_kernels=off")
    weights, ahead = [], {True: 0, False: 0}
    settings = {
        "scheduler__options__slo_ms": 10_000.0,
        "align__window_tokens": 16,
        "align__replay_share": 0.0,
        "align__recompute": "full",
        "guard__held_out_share": 0.0,
    }
    for fills in (True, False):
        settings["scheduler__policy"] = "flexllm" if fills else "flexllm-behind"
        with running_engine(tmp_path, data=f"data-{fills}", **settings) as (engine, client):
            run = engine.built.runner.run

            def watched(
                plan: Plan, sequences: Any, jobs: Any, run: Any = run, fills: bool = fills, **named: Any
            ) -> RunnerOutput:
                packed = [open_step.step.packing is not open_step.step.micro_batch for open_step in jobs.values()]
                named["interrupted"] = lambda: True
                work = run(plan, sequences, jobs, **named)
                ahead[fills] += any(packed) and bool(work.finetuned)
                return work

            engine.built.runner.run = watched  # type: ignore[method-assign]
            engine.submit(request("r", random_ids(20, 1), tokens=200))
            engine.submit_pairs(random_pairs(4))
            client.wait(lambda: len(client.of(PairRetired)) == 4 and "r" in client.finished)
            wait_idle(engine)
            status = engine.status()["pages"]
            assert status["free"] + status["cached"] == status["total"]
        assert sorted(record.pair_id for record in client.of(PairScored)) == [1, 2, 3, 4]
        weights.append(load_file(Path(client.of(VersionSaved)[-1].path) / "adapter_model.safetensors"))
    assert ahead[True] > 0 == ahead[False]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-4, atol=1e-5)


def test_a_pair_that_the_cache_cannot_hold_is_skipped_with_the_reason(tmp_path: Path) -> None:
    long = TokenPair(1, "ann", tuple(random_ids(200, 1)), (*random_ids(200, 2), 2), (*random_ids(100, 3), 2))
    with running_engine(tmp_path, cache__memory_mb=1) as (engine, client):
        engine.submit_pairs([long, replace(long, pair_id=2, rejected=()), *random_pairs(1, first_id=3)])
        client.wait(lambda: len(client.of(PairRetired)) == 3)
    skipped, rating, trained = client.of(PairRetired)
    assert (skipped.state, trained.state) == ("skipped", "trained")
    assert "502 tokens do not fit" in skipped.reason
    assert "401 tokens do not fit" in rating.reason, "it may be computed with another's answer"


def test_a_version_that_could_not_be_written_is_written_when_the_disk_has_room_again(tmp_path: Path) -> None:
    settings = {"guard__held_out_share": 0.0, "store__save_every_s": 0.05}
    with running_engine(tmp_path, **settings) as (engine, client):
        folder = next((tmp_path / "data").glob("adapters/*"))
        (folder / "ann").write_text("a file where the adapter's folder should be")
        engine.submit_pairs(random_pairs(4))
        client.wait(lambda: len(client.of(PairRetired)) == 4)
        wait_idle(engine)
        assert not client.of(VersionSaved)
        (folder / "ann").unlink()
        client.wait(lambda: bool(client.of(VersionSaved)))


def test_many_adapters_with_work_leave_slots_to_those_who_ask(tmp_path: Path) -> None:
    settings = {"guard__held_out_share": 0.0, "align__max_active_adapters": 2}
    with running_engine(tmp_path, **settings) as (engine, client):
        names = [f"user{i}" for i in range(8)]
        for i, name in enumerate(names):
            engine.submit_pairs(random_pairs(2, name, seed=i, first_id=1 + 10 * i))
        client.wait(lambda: len(client.of(PairRetired)) == 16)
        for i, name in enumerate(names):
            engine.submit_pairs(random_pairs(4, name, seed=50 + i, first_id=1000 + 10 * i))
            engine.submit(request(name, random_ids(20, i), 20, adapter=name))
        client.wait(lambda: len(client.finished) == 8)
        client.wait(lambda: len(client.of(PairRetired)) == 48)
        assert {event.reason for event in client.finished.values()} == {"length"}


def test_a_policy_that_does_not_train_leaves_the_pairs_to_the_store(tmp_path: Path) -> None:
    with running_engine(tmp_path, scheduler__policy="fcfs") as (engine, client):
        engine.submit_pairs(random_pairs(4))
        engine.submit(request("r", random_ids(9, 1), adapter="ann"))
        client.wait(lambda: "r" in client.finished)
        status = engine.status()
        assert status["queue"]["finetune"] == 0
        assert status["finetune"]["enabled"] is False
        assert status["finetune"]["reason"] == "the policy fcfs does not train"


def test_idle_adapters_leave_memory_and_come_back_as_they_were(tmp_path: Path) -> None:
    settings = {
        "guard__held_out_share": 0.0,
        "align__learning_rate": 0.05,
        "align__max_loaded_adapters": 2,
        "align__max_active_adapters": 2,
        "store__save_every_s": 0.01,
    }
    names = [f"user{i}" for i in range(6)]
    prompt = random_ids(20, 1)
    with running_engine(tmp_path, **settings) as (engine, client):
        for i, name in enumerate(names):
            engine.submit_pairs(random_pairs(4, name, seed=i, first_id=1 + 10 * i))
            client.wait(lambda i=i: len(client.of(PairRetired)) == 4 * (i + 1))
            engine.submit(request(f"{name} at once", prompt, 20, adapter=name))
            client.wait(lambda name=name: f"{name} at once" in client.finished)
        client.wait(lambda: len({record.adapter for record in client.of(VersionSaved)}) == 6)
        client.wait(lambda: engine.status()["finetune"]["adapters_loaded"] <= 2)
        for name in names:
            engine.submit(request(f"{name} later", prompt, 20, adapter=name))
        client.wait(lambda: len(client.finished) == 12)
        for name in names:
            assert client.finished[f"{name} later"].version == engine.adapters()[name] > 0
            assert client.ids(f"{name} later") == client.ids(f"{name} at once")
        assert len({tuple(client.ids(f"{name} later")) for name in names}) > 1, "users differ"
        engine.submit_pairs(random_pairs(4, "user0", seed=9, first_id=1000))
        client.wait(lambda: len(client.of(PairRetired)) == 28)
        wait_idle(engine)
        assert engine.adapters()["user0"] == 2


def test_an_adapter_that_cannot_be_read_is_not_ready_before_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_engine(tmp_path, guard__held_out_share=0.0) as (engine, client):
        trainer = engine.built.trainer
        load = trainer.adapter_cache.load

        def damaged(adapter: str) -> Any:
            if adapter == "ann":
                raise OSError("no such disk")
            return load(adapter)

        with monkeypatch.context() as patch:
            patch.setattr(trainer.adapter_cache, "load", damaged)
            engine.submit_pairs(random_pairs(2, "ann") + random_pairs(2, "bob", first_id=3))
            client.wait(lambda: len(client.of(PairRetired)) == 2)
            assert engine.built.commands.ask(lambda: list(trainer.pair_queues.ready())).result(10) == []
        engine.built.commands.ask(lambda: engine.built.finetuning._loader.fetch("ann")).result(10)
        client.wait(lambda: len(client.of(PairRetired)) == 4)
    assert [record.adapter for record in client.of(PairRetired)] == ["bob", "bob", "ann", "ann"]


def test_versions_are_written_one_at_a_time_and_all_of_them_at_the_end(tmp_path: Path) -> None:
    settings = {"guard__held_out_share": 0.0, "store__save_every_s": 0.01, "align__joint_adapters": 3}
    written: Future[None] = Future()
    names = ["ann", "bob", "cy"]
    with running_engine(tmp_path, **settings) as (engine, client):
        saver = engine.built.finetuning._writer
        journal, saver._journal = saver._journal, lambda records: (journal(records), written)[1]
        handed: list[str] = []
        submit = saver._thread.submit

        def noted(what: Callable[..., Any], *given: Any) -> Future[Any]:
            handed.append(given[0].adapter)
            return submit(what, *given)

        saver._thread.submit = noted  # type: ignore[method-assign, assignment]
        for i, name in enumerate(names):
            engine.submit_pairs(random_pairs(4, name, seed=i, first_id=1 + 10 * i))
        try:
            client.wait(lambda: len(client.of(PairRetired)) == 12)
            client.wait(lambda: bool(handed))
            wait_idle(engine)
            assert len(handed) == 1, "the others wait until the disk has the first"
        finally:
            written.set_result(None)
        client.wait(lambda: {record.adapter for record in client.of(VersionSaved)} == set(names))
        assert sorted(handed) == names
        saver._store = engine.settings.store.model_copy(update={"save_every_s": 3600.0})
        for i, name in enumerate(names):
            engine.submit_pairs(random_pairs(4, name, seed=9 + i, first_id=101 + 10 * i))
        client.wait(lambda: len(client.of(PairRetired)) == 24)
    for name in names:
        assert engine.adapter_files.versions(name)[-1] == engine.adapters()[name]


RARELY_SAVED = {"guard__held_out_share": 0.0, "store__save_every_s": 3600.0}


def learn_twice(engine: BuiltEngine, client: Client) -> None:
    """Two steps of two pairs, one after the other."""
    for turn in range(2):
        engine.submit_pairs(random_pairs(2, seed=turn, first_id=1 + 10 * turn))
        client.wait(lambda turn=turn: len(client.of(PairRetired)) == 2 * (turn + 1))
    wait_idle(engine)


def test_a_rollback_is_answered_when_it_is_on_disk(tmp_path: Path) -> None:
    with running_engine(tmp_path, **RARELY_SAVED) as (engine, client):
        learn_twice(engine, client)
        client.wait(lambda: bool(client.of(VersionSaved)))
        newest = engine.adapters()["ann"]
        assert engine.adapter_files.versions("ann")[-1] < newest, "not every version is written"
        back = engine.rollback("ann", engine.adapter_files.versions("ann")[-1]).result(20)
        assert back > newest
        assert engine.adapter_files.versions("ann")[-1] == back
        untrained = engine.rollback("ann", 0).result(20)
        assert engine.adapter_files.versions("ann")[-1] == untrained
        assert engine.rollback("ann", untrained).result(20) == untrained


def test_an_import_is_answered_after_its_row_is_written(tmp_path: Path) -> None:
    row: Future[None] = Future()
    with running_engine(tmp_path, **RARELY_SAVED) as (engine, client):
        learn_twice(engine, client)
        client.wait(lambda: bool(client.of(VersionSaved)))
        weights = engine.weights("ann").result(20)[1]
        saver = engine.built.finetuning._writer
        journal = saver._journal

        def slow(records: list[Record]) -> Future[None] | None:
            journal(records)
            return row if any(isinstance(record, VersionSaved) for record in records) else None

        saver._journal = slow
        answered = engine.import_adapter("ann", weights, "imported")
        try:
            client.wait(lambda: any(saved.version == engine.adapters()["ann"] for saved in client.of(VersionSaved)))
            with pytest.raises(TimeoutError):
                answered.result(0.3)
        finally:
            row.set_result(None)
        assert answered.result(20) == engine.adapters()["ann"]


@pytest.mark.slow
def test_a_rollback_that_cannot_be_written_is_served_and_said_to_be_in_danger(tmp_path: Path) -> None:
    with running_engine(tmp_path, guard__held_out_share=0.0) as (engine, client):
        engine.submit_pairs(random_pairs(2))
        client.wait(lambda: bool(client.of(VersionSaved)))
        folder = engine.adapter_files.root / "ann"
        folder.rename(folder.with_name("elsewhere"))
        folder.write_text("a file where the adapter's folder should be")
        with pytest.raises(StoreError, match="version 2 of ann is served, but could not be written"):
            engine.rollback("ann", 0).result(20)
        assert engine.adapters()["ann"] == 2
        folder.unlink()
        client.wait(lambda: client.of(VersionSaved)[-1].version == 2)


def test_a_stop_answers_a_rollback_that_was_not_on_disk_yet(tmp_path: Path) -> None:
    with running_engine(tmp_path, guard__held_out_share=0.0) as (engine, client):
        engine.submit_pairs(random_pairs(2))
        client.wait(lambda: bool(client.of(VersionSaved)))
        back = engine.rollback("ann", 0)
        engine.stop(5.0)
        assert engine.adapter_files.versions("ann")[-1] == back.result(20)


@pytest.mark.parametrize("kept", [True, False])
def test_a_version_that_is_taken_back_goes_to_the_last_good_one_or_what_is_left_on_disk(
    tmp_path: Path, kept: bool
) -> None:
    """The good version is in memory, with the optimizer's moments, or left it with its adapter."""
    settings = {"guard__held_out_share": 0.0, "store__save_every_s": 0.001, "store__keep_versions": 2}
    with running_engine(tmp_path, **settings) as (engine, client):
        versions, adapter_cache = engine.built.trainer.versions, engine.built.trainer.adapter_cache
        for turn in range(4):
            engine.submit_pairs(random_pairs(2, seed=turn, first_id=1 + 10 * turn))
            client.wait(lambda turn=turn: len(client.of(VersionSaved)) == turn + 1)
            if turn == 0:
                good = engine.built.commands.ask(lambda: adapter_cache.get("ann").copied()).result(20)
        wait_idle(engine)
        assert engine.adapter_files.versions("ann") == [3, 4]
        queue = engine.built.trainer.pair_queues["ann"]
        guard = queue.guard
        guard.best, guard.last_good, guard.third_party_since_best = score(1, 9, 10), good if kept else None, 1
        wanted = good.snapshot() if kept else engine.adapter_files.load("ann", 3)
        engine.built.commands.ask(lambda: versions.judge(queue, score(4, 1, 10), SETTINGS)).result(20)
        client.wait(lambda: client.of(VersionPublished)[-1].reason.startswith("guard"))
        restored = engine.built.commands.ask(lambda: adapter_cache.get("ann").copied()).result(20).snapshot()
        for found, expected in ((restored.weights, wanted.weights), (restored.optimizer, wanted.optimizer)):
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)
        assert client.of(VersionPublished)[-1].restored == (1 if kept else 3)
        assert "reward accuracy fell" in client.of(VersionPublished)[-1].reason


def test_a_rollback_that_is_overtaken_by_a_forgetting_says_so(tmp_path: Path) -> None:
    with running_engine(tmp_path, guard__held_out_share=0.0) as (engine, client):
        engine.submit_pairs(random_pairs(2))
        client.wait(lambda: bool(client.of(VersionSaved)))
        # In one turn of the inbox: nothing is written between them.
        both: Future[list[Future[Any]]] = Future()
        engine.built.commands.post(lambda: both.set_result([engine.rollback("ann", 0), engine.forget("ann")]))
        back, forgotten = both.result(60)
        forgotten.result(20)
        with pytest.raises(UnknownAdapter):
            back.result(20)


def test_a_rollback_to_what_is_served_waits_for_no_ordinary_save(tmp_path: Path) -> None:
    with running_engine(tmp_path, **RARELY_SAVED) as (engine, client):
        learn_twice(engine, client)
        served = engine.adapters()["ann"]
        assert engine.rollback("ann", served).result(20) == served
        assert engine.adapter_files.versions("ann")[-1] == served


def test_nobody_is_told_of_a_rollback_that_he_stopped_waiting_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_engine(tmp_path, guard__held_out_share=0.0) as (engine, client):
        engine.submit_pairs(random_pairs(2))
        client.wait(lambda: bool(client.of(VersionSaved)))
        assert engine.rollback("ann", 0).cancel()
        client.wait(lambda: client.of(VersionSaved)[-1].version == 2)
        engine.rollback("ann", 0).result(20)
    assert "InvalidStateError" not in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def rated(pairs: list[TokenPair]) -> list[TokenPair]:
    """Of each pair's answers one, good and bad in turns."""
    return [replace(pair, **({"rejected": ()} if pair.pair_id % 2 else {"chosen": ()})) for pair in pairs]


@pytest.mark.parametrize("unpaired", ["apo", "kto"])
@pytest.mark.parametrize("loss", ["sigmoid", "orpo"])
@pytest.mark.usefixtures("two_held_out_pairs_suffice")
def test_single_ratings_make_versions_and_their_held_out_ones_guard_them(
    unpaired: str, loss: str, tmp_path: Path
) -> None:
    settings = {"align__unpaired": unpaired, "align__loss": loss, "align__learning_rate": 0.05}
    guard = {"guard__held_out_share": 0.3, "guard__max_kl_nats": 0.001}
    with running_engine(tmp_path, **settings, **guard) as (engine, client):
        engine.submit_pairs(rated(random_pairs(12)))
        client.wait(lambda: any(v.reason.startswith("guard: KL") for v in client.of(VersionPublished)))
        client.wait(lambda: len(client.of(PairRetired)) == 12)
    assert {record.state for record in client.of(PairRetired)} == {"trained", "held_out"}
    assert not client.of(PairScored), "an answer alone has no margin over another"


def test_a_rating_that_is_withdrawn_is_trained_on_no_more(tmp_path: Path) -> None:
    settings = {"align__unpaired": "apo", "guard__held_out_share": 0.0, "align__epochs": 1000}
    with running_engine(tmp_path, **settings, align__loss_threshold=0.0) as (engine, client):
        engine.submit_pairs(rated(random_pairs(2)))
        client.wait(lambda: len(client.of(PairRetired)) >= 4)
        engine.withdraw([1])
        client.wait(lambda: engine.status()["finetune"]["pairs_queued"] == 1)
        seen = len(client.of(PairRetired))
        client.wait(lambda: len(client.of(PairRetired)) >= seen + 4)
        engine.withdraw([2])
        wait_idle(engine)
    assert {record.pair_id for record in client.of(PairRetired)[seen + 1 :]} == {2}


def test_pairs_wait_for_a_full_step_or_for_someone_who_asks(tmp_path: Path) -> None:
    settings = {"align__accumulate_s": 1000.0, "align__micro_batch_pairs": 3, "align__replay_share": 0.0}
    with running_engine(tmp_path, **settings, guard__held_out_share=0.0) as (engine, client):
        pairs = random_pairs(5)
        for number, pair in enumerate(pairs[:3], 1):
            engine.submit_pairs([pair])
            client.wait(lambda number=number: engine.status()["finetune"]["pairs_queued"] % 3 == number % 3)
        client.wait(lambda: len(client.of(VersionPublished)) == 1)
        engine.submit_pairs([pairs[3]])
        engine.submit(request("other", random_ids(20, 1), adapter="ben"))
        client.wait(lambda: "other" in client.finished and engine.status()["finetune"]["pairs_queued"] == 1)
        engine.submit(request("asks", random_ids(20, 1), adapter="ann"))
        client.wait(lambda: len(client.of(VersionPublished)) == 2)
        soon = engine.settings.align.model_copy(update={"accumulate_s": 0.05})
        engine.configure(engine.settings.model_copy(update={"align": soon})).result(20)
        engine.submit_pairs([pairs[4]])
        client.wait(lambda: len(client.of(VersionPublished)) == 3)
    assert [version.pairs for version in client.of(VersionPublished)] == [3, 1, 1]
