"""LoRA is tried at start: what would fail in a request or a step is told before either comes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from edged.engine import lora_selftest
from edged.engine.attention.paged import IMPLEMENTATION
from edged.engine.lora_selftest import selftest_lora, selftest_once
from edged.engine.model.served_model import ServedModel
from edged.settings.load import AlignSettings
from tests.models import tiny_model

ALIGN = AlignSettings(rank=4, loss_threshold=0.7)


class Wrapped(nn.Module):
    """An MLP in the place of a decoder layer's, changed by a test."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.inner = mlp
        self.extra = nn.Linear(64, 8, bias=False)


class RanksAlone(Wrapped):
    """Uses a linear only for its ranks, through which no gradient passes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * (1 + 0.1 * self.extra(x).argmax(-1, keepdim=True))


class CutsGradient(Wrapped):
    """Passes no gradient to its input if it is called with one: not what autograd of the whole gives."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        alone = x.shape[1] != 8 and x.shape[1] != 9
        return self.inner(x.detach() if alone else x)


class FailsWithGradient(Wrapped):
    """Fails where a step would compute it alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad and x.shape[1] not in (8, 9):
            raise TypeError("no gradient for you")
        return self.inner(x)


class RefusesModes(Wrapped):
    """Fails where its operators are watched, as the forward of a lean step alone does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _len_torch_dispatch_stack():
            raise TypeError("not under a mode")
        return self.inner(x)


class TwoValues(Wrapped):
    """Reads the adapted linear's output and its input's size as other than plain rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projection = self.inner.down_proj
        if not isinstance(projection, nn.Linear):
            raise AttributeError("this needs an nn.Linear")
        return self.inner(x)


def served(kind: type[Wrapped] | None, dtype: torch.dtype = torch.float32, **changes: Any) -> ServedModel:
    base = tiny_model(**changes).to(dtype)
    if kind is not None:
        base.model.layers[1].mlp = kind(base.model.layers[1].mlp).to(dtype)
    base.requires_grad_(False).set_attn_implementation(IMPLEMENTATION)
    model = ServedModel(base)
    model.attach_lora(ALIGN, 3)
    return model


def tried(kind: type[Wrapped] | None, dtype: torch.dtype = torch.float32, **changes: Any) -> ServedModel:
    model = served(kind, dtype, **changes)
    selftest_lora(model, ALIGN, 3)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_decoder_passes_whatever_its_settings(dtype: torch.dtype) -> None:
    model = tried(None, dtype)
    assert model.trainable_error == ""
    assert len(model.lora.linears) == 3 * 7


def test_a_linear_that_gets_no_gradient_is_not_adapted() -> None:
    model = tried(RanksAlone)
    assert model.trainable_error == ""
    assert "model.layers.1.mlp.inner.down_proj" in model.lora.linears
    assert "model.layers.1.mlp.extra" not in model.lora.linears
    assert type(model.model.get_submodule("model.layers.1.mlp.extra")) is nn.Linear


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (CutsGradient, r"is served, not trained: a DPO step's gradient differs from autograd's by 0\.\d+"),
        (FailsWithGradient, "is served, not trained: the self-test ended with TypeError: no gradient for you"),
    ],
)
def test_a_step_that_would_fail_or_be_wrong_is_the_reason_not_to_train(kind: type[Wrapped], reason: str) -> None:
    model = tried(kind)
    assert re.search(reason, model.trainable_error)
    assert model.lora.linears


def test_a_model_that_cannot_keep_lean_results_alone_is_trained_without_them(caplog: pytest.LogCaptureFixture) -> None:
    model = tried(RefusesModes)
    assert model.trainable_error == ""
    assert not model.shape.keeps_lean
    assert "the self-test ended with TypeError: not under a mode" in caplog.text
    assert tried(None).shape.keeps_lean


def test_where_requests_with_an_adapter_would_fail_the_base_alone_is_served() -> None:
    model = tried(TwoValues)
    assert "is served without adapters, and not trained: with them the self-test ended with AttributeError" in (
        model.trainable_error
    )
    assert not model.lora.linears
    assert all("base" not in name for name, _ in model.model.named_modules())


DEVICE = "a processor"


@pytest.fixture
def tests_run(monkeypatch: pytest.MonkeyPatch) -> list[ServedModel]:
    """The models that were tested."""
    run: list[ServedModel] = []

    def noted(model: ServedModel, *arguments: Any) -> None:
        run.append(model)
        selftest_lora(model, *arguments)

    monkeypatch.setattr(lora_selftest, "selftest_lora", noted)
    return run


@pytest.mark.parametrize("kind", [None, RanksAlone])
def test_a_test_that_was_passed_is_not_run_again(
    kind: type[Wrapped] | None, tests_run: list[ServedModel], tmp_path: Path
) -> None:
    models = [served(kind) for _ in range(2)]
    for model in models:
        selftest_once(model, ALIGN, 3, tmp_path, DEVICE)
    assert models[0] in tests_run
    assert models[1] not in tests_run
    assert models[0].lora.linears.keys() == models[1].lora.linears.keys()
    assert models[0].adaptable == models[1].adaptable


@pytest.mark.parametrize(
    "change",
    [
        *({"rank": 8}, {"target_modules": ["q_proj"]}, {"dtype": torch.bfloat16}, {"rms_norm_eps": 1e-3}, {"seed": 1}),
        *({"file": "{"}, {"_code": "other"}, {"_installed": ["torch-3.dist-info"]}, {"device": "another processor"}),
    ],
    ids=lambda change: next(iter(change)),
)
def test_it_is_run_again_for_whatever_else_it_would_be_of(
    change: dict[str, Any], tests_run: list[ServedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    selftest_once(served(None), ALIGN, 3, tmp_path, DEVICE)
    (file,) = tmp_path.iterdir()
    file.write_text(change.get("file", file.read_text()))
    align = ALIGN.model_copy(update={key: value for key, value in change.items() if key in ("rank", "target_modules")})
    of_model = ("dtype", "rms_norm_eps", "seed")
    model = served(None, **{key: value for key, value in change.items() if key in of_model})
    model.attach_lora(align, 3)
    for name in ("_code", "_installed"):
        if name in change:
            monkeypatch.setattr(lora_selftest, name, lambda *_: next(iter(change.values())))
    selftest_once(model, align, 3, tmp_path, change.get("device", DEVICE))
    assert tests_run[1:] == [model]


@pytest.mark.parametrize("kind", [TwoValues, CutsGradient, RefusesModes])
def test_one_that_was_not_passed_whole_is_run_again(
    kind: type[Wrapped], tests_run: list[ServedModel], tmp_path: Path
) -> None:
    for _ in range(2):
        model = served(kind)
        selftest_once(model, ALIGN, 3, tmp_path, DEVICE)
        assert model.trainable_error or not model.shape.keeps_lean
    assert len(tests_run) == 2
    assert not list(tmp_path.iterdir())
