"""One writer an adapter, many readers: copies travel, homes are taken over and moved, and every pair is learned once.

Nodes are killed, cut off and stopped. Requests take turns among the nodes, so that each has to have what home has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.cli.conftest import edged, wait_for
from tests.fleet.conftest import Fleet, all_come_up, all_up, ask, run_fleet
from tests.fleet.teaching import (
    all_once_at,
    exported,
    fingerprint_version,
    learned,
    lease,
    pair,
    teach,
    teach_at_last,
    version_of,
    wait_for_copy,
    writers,
)

pytestmark = pytest.mark.slow
"""Three daemons, killed and cut off: two minutes."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    settings = {"takeover_s": 2.0, "policy": "round-robin"}
    with run_fleet(tmp_path_factory.mktemp("leases"), **settings) as running:
        yield running


@pytest.fixture(autouse=True)
def whole(fleet: Fleet) -> Iterator[None]:
    """Every test begins with all nodes, whatever became of the one before."""
    yield
    fleet.mend()


def test_every_node_answers_with_what_home_has_learned(fleet: Fleet) -> None:
    user = fleet.user_at("b")
    for number in range(3):
        taught = teach(fleet, user, number)
        wait_for(lambda taught=taught: learned(fleet, taught))
        version = ask(f"{fleet.url}/v1/adapters/{user}")[1]["version"]
        nodes = set[str]()

        def chatted(nodes: set[str] = nodes, version: int = version) -> bool:
            status, answer, headers = fleet.chat(user)
            assert (status, "X-Edged-Home-Away" in headers) == (200, False)
            assert fingerprint_version(user, answer) >= version
            nodes.add(headers["X-Edged-Node"])
            return nodes == set("abc")

        wait_for(chatted)
    assert writers(fleet, user) == ["b"]


def test_a_written_preference_is_in_every_node_s_prompt(fleet: Fleet) -> None:
    user = fleet.user_at("c")
    teach(fleet, user, 1)
    before = {fleet.chat(user)[1]["usage"]["prompt_tokens"] for _ in range(6)}
    assert ask(f"{fleet.url}/v1/adapters/{user}/preference", {"text": "Answer in one short sentence."}, "PUT")[0] == 200
    after = {fleet.chat(user)[1]["usage"]["prompt_tokens"] for _ in range(6)}
    assert (len(before), len(after)) == (1, 1)
    assert min(after) > max(before)


def test_what_a_reader_is_told_is_learned_once_at_home(fleet: Fleet) -> None:
    user, told = fleet.user_at("b"), list[str]()
    teach(fleet, user, 0)
    for number in range(6):
        node = "abc"[number % 3]
        wait_for(lambda node=node: fleet.chat(user)[2]["X-Edged-Node"] == node)
        _, answer, _ = fleet.chat(user, fleet.node_url(node), seed=number)
        said = {"completion_id": answer["id"], "signal": "edit", "text": f"rather this {number}"}
        status, taken, headers = ask(f"{fleet.url}/v1/feedback", said)
        assert (status, headers["X-Edged-Node"]) == (200, node), taken
        told.append(taken["id"])
    wait_for(lambda: all(learned(fleet, each) for each in told))
    wait_for(lambda: [sum(counted.values()) for counted in exported(fleet, user).values()] == [0, 7, 0])
    assert max(exported(fleet, user)["b"].values()) == 1


def test_a_reader_s_own_socket_teaches_and_changes_nothing_by_itself(fleet: Fleet) -> None:
    user = fleet.user_at("b")
    taught = teach(fleet, user, 0)
    wait_for(lambda: learned(fleet, taught))
    wait_for(lambda: fleet.chat(user)[2]["X-Edged-Node"] == "c")
    assert lease(fleet, "c", user)["node"] == "b"  # type: ignore[index]
    url = f"{fleet.node_url('c')}/v1/adapters/{user}"
    for path, body, method in (
        ("rollback", {"version": 0}, "POST"),
        ("preference", {"text": "Be brief."}, "PUT"),
        ("strike", {"key": "x"}, "POST"),
    ):
        status, refused, _ = ask(f"{url}/{path}", body, method)
        assert (status, refused["error"]["code"]) == (409, "not_writer"), path
    # A pair is acknowledged there, and learned at home.
    teach(fleet, user, 1, fleet.node_url("c"))
    wait_for(lambda: all_once_at(fleet, user, "b", {0, 1}))


