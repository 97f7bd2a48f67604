"""The cost model learns a device's prices from its iterations."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.lab.bench.figures import times_usual
from edged.scheduler.cost.model import CostModel, load_of, roofline
from edged.scheduler.cost.prices import Load
from edged.scheduler.cost.regression import OnlineRegression
from edged.scheduler.planning.slo import SloTargets
from edged.scheduler.scheduler import Scheduler
from edged.scheduler.task import (
    FinetuneTask,
    IterationResult,
    Kind,
    Resources,
    ServiceClass,
    ServingTask,
    TaskOutcome,
    Unit,
)
from edged.settings.load import SchedulerSettings
from tests.scheduler.world import Device

AMPLE = Resources(free_pages=1000, total_pages=1000, page_size=16, max_tokens=1024, max_sequences=64)

loads = st.builds(
    Load,
    prefill_tokens=st.integers(0, 500),
    decodes=st.integers(0, 64),
    finetune_tokens=st.integers(0, 500),
    context=st.integers(0, 50_000),
    pairs=st.floats(0, 1e6),
)


def guessed() -> CostModel:
    return CostModel(roofline(parameters=135_000_000, flops_per_s=1e11, bytes_per_s=2e10))


def iteration(device: Device, rng: random.Random) -> IterationResult:
    """What a device reports of a random mix of decodes, a chunk, a pair's forward and units."""
    tasks = [ServingTask(i, Kind.DECODE, 0.0, context=rng.randint(10, 2000)) for i in range(rng.randint(0, 20))]
    outcomes = [TaskOutcome(task, 1, 0, Kind.DECODE) for task in tasks]
    if rng.random() < 0.5:
        outcomes.append(
            TaskOutcome(ServingTask(98, Kind.PREFILL, 0.0, num_tokens=999), rng.randint(1, 400), 0, Kind.PREFILL)
        )
    if rng.random() < 0.5 or not outcomes:
        outcomes.append(TaskOutcome(FinetuneTask(99, 0.0, num_tokens=999), rng.randint(1, 400), 0, Kind.FINETUNE))
    result = IterationResult(outcomes)
    noise = 1.0 + device.noise * rng.uniform(-1, 1)
    result.forward_s = device.forward_s(load_of(result)) * noise
    result.units = [(unit, device.unit_s(unit)) for unit in rng.sample([Unit("layer", 64), Unit("layer", 256)], 1)]
    return result


def trained(device: Device, iterations: int = 300) -> CostModel:
    cost, rng = guessed(), random.Random(0)
    for _ in range(iterations):
        cost.observe(iteration(device, rng))
    return cost


def test_it_predicts_a_device_that_it_has_watched_within_one_percent() -> None:
    device = Device()
    cost = trained(device)
    rng = random.Random(7)
    results = [iteration(device, rng) for _ in range(50)]
    errors = [abs(cost.forward_s(load_of(result)) / result.forward_s - 1.0) for result in results]
    assert sum(errors) / len(errors) < 0.01
    assert max(errors) < 0.06
    assert cost.unit_s(Unit("layer", 128)) == pytest.approx(device.unit_s(Unit("layer", 128)), rel=0.05)
    assert cost.mape < 0.03


def test_it_recognises_that_tokens_below_the_knee_are_nearly_free() -> None:
    # A device that reads its weights for 30 ms computes its first 128 tokens meanwhile: a roofline.
    cost = CostModel(roofline(parameters=3_000_000_000, flops_per_s=2.56e13, bytes_per_s=2e11))
    device = Device(pass_s=0.03, token_s=0.0001, decode_s=1e-5, free_tokens=128)
    rng = random.Random(0)
    for _ in range(300):
        cost.observe(iteration(device, rng))
    decodes = Load(decodes=8, context=4000)
    few, many = Load(64, 8, 0, 4000), Load(564, 8, 0, 4000)
    assert cost.forward_s(few) - cost.forward_s(decodes) < 0.15 * cost.forward_s(decodes)
    assert cost.forward_s(many) - cost.forward_s(few) == pytest.approx(0.0001 * (572 - 128), rel=0.1)


