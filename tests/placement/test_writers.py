"""Writers of users: they move where pairs would be learned sooner by more than the move takes, and not too often."""

from __future__ import annotations

import random

import pytest

from edged.placement.node import NodeView, RoutedRequest
from edged.placement.writers import learning_s, sooner_writer
from tests.placement.nodes import node


def nodes(**queued: int) -> list[NodeView]:
    """Nodes with so many pairs queued."""
    return [node(name, pairs_queued=count) for name, count in queued.items()]


def test_pairs_wait_for_those_before_them_and_for_what_serving_leaves() -> None:
    idle, queued, slow = node("a"), node("b", pairs_queued=4), node("c", slowness=2.0)
    assert learning_s(queued) == pytest.approx(5 * learning_s(idle))
    assert learning_s(slow) == pytest.approx(2 * learning_s(idle))
    # Two thirds of an idle node's time; beside decodes of 6 ms over a pass of 10.5 ms less.
    busy = node("d", decodes=12)
    assert learning_s(busy) == pytest.approx(learning_s(idle) / (1 - busy.serving_share))
    assert busy.serving_share == pytest.approx(1 - 10.5 / 16.0)


def test_prompts_that_were_sent_take_time_from_learning() -> None:
    view = node("a")
    for second in range(1, 60):
        view.send(RoutedRequest(4 * 500), 0.2 * second - 0.1)
        view.take(view.load, 0.2 * second)
    # 500 tokens of half a millisecond each in every 200 ms are more than the node can do.
    assert view.serving_share == 1.0
    assert learning_s(view) == pytest.approx(learning_s(node("b")) * (2 / 3) / 0.05)


def test_pairs_on_their_way_count_until_they_are_there() -> None:
    view = node("a")
    view.pairs_coming += [0.1, 5.0]
    assert view.pairs == 2
    view.take(view.load, 1.0)
    assert view.pairs == 1


def test_a_writer_moves_by_marginal_delay_alone() -> None:
    step_s = learning_s(node("x"))
    # Less than the move takes: it stays.
    few = int(3.0 / step_s)
    assert sooner_writer("b", 0, nodes(b=few, a=0, c=0), 3.0, coming=1) == "b"
    many = few + 2
    # Those that wait go along, and would be behind themselves there.
    assert sooner_writer("b", many, nodes(b=many, a=0, c=0), 3.0, coming=1) == "b"
    assert sooner_writer("b", 0, nodes(b=many, a=1, c=0), 3.0, coming=1) == "c"
    # A user's own queue is no reason; that of others is.
    assert sooner_writer("b", many, nodes(b=many, a=0), 0.0) == "b"
    assert sooner_writer("b", 1, nodes(b=many, a=0), 3.0) == "a"


def test_a_node_that_opens_no_steps_teaches_nobody() -> None:
    held, busy = node("a", trains=False, pairs_queued=1), node("b", pairs_queued=99)
    assert sooner_writer("a", 1, [held, busy], 3.0) == "b"
    assert sooner_writer("b", 1, [held, busy], 3.0) == "b"
    assert sooner_writer("a", 1, [held, node("b", trains=False)], 3.0) == "a"


def test_the_order_of_nodes_does_not_matter() -> None:
    chance = random.Random(5)
    for _ in range(50):
        views = nodes(**{name: chance.randrange(4) for name in "abcd"})
        shuffled = chance.sample(views, len(views))
        assert sooner_writer("a", 1, views, 0.01) == sooner_writer("a", 1, shuffled, 0.01)
