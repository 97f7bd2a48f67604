"""A device's profile: prices from measurements, the file, and what it may be used for."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.scheduler.cost.model import CostModel, roofline
from edged.scheduler.cost.prices import FORWARD_PRICES, Load, Prices
from edged.scheduler.cost.profile import (
    FOLDER,
    ForwardTime,
    Profile,
    ProfileError,
    Subject,
    UnitTime,
    file_name,
    find_profile,
    fit_noise,
    fit_prices,
    held_out_error,
)
from edged.scheduler.cost.regression import least_squares
from edged.scheduler.task import Unit
from tests.scheduler.cost.test_cost import iteration
from tests.scheduler.world import Device

HERE = Subject(model="demo", fingerprint="f00d", device="Board 8 cores", dtype="float32", threads=2)


def measured(device: Device, noise: float = 0.0) -> tuple[list[ForwardTime], list[UnitTime]]:
    """A grid of forwards and units on a device."""
    chance = random.Random(0)
    loads = [Load(decodes=n, context=n * context) for n in (1, 4, 16, 64) for context in (16, 256, 2048)]
    for tokens in (4, 32, 128, 512):
        for context in (0, 256, 2048):
            load = Load()
            load.add_chunk(tokens, context, finetune=False)
            loads += [load, replace(load, decodes=8, context=4096)]
        loads.append(Load(finetune_tokens=tokens))
    chance.shuffle(loads)
    spread = [1.0 + noise * chance.uniform(-1, 1) for _ in loads]
    forwards = [
        ForwardTime(**asdict(load), seconds=device.forward_s(load) * s) for load, s in zip(loads, spread, strict=True)
    ]
    units = [
        UnitTime(kind=kind, tokens=n, seconds=device.unit_s(Unit(kind, n)))
        for kind in ("layer", "head")
        for n in (32, 64, 128, 192, 256)
    ]
    return forwards, units


def profile_of(device: Device, subject: Subject = HERE, noise: float = 0.0) -> Profile:
    forwards, units = measured(device, noise)
    return Profile(
        subject=subject,
        created_at="2026-01-01T00:00:00Z",
        edged_version="0",
        prices=fit_prices(forwards, units),
        overhead_s=0.001,
        error_percent=held_out_error(forwards, units),
        forwards=tuple(forwards),
        units=tuple(units),
    )


def test_a_file_keeps_what_a_rest_costs_and_one_of_an_older_version_has_none(tmp_path: Path) -> None:
    path, profile = tmp_path / "profile.json", profile_of(Device()).model_copy(update={"rest_s": 0.0017})
    profile.write(path)
    assert Profile.read(path) == profile
    older = json.loads(path.read_text())
    del older["rest_s"]
    path.write_text(json.dumps(older))
    assert Profile.read(path).rest_s == 0.0


def test_noise_is_what_single_forwards_scatter_by_and_what_a_chunk_leaves_to_the_next_decode() -> None:
    rng, prices = np.random.default_rng(0), Prices((0.01, 0.0002, 0.0002, 0.0, 0.0, 0.0, 0.0, 0.0), 32, {})
    runs, after_chunk = [], False
    for number in range(2000):
        decodes = number % 3 > 0
        priced_s = 0.01 + 0.0002 * (8 if decodes else 100)
        seconds = priced_s * rng.lognormal(0.0, 0.15) * (1.25 if decodes and after_chunk else 1.0)
        # A neighbour's busy second now and then.
        seconds *= 8.0 if number % 50 == 0 else 1.0
        load = {"decodes": 8} if decodes else {"prefill_tokens": 100}
        runs.append((ForwardTime(**load, seconds=seconds), after_chunk))
        after_chunk = not decodes
    noise = fit_noise(prices, runs)
    assert noise.jitter == pytest.approx(0.15, rel=0.1)
    assert noise.decode_after_chunk == pytest.approx(0.25, abs=0.03)
    assert fit_noise(prices, [run for run in runs if not run[1]]).decode_after_chunk == 0.0


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_prices_agree_with_least_squares_where_none_is_negative(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.uniform(0.5, 1.5, (60, 3)) * (1.0, 1e3, 1e-3)
    seconds = rows @ (rng.uniform(0.5, 2.0, 3) / (1.0, 1e3, 1e-3)) * (1.0 + 0.01 * rng.uniform(-1, 1, 60))
    # The oracle: numpy's least squares over the same relative errors.
    oracle, *_ = np.linalg.lstsq(rows / seconds[:, None], np.ones(60), rcond=None)
    assert least_squares(rows.tolist(), seconds.tolist()) == pytest.approx(oracle, rel=1e-3)


def test_a_price_is_never_negative_and_a_feature_that_was_not_there_has_none() -> None:
    rows = [(1.0, float(n), 0.0) for n in (1, 2, 3, 4)]
    falling = [4.0, 3.0, 2.0, 1.0]
    assert least_squares(rows, falling)[1:] == [0.0, 0.0]


def test_measurements_that_went_wrong_do_not_set_the_prices() -> None:
    rows = [(1.0, float(n)) for n in range(1, 21)]
    seconds = [1.0 + 0.1 * n for n in range(1, 21)]
    seconds[7] *= 20.0
    seconds[12] /= 5.0
    assert least_squares(rows, seconds) == pytest.approx([1.0, 0.1], rel=0.1)


def test_a_grid_of_measurements_gives_a_devices_prices_and_its_knee() -> None:
    device = Device(pass_s=0.03, token_s=0.0001, free_tokens=64)
    forwards, units = measured(device)
    prices = fit_prices(forwards, units)
    assert prices.knee_tokens == 64
    assert prices.forward[2] == pytest.approx(device.token_s, rel=0.02)
    assert prices.units["layer"] == pytest.approx((0.001, device.unit_token_s), rel=0.02)
    assert max(held_out_error(forwards, units).values()) < 1.0


def test_units_get_the_forwards_knee_where_they_have_one() -> None:
    device = Device(pass_s=0.03, token_s=0.0001, free_tokens=128, free_rows=128)
    prices = fit_prices(*measured(device))
    assert (prices.knee_tokens, prices.unit_knee) == (128, 128)
    cost = CostModel.from_profile(profile_of(device), roofline(parameters=10**9, flops_per_s=1e11, bytes_per_s=2e10))
    for rows in (16, 96, 128, 160, 256):
        assert cost.unit_s(Unit("layer", rows)) == pytest.approx(device.unit_s(Unit("layer", rows)), rel=0.02)
    assert fit_prices(*measured(Device(free_tokens=128))).unit_knee == 1


def test_decodes_beside_a_prompt_have_a_price_of_their_own() -> None:
    device = Device(mixed_s=0.004)
    beside_price = fit_prices(*measured(device)).forward[FORWARD_PRICES.index("decodes beside chunks")]
    assert beside_price == pytest.approx(0.004, rel=0.02)
    guess = roofline(parameters=3_000_000_000, flops_per_s=1e11, bytes_per_s=2e10)
    cost, load = CostModel.from_profile(profile_of(device), guess), Load(decodes=8, context=4096)
    beside = replace(load)
    beside.add_chunk(64, 0, finetune=False)
    assert cost.forward_s(beside) == pytest.approx(device.forward_s(beside), rel=0.02)
    assert cost.chunk(load, 0, 500, cost.forward_s(beside) * (1 + 1e-9), finetune=False) == 64


def test_more_tokens_than_go_the_short_way_have_a_price_of_their_own() -> None:
    device = Device(free_tokens=32, past_s=0.01)
    prices = fit_prices(*measured(device))
    assert prices.knee_tokens == 32
    assert prices.forward[FORWARD_PRICES.index("more tokens than the knee")] == pytest.approx(0.01, rel=0.05)
    cost = CostModel.from_profile(profile_of(device), roofline(parameters=10**9, flops_per_s=1e11, bytes_per_s=2e10))
    for tokens in (30, 32, 33, 40):
        load = Load(prefill_tokens=tokens)
        assert cost.forward_s(load) == pytest.approx(device.forward_s(load), rel=0.03)
    # A chunk is as long as the short way takes, until the other one is paid for.
    budget_s = device.forward_s(Load(prefill_tokens=32)) + 0.005
    assert cost.chunk(Load(), 0, 500, budget_s, finetune=False) == 32
    assert cost.chunk(Load(), 0, 500, budget_s + 0.01, finetune=False) > 32


@pytest.mark.parametrize("known", [8, 9])
def test_a_file_of_a_version_that_knew_fewer_prices_is_read_and_the_others_are_learned(
    known: int, tmp_path: Path
) -> None:
    device, path, rng = Device(mixed_s=0.004), tmp_path / "profile.json", random.Random(0)
    profile_of(device).write(path)
    older = json.loads(path.read_text())
    older["prices"]["forward"] = older["prices"]["forward"][:known]
    path.write_text(json.dumps(older))
    profile = Profile.read(path)
    assert profile.prices.forward[known:] == (0.0,) * (len(FORWARD_PRICES) - known)
    cost = CostModel.from_profile(profile, roofline(parameters=3_000_000_000, flops_per_s=1e11, bytes_per_s=2e10))
    load = Load(prefill_tokens=8, decodes=8, context=4096, pairs=32.0)
    missing_s = 0.004 if known == 8 else 0.0
    assert cost.forward_s(load) == pytest.approx(device.forward_s(load) - missing_s, rel=0.02)
    for _ in range(300):
        cost.observe(iteration(device, rng))
    assert cost.forward_s(load) == pytest.approx(device.forward_s(load), rel=0.03)


def test_with_a_profile_the_very_first_iterations_are_predicted_well_and_stay_so() -> None:
    device, chance = Device(noise=0.05), random.Random(4)
    guess = roofline(parameters=3_000_000_000, flops_per_s=1e11, bytes_per_s=2e10)
    cost = CostModel.from_profile(profile_of(device, noise=0.05), guess, "somewhere")
    cold = CostModel(guess)
    for _ in range(20):
        result = iteration(device, chance)
        cost.observe(result)
        cold.observe(result)
    report = cost.report()
    assert report["source"] == "somewhere"
    assert max(report["mape_percent_by_kind"].values()) < 15.0
    errors = [abs(cost.unit_s(unit) / device.unit_s(unit) - 1.0) for unit in (Unit("layer", 64), Unit("head", 200))]
    assert max(errors) < 0.1
    assert cold.mape > 2 * cost.mape


def test_features_that_no_measurement_had_are_guessed() -> None:
    short = [forward for forward in measured(Device())[0] if forward.num_tokens <= 32 and not forward.adapters]
    profile = profile_of(Device()).model_copy(
        update={"forwards": tuple(short), "prices": replace(fit_prices(short, measured(Device())[1]), knee_tokens=32)}
    )
    assert not any(forward.features(profile.prices.knee_tokens)[2] for forward in short)
    guess = roofline(135_000_000, 2e11, 2e10)
    cost = CostModel.from_profile(profile, guess)
    assert cost.token_s == guess.forward[2]
    assert cost.forward_s(Load(decodes=1, adapters=1)) > cost.forward_s(Load(decodes=1))


def test_unit_kinds_that_a_profile_lacks_are_guessed() -> None:
    guess = roofline(parameters=1_000_000, flops_per_s=1e11, bytes_per_s=2e10)
    cost = CostModel.from_profile(profile_of(Device()), guess)
    assert cost.unit_s(Unit("step", 1)) == CostModel(guess).unit_s(Unit("step", 1))


def test_the_file_comes_back_as_it_was_written_and_leaves_no_draft(tmp_path: Path) -> None:
    profile = profile_of(Device())
    path = tmp_path / FOLDER / file_name(HERE)
    profile.write(path)
    assert Profile.read(path) == profile
    assert find_profile("", tmp_path, HERE) == (path, profile)
    assert [file.name for file in path.parent.iterdir()] == ["demo@Board-8-cores.float32.json"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("fingerprint", "beef"), ("device", "Other"), ("dtype", "bfloat16"), ("quantization", "nf4"), ("threads", 8)],
)
def test_a_profile_of_something_else_is_refused_with_both_sides(name: str, value: str | int, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    profile_of(Device(), HERE.model_copy(update={name: value})).write(path)
    with pytest.raises(ProfileError) as error:
        find_profile(str(path), None, HERE)
    assert f'{name} "{value}" where "{getattr(HERE, name)}" runs' in str(error.value)
    assert str(path) in str(error.value)


def test_a_model_of_another_name_but_the_same_weights_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    profile_of(Device(), HERE.model_copy(update={"model": "another"})).write(path)
    assert find_profile(str(path), None, HERE) is not None


def test_a_file_that_is_no_profile_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{"subject": 7}')
    with pytest.raises(ProfileError, match=r"broken\.json.*subject"):
        find_profile(str(path), None, HERE)
    with pytest.raises(ProfileError, match="cannot be read"):
        find_profile(str(tmp_path / "nowhere.json"), None, HERE)
    assert find_profile("", tmp_path, HERE) is None
    assert find_profile("", None, HERE) is None
