"""Venn Algorithm 3: Figure 4.3, two groups beside an exhaustive search, and shares that do not overlap."""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import accumulate
from statistics import fmean

from hypothesis import given
from hypothesis import strategies as st

from edged.federated.irs import Group, affected_queue, allocate, whole_queue

ONE, OTHER, BOTH = 1, 2, 3
"""Atoms of two groups."""


def group(atoms: set[int], *demands: int) -> Group:
    return Group(frozenset(atoms), list(accumulate(sorted(demands))))


def owners(groups: list[Group], supply: dict[int, float], queue_length=affected_queue) -> dict[int, int]:
    return allocate(groups, supply, queue_length)


def test_the_scarcer_group_has_what_both_may_take() -> None:
    assert owners([group({1, 3}, 3), group({3}, 4, 4)], {1: 0.5, 3: 0.5}) == {1: 0, 3: 1}


def test_a_longer_queue_on_fewer_boxes_takes_the_shared_ones() -> None:
    assert owners([group({1, 3}, 1, 1, 1), group({3}, 9)], {1: 0.5, 3: 0.5}) == {1: 0, 3: 0}


def test_requests_that_the_scarcer_group_does_not_delay_do_not_count() -> None:
    crowd, supply = [group({1, 3}, 8, 8, 8), group({3}, 4)], {1: 0.5, 3: 0.5}
    # The scarcer group is through after 8 s; by then the other has served none of its requests.
    assert owners(crowd, supply) == {1: 0, 3: 1}
    assert owners(crowd, supply, whole_queue) == {1: 0, 3: 0}


def test_what_a_group_has_overtaken_waits_behind_it() -> None:
    groups = [group({1, 3, 5, 7}, 1, 1, 1, 1), group({3, 7}, 9, 9, 9), group({5, 7}, 9, 9, 9)]
    supply = {1: 1.0, 3: 1.0, 5: 1.1, 7: 0.1}
    # 4 / 1.0 > 3 / 1.1; then 4 / 2.1 would be less than 3 / 1.1, and (4 + 3) / 2.1 is not.
    assert owners(groups, supply) == {1: 0, 3: 0, 5: 0, 7: 0}


def test_a_group_that_gave_boxes_away_has_them_no_more_when_its_own_turn_comes() -> None:
    supply = {1: 1.0, 3: 1.0, 2: 0.5, 6: 0.2, 4: 0.2}
    groups = [group({1, 3}, 1, 1, 1, 1, 1, 1), group({3, 2, 6}, 2, 2, 2), group({6, 4}, 3, 3)]
    # The second group gives 3 to the first. 3 / 0.5 > 2 / 0.4 then; with 3 still counted 3 / 1.5 would not be.
    assert owners(groups, supply) == {1: 0, 3: 0, 2: 1, 6: 1, 4: 2}


def test_a_group_whose_boxes_never_come_gets_none() -> None:
    assert owners([group(set(), 3), group({1}, 4)], {1: 1.0}) == {1: 1}


@given(st.data())
def test_each_atom_has_one_group_that_may_take_it(data: st.DataObject) -> None:
    number = data.draw(st.integers(1, 5))
    atoms = data.draw(st.sets(st.integers(1, 2**number - 1), min_size=1))
    supply = {atom: data.draw(st.floats(0.01, 10)) for atom in atoms}
    groups = [
        group({atom for atom in atoms if atom >> bit & 1}, *data.draw(st.lists(st.integers(1, 9), min_size=1)))
        for bit in range(number)
    ]
    shares = owners(groups, supply)
    assert set(shares) == atoms
    assert all(atom in groups[index].atoms for atom, index in shares.items())


Case = tuple[list[int], list[int], list[int]]


def draw_case(chance: random.Random) -> Case:
    """Two groups' demands, and the atoms of the boxes that come, one a second, over and over."""
    demands = [sorted(chance.randint(1, 6) for _ in range(chance.randint(1, 4))) for _ in range(2)]
    while True:
        atoms = [ONE, BOTH] if chance.random() < 0.5 else [ONE, OTHER, BOTH]
        pattern = [chance.choice(atoms) for _ in range(chance.randint(2, 6))]
        if BOTH in pattern and len(set(pattern)) > 1:
            return demands[0], demands[1], pattern


def best_mean_s(one: list[int], other: list[int], pattern: list[int]) -> float:
    """Search all ways to give boxes to two queues that are each served in order of demand."""
    ends = [set(accumulate(one)), set(accumulate(other))]
    wants = (sum(one), sum(other))

    @lru_cache(None)
    def rest(second: int, first: int, last: int) -> float:
        if (first, last) == wants:
            return 0
        atom, ways = pattern[second % len(pattern)], []
        if atom & ONE and first < wants[0]:
            ways.append((first + 1, last, second + 1 if first + 1 in ends[0] else 0))
        if atom & OTHER and last < wants[1]:
            ways.append((first, last + 1, second + 1 if last + 1 in ends[1] else 0))
        if not ways:
            return rest(second + 1, first, last)
        return min(cost + rest(second + 1, *got) for *got, cost in ways)

    return rest(0, 0, 0) / (len(one) + len(other))


def planned_mean_s(one: list[int], other: list[int], pattern: list[int]) -> float:
    """Serve the queues by Algorithm 3, planned anew at each completion."""
    queues, supply = {ONE: list(one), OTHER: list(other)}, {atom: float(pattern.count(atom)) for atom in set(pattern)}
    plan: dict[int, int] = {}
    second, total, fresh = 0, 0, False
    while any(queues.values()):
        atom = pattern[second % len(pattern)]
        second += 1
        waiting = [bit for bit in queues if queues[bit]]
        if not fresh:
            groups = [group({each for each in supply if each & bit}, *queues[bit]) for bit in waiting]
            plan, fresh = {each: waiting[index] for each, index in allocate(groups, supply).items()}, True
        if atom in plan:
            queue = queues[plan[atom]]
            queue[0] -= 1
            if not queue[0]:
                queue.pop(0)
                total, fresh = total + second, False
    return total / (len(one) + len(other))


def test_two_groups_are_served_nearly_as_fast_as_by_the_best_of_all_schedules() -> None:
    chance = random.Random(0)
    cases = [draw_case(chance) for _ in range(400)]
    over = [planned_mean_s(*case) / best_mean_s(*case) for case in cases]
    assert min(over) >= 1.0
    assert fmean(over) <= 1.02
    assert max(over) <= 1.3


def test_figure_4_3_has_28_thirds_as_its_best() -> None:
    assert best_mean_s([3], [4, 4], [BOTH, ONE]) == planned_mean_s([3], [4, 4], [BOTH, ONE]) == 28 / 3
