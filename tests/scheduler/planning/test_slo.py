"""The pace of prompts: as slow as their deadlines allow."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.scheduler.planning.slo import MARGIN, required_tokens, slack_s
from edged.scheduler.task import Kind, ServingTask

BASE_S, TOKEN_S = 0.02, 0.0005


def prompts(*due: tuple[int, float]) -> list[ServingTask]:
    return [
        ServingTask(index, Kind.PREFILL, 0.0, deadline_s=deadline_s, num_tokens=tokens)
        for index, (tokens, deadline_s) in enumerate(sorted(due, key=lambda pair: pair[1]))
    ]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0.5, 30.0)), min_size=1, max_size=8))
def test_at_the_needed_pace_every_prompt_that_can_be_in_time_is(due: list[tuple[int, float]]) -> None:
    queue = prompts(*due)
    ahead = 0
    for task in queue:
        ahead += task.num_tokens
        if ahead * (TOKEN_S + BASE_S / 1024) > 0.9 * MARGIN * task.deadline_s:
            return
    now = 0.0
    while queue:
        tokens = required_tokens(queue, now, BASE_S, TOKEN_S, 1024)
        assert 0 < tokens <= 1024
        now += BASE_S + tokens * TOKEN_S
        while queue and tokens:
            done = min(tokens, queue[0].num_tokens)
            queue[0].num_tokens -= done
            tokens -= done
            if not queue[0].num_tokens:
                assert now <= queue.pop(0).deadline_s


def test_a_distant_deadline_asks_for_a_small_chunk_and_a_near_one_for_a_large_one() -> None:
    far = required_tokens(prompts((500, 100.0)), 0.0, BASE_S, TOKEN_S, 1024)
    near = required_tokens(prompts((500, 0.55)), 0.0, BASE_S, TOKEN_S, 1024)
    assert far < 10 < 100 < near < 1024


@settings(deadline=None)
@given(st.floats(-10.0, 0.08))
def test_a_prompt_that_cannot_be_in_time_asks_for_everything(deadline_s: float) -> None:
    assert required_tokens(prompts((500, deadline_s)), 0.0, BASE_S, TOKEN_S, 1024) == 1024


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.floats(-1.0, 1e6)), max_size=8),
    st.floats(0.0, 1e3),
    st.floats(1e-9, 1.0),
    st.integers(0, 4096),
)
def test_the_need_is_always_between_nothing_and_all(
    due: list[tuple[int, float]], base_s: float, token_s: float, most: int
) -> None:
    assert 0 <= required_tokens(prompts(*due), 0.0, base_s, token_s, most) <= most


def test_slack_counts_what_stands_before_a_prompt_but_not_what_it_is_granted_now() -> None:
    first, second = prompts((100, 1.0), (200, 1.0))
    full = slack_s([first, second], {}, 0.0, TOKEN_S, -math.inf)
    assert full == pytest.approx(MARGIN * 1.0 - 300 * TOKEN_S)
    assert slack_s([first, second], {first: 100}, 0.0, TOKEN_S, -math.inf) == pytest.approx(full + 100 * TOKEN_S)


def test_slack_is_not_sought_behind_a_prompt_for_which_it_is_too_late_anyway() -> None:
    late, behind = prompts((100, -1.0), (2000, -0.9))
    assert slack_s([late, behind], {}, 0.0, TOKEN_S, -math.inf) == pytest.approx(MARGIN * -0.9 - 2100 * TOKEN_S)
    assert slack_s([late, behind], {}, 0.0, TOKEN_S, -0.1) == pytest.approx(MARGIN * -1.0 - 100 * TOKEN_S)
