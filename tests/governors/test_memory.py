"""The memory governor in virtual time: the order of its steps, and that it comes to rest."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.governors.limits import EngineLimits, Use
from edged.governors.memory import STEPS, MemoryGovernor
from edged.telemetry.reading import Reading
from tests.governors.settings import live

MIB = 1 << 20
PAGES, PAGE = 1000, MIB


@dataclass
class World:
    """A box of 4 GiB whose engine does what limits say by the next second."""

    neighbour_mib: int = 0
    live: int = 200
    """Pages that answers hold, as long as all may run."""
    finetune_mib: int = 300
    resident: int = PAGES
    running: int = 16
    prunes: bool = True
    gives_back: bool = True
    pressure: float = 0.0
    reserve_mb: int = 512
    now: float = 0.0
    steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.governor = MemoryGovernor(live(memory_reserve_mb=self.reserve_mb))
        self.limits = EngineLimits()

    @property
    def available(self) -> int:
        tuning = 0 if self.limits.release else self.finetune_mib
        return max(0, 4096 * MIB - (self.neighbour_mib + self.resident + 1000 + tuning) * MIB)

    def second(self) -> EngineLimits:
        """A reading, the limits that follow, and the engine that keeps to them; its cache grows into what it may."""
        self.now += 1.0
        reading = Reading(
            self.now,
            memory_total_bytes=4096 * MIB,
            memory_available_bytes=self.available,
            memory_pressure_some_percent=self.pressure,
        )
        live = self.live * self.running // 16
        live = live // 2 if self.limits.prune else live
        use = Use(PAGE, PAGES, self.resident, live, self.running, 16, self.gives_back, self.prunes, 1.0, 0.0, 0.0, 0, 0)
        self.limits = self.governor.update(reading, use, self.now)
        self.running = min(16, self.limits.sequences or 16)
        live = self.live * self.running // 16
        live = live // 2 if self.limits.prune else live
        allowed = PAGES if self.limits.pages is None else self.limits.pages
        self.resident = max(live, min(allowed, self.resident + 50))
        self.steps.append(self.governor.step)
        return self.limits

    def run(self, seconds: int) -> list[int]:
        """The steps of these seconds, and the one before them."""
        for _ in range(seconds):
            self.second()
        return self.steps[-seconds - 1 :]


def changes(steps: list[int]) -> list[int]:
    return [after for before, after in itertools.pairwise(steps) if after != before]


def test_with_enough_memory_nothing_is_held() -> None:
    world = World()
    assert set(world.run(60)) == {0}
    assert world.limits == EngineLimits()


def test_caches_give_way_first_and_are_enough_where_they_are() -> None:
    world = World(neighbour_mib=1700)
    world.run(30)
    assert world.governor.step == 1
    assert world.available >= 512 * MIB
    assert (world.limits.prune, world.limits.finetune_share, world.limits.sequences) == (False, 1.0, None)


def test_all_is_given_up_in_order_and_comes_back_in_reverse() -> None:
    world = World()
    world.run(5)
    world.neighbour_mib = 4096
    assert changes(world.run(60)) == [1, 2, 3, 4]
    assert world.limits == EngineLimits(pages=0, prune=True, finetune_share=0.0, release=True, sequences=1)
    world.neighbour_mib = 0
    assert changes(world.run(200)) == [3, 2, 1, 0]
    assert world.limits == EngineLimits()
    assert world.resident == PAGES


def test_each_step_is_given_time_to_help() -> None:
    world = World(neighbour_mib=1900, live=500, resident=500, prunes=False)
    steps = world.run(20)
    assert steps.index(3) - steps.index(1) == 3


def test_a_neighbour_that_grows_fast_takes_caches_alone_while_they_last() -> None:
    world = World()
    for world.neighbour_mib in range(1200, 1900, 100):
        world.run(1)
    assert max(world.steps) == 1
    assert world.available >= 512 * MIB - 100 * MIB


def test_no_step_is_kept_that_the_caches_make_needless() -> None:
    world = World(neighbour_mib=4096)
    world.run(60)
    world.neighbour_mib = 1700
    world.run(300)
    assert (world.governor.step, world.limits.finetune_share, world.limits.sequences) == (0, 1.0, None)
    # Caches may be as large as leaves the reserve.
    assert 400 < world.resident < 600


def test_a_page_that_the_engine_gives_is_not_taken_for_a_neighbours_gift() -> None:
    world = World(neighbour_mib=1700)
    world.run(30)
    pages = world.limits.pages
    assert set(world.run(300)) == {1}
    assert world.limits.pages is not None
    assert pages is not None
    assert abs(world.limits.pages - pages) <= 64
    assert world.available >= 512 * MIB


def test_pressure_counts_though_the_reserve_is_there_but_not_with_plenty() -> None:
    world = World(neighbour_mib=1200, pressure=30.0)
    world.run(2)
    assert world.governor.step == 1
    assert "30 % of the time" in world.governor.reason
    plenty = World(pressure=30.0)
    plenty.run(2)
    assert plenty.governor.step == 0


def test_the_own_control_groups_pressure_counts_always() -> None:
    governor = MemoryGovernor(live())
    use = Use(PAGE, PAGES, PAGES, 0, 4, 16, True, True, 1.0, 0.0, 0.0, 0, 0)
    reading = Reading(0.0, memory_total_bytes=4096 * MIB, memory_available_bytes=3000 * MIB)
    governor.update(reading, use, 0.0)
    assert governor.step == 0
    held = Reading(
        1.0, memory_total_bytes=4096 * MIB, memory_available_bytes=3000 * MIB, cgroup_pressure_some_percent=15.0
    )
    assert governor.update(held, use, 1.0).pages == PAGES - PAGES // 20


@pytest.mark.parametrize(
    ("prunes", "gives_back", "expected"), [(False, True, [1, 3, 4]), (True, False, [3, 4]), (False, False, [3, 4])]
)
def test_steps_that_cannot_help_here_are_left_out(prunes: bool, gives_back: bool, expected: list[int]) -> None:
    world = World(prunes=prunes, gives_back=gives_back)
    world.run(2)
    world.neighbour_mib = 4096
    assert changes(world.run(30)) == expected
    world.neighbour_mib = 0
    assert changes(world.run(300)) == [*reversed(expected[:-1]), 0]


@settings(max_examples=60, deadline=None)
@given(
    neighbours=st.lists(st.tuples(st.integers(0, 3500), st.integers(1, 40)), max_size=12),
    last=st.integers(0, 3500),
    live=st.integers(0, 600),
    finetune=st.integers(0, 600),
)
def test_whatever_neighbours_do_it_goes_step_by_step_and_comes_to_rest(
    neighbours: list[tuple[int, int]], last: int, live: int, finetune: int
) -> None:
    world = World(live=live, finetune_mib=finetune)
    for mib, seconds in neighbours:
        world.neighbour_mib = mib
        world.run(seconds)
    world.neighbour_mib = last
    world.run(1200)
    assert all(abs(after - before) <= 1 for before, after in itertools.pairwise(world.steps))
    # At most one try to come back in the longest calm.
    assert len(changes(world.run(600))) <= 2 * (600 // 160 + 1)
    assert 0 <= world.governor.step < len(STEPS)


def test_a_small_box_keeps_a_small_reserve() -> None:
    governor = MemoryGovernor(live())
    assert [governor.reserve_bytes(total << 30) >> 20 for total in (1, 8, 64)] == [256, 409, 2048]
