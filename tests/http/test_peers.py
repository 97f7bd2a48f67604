"""Who is at the other end: the kernel's tables, the user database, and rules over them."""

from __future__ import annotations

import grp
import json
import os
import pwd
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import ClientSession, UnixConnector, web

from edged.http.access import Access, AccessError, Accounts, Caller, Peer, loopback_uid, unix_peer
from edged.http.errors import ApiError
from edged.settings.access import AccessToken, token_hash
from edged.settings.addresses import is_loopback
from edged.settings.load import AccessSettings
from edged.store.jobs.jobs import JobAdapters


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
    title, _, first = (tmp_path / "tcp").read_text().splitlines()[:3]
    (tmp_path / "tcp").write_text(f"{title}\n{first}\n")
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
    assert 12345 not in (await accounts.peer(0)).gids, "another process of the account is not in the group"
    assert await accounts.peer(4242424) == Peer(4242424, "", frozenset())


async def test_what_an_account_was_is_forgotten_after_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now, groups = [100.0], [5, 6]
    monkeypatch.setattr("os.getgrouplist", lambda name, gid: [gid, *groups])
    accounts = Accounts(lambda: now[0])
    assert (await accounts.peer(0)).gids == {0, 5, 6}
    groups.clear()
    now[0] = 129.9
    assert (await accounts.peer(0)).gids == {0, 5, 6}
    now[0] = 130.0
    assert (await accounts.peer(0)).gids == {0}


async def test_the_cache_of_accounts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edged.http.access._MAX_KEPT", 2)
    looked_up: list[int] = []
    monkeypatch.setattr("edged.http.access._account", lambda uid: (looked_up.append(uid), ("", frozenset()))[1])
    accounts = Accounts(lambda: 0.0)
    for uid in (7, 8, 7, 8, 9, 9, 7):
        await accounts.peer(uid)
    assert looked_up == [7, 8, 9, 7]


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


def test_a_jobs_adapter_is_its_owners_alone_unless_a_rule_names_it() -> None:
    made = JobAdapters({"ann-x": "ann", "job-x": "uid:7"}, {"ann-x@1": "ann", "soup@1": "ann"})
    everybody = Caller("app", "app", "app", frozenset({"use"}), ("*",), "rule", made)
    ann, phone = (replace(everybody, tenant=tenant, users=()) for tenant in ("ann", "token:ann"))
    for name in ("ann-x", "ann-x@1"):
        assert ann.speaks_for(name)
        assert not phone.speaks_for(name), "a token of the account's name is another party"
        assert not everybody.speaks_for(name)
        named = (name.partition("@")[0],)
        assert not replace(ann, named=named).speaks_for(name), "a person was given that name"
        assert replace(everybody, named=named).speaks_for(name)
        assert replace(everybody, users=("ann-*",), named=("ann-*",)).speaks_for(name)
    assert not replace(ann, tenant="job", users=("job",)).speaks_for("job-x"), "an account named job"
    assert everybody.speaks_for("soup@1"), "it goes with soup, which no owner has by its name"
    assert not ann.speaks_for("soup@1")


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


def test_an_account_that_came_after_an_adapter_of_its_name_is_not_the_adapters_user() -> None:
    made = JobAdapters({"ann-web": "ann"}, {"recipes@2": "bob"})
    late = access().of_peer(Peer(5003, "ann-web", frozenset()), made)
    assert (late.users, late.tenant) == ((), "uid:5003")
    told = (
        r'; its name is that of an adapter of a fine-tuning job of "ann": have that .*, or write users = \["ann-web"\]'
    )
    with pytest.raises(ApiError, match=r"\(no rule of \[access\] names it" + told):
        late.demand_user("ann-web")
    by_rule = access(rules=[{"peers": ["uid:5003"], "roles": ["use"]}]).of_peer(
        Peer(5003, "ann-web", frozenset()), made
    )
    with pytest.raises(ApiError, match=r"\(access\.rules\[0\]" + told):
        by_rule.demand_user("ann-web")
    assert access().of_peer(Peer(5001, "ann", frozenset()), made).users == ("ann",)
    assert access().of_peer(Peer(5004, "recipes@2", frozenset()), made).users == ()
    rules = [{"peers": ["uid:5003"], "roles": ["use"], "users": ["ann-web"]}]
    assert access(rules=rules).of_peer(Peer(5003, "ann-web", frozenset()), made).speaks_for("ann-web")


