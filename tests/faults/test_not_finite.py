"""Numbers that are not finite end the answer that they are in, and touch nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from edged.align.feedback.pair import PairRetired, TokenPair, VersionPublished, VersionSaved
from tests.engine.harness import BuiltEngine, random_ids, random_pairs, request, running_engine
from tests.faults.test_memory import MARK, answers, embeddings

NEUTRAL = TokenPair(-1, "", (3, 4), (5, 6), (7, 8))


@contextmanager
def not_a_number(engine: BuiltEngine) -> Iterator[None]:
    """The activations of every token MARK are NaN."""

    def hook(_: torch.nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill((arguments[0] == MARK)[..., None], float("nan"))

    handle = embeddings(engine).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("at", ["first", "middle", "last"])
@pytest.mark.parametrize("chunk", [1024, 32])
def test_the_answer_ends_with_the_reason_and_others_are_as_before(tmp_path: Path, at: str, chunk: int) -> None:
    prompts = [random_ids(40, seed) for seed in range(4)]
    bad = random_ids(64, 9)
    bad[{"first": 0, "middle": 40, "last": -1}[at]] = MARK
    with running_engine(tmp_path, serving__max_batch_tokens=chunk) as (engine, client):
        wanted = answers(engine, client, "before", prompts)
        finite = answers(engine, client, "finite", [bad])
        engine.forget("nobody")
        engine.built.commands.post(lambda: engine.built.runner.pages.trie.expire((None, 0)))
        with not_a_number(engine):
            engine.submit(request("bad", bad))
            assert answers(engine, client, "beside", prompts) == wanted
            client.wait(lambda: "bad" in client.finished)
        assert client.finished["bad"].error == "the base model answers with numbers that are not finite"
        # Nothing of it was kept: the same prompt is computed anew, in pages that nobody else spoilt.
        assert answers(engine, client, "again", [bad]) == finite
        assert answers(engine, client, "after", prompts) == wanted


def test_a_version_with_weights_that_are_not_finite_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A talk that is computed again would find it before anybody asks.
    monkeypatch.setattr("edged.engine.renewals._GOES_ON_S", 0.0)
    prompt = random_ids(30, 1)
    settings = {"store__save_every_s": 0.001, "guard__held_out_share": 0.0, "store__keep_versions": 50}
    with running_engine(tmp_path, **settings) as (engine, client):
        for adapter, seed in (("ann", 0), ("ben", 1)):
            engine.submit_pairs(random_pairs(8, adapter, seed, first_id=1 + 100 * seed))
        client.wait(lambda: len(client.of(PairRetired)) == 16)
        newest = set(engine.adapters().items())
        client.wait(lambda: newest <= {(record.adapter, record.version) for record in client.of(VersionSaved)})
        wanted = {name: answers(engine, client, f"{name}-before", [prompt], adapter=name) for name in ("ann", "ben")}
        spoilt = engine.adapters()["ann"]

        def spoil() -> None:
            # As an overflow in the optimizer would: published, served, and not a number.
            trainer = engine.built.trainer
            state = trainer.adapter_cache.get("ann")
            with torch.no_grad():
                state.parameters()[1].fill_(float("nan"))
            state.version = state.newest_number = spoilt + 1
            trainer.versions.publish(trainer.pair_queues["ann"], spoilt, "trained")

        engine.built.commands.ask(spoil).result()
        engine.submit(request("ann-spoilt", prompt, adapter="ann"))
        assert answers(engine, client, "ben-beside", [prompt], adapter="ben") == wanted["ben"]
        client.wait(lambda: "ann-spoilt" in client.finished)
        assert (
            f"version {spoilt + 1} of ann answers with numbers that are not finite"
            in client.finished["ann-spoilt"].error
        )
        client.wait(lambda: engine.adapters()["ann"] == spoilt + 2)
        assert answers(engine, client, "ann-after", [prompt], adapter="ann") == wanted["ann"]
        assert client.of(VersionPublished)[-1].reason.startswith(f"guard: version {spoilt + 1} answered with numbers")


def test_a_version_is_not_blamed_for_prompts_on_which_the_base_is_not_finite(tmp_path: Path) -> None:
    prompt, bad = random_ids(30, 1), [*random_ids(20, 2), MARK]
    with running_engine(tmp_path, guard__held_out_share=0.0) as (engine, client):
        engine.test_with([NEUTRAL])
        engine.submit_pairs(random_pairs(8, "ann", 0))
        client.wait(lambda: len(client.of(PairRetired)) == 8)
        wanted, version = answers(engine, client, "before", [prompt], adapter="ann"), engine.adapters()["ann"]
        with not_a_number(engine):
            for number in range(4):
                engine.submit(request(f"bad-{number}", bad, adapter="ann"))
                client.wait(lambda number=number: f"bad-{number}" in client.finished)
                assert client.finished[f"bad-{number}"].error
        guard = engine.built.trainer.pair_queues["ann"].guard
        client.wait(lambda: guard.tested_version == version)
        assert engine.adapters()["ann"] == version
        assert answers(engine, client, "after", [prompt], adapter="ann") == wanted
