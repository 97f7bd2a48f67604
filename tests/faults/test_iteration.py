"""Something raises in the middle of an iteration: the task at fault ends with the reason, and no other one does."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edged.align.dpo.evaluation import HeldOutEvaluation
from edged.align.feedback.pair import PairRetired, PairScored, StepSkipped, VersionPublished, VersionTested
from edged.engine.model.served_model import ServedModel
from edged.engine.model_runner import RunnerOutput
from edged.engine.sequence import Sequence
from edged.engine.sequences import SequenceTable
from tests.engine.harness import BuiltEngine, Client, random_ids, random_pairs, request, running_engine
from tests.faults.test_memory import answers


def once_something_ended(engine: BuiltEngine) -> list[int]:
    """Accounting for the first iteration in which an answer ends raises; returns how often it did."""
    scheduler, raised = engine.built.scheduler, []
    complete = scheduler.complete

    def broken(*arguments: Any) -> None:
        if not raised and engine.stats.outcomes["length"]:
            raised.append(1)
            raise RuntimeError("the accounts are closed")
        complete(*arguments)

    scheduler.complete = broken  # type: ignore[method-assign]
    return raised


def test_a_failure_after_answers_ended_does_not_follow_the_engine(tmp_path: Path) -> None:
    prompts = [random_ids(30, seed) for seed in range(3)]
    with running_engine(tmp_path) as (engine, client):
        raised = once_something_ended(engine)
        # The long one first: the short one might end before it comes.
        engine.submit(request("long", random_ids(9, 8), 200))
        engine.submit(request("short", random_ids(9, 7), 2))
        client.wait(lambda: len(client.finished) == 2)
        assert raised
        assert [client.finished[name].reason for name in ("short", "long")] == ["length", "length"]
        engine.submit(request("again", random_ids(9, 8), 200))
        client.wait(lambda: "again" in client.finished)
        assert client.ids("long") == client.ids("again"), "what was sent stays, and the answer goes on from there"
        answers(engine, client, "after", prompts)
        assert sum(engine.status()["queue"].values()) == 0


MARK = 251


@contextmanager
def marked_tokens_fail(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Each forward over MARK raises; yields the number of tokens of those that did."""
    forward, raised = torch.nn.Embedding.forward, list[int]()

    def fails(table: torch.nn.Embedding, input_ids: torch.Tensor) -> torch.Tensor:
        if (input_ids == MARK).any():
            raised.append(input_ids.numel())
            raise IndexError("index out of range in self")
        return forward(table, input_ids)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Embedding, "forward", fails)
        yield raised


def ask_all(engine: BuiltEngine, client: Client, prompts: dict[str, list[int]], seed: int) -> None:
    """Ask at once, each with parameters of its own, drawn by `seed` and name."""
    for name, prompt in prompts.items():
        draw = random.Random(f"{seed} {name.partition(' ')[2]}")
        options = {"temperature": draw.choice([0.0, 1.0]), "seed": draw.getrandbits(20), "logprobs": 1}
        engine.submit(request(name, prompt, draw.randint(3, 25), logit_bias={MARK: -100.0}, **options))


