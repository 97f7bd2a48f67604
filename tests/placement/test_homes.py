"""Homes of users: by hash over all nodes, unless they are named or taught elsewhere."""

from edged.placement.homes import Homes, rendezvous

USERS = [f"user{number}" for number in range(300)]


def test_a_node_that_is_added_takes_users_and_moves_no_others() -> None:
    before = {user: rendezvous(user, "abc")[0] for user in USERS}
    after = {user: rendezvous(user, "abcd")[0] for user in USERS}
    assert {after[user] for user in USERS if after[user] != before[user]} == {"d"}
    assert 40 < sum(home == "d" for home in after.values()) < 110


def test_what_is_named_goes_before_what_is_known_and_that_before_the_hash() -> None:
    homes = Homes("abc", {"ann": "c"})
    homes.learn("a", {"ann": 7, "ben": 3})
    homes.learn("b", {"ben": 5})
    assert (homes.of("ann"), homes.of("ben")) == ("c", "b")
    assert homes.taught() == {"ann": "c", "ben": "b"}
    homes.note("a", "ben", 6)
    assert homes.of("ben") == "a"
    # Forgotten at both: the hash again.
    homes.learn("a", {})
    homes.learn("b", {})
    assert homes.of("ben") == rendezvous("ben", "abc")[0]
    assert homes.taught() == {"ann": "c"}


def test_a_reload_keeps_what_is_known_of_nodes_that_stay() -> None:
    homes = Homes("abc", {})
    homes.learn("a", {"ann": 7})
    homes.learn("b", {"ben": 3})
    homes.configure("acd", {"cat": "d"})
    assert (homes.of("ann"), homes.of("cat")) == ("a", "d")
    assert homes.taught() == {"ann": "a", "cat": "d"}


def test_a_home_is_remembered_until_its_node_has_told_otherwise() -> None:
    homes = Homes("abc", {})
    homes.remembered |= {"ann": "b", "ben": "b", "cat": "gone"}
    assert (homes.of("ann"), homes.of("cat")) == ("b", rendezvous("cat", "abc")[0])
    homes.learn("a", {"eve": 1})
    assert (homes.of("ann"), homes.changed) == ("b", True)
    homes.changed = False
    homes.learn("b", {"ben": 4})
    assert homes.remembered == {"ben": "b", "cat": "gone", "eve": "a"}
    homes.changed = False
    homes.note("b", "ben", 5)
    assert not homes.changed
    homes.forget("ben")
    assert homes.remembered == {"cat": "gone", "eve": "a"}