def test_it_follows_a_device_that_throttles_to_half_its_speed() -> None:
    fast, slow = Device(), Device(pass_s=0.04, token_s=0.001, decode_s=0.0004, key_s=2e-7, pair_s=2e-8)
    cost, rng = trained(fast), random.Random(1)
    for _ in range(40):
        cost.observe(iteration(slow, rng))
    for _ in range(100):
        result = iteration(slow, rng)
        assert cost.forward_s(load_of(result)) == pytest.approx(result.forward_s, rel=0.15)
        cost.observe(result)


def scaled(device: Device, factor: float) -> Device:
    """The same device at another speed."""
    slower = {
        name: factor * getattr(device, name)
        for name in ("pass_s", "token_s", "decode_s", "key_s", "pair_s", "unit_base_s", "unit_token_s")
    }
    return replace(device, **slower)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_device_that_becomes_twice_as_slow_and_fast_again_is_followed_within_three_seconds(noise: float) -> None:
    fast = Device(noise=noise)
    slow, rng = scaled(fast, 2.0), random.Random(1)
    cost = trained(fast)
    for device in (slow, fast, slow):
        now = 0.0
        while now < 3.0:
            result = iteration(device, rng)
            cost.observe(result)
            now += result.forward_s + sum(seconds for _, seconds in result.units)
        errors = []
        for _ in range(40):
            result = iteration(device, rng)
            errors.append(abs(cost.forward_s(load_of(result)) / result.forward_s - 1.0))
            errors += [abs(cost.unit_s(unit) / seconds - 1.0) for unit, seconds in result.units]
            cost.observe(result)
        assert sum(errors) / len(errors) < 0.15
        assert cost.report()["drift"] == pytest.approx(2.0 if device is slow else 1.0, rel=0.25)


def noisy(device: Device, rng: random.Random, sigma: float) -> IterationResult:
    """An iteration with a factor of its own, and now and then a stall."""
    result = iteration(device, rng)
    factor = rng.lognormvariate(0.0, sigma) * (4.0 if rng.random() < 0.02 else 1.0)
    result.forward_s *= factor
    result.units = [(unit, seconds * factor) for unit, seconds in result.units]
    return result


@pytest.mark.parametrize("sigma", [0.1, 0.3])
def test_a_device_whose_speed_is_constant_is_not_found_to_drift_however_noisy_it_is(sigma: float) -> None:
    device, cost, rng = Device(), guessed(), random.Random(4)
    for _ in range(6000):
        cost.observe(noisy(device, rng, sigma))
    assert cost.drift == pytest.approx(1.0, rel=0.2)
    chunk = Load(prefill_tokens=300, decodes=8, context=8000)
    assert cost.forward_s(chunk) == pytest.approx(device.forward_s(chunk), rel=0.25)


def test_five_iterations_tell_of_a_jump_and_the_next_is_predicted_right() -> None:
    slow, rng = scaled(Device(), 2.0), random.Random(9)
    cost = trained(Device())
    for _ in range(5):
        cost.observe(iteration(slow, rng))
    for _ in range(10):
        result = iteration(slow, rng)
        assert cost.forward_s(load_of(result)) == pytest.approx(result.forward_s, rel=0.1)
        cost.observe(result)


def come_and_gone(device: Device, cost: CostModel) -> Iterator[IterationResult]:
    """A thousand iterations, yet to be observed, of a device whose speed swings by a quarter, and 500 before them."""
    rng = random.Random(8)
    for number in range(1500):
        slowness = math.exp(0.25 * math.sin(number * math.tau / 80.0)) * rng.lognormvariate(0.0, 0.08)
        result = iteration(scaled(device, slowness), rng)
        if number >= 500:
            yield result
        cost.observe(result)


