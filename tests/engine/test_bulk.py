"""A job's steps have what people's own pairs leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edged.align.adapters.adapter import AdapterError
from edged.align.feedback.outliers import OutlierHistory
from edged.align.feedback.pair import JobStepped, PairRetired, TokenPair, VersionPublished, VersionSaved, VersionTested
from edged.align.jobs import JobPlan, job_settings
from edged.scheduler.task import Kind
from edged.settings.load import AlignSettings
from tests.engine.harness import BuiltEngine, Client, random_ids, random_pairs, request, running_engine
from tests.faults.test_memory import MARK
from tests.faults.test_not_finite import not_a_number

HYPERPARAMETERS = {"learning_rate": 1e-3, "beta": 0.1}


def watched_plans(engine: BuiltEngine) -> list[tuple[bool, bool, bool]]:
    """Whether people's own steps had work, a job's had, and the latter was granted any, by plan from now on."""
    plans: list[tuple[bool, bool, bool]] = []
    scheduler = engine.scheduler
    plan_of = scheduler.plan

    def watched(*arguments: Any) -> Any:
        steps = [task for task in scheduler.queues.finetunes if task.has_work]
        plan = plan_of(*arguments)
        granted = [grant.task.bulk for grant in plan.grants if grant.task.kind is Kind.FINETUNE]
        plans.append((any(not task.bulk for task in steps), any(task.bulk for task in steps), any(granted)))
        return plan

    scheduler.plan = watched  # type: ignore[method-assign]
    return plans


def test_a_step_of_a_job_stands_still_while_a_persons_pairs_have_work(tmp_path: Path) -> None:
    # Whatever is kept of a step makes its units longer: here it has many short ones.
    settings = {"align__recompute": "full", "guard__held_out_share": 0.0, "align__window_tokens": 16}
    with running_engine(tmp_path, **settings) as (engine, client):
        plans = watched_plans(engine)
        align = job_settings(AlignSettings(window_tokens=16), "dpo", HYPERPARAMETERS)
        job = JobPlan("job", "made", align, 64, 16, 1, 0)
        assert engine.start_job(job).result(30) == 0
        examples = [replace(pair, pair_id=-pair.pair_id, trusted=True) for pair in random_pairs(64, "made")]
        for step in range(4):
            engine.feed_job("made", step, [examples[number] for number in job.batch(step)])
        client.wait(lambda: any(bulk for _, bulk, _ in plans))
        for first in range(1, 9):
            engine.submit_pairs(random_pairs(1, seed=first, first_id=first))
            client.wait(lambda count=first: len(client.of(PairRetired)) == count)
        client.wait(lambda: len(client.of(JobStepped)) == 4)
        assert engine.end_job("made").result(30) == 4
        assert engine.adapters()["made"] == 4
    assert any(own and bulk for own, bulk, _ in plans), "both had work at once"
    assert not any(own and granted for own, _, granted in plans)
    assert [record.step for record in client.of(JobStepped)] == [1, 2, 3, 4]
    assert {record.pair_id for record in client.of(PairRetired)} == set(range(1, 9))


def test_the_ratings_of_a_jobs_step_are_compared_with_each_other(tmp_path: Path) -> None:
    align = job_settings(AlignSettings(), "kto", HYPERPARAMETERS)
    assert align.unpaired == "kto"
    with running_engine(tmp_path) as (engine, client):
        compared: set[int] = set()
        plan_of = engine.scheduler.plan

        def watched(*arguments: Any) -> Any:
            if step := engine.trainer.jobs["made"].step:
                compared.add(len(step.adapter_steps["made"].mismatched))
            return plan_of(*arguments)

        assert engine.start_job(JobPlan("job", "made", align, 2, 2, 1, 0)).result(30) == 0
        engine.scheduler.plan = watched  # type: ignore[method-assign]
        ratings = [replace(pair, pair_id=-pair.pair_id, rejected=(), trusted=True) for pair in random_pairs(2, "made")]
        engine.feed_job("made", 0, ratings)
        client.wait(lambda: client.of(JobStepped))
    assert compared == {2}


@pytest.mark.parametrize(
    ("method", "wanted"), [("dpo", True), ("ipo", True), ("simpo", False), ("orpo", False), ("supervised", False)]
)
def test_the_base_computes_the_examples_of_losses_that_have_a_reference(
    method: str, wanted: bool, tmp_path: Path
) -> None:
    job = JobPlan("job", "made", job_settings(AlignSettings(), method, HYPERPARAMETERS), 4, 2, 1, 0)
    with running_engine(tmp_path) as (engine, client):
        references: dict[int, set[bool]] = {0: set(), 1: set()}
        plan_of = engine.scheduler.plan

        def watched(*arguments: Any) -> Any:
            if step := engine.trainer.jobs["made"].step:
                references[step.adapter_steps["made"].version] |= {
                    pair_forward.reference for pair_forward in step.pair_forwards
                }
            return plan_of(*arguments)

        assert engine.start_job(job).result(30) == 0
        engine.scheduler.plan = watched  # type: ignore[method-assign]
        feed(engine, job, range(2))
        client.wait(lambda: len(client.of(JobStepped)) == 2)
    # Version 0 answers as the base.
    assert references == {0: {False}, 1: {False, True} if wanted else {False}}


def feed(engine: BuiltEngine, job: JobPlan, steps: range) -> None:
    examples = [replace(pair, pair_id=-pair.pair_id, trusted=True) for pair in random_pairs(job.examples, job.adapter)]
    for step in steps:
        engine.feed_job(job.adapter, step, [examples[number] for number in job.batch(step)])


def begun(engine: BuiltEngine, examples: int = 64, batch_size: int = 16) -> JobPlan:
    align = job_settings(AlignSettings(window_tokens=16), "dpo", HYPERPARAMETERS)
    job = JobPlan("job", "made", align, examples, batch_size, 1, 0)
    assert engine.start_job(job).result(30) == 0
    return job


def test_validation_examples_change_nothing_and_stand_still_while_a_persons_pairs_have_work(tmp_path: Path) -> None:
    settings = {"align__recompute": "full", "guard__held_out_share": 0.0, "align__window_tokens": 16}
    with running_engine(tmp_path, **settings) as (engine, client):
        job = begun(engine, 16, 16)
        feed(engine, job, range(1))
        client.wait(lambda: client.of(JobStepped))
        before = engine.trainer.adapter_cache.get("made").tensors()
        plans = watched_plans(engine)
        examples = [replace(pair, pair_id=-pair.pair_id, state="held_out") for pair in random_pairs(64, "made")]
        engine.feed_job("made", 1, examples[:60])
        client.wait(lambda: any(bulk for _, bulk, _ in plans))
        engine.submit_pairs(random_pairs(1, first_id=1))
        client.wait(lambda: len(client.of(JobStepped)) == 2)
        engine.feed_job("made", 1, examples[60:])
        client.wait(lambda: len(client.of(JobStepped)) == 3)
        assert engine.end_job("made").result(30) == 1
        after = engine.trainer.adapter_cache.get("made").tensors()
    assert all(before[name].equal(after[name]) for name in before)
    assert [(record.step, record.validated) for record in client.of(JobStepped)] == [(1, 0), (1, 60), (1, 4)]
    assert [record.version for record in client.of(VersionPublished) if record.adapter == "made"] == [1]
    assert any(own and bulk for own, bulk, _ in plans), "both had work at once"
    assert not any(own and granted for own, _, granted in plans)


def test_a_job_holds_neither_the_place_nor_the_slot_that_a_persons_step_wants(tmp_path: Path) -> None:
    settings = {"align__recompute": "full", "guard__held_out_share": 0.0, "align__window_tokens": 16}
    with running_engine(tmp_path, **settings, align__max_active_adapters=1) as (engine, client):
        finetuning, most, slotless = engine.finetuning, [0], set()
        finetuning._max_open = 1
        plan_of = engine.scheduler.plan

        def watched(*arguments: Any) -> Any:
            most[0] = max(most[0], finetuning._under_way)
            slotless.add(finetuning._slotless)
            return plan_of(*arguments)

        engine.scheduler.plan = watched  # type: ignore[method-assign]
        feed(engine, begun(engine, 16, 4), range(4))
        for first in range(1, 4):
            client.wait(lambda count=first: len(client.of(JobStepped)) >= count)
            engine.submit_pairs(random_pairs(1, seed=first, first_id=first))
            client.wait(lambda count=first: len(client.of(PairRetired)) == count)
        client.wait(lambda: len(client.of(JobStepped)) == 4)
    assert most == [1]
    assert "made" not in slotless


def test_nothing_takes_the_place_of_a_version_that_a_job_trains(tmp_path: Path) -> None:
    with running_engine(tmp_path) as (engine, client):
        job = begun(engine)
        feed(engine, job, range(1))
        client.wait(lambda: client.of(JobStepped))
        weights = engine.trainer.adapter_cache.get("made").tensors()
        with pytest.raises(AdapterError, match='a fine-tuning job makes adapter "made"'):
            engine.import_adapter("made", weights, "imported").result(30)
        with pytest.raises(AdapterError, match="wait for its end, or cancel it"):
            engine.rollback("made", 0).result(30)
        assert engine.end_job("made").result(30) == 1
        assert engine.start_job(job).result(30) == 1


def test_a_job_whose_version_answers_with_nan_has_failed(tmp_path: Path) -> None:
    with running_engine(tmp_path) as (engine, client):
        feed(engine, begun(engine), range(1))
        client.wait(lambda: client.of(JobStepped))
        assert engine.end_job("made").result(30) == 1
        assert engine.start_job(JobPlan("job", "made", AlignSettings(), 64, 16, 1, 0)).result(30) == 1
        state = engine.trainer.adapter_cache.get("made")
        for weight in (weight for pair in state.weights.values() for weight in pair):
            weight.data.fill_(float("nan"))
        engine.submit(request("asks", random_ids(9, 1), adapter="made"))
        client.wait(lambda: client.of(JobStepped)[-1].error)
        assert "not finite" in client.of(JobStepped)[-1].error


def test_a_job_whose_adapter_is_unreadable_or_forgotten_has_failed(tmp_path: Path) -> None:
    with running_engine(tmp_path) as (engine, client):
        begun(engine)
        engine.commands.ask(lambda: engine.trainer.enqueue("made", None)).result(30)
        client.wait(lambda: client.of(JobStepped))
        assert "cannot be read" in client.of(JobStepped)[-1].error
        assert engine.end_job("made").result(30) == 0
        begun(engine)
        engine.forget("made", ()).result(30)
        client.wait(lambda: len(client.of(JobStepped)) == 2)
        assert client.of(JobStepped)[-1].error == "the adapter was forgotten"


NEUTRAL = [TokenPair(-1, "", (3, 4, 5), (140, 170, 200), (150, 190, 220))]
"""Of tokens that pairs reject."""


def left_by_a_job(engine: BuiltEngine, client: Client) -> tuple[int, list[TokenPair]]:
    """The version of a job that has changed the language far beyond the guard's bounds, and pairs of its user."""
    align = job_settings(AlignSettings(window_tokens=16), "dpo", HYPERPARAMETERS | {"learning_rate": 0.1})
    job = JobPlan("job", "made", align, 64, 16, 1, 0)
    assert engine.start_job(job).result(30) == 0
    feed(engine, job, range(4))
    client.wait(lambda: len(client.of(JobStepped)) == 4)
    assert engine.end_job("made").result(30) == 4
    client.wait(lambda: client.of(VersionTested))
    return 4, random_pairs(12, "made", seed=7)


