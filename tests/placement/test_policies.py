"""Placement policies: the forecast's parts by hand, and what holds for any policy and any nodes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.placement.forecast import harm_s, response_s
from edged.placement.node import BLOCK_BYTES, NodeView, RoutedRequest, blocks_of
from edged.placement.policies import POLICIES
from tests.placement.nodes import node

LONG = RoutedRequest(4096)
"""1,024 tokens at four bytes each: four chunks of 256."""
loads = st.fixed_dictionaries(
    {
        "backlog_tokens": st.integers(0, 5000),
        "waiting": st.integers(0, 20),
        "decodes": st.integers(0, 60),
        "context": st.integers(0, 10**5),
        "unit_s": st.floats(0, 0.5),
        "slowness": st.floats(0.5, 4),
        "free_pages": st.integers(0, 1000),
        "free_sequences": st.integers(0, 64),
    }
)


def chunk_s(tokens: int, decodes: int = 0, context: int = 0) -> float:
    """Seconds of an iteration by the prices of `nodes.py`, written out."""
    return 0.01 + 0.0005 * max(0, tokens + decodes - 16) + 0.0005 * decodes + 1e-7 * context


def test_an_idle_node_s_forecast_is_its_chunks() -> None:
    assert response_s(node("a"), LONG) == pytest.approx(4 * chunk_s(256))
    assert response_s(node("a", slowness=2.0), LONG) == pytest.approx(8 * chunk_s(256))


def test_backlog_decodes_and_a_unit_under_way_come_before() -> None:
    busy = node("a", backlog_tokens=512, decodes=6, context=1000, unit_s=0.3)
    # Chunks have the room that six decodes leave: 1,536 tokens in six of 250 and one of 36.
    chunks = 6 * chunk_s(250, 6, 1000) + chunk_s(36, 6, 1000)
    assert response_s(busy, LONG) == pytest.approx(chunks + 0.5 * chunk_s(0, 6, 1000) + 0.15)


def test_a_full_node_waits_for_an_answer_to_end() -> None:
    full, room = node("a", decodes=4, free_sequences=0), node("a", decodes=4)
    full.answer_s = room.answer_s = 2.0
    assert response_s(full, LONG) - response_s(room, LONG) == pytest.approx(2.0 * 1 / 4)


def test_a_known_beginning_is_not_computed_again() -> None:
    text = bytes(range(256)) * 16
    arrival, known = RoutedRequest(len(text), blocks_of("ann", text)), node("a")
    known.memory.add(blocks_of("ann", text[:2048]), 1000)
    assert known.tokens_to_compute(arrival) == 512
    assert response_s(known, arrival) == pytest.approx(2 * chunk_s(256))
    other = RoutedRequest(len(text), blocks_of("ben", text))
    assert known.hit_bytes(other) == 0
    changed = b"!" + text[1:]
    assert known.hit_bytes(RoutedRequest(len(changed), blocks_of("ann", changed))) == 0


def test_memory_keeps_the_latest_blocks() -> None:
    view, text = node("a"), bytes(1024)
    view.memory.add(blocks_of("ann", text), 4)
    view.memory.add(blocks_of("ben", text), 4)
    assert view.memory.hit(blocks_of("ann", text)) == 0
    assert view.memory.hit(blocks_of("ben", text)) == 4 == 1024 // BLOCK_BYTES


def test_harm_counts_those_who_wait_and_those_who_decode() -> None:
    assert harm_s(node("a"), LONG) == 0.0
    assert harm_s(node("a", waiting=3, decodes=8), LONG) == pytest.approx(1024 * 0.0005 * (0.5 * 3 + 0.25 * 8))


def test_prompts_sent_since_the_report_count_until_the_next() -> None:
    view = node("a")
    view.send(LONG, 1.0)
    assert (view.backlog_tokens, view.waiting) == (1024, 1)
    view.take(view.load, 1.2)
    assert (view.backlog_tokens, view.waiting) == (0, 0)


def test_forecasts_are_calibrated_by_what_happened() -> None:
    view = node("a")
    plain_s = response_s(view, LONG)
    for _ in range(60):
        view.observe(response_s(view, LONG), 2.0 * plain_s, 1.0)
    assert response_s(view, LONG) == pytest.approx(2.0 * plain_s, rel=0.05)
    assert view.forecast_error is not None
    assert view.forecast_error < 0.1


@pytest.mark.parametrize("name", POLICIES)
@given(given_loads=st.lists(loads, min_size=1, max_size=5), seed=st.randoms(use_true_random=False))
def test_the_order_of_nodes_does_not_matter_and_all_are_ranked(
    name: str, given_loads: list[dict[str, Any]], seed: Any
) -> None:
    nodes = [node(f"n{place}", **load) for place, load in enumerate(given_loads)]
    shuffled = list(nodes)
    seed.shuffle(shuffled)
    first = POLICIES[name]().place(LONG, nodes, 0.0)
    assert first.ranking == POLICIES[name]().place(LONG, shuffled, 0.0).ranking
    assert sorted(first.ranking) == sorted(view.name for view in nodes)
    assert first.forecasts.keys() == set(first.ranking)


@given(one=loads, other=loads)
def test_fleet_prefers_a_node_that_is_no_worse_in_response_and_harm(one: dict[str, Any], other: dict[str, Any]) -> None:
    a, b = node("a", **one), node("b", **other)
    ranking = POLICIES["fleet"]().place(LONG, [a, b], 0.0).ranking
    chosen, left = (a, b) if ranking[0] == "a" else (b, a)
    worse = response_s(chosen, LONG) > response_s(left, LONG) and harm_s(chosen, LONG) > harm_s(left, LONG)
    assert not worse


def test_each_baseline_does_as_its_name_says() -> None:
    text = bytes(512)
    arrival = RoutedRequest(len(text), blocks_of("", text))
    idle, busy = node("idle"), node("busy", decodes=20, busy_share=0.9)
    busy.memory.add(arrival.blocks, 100)

    def first(name: str, *nodes: NodeView) -> str:
        return POLICIES[name]().place(arrival, nodes, 0.0).ranking[0]

    assert first("least-loaded", idle, busy) == "idle"
    assert first("lowest-utilization", idle, busy) == "idle"
    assert first("prefix-affinity", idle, busy) == "busy"
    assert first("power-of-two", idle, busy) == "idle"
    robin = POLICIES["round-robin"]()
    assert [robin.place(arrival, [idle, busy], 0.0).ranking[0] for _ in range(3)] == ["busy", "idle", "busy"]


def test_consistent_hash_stays_with_a_user_unless_his_node_is_over_its_bound() -> None:
    nodes = [node(name) for name in "abcd"]
    policy = POLICIES["consistent-hash"]()
    own = {user: policy.place(RoutedRequest(10, user=user), nodes, 0.0).ranking[0] for user in map(str, range(400))}
    assert min(Counter(own.values()).values()) > 60
    full = [node(name, decodes=40 if name == own["7"] else 4) for name in "abcd"]
    assert policy.place(RoutedRequest(10, user="7"), full, 0.0).ranking[0] != own["7"]