def test_a_slowness_that_comes_and_goes_within_tens_of_iterations_is_followed() -> None:
    cost, forwards, units, priced = trained(Device()), [], [], []
    told = []
    for result in come_and_gone(Device(), cost):
        told.append(cost.report()["slowness"])
        forwards.append(abs(cost.forward_s(load_of(result)) / result.forward_s - 1.0))
        units += [abs(cost.unit_s(unit) / seconds - 1.0) for unit, seconds in result.units]
        priced.append(abs(cost.priced_s(load_of(result)) / result.forward_s - 1.0))
    assert np.mean(forwards) < 0.12
    assert np.mean(units) < 0.12
    assert np.mean(priced) > 0.15
    assert min(told) < 0.85
    assert max(told) > 1.15


def test_targets_do_not_move_with_the_moment() -> None:
    device, cost = Device(), trained(Device())
    targets = SloTargets(SchedulerSettings(ttft_floor_ms=1), cost)
    usual_s = targets.ttft_s(ServiceClass.INTERACTIVE, 300)
    for _ in come_and_gone(device, cost):
        assert targets.ttft_s(ServiceClass.INTERACTIVE, 300) == pytest.approx(usual_s, rel=0.15)


def test_deadlines_are_of_prices_and_a_plan_is_of_the_moment() -> None:
    cost = trained(Device())
    next(None for _ in come_and_gone(Device(), cost) if cost.report()["slowness"] > 1.2)
    alone_s, tokens = cost.priced_s(Load(decodes=1)), Load(prefill_tokens=100, pairs=5000.0)
    assert SloTargets(SchedulerSettings(tbt_factor=0.5, tbt_floor_ms=1.05e3 * alone_s), cost).impossible() == []
    scheduler = Scheduler(SchedulerSettings(tbt_factor=2.0, tbt_floor_ms=0.001), cost)
    task = ServingTask(1, Kind.PREFILL, 0.0, num_tokens=100)
    scheduler.add(task, now=0.0)
    predicted_s = scheduler.plan(0.0, AMPLE).predicted_forward_s
    assert predicted_s == pytest.approx(cost.forward_s(tokens))
    assert predicted_s > 1.2 * cost.priced_s(tokens)
    scheduler.complete(IterationResult([TaskOutcome(task, 100, 0, Kind.DECODE)], predicted_s), now=1.0)
    decode_s = cost.priced_s(Load(decodes=1, context=100))
    assert task.deadline_s == pytest.approx(1.0 + 2.0 * decode_s, rel=1e-3)


def test_what_was_not_run_for_long_is_priced_as_it_was_at_the_speed_of_now() -> None:
    device, rng = Device(), random.Random(6)
    cost, unit = trained(device), Unit("layer", 128)
    steady = IterationResult(
        [TaskOutcome(ServingTask(i, Kind.DECODE, 0.0, context=100), 1, 0, Kind.DECODE) for i in range(8)]
    )
    for slow in (1.0, 2.0):
        for _ in range(4000):
            steady.forward_s = slow * device.forward_s(load_of(steady)) * rng.lognormvariate(0.0, 0.2)
            cost.observe(steady)
        assert cost.drift == pytest.approx(slow, rel=0.2)
        assert cost.unit_s(unit) == pytest.approx(slow * device.unit_s(unit), rel=0.3)
        chunk = Load(prefill_tokens=300, decodes=8, context=800)
        assert cost.forward_s(chunk) == pytest.approx(slow * device.forward_s(chunk), rel=0.3)


