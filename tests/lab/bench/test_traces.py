"""Public traces are read as they were recorded and become loads that fit the machine."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from edged.lab.bench.traces import PromptIds, RequestTrace, TraceError, TraceRow, length_scale, read_trace, scale_trace
from tests.real_data import DATA

IDS = range(3, 259)


def azure(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "azure.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    return str(path)


def mooncake(tmp_path: Path, *records: object) -> str:
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return str(path)


def record(ms: int, prompt: int, output: int, blocks: list[int]) -> dict[str, object]:
    return {"timestamp": ms, "input_length": prompt, "output_length": output, "hash_ids": blocks}


def test_an_azure_trace_starts_at_zero_and_keeps_its_gaps(tmp_path: Path) -> None:
    trace = read_trace(azure(tmp_path, "2023-11-16 18:15:50.9951690,396,109", "2023-11-16 18:15:46.6805900,374,44"))
    assert [(row.prompt_tokens, row.output_tokens) for row in trace.rows] == [(374, 44), (396, 109)]
    assert trace.rows[0].at_s == 0.0
    assert trace.rows[1].at_s == pytest.approx(4.314579, abs=1e-5)


def test_requests_of_one_mooncake_tick_are_spread_over_it(tmp_path: Path) -> None:
    rows = [record(0, 600, 5, [1, 2]), record(0, 512, 5, [1]), record(3000, 512, 5, [1])]
    trace = read_trace(mooncake(tmp_path, *rows))
    assert [row.at_s for row in trace.rows] == [0.0, 1.5, 3.0]
    assert trace.block_tokens == 512
    assert trace.rows[0].blocks == (1, 2)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["2023-11-16 18:15:46,374,44", "yesterday,1,1"], "line 3: not a request of this trace: Invalid isoformat"),
        (["2023-11-16 18:15:46,many,44", "2023-11-16 18:15:47,1,1"], "line 2: .*'many'"),
        (["2023-11-16 18:15:46,0,44", "2023-11-16 18:15:47,1,1"], "line 2: .* 0 prompt"),
        (["2023-11-16 18:15:46,374,44"], "has 1 requests: at least two"),
    ],
)
def test_a_bad_azure_line_is_named(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(azure(tmp_path, *lines))


def test_a_bad_mooncake_line_is_named(tmp_path: Path) -> None:
    good = record(0, 600, 5, [1, 2])
    with pytest.raises(TraceError, match=r"mooncake\.jsonl, line 2: .*Expecting value"):
        read_trace(mooncake(tmp_path, good, "nonsense"))
    with pytest.raises(TraceError, match=r"line 2: .* no 'hash_ids'"):
        read_trace(mooncake(tmp_path, good, {"timestamp": 0, "input_length": 1, "output_length": 1}))


def test_a_file_that_is_no_trace_is_refused_with_the_way_out(tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(TraceError, match="no column TIMESTAMP, ContextTokens, GeneratedTokens"):
        read_trace(str(other))
    with pytest.raises(TraceError, match="no known format"):
        read_trace(str(tmp_path / "trace.bin"))
    with pytest.raises(TraceError, match="No such file"):
        read_trace(str(tmp_path / "absent.csv"))


def test_a_burstgpt_trace_is_told_by_its_header_and_leaves_out_what_failed(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    lines = ["5,ChatGPT,472,18,490,Conversation log", "45,ChatGPT,1087,0,1087,Conversation log"]
    path.write_text("\n".join([header, *lines, "118.5,GPT-4,417,276,693,API log"]) + "\n")
    trace = read_trace(str(path))
    assert trace.rows == (TraceRow(0.0, 472, 18), TraceRow(113.5, 417, 276))
    path.write_text("\n".join([header, *lines, "soon,GPT-4,417,276,693,API log"]) + "\n")
    with pytest.raises(TraceError, match=r"burst\.csv, line 4: not a request of this trace: .*'soon'"):
        read_trace(str(path))


def test_drawn_lengths_have_their_means_and_a_heavy_tail() -> None:
    trace = read_trace("lognormal:1000:200", seed=3)
    prompts, outputs = ([getattr(row, name) for row in trace.rows] for name in ("prompt_tokens", "output_tokens"))
    assert sum(prompts) / len(prompts) == pytest.approx(1000, rel=0.05)
    assert sum(outputs) / len(outputs) == pytest.approx(200, rel=0.05)
    assert 0.005 < sum(prompt > 6000 for prompt in prompts) / len(prompts) < 0.02
    assert trace == read_trace("lognormal:1000:200", seed=3)
    for wrong in ("lognormal:1000", "lognormal:0:5", "lognormal:a:b"):
        with pytest.raises(TraceError, match="give lognormal:PROMPT:OUTPUT, such as"):
            read_trace(wrong)


def test_a_load_has_the_asked_rate_and_the_traces_proportions() -> None:
    trace = RequestTrace("t", tuple(TraceRow(at, 10, 5) for at in (0.0, 1.0, 4.0, 5.0, 10.0, 20.0)))
    load = scale_trace(trace, PromptIds(100, IDS), rate_per_s=2.0, seconds=2.0)
    assert [arrival.at_s for arrival in load] == pytest.approx([0.0, 0.2, 0.8, 1.0])


def test_a_load_longer_than_the_trace_ends_with_it() -> None:
    trace = RequestTrace("t", tuple(TraceRow(float(at), 10, 5) for at in range(5)))
    load = scale_trace(trace, PromptIds(100, IDS), rate_per_s=2.0, seconds=60.0)
    assert len(load) == 5
    assert load[-1].at_s == pytest.approx(2.0, abs=0.01)


def test_lengths_are_scaled_into_the_context_and_the_longest_cut() -> None:
    rows = [TraceRow(float(at), 150, 50) for at in range(99)] + [TraceRow(99.0, 5000, 10)]
    load = scale_trace(RequestTrace("t", tuple(rows)), PromptIds(100, IDS), rate_per_s=1.0, seconds=100.0)
    assert (len(load[0].prompt_ids), load[0].output_tokens) == (75, 25)
    assert (len(load[-1].prompt_ids), load[-1].output_tokens) == (95, 5)


def test_short_traces_keep_their_lengths() -> None:
    trace = RequestTrace("t", tuple(TraceRow(float(at), 30, 7) for at in range(3)))
    assert length_scale(trace, 1000) == 1.0
    load = scale_trace(trace, PromptIds(1000, IDS), rate_per_s=1.0, seconds=3.0)
    assert {(len(arrival.prompt_ids), arrival.output_tokens) for arrival in load} == {(30, 7)}


def test_equal_blocks_become_equal_tokens_and_nothing_else_does() -> None:
    rows = (
        TraceRow(0.0, 60, 4, (1, 2, 3)),
        TraceRow(1.0, 60, 4, (1, 2, 4)),
        TraceRow(2.0, 60, 4, (5, 2, 3)),
    )
    one, two, three = (
        arrival.prompt_ids
        for arrival in scale_trace(
            RequestTrace("t", rows, block_tokens=20), PromptIds(64, IDS, seed=7), rate_per_s=1.0, seconds=3.0
        )
    )
    assert one[:40] == two[:40]
    assert one[40:] != two[40:]
    assert one[:20] != three[:20]
    assert all(len(ids) == 60 and set(ids) <= set(IDS) for ids in (one, two, three))


def test_prompts_of_a_trace_without_blocks_share_nothing_and_follow_the_seed() -> None:
    trace = RequestTrace("t", tuple(TraceRow(float(at), 40, 4) for at in range(4)))

    def prompts(seed: int) -> list[tuple[int, ...]]:
        load = scale_trace(trace, PromptIds(64, IDS, seed=seed), rate_per_s=1.0, seconds=4.0)
        return [arrival.prompt_ids for arrival in load]

    assert len({ids[:8] for ids in prompts(1)}) == 4
    assert prompts(1) == prompts(1)
    assert prompts(1) != prompts(2)


def test_poisson_arrivals_follow_the_seed_and_the_rate() -> None:
    trace = read_trace("poisson", seed=3)
    gaps = [b.at_s - a.at_s for a, b in pairwise(trace.rows)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1.0, rel=0.03)
    # Exponential gaps: the standard deviation equals the mean.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.05)
    assert trace == read_trace("poisson", seed=3)
    assert trace != read_trace("poisson", seed=4)


@pytest.mark.parametrize(
    ("name", "requests", "rate"),
    [("azure-llm-2023-conv.csv", 19_366, 5.5), ("mooncake-conversation.jsonl", 12_031, 3.4)],
)
def test_the_real_traces_are_read_whole(name: str, requests: int, rate: float) -> None:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is absent: it is no part of the product")
    trace = read_trace(str(path))
    assert len(trace.rows) == requests
    assert trace.rate_per_s == pytest.approx(rate, abs=0.1)
    load = scale_trace(trace, PromptIds(2048, IDS), rate_per_s=2.0, seconds=60.0)
    assert len(load) == 120
    assert load[-1].at_s < 60.0
    assert all(len(arrival.prompt_ids) + arrival.output_tokens <= 2048 for arrival in load)