@pytest.mark.usefixtures("each_version_is_tested")
def test_a_users_pairs_are_learned_upon_a_job_whose_language_is_far_from_the_base(tmp_path: Path) -> None:
    settings = {"align__learning_rate": 1e-5, "guard__held_out_share": 0.25}
    with running_engine(tmp_path, **settings) as (engine, client):
        engine.test_with(NEUTRAL)
        left, pairs = left_by_a_job(engine, client)
        engine.submit_pairs(pairs[:6])
        client.wait(lambda: any(each.taken_back for each in client.of(VersionPublished)), 20.0)
        client.wait(lambda: client.of(VersionTested)[-1].version == engine.adapters()["made"], 20.0)
        again = engine.adapters()["made"]
        engine.submit_pairs(pairs[6:])
        client.wait(lambda: engine.adapters()["made"] > again and not engine.queue()["finetune"], 20.0)
        client.wait(lambda: client.of(VersionTested)[-1].version == engine.adapters()["made"], 20.0)
        assert engine.trainer.pair_queues["made"].guard.lr_scale == 1.0
    first = client.of(VersionTested)[0]
    assert first.version == left
    assert first.neutral_nll > 1.1 * first.neutral_base_nll, "beyond the bound against the base"
    assert [each.restored for each in client.of(VersionPublished) if each.taken_back] == [left]
    assert not [each.problem for each in client.of(VersionTested) if each.problem and each.version >= again]