def test_errors_are_told_by_kind_and_those_of_the_warm_up_are_left_out() -> None:
    cost = trained(Device(noise=0.1), 200)
    assert cost.report()["after_warm_up"]["all"] == {"iterations": 0, "mape_percent": None}
    rng = random.Random(5)
    for _ in range(100):
        cost.observe(iteration(Device(noise=0.1), rng))
    report = cost.report()
    warm = report["after_warm_up"]
    assert warm["prefill"]["iterations"] + warm["decode"]["iterations"] == warm["units"]["iterations"] == 100
    assert report["iterations"] == 300
    assert 1.0 < warm["prefill"]["mape_percent"] < 10.0
    assert report["mape_percent_by_kind"].keys() == {"prefill", "decode", "units"}


def test_how_many_times_longer_than_usual_each_part_took_is_told_of_a_stretch_of_time() -> None:
    device = Device()
    cost, rng = trained(device, 600), random.Random(5)
    before = cost.report()
    assert times_usual(before, before) == {"prefill": None, "decode": None, "units": None}
    for _ in range(100):
        result = iteration(device, rng)
        load = load_of(result)
        result.forward_s *= 1.5 if load.prefill_tokens or load.finetune_tokens else 0.8
        result.units = [(unit, 2.0 * seconds) for unit, seconds in result.units]
        cost.observe(result)
    told = times_usual(before, cost.report())
    assert told == {
        "prefill": pytest.approx(1.5, rel=0.1),
        "decode": pytest.approx(0.8, rel=0.1),
        "units": pytest.approx(2.0, rel=0.1),
    }


def test_a_forward_of_many_adapters_is_learned_to_take_longer_than_one_of_one() -> None:
    cost, rng = guessed(), random.Random(0)
    for _ in range(300):
        tasks = [ServingTask(i, Kind.DECODE, 0.0, context=200, adapter=rng.randrange(9)) for i in range(16)]
        result = IterationResult([TaskOutcome(task, 1, 0, Kind.DECODE) for task in tasks])
        result.forward_s = 0.020 + 0.001 * load_of(result).adapters
        cost.observe(result)
    one, many = Load(decodes=16, context=3200, adapters=1), Load(decodes=16, context=3200, adapters=8)
    assert cost.forward_s(many) - cost.forward_s(one) == pytest.approx(0.007, rel=0.1)


def test_it_keeps_the_prices_that_a_steady_load_does_not_show() -> None:
    device = Device(noise=0.1)
    cost, rng = trained(device), random.Random(3)
    steady = IterationResult(
        [TaskOutcome(ServingTask(i, Kind.DECODE, 0.0, context=100), 1, 0, Kind.DECODE) for i in range(8)]
    )
    for _ in range(2000):
        steady.forward_s = device.forward_s(load_of(steady)) * (1.0 + 0.1 * rng.uniform(-1, 1))
        cost.observe(steady)
    chunk = Load(prefill_tokens=300, decodes=8, context=800)
    assert cost.forward_s(chunk) == pytest.approx(device.forward_s(chunk), rel=0.15)


def test_a_stall_of_a_hundred_times_the_usual_hardly_moves_it() -> None:
    cost, rng = trained(Device()), random.Random(2)
    stalled = iteration(Device(), rng)
    before_s = cost.forward_s(load_of(stalled))
    stalled.forward_s *= 100
    cost.observe(stalled)
    assert cost.forward_s(load_of(stalled)) == pytest.approx(before_s, rel=0.05)


def test_its_error_is_the_noise_that_it_cannot_predict() -> None:
    cost = trained(Device(noise=0.2), 500)
    assert 0.05 < cost.mape < 0.15
    assert cost.headroom == cost.mape


def test_before_any_measurement_it_admits_that_it_may_be_wrong() -> None:
    assert guessed().mape == 0.25


def test_a_unit_of_an_unknown_kind_starts_like_a_layer_and_is_learned() -> None:
    cost = guessed()
    assert cost.unit_s(Unit("other", 64)) == cost.unit_s(Unit("layer", 64))
    for _ in range(30):
        cost.observe(IterationResult(units=[(Unit("other", 64), 0.5)]))
    assert cost.unit_s(Unit("other", 64)) == pytest.approx(0.5, rel=0.05)


