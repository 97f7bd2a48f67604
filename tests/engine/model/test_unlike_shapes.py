"""Models whose keys are longer than their values, whose layers have heads of unlike shapes, or whose heads have sinks,
are served exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.models import Row, examine
from benchmarks.support.architectures import ARCHITECTURES
from edged.align.adapters.adapter import AdapterState
from edged.engine.attention.attention_stats import AttentionStats
from edged.engine.attention.base import AttentionCall
from edged.engine.kv.store import KvStore
from edged.engine.model.loading import ModelRefused
from edged.engine.model.served_model import ServedModel
from edged.settings.load import ModelSettings

KNOWN = {each.name: each for each in ARCHITECTURES}


def examined(name: str, monkeypatch: pytest.MonkeyPatch) -> Row:
    """The row of docs/models.md: answers and gradients beside transformers' own."""
    # The examination replaces it.
    monkeypatch.setattr(AdapterState, "step", AdapterState.step)
    return examine(KNOWN[name])


@pytest.mark.parametrize(
    "name",
    [
        "glm4_moe_lite",
        pytest.param("minicpm3", marks=pytest.mark.slow),
        "gemma4_text (31B)",
        pytest.param("gemma4_text (26B-A4B)", marks=pytest.mark.slow),
        "gpt_oss",
        "mimo_v2_flash",
        pytest.param("granite_swa", marks=pytest.mark.slow),
    ],
)
def test_short_values_unlike_heads_and_sinks_are_served_and_trained_as_transformers_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = examined(name, monkeypatch)
    assert (row.served, row.trained) == ("yes", "yes"), row
    assert max(row.logp_nats, row.gradient) < 1e-4


def test_layers_that_read_the_keys_of_earlier_ones_are_served_without_a_copy_and_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = examined("gemma4 (as released)", monkeypatch)
    assert (row.served, row.trained) == ("yes", "yes"), row
    assert max(row.logp_nats, row.gradient) < 1e-4
    KNOWN["gemma4 (as released)"].save(tmp_path)
    model = ServedModel.load(tmp_path, ModelSettings(device="cpu"))
    # Layers 0 and 1 alone: two heads of 16 numbers and two of 32.
    assert model.page_bytes(1) == 2 * 4 * (2 * 16 + 2 * 32)


def test_a_sink_of_minus_infinity_is_none_and_one_that_is_no_number_is_refused(tmp_path: Path) -> None:
    KNOWN["gpt_oss"].save(tmp_path)
    tensors, settings = load_file(tmp_path / "model.safetensors"), ModelSettings(device="cpu")
    sinks = tensors["model.layers.1.self_attn.sinks"]
    sinks[0] = -torch.inf
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    # At start it is compared with transformers' own forward.
    assert ServedModel.load(tmp_path, settings).has_sinks
    sinks[2] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelRefused, match="the sinks of layer 1 are not numbers: download the checkpoint again"):
        ServedModel.load(tmp_path, settings)


def test_what_a_sink_takes_counts_for_no_row() -> None:
    kv = KvStore(2, 4, 1, 1, 8, torch.float32, torch.device("cpu"))
    watch = AttentionStats(kv, 0)
    watch.begin(1, 4)
    query, keys = torch.randn(2, 8), torch.randn(1, 4, 8)
    sinks = torch.tensor([1.0, -torch.inf])
    watch.see(AttentionCall(0, 0.5, sinks=sinks), query, query, keys, torch.tensor([4]))
    scores = torch.cat((0.5 * query @ keys[0].T, sinks[:, None]), -1).softmax(-1)
    torch.testing.assert_close(watch.shares[0, 0, :4], scores[:, :4].mean(0))
