"""Readers: the timeline against Andes' equations written out, and losses against their integrals."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.scheduler.reader import Reader, loss_served, loss_waiting

PACES = st.floats(0.5, 200.0)
SPANS = st.floats(0.0, 20.0)
GAPS = st.lists(st.floats(0.0, 3.0), min_size=1, max_size=80)
TTFT_S = 1.0


def read(delivered: list[float], pace: float, ideal_s: float = TTFT_S) -> Reader:
    reader = Reader(pace, ideal_s)
    for moment in delivered:
        reader.take(moment)
    return reader


def written_out(delivered: list[float], pace: float, ideal_s: float, last_s: float) -> float:
    """QoE by Eq. 2.1 to 2.3 over all tokens at once; S_whole reaches `last_s` beyond the last token."""
    moments = np.asarray(delivered)
    steps = np.arange(len(moments)) / pace
    ideal = ideal_s + steps
    # Reading token i ends no sooner than any earlier delivery allows: the running maximum of (t_j - j / pace).
    actual = np.maximum.accumulate(np.maximum(moments - steps, ideal_s)) + steps
    whole = (actual[-1] + last_s - ideal).sum()
    return 1.0 if whole <= 1e-12 else 1.0 - (actual - ideal).sum() / whole


@given(GAPS, PACES, st.floats(0.0, 5.0))
def test_the_timeline_in_constant_room_is_that_of_the_equations(gaps, pace, ideal_s):
    delivered = list(accumulate(gaps))
    reader = read(delivered, pace, ideal_s)
    assert reader.qoe == pytest.approx(written_out(delivered, pace, ideal_s, 1.0 / pace), abs=1e-6)
    if len(gaps) > 1:
        assert reader.qoe_paper == pytest.approx(written_out(delivered, pace, ideal_s, 0.0), abs=1e-6)


@given(GAPS, PACES)
def test_qoe_is_a_share_that_is_one_exactly_where_nobody_waited(gaps, pace):
    delivered = list(accumulate(gaps))
    reader = read(delivered, pace)
    assert 0.0 <= reader.qoe <= 1.0
    late = [moment - TTFT_S - index / pace for index, moment in enumerate(delivered)]
    if max(late) <= 0.0:
        assert (reader.qoe, reader.stall_s) == pytest.approx((1.0, 0.0), abs=1e-9)
    elif max(late) > 1e-3:
        assert reader.qoe < 1.0
        assert reader.stall_s == pytest.approx(max(late))


@given(GAPS, PACES, st.floats(0.0, 5.0))
def test_a_whole_answer_that_comes_later_never_has_more_qoe(gaps, pace, later_s):
    delivered = [TTFT_S + moment for moment in accumulate(gaps)]
    assert read([moment + later_s for moment in delivered], pace).qoe <= read(delivered, pace).qoe + 1e-9


@pytest.mark.parametrize(
    ("delivered", "qoe", "paper"),
    [
        pytest.param([1.0 + 0.2 * i for i in range(50)], 1.0, 1.0, id="nobody waits"),
        pytest.param([6.0 + 0.2 * i for i in range(50)], 0.505, 0.495, id="first token 5 s late"),
        pytest.param([1.0 + 0.4 * i for i in range(50)], 0.671, 0.667, id="half the speed"),
        pytest.param(
            [1.0 + 0.2 * i + 5.0 * (i >= 40) for i in range(50)], 1 - 50 / 505, 1 - 50 / 495, id="a pause of 5 s"
        ),
    ],
)
def test_four_ways_of_being_late(delivered, qoe, paper):
    reader = read(delivered, pace=5.0)
    assert (reader.qoe, reader.qoe_paper) == pytest.approx((qoe, paper), abs=5e-4)


def test_an_answer_of_one_token_is_judged_by_what_was_waited():
    late, punctual = read([1.001], pace=5.0), read([0.5], pace=5.0)
    assert late.qoe == pytest.approx(0.995, abs=1e-3)
    assert (punctual.qoe, punctual.qoe_paper) == (1.0, 1.0)
    assert Reader(5.0, 1.0).qoe == 0.0


@given(PACES, SPANS, st.floats(0.1, 20.0), SPANS, st.floats(0.0, 300.0))
def test_losses_are_the_integrals_of_the_tokens_behind(pace, left_s, horizon_s, starts_s, tokens_per_s):
    times = np.linspace(0.0, horizon_s, 200_001)
    middles = 0.5 * (times[1:] + times[:-1])
    expected = pace * middles

    def behind(delivered: np.ndarray) -> float:
        """Area between expected tokens and those read, of a fluid that is delivered and read at most at `pace`."""
        lead = np.minimum.accumulate(np.minimum(delivered - expected, 0.0))
        return -lead.sum() * horizon_s / len(middles)

    held = np.full_like(middles, pace * left_s)
    came = held + tokens_per_s * np.maximum(0.0, middles - starts_s)
    scale = max(1.0, pace * horizon_s**2)
    assert loss_waiting(pace, left_s, horizon_s) == pytest.approx(behind(held), abs=1e-5 * scale)
    served = loss_served(pace, left_s, horizon_s, starts_s, tokens_per_s)
    assert served == pytest.approx(behind(came), abs=1e-5 * scale)


def test_who_has_much_to_read_gains_nothing_by_being_served():
    hungry, fed = read([1.0], pace=5.0), read([1.0] * 100, pace=5.0)
    waiting, later = Reader(5.0, ideal_s=3.0), Reader(5.0, ideal_s=10.0)
    gains = [reader.gain(2.0, 5.0, starts_s=0.1, tokens_per_s=20.0) for reader in (waiting, hungry, fed, later)]
    assert gains[0] > gains[1] > gains[2] == gains[3] == 0.0
    assert hungry.gain(2.0, 5.0, starts_s=4.0, tokens_per_s=20.0) < gains[1]
    assert hungry.gain(2.0, 5.0, starts_s=0.1, tokens_per_s=2.0) < gains[1]


@given(GAPS, SPANS, st.floats(0.1, 20.0), st.floats(0.0, 20.0))
def test_a_loss_is_what_the_reader_falls_behind_as_a_share_of_what_was_expected(gaps, after_s, horizon_s, wait_s):
    reader = read([TTFT_S + moment for moment in accumulate(gaps)], pace=5.0)
    now = TTFT_S + sum(gaps) + after_s
    waited_s = min(wait_s, horizon_s)
    times = now + (np.arange(100_000) + 0.5) / 100_000 * waited_s
    behind = np.maximum(0.0, times - max(now, reader.dry_s)).mean() * waited_s
    expected = 0.5 * (now + horizon_s - reader.ideal_s) ** 2
    assert reader.loss(now, horizon_s, wait_s) == pytest.approx(behind / expected, abs=1e-5)


@pytest.mark.parametrize("pace", [3.0, 5.56, 7.0])
def test_rounding_makes_no_wait_less_than_none(pace: float) -> None:
    reader = Reader(pace, 1234.567)
    for _ in range(300):
        reader.take(0.0)
        assert reader.stall_s >= 0.0