def test_the_part_of_an_iteration_that_was_fine_tuning_is_told() -> None:
    device = Device()
    cost = trained(device)
    served = TaskOutcome(ServingTask(1, Kind.PREFILL, 0.0, num_tokens=200), 200, 0, Kind.DECODE)
    tuned = TaskOutcome(FinetuneTask(2, 0.0, num_tokens=300), 300, 1, Kind.FINETUNE)
    forward_s = device.forward_s(load_of(IterationResult([served, tuned])))
    alone_s = device.forward_s(load_of(IterationResult([served])))
    finetune_s = cost.observe(IterationResult([served, tuned], forward_s, [(Unit("layer", 64), 0.007)]))
    assert finetune_s == pytest.approx(forward_s - alone_s + 0.007, rel=0.1)


@settings(deadline=None)
@given(st.lists(st.tuples(loads, st.floats(1e-5, 10.0)), max_size=30), loads)
def test_predictions_are_never_negative_and_more_work_never_takes_less_time(
    seen: list[tuple[Load, float]], load: Load
) -> None:
    cost = guessed()
    for index, (known, seconds) in enumerate(seen):
        decodes = [
            TaskOutcome(ServingTask(i, Kind.DECODE, 0.0, context=5), 1, 0, Kind.DECODE) for i in range(known.decodes)
        ]
        chunk = TaskOutcome(ServingTask(99, Kind.PREFILL, 0.0, num_tokens=999), known.prefill_tokens, 0, Kind.PREFILL)
        cost.observe(IterationResult([*decodes, chunk], seconds, [(Unit("layer", index), seconds)]))
    more = Load(load.prefill_tokens + 1, load.decodes + 1, load.finetune_tokens + 1, load.context + 9, load.pairs + 9)
    assert 0.0 <= cost.forward_s(load) <= cost.forward_s(more)
    assert cost.token_s > 0.0
    assert 0.0 <= cost.mape <= 1.0


@settings(deadline=None)
@given(loads, st.integers(0, 3000), st.integers(1, 1024), st.floats(0.0, 2.0), st.booleans())
def test_a_chunk_is_the_longest_that_keeps_the_limit(
    load: Load, context: int, most: int, limit_s: float, finetune: bool
) -> None:
    cost = guessed()
    for seconds in [0.01] * 15 + [0.0109] * 5:
        # Slower than it was a moment ago.
        cost.observe(IterationResult([TaskOutcome(ServingTask(1, Kind.DECODE, 0.0), 1, 0, Kind.DECODE)], seconds))

    def with_chunk(tokens: int) -> float:
        grown = Load(load.prefill_tokens, load.decodes, load.finetune_tokens, load.context, load.pairs)
        grown.add_chunk(tokens, context, finetune)
        return cost.forward_s(grown)

    tokens = cost.chunk(load, context, most, limit_s, finetune)
    assert 0 <= tokens <= most
    if tokens:
        assert with_chunk(tokens) <= limit_s * (1 + 1e-9)
    if tokens < most:
        assert with_chunk(tokens + 1) > limit_s * (1 - 1e-9)


@settings(max_examples=20)
@given(st.integers(0, 1000))
def test_a_fit_agrees_with_least_squares_where_the_data_are_plentiful(seed: int) -> None:
    rng = np.random.default_rng(seed)
    true = rng.uniform(0.5, 2.0, 3)
    rows = rng.uniform(0.5, 1.5, (200, 3))
    fit = OnlineRegression([1.0, 1.0, 1.0])
    for row in rows:
        fit.observe(row.tolist(), float(row @ true))
    # The oracle: numpy's least squares over the same relative errors.
    oracle, *_ = np.linalg.lstsq(rows / (rows @ true)[:, None], np.ones(len(rows)), rcond=None)
    assert fit.prices == pytest.approx(oracle, rel=0.1)
