"""`edged profile` on a small model, and the engine that starts with what it wrote."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from edged.align.feedback import outliers
from edged.cli.main import cli
from edged.engine.engine import Engine
from edged.profiler.engine_time import engine_time
from edged.profiler.profile import profile_device
from edged.profiler.recorder import ReplayRecorder
from edged.scheduler.cost.profile import Profile
from edged.settings.load import load_settings
from tests.models import save_tiny

SETTINGS: dict[str, Any] = {"model.device": "cpu", "cache.page_size": 8, "cache.memory_mb": 4}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """(model, data folder, what the command printed)."""
    folder = tmp_path_factory.mktemp("profile")
    model = save_tiny(folder / "tiny")
    config = folder / "edged.toml"
    config.write_text('[model]\ndevice = "cpu"\n[cache]\npage_size = 8\nmemory_mb = 4\n')
    command = ["profile", "-m", str(model), "-c", str(config), "--data-dir", str(folder / "data"), "--quick", "--json"]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    return model, folder / "data", json.loads(result.output[result.output.index("{") :])


def test_a_profile_names_what_was_measured_and_has_prices_for_all_of_it(
    measured: tuple[Path, Path, dict[str, Any]],
) -> None:
    _, data, printed = measured
    profile = Profile.read(Path(printed["path"]))
    assert Path(printed["path"]).parent == data / "profiles"
    assert profile.subject.model == "tiny"
    assert "cores" in profile.subject.device
    assert profile.prices.units.keys() >= {"graph", "grad", "head", "score", "layer", "step"}
    assert {unit.tokens for unit in profile.units if unit.kind == "layer"} >= {16, 32, 64, 128}
    assert {forward.kind for forward in profile.forwards} == {"prefill", "decode", "mixed", "finetune"}
    assert max(forward.adapters for forward in profile.forwards) > 1
    assert 0.0 < profile.overhead_s < 0.1
    assert profile.rest_s == printed["rest_s"] < 0.1
    assert profile.memory["forward"].measured_bytes > 0
    assert profile.device_memory is not None
    assert profile.device_memory.kind == "cpu"
    assert 0 < profile.device_memory.available_bytes < profile.device_memory.total_bytes
    assert profile.error_percent.keys() >= {"prefill", "decode"}
    assert 0.0 < profile.noise.jitter < 2.0


@pytest.mark.slow
def test_its_random_pairs_are_never_held_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Steps so large that such pairs soon look poisoned.
    monkeypatch.setattr(outliers, "SUSPICIOUS_DEVIATIONS", 1e-9)
    monkeypatch.setattr(outliers, "BURST_SHARE", 0.01)
    settings = load_settings(environ={}, overrides={**SETTINGS, "align.learning_rate": 0.1})
    profile_device(settings, save_tiny(tmp_path / "tiny"), tmp_path, quick=True)
    assert "quarantined" not in caplog.text


@pytest.mark.slow
def test_what_a_rest_costs_is_measured(tmp_path: Path) -> None:
    recorder = ReplayRecorder()
    settings = load_settings(environ={}, overrides=SETTINGS)
    parts = Engine(settings, save_tiny(tmp_path / "tiny"), recorder.deliver)
    run, ended_s = parts.runner.run, time.monotonic()

    def falls_asleep(*arguments: Any, **named: Any) -> Any:
        nonlocal ended_s
        if time.monotonic() - ended_s > 0.04:
            time.sleep(0.3)
        work = run(*arguments, **named)
        ended_s = time.monotonic()
        return work

    parts.runner.run = falls_asleep  # type: ignore[method-assign]
    told: list[str] = []
    overhead_s, rest_s = engine_time(parts, recorder, quick=True, progress=lambda _done, _all, what: told.append(what))
    assert rest_s > 0.2
    assert overhead_s < 0.2
    assert "8 tokens after a rest" in told


def test_the_engine_starts_with_the_profile_of_its_data_folder(measured: tuple[Path, Path, dict[str, Any]]) -> None:
    model, data, printed = measured
    parts = Engine(load_settings(environ={}, overrides=SETTINGS), model, data_dir=data)
    assert parts.status()["cost_model"]["source"] == printed["path"]
    assert parts.scheduler.cost.token_s == pytest.approx(max(printed["prices"]["forward"][2], 1e-9))


def test_a_profile_of_another_model_is_refused_in_one_line_and_latencies_are_guessed(
    measured: tuple[Path, Path, dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, printed = measured
    other = save_tiny(tmp_path / "other", hidden_size=128)
    settings = load_settings(environ={}, overrides={**SETTINGS, "scheduler.profile": printed["path"]})
    with caplog.at_level(logging.WARNING, logger="edged.engine"):
        parts = Engine(settings, other, data_dir=tmp_path / "data")
    (line,) = [record.getMessage() for record in caplog.records if "profile" in record.getMessage()]
    for side in ("tiny", "other", "fingerprint"):
        assert side in line
    assert parts.status()["cost_model"]["source"] == "guess"


def test_a_model_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["profile", "-m", str(tmp_path / "nowhere")])
    assert result.exit_code == 1
    assert "nowhere" in result.output
