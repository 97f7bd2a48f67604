"""What is kept of a layer's forward by Algorithm 1, and that nothing else than what was kept is taken for it."""

from __future__ import annotations

import pytest
import torch

from edged.align.dpo.decoder import Branches, LoraParameters, LoraRows
from edged.align.dpo.layout import Piece
from edged.align.dpo.lean import Keep, KeptResults, Recall
from edged.engine.attention.paged import IMPLEMENTATION
from edged.engine.model.layer_access import PagedDecoder
from edged.engine.model.served_model import ServedModel
from edged.settings.load import AlignSettings
from tests.models import tiny_model

TOKENS, RANK = 24, 4


class Layer:
    """The first decoder layer of a tiny model of a kind, with LoRA, on one sequence."""

    def __init__(self, kind: str) -> None:
        base = tiny_model(kind)
        base.requires_grad_(False).set_attn_implementation(IMPLEMENTATION)
        model = ServedModel(base)
        model.attach_lora(AlignSettings(rank=RANK), slots=1)
        self.decoder = PagedDecoder(model, model.new_kv(2, 8))
        leaves = {
            name: (
                torch.randn(RANK, linear.in_features).requires_grad_(),
                torch.randn(linear.out_features, RANK).requires_grad_(),
            )
            for name, linear in model.lora.linears.items()
            if name in self.decoder.layer_linears(0)
        }
        self.rows = [LoraRows(0, TOKENS, LoraParameters(leaves, 1.0, leaves))]
        self.branches = [Branches(0, TOKENS, 0, (Piece(0, TOKENS, 0, None),), None)]
        self.hidden, self.calls = self.decoder.begin(torch.arange(TOKENS), torch.arange(TOKENS))

    def run(self, mode: Keep | Recall, tokens: int = TOKENS) -> torch.Tensor:
        hidden = self.hidden[:tokens].clone().requires_grad_()
        with mode:
            return self.decoder.run_branches(0, hidden, self.calls[0], self.branches, self.rows)[0]


@pytest.mark.parametrize(("kind", "left_out"), [("llama", 1), ("gemma2", 0)])
def test_a_last_product_is_left_out_where_it_is_only_added(kind: str, left_out: int) -> None:
    # Gemma's is normed, and the norm's backward reads it.
    kept = KeptResults(RANK)
    Layer(kind).run(Keep(kept))
    products = [result for _, result in kept.results if isinstance(result, torch.Tensor)]
    assert len(products) == 7
    assert sum(product.device.type == "meta" for product in products) == left_out
    assert all(tensor.device.type == "cpu" for tensor in kept.tensors)


def test_what_is_kept_is_the_results_of_products_and_attention() -> None:
    layer, kept = Layer("llama"), KeptResults(RANK)
    layer.run(Keep(kept))
    found, shapes = Recall(kept), [linear.out_features for linear in layer.decoder._model.lora.linears.values()]
    widths = sorted(tensor.shape[-1] for tensor in kept.tensors if tensor.dim() == 2)
    assert widths == sorted(shapes[:6])
    layer.run(found)
    with pytest.raises(RuntimeError, match=r"ran aten\.mm\.default in its backward where its forward had run None"):
        layer.run(found)
