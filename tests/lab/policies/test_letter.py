"""MACE to the letter: neither decodes nor deadlines pace prompts and fine-tuning."""

from __future__ import annotations

from tests.scheduler.policies.test_policies import add_decode, add_lesson, add_prompt, granted, resources
from tests.scheduler.test_scheduler import scheduler_of


def test_prompts_take_all_tokens_whatever_is_decoded_beside_them() -> None:
    shares = {}
    for policy in ("mace-letter", "mace-paper"):
        scheduler = scheduler_of(policy=policy, ttft_floor_ms=60_000.0)
        add_decode(scheduler, 1)
        add_prompt(scheduler, 2, 900)
        shares[policy] = granted(scheduler.plan(0.0, resources()))[2][0]
    assert shares["mace-letter"] == 900 > shares["mace-paper"]


def test_a_step_runs_in_every_iteration_however_late_prompts_are() -> None:
    for policy, runs in (("mace-letter", True), ("mace-paper", False)):
        scheduler = scheduler_of(policy=policy, ttft_floor_ms=1.0, ttft_factor=0.1)
        add_decode(scheduler, 1)
        add_prompt(scheduler, 2, 900)
        add_lesson(scheduler, 3)
        assert (3 in granted(scheduler.plan(0.5, resources()))) == runs
