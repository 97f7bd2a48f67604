"""Who is at the other end: the kernel's tables, the user database, and rules over them."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from edged.api.access import Access, AccessError, Accounts, Peer, loopback_uid, unix_peer
from edged.api.errors import ApiError
from edged.settings.access import token_hash
from edged.settings.load import AccessSettings


def access(**settings: object) -> Access:
    return Access(AccessSettings.model_validate(settings))


def test_the_kernel_names_the_process_at_the_other_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert unix_peer(ours) == (os.geteuid(), os.getegid())


@pytest.mark.parametrize(
    ("listen", "dial"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("127.0.0.1", "::ffff:127.0.0.1")]
)
def test_the_owner_of_a_loopback_connection_is_found(listen: str, dial: str) -> None:
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with (
        socket.create_server((listen, 0), family=family) as server,
        socket.create_connection((dial, server.getsockname()[1])) as client,
    ):
        accepted, peer = server.accept()
        with accepted:
            assert loopback_uid(peer[:2], accepted.getsockname()[:2]) == os.geteuid()
            client.close()
            assert loopback_uid(peer[:2], accepted.getsockname()[:2]) is None


CLOSED = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 1594 1 0 100 0 0 10 0
   1: 0100007F:A2F4 0100007F:1F90 05 00000000:00000000 03:00000A96 00000000     0        0 0 3 0
   2: 0100007F:1F90 0100007F:A2F4 08 00000000:00000000 00:00000000 00000000  1000        0 1732 1 0 20 4 24 10 -1
"""
"""/proc/net/tcp of Linux 6.1 after the client, of uid 65534, has closed its end."""


def test_a_socket_that_its_process_has_closed_is_not_roots(tmp_path: Path) -> None:
    (tmp_path / "tcp").write_text(CLOSED)
    assert loopback_uid(("127.0.0.1", 0xA2F4), ("127.0.0.1", 0x1F90), tmp_path) is None
    (tmp_path / "tcp").write_text(CLOSED.replace("0        0 0 3", "65534        0 99 3"))
    assert loopback_uid(("127.0.0.1", 0xA2F4), ("127.0.0.1", 0x1F90), tmp_path) == 65534


def test_a_connection_that_no_table_has_is_nobodys(tmp_path: Path) -> None:
    assert loopback_uid(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
    assert loopback_uid(("127.0.0.1", 1), ("127.0.0.1", 2), tmp_path) is None


async def test_an_accounts_groups_are_remembered_and_the_process_own_is_added() -> None:
    now = [0.0]
    accounts = Accounts(lambda: now[0])
    root = await accounts.peer(0, 12345)
    assert root.name == "root"
    assert {0, 12345} <= root.gids
    assert (await accounts.peer(4242424)).name == ""


def test_the_first_rule_that_fits_counts() -> None:
    rules = [
        {"peers": ["uid:5001"], "roles": ["use"], "users": ["kitchen"]},
        {"peers": ["gid:600", "uid:5001"], "roles": ["use", "train"], "users": ["@self", "shared-*"]},
    ]
    found = access(rules=rules)
    first = found.of_peer(Peer(5001, "app", frozenset({600})))
    assert (first.roles, first.users) == ({"use"}, ("kitchen",))
    second = found.of_peer(Peer(5002, "ann", frozenset({600})))
    assert second.speaks_for("ann")
    assert second.speaks_for("shared-1")
    assert not second.speaks_for("shared")
    assert not second.speaks_for("bob")


def test_without_a_rule_an_account_speaks_for_itself_and_one_without_a_name_for_nobody() -> None:
    found = access()
    ann = found.of_peer(Peer(5001, "ann", frozenset()))
    assert (ann.users, ann.tenant) == (("ann",), "ann")
    assert ann.may("use")
    assert ann.may("train")
    assert not ann.may("admin")
    for name in ("", "_apt"):
        nobody = found.of_peer(Peer(5002, name, frozenset()))
        assert (nobody.users, nobody.tenant) == ((), "uid:5002")


def test_root_the_daemons_account_and_the_group_edged_are_admins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edged.api.access.id_of", lambda kind, name: 777 if name == "edged" else None)
    rules = [{"peers": ["uid:0", "uid:5001"], "roles": []}]
    found = access(rules=rules)
    for peer in (Peer(0, "root", frozenset()), Peer(os.geteuid(), "me", frozenset()), Peer(9, "x", frozenset({777}))):
        assert found.of_peer(peer).may("admin")
        assert found.of_peer(peer).speaks_for("anybody")
    assert not found.of_peer(Peer(5001, "y", frozenset({777}))).may("use"), "a rule goes before the group"


@pytest.mark.parametrize("peer", ["user:no-such-account", "group:no-such-group"])
def test_a_rule_about_an_account_that_is_not_there_is_refused(peer: str) -> None:
    with pytest.raises(AccessError, match=rf'access\.rules\[0\]\.peers names "{peer}", and this box has no such'):
        access(rules=[{"peers": [peer], "roles": ["use"]}])


def test_a_token_is_known_by_its_hash_alone() -> None:
    tokens = [
        {"name": "web", "sha256": token_hash("one"), "roles": ["use"], "users": ["ann"]},
        {"name": "ops", "sha256": token_hash("two"), "roles": ["admin"]},
    ]
    found = access(tokens=tokens)
    web = found.of_token("Bearer one")
    assert (web.name, web.users, web.may("train")) == ("web", ("ann",), False)
    assert found.of_token("bearer two").speaks_for("anybody")
    for shown in (
        "",
        "Bearer",
        "Bearer ",
        "Basic one",
        "Bearer three",
        "one",
        f"Bearer {token_hash('one')}",
        "Bearer \udcff",
    ):
        with pytest.raises(ApiError) as refused:
            found.of_token(shown)
        assert refused.value.status == 401


def test_invented_names_share_the_turn_of_the_pattern_that_grants_them() -> None:
    rules = [{"peers": ["uid:5001"], "roles": ["use"], "users": ["@self", "kitchen", "shared-*"]}]
    found = access(rules=rules)
    ann, root = found.of_peer(Peer(5001, "ann", frozenset())), found.of_peer(Peer(0, "root", frozenset()))
    turns = [ann.turn(user) for user in (None, "ann", "kitchen", "shared-1", "shared-2")]
    assert turns == ["ann", "ann", "kitchen", "shared-*", "shared-*"]
    assert ann.turn("shared-1", {"shared-1": 2.0}) == "shared-1"
    assert [root.turn(user) for user in (None, "bob")] == ["root", "bob"]
    web = replace(ann, users=("*",), tenant="token:web")
    assert [web.turn(user) for user in ("bob", "eve")] == ["token:web", "token:web"]
