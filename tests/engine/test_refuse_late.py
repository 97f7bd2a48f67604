"""Requests whose first token would come far too late are refused at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from edged.api.errors import as_api_error
from edged.engine.request import FirstTokenLate, Request
from edged.engine.sampling.params import Sampling
from edged.lab.simulator.hardware import SimulatedHardware
from edged.lab.simulator.plan import SimulationPlan
from edged.lab.simulator.runner import SimulatedEngine
from edged.settings.load import Settings
from tests.engine.harness import random_ids, request, running_engine


def engine_of(factor: float) -> SimulatedEngine:
    settings = Settings.model_validate({"scheduler": {"refuse_ttft_factor": factor}})
    plan = SimulationPlan(trace="poisson", device="agx-orin-32gb-maxn", model="mistral-3b", settings=settings)
    return SimulatedEngine(settings, SimulatedHardware.of(plan))


def submit(engine: SimulatedEngine, count: int) -> int:
    """Send prompts of 2,000 tokens until one is refused; how many were taken."""
    sampling = Sampling(max_tokens=2, ignore_eos=True)
    for number in range(count):
        name = f"{engine.now}-{number}"
        prompt = tuple(range(10 * number, 10 * number + 2000))
        engine.recorder.expect(name, engine.now, len(prompt))
        try:
            engine.submit(Request(name, prompt, sampling))
        except FirstTokenLate:
            engine.recorder.refuse(name)
            return number
    return count


def test_a_queue_is_as_long_as_the_factor_times_the_target_allows_and_opens_again() -> None:
    once, twice = (submit(engine_of(factor), 40) for factor in (1.0, 2.0))
    # The target is five forwards of a prompt, so about as many are taken.
    assert 4 <= once <= 6
    assert 2 * once - 1 <= twice <= 2 * once + 1
    engine = engine_of(1.0)
    submit(engine, 40)
    engine.run(engine.now + 60.0, drained=True)
    assert submit(engine, 1) == 1


def test_by_default_nobody_is_refused() -> None:
    assert submit(engine_of(0.0), 40) == 40


def test_the_engine_says_what_it_predicts_and_which_setting_refuses(tmp_path: Path) -> None:
    with running_engine(tmp_path, scheduler__refuse_ttft_factor=1e-9) as (engine, _client):
        with pytest.raises(FirstTokenLate, match=r"predicted in .* s, and its target is .*refuse_ttft_factor") as late:
            engine.submit(request("one", random_ids(60, 1)))
        assert engine.stats.outcomes["refused"] == 1
    answer = as_api_error(late.value)
    assert (answer.status, answer.code) == (429, "first_token_late")
    assert answer.retry_after_s >= 1.0