def test_a_killed_node_s_users_are_taught_elsewhere_and_each_pair_is_learned_once(fleet: Fleet) -> None:
    user = fleet.user_at("b")
    for number in range(4):
        taught = teach(fleet, user, number)
    wait_for(lambda: learned(fleet, taught))
    wait_for_copy(fleet, user, "b")
    version = version_of(fleet, user)
    teach(fleet, user, 4)
    fleet.nodes["b"].kill()
    assert teach_at_last(fleet, user, 5) != "b"
    home = ask(f"{fleet.url}/v1/fleet")[1]["homes"][user]
    teach(fleet, user, 6)
    # What b had acknowledged last may be lacking until it is back, and answers say so.
    assert version_of(fleet, user) >= version
    assert fleet.chat(user)[2].get("X-Edged-Home-Away", "b") == "b"
    fleet.nodes["b"].start()
    all_come_up(fleet)
    wait_for(lambda: writers(fleet, user) == [home])
    wait_for(lambda: all_once_at(fleet, user, home, set(range(7))))
    wait_for(lambda: "X-Edged-Home-Away" not in fleet.chat(user)[2])
    taught = teach(fleet, user, 7)
    wait_for(lambda: learned(fleet, taught))
    assert all_once_at(fleet, user, home, set(range(8)))


def test_a_home_is_moved_by_command_while_it_is_taught(fleet: Fleet) -> None:
    user = fleet.user_at("b")
    for number in range(3):
        teach(fleet, user, number)
    moved = edged("fleet", "move", "--url", fleet.url, user, "c")
    assert moved.returncode == 0, moved.stderr
    assert f"{user} is taught at c" in moved.stdout
    assert ask(f"{fleet.url}/v1/feedback", pair(user, 3))[2]["X-Edged-Node"] == "c"
    wait_for(lambda: writers(fleet, user) == ["c"])
    wait_for(lambda: all_once_at(fleet, user, "c", set(range(4))))
    # A home that was granted holds over a restart of the ingress.
    fleet.ingress.kill()
    fleet.ingress.start()
    all_come_up(fleet)
    assert ask(f"{fleet.url}/v1/feedback", pair(user, 4))[2]["X-Edged-Node"] == "c"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["ann", "nowhere"], '"nowhere" is no node of this fleet: a, b, c'), (["no body", "a"], "a move is")],
)
def test_a_move_to_nowhere_is_refused_in_one_sentence(fleet: Fleet, arguments: list[str], sentence: str) -> None:
    refused = edged("fleet", "move", "--url", fleet.url, *arguments)
    assert refused.returncode != 0
    assert sentence in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_node_that_was_away_forgets_before_it_is_used(fleet: Fleet) -> None:
    user = fleet.user_at("b")
    for number in range(2):
        taught = teach(fleet, user, number)
    wait_for(lambda: learned(fleet, taught))
    wait_for(lambda: fleet.chat(user)[2]["X-Edged-Node"] == "c")
    assert lease(fleet, "c", user) is not None
    fleet.nodes["c"].kill()
    fleet.wait_for_state("c", "down")
    status, forgotten, _ = ask(f"{fleet.url}/v1/adapters/{user}", method="DELETE")
    assert (status, forgotten["away"]) == (200, ["c"]), forgotten
    # Over a restart of the ingress, too.
    fleet.ingress.kill()
    fleet.ingress.start()
    wait_for(lambda: all_up(fleet, "ab"))
    assert version_of(fleet, user) == 0
    fleet.nodes["c"].start()
    all_come_up(fleet)
    assert lease(fleet, "c", user) is None
    assert exported(fleet, user)["c"] == Counter()
    assert not list((fleet.folder / "c" / "adapters").glob(f"*/{user}"))
    # A user of that name begins anew.
    teach(fleet, user, 9)
    wait_for(lambda: all_once_at(fleet, user, "b", {9}))


def test_a_node_that_calls_itself_otherwise_is_refused(fleet: Fleet) -> None:
    fleet.nodes["c"].kill()
    fleet.nodes["c"].environment["EDGED_API__NODE"] = "b"
    try:
        fleet.nodes["c"].start()
        fleet.wait_for_state("c", "refused")
        problem = next(item["problem"] for item in ask(f"{fleet.url}/v1/fleet")[1]["nodes"] if item["name"] == "c")
        assert problem == 'it calls itself "b" (api.node), and fleet.nodes "c": give it one name'
    finally:
        fleet.nodes["c"].kill()
        fleet.nodes["c"].environment["EDGED_API__NODE"] = "c"
        fleet.nodes["c"].start()
        all_come_up(fleet)
