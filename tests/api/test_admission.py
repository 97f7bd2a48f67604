"""Whose request goes next: one tenant's flood delays the others by one turn of each."""

from __future__ import annotations

import asyncio

import pytest

from edged.api.admission import QueueFull, TenantQueue, max_of_one, queue_sizes, tenant_places
from edged.settings.load import ServingSettings


class Scene:
    """Requests that note the order in which they go in."""

    def __init__(self, at_once: int, max_waiting: int) -> None:
        self.now = 0.0
        self.admission = TenantQueue(lambda: (at_once, max_waiting), lambda: self.now)
        self.order: list[str] = []

    async def ask(self, tenant: str, choices: int = 1, begun: bool = False) -> asyncio.Task[None]:
        async def run() -> None:
            await self.admission.enter(tenant, choices, begun)
            self.order.append(tenant)

        task = asyncio.create_task(run())
        # Once for this one to ask, once for another to hear that it was turned away.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    async def end(self, tenant: str = "ann") -> None:
        self.admission.leave(tenant)
        await asyncio.sleep(0)


async def test_a_flood_is_served_in_turns_with_the_others() -> None:
    scene = Scene(1, 100)
    for _ in range(20):
        await scene.ask("ann")
    await scene.ask("bob")
    await scene.ask("cy")
    for _ in range(5):
        await scene.end()
    assert scene.order == ["ann", "ann", "bob", "cy", "ann", "ann"]


async def test_alone_a_tenant_gets_everything() -> None:
    scene = Scene(3, 100)
    for _ in range(5):
        await scene.ask("ann")
    assert scene.order == ["ann"] * 3
    assert scene.admission.waiting == 2


async def test_while_others_ask_a_tenant_leaves_them_a_seat() -> None:
    scene = Scene(8, 100)
    serving = ServingSettings(max_sequences=4)
    scene.admission = TenantQueue(lambda: (8, 100), lambda: scene.now, max_of_one=lambda: max_of_one(serving))
    await scene.ask("bob")
    await scene.end("bob")
    for _ in range(8):
        await scene.ask("ann")
    await scene.ask("bob")
    assert scene.order == ["bob", "ann", "ann", "ann", "bob"]
    # An hour later nobody else is expected.
    scene.now = 3600.0
    await scene.ask("ann")
    assert scene.order.count("ann") == 7
    assert [max_of_one(ServingSettings(max_sequences=most)) for most in (1, 2, 64)] == [1, 1, 60]


async def test_when_too_many_wait_the_flood_is_turned_away_and_the_others_stay() -> None:
    scene = Scene(1, 4)
    flood = [await scene.ask("ann") for _ in range(5)]
    bob = await scene.ask("bob")
    assert [task.done() for task in flood] == [True, False, False, False, True]
    with pytest.raises(QueueFull, match="max_queue"):
        await flood[-1]
    assert not bob.done()
    late = await scene.ask("ann")
    with pytest.raises(QueueFull):
        await late


async def test_the_choices_of_a_request_take_turns_with_others() -> None:
    scene = Scene(1, 100)
    await scene.ask("ann", 5)
    assert scene.admission.waiting == 4
    await scene.ask("ann", begun=True)
    await scene.ask("bob")
    await scene.end()
    await scene.ask("ann", begun=True)
    for _ in range(2):
        await scene.end()
    assert scene.order == ["ann", "ann", "bob", "ann"]
    scene.admission.withdraw(2)
    assert scene.admission.waiting == 0


async def test_a_request_larger_than_all_room_goes_alone_and_what_has_begun_is_not_turned_away() -> None:
    scene = Scene(1, 2)
    await scene.ask("ann", 5)
    begun = await scene.ask("ann", begun=True)
    refused = await scene.ask("bob")
    with pytest.raises(QueueFull):
        await refused
    assert not begun.done()
    assert scene.admission.waiting == 4
    await scene.end()
    for _ in range(3):
        await scene.ask("ann", begun=True)
        await scene.end()
    assert scene.order == ["ann"] * 5
    assert scene.admission.waiting == 0


