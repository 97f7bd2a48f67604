"""What is kept of a layer's forward by Algorithm 1, and that nothing else than what was kept is taken for it."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch._functorch import config as functorch
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy

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
    with pytest.raises(
        RuntimeError, match=r"ran aten\.mm\.default of .* in its backward where its forward had run None"
    ):
        layer.run(found)


def test_a_kept_result_has_no_graph_that_would_keep_the_rest() -> None:
    layer, kept, activations = Layer("llama"), KeptResults(RANK), []
    act = layer.decoder._model.layers[0].mlp.act_fn
    act.register_forward_hook(lambda _act, _args, out: activations.append(weakref.ref(out)))
    out = layer.run(Keep(kept)).detach()
    assert out.isfinite().all()
    assert all(tensor.grad_fn is None for tensor in kept.tensors)
    assert [activation() for activation in activations] == [None]


def saved_by_min_cut(layer: Layer) -> list[torch.Tensor]:
    """What the min cut of torch's partitioner saves of the layer's graph, beside weights, if no product is computed
    again; tensors without memory."""
    (part,) = layer.rows
    matrices = [matrix for own in part.leaves.weights.values() for matrix in own]

    def run(hidden: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor]:
        weights = dict(zip(part.leaves.weights, zip(leaves[::2], leaves[1::2], strict=True), strict=True))
        rows = [LoraRows(0, TOKENS, LoraParameters(weights, {}, weights))]
        branches = [Branches(0, TOKENS, 0, layer.branches[0].pieces, None)]
        return (layer.decoder.run_branches(0, hidden, layer.calls[0], branches, rows)[0].clone(),)

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = [mode.from_tensor(each) for each in (layer.hidden.clone().requires_grad_(), *matrices)]
    joint = aot_export_joint_simple(run, tuple(inputs), trace_joint=True)
    for node in joint.graph.nodes:
        if "scaled_dot_product" in str(node.target):
            # The partitioner knows the attention of GPUs alone as one that takes time.
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    # Without the rules that spare time: no product is computed again, and all else may be.
    rules = ("used_far_apart", "long_fusible_chains", "materialized_backward", "not_in_allowlist", "reductions")
    with functorch.patch({f"ban_recompute_{rule}": False for rule in rules} | {"recompute_views": True}):
        forward, _ = min_cut_rematerialization_partition(joint, None, num_fwd_outputs=1)
    (output,) = forward.graph.find_nodes(op="output")
    saved = {node for node in output.args[0][1:] if node.op == "call_function" or node.name == "primals_1"}
    return [node.meta["val"] for node in saved]


# Gemma 2's attention, with a soft cap, is products that `lean` computes again.
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "phi3"])
def test_it_is_what_the_least_cut_of_the_layers_graph_keeps_but_for_low_rank_rows(kind: str) -> None:
    layer, kept = Layer(kind), KeptResults(RANK)
    layer.run(Keep(kept))
    storages = {tensor.untyped_storage() for tensor in (layer.hidden, *kept.tensors)}
    lean, cut = sum(storage.nbytes() for storage in storages), sum(tensor.nbytes for tensor in saved_by_min_cut(layer))
    # LoRA's rows of its rank are the only products that `lean` computes twice.
    assert cut == lean + len(layer.rows[0].leaves.weights) * TOKENS * RANK * 4


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = functional.linear(x, torch.ones(16, 16))
    y.add_(1.0)
    return y * y


@pytest.mark.parametrize("shape", [(8, 16), (1, 8, 16)])
def test_a_result_that_the_layer_changes_in_place_is_kept_as_it_was(shape: tuple[int, ...]) -> None:
    # Of three dimensions the layer's tensor is an unsafe view of the product, which counts its own writes.
    x, kept = torch.randn(shape, requires_grad=True), KeptResults(RANK)
    with Keep(kept):
        out = in_place(x)
    with Recall(kept):
        again = in_place(x)
    assert torch.equal(again, out)
    assert torch.equal(*(torch.autograd.grad(result.sum(), x)[0] for result in (again, in_place(x))))
    with Keep(kept := KeptResults(RANK)):
        # What nothing reads is left out, changed or not.
        functional.linear(x, torch.ones(16, 16)).add_(1.0)
    assert kept.tensors == []


def test_an_error_of_a_layer_is_not_covered_by_one_of_what_was_kept() -> None:
    x, kept = torch.randn(8, 16, requires_grad=True), KeptResults(RANK)
    with pytest.raises(ZeroDivisionError), Keep(kept):
        raise ZeroDivisionError(in_place(x))
    with pytest.raises(ZeroDivisionError), Recall(kept):
        raise ZeroDivisionError


def test_a_backward_that_runs_less_or_on_other_shapes_is_an_error() -> None:
    layer, kept = Layer("llama"), KeptResults(RANK)
    layer.run(Keep(kept))
    with pytest.raises(RuntimeError, match=r"did not run aten"), Recall(kept):
        pass
    x, weight = torch.randn(8, 16), torch.ones(16, 16)
    with Keep(kept := KeptResults(RANK)):
        functional.linear(x, weight).sin()
    for other in (x[:4], x.double()):
        with (
            pytest.raises(RuntimeError, match=r"forward had run aten\.\w*mm\.default of .*\[8, 16\] torch\.float32"),
            Recall(kept),
        ):
            functional.linear(other, weight.to(other.dtype))
