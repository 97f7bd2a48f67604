"""A job's steps have what people's own pairs leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from edged.align.feedback.pair import JobStepped, PairRetired
from edged.align.jobs import JobPlan, job_settings
from edged.scheduler.task import Kind
from edged.settings.load import AlignSettings
from tests.engine.harness import random_pairs, running_engine

HYPERPARAMETERS = {"learning_rate_multiplier": 1.0, "beta": 0.1}


def test_a_step_of_a_job_stands_still_while_a_persons_pairs_have_work(tmp_path: Path) -> None:
    # Whatever is kept of a step makes its units longer: here it has many short ones.
    settings = {"align__keep_graph": "false", "guard__held_out_share": 0.0, "align__window_tokens": 16}
    with running_engine(tmp_path, **settings) as (engine, client):
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
        align = job_settings(AlignSettings(window_tokens=16), "dpo", 1e-3, HYPERPARAMETERS)
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
