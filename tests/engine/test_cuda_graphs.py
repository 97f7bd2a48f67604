"""Captured decode iterations give the tokens that launches give, in batches of every size.

CUDA graphs need a GPU. Without one the recordings are calls of the same code over the same fixed tensors, with Triton's
kernels in its interpreter: what a graph would replay, launched again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from edged.engine.attention.packed_batch import Segment, pack
from edged.engine.attention.paged import IMPLEMENTATION, attention_over, attention_pass
from edged.engine.attention.selection import Backends
from edged.engine.kv.state import ZEROS
from edged.engine.kv.store import KvStore
from edged.engine.lora.segments import NO_SLOT
from edged.engine.model.served_model import ServedModel
from edged.engine.sampling.params import Sampling, SamplingRow, TokenCounts
from edged.engine.sampling.sampler import sample
from edged.settings.load import AlignSettings
from edged.text.grammar import Constraint, GrammarMatcher
from tests.engine.sampling.test_grammars import compiled
from tests.models import STATEFUL, tiny_model

pytest.importorskip("triton")
from edged.engine import cuda_graphs
from edged.engine.cuda_graphs import (
    CudaGraphRecorder,
    DecodeGraphs,
    OutOfGraphMemory,
    Replay,
    is_too_much,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE, WIDTH, SLOTS = 4, 16, 4
CONTEXTS = [9, 3, 0, 21, 14]


class Again:
    """Recordings that are made by running again; those in `too_large` (by number) find no memory."""

    def __init__(self, too_large: tuple[int, ...] = ()) -> None:
        self.memory_bytes = 0
        self._too_large, self._made = too_large, 0

    def record(self, run: Replay) -> Replay:
        self._made += 1
        if self._made in self._too_large:
            raise OutOfGraphMemory("no room")
        run()
        return run


def recorder() -> CudaGraphRecorder | Again:
    return CudaGraphRecorder(DEVICE, 1 << 30) if DEVICE.type == "cuda" else Again()


class Rig:
    """A small model with adapters in its slots, and sequences whose contexts are computed."""

    def __init__(self, kind: str) -> None:
        model = tiny_model(kind).to(DEVICE)
        model.set_attn_implementation(IMPLEMENTATION)
        self.model = ServedModel(model)
        self.model.attach_lora(AlignSettings(rank=4), SLOTS)
        self.model.lora.runs.kernel = "triton"
        generator = torch.Generator().manual_seed(1)
        for slot in range(SLOTS):
            weights = {
                name: (
                    torch.randn(4, linear.in_features, generator=generator) * 0.2,
                    torch.randn(linear.out_features, 4, generator=generator) * 0.2,
                )
                for name, linear in self.model.lora.linears.items()
            }
            self.model.lora.load(slot, weights, dict.fromkeys(weights, 1.0))
        self.kv: KvStore = self.model.new_kv(1 + WIDTH * len(CONTEXTS), PAGE, 2 * len(CONTEXTS))
        self.tables = [np.arange(1 + WIDTH * i, 1 + WIDTH * (i + 1)) for i in range(len(CONTEXTS))]
        random = np.random.default_rng(0)
        self.slots = [0, NO_SLOT, 2, 0, 1]
        self.ids = [random.integers(3, 250, context + 1).tolist() for context in CONTEXTS]
        chunks = [
            Segment(ids[:-1], 0, table, slot, states=(ZEROS, state))
            for state, (ids, table, slot) in enumerate(zip(self.ids, self.tables, self.slots, strict=True), 1)
            if len(ids) > 1
        ]
        self.launch(chunks)

    def launch(self, segments: list[Segment]) -> torch.Tensor:
        with torch.inference_mode():
            batch = pack(segments, self.kv, DEVICE)
            with attention_pass(attention_over(batch, self.kv, "padded")), self.model.lora.packed(batch.runs):
                return self.model.forward(batch.input_ids, batch.position_ids, batch.logit_rows)

    def decodes(self, which: list[int], base: bool = False) -> list[Segment]:
        """The next token of some sequences, those of one adapter side by side."""
        segments = [
            Segment(
                self.ids[i][-1:],
                CONTEXTS[i],
                self.tables[i],
                NO_SLOT if base else self.slots[i],
                position=CONTEXTS[i],
                samples=True,
                # The state after a token is kept aside, so that the token can be computed again.
                states=(1 + i if CONTEXTS[i] else ZEROS, 1 + i + len(CONTEXTS)),
            )
            for i in which
        ]
        return sorted(segments, key=lambda segment: segment.slot)

    def states(self, which: list[int]) -> list[torch.Tensor]:
        """What the layers keep after the next token of some sequences, in float32."""
        slots = torch.tensor([1 + i + len(CONTEXTS) for i in which], device=DEVICE)
        read = (
            [self.kv.states.read(module, slots, slots, {}) for module in range(len(self.model.states))]
            if self.kv.states
            else []
        )
        return [state.float() for both in read for state in both if state is not None]

    def graphs(self, made_by: CudaGraphRecorder | Again) -> DecodeGraphs:
        return DecodeGraphs(self.model, self.kv, Backends("triton"), made_by, 3, WIDTH)


def row(step: int, **sampling: object) -> SamplingRow:
    options = Sampling(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    counts = TokenCounts((5, 6))
    counts.extend((7, 7))
    return SamplingRow(options, seed=11, step=step, counts=counts if options.penalizes else None)


(WORD,) = compiled(Constraint("regex", "[x-z]{3}", ""))


def following(step: int, **sampling: object) -> SamplingRow:
    return replace(row(step, **sampling), matcher=GrammarMatcher(WORD, [], 0))


KINDS = {
    "greedy": [row(i) for i in range(5)],
    "drawn": [row(i, temperature=t) for i, t in enumerate((0.0, 0.7, 1.0, 1.3, 0.0))],
    "min-p": [row(i, temperature=1.5, min_p=0.2 * i) for i in range(5)],
    "truncated": [row(0, temperature=1.0, top_k=3), row(1, temperature=1.0, top_p=0.5), row(2), row(3), row(4)],
    "grammars": [following(0, logprobs=2), row(1), following(2, temperature=1.0), row(3, temperature=0.7)],
    "penalties": [row(i, repetition_penalty=1.5, logit_bias={9: 4.0}, logprobs=2) for i in range(5)],
}


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma2", *STATEFUL)]


@pytest.fixture(scope="module", params=["llama", *SLOW])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.param)


@pytest.fixture(scope="module")
def captured(rig: Rig) -> DecodeGraphs:
    return rig.graphs(recorder())


BATCHES = {
    "one": ([0], False, "greedy"),
    "two": ([3, 1], False, "drawn"),
    "padded": ([4, 0, 2], False, "drawn"),
    "base": ([4, 0, 2], True, "greedy"),
    "min-p": ([4, 3, 0, 2], False, "min-p"),
    "truncated": ([3, 0, 1], False, "truncated"),
    "grammars": ([4, 3, 0, 2], False, "grammars"),
    "penalties": ([4, 1], False, "penalties"),
}


@pytest.mark.parametrize(("which", "base", "kind"), BATCHES.values(), ids=BATCHES.keys())
def test_a_replay_draws_what_launches_draw(
    rig: Rig, captured: DecodeGraphs, which: list[int], base: bool, kind: str
) -> None:
    rows = KINDS[kind][: len(which)]
    wanted, states = sample(rig.launch(rig.decodes(which, base)), rows).read(), rig.states(which)
    got = captured.run(rig.decodes(which, base), rows).read()
    torch.testing.assert_close(rig.states(which), states, atol=1e-4, rtol=1e-4)
    assert got.token_ids == wanted.token_ids
    for a, b in zip(got.logprobs, wanted.logprobs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or a == pytest.approx(b, abs=1e-4)


def test_what_a_batch_left_behind_is_not_seen_by_the_next(rig: Rig, captured: DecodeGraphs) -> None:
    rows = KINDS["greedy"]
    alone = captured.run(rig.decodes([2]), rows[:1]).read().token_ids
    captured.run(rig.decodes([0, 1, 3, 4]), rows[:4])
    assert captured.run(rig.decodes([2]), rows[:1]).read().token_ids == alone


def test_every_replayed_forward_can_be_watched(rig: Rig, captured: DecodeGraphs) -> None:
    seen = []

    def through(replay: Replay) -> Replay:
        return lambda: (replay(), seen.append(1))[0]

    captured.watch(through)
    for which, base in (([2], False), ([0, 1], True)):
        captured.run(rig.decodes(which, base), KINDS["drawn"][: len(which)])
    assert len(seen) == 2


def test_sizes_without_memory_are_left_out(rig: Rig) -> None:
    captured = rig.graphs(Again(too_large=(1, 2)))
    assert captured.report()["sizes"] == [1]
    assert captured.fits(1)
    assert not captured.fits(2)


ERRORS = [
    pytest.param(RuntimeError("CUDA error: out of memory"), marks=pytest.mark.slow),
    pytest.param(RuntimeError("Triton Error [CUDA]: out of memory"), marks=pytest.mark.slow),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    torch.OutOfMemoryError("CUDA out of memory."),
]


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_want_of_memory_leaves_out_one_size_whatever_it_is_called(rig: Rig, error: Exception) -> None:
    class Full(Again):
        def record(self, run: Replay) -> Replay:
            if self._made == 0:
                self._made = 1
                raise error
            return super().record(run)

    assert rig.graphs(Full()).report()["sizes"] == [1, 2]


def test_fixed_tensors_that_find_no_memory_are_made_smaller(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cuda_graphs._Fixed

    def fixed(rows: int, *others: Any) -> Any:
        if rows > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return made(rows, *others)

    monkeypatch.setattr(cuda_graphs, "_Fixed", fixed)
    assert rig.graphs(Again()).report()["sizes"] == [1]


def test_a_capture_is_refused_for_what_it_adds() -> None:
    assert is_too_much(held=120, added=60, most=100)
    assert not is_too_much(held=120, added=0, most=100)
    assert not is_too_much(held=90, added=60, most=100)


def test_a_capture_that_fails_leaves_launches(rig: Rig) -> None:
    class Broken(Again):
        def record(self, run: Replay) -> Replay:
            raise RuntimeError("operation not permitted when stream is capturing")

    captured = rig.graphs(Broken())
    assert not captured.fits(1)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="nothing is captured on the CPU")
def test_what_waits_for_the_gpu_is_given_up_before_it_is_captured() -> None:
    recorder, number = CudaGraphRecorder(DEVICE, 1 << 30), torch.ones(1, device=DEVICE)

    def count() -> None:
        number.add_(1)

    def wait() -> None:
        number.item()

    with pytest.raises(RuntimeError, match="synchronizing"):
        recorder.record(wait)
    assert torch.cuda.get_sync_debug_mode() == 0
    replay = recorder.record(count)
    before = float(number)
    replay()
    assert float(number) == before + 1


def test_a_replay_with_other_numbers_is_not_used(rig: Rig) -> None:
    class Wrong(Again):
        def record(self, run: Replay) -> Replay:
            super().record(run)
            return lambda: None

    assert not rig.graphs(Wrong()).fits(1)