@pytest.mark.usefixtures("each_version_is_tested")
def test_a_version_of_worse_language_after_a_job_goes_back_to_what_the_job_left(tmp_path: Path) -> None:
    settings = {"align__loss_threshold": 0.0, "store__keep_versions": 1}
    with running_engine(tmp_path, **settings) as (engine, client):
        engine.test_with(NEUTRAL)
        left, pairs = left_by_a_job(engine, client)
        engine.submit_pairs(pairs[:1])
        client.wait(lambda: client.of(VersionTested)[-1].version == left + 1)
        strict = engine.settings.guard.model_copy(update={"max_nll_change": 1e-5})
        engine.configure(engine.settings.model_copy(update={"guard": strict})).result(20)
        engine.request_test("made")
        client.wait(lambda: any(each.taken_back for each in client.of(VersionPublished)), 15.0)
        client.wait(lambda: client.of(VersionTested)[-1].version == engine.adapters()["made"])
        assert engine.trainer.pair_queues["made"].guard.lr_scale == 0.5, "no held-out pair is needed for that"
    (back,) = [each for each in client.of(VersionPublished) if each.taken_back]
    assert back.restored == left
    assert back.reason.endswith("beyond version 4, which a job left")
    assert not client.of(VersionTested)[-1].problem, "what the job left is no worse than it was"


