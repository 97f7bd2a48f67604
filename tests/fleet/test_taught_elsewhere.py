"""Users who are taught elsewhere than at their home: where their box has a long queue, or is cut off.

Each pair is learned once, whatever became of its home meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.cli.conftest import wait_for
from tests.fleet.conftest import Fleet, all_come_up, all_up, ask, new_ingress
from tests.fleet.teaching import all_once_at, learned, pair, teach, teach_at_last, version_of, wait_for_copy, writers


@pytest.fixture(autouse=True)
def as_before(fleet: Fleet) -> Iterator[None]:
    """The settings of other tests come back."""
    yield
    fleet.configure()


def test_steps_move_from_a_box_with_a_long_queue_to_an_idle_one(fleet: Fleet) -> None:
    fleet.configure(move_min_s=0.01)
    users = [fleet.user_at("b") for _ in range(3)]
    homes: dict[str, str] = {}

    def moved() -> bool:
        homes.update({user: ask(f"{fleet.url}/v1/fleet")[1]["homes"].get(user, "b") for user in users})
        return set(homes.values()) != {"b"}

    taught = 0
    while not moved():
        for user in users:
            teach(fleet, user, taught)
        taught += 1
    # They stay where they are then, but one who is just on the way.
    fleet.configure()

    def all_learned() -> bool:
        moved()
        return all(
            writers(fleet, user) == [home] and all_once_at(fleet, user, home, set(range(taught)))
            for user, home in homes.items()
        )

    wait_for(all_learned)
    assert all(writers(fleet, user) == [homes[user]] for user in users)


def test_a_user_whom_the_settings_name_stays(fleet: Fleet) -> None:
    user, other = fleet.user_at("b"), fleet.user_at("b")
    fleet.configure(move_min_s=0.01, homes={user: "b"})
    taught = 0
    while ask(f"{fleet.url}/v1/fleet")[1]["homes"].get(other, "b") == "b":
        for each in (user, user, other):
            teach(fleet, each, taught)
            taught += 1
    assert ask(f"{fleet.url}/v1/fleet")[1]["homes"][user] == "b"


def test_a_cut_off_node_teaches_its_own_users_and_there_is_one_writer_afterwards(fleet: Fleet) -> None:
    fleet.configure(takeover_s=1.0)
    user = fleet.user_at("a")
    for number in range(2):
        taught = teach(fleet, user, number)
    wait_for(lambda: learned(fleet, taught))
    wait_for_copy(fleet, user, "a")
    fleet.cable.cut()
    fleet.wait_for_state("a", "down")
    home = teach_at_last(fleet, user, 2)
    own = fleet.node_url("a")
    for number in range(3, 6):
        teach(fleet, user, number, own)
    wait_for(lambda: ask(f"{own}/v1/adapters/{user}")[1]["pairs_seen"] >= 5)
    alone = ask(f"{own}/v1/adapters/{user}")[1]["version"]
    fleet.cable.join()
    all_come_up(fleet)
    wait_for(lambda: writers(fleet, user) == [home])
    wait_for(lambda: all_once_at(fleet, user, home, set(range(6))))
    # The one version that all serve is newer than any that either side has told.
    assert version_of(fleet, user) > alone
    versions = {item["version"] for item in ask(f"{own}/v1/adapters/{user}")[1]["versions"]}
    assert alone in versions


def test_two_ingresses_agree_and_one_serves_on_where_the_other_dies(fleet: Fleet) -> None:
    process, port = new_ingress(fleet.folder, "second", fleet.ports)
    second = replace(fleet, ingress=process, port=port)
    process.start()
    try:
        wait_for(lambda: all_up(second))
        user = fleet.user_at("b")
        for number in range(2):
            taught = teach(fleet, user, number)
        wait_for(lambda: learned(second, taught))
        for ingress, other, node in ((fleet, second, "c"), (second, fleet, "a")):
            assert ask(f"{ingress.url}/v1/fleet/move", {"user": user, "node": node})[0] == 200
            wait_for(lambda node=node, other=other: ask(f"{other.url}/v1/fleet")[1]["homes"][user] == node)
        assert ask(f"{fleet.url}/v1/feedback", pair(user, 2))[2]["X-Edged-Node"] == "a"
        fleet.ingress.kill()
        assert second.chat(user)[0] == 200
        assert ask(f"{second.url}/v1/fleet/move", {"user": user, "node": "b"})[0] == 200
        assert ask(f"{second.url}/v1/feedback", pair(user, 3))[2]["X-Edged-Node"] == "b"
        fleet.ingress.start()
        all_come_up(fleet)
        assert ask(f"{fleet.url}/v1/feedback", pair(user, 4))[2]["X-Edged-Node"] == "b"
        wait_for(lambda: all_once_at(fleet, user, "b", set(range(5))))
    finally:
        process.kill()
