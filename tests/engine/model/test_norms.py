"""Norms that torch computes in one kernel are those of the model; others stay."""

import pytest
import torch

from edged.engine.model.norms import fuse_norms
from tests.models import ARCHITECTURES, DEVICE, tiny_model


def logits(kind: str, dtype: torch.dtype, fused: bool) -> tuple[torch.Tensor, int]:
    model = tiny_model(kind).to(DEVICE, dtype)
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "weight"):
            drawn = torch.empty(module.weight.shape).uniform_(0.5, 2.0, generator=generator)
            module.weight.data.copy_(drawn)
    count = fuse_norms(model, dtype) if fused else 0
    with torch.inference_mode():
        return model(torch.arange(3, 60, device=DEVICE)[None]).logits.float(), count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_model_answers_as_well_as_with_its_own_norms(kind: str, dtype: torch.dtype) -> None:
    exact, _ = logits(kind, torch.float32, False)
    own, _ = logits(kind, dtype, False)
    got, count = logits(kind, dtype, True)
    assert (got - exact).norm() <= 1.3 * (own - exact).norm() + 1e-5 * exact.norm()
    # Gemma's add 1 to their weights, which torch's does not.
    assert (count == 0) == kind.startswith("gemma")
