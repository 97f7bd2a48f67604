"""What a layer launches on CUDA is counted on any machine."""

from __future__ import annotations

import pytest
import torch

from benchmarks.engine.launches import LaunchCount, layer_launches

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's kernels are interpreted where no GPU is")


def test_views_and_allocations_launch_nothing_and_composed_operations_count_as_their_parts() -> None:
    x, weight = torch.ones(3, 4), torch.ones(4)
    with torch.inference_mode(), LaunchCount().with_triton() as count:
        torch.empty_like(x).view(-1)[1:].fill_(1.0)
        x.float().reshape(4, 3).t().contiguous()
        torch.nn.functional.rms_norm(x @ x.t() @ x, (4,), weight)
    assert count.names == {"fill_.Scalar": 1, "clone": 1, "mm": 2, "rms_norm": 1}


def test_a_layers_triton_launches_are_counted_beside_its_operations() -> None:
    launches = layer_launches("llama", fused=False)
    assert launches["base"]["_attend_part"] == launches["base"]["_join_parts"] == 1
    assert launches["base"]["linear"] == 7
    # A launch of each kernel for q, k and v, for o, for gate and up, and for down.
    assert launches["adapted"] - launches["base"] == {"_shrink": 4, "_expand": 4}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_a_fused_layer_launches_at_most_12_kernels_and_with_adapters_4_more(kind: str) -> None:
    launches = layer_launches(kind, fused=True)
    assert 0 < launches["base"].total() <= 12
    assert launches["adapted"].total() - launches["base"].total() <= 4
