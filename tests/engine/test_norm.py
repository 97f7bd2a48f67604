"""Norms at once give transformers' own numbers, and only where they are RMS norms."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from edged.engine.norm import fuse_norms
from tests.models import tiny_model


def made(kind: type[nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    norm = kind(48, eps=1e-5).to(dtype)
    norm.weight.data.normal_(1.0, 0.3, generator=torch.Generator().manual_seed(1))  # type: ignore[union-attr, operator]
    return norm.requires_grad_(False)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_a_norm_at_once_is_the_models_own(kind: type[nn.Module]) -> None:
    plain, fused = made(kind), made(kind)
    x = torch.randn(1, 7, 3, 48) * torch.logspace(-5, 3, 7)[:, None, None]
    assert fuse_norms(nn.Sequential(fused)) == 1
    with torch.inference_mode():
        torch.testing.assert_close(fused(x), plain(x), atol=1e-6, rtol=1e-5)


def test_gradients_go_through_the_models_own_forward() -> None:
    plain, fused = made(LlamaRMSNorm), made(LlamaRMSNorm)
    fuse_norms(nn.Sequential(fused))
    x = torch.randn(1, 5, 48).requires_grad_()
    assert torch.equal(fused(x), plain(x))
    (wanted,) = torch.autograd.grad(plain(x).square().sum(), x)
    (got,) = torch.autograd.grad(fused(x).square().sum(), x)
    assert torch.equal(got, wanted)


def test_what_computes_something_else_is_left_alone() -> None:
    others = [made(Gemma2RMSNorm), made(LlamaRMSNorm, torch.bfloat16), nn.LayerNorm(48)]
    assert fuse_norms(nn.Sequential(*others)) == 0
    assert not any("forward" in vars(norm) for norm in others)


def test_all_norms_of_a_llama_are_found_and_it_answers_as_before() -> None:
    model = tiny_model().requires_grad_(False)
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        wanted = model(ids).logits
        assert fuse_norms(model) == 2 * model.config.num_hidden_layers + 1
        torch.testing.assert_close(model(ids).logits, wanted, atol=1e-5, rtol=1e-5)
