"""The engine serves what `generate` would, whatever shares the batch, the pages and the adapters."""

from __future__ import annotations

import importlib.util
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from edged.align.adapters.adapter import UnknownAdapter
from edged.align.dpo.step import DpoStep
from edged.align.feedback.pair import PairRetired, PairScored, VersionPublished, VersionSaved
from edged.engine.native.library import kernels, why_no_kernels
from edged.engine.request import EngineBusy, RequestRefused
from tests.engine.harness import BuiltEngine, Client, random_ids, random_pairs, request, running_engine, wait_idle
from tests.models import ARCHITECTURES, tiny_model


def generated(model: torch.nn.Module, prompt: list[int], tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy ids of transformers' own `generate`, and their log-probabilities."""
    out = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = out.sequences[0, len(prompt) :].tolist()
    logps = torch.cat(out.logits).log_softmax(-1)
    return ids, logps.gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_mixed_batches_give_generates_tokens_and_logprobs(kind: str, tmp_path: Path) -> None:
    shared = random_ids(40, 1)
    prompts = [
        shared + random_ids(9, 2),
        shared + random_ids(3, 3),
        random_ids(70, 4),
        random_ids(1, 5),
        random_ids(16, 6),
    ]
    with running_engine(tmp_path, kind, serving__max_batch_tokens=24) as (engine, client):
        for i, prompt in enumerate(prompts):
            engine.submit(request(f"r{i}", prompt, tokens=20, logprobs=2))
            time.sleep(0.01)
        client.wait(lambda: len(client.finished) == len(prompts))
        # The first prompt again: all but its tail comes from the prefix trie.
        engine.submit(request("again", prompts[0], tokens=20, logprobs=2))
        client.wait(lambda: "again" in client.finished)
        assert client.finished["again"].cached_tokens >= 40
    model = tiny_model(kind)
    for name, prompt in [*((f"r{i}", p) for i, p in enumerate(prompts)), ("again", prompts[0])]:
        ids, logps = generated(model, prompt, 20)
        assert client.ids(name) == ids
        got = torch.tensor([event.logprob for event in client.tokens[name]])
        torch.testing.assert_close(got, logps, atol=1e-4, rtol=0)
        assert client.finished[name].reason == "length"


def test_plans_made_ahead_change_no_answer(tmp_path: Path) -> None:
    prompts = [random_ids(30, 1), random_ids(50, 2), random_ids(9, 3)]
    answers = {}
    for setting in ("off", "on"):
        with running_engine(tmp_path, serving__max_batch_tokens=24) as (engine, client):
            engine.loop.plans_ahead = setting == "on"
            for i, prompt in enumerate(prompts):
                engine.submit(request(f"r{i}", prompt, tokens=20 + 15 * i))
            client.wait(lambda: len(client.finished) == len(prompts))
            answers[setting] = [client.ids(f"r{i}") for i in range(len(prompts))]
            foreseen = engine.status()["totals"]["plans_foreseen"]
            assert foreseen > 10 if setting == "on" else foreseen == 0
    assert answers["on"] == answers["off"]


def learned(engine: BuiltEngine, client: Client, adapter: str, seed: int, pairs: int = 8) -> int:
    """Teach an adapter; returns its version."""
    before = len(client.of(PairRetired))
    engine.submit_pairs(random_pairs(pairs, adapter, seed, first_id=before + 1))
    client.wait(lambda: len(client.of(PairRetired)) >= before + pairs)
    wait_idle(engine)
    return engine.adapters()[adapter]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_several_adapters_share_a_batch_and_answer_as_peft_does(kind: str, tmp_path: Path) -> None:
    with running_engine(tmp_path, kind, align__learning_rate=0.02, guard__held_out_share=0.0) as (engine, client):
        for name, seed in (("ann", 1), ("bob", 2)):
            assert learned(engine, client, name, seed, pairs=4) > 0
        prompt = random_ids(30, 9)
        for name in ("ann", "bob", None):
            engine.submit(request(str(name), prompt, 15, adapter=name, logprobs=0))
        client.wait(lambda: len(client.finished) == 3)
        engine.stop(5.0)
        saved = {record.adapter: record for record in client.of(VersionSaved)}
    answers = set()
    for name in ("ann", "bob", None):
        model = tiny_model(kind)
        if name:
            assert saved[name].version == engine.adapters()[name]
            model = PeftModel.from_pretrained(model, saved[name].path)
        ids, logps = generated(model, prompt, 15)
        assert client.ids(str(name)) == ids
        got = torch.tensor([event.logprob for event in client.tokens[str(name)]])
        torch.testing.assert_close(got, logps, atol=1e-4, rtol=0)
        answers.add(tuple(round(logp, 3) for logp in logps.tolist()))
    assert len(answers) == 3, "the adapters changed the answers"


def test_learning_raises_reward_accuracy_and_every_pair_is_scored_before_it_is_trained_on(tmp_path: Path) -> None:
    settings = {"align__learning_rate": 0.02, "align__sft_weight": 0.0, "align__beta": 0.1}
    settings |= {"guard__held_out_share": 0.1, "guard__max_kl_nats": 1e9}
    with running_engine(tmp_path, **settings) as (engine, client):
        engine.submit_pairs(random_pairs(60))
        client.wait(lambda: len(client.of(PairRetired)) >= 60, 120)
        wait_idle(engine)
        client.wait(lambda: len([s for s in client.of(PairScored) if s.split == "prequential"]) == 60)
        records = list(client.records)
    scores = [r for r in records if isinstance(r, PairScored) and r.split == "prequential"]
    assert sorted(s.pair_id for s in scores) == list(range(1, 61))
    retired = {r.pair_id: r for r in records if isinstance(r, PairRetired)}
    for score in scores:
        if retired[score.pair_id].state == "trained":
            assert score.version < retired[score.pair_id].version
    late = scores[-20:]
    assert sum(s.reward_margin > 0 for s in late) / len(late) >= 0.9
    versions = [r.version for r in records if isinstance(r, VersionPublished)]
    assert versions == list(range(1, len(versions) + 1))
    assert sum(r.state == "held_out" for r in retired.values()) == 6
    assert any(r.split == "held_out" and r.kl_nats is not None for r in records if isinstance(r, PairScored))


def test_serving_goes_on_while_fine_tuning_and_new_versions_reach_running_answers(tmp_path: Path) -> None:
    with running_engine(tmp_path, guard__held_out_share=0.0) as (engine, client):
        engine.submit(request("long", random_ids(10, 1), tokens=400, adapter="ann"))
        engine.submit_pairs(random_pairs(12))
        client.wait(lambda: "long" in client.finished)
        assert client.finished["long"].version > 0
        assert engine.status()["totals"]["optimizer_steps"] > 0


def test_pinned_answers_finish_on_the_version_they_started_with(tmp_path: Path) -> None:
    settings = {"serving__on_update": "pin", "guard__held_out_share": 0.0, "align__learning_rate": 0.05}
    with running_engine(tmp_path, **settings) as (engine, client):
        learned(engine, client, "ann", 1)
        prompt = random_ids(10, 1)
        engine.submit(request("alone", prompt, 300, adapter="ann"))
        client.wait(lambda: "alone" in client.finished)
        version = engine.adapters()["ann"]
        engine.submit(request("pinned", prompt, 300, adapter="ann"))
        client.wait(lambda: client.tokens["pinned"])
        engine.submit_pairs(random_pairs(4, seed=5, first_id=100))
        client.wait(lambda: "pinned" in client.finished)
        wait_idle(engine)
        assert engine.adapters()["ann"] > version
        assert client.finished["pinned"].version == version
        assert client.ids("pinned") == client.ids("alone")


def test_a_pinned_answer_keeps_its_version_when_it_loses_its_pages(tmp_path: Path) -> None:
    settings = {
        "serving__on_update": "pin",
        "guard__held_out_share": 0.0,
        "align__learning_rate": 0.05,
        "cache__memory_mb": 1,
        "model__max_context_tokens": 120,
    }
    with running_engine(tmp_path, **settings) as (engine, client):
        learned(engine, client, "ann", 1, pairs=4)
        version = engine.adapters()["ann"]
        names = [f"r{i}" for i in range(24)]
        for i, name in enumerate(names):
            engine.submit(request(name, random_ids(40, i), 70, adapter="ann"))
        client.wait(lambda: len(client.tokens) >= 10)
        started = list(client.tokens)
        engine.submit_pairs(random_pairs(4, seed=5, first_id=100))
        client.wait(lambda: len(client.finished) == len(names))
        wait_idle(engine)
        assert engine.status()["totals"]["preemptions"] > 0
        assert engine.adapters()["ann"] > version
        assert {client.finished[name].version for name in started} == {version}


def test_an_adapter_of_another_rank_is_passed_over_and_learns_on_under_new_numbers(tmp_path: Path) -> None:
    settings = {"guard__held_out_share": 0.0, "store__save_every_s": 0.001, "store__keep_versions": 1}
    with running_engine(tmp_path, align__rank=4, **settings) as (engine, client):
        version = learned(engine, client, "ann", 1)
    with running_engine(tmp_path, align__rank=8, **settings) as (engine, client):
        assert engine.adapters() == {"ann": 0}
        for name in ("ann", "bob"):
            engine.submit(request(name, random_ids(20, 3), 10, adapter=name))
        client.wait(lambda: len(client.finished) == 2)
        assert {event.reason for event in client.finished.values()} == {"length"}
        assert learned(engine, client, "ann", 1) > version
    with running_engine(tmp_path, align__rank=8, **settings) as (engine, _):
        assert engine.adapters()["ann"] > version


def test_a_forgotten_user_who_comes_back_is_not_served_what_was_computed_before(tmp_path: Path) -> None:
    prompt = random_ids(40, 1)
    with running_engine(tmp_path, guard__held_out_share=0.0, align__learning_rate=0.05) as (engine, client):
        assert learned(engine, client, "ann", 1, pairs=4) == 1
        engine.submit(request("old", prompt, 200, adapter="ann"))
        client.wait(lambda: client.tokens["old"])
        engine.forget("ann").result(10)
        client.wait(lambda: "old" in client.finished)
        assert learned(engine, client, "ann", 7, pairs=4) == 1
        engine.submit(request("new", prompt, 10, adapter="ann"))
        client.wait(lambda: "new" in client.finished)
        assert client.finished["new"].cached_tokens == 0


def test_what_a_forgotten_user_said_to_a_shared_adapter_is_not_found_by_others(tmp_path: Path) -> None:
    done, under_way = random_ids(40, 1), random_ids(40, 2)
    with running_engine(tmp_path, guard__held_out_share=0.0, align__learning_rate=0.05) as (engine, client):
        learned(engine, client, "recipes", 1, pairs=4)
        engine.submit(replace(request("done", done, 4, adapter="recipes"), user="ann"))
        client.wait(lambda: "done" in client.finished)
        engine.submit(replace(request("old", under_way, 200, adapter="recipes"), user="ann"))
        client.wait(lambda: client.tokens["old"])
        with pytest.raises(UnknownAdapter):
            engine.forget("ann").result(10)
        client.wait(lambda: "old" in client.finished)
        for name, prompt in (("bob", done), ("cy", under_way)):
            engine.submit(replace(request(name, prompt, 4, adapter="recipes"), user=name))
        client.wait(lambda: {"bob", "cy"} <= set(client.finished))
        assert [client.finished[name].cached_tokens for name in ("bob", "cy")] == [0, 0]


def test_serving_goes_on_while_a_forgotten_users_files_wait_for_the_disk(tmp_path: Path) -> None:
    settings = {"guard__held_out_share": 0.0, "align__learning_rate": 0.05, "store__save_every_s": 0.05}
    with running_engine(tmp_path, **settings) as (engine, client):
        assert learned(engine, client, "ann", 1, pairs=4) == 1
        client.wait(lambda: client.of(VersionSaved))
        written: Future[None] = Future()
        saver = engine.built.finetuning._writer
        journal, saver._journal = saver._journal, lambda records: (journal(records), written)[1]
        assert learned(engine, client, "ann", 5, pairs=4) == 2
        while engine.built.finetuning.next_due_s() is not None:
            time.sleep(0.01)
        gone = engine.forget("ann")
        try:
            engine.submit(request("other", random_ids(40, 1), 10))
            client.wait(lambda: "other" in client.finished, 20)
            assert not gone.done()
            assert engine.adapter_files.path("ann", 1).is_dir(), "its files wait for the disk, and are nobody's"
            assert learned(engine, client, "ann", 9, pairs=4) == 1
        finally:
            written.set_result(None)
        gone.result(20)
    assert engine.adapter_files.versions("ann") == [1]


def test_page_pressure_preempts_and_recomputes_without_changing_an_answer(tmp_path: Path) -> None:
    prompts = [random_ids(40, seed) for seed in range(30)]
    # 6 KiB a page of 8 tokens: pages for about twelve of the thirty sequences.
    with running_engine(tmp_path, model__max_context_tokens=120, cache__memory_mb=1) as (engine, client):
        total = engine.status()["pages"]["total"]
        for i, prompt in enumerate(prompts):
            engine.submit(request(f"r{i}", prompt, tokens=60))
        client.wait(lambda: len(client.finished) == len(prompts))
        status = engine.status()
        assert status["totals"]["preemptions"] > 0
        assert status["pages"]["free"] + status["pages"]["cached"] == total, "all pages came back"
        assert {event.cached_tokens for event in client.finished.values()} == {0}, "its own pages are no prefix hit"
    model = tiny_model()
    for i, prompt in enumerate(prompts):
        assert client.ids(f"r{i}") == generated(model, prompt, 60)[0]


def test_choices_of_one_prompt_share_its_pages(tmp_path: Path) -> None:
    prompt = random_ids(64, 1)
    with running_engine(tmp_path) as (engine, client):
        engine.submit(request("a", prompt, temperature=1.0, seed=1))
        engine.submit(request("b", prompt, temperature=1.0, seed=2))
        client.wait(lambda: len(client.finished) == 2)
        assert client.finished["b"].cached_tokens >= 56
        assert client.ids("a") != client.ids("b")


def test_cancelling_frees_the_pages_and_the_rest_goes_on(tmp_path: Path) -> None:
    with running_engine(tmp_path) as (engine, client):
        total = engine.status()["pages"]["total"]
        engine.submit(request("gone", random_ids(20, 1), tokens=400))
        engine.submit(request("stays", random_ids(20, 2), tokens=30))
        client.wait(lambda: client.tokens["gone"])
        engine.cancel("gone")
        client.wait(lambda: "gone" in client.finished and "stays" in client.finished)
        assert client.finished["gone"].reason == "cancelled"
        assert len(client.ids("gone")) < 400
        assert client.ids("stays") == generated(tiny_model(), random_ids(20, 2), 30)[0]
        engine.cancel("never heard of")
        status = engine.status()
        assert status["pages"]["free"] + status["pages"]["cached"] == total


def test_end_tokens_and_min_tokens(tmp_path: Path) -> None:
    prompt = random_ids(12, 3)
    ids, _ = generated(tiny_model(), prompt, 8)
    stop = ids[2]
    first = ids.index(stop)
    with running_engine(tmp_path) as (engine, client):
        engine.submit(request("stop", prompt, 8, stop_token_ids=(stop,)))
        engine.submit(request("later", prompt, 8, stop_token_ids=(stop,), min_tokens=6))
        client.wait(lambda: len(client.finished) == 2)
    assert client.ids("stop") == ids[: first + 1]
    assert client.finished["stop"].reason == "stop"
    assert len(client.ids("later")) >= 6
    assert stop not in client.ids("later")[:6]


def test_what_can_never_fit_is_refused_and_a_full_queue_says_so(tmp_path: Path) -> None:
    with running_engine(tmp_path, serving__max_queue=2, serving__max_sequences=1) as (engine, client):
        with pytest.raises(RequestRefused, match="context of 512 tokens"):
            engine.submit(request("big", random_ids(500, 1), tokens=100))
        with pytest.raises(RequestRefused, match="prompt is empty"):
            engine.submit(request("none", []))
        refused = [message for i in range(20) if (message := _refusal(engine, i))]
        assert refused
        assert all("max_queue" in message for message in refused)
        client.wait(lambda: len(client.finished) == 20 - len(refused))


def _refusal(engine: BuiltEngine, seed: int) -> str:
    try:
        engine.submit(request(f"r{seed}", random_ids(20, seed), tokens=50))
    except EngineBusy as error:
        return str(error)
    return ""


def test_stopping_finishes_what_runs_and_refuses_what_comes(tmp_path: Path) -> None:
    with running_engine(tmp_path) as (engine, client):
        engine.submit(request("last", random_ids(20, 1), tokens=60))
        stopper = threading.Thread(target=engine.stop, args=(20.0,))
        stopper.start()
        stopper.join()
        assert client.finished["last"].reason == "length"
        with pytest.raises(EngineBusy):
            engine.submit(request("late", random_ids(20, 1)))


def test_a_drain_that_takes_too_long_cancels_what_is_left(tmp_path: Path) -> None:
    with running_engine(tmp_path) as (engine, client):
        for number in range(6):
            engine.submit(request(f"long {number}", random_ids(20, number), tokens=450))
        client.wait(lambda: client.tokens["long 0"])
        engine.stop(0.05)
        assert "cancelled" in {end.reason for end in client.finished.values()}


def test_a_restart_serves_the_newest_whole_version(tmp_path: Path) -> None:
    with running_engine(tmp_path, guard__held_out_share=0.0, align__learning_rate=0.02, store__save_every_s=0.001) as (
        engine,
        client,
    ):
        version = learned(engine, client, "ann", 1)
        assert version >= 2
        engine.submit(request("before", random_ids(20, 3), 20, adapter="ann"))
        client.wait(lambda: "before" in client.finished)
    saved = {record.version: Path(record.path) for record in client.of(VersionSaved)}
    with running_engine(tmp_path) as (engine, client2):
        assert engine.adapters() == {"ann": version}
        engine.submit(request("after", random_ids(20, 3), 20, adapter="ann"))
        client2.wait(lambda: "after" in client2.finished)
        assert client2.ids("after") == client.ids("before")
    weights = saved[version] / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with running_engine(tmp_path) as (engine, _):
        assert engine.adapters() == {"ann": max(v for v in saved if v < version)}


def test_rollback_and_forget(tmp_path: Path) -> None:
    prompt = random_ids(20, 3)
    with running_engine(tmp_path, guard__held_out_share=0.0, align__learning_rate=0.05) as (engine, client):
        learned(engine, client, "ann", 1)
        new = engine.rollback("ann", 0).result(10)
        assert new == engine.adapters()["ann"]
        assert [r.reason for r in client.of(VersionPublished)][-1:] == ["rollback to 0"] or client.wait(
            lambda: client.of(VersionPublished)[-1].reason == "rollback to 0"
        ) is None
        engine.submit(request("rolled", prompt, 20, adapter="ann"))
        client.wait(lambda: "rolled" in client.finished)
        assert client.ids("rolled") == generated(tiny_model(), prompt, 20)[0]
        with pytest.raises(KeyError, match="version 99"):
            engine.rollback("ann", 99).result(10)
        with pytest.raises(KeyError, match="nobody"):
            engine.rollback("nobody", 1).result(10)
        engine.forget("ann").result(10)
        assert engine.adapters() == {}
        assert not list((tmp_path / "data").glob("adapters/*/ann"))


def test_the_status_names_the_paths_and_why_they_are_not_faster_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGED_KERNELS", "lora_kernel=triton")
    with running_engine(tmp_path, model__device="cpu") as (engine, _):
        paths = engine.status()["paths"]
    assert (paths["decode"], paths["prefill"], paths["lora"]) == (
        "native" if kernels() else "ragged",
        "gathered",
        "torch",
    )
    assert paths["why_not"] == {
        **({} if kernels() else dict.fromkeys(("decode", "layers"), why_no_kernels())),
        "lora": "Triton has no kernels for cpu"
        if importlib.util.find_spec("triton")
        else "the package triton is not installed: pip install triton",
        "graphs": "there are no graphs on cpu",
    }


def test_long_iterations_give_signs_of_life_at_each_layer_and_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watchdog waits for a long prompt or many units on a slow board, and only for a device that hangs no longer."""
    seen: list[tuple[float, float]] = []
    run_unit = DpoStep.run_unit

    def note(*_: object) -> None:
        seen.append((engine.loop.last_sign_s, time.monotonic()))

    def noted(step: DpoStep, most: int = 0) -> tuple[str, int]:
        note()
        return run_unit(step, most)

    with running_engine(tmp_path, scheduler__options__idle_quantum_ms=1000.0, guard__held_out_share=0.0) as (
        engine,
        client,
    ):
        hooks = [layer.register_forward_pre_hook(note) for layer in engine.model.layers]
        engine.submit(request("long", random_ids(300, 1), tokens=1))
        client.wait(lambda: "long" in client.finished)
        for hook in hooks:
            hook.remove()
        at_layers = len(seen)
        monkeypatch.setattr(DpoStep, "run_unit", noted)
        engine.submit_pairs(random_pairs(4))
        client.wait(lambda: len(client.of(PairRetired)) == 4)
    assert at_layers == 3
    assert len(seen) > at_layers + 4
    for (_, before), (sign, _) in pairwise(seen):
        assert sign > before, "each layer and unit is a sign that was not there at the one before"