UNTESTED: dict[str, Any] = {"guard__held_out_share": 0.0, "align__loss_threshold": 0.0}
SAVED: dict[str, Any] = {"store__save_every_s": 0.001, "store__keep_versions": 2}


def learn(engine: BuiltEngine, client: Client, pair: TokenPair) -> None:
    """A version of one pair, tested and on disk."""
    version = engine.adapters()["made"] + 1
    engine.submit_pairs([pair])
    client.wait(lambda: version in {each.version for each in client.of(VersionTested)})
    client.wait(lambda: version in {each.version for each in client.of(VersionSaved)})
    assert engine.adapters()["made"] == version, "it passed"


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.usefixtures("each_version_is_tested")
def test_the_first_test_with_pairs_goes_straight_back_to_what_a_job_left(tmp_path: Path, restarted: bool) -> None:
    settings: dict[str, Any] = {**UNTESTED, **SAVED, "align__learning_rate": 1e-5}
    with running_engine(tmp_path, **settings) as (engine, client):
        engine.test_with(NEUTRAL)
        left, pairs = left_by_a_job(engine, client)
        for pair in pairs[:2]:
            learn(engine, client, pair)
        change = engine.trainer.pair_queues["made"].guard.baseline_nll_change
        if not restarted:
            goes_back_to(left, pairs, engine, client)
    if restarted:
        with running_engine(tmp_path, **settings) as (engine, client):
            engine.restore_outlier_history(
                {"made": OutlierHistory(tested_version=left + 2, baseline_version=left, baseline_nll_change=change)}
            )
            engine.test_with(NEUTRAL)
            goes_back_to(left, pairs, engine, client)