@pytest.mark.parametrize("seed", range(6))
def test_the_task_at_fault_fails_alone_and_the_others_get_the_same_as_without_it(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    count, chunk = draw.randint(2, 9), draw.choice([16, 40, 1024])
    prompts = {str(i): random_ids(draw.randint(3, 60), 100 * seed + i) for i in range(count)}
    guilty = draw.sample(sorted(prompts), draw.randint(1, min(2, count - 1)))
    innocent = prompts.keys() - guilty
    for name in guilty:
        prompts[name].insert(draw.randrange(len(prompts[name])), MARK)
    with running_engine(tmp_path, serving__max_batch_tokens=chunk) as (engine, client):
        ask_all(engine, client, {f"without {name}": prompts[name] for name in innocent}, seed)
        client.wait(lambda: len(client.finished) == len(innocent))
        with marked_tokens_fail(monkeypatch) as raised:
            ask_all(engine, client, {f"with {name}": prompt for name, prompt in prompts.items()}, seed)
            client.wait(lambda: len(client.finished) == len(innocent) + count)
            chunks = sum(-(-len(prompt) // chunk) for prompt in prompts.values())
            assert len(guilty) <= len(raised) <= 4 * chunks, "each is found in a few iterations"
        for name in innocent:
            assert client.finished[f"with {name}"].error == ""
            assert client.ids(f"with {name}") == client.ids(f"without {name}")
            both = [[event.logprob for event in client.tokens[f"{run} {name}"]] for run in ("with", "without")]
            assert both[0] == pytest.approx(both[1], abs=1e-5)
        for name in guilty:
            assert client.finished[f"with {name}"].error == "the iteration failed: index out of range in self"
        answers(engine, client, "after", [random_ids(9, 1)])


def test_any_number_of_requests_that_fail_alone_leaves_the_engine_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_engine(tmp_path) as (engine, client):
        with marked_tokens_fail(monkeypatch):
            for i in range(8):
                engine.submit(request(f"r{i}", [5, MARK, 7]))
                client.wait(lambda i=i: f"r{i}" in client.finished)  # type: ignore[misc]
        assert {event.error for event in client.finished.values()} == {
            "the iteration failed: index out of range in self"
        }
        answers(engine, client, "after", [random_ids(9, 1)])


def results_of_marked_prompts_fail(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each token of an answer to a prompt with MARK raises as it is taken in; returns a list that grows by each."""
    append, raised = SequenceTable._append, list[int]()

    def fails(table: SequenceTable, sequence: Sequence, *rest: Any) -> None:
        if MARK in sequence.request.prompt_ids:
            raised.append(1)
            raise KeyError("taken in")
        append(table, sequence, *rest)

    monkeypatch.setattr(SequenceTable, "_append", fails)
    return raised


def test_results_that_cannot_be_taken_in_are_their_tasks_failure_however_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results_of_marked_prompts_fail(monkeypatch)
    with running_engine(tmp_path) as (engine, client):
        for i in range(4):
            engine.submit(request(f"r{i}", [5, MARK, 7]))
            client.wait(lambda i=i: f"r{i}" in client.finished)  # type: ignore[misc]
            assert client.finished[f"r{i}"].error == "the iteration failed: 'taken in'"
        answers(engine, client, "after", [random_ids(9, 1)])


def test_a_prompt_of_several_chunks_whose_result_cannot_be_taken_in_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = results_of_marked_prompts_fail(monkeypatch)
    with running_engine(tmp_path, serving__max_batch_tokens=16, cache__share_across="none") as (engine, client):
        engine.submit(request("long", random_ids(20, 3), 300, logit_bias={MARK: -100.0}))
        client.wait(lambda: len(client.tokens["long"]) > 5)
        engine.submit(request("bad", [MARK, *random_ids(60, 4)], 5))
        client.wait(lambda: len(client.finished) == 2)
        assert (client.finished["long"].error, client.finished["bad"].error) == ("", "the iteration failed: 'taken in'")
        assert len(client.tokens["long"]) == 300
        assert len(raised) < 10
        assert not engine.loop.recovery._suspects


def test_a_step_that_ended_in_an_iteration_that_failed_is_taken_in_once(tmp_path: Path) -> None:
    settings = {"guard__held_out_share": 0.0, "align__loss_threshold": 0.0}
    with running_engine(tmp_path, **settings) as (engine, client):
        scheduler, finetuning, raised = engine.built.scheduler, engine.built.finetuning, []
        complete = scheduler.complete

        def broken(result: Any, now: float) -> None:
            ended = [each for each in finetuning.by_task.values() if each.step.finished]
            if not raised and ended and len(result.outcomes) > 1:
                raised.append(1)
                raise RuntimeError("the accounts are closed")
            complete(result, now)

        scheduler.complete = broken  # type: ignore[method-assign]
        engine.submit(request("long", random_ids(20, 3), 400))
        engine.submit_pairs(random_pairs(4))
        client.wait(lambda: len(client.of(PairRetired)) == 4 and "long" in client.finished)
        assert raised
        assert {record.state for record in client.of(PairRetired)} == {"trained"}
        assert [record.version for record in client.of(VersionPublished)] == [1]
        assert client.finished["long"].error == ""


@pytest.mark.parametrize(("recompute", "adapters"), [("auto", 1), ("full", 1), ("full", 3)])
def test_a_pair_that_cannot_be_computed_is_skipped_alone_beside_an_answer_that_goes_on(
    recompute: str, adapters: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["ann", "ben", "cyd"][:adapters]
    pairs = [pair for i, name in enumerate(names) for pair in random_pairs(4, name, i, 1 + 4 * i)]
    bad = replace(pairs[1], chosen=(7, MARK, 2))
    pairs[1] = bad
    settings = {"guard__held_out_share": 0.0, "align__recompute": recompute, "align__loss_threshold": 0.0}
    with running_engine(tmp_path, **settings) as (engine, client), marked_tokens_fail(monkeypatch):
        engine.submit(request("long", random_ids(20, 3), 120))
        engine.submit_pairs(pairs)
        client.wait(lambda: len(client.of(PairRetired)) == len(pairs) and "long" in client.finished)
        assert client.finished["long"].error == ""
        states = {record.pair_id: record.state for record in client.of(PairRetired)}
        assert states == {pair.pair_id: "skipped" if pair is bad else "trained" for pair in pairs}
        (skipped,) = client.of(StepSkipped)
        assert (skipped.pair_ids, "index out of range" in skipped.reason) == ((bad.pair_id,), True)
        engine.submit_pairs(random_pairs(4, seed=9, first_id=90))
        client.wait(lambda: len(client.of(PairRetired)) == len(pairs) + 4)
        assert [len(each.pair_ids) for each in client.of(StepSkipped)] == [1]


@pytest.mark.usefixtures("each_version_is_tested")
def test_a_held_out_pair_that_cannot_be_computed_is_no_test_and_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = [replace(pair, state="held_out") for pair in random_pairs(6, seed=5, first_id=50)]
    tests[2] = replace(tests[2], rejected=(7, MARK, 2))
    settings = {"guard__held_out_share": 0.0, "align__loss_threshold": 0.0}
    with running_engine(tmp_path, **settings) as (engine, client), marked_tokens_fail(monkeypatch):
        engine.submit_pairs(tests + random_pairs(4))
        client.wait(lambda: any(tested.version == 1 for tested in client.of(VersionTested)))
        retired = {record.pair_id: record for record in client.of(PairRetired)}
        assert (retired[52].state, retired[52].reason) == (
            "skipped",
            "as a test: the iteration failed: index out of range in self",
        )
        tested = {score.pair_id for score in client.of(PairScored) if score.split == "held_out"}
        assert tested == {50, 51, 53, 54, 55}


@pytest.mark.usefixtures("each_version_is_tested")
def test_a_test_that_finds_no_memory_costs_no_held_out_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_unit = HeldOutEvaluation.run_unit
    raised: list[int] = []

    def starves(test: HeldOutEvaluation, most: int = 0) -> Any:
        if len(raised) < 12:
            raised.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run_unit(test, most)

    monkeypatch.setattr(HeldOutEvaluation, "run_unit", starves)
    tests = [replace(pair, state="held_out") for pair in random_pairs(6, seed=5, first_id=50)]
    settings = {"guard__held_out_share": 0.0, "align__loss_threshold": 0.0}
    with running_engine(tmp_path, **settings) as (engine, client):
        engine.trainer.size.first_pause_s = 0.001
        engine.submit_pairs(tests + random_pairs(4))
        client.wait(lambda: len(raised) == 12)
        assert not [record for record in client.of(PairRetired) if record.pair_id >= 50]


def lost(_: ServedModel) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_does_nothing_more_ends_the_engine_and_nobodys_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = threading.Event()

    def run(*_: Any, **__: Any) -> RunnerOutput:
        submitted.wait(60)
        raise RuntimeError("CUDA error: unspecified launch failure")

    with running_engine(tmp_path, fails=True, guard__held_out_share=0.0) as (engine, client):
        monkeypatch.setattr(ServedModel, "check_device", lost)
        monkeypatch.setattr(engine.built.runner, "run", run)
        engine.submit_pairs(random_pairs(4))
        engine.submit(request("r", random_ids(9, 1)))
        submitted.set()
        client.wait(lambda: "r" in client.finished)
        assert "the device computes nothing more, and edged must start again" in client.finished["r"].error
        assert "illegal memory access" in client.finished["r"].error
    assert not client.of(PairRetired)
    assert not client.of(StepSkipped)


def test_a_device_that_is_lost_in_a_unit_skips_no_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_engine(tmp_path, fails=True, guard__held_out_share=0.0) as (engine, client):
        trainer = engine.built.trainer
        opened = trainer.open

        def open_broken(*arguments: Any) -> Any:
            step = opened(*arguments)
            monkeypatch.setattr(step, "run_unit", lambda _most=0: lost(engine.built.model))
            return step

        monkeypatch.setattr(ServedModel, "check_device", lost)
        monkeypatch.setattr(trainer, "open", open_broken)
        engine.submit_pairs(random_pairs(4))
        engine._thread.join(20)
        assert engine.error is not None
    assert not client.of(PairRetired)
    assert not client.of(StepSkipped)
