"""Weights that are numbers of 16 bits are read as such: half the bytes, and every product the same to the last bit."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import psutil
import pytest
import torch
import torch.nn.functional as F

from edged.engine.engine import Engine
from edged.engine.model.cpu_layers import shorten_layers
from edged.engine.model.packed_linear import PackedLinear
from edged.engine.model.served_model import ServedModel
from edged.engine.native.fp16_weights import narrow
from edged.engine.native.library import FEW_ROWS, LinearParts, group_of, kernels, why_no_kernels
from edged.settings.load import Settings
from tests.engine.model.test_cpu_layers import answers, served_model
from tests.models import tiny_model

compiled = pytest.mark.skipif(kernels() is None, reason=why_no_kernels())


def weight_of(dtype: torch.dtype, outputs: int, inputs: int) -> torch.Tensor:
    """Random numbers of `dtype` in float32, of all sizes that a float16 below 128 has, and zeros of both signs."""
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs) * 2.0 ** torch.randint(-24, 4, (outputs, inputs))
    weight[0, :6] = torch.tensor([0.0, -0.0, 2.0**-24, -(2.0**-24), 127.9375, -127.9375])
    return weight.to(dtype).float()


def parts_of(model: ServedModel) -> list[LinearParts]:
    """Of all packed linears."""
    return [module.parts for module in model.model.modules() if isinstance(module, PackedLinear)]


@compiled
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9, FEW_ROWS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), [((8,), 16), ((7, 3, 300), 64), ((1,), 48)])
def test_products_are_the_same_to_the_last_bit(
    outputs: tuple[int, ...], inputs: int, dtype: torch.dtype, rows: int
) -> None:
    library = kernels()
    assert library is not None
    weights = [weight_of(dtype, size, inputs) for size in outputs]
    x = torch.randn(rows, inputs)
    found = []
    for copies in ([narrow(weight) for weight in weights], [None] * len(weights)):
        group = group_of([LinearParts(weight, None, copy) for weight, copy in zip(weights, copies, strict=True)])
        out = torch.empty(rows, sum(outputs))
        library.edged_product(ctypes.byref(group), x.data_ptr(), rows, out.data_ptr(), out.shape[1], 2)
        found.append(out)
    assert all(narrow(weight) is not None for weight in weights)
    assert torch.equal(*found)
    wanted = torch.cat([F.linear(x.double(), weight.double()) for weight in weights], 1).float()
    torch.testing.assert_close(found[0], wanted, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize(
    "weight",
    [
        torch.full((4, 16), 1.0 + 2.0**-11),
        torch.full((4, 16), 1.0 + 2.0**-9) * 128.0,
        torch.full((4, 16), 1.0 + 2.0**-9) * 2.0**-25,
        torch.ones(4, 24),
    ],
    ids=["float32", "a large float16", "smaller than a float16", "of another size"],
)
def test_others_are_left_as_they_are(weight: torch.Tensor) -> None:
    assert narrow(weight) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_number_in_the_last_row_decides(dtype: torch.dtype) -> None:
    weight = weight_of(dtype, 600, 32)
    assert narrow(weight) is not None
    weight[-1, -1] = 1.0 + 2.0**-22
    assert narrow(weight) is None


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slots", [[1], [0, 1, 1]])
def test_a_model_answers_the_same_to_the_last_bit(slots: list[int], dtype: torch.dtype) -> None:
    found = []
    for in_16_bits in (True, False):
        model = served_model(packed=False, dtype=dtype)
        assert model.pack_weights(in_16_bits=in_16_bits) == ""
        assert shorten_layers(model) == ""
        assert [part.narrow is not None for part in parts_of(model)] == [in_16_bits] * (7 * 3 + 1)
        found.append(answers(model, slots))
    assert torch.equal(*found)


@compiled
@pytest.mark.parametrize("setting", [True, False])
def test_the_environment_decides_and_the_log_says_it(
    setting: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGED_KERNELS", f"fp16_weights={setting}")
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    settings = Settings.model_validate({"model": {"device": "cpu"}})
    with caplog.at_level(logging.INFO, "edged.engine"):
        parts = Engine(settings, tmp_path / "model", data_dir=tmp_path / "data")
    assert {part.narrow is not None for part in parts_of(parts.model)} == {setting}
    assert ("22 of 22 weights are numbers of 16 bits" in caplog.text) == setting


@compiled
def test_memory_for_one_copy_is_not_enough_for_two(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served_model(packed=False, dtype=torch.bfloat16)
    weights = sum(linear.weight.nbytes for linear in model.model.modules() if type(linear) is torch.nn.Linear)
    free = psutil.virtual_memory()._replace(available=5 * weights)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with caplog.at_level(logging.INFO, "edged.engine"):
        assert model.pack_weights() == ""
    assert "weights are not read in 16 bits: copies take " in caplog.text
    assert {part.narrow for part in parts_of(model)} == {None}
