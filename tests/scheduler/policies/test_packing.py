"""Algorithm 1, against a transcription of the paper's listing and its own promises."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edged.scheduler.policies.mace.packing import Bin, Item, best_fit
from edged.scheduler.policies.options import PackingOptions
from edged.scheduler.task import Kind, ServingTask

TOTAL, LENGTH_S = 100, 10.0


def items_of(sizes: list[tuple[int, float]], patient: bool = True) -> list[Item]:
    return [
        Item(ServingTask(index, Kind.PREFILL, float(index)), pages, seconds, patient)
        for index, (pages, seconds) in enumerate(sizes)
    ]


def listing(
    sizes: list[tuple[int, float]], free: int, memory: float, latency: float, tau_memory: float, tau_tasks: int
) -> list[list[int]]:
    """Lines 1 to 16 of the paper's Algorithm 1; the first bin is there already, and also full at its whole length."""
    bins: list[list[int]] = [[]]
    room = [[float(free), LENGTH_S]]
    count = 0
    queue = list(range(len(sizes)))
    while queue:
        if (bins[0] and room[0][0] <= TOTAL * (1 - tau_memory)) or count >= tau_tasks or room[0][1] <= 0:
            break
        task = queue.pop(0)
        count += 1
        m, length = sizes[task]
        best_bin, best_score = None, float("inf")
        for i in range(len(bins)):
            if room[i][0] >= m:
                score = memory * abs(room[i][0] - m) / TOTAL + latency * abs(room[i][1] - length) / LENGTH_S
                if score < best_score:
                    best_bin, best_score = i, score
        if best_bin is None:
            bins.append([])
            room.append([float(TOTAL), LENGTH_S])
            best_bin = len(bins) - 1
        bins[best_bin].append(task)
        room[best_bin][0] -= m
        room[best_bin][1] -= length
    return bins


sizes_of_tasks = st.lists(st.tuples(st.integers(0, 120), st.floats(0.1, 4.0)), max_size=30)


@settings(deadline=None)
@given(
    sizes_of_tasks,
    st.integers(0, TOTAL),
    st.floats(0, 2),
    st.floats(0, 2),
    st.floats(0.5, 1.0),
    st.integers(1, 40),
)
def test_it_places_every_task_as_the_papers_listing_does(
    sizes: list[tuple[int, float]], free: int, memory: float, latency: float, tau_memory: float, tau_tasks: int
) -> None:
    constants = PackingOptions(lambda_memory=memory, lambda_latency=latency, tau_memory=tau_memory, tau_tasks=tau_tasks)
    bins = best_fit(constants, items_of(sizes), Bin(free, LENGTH_S), TOTAL, LENGTH_S)
    placed = [[item.task.task_id for item in room.items] for room in bins]
    assert placed == listing(sizes, free, memory, latency, tau_memory, tau_tasks)


@settings(deadline=None)
@given(sizes_of_tasks, st.integers(0, TOTAL))
def test_no_task_is_placed_twice_and_the_first_bin_never_overflows(sizes: list[tuple[int, float]], free: int) -> None:
    first = Bin(free, LENGTH_S)
    bins = best_fit(PackingOptions(), items_of(sizes), first, TOTAL, LENGTH_S)
    placed = [item.task for room in bins for item in room.items]
    assert len(placed) == len(set(placed))
    assert bins[0] is first
    assert sum(item.pages for item in first.items) <= free


def test_a_task_goes_where_it_leaves_the_smaller_gap() -> None:
    # The first does not fit the coming bin's 42 pages and leaves 40 of a later one; the others fit both.
    sizes = [(60, 1.0), (38, 1.0), (3, 1.0)]
    first, later = best_fit(PackingOptions(lambda_latency=0.0), items_of(sizes), Bin(42, 10.0), TOTAL, 10.0)
    assert [item.pages for item in later.items] == [60, 38]
    assert [item.pages for item in first.items] == [3]


def test_nobody_overtakes_a_task_that_must_not_wait_longer() -> None:
    patient, late = items_of([(10, 1.0)]), items_of([(60, 1.0)], patient=False)
    (first,) = best_fit(PackingOptions(), [*late, *patient], Bin(50, LENGTH_S), TOTAL, LENGTH_S)
    assert first.items == []
