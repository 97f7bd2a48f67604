"""The cost model's first prices, where nothing was measured."""

from __future__ import annotations

import pytest

from edged.engine import build
from edged.engine.model.served_model import ServedModel
from edged.engine.native.library import FEW_ROWS, kernels
from edged.scheduler.cost.model import CostModel
from edged.scheduler.cost.prices import Load
from edged.settings.load import ModelSettings
from tests.models import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel.load(save_tiny(tmp_path_factory.mktemp("tiny")), ModelSettings(device="cpu"))


def last_token_s(model: ServedModel, tokens: int) -> float:
    """What the last of so many tokens adds to a guessed forward."""
    cost = CostModel(build.guess_of(model))
    return cost.forward_s(Load(prefill_tokens=tokens)) - cost.forward_s(Load(prefill_tokens=tokens - 1))


@pytest.mark.skipif(kernels() is None, reason="there are no compiled kernels")
def test_a_step_is_guessed_to_cost_more_at_once_where_the_kernels_end(model: ServedModel) -> None:
    assert last_token_s(model, FEW_ROWS) == pytest.approx(last_token_s(model, FEW_ROWS - 1))
    assert last_token_s(model, FEW_ROWS + 1) > 2 * last_token_s(model, FEW_ROWS + 2) > 0


def test_without_kernels_the_number_of_tokens_where_they_end_is_like_any(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "kernels", lambda: None)
    around = [last_token_s(model, FEW_ROWS + beside) for beside in (-1, 0, 1, 2)]
    assert around == pytest.approx([around[0]] * 4)