def goes_back_to(left: int, pairs: list[TokenPair], engine: BuiltEngine, client: Client) -> None:
    """One more version is learned, and the first held-out pairs come."""
    learn(engine, client, pairs[2])
    engine.submit_pairs([replace(pair, state="held_out") for pair in pairs[3:]])
    engine.request_test("made")
    client.wait(lambda: any(each.taken_back for each in client.of(VersionPublished)))
    client.wait(lambda: client.of(VersionTested)[-1].version == engine.adapters()["made"])
    assert [each.restored for each in client.of(VersionPublished) if each.taken_back] == [left]
    assert not client.of(VersionTested)[-1].problem
    assert engine.trainer.pair_queues["made"].guard.lr_scale == 1.0


@pytest.mark.usefixtures("each_version_is_tested")
def test_a_version_that_a_person_rolls_back_to_is_not_measured_as_what_a_job_left(tmp_path: Path) -> None:
    with running_engine(tmp_path, **UNTESTED, **SAVED) as (engine, client):
        engine.test_with(NEUTRAL)
        left, pairs = left_by_a_job(engine, client)
        learn(engine, client, pairs[0])
        engine.commands.ask(lambda: engine.trainer.versions.withdraw("made", "guard: a test")).result(20)
        client.wait(lambda: client.of(VersionTested)[-1].version == left + 2)
        guard = engine.trainer.pair_queues["made"].guard
        change = guard.baseline_nll_change
        assert engine.rollback("made", left + 1).result(20) == left + 3
        engine.request_test("made")
        client.wait(lambda: client.of(VersionTested)[-1].version == left + 3)
        assert guard.baseline_version == left
        assert guard.baseline_nll_change == change


def test_a_job_that_ends_before_its_first_step_leaves_no_floor(tmp_path: Path) -> None:
    with running_engine(tmp_path) as (engine, client):
        feed(engine, begun(engine), range(1))
        client.wait(lambda: client.of(JobStepped))
        assert engine.end_job("made").result(30) == 1
        weights = engine.trainer.adapter_cache.get("made").tensors()
        assert engine.import_adapter("other", weights, "imported").result(30) == 1
        assert engine.start_job(JobPlan("job", "other", AlignSettings(), 64, 16, 1, 0)).result(30) == 0
        assert engine.end_job("other").result(30) == 1
        floors = [engine.trainer.pair_queues[name].guard.baseline_version for name in ("made", "other")]
    assert floors == [1, 0]


def test_a_validation_batch_that_is_not_finite_is_left_out_and_a_job_that_must_end_there_ends(tmp_path: Path) -> None:
    with running_engine(tmp_path) as (engine, client):
        job = begun(engine, 4, 2)
        feed(engine, job, range(1))
        client.wait(lambda: client.of(JobStepped))
        good, bad = (replace(pair, pair_id=-pair.pair_id, state="held_out") for pair in random_pairs(2, "made"))
        with not_a_number(engine):
            engine.feed_job("made", 1, [good, replace(bad, chosen=(MARK, 3))])
            client.wait(lambda: len(client.of(JobStepped)) == 2)
        feed(engine, job, range(1, 2))
        client.wait(lambda: len(client.of(JobStepped)) == 3)
        engine.feed_job("made", 2, [good])
        engine.forget("made").result(30)
        client.wait(lambda: len(client.of(JobStepped)) == 4)
    told = [(record.step, record.left_out, record.error) for record in client.of(JobStepped)]
    assert told[:3] == [(1, False, ""), (1, True, "loss is nan"), (2, False, "")]
    assert told[3] in [(2, False, "the adapter was forgotten"), (2, False, "")]
