"""What the engine's callbacks told becomes the figures of a report."""

from __future__ import annotations

import threading
import time

import pytest

from edged.align.feedback.pair import PairRetired, PairScored
from edged.engine.request import FinishEvent, FinishReason, TokenEvent
from edged.lab.bench.figures import (
    alignment_figures,
    attainment,
    iteration_figures,
    learning_latency,
    percentiles_ms,
    prefix_shares,
    request_counts,
    score_series,
    serving_figures,
    slo_figures,
)
from edged.profiler.recorder import ReplayedAnswer, ReplayRecorder, SentPair
from edged.settings.load import SchedulerSettings


def answer(due_s: float, *token_s: float, reason: FinishReason | None = "length", prompt: int = 10) -> ReplayedAnswer:
    finish = FinishEvent("x", reason) if reason else None
    return ReplayedAnswer(due_s, prompt, list(token_s), finish)


def scored(chosen: float, rejected: float, margin: float) -> PairScored:
    return PairScored(1, "replay", 1, "prequential", chosen, rejected, 0.0, 0.0, margin, 0.5)


def test_first_tokens_are_timed_from_when_the_trace_wanted_them() -> None:
    figures = serving_figures([answer(1.0, 1.2, 1.3, 1.5), answer(2.0, 2.4)], start_s=0.0, seconds=10.0)
    assert figures["ttft_ms"]["p50"] == pytest.approx(300.0)
    assert figures["tbt_ms"]["mean"] == pytest.approx(150.0)


def test_only_what_came_within_the_window_is_throughput() -> None:
    inside, late = answer(0.0, 1.0, 2.0), answer(0.0, 3.0, 5.0)
    figures = serving_figures([inside, late], start_s=0.0, seconds=4.0)["throughput"]
    assert figures == {"output_tokens_per_s": 3 / 4, "prompt_tokens_per_s": 20 / 4, "requests_per_s": 1 / 4}


def test_a_request_without_an_answer_misses_its_target() -> None:
    answers = [answer(0.0, 0.1), answer(0.0, 0.3), answer(0.0, reason="cancelled"), answer(0.0, reason=None)]
    assert attainment(answers, lambda prompt_tokens: prompt_tokens / 50) == 0.25
    assert attainment([], lambda _tokens: 1.0) is None


def test_requests_are_counted_by_their_end() -> None:
    ends: list[FinishReason | None] = ["length", "stop", "cancelled", "error", None]
    assert request_counts([answer(0.0, reason=end) for end in ends]) == {
        "sent": 5,
        "finished": 2,
        "refused": 1,
        "unfinished": 1,
        "failed": 1,
    }


def test_alignment_is_the_mean_over_the_pairs_and_over_the_last_fifty() -> None:
    figures = alignment_figures([scored(-10.0, -5.0, -1.0)] * 50 + [scored(-5.0, -10.0, 2.0)] * 50)
    assert figures["pairs"] == 100
    assert (figures["win_rate"], figures["win_rate_recent"]) == (0.5, 1.0)
    assert (figures["clpd_nats"], figures["clpd_nats_recent"]) == (0.0, 5.0)
    assert (figures["reward_accuracy"], figures["reward_margin_recent"]) == (0.5, 2.0)
    assert alignment_figures([])["win_rate"] is None


def test_nothing_measured_is_told_as_nothing() -> None:
    assert percentiles_ms([]) == {"mean": None, "p50": None, "p95": None, "p99": None}


def test_waiting_ends_with_the_last_answer() -> None:
    recorder = ReplayRecorder()
    recorder.expect("a", 0.0, 5)
    recorder.expect("b", 0.0, 5)
    recorder.refuse("b")
    assert not recorder.wait_until_answered(0.01)
    timer = threading.Timer(0.05, recorder.deliver, [[TokenEvent("a", 7), FinishEvent("a", "length")]])
    timer.start()
    assert recorder.wait_until_answered(5.0)
    timer.join()
    assert len(recorder.answers["a"].token_s) == 1
    assert recorder.open_requests == 0


def test_waiting_for_a_dead_engine_ends() -> None:
    recorder = ReplayRecorder()
    recorder.expect("a", 0.0, 5)
    started = time.monotonic()
    assert not recorder.wait_until_answered(60.0, alive=lambda: False)
    assert time.monotonic() - started < 5.0


def test_held_out_scores_are_not_prequential() -> None:
    recorder = ReplayRecorder()
    held_out = PairScored(1, "replay", 1, "held_out", -1.0, -2.0, 0.0, 0.0, 1.0, 0.5)
    recorder.journal([held_out, scored(-1.0, -2.0, 1.0)])
    assert len(recorder.scores) == 1