def test_root_the_daemons_account_and_the_group_edged_are_admins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edged.http.access.id_of", lambda kind, name: 777 if name == "edged" else None)
    rules = [{"peers": ["uid:0", "uid:5001"], "roles": []}]
    found = access(rules=rules)
    for peer in (Peer(0, "root", frozenset()), Peer(os.geteuid(), "me", frozenset()), Peer(9, "x", frozenset({777}))):
        assert found.of_peer(peer).may("admin")
        assert found.of_peer(peer).speaks_for("anybody")
    assert not found.of_peer(Peer(5001, "y", frozenset({777}))).may("use"), "a rule goes before the group"


@pytest.mark.parametrize("peer", ["user:no-such-account", "group:no-such-group"])
def test_a_rule_about_an_account_that_is_not_there_is_refused(peer: str) -> None:
    kind = peer.partition(":")[0]
    way_out = {"user": "uid", "group": "gid"}[kind] + ":NUMBER"
    told = (
        rf'access\.rules\[0\]\.peers names "{peer}", and this box has no such {kind}: create it, .* write "{way_out}"'
    )
    with pytest.raises(AccessError, match=told):
        access(rules=[{"peers": [peer], "roles": ["use"]}])


def test_rules_name_accounts_and_groups_by_name_or_number() -> None:
    account, group = pwd.getpwnam("nobody"), grp.getgrnam("daemon")
    for peer in ("user:nobody", f"uid:{account.pw_uid}"):
        found = access(rules=[{"peers": [peer], "roles": ["metrics"]}])
        assert found.of_peer(Peer(account.pw_uid, "nobody", frozenset())).roles == {"metrics"}
        assert found.of_peer(Peer(account.pw_uid - 1, "x", frozenset({account.pw_uid}))).roles == {"use", "train"}
    for peer in ("group:daemon", f"gid:{group.gr_gid}"):
        found = access(rules=[{"peers": [peer], "roles": ["metrics"]}])
        assert found.of_peer(Peer(5001, "x", frozenset({group.gr_gid}))).roles == {"metrics"}
        assert found.of_peer(Peer(group.gr_gid, "x", frozenset())).roles == {"use", "train"}


def test_a_rule_for_admins_speaks_for_everybody() -> None:
    found = access(rules=[{"peers": ["uid:5001"], "roles": ["admin"]}]).of_peer(Peer(5001, "ann", frozenset()))
    assert (found.users, found.rule, found.tenant) == (("*",), "access.rules[0]", "ann")


