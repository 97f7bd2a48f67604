"""More adapters than LoRA slots: nobody who needs no slot waits for one, and fine-tuning has its turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from edged.align.feedback.pair import PairRetired, VersionSaved
from edged.engine.sequences import SequenceTable
from tests.engine.harness import BuiltEngine, Client, random_ids, random_pairs, request, running_engine

TWO_SLOTS = {"guard__held_out_share": 0.0, "align__max_active_adapters": 2, "model__max_context_tokens": 500}


def teach(engine: BuiltEngine, client: Client, *names: str) -> None:
    """Each has learned something, so that it needs a slot."""
    for i, name in enumerate(names):
        before = len(client.of(PairRetired))
        engine.submit_pairs(random_pairs(2, name, seed=i, first_id=1 + 100 * i))
        client.wait(lambda before=before: len(client.of(PairRetired)) == before + 2)


def take_both_slots(engine: BuiltEngine, client: Client) -> None:
    """Long answers of ann and ben have begun."""
    for name in ("ann", "ben"):
        engine.submit(request(name, random_ids(20, 1), 400, adapter=name))
    client.wait(lambda: len(client.tokens) == 2)


@pytest.mark.parametrize("policy", ["mace", "adainf", "sync"])
def test_a_long_prompt_without_a_slot_leaves_the_iteration_to_others(tmp_path: Path, policy: str) -> None:
    settings = {**TWO_SLOTS, "serving__max_batch_tokens": 32, "scheduler__policy": policy}
    with running_engine(tmp_path, **settings) as (engine, client):
        teach(engine, client, "ann", "ben", "cid")
        take_both_slots(engine, client)
        engine.submit(request("cid", random_ids(90, 2), 4, adapter="cid"))
        engine.submit(request("base", random_ids(20, 3), 4))
        engine.submit(request("ann too", random_ids(20, 4), 4, adapter="ann"))
        client.wait(lambda: "base" in client.finished and "ann too" in client.finished)
        assert not {"ann", "ben", "cid"} & client.finished.keys(), "they did not wait for a slot"
        client.wait(lambda: len(client.finished) == 5)
        assert {event.error for event in client.finished.values()} == {""}
        assert client.finished["cid"].version > 0


@pytest.mark.parametrize("policy", ["mace", "mace-paper"])
def test_those_who_share_a_slot_do_not_keep_another_waiting_for_ever(tmp_path: Path, policy: str) -> None:
    settings = {"scheduler__ttft_floor_ms": 20.0, "scheduler__policy": policy}
    with running_engine(tmp_path, **TWO_SLOTS, **settings) as (engine, client):
        teach(engine, client, "ann", "ben", "cid")
        asked = 0

        def ask() -> None:
            nonlocal asked
            engine.submit(
                request(f"r{asked}", random_ids(9, asked), 60 + 11 * (asked % 7), adapter=("ann", "ben")[asked % 2])
            )
            asked += 1

        for _ in range(12):
            ask()
        client.wait(lambda: bool(client.tokens))
        engine.submit(request("cid", random_ids(9, 2), 4, adapter="cid"))
        while "cid" not in client.finished:
            client.wait(lambda: "cid" in client.finished or len(client.finished) + 12 > asked)
            while asked < len(client.finished) + 12:
                ask()
            assert asked < 600, "the slots never became idle"
        client.wait(lambda: len(client.finished) == asked + 1)


def test_an_adapter_that_is_on_disk_is_learnt_when_slots_are_scarce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "scheduler__finetune_max_wait_s": 0.2,
        "store__save_every_s": 0.01,
        "align__max_loaded_adapters": 2,
    }
    with running_engine(tmp_path, **TWO_SLOTS, **settings) as (engine, client):
        teach(engine, client, "ann", "ben", "eve")
        client.wait(lambda: {"ann", "ben", "eve"} == {record.adapter for record in client.of(VersionSaved)})
        monkeypatch.setattr(SequenceTable, "waiting_for_slot", property(lambda _: True))
        load, loads = engine.built.trainer.adapter_cache.load, []
        monkeypatch.setattr(engine.built.trainer.adapter_cache, "load", lambda name: loads.append(name) or load(name))
        take_both_slots(engine, client)
        client.wait(lambda: not engine.built.trainer.adapter_cache.resident("eve"))
        before = len(client.of(PairRetired))
        engine.submit_pairs(random_pairs(2, "eve", seed=9, first_id=1000))
        client.wait(lambda: len(client.of(PairRetired)) == before + 2)
        assert loads.count("eve") == 1


def test_one_who_waits_for_a_slot_can_be_cancelled(tmp_path: Path) -> None:
    with running_engine(tmp_path, **TWO_SLOTS) as (engine, client):
        teach(engine, client, "ann", "ben", "cid")
        take_both_slots(engine, client)
        engine.submit(request("cid", random_ids(90, 2), 4, adapter="cid"))
        engine.submit(request("cid again", random_ids(9, 2), 4, adapter="cid"))
        engine.cancel("cid")
        client.wait(lambda: len(client.finished) == 4)
        assert client.finished["cid"].reason == "cancelled"
        assert client.finished["cid again"].reason == "length"


def test_pairs_are_learnt_while_requests_want_more_slots_than_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"scheduler__finetune_max_wait_s": 0.2, "store__save_every_s": 0.01}
    names = ["ann", "ben", "cid", "dan", "eve"]
    with running_engine(tmp_path, **TWO_SLOTS, **settings) as (engine, client):
        teach(engine, client, *names)
        # At every moment, not only nearly always.
        monkeypatch.setattr(SequenceTable, "waiting_for_slot", property(lambda _: True))
        asked = 0

        def ask() -> None:
            nonlocal asked
            engine.submit(request(f"r{asked}", random_ids(9, asked), 30, adapter=names[asked % 4]))
            asked += 1

        for _ in range(8):
            ask()
        client.wait(lambda: len(client.finished) > 2)
        before = len(client.of(PairRetired))
        engine.submit_pairs(random_pairs(2, "eve", seed=9, first_id=1000))
        while len(client.of(PairRetired)) < before + 2:
            done = len(client.finished)
            client.wait(lambda done=done: len(client.finished) > done or len(client.of(PairRetired)) == before + 2)
            while asked < len(client.finished) + 8:
                ask()
            assert asked < 400, "no step was opened"
        client.wait(lambda: len(client.finished) == asked)


def test_answers_go_on_with_the_weights_that_they_have_where_a_new_version_does_not_get_into_their_slot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, settings = random_ids(20, 1), {"align__learning_rate": 0.05, "guard__held_out_share": 0.0}
    with running_engine(tmp_path, **settings) as (engine, client):
        teach(engine, client, "ann")
        engine.submit(request("before", prompt, 400, adapter="ann"))
        client.wait(lambda: "before" in client.finished)
        trainer, banks = engine.built.trainer, engine.model.lora._banks
        weights = {name: 3.0 * tensor for name, tensor in engine.weights("ann").result(20)[1].items()}

        def publish() -> bool:
            # The weights of the last linears cannot be loaded, after those of all others could.
            banks.append((1, banks[-1][1], banks[-1][2][..., :1]))
            trainer.versions.replace(trainer.adapter_cache.build("ann", weights), "imported")
            banks.pop()
            return "during" in client.finished

        engine.submit(request("during", prompt, 400, adapter="ann"))
        client.wait(lambda: "during" in client.tokens)
        assert not engine.commands.ask(publish).result(20)
        client.wait(lambda: "during" in client.finished)
        assert client.ids("during") == client.ids("before")
        assert {event.version for event in client.tokens["during"]} == {1}
        engine.submit(request("after", prompt, 400, adapter="ann"))
        client.wait(lambda: "after" in client.finished)
        assert client.finished["after"].version == 2
        assert client.ids("after") != client.ids("before")
    assert "version 2 of ann is not in a slot yet" in caplog.text
