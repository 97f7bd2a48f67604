"""A simulation does the work that the engine would do, in the time that the device says."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
import pytest
from click.testing import CliRunner

from edged.align.dpo.step import DpoStep
from edged.align.dpo.step_plan import Recompute
from edged.align.feedback.pair import TokenPair
from edged.cache import pruning_budget
from edged.cli.main import cli
from edged.engine.model.loading import ModelRefused
from edged.engine.request import Request
from edged.engine.sampling.params import Sampling
from edged.lab.bench.replay import ReplayPlan, replay
from edged.lab.bench.traces import read_trace
from edged.lab.simulator.device_file import DeviceError, find_device
from edged.lab.simulator.hardware import SimulatedHardware
from edged.lab.simulator.plan import SimulationPlan
from edged.lab.simulator.roofline import Pass
from edged.lab.simulator.simulation import Simulation, lone_ttft_s, simulate
from edged.lab.simulator.steps import SimulatedStep
from edged.scheduler.cost.prices import Prices
from edged.scheduler.cost.profile import DeviceMemory, ForwardTime, Noise, Profile, Subject
from edged.scheduler.task import Grant, Unit
from edged.settings.load import AlignSettings, Settings
from tests.align.dpo import test_dpo_exact as exact
from tests.cache.integrity import check_trie
from tests.models import save_tiny, tiny_model

DEVICE = "agx-orin-32gb-maxn"


def plan(trace: str = "poisson", policy: str = "mace", settings: dict[str, Any] | None = None, **changes: Any) -> Any:
    values: dict[str, Any] = {"rate_per_s": 1.5, "retrain_rate": 0.3, "seconds": 40.0, **changes}
    chosen = Settings.model_validate({**(settings or {}), "scheduler": {"policy": policy}})
    return SimulationPlan(trace=trace, device=DEVICE, model="mistral-3b", settings=chosen, **values)


def played(what: SimulationPlan) -> tuple[Simulation, dict[str, Any]]:
    simulation = Simulation(what, SimulatedHardware.of(what), lambda _line: None)
    return simulation, simulation.play(read_trace(what.trace, what.seed))


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Twelve requests, ten seconds apart: every second one repeats the first block of the one before."""
    path = tmp_path_factory.mktemp("trace") / "mooncake.jsonl"
    rows = [
        {"timestamp": 10_000 * n, "input_length": 1100, "output_length": 30, "hash_ids": [n // 2, 100 + n, 200 + n]}
        for n in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("policy", ["mace", "fcfs", "adainf", "flexllm"])
@pytest.mark.parametrize("memory_mb", [0, 70])
def test_every_request_gets_its_tokens_and_every_page_comes_back(policy: str, memory_mb: int) -> None:
    simulation, report = played(plan(policy=policy, settings={"cache": {"memory_mb": memory_mb}}, rate_per_s=1.2))
    engine = simulation.engine
    assert report["requests"]["finished"] == report["requests"]["sent"] == len(engine.recorder.answers) == 48
    for answer in engine.recorder.answers.values():
        assert answer.finish is not None
        assert len(answer.token_s) == answer.finish.completion_tokens > 0
        assert answer.token_s == sorted(answer.token_s)
        assert answer.token_s[0] > answer.due_s
    if memory_mb:
        assert report["scheduler"]["preemptions"] > 0, "70 MB hold some 1280 tokens"
    while engine.learning.by_task:
        engine.run(engine.now + 1.0)
    assert engine.trie is not None
    check_trie(engine.trie)
    assert engine.pool.free_pages + len(engine.trie) == engine.pool.pages - 1


def test_a_lone_request_gets_its_first_token_when_the_device_says(tmp_path: Path) -> None:
    trace = tmp_path / "one.csv"
    rows = ["2023-11-16 18:15:46,2500,5", "2023-11-16 18:16:46,40,3"]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    what = plan(str(trace), retrain_rate=0.0, seconds=120.0, rate_per_s=2 / 120)
    simulation, _ = played(what)
    device = SimulatedHardware.of(what).device
    for answer, tokens in zip(simulation.recorder.answers.values(), (2500, 40), strict=True):
        assert answer.ttft_s == pytest.approx(lone_ttft_s(device, tokens, most=1024), rel=1e-9)


@pytest.mark.parametrize("policy", ["fcfs", "mace"])
def test_every_policy_pays_for_the_adapter_from_the_start(policy: str) -> None:
    simulation = Simulation(what := plan(policy=policy, seconds=5.0), SimulatedHardware.of(what), lambda _line: None)
    forward_s, seen = simulation.engine.device.forward_s, []

    def watched(load: Pass) -> float:
        seen.append((load.decodes + load.prefill_tokens, load.adapters, load.adapted))
        return forward_s(load)

    simulation.engine.device.forward_s = watched  # type: ignore[method-assign]
    simulation.play(read_trace(what.trace, what.seed))
    serving = [(tokens, adapters, adapted) for tokens, adapters, adapted in seen if tokens]
    assert serving
    assert all(adapters == 1 and adapted >= tokens for tokens, adapters, adapted in serving)
    alone: list[Pass] = []
    device = SimpleNamespace(overhead_s=0.0, forward_s=lambda load: alone.append(load) or 0.0)
    lone_ttft_s(cast(Any, device), 1500, most=1024)
    assert [(load.adapters, load.adapted, load.chunk_context) for load in alone] == [(1, 1024, 0), (1, 476, 1024)]


def test_shared_beginnings_are_computed_once(conversations: str) -> None:
    report = simulate(plan(conversations, retrain_rate=0.0, seconds=120.0, rate_per_s=0.1))
    assert report["prefix"]["prompt_tokens"] == 12 * 1100
    assert report["prefix"]["hit_tokens"] == 6 * 512
    alone = simulate(plan(conversations, policy="mace-prefix", retrain_rate=0.0, seconds=120.0, rate_per_s=0.1))
    assert alone["prefix"]["hit_tokens"] == 0
    assert alone["ttft_ms"]["mean"] > 1.1 * report["ttft_ms"]["mean"]


def test_a_new_version_shares_nothing_with_the_one_before(conversations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A pair comes with each request, and a version of it before the next one.
    what = plan(conversations, retrain_rate=1.0, seconds=120.0, rate_per_s=0.1)
    simulation, report = played(what)
    assert simulation.engine.stats.totals.renewals > 0
    assert report["prefix"]["hit_tokens"] == 6 * 512, "each second goes on from what was computed again"
    monkeypatch.setattr("edged.engine.renewals._GOES_ON_S", 0.0)
    simulation, report = played(what)
    assert report["finetune"]["pairs_trained"] == report["finetune"]["steps"] == 12
    assert report["prefix"]["hit_tokens"] == 0, "an earlier version's 512 tokens would save less than half"
    assert simulation.engine.trie is not None
    assert len(simulation.engine.trie) == 12 * (1130 // 16), "long talks may go on over them"


def test_what_a_trie_was_asked_counts_though_it_is_empty_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edged.engine.renewals._GOES_ON_S", 0.0)
    trace = tmp_path / "two.csv"
    rows = ["2023-11-16 18:15:46,390,5", "2023-11-16 18:15:56,400,3"]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    simulation, report = played(plan(str(trace), retrain_rate=1.0, seconds=60.0, rate_per_s=2 / 60))
    assert simulation.engine.trie is not None
    assert len(simulation.engine.trie) == 0, "the last version replaced the one that computed both short prompts"
    assert report["prefix"]["prompt_tokens"] == 790


def test_the_same_seed_gives_the_same_report() -> None:
    def run(seed: int) -> dict[str, Any]:
        report = simulate(plan(seed=seed))
        del report["measured_at"], report["scheduler"]["decision_ms_p50"]
        return report

    first = run(1)
    assert run(1) == first
    assert run(2) != first


def test_policies_differ_as_their_descriptions_say() -> None:
    fcfs, mace, adainf = (simulate(plan(policy=name, rate_per_s=3.0)) for name in ("fcfs", "mace", "adainf"))
    assert fcfs["finetune"]["pairs_trained"] == 0
    assert 0 < mace["finetune"]["pairs_trained"] <= adainf["finetune"]["pairs_trained"]
    assert adainf["ttft_ms"]["mean"] > mace["ttft_ms"]["mean"]
    assert adainf["tbt_ms"]["p95"] > mace["tbt_ms"]["p95"]
    for report in (fcfs, mace, adainf):
        for row in report["timeline"]:
            parts = row["prefill_share"] + row["decode_share"] + row["finetune_share"]
            assert row["busy_share"] == pytest.approx(parts)
            assert 0.0 <= row["busy_share"] <= 1.0 + 1e-9


def test_an_arrival_waits_for_one_unit_at_most() -> None:
    """Steps fill an idle device; a request that comes in the middle of a row of units ends it after the present one."""
    what = plan(policy="adainf", retrain_rate=1.0, pair_tokens=(400, 300, 300))
    simulation = Simulation(what, SimulatedHardware.of(what), lambda _line: None)
    engine, cut = simulation.engine, []
    run_units, unit_s = engine.runner.run_units, engine.device.unit_s
    waited: list[float] = []

    def timed(unit: Unit) -> float:
        # Called when a unit begins.
        waited.append(engine.now - min((coming.at_s for coming in engine.commands.coming), default=engine.now))
        return unit_s(unit)

    def watched(job: Any, grant: Grant, *more: Any) -> int:
        waited.clear()
        ran = run_units(job, grant, *more)
        assert all(wait_s <= 0.0 for wait_s in waited[1:]), "a unit began though a request had come"
        cut.append(ran < grant.units)
        return ran

    engine.device.unit_s = timed  # type: ignore[method-assign]
    engine.runner.run_units = watched  # type: ignore[method-assign, assignment]
    simulation.play(read_trace(what.trace, what.seed))
    assert any(cut)
    assert not all(cut)


def test_pruning_returns_the_pages_of_long_answers_and_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning_budget, "PRUNED_TOKENS", 256)
    monkeypatch.setattr(pruning_budget, "RECENT_TOKENS", 64)
    trace = tmp_path / "long.csv"
    rows = [f"2023-11-16 18:15:{n:02d},2000,600" for n in range(12)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    load = {"retrain_rate": 0.0, "seconds": 12.0, "rate_per_s": 1.0}
    cache = {"memory_mb": 1000, "pruning": "on"}
    pruned, with_pruning = played(plan(str(trace), settings={"cache": cache}, **load))
    whole, without = played(plan(str(trace), policy="mace-prune", settings={"cache": cache}, **load))
    pruner = pruned.engine.pruner
    assert pruner is not None
    assert pruner.pages_returned > 12 * (2000 - 256 - 64 - 16) // 16 // 2
    assert whole.engine.pruner is None
    assert with_pruning["ttft_ms"]["p95"] < without["ttft_ms"]["p95"]
    assert with_pruning["tbt_ms"]["p50"] < without["tbt_ms"]["p50"]
    assert pruned.engine.trie is not None
    check_trie(pruned.engine.trie)
    assert pruned.engine.pool.free_pages + len(pruned.engine.trie) == pruned.engine.pool.pages - 1


def test_requests_that_wait_together_and_begin_alike_compute_their_beginning_once(tmp_path: Path) -> None:
    trace = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 3000 * (n // 4), "input_length": 1100, "output_length": 30, "hash_ids": [0, 1, 10 + n]}
        for n in range(8)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    simulation, _ = played(plan(str(trace), policy="fcfs", retrain_rate=0.0, seconds=1.0, rate_per_s=8.0))
    assert simulation.engine.trie is not None
    assert simulation.engine.trie.stats.hit_tokens == 7 * 1024


def profile_of(model: Path) -> Profile:
    forwards = [ForwardTime(prefill_tokens=n, pairs=n * n / 2, seconds=0.01 + 0.0002 * n) for n in (8, 64, 256)]
    prices = Prices((0.01, 0.0002, 0.0002, 0.0, 1e-7, 0.0, 0.0, 0.0), 32, {"head": (0.001, 0.0), "grad": (0.002, 0.0)})
    subject = Subject(model=model.name, fingerprint="f", device="A CPU 2 cores", dtype="float32", threads=2)
    return Profile(
        subject=subject,
        created_at="2026-01-01T00:00:00Z",
        edged_version="0",
        prices=prices,
        overhead_s=0.003,
        error_percent={},
        forwards=tuple(forwards),
        device_memory=DeviceMemory(kind="cpu", total_bytes=8 << 30, available_bytes=6 << 30),
    )


def test_answers_that_quote_their_prompts_are_drafted_and_come_sooner() -> None:
    def quoting(prompt_lookup: bool, quote_tokens: int = 30) -> Any:
        settings = {"serving": {"prompt_lookup": prompt_lookup}}
        return played(plan(settings=settings, quote_tokens=quote_tokens, pace=None))[1]

    drafted, plain, silent = quoting(True), quoting(False), quoting(True, 0)
    assert 0.3 < drafted["drafts"]["right"] / drafted["drafts"]["tokens"] < 1.0
    assert plain["drafts"] == silent["drafts"] == {"tokens": 0, "right": 0}
    assert drafted["requests"]["finished"] == plain["requests"]["finished"]
    assert drafted["load"]["mean_output_tokens"] == plain["load"]["mean_output_tokens"]
    assert drafted["tbt_ms"]["mean"] < 0.9 * plain["tbt_ms"]["mean"]


def test_candidates_lengthen_answers_hardly_and_leave_training_its_time() -> None:
    def drawn(best_of: int) -> Any:
        return played(plan("lognormal:1000:300", best_of=best_of, rate_per_s=0.72, seconds=40.0))[1]

    one, four = drawn(1), drawn(4)
    assert one["candidates"] == {"drawn": 0, "dropped": 0}
    assert four["candidates"]["drawn"] > four["candidates"]["dropped"]
    assert four["requests"] == one["requests"]
    assert four["tbt_ms"]["mean"] < 1.05 * one["tbt_ms"]["mean"]
    assert four["finetune"]["pairs_trained"] >= one["finetune"]["pairs_trained"] - 1 > 0


def test_a_profile_is_simulated_with_its_own_prices(tmp_path: Path) -> None:
    model, path = save_tiny(tmp_path / "tiny"), tmp_path / "profile.json"
    profile = profile_of(model)
    profile.write(path)
    what = replace(plan(retrain_rate=0.0, rate_per_s=0.1, seconds=60.0), device=str(path), model=str(model))
    simulation, report = played(what)
    assert report["model"]["device"] == "A CPU 2 cores"
    first = next(iter(simulation.recorder.answers.values()))
    # Overhead, pass and tokens; then a pass, a token and the keys it reads, for each token that follows. What an
    # adapter takes, and a decode besides its token, was not measured: the guesses are some 100 us.
    assert first.ttft_s == pytest.approx(0.003 + 0.01 + 0.0002 * first.prompt_tokens, abs=1e-4)
    gap_s = first.token_s[1] - first.token_s[0]
    assert gap_s == pytest.approx(0.003 + 0.01 + 0.0002 + 1e-7 * first.prompt_tokens, abs=2e-4)
    with pytest.raises(DeviceError, match='of the model "tiny", not of "mistral-3b"'):
        simulate(replace(what, model="mistral-3b"))
    assert SimulatedHardware.of(what).parts.total < 6 << 30
    little = DeviceMemory(kind="cpu", total_bytes=8 << 30, available_bytes=32 << 20)
    profile.model_copy(update={"device_memory": little}).write(path)
    with pytest.raises(ModelRefused, match="and A CPU 2 cores has"):
        SimulatedHardware.of(what)
    profile.model_copy(update={"device_memory": None}).write(path)
    with pytest.raises(DeviceError, match=r"does not tell the memory of A CPU 2 cores.*set cache\.memory_mb"):
        SimulatedHardware.of(what)
    given = Settings.model_validate({"cache": {"memory_mb": 8}})
    assert SimulatedHardware.of(replace(what, settings=given)).pages > 4
    path.write_text("{}")
    with pytest.raises(DeviceError, match="is no profile of this version"):
        simulate(what)


def test_a_prompt_that_finds_the_engine_at_rest_wakes_it_and_one_that_finds_it_busy_does_not(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")

    def first_tokens_s(rest_s: float) -> list[float | None]:
        path = tmp_path / f"{rest_s}.json"
        profile_of(model).model_copy(update={"rest_s": rest_s}).write(path)
        what = replace(plan(policy="fcfs"), device=str(path), model=str(model))
        engine = Simulation(what, SimulatedHardware.of(what), lambda _line: None).engine

        def ask(name: str, until_tokens: int) -> None:
            engine.recorder.expect(name, engine.now, 20)
            engine.submit(Request(name, tuple(range(20)), Sampling(max_tokens=12, ignore_eos=True)))
            while len(engine.recorder.answers[name].token_s) < until_tokens:
                engine.run(engine.now + 1e-9)

        ask("at the start", until_tokens=3)
        ask("while it decodes", until_tokens=12)
        engine.run(engine.now + 10.0)
        ask("after a rest", until_tokens=12)
        return [answer.ttft_s for answer in engine.recorder.answers.values()]

    start_s, busy_s, again_s = first_tokens_s(0.0)
    assert start_s is not None
    assert again_s is not None
    assert first_tokens_s(0.05) == pytest.approx([start_s + 0.05, busy_s, again_s + 0.05], rel=1e-9)


class Told(DpoStep):
    """A real step that remembers what it was to do and what it did."""

    told: list[Any]

    def run_unit(self, most: int = 0) -> tuple[str, int]:
        left = self.units_left()
        ran = super().run_unit(most)
        type(self).told.append((left, ran, self.micro_batch.tokens_left, self.finished))
        return ran


@pytest.mark.parametrize("keep", get_args(Recompute))
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("window", [32, 90, 256])
def test_a_simulated_step_has_the_units_of_a_real_one(
    monkeypatch: pytest.MonkeyPatch, keep: Recompute, known: bool, window: int
) -> None:
    pairs = exact.make_pairs(prompt=17)
    if not known:
        pairs = [TokenPair(pair.pair_id, "ann", pair.prompt, pair.chosen, pair.rejected) for pair in pairs]
    Told.told = []
    monkeypatch.setattr(exact, "DpoStep", Told)
    model = tiny_model()
    exact.take_step(model, {"ann": pairs}, window=window, chunk=1000, recompute=keep)
    align = AlignSettings(window_tokens=window)
    unknown = [pair.pair_id for pair in pairs if pair.ref_chosen_logp is None]
    step = SimulatedStep(
        pairs, lambda pair: pair.pair_id in unknown, align, 3, model.config.vocab_size, 10_000, keep != "full"
    )
    told = []
    while not step.finished:
        for pair_forward in step.pair_forwards:
            pair_forward.done += pair_forward.left
        left = list(step.units)
        ran = step.run_unit()
        told.append((left, ran, step.tokens_left, step.finished))
    assert told == Told.told


def test_the_report_reads_like_a_replays(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    pairs = tmp_path / "pairs.jsonl"
    head = "\n\nHuman: hi\n\nAssistant:"
    pairs.write_text(
        "".join(json.dumps({"chosen": f"{head} good {n}", "rejected": f"{head} yo"}) + "\n" for n in range(9))
    )
    settings = Settings.model_validate({"cache": {"memory_mb": 8}})
    measured = replay(
        ReplayPlan(
            trace="poisson",
            pairs=pairs,
            model_dir=model,
            settings=settings,
            rate_per_s=4.0,
            retrain_rate=0.5,
            seconds=1.0,
        ),
    )
    simulated = simulate(plan(seconds=5.0))

    def keys(part: Any) -> Any:
        return {name: keys(value) for name, value in part.items()} if isinstance(part, dict) else None

    expected, found = keys(measured), keys(simulated)
    for name in ("load_average_before", "pairs_file"):
        del expected[name]
    assert found.pop("simulated", 0) is None
    assert found["model"].keys() >= {"name", "device", "dtype", "max_context_tokens"}
    del expected["model"], found["model"]
    assert found == expected


def test_the_command_prints_what_was_simulated_and_says_what_it_does_not_know() -> None:
    runner = CliRunner()
    command = ["bench", "simulate", "--trace", "poisson", "-d", DEVICE, "-m", "mistral-3b", "--seconds", "5"]
    shown = runner.invoke(cli, [*command, "--rate", "2", "--quantize", "nf4"])
    assert shown.exit_code == 0, shown.output
    assert "NVIDIA Jetson AGX Orin 32GB (MAXN)" in " ".join(shown.output.split())
    as_json = runner.invoke(cli, [*command, "--rate", "2", "--policy", "fcfs", "--json"])
    assert json.loads(as_json.stdout)["policy"] == "fcfs"
    wrong = runner.invoke(cli, [*command[:-4], "-m", "mistral-3", "--rate", "2"])
    assert wrong.exit_code == 1
    assert 'did you mean "mistral-3b"?' in wrong.output
    bad = runner.invoke(cli, [*command, "--pair-tokens", "1,2"])
    assert bad.exit_code == 2
    assert "give 3 values" in bad.output


def test_every_field_of_a_report_is_documented() -> None:
    told = (Path(__file__).parents[3] / "docs" / "bench.md").read_text()
    report = simulate(plan(seconds=5.0))
    for name, value in report.items():
        fields = [f"{name}.{field}" for field in value] if isinstance(value, dict) else []
        whole = f"`{name}`" in told or f"`{name}.*`" in told
        assert whole or fields, name
        assert whole or all(f"`{field}`" in told or f"`{field}.*`" in told for field in fields), (name, fields)


def test_trained_tokens_are_those_of_the_pairs_each_time_that_they_are_trained_on() -> None:
    settings = {"align": {"epochs": 3, "replay_share": 0.0, "micro_batch_pairs": 1}}
    lengths = [(50, 20, 30)] * 4
    _, report = played(plan(settings=settings, rate_per_s=0.2, retrain_rate=1.0, seconds=60.0, pair_lengths=lengths))
    assert report["finetune"]["pairs_trained"] == 4
    assert report["finetune"]["trained_tokens_per_s"] == pytest.approx(4 * 3 * 100 / 60.0)


def test_beside_a_step_of_its_own_stream_answers_are_slower_than_alone_and_faster_than_before_it() -> None:
    load: dict[str, Any] = {"retrain_rate": 1.0, "rate_per_s": 0.2, "seconds": 60.0}
    alone, _ = played(plan(policy="fcfs", **load))
    what = plan(policy="spatial", settings={"align": {"epochs": 1000}}, **load)
    beside, report = played(what)
    hardware = SimulatedHardware.of(what)
    hardware.device.overlap = lambda *_work: 1.0
    after = Simulation(what, hardware, lambda _line: None)
    after.play(read_trace(what.trace, what.seed))
    assert report["finetune"]["trained_tokens_per_s"] > 0
    assert np.mean(gaps(alone)) < np.mean(gaps(beside)) < np.mean(gaps(after))


def test_a_policy_that_fails_ends_a_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bin of no tasks")

    simulation = Simulation(what := plan(seconds=5.0), SimulatedHardware.of(what), lambda _line: None)
    monkeypatch.setattr(simulation.engine.scheduler.policy.fill, "plan", fail)
    with pytest.raises(RuntimeError, match="the policy mace failed"):
        simulation.play(read_trace(what.trace, what.seed))


def test_trained_tokens_are_those_of_all_groups_of_a_step() -> None:
    # A group holds two windows: a step has two, and as many pairs in each.
    settings = {"align": {"replay_share": 0.0, "micro_batch_pairs": 4, "window_tokens": 100, "recompute": False}}
    lengths = [(50, 20, 30)] * 4
    _, report = played(plan(settings=settings, rate_per_s=0.2, retrain_rate=1.0, seconds=60.0, pair_lengths=lengths))
    assert report["finetune"]["pairs_trained"] == 4
    assert report["finetune"]["trained_tokens_per_s"] == pytest.approx(4 * 100 / 60.0)


def noisy(what: SimulationPlan, **noise: float) -> tuple[Simulation, dict[str, Any]]:
    hardware = SimulatedHardware.of(what)
    hardware.device.noise = Noise(**noise)
    simulation = Simulation(what, hardware, lambda _line: None)
    return simulation, simulation.play(read_trace(what.trace, what.seed))


def gaps(simulation: Simulation) -> list[float]:
    answers = simulation.engine.recorder.answers.values()
    return [after - before for answer in answers for before, after in pairwise(answer.token_s)]


def test_jitter_scatters_the_times_around_the_same_mean_and_follows_the_seed() -> None:
    alone = plan(policy="fcfs", retrain_rate=0.0, rate_per_s=0.05, seconds=200.0)
    (steady, _), (one, _), (again, _) = played(alone), noisy(alone, jitter=0.15), noisy(alone, jitter=0.15)
    assert gaps(one) == gaps(again) != gaps(steady)
    assert gaps(one) != gaps(noisy(replace(alone, seed=1), jitter=0.15)[0])
    assert np.mean(gaps(one)) == pytest.approx(np.mean(gaps(steady)), rel=0.03)
    # Nearly all of a gap on this device is the forward.
    assert np.std(np.log(gaps(one))) == pytest.approx(0.15, rel=0.2)


def test_only_the_first_decode_after_a_chunk_pays_for_it() -> None:
    alone = plan(policy="fcfs", retrain_rate=0.0, rate_per_s=0.01, seconds=100.0)
    (steady, _), (later, _) = played(alone), noisy(alone, decode_after_chunk=0.25)
    (before,), (after,) = steady.engine.recorder.answers.values(), later.engine.recorder.answers.values()
    ratios = np.diff(after.token_s) / np.diff(before.token_s)
    assert 1.2 < ratios[0] < 1.25
    assert ratios[1:] == pytest.approx(1.0)


def test_a_device_file_may_have_noise_and_has_none_otherwise(tmp_path: Path) -> None:
    own = find_device(DEVICE).read_text()
    path = tmp_path / "noisy.toml"
    path.write_text(own + "\n[noise]\njitter = 0.1\ndecode_after_chunk = 0.2\n")
    assert SimulatedHardware.of(replace(plan(), device=str(path))).device.noise == Noise(
        jitter=0.1, decode_after_chunk=0.2
    )
    assert SimulatedHardware.of(plan()).device.noise == Noise()