def test_every_caller_is_told_what_it_may_and_by_which_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edged.http.access.id_of", lambda kind, name: 777 if (kind, name) == ("group", "edged") else 1)
    monkeypatch.setattr("os.geteuid", lambda: 990)
    rules = [{"peers": ["uid:8"], "roles": []}, {"peers": ["uid:9"], "roles": ["use", "train"], "users": ["bo", "a*"]}]
    found = access(rules=rules)
    admin, nobody = found.of_peer(Peer(0, "root", frozenset())), found.of_peer(Peer(8, "", frozenset()))
    assert (str(admin.label), admin.name, admin.rule) == ('peer "root" (uid 0)', "root", "root is admin")
    assert found.of_peer(Peer(990, "edged", frozenset())).rule == "the daemon's own account is admin"
    assert found.of_peer(Peer(7, "x", frozenset({777}))).rule == 'members of group "edged" are admins'
    for role in ("use", "train", "metrics", "admin"):
        admin.demand_role(role)
    admin.demand_user("anybody", None)
    with pytest.raises(ApiError) as refused:
        nobody.demand_role("use")
    error = refused.value
    assert (error.status, error.code) == (403, "forbidden_role")
    assert str(error) == 'this needs the role "use", and peer of uid 8 has no role (access.rules[0])'
    app = found.of_peer(Peer(9, "app", frozenset()))
    app.demand_user(None, "bo", "ann", None)
    with pytest.raises(ApiError) as refused:
        app.demand_user(None, "ann", "eve", "bo")
    error = refused.value
    assert (error.status, error.code, error.user) == (403, "forbidden_user", "eve")
    assert str(error) == 'user "eve" is not for peer "app" (uid 9), who may speak for bo, a* (access.rules[1])'
    with pytest.raises(ApiError, match="has train, use "):
        app.demand_role("admin")
    with pytest.raises(ApiError, match="who may speak for nobody "):
        nobody.demand_user("bo")


def test_a_token_is_known_by_its_hash_alone() -> None:
    tokens = [
        {"name": "web", "sha256": token_hash("one"), "roles": ["use"], "users": ["ann"]},
        {"name": "ops", "sha256": token_hash("two"), "roles": ["admin"]},
    ]
    found = access(tokens=tokens)
    web = found.of_token("Bearer one")
    assert (web.name, web.tenant, web.users, web.may("train")) == ("web", "token:web", ("ann",), False)
    assert (web.label, web.rule) == ('token "web"', 'access.tokens, name = "web"')
    assert found.of_token("Bearer  one ") == web
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
        assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")


def test_the_operators_token_is_admin_beside_all_others() -> None:
    tokens = [{"name": "web", "sha256": token_hash("one"), "roles": ["use"]}]
    found = Access(AccessSettings.model_validate({"tokens": tokens}), "sesame")
    operator = found.of_token("Bearer sesame")
    assert (operator.name, operator.users, operator.roles) == ("api.token", ("*",), {"admin"})
    assert (operator.label, operator.tenant, operator.rule) == (
        'token "api.token"',
        "token:api.token",
        "api.token is admin",
    )
    assert found.of_token("Bearer one").users == ()
    assert [each.has_tokens for each in (access(), access(tokens=tokens), Access(AccessSettings(), "x"))] == [0, 1, 1]


async def test_a_request_is_its_sockets_or_its_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = access()
    asked: list[int] = []
    real = loopback_uid

    def owner(*ends: tuple[str, int]) -> int | None:
        asked.append(1)
        return real(*ends)

    monkeypatch.setattr("edged.http.access.loopback_uid", owner)

    async def who(request: web.Request) -> web.Response:
        try:
            caller = await found.caller(request)
            return web.Response(text=f"{caller.label}: {', '.join(sorted(caller.roles))}")
        except ApiError as error:
            return web.Response(status=error.status, text=f"{error.code}: {error}")

    app = web.Application()
    app.router.add_get("/", who)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(tmp_path / "s")).start()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[1][1]}/"
        me = f"{await Accounts().peer(os.geteuid())}: admin"
        told = (
            'invalid_api_key: send "Authorization: Bearer TOKEN" with a token that [access] knows (`edged token new`)'
        )

        async def ask(http: ClientSession, address: str = url, shown: str = "") -> tuple[int, str]:
            async with http.get(address, headers={"Authorization": shown} if shown else {}) as answer:
                return answer.status, await answer.text()

        async with ClientSession() as http, ClientSession(connector=UnixConnector(str(tmp_path / "s"))) as local:
            assert [await ask(http), await ask(http)] == [(200, me)] * 2
            assert len(asked) == 1, "a connection's owner is looked up once"
            assert await ask(local, "http://localhost/", "Bearer nonsense") == (200, me)
            found.configure(AccessSettings(tokens=[AccessToken(name="web", sha256=token_hash("one"), roles=["use"])]))
            assert await ask(http, shown="Bearer one") == (200, 'token "web": use')
            assert await ask(http) == (401, told)
            assert await ask(local, "http://localhost/") == (200, me)
            rules = [{"peers": ["gid:600"], "roles": ["metrics"]}]
            found.configure(AccessSettings.model_validate({"rules": rules}))
            monkeypatch.setattr("edged.http.access.unix_peer", lambda connection: (5001, 600))
            assert await ask(local, "http://localhost/") == (200, "peer of uid 5001: metrics"), "its process' own group"
        monkeypatch.setattr("edged.http.access.loopback_uid", lambda *ends: None)
        async with ClientSession() as http:
            message = "nobody can tell which account of this box connects: use the Unix socket, or make a token"
            assert await ask(http) == (401, f"invalid_api_key: {message}")
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("name", "local"),
    [("localhost", True), ("127.0.0.9", True), ("::1", True), ("10.0.0.1", False), ("example.org", False), ("", False)],
)
def test_loopback_is_localhost_or_an_address_of_it(name: str, local: bool) -> None:
    assert is_loopback(name) == local