async def test_a_request_that_has_begun_and_leaves_takes_the_rest_with_it() -> None:
    scene = Scene(1, 10)
    await scene.ask("ann", 3)
    gone = await scene.ask("ann", begun=True)
    scene.admission.leave("ann")
    gone.cancel()
    await asyncio.sleep(0)
    scene.admission.withdraw(2)
    assert scene.admission.waiting == 0
    await scene.ask("bob", 11)
    assert scene.order == ["ann", "bob"], "its seat is free"


async def test_a_client_that_leaves_while_waiting_leaves_no_hole() -> None:
    scene = Scene(1, 100)
    await scene.ask("ann")
    gone = await scene.ask("bob")
    await scene.ask("cy")
    gone.cancel()
    await asyncio.sleep(0)
    await scene.end()
    assert scene.order == ["ann", "cy"]
    assert scene.admission.waiting == 0


async def test_a_client_that_leaves_at_the_moment_of_its_turn_gives_it_on() -> None:
    scene = Scene(1, 100)
    await scene.ask("ann")
    gone = await scene.ask("bob")
    await scene.ask("cy")
    scene.admission.leave("ann")
    gone.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert scene.order == ["ann", "cy"]


async def test_a_turn_that_comes_to_one_who_is_leaving_goes_to_the_next() -> None:
    scene = Scene(1, 3)
    await scene.ask("ann")
    gone = [await scene.ask("bob") for _ in range(2)]
    await scene.ask("cy")
    for task in gone:
        task.cancel()
    scene.admission.leave("ann")
    late = await scene.ask("dan")
    for _ in range(3):
        await asyncio.sleep(0)
    assert scene.order == ["ann", "cy"]
    await scene.end()
    assert scene.order == ["ann", "cy", "dan"]
    assert late.done()
    assert scene.admission.waiting == 0


async def test_how_long_to_wait_follows_from_the_rate_of_late() -> None:
    scene = Scene(1, 10)
    for _ in range(11):
        await scene.ask("ann")
    assert scene.admission.retry_after_s() == 1.0
    for _ in range(4):
        scene.now += 2.0
        await scene.end()
    refused = [await scene.ask("ann") for _ in range(5)][-1]
    with pytest.raises(QueueFull) as full:
        await refused
    # Ends at 2, 4, 6 and 8 s: four in six seconds, and ten wait.
    assert full.value.retry_after_s == pytest.approx(15.0, rel=0.1)


def test_the_engine_gets_what_it_runs_and_as_much_to_choose_from() -> None:
    assert queue_sizes(ServingSettings(max_sequences=4, max_queue=10)) == (8, 6)
    assert queue_sizes(ServingSettings(max_sequences=4, max_queue=1)) == (5, 0)


async def test_where_the_engine_decides_each_waits_behind_the_same_tenant_alone() -> None:
    scene = Scene(1, 100)
    scene.admission = TenantQueue(lambda: (1, 100), lambda: 0.0, places=lambda _: 2)
    for tenant in ("ann", "ann", "ann", "bob", "bob", "bob", "cy"):
        await scene.ask(tenant)
    assert scene.order == ["ann", "ann", "bob", "bob", "cy"]
    assert scene.admission.waiting == 2
    await scene.end("bob")
    assert scene.order[5:] == ["bob"]
    await scene.end("ann")
    assert scene.order[6:] == ["ann"]


async def test_where_the_engine_decides_a_flood_is_turned_away_too() -> None:
    scene = Scene(1, 100)
    scene.admission = TenantQueue(lambda: (2, 4), lambda: 0.0, places=lambda _: 2)
    flood = [await scene.ask("ann") for _ in range(6)]
    await scene.ask("bob")
    assert [task.done() for task in flood] == [True, True, False, False, False, True]
    assert scene.order == ["ann", "ann", "bob"]


def test_of_everybody_who_waits_the_engine_has_one_to_choose_from() -> None:
    serving = ServingSettings(max_sequences=8, max_queue=100)
    assert [tenant_places(serving, tenants) for tenants in (1, 4, 1000)] == [16, 10, 9]
