"""An adapter that several accounts share: who decides about its quarantine, and who hears of it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from edged.api.status import visible
from edged.http.access import Caller
from tests.api.accounts import ANN, BOB, Client, open_folder, root_only
from tests.api.live import LiveDaemon, running
from tests.api.test_quarantine import SETTINGS, attack, held
from tests.models import save_tiny

pytestmark = root_only
SHARED = "recipes"


@pytest.fixture(scope="module")
def daemon() -> Iterator[LiveDaemon]:
    """Account `nobody` teaches `recipes` as well; pairs of both wait in quarantine."""
    rules = [{"peers": [f"user:{ANN}"], "roles": ["use", "train"], "users": ["@self", SHARED]}]
    with open_folder() as folder:
        model = save_tiny(folder / "tiny", max_position_embeddings=512)
        settings = {**SETTINGS, "api__socket_mode": "0666", "access__rules": json.dumps(rules)}
        with running(folder / "run", model, **settings) as live, live.http() as http:
            for user in (SHARED, ANN):
                attack(http, user)
            yield live


def decided(client: Client, pair: int, action: str) -> tuple[int, str | None]:
    answer = client.post(f"/v1/quarantine/{pair}", {"action": action})
    return answer.status, answer.code


def test_all_pairs_of_a_user_are_decided_about_by_those_who_may_decide_about_one(daemon: LiveDaemon) -> None:
    def decided(name: str, user: str, action: str) -> tuple[int, str | None]:
        answer = Client(name, daemon.socket).post("/v1/quarantine", {"user": user, "action": action})
        return answer.status, answer.code

    assert decided(BOB, SHARED, "drop") == (403, "forbidden_user")
    assert decided(ANN, SHARED, "release") == (403, "forbidden_role")
    assert decided(ANN, "a/b", "drop")[0] == 400
    with daemon.http() as http:
        attack(http, "root-only")
        waiting = sorted(pair["pair_id"] for pair in held(http, "root-only"))
        answer = Client("root", daemon.socket).post("/v1/quarantine", {"user": "root-only", "action": "drop"})
        assert answer.json == {"user": "root-only", "decision": "dropped", "pair_ids": waiting, "left": 0}
        assert held(http, SHARED)


def test_alarms_name_an_adapter_to_those_who_may_speak_for_it(daemon: LiveDaemon) -> None:
    def alarms(name: str) -> list[str]:
        return list(Client(name, daemon.socket).get("/v1/status").json["finetune"]["alarms"])

    assert sorted(alarms("root")) == sorted(alarms(ANN)) == sorted([SHARED, ANN])
    assert alarms(BOB) == []


def test_a_status_for_another_has_no_name_that_is_not_its_own() -> None:
    body = {
        "forgetting": {"ann": "vacuuming", "bob": "vacuuming"},
        "finetune": {"active_adapters": ["ann", "bob"], "alarms": ["ann", "bob"], "practising": "ann", "steps": 3},
        "fairness": {
            "users": {"ann": {"counter": 1.0}, "bob": {"counter": 2.0}},
            "runs": [{"user": "ann"}, {"user": "bob"}],
        },
        "readers": {"qoe_mean": 0.9, "users": {"ann": {"qoe_mean": 0.8}, "bob": {"qoe_mean": 1.0}}},
    }
    bob = Caller("peer of uid 7", "bob", "bob", frozenset({"use", "train"}), ("bob",), "")
    assert visible(body, bob) == {
        "caller": {"name": "bob", "roles": ["train", "use"], "users": ["bob"]},
        "forgetting": {"bob": "vacuuming"},
        "finetune": {"active_adapters": ["bob"], "alarms": ["bob"], "practising": "", "steps": 3},
        "fairness": {"users": {"bob": {"counter": 2.0}}, "runs": [{"user": "bob"}]},
        "readers": {"qoe_mean": 0.9, "users": {"bob": {"qoe_mean": 1.0}}},
    }
    admin = Caller("peer of uid 0", "root", "root", frozenset({"admin"}), ("*",), "")
    assert visible(body, admin) == {**body, "caller": {"name": "root", "roles": ["admin"], "users": ["*"]}}


def test_who_teaches_a_shared_adapter_may_drop_its_pairs_and_not_release_them(daemon: LiveDaemon) -> None:
    ann = Client(ANN, daemon.socket)
    with daemon.http() as http:
        first, second = [pair["pair_id"] for pair in held(http, SHARED)][:2]
    refused = ann.post(f"/v1/quarantine/{first}", {"action": "release"})
    assert (refused.status, refused.code) == (403, "forbidden_role")
    assert f'releasing what "{SHARED}" was taught needs the role "admin"' in refused.json["error"]["message"]
    assert decided(ann, second, "drop") == (200, None)
    assert decided(Client(BOB, daemon.socket), first, "drop") == (404, "unknown_pair")
    assert decided(Client("root", daemon.socket), first, "release") == (200, None)


def test_people_release_their_own_pairs(daemon: LiveDaemon) -> None:
    with daemon.http() as http:
        pair = held(http, ANN)[0]["pair_id"]
    assert decided(Client(BOB, daemon.socket), pair, "release") == (404, "unknown_pair")
    assert decided(Client(ANN, daemon.socket), pair, "release") == (200, None)
