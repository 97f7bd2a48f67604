"""What is told of an iteration is what a watched engine's iterations were."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from benchmarks.iteration import ForwardClock, Ran, WatchedEngine, outside
from edged.engine.model_runner import RunnerOutput
from tests.models import save_tiny


def test_the_time_outside_is_what_lies_between_two_begins_without_the_forward() -> None:
    prompts = Ran(0.0, 0.5, 0.5, sequences=2, tokens=40)
    begins = [1.0, 2.0, 3.0, 5.0, 9.0]
    decodes = [Ran(begin, begin + 0.9, 0.75, sequences=2, tokens=2) for begin in begins]
    ended = Ran(10.0, 10.1, 0.1, sequences=1, tokens=1)
    found = outside([prompts, *decodes, ended], batch=2)
    # The first two warm up; the others last 2, 4 and 1 s.
    assert found["iterations"] == 3
    assert found["iteration_ms"]["median"] == pytest.approx(2000.0)
    assert found["outside_ms"]["median"] == pytest.approx(1250.0)
    assert found["outside_share"]["high"] == pytest.approx(3.25 / 4)


def test_a_batch_that_never_decodes_together_is_told() -> None:
    with pytest.raises(RuntimeError, match="no iterations decoded 8 sequences together"):
        outside([Ran(float(at), at + 0.5, 0.4, sequences=4, tokens=4) for at in range(9)], batch=8)


def test_the_clock_forgets_what_it_has_told() -> None:
    clock = ForwardClock(torch.device("cpu"))
    assert clock.timed(lambda value: (time.sleep(0.01), value)[1])(7) == 7
    assert clock.take_s() >= 0.01
    assert clock.take_s() == 0.0


def test_every_iterations_forward_is_within_it(tmp_path: Path) -> None:
    engine = WatchedEngine(save_tiny(tmp_path), "cpu", "float32")
    try:
        ran = engine.answer([(5, 6, 7), (8, 9)], 6, {"temperature": 0.0})
    finally:
        engine.close()
    assert sum(one.tokens for one in ran) == 5 + 2 * 5
    assert all(0 < one.forward_s < one.ended_s - one.began_s for one in ran)


def test_an_answer_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = WatchedEngine(save_tiny(tmp_path), "cpu", "float32")

    def broken(*_arguments: object, **_named: object) -> RunnerOutput:
        raise OSError("the device is gone")

    monkeypatch.setattr(engine, "_run", broken)
    try:
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.answer([(5, 6)], 2, {"temperature": 0.0})
    finally:
        engine.close()
