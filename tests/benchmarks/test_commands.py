"""The benchmarks run to their end; how fast anything is there is not tested."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import benchmarks.all as bench_all
from benchmarks.dpo import SIDES
from benchmarks.instructions import moved, table
from benchmarks.support.callgrind import Counter, missing_program
from benchmarks.support.checkout import ROOT, environment
from edged.scheduler.policies.registry import ROWS
from tests.models import save_tiny

NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))


def run(name: str, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """`python -m benchmarks.NAME`."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=timeout)


def report_of(name: str, *arguments: str, report: Path) -> dict[str, Any]:
    done = run(name, *arguments, "--quick", "--output", str(report), timeout=280)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    return found


@pytest.mark.slow
def test_serving_is_compared_on_equal_greedy_answers(tmp_path: Path) -> None:
    report = report_of("serving", "--size", "4m", "--rounds", "1", "--requests", "4", report=tmp_path / "out.json")
    assert report["model"] == "4m"
    assert report["equal_answers_share"] == {"transformers continuous batching": 1.0, "transformers generate": 1.0}
    assert all(ratio["median"] > 0 for ratio in report["ratios"].values())


@pytest.mark.slow
@pytest.mark.parametrize(("options", "checkpoint"), [((), "float32"), (("--float16",), "float16")])
def test_a_single_stream_is_compared_with_llama_cpp_and_with_an_adapter(
    options: tuple[str, ...], checkpoint: str, tmp_path: Path
) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed: it comes with the extra [peers]")
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: it is in the extra [peers]")
    arguments = ("--rounds", "1", "--requests", "1", "--adapter", "--peer", "llama.cpp", *options)
    report = report_of("serving", *arguments, report=tmp_path / "report.json")
    assert report["checkpoint"] == checkpoint
    # llama.cpp rounds what it multiplies by weights in F16, so its answers may leave ours at some token.
    assert report["equal_answers_share"]["llama.cpp"] == 1.0 or checkpoint == "float16"
    assert set(report["ratios_with_adapter"]) == {"edged", "llama.cpp"}
    assert report["floor_s"]["edged with an adapter"] > report["floor_s"]["edged"] > 0


@pytest.mark.slow
def test_shared_prefixes_are_measured_beside_their_bounds(tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "trace.jsonl")
    report = report_of("prefix", str(trace), "--turns", "3", report=tmp_path / "report.json")
    window, talks = report["workloads"]["window"], report["workloads"]["conversations"]
    # Three turns of two, three and four blocks: the last two find one and two blocks besides the one that all share.
    assert talks["bound"]["hit_share"] == pytest.approx((0 + 2 + 3) / (2 + 3 + 4), abs=0.1)
    assert talks["sides"]["edged with prefix sharing"]["hit_share"][0] > 0.8 * talks["bound"]["hit_share"]
    for found in (window, talks):
        assert found["sides"]["edged without"]["hit_share"] == [0.0]
        assert found["sides"]["edged with prefix sharing"]["hit_share"][0] <= found["bound"]["hit_share"]
        assert found["ratios"]["requests_per_s"]["median"] > 0
        assert found["bound"]["all_s"] > found["bound"]["unseen_s"] > 0
        assert found["bound"]["first_token_s"] >= found["bound"]["unseen_first_token_s"] > 0


