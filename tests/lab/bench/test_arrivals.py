"""Arrival processes keep the mean rate, and differ in how the requests crowd."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from click.testing import CliRunner

from edged.cli.main import cli
from edged.lab.bench.arrivals import Arrivals
from edged.lab.bench.traces import PromptIds, RequestTrace, TraceError, TraceRow, scale_trace


def times(text: str, rate_per_s: float, seconds: float, seed: int = 0) -> list[float]:
    process = Arrivals.parse(text)
    assert process is not None
    return process.times_s(rate_per_s, seconds, seed)


@pytest.mark.parametrize(("text", "cv"), [("poisson", 1.0), ("gamma:0.2", 0.2), ("gamma:3", 3.0)])
def test_gaps_have_the_coefficient_of_variation_at_the_mean_rate(text: str, cv: float) -> None:
    moments = times(text, rate_per_s=4.0, seconds=5_000.0, seed=1)
    assert len(moments) == 20_000
    assert 0.0 <= moments[0] <= moments[-1] <= 5_000.0
    gaps = [after - before for before, after in pairwise(moments)]
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(cv, rel=0.08)


def test_a_cyclic_rate_is_high_at_the_start_of_each_period_and_makes_up_for_it() -> None:
    moments = np.array(times("cyclic:2:0.35:1", rate_per_s=10.0, seconds=600.0))
    assert len(moments) == 6_000
    phase = moments % 60.0
    burst, calm = (phase < 21.0).sum() / (10 * 21.0), (phase >= 21.0).sum() / (10 * 39.0)
    # Poisson counts of some 200 and 80 a minute have standard deviations of 7 and 11 %, of ten minutes 2 and 4 %.
    assert burst / 10.0 == pytest.approx(2.0, rel=0.06)
    assert calm / 10.0 == pytest.approx((1 - 0.7) / (1 - 0.35), rel=0.1)


def test_part_of_a_period_more_has_its_burst_more() -> None:
    moments = times("cyclic:3:0.2:1", rate_per_s=10.0, seconds=72.0)
    assert len(moments) == 600 + 3 * 10 * 12


def test_times_follow_the_seed() -> None:
    assert times("gamma:2", 2.0, 60.0, seed=5) == times("gamma:2", 2.0, 60.0, seed=5)
    assert times("gamma:2", 2.0, 60.0, seed=5) != times("gamma:2", 2.0, 60.0, seed=6)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cyclic:4:0.25", r'"cyclic:4:0\.25".*INTENSITY \* SHARE must be below 1 and is 1'),
        ("cyclic:2", "not known: give poisson, gamma:CV"),
        ("gamma", "not known"),
        ("gamma:0", "must be above 0"),
        ("gamma:nan", "must be above 0"),
        ("gamma:much", "could not convert .*'much'; give poisson"),
        ("weibull:2", "not known"),
    ],
)
def test_arrivals_that_cannot_be_are_refused_with_the_way_out(text: str, told: str) -> None:
    with pytest.raises(TraceError, match=told):
        Arrivals.parse(text)


def test_a_load_shorter_than_a_cycle_is_refused_since_its_mean_rate_would_be_the_bursts() -> None:
    with pytest.raises(TraceError, match=r"periods of 1200 s, and the load lasts 60 s: .*\(cyclic:2:0.35:1\)"):
        times("cyclic:2:0.35", 1.0, 60.0)


def test_a_trace_keeps_its_lengths_at_other_times() -> None:
    trace = RequestTrace("t", tuple(TraceRow(float(at), 10 + at, 5) for at in range(4)))
    load = scale_trace(trace, PromptIds(64, range(9)), rate_per_s=9.0, seconds=9.0, times_s=[0.5, 0.6, 3.0])
    assert [(arrival.at_s, len(arrival.prompt_ids)) for arrival in load] == [(0.5, 10), (0.6, 11), (3.0, 12)]


def test_a_simulation_sends_at_the_processes_times_and_says_so() -> None:
    arguments = ["bench", "simulate", "--device", "agx-orin-32gb-maxn", "--model", "mistral-3b", "--json"]
    arguments += ["--trace", "lognormal:200:20", "--rate", "1", "--seconds", "30"]
    result = CliRunner().invoke(cli, [*arguments, "--arrivals", "gamma:3"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["load"]["arrivals"], report["requests"]["sent"]) == ("gamma:3", 30)
    plain = json.loads(CliRunner().invoke(cli, arguments).stdout)
    assert plain["load"]["arrivals"] is None
    assert plain["ttft_ms"] != report["ttft_ms"]

    result = CliRunner().invoke(cli, [*arguments, "--arrivals", "cyclic:2:0.5"])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith('edged: arrivals "cyclic:2:0.5": bursts of 2 times')