def test_a_pair_is_learnt_when_the_first_version_trained_on_it_comes() -> None:
    recorder = ReplayRecorder()
    for pair_id in (1, 2, 3, 4):
        recorder.expect_pair(pair_id)
    recorder.journal([PairRetired(1, "replay", "queued", 1, 1), PairRetired(2, "replay", "learnt", 1, 0)])
    first_s = recorder.pairs[1].learned_s
    recorder.journal([PairRetired(1, "replay", "trained", 2, 2), PairRetired(3, "replay", "skipped", 2, 1)])
    assert first_s is not None
    assert recorder.pairs[1].learned_s == first_s
    assert [pair.learned_s is None for pair in recorder.pairs.values()] == [False, True, True, True]


def test_pairs_not_learned_count_as_longer_than_they_waited() -> None:
    def latency(*pairs: SentPair) -> dict[str, float | None]:
        return learning_latency(pairs, end_s=10.0)

    quick, slow, late, lost = SentPair(0.0, 1.0), SentPair(0.0, 4.0), SentPair(9.5), SentPair(0.0)
    assert latency(quick, slow) == {"mean": 2500.0, "p50": 1000.0, "p95": 4000.0, "p99": 4000.0}
    assert latency(quick, lost) == {"mean": None, "p50": 1000.0, "p95": None, "p99": None}
    assert latency(quick, lost, lost)["p50"] is None, "two of three wait for longer than ten seconds"
    # Those that came half a second ago say nothing about longer waits.
    assert latency(quick, slow, late, late)["p50"] == 1000.0
    assert latency(lost)["p50"] is latency()["p50"] is None


def test_a_request_is_in_time_with_its_first_token_and_with_the_mean_pace_of_the_others() -> None:
    paced, stalled = answer(0.0, 0.1, 0.2, 0.3), answer(0.0, 0.1, 0.2, 0.6)
    late, cut = answer(0.0, 0.4, 0.5), answer(0.0, 0.1, 0.2, reason="cancelled")
    settings = SchedulerSettings(ttft_floor_ms=300, tbt_floor_ms=110, tbt_factor=2.0)
    slo = slo_figures([paced, stalled, late, cut], [10] * 4, lambda _tokens: 0.05, settings)
    assert slo["tpot_target_ms"] == pytest.approx(110.0)
    assert (slo["requests_in_time_share"], slo["ttft_within_factor_or_floor_share"]) == (0.25, 0.75)
    slower = slo_figures([paced, stalled, late, cut], [10] * 4, lambda _tokens: 0.13, settings)
    assert slower["tpot_target_ms"] == pytest.approx(260.0)
    assert slower["requests_in_time_share"] == 0.75
    assert slo_figures([], [10], lambda _tokens: 0.05, settings)["requests_in_time_share"] is None


def test_the_series_tells_each_pair_with_the_base_models_opinion() -> None:
    score = PairScored(1, "replay", 1, "prequential", -3.0, -5.0, -4.0, -3.5, 0.25, 0.5)
    (row,) = score_series([(12.5, score)], start_s=10.0)
    assert row == {
        "at_s": 2.5,
        "pair_id": 1,
        "version": 1,
        "win": True,
        "clpd_nats": 2.0,
        "reward_margin": 0.25,
        "base_clpd_nats": -0.5,
    }


def test_requests_are_counted_by_the_share_of_their_prompt_that_was_there() -> None:
    def shared(cached: int, prompt: int) -> ReplayedAnswer:
        return ReplayedAnswer(0.0, prompt, [], FinishEvent("x", "length", prompt_tokens=prompt, cached_tokens=cached))

    tenths = prefix_shares([shared(0, 10), shared(5, 10), shared(9, 16), shared(16, 16), answer(0.0, reason=None)])
    assert tenths == [1, 0, 0, 0, 0, 2, 0, 0, 0, 1]


def test_iterations_are_told_by_what_was_in_them() -> None:
    before = {"iterations": {"serving": 2, "hybrid": 0}, "iteration_s": {"serving": 1.0, "hybrid": 0.0}}
    after = {"iterations": {"serving": 4, "hybrid": 2}, "iteration_s": {"serving": 1.5, "hybrid": 0.1}}
    figures = iteration_figures(before, after)
    assert (figures["count"], figures["mean_ms"]) == (4, pytest.approx(150.0))
    assert figures["by_mix"]["hybrid"] == {"count": 2, "mean_ms": pytest.approx(50.0)}