@pytest.mark.parametrize(
    ("section", "value", "told"),
    [
        ("rules", {"peers": ["ann"], "roles": []}, '"ann" names no peer: write "user:NAME"'),
        ("rules", {"peers": ["uid:12345678901"], "roles": []}, "names no peer"),
        ("rules", {"peers": [], "roles": []}, "at least 1 item"),
        ("rules", {"peers": ["uid:1"], "roles": [], "users": ["a**"]}, 'names no user: give a name.*"@self"'),
        ("rules", {"peers": ["uid:1"], "roles": ["admin"], "users": ["ann"]}, '"admin" speaks for everybody'),
        ("rules", {"peers": ["uid:1"], "roles": [], "user": ["ann"]}, "Extra inputs"),
        ("tokens", {"name": "a b", "sha256": "0" * 64, "roles": []}, '"a b" cannot name a token'),
        ("tokens", {"name": "a", "sha256": "0" * 63, "roles": []}, "should match pattern"),
        ("tokens", {"name": "a", "sha256": "0" * 64, "roles": [], "users": ["@self"]}, '"@self" means nobody'),
    ],
)
def test_a_grant_that_cannot_be_meant_is_refused(section: str, value: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        access(**{section: [value]})


def test_two_tokens_of_one_name_are_refused_and_lists_may_come_as_json() -> None:
    token = {"name": "web", "sha256": "0" * 64, "roles": ["use"]}
    with pytest.raises(ValueError, match='two tokens are named "web"'):
        access(tokens=[{**token, "name": "other"}, token, token])
    assert AccessSettings.model_validate({"tokens": json.dumps([token])}).tokens[0].name == "web"
    with pytest.raises(ValueError, match="neither a list of tables nor JSON: Expecting value"):
        access(tokens="nonsense")


def test_invented_names_share_the_turn_of_the_pattern_that_grants_them() -> None:
    rules = [{"peers": ["uid:5001"], "roles": ["use"], "users": ["@self", "kitchen", "shared-*"]}]
    found = access(rules=rules)
    ann, root = found.of_peer(Peer(5001, "ann", frozenset())), found.of_peer(Peer(0, "root", frozenset()))
    turns = [ann.fairness_key(user) for user in (None, "ann", "kitchen", "shared-1", "shared-2")]
    assert turns == ["ann", "ann", "kitchen", "shared-*", "shared-*"]
    assert ann.fairness_key("shared-1", {"shared-1": 2.0}) == "shared-1"
    assert [root.fairness_key(user) for user in (None, "bob")] == ["root", "bob"]
    web = replace(ann, users=("*",), tenant="token:web")
    assert [web.fairness_key(user) for user in ("bob", "eve")] == ["token:web", "token:web"]
