"""Memory runs out in the middle of an iteration: less is done at once, and every answer is as it would have been."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edged.align.feedback.pair import PairRetired, StepSkipped
from edged.settings.live import Live
from edged.settings.load import AlignSettings, Settings
from edged.tensors.oom import StepSize, out_of_memory
from tests.engine.harness import BuiltEngine, Client, random_ids, random_pairs, request, running_engine
from tests.models import save_tiny

MARK = 251
"""A token that no random prompt has, and no answer here."""


@contextmanager
def shortage(module: torch.nn.Module, when: Callable[[torch.Tensor], bool]) -> Iterator[list[int]]:
    """The allocator has nothing left whenever `module` is called with an input of which `when` holds."""
    raised: list[int] = []

    def hook(_: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = arguments[0] if arguments else next(iter(named.values()))
        if when(given):
            raised.append(given.numel())
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nlong story")

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield raised
    finally:
        handle.remove()


@contextmanager
def little_memory(left_mib: int) -> Iterator[Callable[[], int]]:
    """The GPU's own allocator has `left_mib` to give, or up to 16 MiB more; gives how often that was too little."""
    block_mib = 16
    ballast: list[torch.Tensor] = []
    torch.cuda.empty_cache()
    bound = torch.cuda.memory_reserved() + (1 << 30)
    torch.cuda.set_per_process_memory_fraction(bound / torch.cuda.get_device_properties(0).total_memory)
    try:
        # What the allocator counts as the whole is not quite what the device says: it is filled until it refuses.
        with suppress(torch.OutOfMemoryError):
            while len(ballast) * block_mib < 4096:
                ballast.append(torch.empty(block_mib << 20, dtype=torch.uint8, device="cuda"))
        assert left_mib <= len(ballast) * block_mib < 4096
        del ballast[-(left_mib // block_mib) :]
        torch.cuda.empty_cache()
        before = torch.cuda.memory_stats()["num_ooms"]
        yield lambda: int(torch.cuda.memory_stats()["num_ooms"]) - int(before)
    finally:
        ballast.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


def while_learning(left: list[int]) -> Callable[[torch.Tensor], bool]:
    """Holds at the first `left[0]` calls that compute for a gradient, and counts them down."""

    def when(_: torch.Tensor) -> bool:
        left[0] -= torch.is_grad_enabled()
        return torch.is_grad_enabled() and left[0] >= 0

    return when


def layer(engine: BuiltEngine) -> torch.nn.Module:
    return engine.built.model.layers[1]


def embeddings(engine: BuiltEngine) -> torch.nn.Module:
    return engine.built.model.model.get_input_embeddings()


def rows(hidden: torch.Tensor) -> int:
    return hidden.shape[-2]


def answers(
    engine: BuiltEngine,
    client: Client,
    run: str,
    prompts: list[list[int]],
    tokens: int = 12,
    adapter: str | None = None,
) -> list[list[int]]:
    """The greedy answers to `prompts`, asked at once; none may fail."""
    names = [f"{run}-{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.submit(request(name, prompt, tokens, adapter, logit_bias={MARK: -100.0}))
    client.wait(lambda: all(name in client.finished for name in names))
    assert [client.finished[name].error for name in names] == [""] * len(names)
    return [client.ids(name) for name in names]


def test_a_prompt_that_is_too_much_at_once_is_computed_in_smaller_chunks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [random_ids(200, 1), random_ids(90, 2)]
    with running_engine(tmp_path, cache__share_across="none") as (engine, client):
        wanted = answers(engine, client, "before", prompts)
        with shortage(layer(engine), lambda hidden: rows(hidden) > 40) as raised:
            assert answers(engine, client, "short", prompts) == wanted
            assert raised
            assert "memory ran out: an iteration has at most" in engine.status()["degraded"][0]
        assert {vars(line).get("event") for line in caplog.records if "ran out" in line.getMessage()} == {
            "memory_short"
        }
        for i in range(12):
            answers(engine, client, f"after{i}", [random_ids(20, 10 + i)], tokens=40)
        assert engine.status()["degraded"] == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU's allocator can be bounded, the CPU's cannot")
def test_when_the_gpus_own_allocator_has_too_little_prompts_are_computed_in_smaller_chunks(tmp_path: Path) -> None:
    if torch.cuda.mem_get_info()[0] < 4 << 30:
        pytest.skip("needs 4 GiB on the GPU")
    # One activation of the MLP takes 256 KiB a token: 100 MiB for the longer prompt, 4 MiB for the smallest chunk.
    save_tiny(tmp_path / "model-llama", intermediate_size=65536, max_position_embeddings=512)
    settings = {"model__device": "cuda", "model__dtype": "float32", "model__graph_memory_mb": 0}
    settings |= {"cache__memory_mb": 16, "cache__share_across": "none"}
    prompts = [random_ids(400, 1), random_ids(90, 2)]
    with running_engine(tmp_path, **settings) as (engine, client):
        answers(engine, client, "before", prompts)
        with little_memory(64) as failures:
            # Not which ones: a GPU rounds products of other sizes otherwise.
            assert [len(ids) for ids in answers(engine, client, "short", prompts)] == [12, 12]
            assert failures() > 0
            assert any("memory ran out: an iteration has at most" in line for line in engine.status()["degraded"])
        answers(engine, client, "after", prompts)


def test_decodes_that_are_too_many_are_preempted_and_not_failed(tmp_path: Path) -> None:
    prompts = [random_ids(30, seed) for seed in range(8)]
    with running_engine(tmp_path, cache__share_across="none", model__graph_memory_mb=0) as (engine, client):
        wanted = answers(engine, client, "before", prompts, tokens=20)
        with shortage(layer(engine), lambda hidden: 3 < rows(hidden) <= 8) as raised:
            assert answers(engine, client, "short", prompts, tokens=20) == wanted
        assert raised
        assert engine.status()["totals"]["preemptions"] >= 4


def test_what_finds_no_memory_alone_fails_alone(tmp_path: Path) -> None:
    prompts = [random_ids(30, seed) for seed in range(6)]
    with running_engine(tmp_path) as (engine, client):
        wanted = answers(engine, client, "before", prompts)
        with shortage(embeddings(engine), lambda ids: bool((ids == MARK).any())):
            engine.submit(request("too-much", [*random_ids(60, 9), MARK]))
            assert answers(engine, client, "beside", prompts) == wanted
            client.wait(lambda: "too-much" in client.finished)
        assert client.finished["too-much"].reason == "error"
        assert client.finished["too-much"].error.startswith("out of memory, also alone and in small pieces")
        assert "long story" not in client.finished["too-much"].error
        assert answers(engine, client, "after", prompts) == wanted


@pytest.mark.parametrize("where", ["embeddings", "layer", "head", "pages"])
def test_two_failures_anywhere_in_an_iteration_change_no_answer(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_ids(40, seed) for seed in range(4)]
    with running_engine(tmp_path, cache__share_across="none") as (engine, client):
        wanted = answers(engine, client, "before", prompts, tokens=20)
        left = [2]

        def twice(_: object = None) -> bool:
            left[0] -= 1
            return left[0] >= 0

        if where == "pages":
            allocate = engine.built.runner.pages.allocate

            def starved(pages: int) -> list[int]:
                if twice():
                    raise MemoryError
                return allocate(pages)

            monkeypatch.setattr(engine.built.runner.pages, "allocate", starved)
            assert answers(engine, client, "short", prompts, tokens=20) == wanted
        else:
            head = engine.built.model.model.get_output_embeddings()
            module = {"embeddings": embeddings(engine), "layer": layer(engine), "head": head}[where]
            with shortage(module, twice):
                assert answers(engine, client, "short", prompts, tokens=20) == wanted
        assert left[0] < 0


@pytest.mark.parametrize("recompute", ["auto", "full"])
def test_a_step_without_memory_waits_and_every_pair_is_trained_once(tmp_path: Path, recompute: str) -> None:
    with running_engine(tmp_path, align__recompute=recompute, guard__held_out_share=0.0) as (engine, client):
        engine.built.trainer.size.first_pause_s = 0.01
        left = [3]

        with shortage(layer(engine), while_learning(left)):
            engine.submit_pairs(random_pairs(8))
            client.wait(lambda: len(client.of(PairRetired)) >= 8)
        assert left[0] < 0
        retired = [(record.pair_id, record.state, record.epochs_done) for record in client.of(PairRetired)]
        assert sorted(retired) == [(pair_id, "trained", 1) for pair_id in range(1, 9)]
        assert not client.of(StepSkipped)


@pytest.mark.parametrize("recompute", ["auto", "full"])
def test_a_step_that_found_no_memory_holds_none_when_it_is_tried_again(
    tmp_path: Path, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_engine(tmp_path, align__recompute=recompute, guard__held_out_share=0.0) as (engine, client):
        trainer = engine.built.trainer
        trainer.size.first_pause_s = 0.01
        opened, alive = trainer.open, []
        steps: list[weakref.ref[object]] = []

        def remembered(*arguments: Any) -> Any:
            alive.append(sum(step() is not None for step in steps))
            step = opened(*arguments)
            steps.append(weakref.ref(step))
            return step

        monkeypatch.setattr(trainer, "open", remembered)
        gc.disable()
        try:
            with shortage(layer(engine), while_learning([1])):
                engine.submit_pairs(random_pairs(4))
                client.wait(lambda: len(client.of(PairRetired)) == 4)
        finally:
            gc.enable()
        assert alive[:2] == [0, 0]


def test_serving_goes_on_beside_a_fine_tune_forward_without_memory(tmp_path: Path) -> None:
    prompts = [random_ids(30, seed) for seed in range(3)]
    with running_engine(tmp_path, align__recompute="full", guard__held_out_share=0.0) as (engine, client):
        engine.built.trainer.size.first_pause_s = 0.01
        wanted = answers(engine, client, "before", prompts)
        pairs = random_pairs(4, adapter="ann")
        pairs[1] = replace(pairs[1], prompt=(*pairs[1].prompt[:-1], MARK))
        with shortage(embeddings(engine), lambda ids: bool((ids == MARK).any())):
            engine.submit_pairs(pairs)
            assert answers(engine, client, "beside", prompts) == wanted
            client.wait(lambda: len(client.of(PairRetired)) == 4)
        assert {record.pair_id: record.state for record in client.of(PairRetired)} == {
            1: "trained",
            2: "skipped",
            3: "trained",
            4: "trained",
        }
        assert "out of memory, also alone" in client.of(StepSkipped)[0].reason


@pytest.mark.parametrize("recompute", ["auto", "full"])
def test_no_pair_is_given_up_while_nobody_finds_memory(tmp_path: Path, recompute: str) -> None:
    with running_engine(tmp_path, align__recompute=recompute, guard__held_out_share=0.0) as (engine, client):
        engine.built.trainer.size.first_pause_s = 1e-7
        left = [20]

        with shortage(layer(engine), while_learning(left)):
            engine.submit_pairs(random_pairs(3))
            client.wait(lambda: len(client.of(PairRetired)) >= 3, 60)
        assert left[0] < 0
        assert sorted((pair.pair_id, pair.state) for pair in client.of(PairRetired)) == [
            (pair_id, "trained") for pair_id in (1, 2, 3)
        ]
        assert not client.of(StepSkipped)


def test_a_step_waits_while_there_is_no_memory_for_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_engine(tmp_path, guard__held_out_share=0.0) as (engine, client):
        engine.built.trainer.size.first_pause_s = 0.01
        engine.submit_pairs(random_pairs(4))
        client.wait(lambda: len(client.of(PairRetired)) == 4)
        load, left = engine.built.slots._lora.load, [2]

        def starved(*arguments: Any) -> None:
            left[0] -= 1
            if left[0] >= 0:
                raise MemoryError
            load(*arguments)

        monkeypatch.setattr(engine.built.slots._lora, "load", starved)
        engine.submit_pairs(random_pairs(4, seed=1, first_id=5))
        client.wait(lambda: len(client.of(PairRetired)) == 8, 20)
        assert left[0] < 0
        assert {record.state for record in client.of(PairRetired)} == {"trained"}
        assert answers(engine, client, "after", [random_ids(30, 1)], adapter="ann")


def live(**align: Any) -> Live[Settings]:
    return Live(Settings(align=AlignSettings(**align)))


def test_steps_shrink_pause_longer_and_grow_again() -> None:
    size = StepSize(live(micro_batch_pairs=4, joint_adapters=4, replay_share=0.5))
    pauses = []
    for _ in range(9):
        size.shrink()
        pauses.append(size.pause_s)
    assert (size.align.micro_batch_pairs, size.align.joint_adapters, size.align.replay_share) == (1, 1, 0.0)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    for _ in range(2000):
        size.shrink()
    assert size.pause_s == 60.0
    for _ in range(16):
        size.grow()
    assert (size.align.micro_batch_pairs, size.align.joint_adapters, size.align.replay_share) == (4, 4, 0.5)


def test_a_pair_is_given_up_when_others_found_memory_since() -> None:
    size = StepSize(live())
    assert not any(size.hopeless(1) for _ in range(20))
    size.grow()
    assert not size.hopeless(2)
    assert size.hopeless(1)
    assert [size.hopeless("a test", others_first=False) for _ in range(7)] == [False] * 5 + [True, False]
    size.grow()
    assert [size.hopeless(2) for _ in range(5)] == [False] * 4 + [True]


def test_a_jobs_step_has_smaller_groups_after_memory_ran_out_and_is_tried_for_minutes() -> None:
    size, align = StepSize(live()), AlignSettings(window_tokens=256)
    assert size.narrow(align) is align
    paused_s, windows = 0.0, []
    while not size.hopeless("job", others_first=False, max_tries=12):
        size.shrink()
        paused_s += size.pause_s
        windows.append(size.narrow(align).window_tokens)
    assert windows[:3] == [128, 64, 64]
    assert paused_s > 300
    for _ in range(8 * len(windows)):
        size.grow()
    assert size.narrow(align) is align
    size.shrink()
    assert size.narrow(AlignSettings(window_tokens=16)).window_tokens == 16


def test_other_settings_count_at_once_but_no_more_than_memory_allowed() -> None:
    settings = live(micro_batch_pairs=4, replay_share=0.5)
    size = StepSize(settings)
    settings.current = live(micro_batch_pairs=8, replay_share=0.0).current
    assert (size.align.micro_batch_pairs, size.align.replay_share) == (8, 0.0)
    size.shrink()
    settings.current = live(micro_batch_pairs=16).current
    assert size.align.micro_batch_pairs == 4
    settings.current = live(micro_batch_pairs=2).current
    assert size.align.micro_batch_pairs == 2


def test_graphs_are_kept_again_when_steps_are_whole_again() -> None:
    settings = live(micro_batch_pairs=4)
    size = StepSize(settings)
    for fails in (size.shrink, size.distrust_graphs):
        fails()
        assert size.graphs_fail
        for _ in range(8):
            assert size.graphs_fail
            size.grow()
        assert (size.pairs, size.graphs_fail) == (4, False)
    size.shrink()
    settings.current = live(micro_batch_pairs=4).current
    assert not size.graphs_fail


@pytest.mark.parametrize(
    ("error", "means_it"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/c10/cuda/CUDACachingAllocator.cpp":1016'), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_want_of_memory_is_told_from_other_errors(error: Exception, means_it: bool) -> None:
    assert out_of_memory(error) is means_it