@pytest.mark.slow
def test_the_operators_of_forwards_and_units_are_counted(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl.gz", 400)
    options = ("--batch", "4", "--tokens", "128", "--device", "cpu")
    found = report_of("kernels", str(pairs), *options, report=tmp_path / "report.json")["pieces"]
    decodes = found["forward, decodes"]
    units = [piece for name, piece in found.items() if name.startswith("unit, ")]
    assert units
    assert all(piece["kernels"] > 10 for piece in (decodes, *units))
    assert all(0 < piece["busy_share"] <= 1 for piece in (decodes, *units))
    assert "aten::mm" in " ".join(name for piece in units for name in piece["share_of_time"])


@pytest.mark.slow
def test_iterations_are_told_apart_by_how_tokens_are_drawn(tmp_path: Path) -> None:
    report = report_of("iteration", "--size", "4m", "--device", "cpu", report=tmp_path / "report.json")
    assert set(report["decodes"]) == {"1", "8", "32"}
    for mixes in report["decodes"].values():
        assert {"greedy", "temperature", "top_p", "penalties"} <= set(mixes)
        for found in mixes.values():
            assert 0 < found["outside_share"]["median"] < 1
            assert 0 < found["floor_ms"] < found["iteration_ms"]["median"]
    assert set(report["shares"]) == {"decode, batch 1", "decode, batch 8", "decode, batch 32", "prompt of 2048"}
    assert all(share["of_copy_bandwidth"] > 0 < share["of_matmul_rate"] for share in report["shares"].values())
    one = report_of("iteration", "--size", "4m", "--device", "cpu", "--batch", "8", report=tmp_path / "one.json")
    assert set(one["decodes"]) == {"8"}


@pytest.mark.slow
def test_a_trace_is_analysed_without_measuring(tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "trace.jsonl")
    report = report_of("prefix", str(trace), "--analyse", report=tmp_path / "report.json")
    assert report["bounds"]["the whole trace"]["requests"] == 60
    assert "conversations of 3 and more: all" in report["bounds"]
    assert "conversations of 4 and more: all" not in report["bounds"]


def mooncake(path: Path) -> Path:
    """Twenty conversations of three requests, of 2, 3 and 4 blocks; the first block is the same in all."""
    rows = []
    for turn in range(3):
        for talk in range(20):
            blocks = [0, *(1 + 10 * talk + index for index in range(turn + 1))]
            rows.append({"timestamp": 1000 * turn, "input_length": 512 * len(blocks), "output_length": 40})
            rows[-1]["hash_ids"] = blocks
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_arrivals_in_the_middle_of_learning_are_measured(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl.gz", 400)
    report = report_of("preemption", str(pairs), "--requests", "5", report=tmp_path / "report.json")
    assert report["all"]["arrivals"] == 5
    assert sum(found["arrivals"] for found in report["by_kind"].values()) == 5
    assert report["all"]["delay_ms"]["p100"] > 0
    for found in report["by_kind"].values():
        assert found["piece_ms"] is None or found["piece_floor_ms"]["p50"] > 0


@pytest.mark.slow
def test_what_is_kept_of_a_forward_is_measured_three_ways(tmp_path: Path) -> None:
    report = report_of("kept", report=tmp_path / "report.json")
    assert {way["way"] for way in report["ways"]} == {"full", "selective", "none"}
    assert all(len(way["cpu_s"]) == 2 and way["peak_bytes"] > 0 for way in report["ways"])


@pytest.mark.slow
def test_every_policys_decisions_are_timed() -> None:
    arguments = ("--policy", "all", "--json", "--rounds", "2", "--tasks", "8", "--queued", "200")
    done = run("scheduler", *arguments)
    assert done.returncode == 0, done.stderr
    costs = json.loads(done.stdout)
    assert [cost["policy"] for cost in costs] == list(ROWS)
    assert {cost["rounds"] for cost in costs} == {2}
    assert all("queued" in cost["mixes"] and 0 < cost["memory_mb"] < cost["memory_queued_mb"] for cost in costs)


@pytest.mark.slow
def test_instructions_are_counted_and_do_not_depend_on_the_moment(tmp_path: Path) -> None:
    if missing := missing_program():
        pytest.skip(f"{missing} is not installed")
    with Counter("benchmarks.instructions") as counter:
        first = counter.count("plan, mixed")
    with Counter("benchmarks.instructions") as counter:
        assert counter.count("plan, mixed") == pytest.approx(first, rel=0.005)
    assert first > 100_000


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_tells_its_options(name: str) -> None:
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_the_decisions_of_a_federation_s_hub_are_timed() -> None:
    done = run("fleet.venn", "--requests", "40", "--groups", "4", "--boxes", "5", "--rounds", "3", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["atoms"] >= 4
    assert {"plan", "check-in"} <= {row["what"] for row in report["times"]}
    assert all(0 < row["max_ms"] < 1e4 for row in report["times"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "supervised"])
def test_steps_are_compared_on_equal_losses(method: str, tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl.gz", 20)
    arguments = (str(pairs), "--size", "4m", "--steps", "1", "--method", method)
    report = report_of("dpo", *arguments, report=tmp_path / "report.json")
    assert (report["model"], report["method"]) == ("4m", method)
    ours, *theirs = (report["losses"][name] for name in SIDES)
    for losses in theirs:
        # Only the random start of LoRA's A differs, which one step of learning hardly shows.
        assert losses == pytest.approx(ours, abs=0.02)
    assert all(peak > 0 for peak in report["peak_bytes_above_weights"].values())
    assert all(times["median"] > 0 for times in report["times_floor"].values())


def write_pairs(path: Path, count: int) -> Path:
    with gzip.open(path, "wt") as file:
        for number in range(count):
            head = f"\n\nHuman: question {number}, please\n\nAssistant:"
            file.write(json.dumps({"chosen": f"{head} yes, {number}", "rejected": f"{head} no {number} no"}) + "\n")
    return path


@pytest.mark.slow
def test_what_a_person_gets_is_measured_beside_the_base(tmp_path: Path) -> None:
    arguments = (
        "--model",
        "demo",
        "--tastes",
        "formal",
        "--counts",
        "4,16",
        "--set",
        "learning_rate=1e-2",
        "--set",
        "",
    )
    report = report_of("language", *arguments, report=tmp_path / "report.json")
    hard, _, gentle, _ = sorted(report["runs"], key=lambda run: (run["set"] == "", -run["pairs"]))
    assert hard["pairs"] == 16
    assert hard["kl_nats"] > 10 * gentle["kl_nats"] > 0
    assert 0 <= gentle["greedy"]["follow"] <= 1


@pytest.mark.slow
def test_alignment_is_compared_by_taste_policy_and_moment(tmp_path: Path) -> None:
    """A pair's two answers differ in length by their number, so that both tastes are decided."""
    model, pairs = save_tiny(tmp_path / "model"), write_pairs(tmp_path / "pairs.jsonl.gz", 60)
    arguments = (str(pairs), "--first-line", "21", "--model", str(model), "--rate", "4", "--pairs-most", "12")
    arguments += ("--policies", "mace,ekya", "--tastes", "concise", "--device", "cpu")
    report = report_of("alignment", *arguments, report=tmp_path / "report.json")
    found = report["tastes"]["concise"]
    assert found["pairs"] == 12
    assert len(found["loop"][0]["before_training"]["reward_accuracy"]) == 4
    for runs in found["policies"].values():
        assert runs[0]["pairs_sent"] == runs[0]["pairs_scored"] == 12
        user = runs[0]["users"]["concise-0"]
        assert len(user["held_out"]) == 3
        assert len(user["on_arrival"]["clpd_nats"]) == 4
    assert {user["taste"] for user in report["opposite"][0]["users"].values()} == {"concise", "elaborate"}
    assert report["opposite"][0]["pairs_scored"] == 24


@pytest.mark.slow
def test_many_adapters_share_a_batch_and_come_from_disk(tmp_path: Path) -> None:
    arguments = ("--rounds", "1", "--registered", "12", "--active", "4")
    report = report_of("adapters", *arguments, report=tmp_path / "report.json")
    assert set(report["batch"]["over_one_adapter"]) == {"0", "1", "16"}
    assert set(report["batch"]["floor_ms"]) == {"0", "1", "16"}
    assert report["crowd"]["registered"] == 12
    assert report["crowd"]["loaded"] <= 4
    assert all(report["crowd"][kind]["ttft_ms_p50"] > 0 for kind in ("cold", "warm"))


@pytest.mark.slow
def test_pruned_decoding_is_measured_beside_unpruned(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    pairs = write_pairs(tmp_path / "pairs.jsonl.gz", 30)
    arguments = (str(model), str(pairs), "--first", "25", "--recent", "32")
    report = report_of("pruning", *arguments, report=tmp_path / "report.json")
    assert set(report["tbt"]["1"]) == set(report["quality"]) == {"off", "128", "32"}
    pages = [report["tbt"]["2"][name]["pages"] for name in ("off", "128", "32")]
    assert pages == sorted(pages, reverse=True)
    assert pages[0] > 1.5 * pages[1]
    assert report["quality"]["off"]["greedy_agreement"] == 1.0
    assert report["quality"]["off"]["pairs"] == 4
    assert (report["arguments"]["pairs"], report["arguments"]["last"]) == ("pairs.jsonl.gz", 28)
    assert report["quality"]["32"]["greedy_agreement"] < 1.0


def test_counts_that_moved_are_told_and_so_are_other_versions() -> None:
    before = {"versions": {"python": "3.11"}, "instructions_per_call": {"plan": 1000, "pack": 1000}}
    now = {"versions": {"python": "3.12"}, "instructions_per_call": {"plan": 1015, "pack": 1030, "other": 5}}
    assert moved(now, before) == {"pack": pytest.approx(1.03)}
    assert moved(now, None) == {}
    assert "python 3.11 -> 3.12" in table(now, before)


def test_ratios_that_left_their_range_are_told() -> None:
    before = {"median": 1.4, "low": 1.3, "high": 1.5}
    assert bench_all.verdict({"median": 1.45, "low": 1.35, "high": 1.6}, before) == "same"
    assert bench_all.verdict({"median": 1.2, "low": 1.1, "high": 1.25}, before) == "lower"
    assert bench_all.verdict({"median": 1.7, "low": 1.6, "high": 1.8}, before) == "higher"
    assert bench_all.verdict(before, None) == "new"


def test_a_check_names_the_ratios_and_counts_that_moved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bench.json").write_text(json.dumps({"ratios": {"a": spread(1.0), "b": spread(2.0)}}))
    monkeypatch.setattr(bench_all, "ROOT", tmp_path)
    monkeypatch.setattr(bench_all, "COMMITTED", tmp_path / "bench.json")
    monkeypatch.setattr(bench_all, "measure", lambda *_: {"a": spread(1.0), "b": spread(3.0), "c": spread(1.0)})
    counts = {"instructions_per_call": {"plan": 7}, "moved": {"plan": 1.1}}
    monkeypatch.setattr(bench_all, "count_instructions", lambda *_: counts)
    monkeypatch.setattr(sys, "argv", ["bench", "--json", "--check"])
    with pytest.raises(SystemExit, match=r"committed results: b, instructions of plan$"):
        bench_all.main()
    told = json.loads(capsys.readouterr().out)
    assert told["instructions"] == counts
    assert {name: ratio["verdict"] for name, ratio in told["ratios"].items()} == {
        "a": "same",
        "b": "higher",
        "c": "new",
    }
    monkeypatch.setattr(bench_all, "measure", lambda *_: {"a": spread(1.0), "b": spread(2.0)})
    monkeypatch.setattr(bench_all, "count_instructions", lambda *_: None)
    bench_all.main()
    monkeypatch.setattr(sys, "argv", ["bench", "--quick", "--check"])
    with pytest.raises(SystemExit):
        bench_all.main()
    assert "--check needs a full run" in capsys.readouterr().err


@pytest.mark.slow
def test_counts_come_back_with_what_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if missing := missing_program():
        pytest.skip(f"{missing} is not installed")
    counts = bench_all.count_instructions(tmp_path / "report.json", sys.__stderr__)
    assert counts is not None
    assert counts["instructions_per_call"]["plan, mixed"] > 100_000
    assert set(counts["moved"]) <= set(counts["instructions_per_call"])


def spread(value: float) -> dict[str, float]:
    return {"median": value, "low": 0.9 * value, "high": 1.1 * value}


@pytest.mark.slow
def test_a_simulation_is_compared_with_the_replay_of_the_same_requests(tmp_path: Path) -> None:
    model, pairs = save_tiny(tmp_path / "model"), tmp_path / "pairs.jsonl"
    head = "\n\nHuman: hi\n\nAssistant:"
    lines = [json.dumps({"chosen": f"{head} good day {n}", "rejected": f"{head} yo {n}"}) for n in range(20)]
    pairs.write_text("\n".join(lines) + "\n")
    report = report_of(
        "simulated.agreement", "poisson", str(pairs), "--model", str(model), report=tmp_path / "out.json"
    )
    for sides in report.values():
        assert len(sides["measured"]) == 3
        for measured, simulated in zip(sides["measured"], sides["simulated"], strict=True):
            assert measured["load"] == simulated["load"]
            assert measured["finetune"]["pairs_sent"] == simulated["finetune"]["pairs_sent"]
            assert simulated["requests"]["finished"] == simulated["requests"]["sent"] == measured["requests"]["sent"]
        # Every round has a profile of its own, and no two measurements are the same.
        assert len({simulated["slo"]["forward_ms_of_mean_prompt"] for simulated in sides["simulated"]}) == 3


@pytest.mark.slow
def test_the_frontier_sweeps_each_policy_over_its_own_knob_beside_the_offline_optimum(tmp_path: Path) -> None:
    arguments = ["poisson", "--policies", "fcfs,periodic-async", "--rate", "1", "--seconds", "60"]
    report = report_of("simulated.frontier", *arguments, report=tmp_path / "out.json")
    rows = [(row["policy"], row["knob"], row["value"]) for row in report["rows"]]
    intervals = (5.0, 15.0, 30.0, 60.0)
    assert rows == [
        ("fcfs", "", None),
        *(("periodic-async", "scheduler.options.retrain_every_s", each) for each in intervals),
    ]
    trained = [row["finetune.pairs_trained"][0] for row in report["rows"]]
    assert trained[0] == 0 < trained[1]
    (offline,) = report["offline"]
    assert 0.0 < offline["reachable_share"] <= offline["at_most_share"] <= 1.0


@pytest.mark.slow
def test_the_frontier_has_bursts_on_a_device_whose_times_vary_at_the_defaults(tmp_path: Path) -> None:
    arguments = ["lognormal:500:26", "--policies", "mace", "--rate", "0.5", "--seconds", "60", "--seeds", "1"]
    bursts = [*arguments, "--defaults", "--arrivals", "gamma:3"]
    calm, noisy = (
        report_of("simulated.frontier", *bursts, *more, report=tmp_path / "out.json") for more in ([], ["--noisy"])
    )
    assert [len(report["rows"]) for report in (calm, noisy)] == [1, 1]
    assert calm["offline"] == noisy["offline"]
    assert calm["rows"][0]["tbt_ms.mean"] != noisy["rows"][0]["tbt_ms.mean"]
