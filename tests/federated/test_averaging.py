"""Averages of records, the new start that all boxes make alike, and a folder that PEFT loads."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from peft import PeftModel, get_peft_model_state_dict

from edged.federated.averaging import A, B, mean, moved, new_start, read_start, write_start
from tests.models import tiny_model

NAME = "base_model.model.model.layers.0.self_attn.q_proj"
deltas = st.lists(
    arrays(np.float32, (3, 2), elements=st.floats(-8, 8, width=32)).map(lambda each: {NAME + B: each}),
    min_size=1,
    max_size=12,
)


@given(deltas)
def test_a_mean_is_numpys_in_any_order(records: list[dict[str, np.ndarray]]) -> None:
    found = mean(records)[NAME + B]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.mean([each[NAME + B] for each in records], 0, np.float64), atol=1e-6)
    np.testing.assert_array_equal(found, mean(records[::-1])[NAME + B])


@given(deltas)
def test_records_of_one_kind_average_to_themselves(records: list[dict[str, np.ndarray]]) -> None:
    np.testing.assert_allclose(mean([records[0]] * 7)[NAME + B], records[0][NAME + B], atol=1e-6)


@given(deltas)
@settings(max_examples=20)
def test_a_start_moves_by_the_mean_and_keeps_a(records: list[dict[str, np.ndarray]]) -> None:
    start = new_start("tone", {NAME + A: (2, 5), NAME + B: (3, 2)})
    after = moved(start, mean(records))
    np.testing.assert_array_equal(after[NAME + A], start[NAME + A])
    np.testing.assert_allclose(after[NAME + B], mean(records)[NAME + B])


def test_a_new_start_is_the_same_on_every_box_and_follows_from_the_campaigns_name() -> None:
    shapes = {NAME + A: (64, 100), NAME + B: (30, 64)}
    one, same, other = (new_start(name, shapes) for name in ("tone", "tone", "tune"))
    np.testing.assert_array_equal(one[NAME + A], same[NAME + A])
    assert np.abs(one[NAME + A] - other[NAME + A]).mean() > 0.01
    assert not one[NAME + B].any()
    # Of another version of numpy, too: these are the first numbers of PCG64's stream.
    np.testing.assert_allclose(one[NAME + A][0, :3], FIRST, atol=1e-8)
    bound = 1 / math.sqrt(100)
    assert np.abs(one[NAME + A]).max() <= bound
    assert one[NAME + A].std() == np.float32(one[NAME + A].std())
    assert abs(one[NAME + A].std() - bound / math.sqrt(3)) < 0.002


FIRST = (0.0470585, -0.04791303, -0.03903119)


def test_peft_loads_the_folder_and_has_its_numbers(tmp_path: Path) -> None:
    model = tiny_model()
    linears = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and "layers" in name]
    sizes = {name: model.get_submodule(name).weight.shape for name in linears}
    shapes = {f"base_model.model.{name}{A}": (4, size[1]) for name, size in sizes.items()}
    shapes |= {f"base_model.model.{name}{B}": (size[0], 4) for name, size in sizes.items()}
    start = new_start("tone", shapes)
    rng = np.random.default_rng(0)
    delta = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items() if name.endswith(B)}
    write_start(tmp_path, moved(start, delta), alpha=8.0)
    weights, alpha = read_start(tmp_path)
    assert alpha == 8.0
    loaded = PeftModel.from_pretrained(model, str(tmp_path))
    found = get_peft_model_state_dict(loaded)
    assert found.keys() == weights.keys()
    for name, each in found.items():
        np.testing.assert_array_equal(each.numpy(), weights[name])
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad(), loaded.disable_adapter():
        base = loaded(ids).logits
    with torch.no_grad():
        assert not torch.allclose(loaded(ids).logits, base)
