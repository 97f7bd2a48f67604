"""`[fairness]`: weights by name and by the beginning of a name, from a file and from the environment."""

from __future__ import annotations

import tomllib

import pytest

from edged.settings.load import ConfigError, FairnessSettings, Settings, load_settings
from edged.settings.toml import to_toml


def test_a_weight_is_that_of_the_name_or_of_its_longest_beginning() -> None:
    weights = {"ann": 2.0, "cam*": 0.5, "camera-*": 0.25, "camera-1": 4.0}
    weight = FairnessSettings(weights=weights).weight
    assert [weight(user) for user in ("ann", "cam", "camera-2", "camera-1", "bob")] == [2.0, 0.5, 0.25, 4.0, 1.0]


def test_weights_come_from_the_environment_as_json() -> None:
    environ = {"EDGED_FAIRNESS__WEIGHTS": '{"ann": 2}'}
    assert load_settings(environ=environ).fairness.weights == {"ann": 2.0}
    with pytest.raises(ConfigError, match=r"fairness\.weights.*no JSON"):
        load_settings(environ={"EDGED_FAIRNESS__WEIGHTS": "{"})


def test_weights_are_written_as_they_can_be_read_again() -> None:
    settings = Settings.model_validate({"fairness": {"weights": {"ann": 2.0, "camera*": 0.5}}})
    assert tomllib.loads(to_toml(settings))["fairness"]["weights"] == {"ann": 2.0, "camera*": 0.5}
