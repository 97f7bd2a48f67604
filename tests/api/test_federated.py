"""Rounds over the API: consent, the record that leaves, the ledger, and what is refused."""

from __future__ import annotations

import hashlib
import io
import json
import signal
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil
import pytest
from safetensors.numpy import load, save

from edged.api.routes import ROUTES
from edged.federated.averaging import B, new_start
from edged.federated.campaign_file import parse_campaign
from edged.federated.privacy import epsilon, norm
from edged.federated.records import FederatedRecord, RoundFile
from edged.settings.access import token_hash
from tests.api.live import LiveDaemon, running
from tests.api.test_adapters import saved, teach, until
from tests.api.test_starts import archive, put
from tests.federated.planted import Planted, shared_numbers
from tests.models import save_tiny

WEIGHTS = "adapter_model.safetensors"
SETTINGS: dict[str, Any] = {
    "store__save_every_s": 0.2,
    "federated__enabled": True,
    "federated__min_pairs": 4,
    "federated__min_participants": 2,
    "federated__max_rounds": 3,
    "federated__min_interval_h": 0.0,
    "align__rank": 4,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("federated") / "tiny", max_position_embeddings=512)


@pytest.fixture(scope="module")
def federation(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    with running(tmp_path_factory.mktemp("federation"), model, **SETTINGS) as live:
        yield live


@pytest.fixture
def box(federation: LiveDaemon) -> Iterator[httpx2.Client]:
    """A client of the shared daemon; whoever agreed in a test takes part in it alone."""
    with federation.http() as http:
        yield http
        for each in http.get("/v1/federated").json()["consents"]:
            http.delete(f"/v1/federated/consent/{each['user']}")


def agree(http: httpx2.Client, user: str) -> httpx2.Response:
    told = http.get("/v1/federated").json()
    return http.put(f"/v1/federated/consent/{user}", json={"text_sha256": told["text_sha256"]})


def campaign(http: httpx2.Client, **more: Any) -> dict[str, Any]:
    told = http.get("/v1/federated").json()
    return {"name": "tone", "model": told["model"], "rank": told["rank"], "demand": 2, "min_response": 1.0, **more}


def asked(table: dict[str, Any], nonce: str = "ab" * 16, **more: Any) -> bytes:
    about: dict[str, Any] = {"job": parse_campaign(table), "round": 0, "nonce": nonce, "start": "", "tensors": {}}
    return RoundFile(**{**about, **more}).content()


def post(http: httpx2.Client, content: bytes, user: str | None = None) -> httpx2.Response:
    where = "/v1/federated/rounds" + (f"?user={user}" if user else "")
    return http.post(where, content=content, headers={"Content-Type": "application/octet-stream"})


def ended(http: httpx2.Client, round_id: str) -> dict[str, Any]:
    return until(http, f"/v1/federated/rounds/{round_id}", lambda body: body["state"] != "training", 60.0)


def refusal(answer: httpx2.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def members(content: bytes) -> dict[str, bytes]:
    """The files of a tar."""
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def ledger(http: httpx2.Client) -> list[dict[str, Any]]:
    return list(http.get("/v1/federated/ledger").json()["ledger"])


def taught(http: httpx2.Client, user: str) -> tuple[Any, ...]:
    """What is known of a user's adapter, but for tests of it."""
    found = http.get(f"/v1/adapters/{user}").json()
    return found["version"], found["pairs_trained"], [each["version"] for each in found["versions"]]


def record_of(content: bytes, tmp_path: Path) -> FederatedRecord:
    (tmp_path / "record").write_bytes(content)
    return FederatedRecord.read(tmp_path / "record", 1 << 26)


def test_a_user_who_agreed_takes_part_and_the_ledger_has_it_first(box: httpx2.Client, tmp_path: Path) -> None:
    teach(box, "ann", 12)
    before = taught(box, "ann")
    assert agree(box, "ann").status_code == 200
    (consent,) = [each for each in box.get("/v1/federated").json()["consents"] if each["user"] == "ann"]
    assert (consent["counts"], consent["rounds"]) == (True, 0)
    offer = box.get("/v1/federated/rounds").json()
    assert offer["participants"] >= 1
    assert (offer["busy"], offer["terms"]["clip"]) == (None, 0.4)
    assert offer["memory_mb"].bit_count() == offer["tokens_per_s"].bit_count() == 1
    begun = post(box, asked(campaign(box)))
    assert begun.status_code == 202, begun.text
    round_id = begun.json()["id"]
    assert ended(box, round_id) == {"id": round_id, "state": "done", "reason": "", "progress": 1.0}
    lines = len(ledger(box))
    content = box.get(f"/v1/federated/rounds/{round_id}/record").content
    record = record_of(content, tmp_path)
    assert 0 < norm(record.tensors) <= 0.4 * (1 + 1e-6)
    assert {name.endswith(B) for name in record.tensors} == {True}
    assert (record.mode, record.pairs >= 4, record.epsilon) == ("sum", True, None)
    assert b"ann" not in content.replace(b"planned", b"")
    assert ledger(box)[lines:] == [
        {
            **ledger(box)[-1],
            **{"user": "ann", "campaign": "tone", "round": 0, "start": "", "mode": "sum", "noise": 0.0},
            **{"epsilon": None, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()},
        }
    ]
    assert box.get(f"/v1/federated/rounds/{round_id}/record").content == content
    assert len(ledger(box)) == lines + 1, "a record that leaves again is charged once"
    assert taught(box, "ann") == before
    assert "@round" not in box.get("/v1/adapters").text
    assert box.delete(f"/v1/federated/rounds/{round_id}").json() == {"id": round_id, "dropped": True}
    assert "there is no round" in refusal(box.get(f"/v1/federated/rounds/{round_id}"), 404)


def test_a_start_that_comes_with_the_round_is_taught(box: httpx2.Client, tmp_path: Path) -> None:
    teach(box, "cleo", 8)
    agree(box, "cleo")
    plain = campaign(box)
    one = post(box, asked(plain), "cleo").json()["id"]
    assert ended(box, one)["state"] == "done"
    first = record_of(box.get(f"/v1/federated/rounds/{one}/record").content, tmp_path)
    start = new_start("other", first.shapes)
    two = post(box, asked(plain, tensors=start), "cleo").json()["id"]
    assert ended(box, two)["state"] == "done"
    second = record_of(box.get(f"/v1/federated/rounds/{two}/record").content, tmp_path)
    assert any(not np.array_equal(first.tensors[name], second.tensors[name]) for name in first.tensors)
    named = {**plain, "starts": ["kind"]}
    told = refusal(post(box, asked(named, start="kind"), "cleo"), 400)
    assert told == 'this box has no start "kind": known are none; `edged starts add kind FOLDER` adds it'
    for tensors, why in (
        ({name: each[:1] for name, each in start.items()}, "is needed: it is of another model or form"),
        ({name: each for name, each in start.items() if name.endswith(B)}, "is missing"),
        ({name: np.where(each == 0, np.float32(np.nan), each) for name, each in start.items()}, "not finite"),
    ):
        assert why in refusal(post(box, asked(plain, tensors=tensors), "cleo"), 400)


def test_noise_costs_epsilon_and_over_the_most_a_user_never_takes_part_again(model: Path, tmp_path: Path) -> None:
    most = epsilon(2 / 4.0**2, 1e-6) + 1e-3
    settings = {
        **SETTINGS,
        "federated__max_rounds": 9,
        "federated__max_epsilon": most,
    }
    with running(tmp_path / "run", model, **settings) as live, live.http() as http:
        teach(http, "ann", 12)
        agree(http, "ann")
        noisy = campaign(http, noise=4.0, demand=2000)
        content = []
        for _ in range(2):
            begun = post(http, asked(noisy)).json()["id"]
            assert ended(http, begun)["state"] == "done"
            content.append(http.get(f"/v1/federated/rounds/{begun}/record").content)
        one, two = (record_of(each, tmp_path) for each in content)
        assert one.held_out is None
        assert one.epsilon == pytest.approx(epsilon(1 / 4.0**2, 1e-6))
        assert any(not np.array_equal(one.tensors[name], two.tensors[name]) for name in one.tensors), "noise is new"
        assert "nobody here has agreed" in refusal(post(http, asked(noisy)), 409)
        told = refusal(post(http, asked(noisy), "ann"), 409)
        assert f"would come to epsilon {epsilon(3 / 16, 1e-6):.3g}, over federated.max_epsilon" in told
        live.stop()
        with running(tmp_path / "run", model, **settings) as again, again.http() as later:
            until(later, "/v1/federated/rounds", lambda body: body["participants"] == 0 or True)
            assert "would come to epsilon" in refusal(post(later, asked(noisy), "ann"), 409)


def test_who_has_not_agreed_or_learned_enough_takes_no_part(box: httpx2.Client) -> None:
    teach(box, "dora", 8)
    table = campaign(box)
    assert "dora has not agreed to what is asked now" in refusal(post(box, asked(table), "dora"), 409)
    stale = box.put("/v1/federated/consent/dora", json={"text_sha256": "0" * 64})
    assert "that is not the text" in refusal(stale, 409)
    teach(box, "eve", 2)
    agree(box, "eve")
    assert "federated.min_pairs demands 4" in refusal(post(box, asked(table), "eve"), 409)
    assert "min_pairs demands 30" in refusal(post(box, asked({**table, "min_pairs": 30}), "eve"), 409)


def test_a_consent_is_revoked_at_once(box: httpx2.Client) -> None:
    teach(box, "finn", 8)
    agree(box, "finn")
    begun = post(box, asked(campaign(box)), "finn").json()["id"]
    ended(box, begun)
    lines = len(ledger(box))
    assert box.delete("/v1/federated/consent/finn").json() == {"user": "finn", "revoked": True}
    told = refusal(box.get(f"/v1/federated/rounds/{begun}/record"), 409)
    assert told == "there is no record: its participant agrees no more"
    assert len(ledger(box)) == lines
    assert box.delete("/v1/federated/consent/finn").json()["revoked"] is False


def test_forgetting_erases_consent_the_name_in_the_ledger_and_the_record_that_waits(box: httpx2.Client) -> None:
    teach(box, "gus", 8)
    agree(box, "gus")
    for leaves in (True, False):
        begun = post(box, asked(campaign(box)), "gus").json()["id"]
        ended(box, begun)
        if leaves:
            assert box.get(f"/v1/federated/rounds/{begun}/record").status_code == 200
    assert ledger(box)[-1]["user"] == "gus"
    assert box.delete("/v1/adapters/gus").json()["verified"]
    assert ledger(box)[-1]["user"] is None
    assert "gus" not in box.get("/v1/federated").text
    assert box.get(f"/v1/federated/rounds/{begun}/record").status_code == 409


def test_nothing_planted_and_no_number_of_a_person_s_own_adapter_is_in_a_record(box: httpx2.Client) -> None:
    planted = Planted(2)
    ann = planted.users[0]
    for prompt, chosen, rejected in planted.pairs:
        pair = {"user": ann, "prompt": prompt, "chosen": chosen, "rejected": rejected}
        assert box.post("/v1/feedback", json=pair).status_code == 200
    until(box, f"/v1/adapters/{ann}", lambda body: body.get("pairs_queued") == 0 and saved(body), 60.0)
    for user in planted.users:
        agree(box, user)
    offer, begun = box.get("/v1/federated/rounds"), post(box, asked(campaign(box)), ann)
    state = ended(box, begun.json()["id"])
    record = box.get(f"/v1/federated/rounds/{state['id']}/record")
    assert (state["state"], record.status_code) == ("done", 200)
    own = members(box.get(f"/v1/adapters/{ann}/export").content)[WEIGHTS]
    # What is searched for is there to be found.
    assert planted.found_in(box.get("/v1/federated").content) == planted.users
    assert shared_numbers(own, load(own))
    given = b"".join([offer.content, begun.content, json.dumps(state).encode(), record.content])
    assert not planted.found_in(given)
    assert not shared_numbers(given, load(own))


def test_of_several_starts_a_person_takes_part_in_the_one_that_fits(box: httpx2.Client) -> None:
    teach(box, "hal", 8)
    exported = members(box.get("/v1/adapters/hal/export").content)
    opposed = {name: -each if ".lora_B" in name else each for name, each in load(exported[WEIGHTS]).items()}
    put(box, "like-hal", archive(exported))
    put(box, "unlike-hal", archive({**exported, WEIGHTS: save(opposed)}))
    names = {"like-hal", "unlike-hal"}
    until(box, "/v1/starts", lambda body: all(each["scale"] for each in body["starts"]), 60.0)
    teach(box, "ida", 8)
    agree(box, "ida")
    scored = until(
        box,
        "/v1/adapters/ida/starts",
        lambda body: body["pairs"] == 8 and {each["start"] for each in body["scores"]} == names,
        60.0,
    )
    fitting = min(scored["scores"], key=lambda each: each["loss"])["start"]
    (other,) = names - {fitting}
    began = f"start {fitting}"

    def learned_anew(body: dict[str, Any]) -> bool:
        """An adapter that took a start learns its pairs once more on it."""
        taken = any(version["reason"] == began for version in body["versions"]) or not scored["start"]
        return taken and body["pairs_queued"] == 0 and saved(body)

    until(box, "/v1/adapters/ida", learned_anew, 60.0)
    table = campaign(box, starts=[*names], aggregation="sum")
    assert "is fitted best by this start" in refusal(post(box, asked(table, start=other)), 409)
    begun = post(box, asked(table, start=fitting))
    assert begun.status_code == 202, begun.text
    assert ended(box, begun.json()["id"])["state"] == "done"
    for name in names:
        box.delete(f"/v1/starts/{name}")


def test_one_round_runs_at_a_time_and_one_that_is_dropped_leaves_nothing(model: Path, tmp_path: Path) -> None:
    quiet = {**SETTINGS, "governor__quiet_hours": "00:00-23:59"}
    with running(tmp_path / "run", model, **SETTINGS) as live, live.http() as http:
        teach(http, "ann", 8)
        agree(http, "ann")
        live.stop()
    with running(tmp_path / "run", model, **quiet) as live, live.http() as http:
        table = campaign(http)
        deadline = time.monotonic() + 20
        while (begun := post(http, asked(table))).status_code == 409:
            assert time.monotonic() < deadline, begun.text
            time.sleep(0.05)
        round_id = begun.json()["id"]
        assert f"round {round_id} is under way" in refusal(post(http, asked(table)), 409)
        assert http.get("/v1/federated/rounds").json()["busy"] == round_id
        assert "the round is under way" in refusal(http.get(f"/v1/federated/rounds/{round_id}/record"), 409)
        assert http.delete(f"/v1/federated/rounds/{round_id}").json()["dropped"]
        again = post(http, asked(table)).json()["id"]
        live.stop(signal.SIGKILL)
    with running(tmp_path / "run", model, **SETTINGS) as live, live.http() as http:
        assert "the daemon started anew" in refusal(http.get(f"/v1/federated/rounds/{again}"), 404)
        assert ledger(http) == [], "a round that was lost is charged to nobody"


def test_a_hub_asks_no_more_often_than_the_box_says(model: Path, tmp_path: Path) -> None:
    with (
        running(tmp_path / "run", model, **{**SETTINGS, "federated__min_interval_h": 1.0}) as live,
        live.http() as http,
    ):
        teach(http, "ann", 8)
        agree(http, "ann")
        begun = post(http, asked(campaign(http))).json()["id"]
        ended(http, begun)
        assert http.get(f"/v1/federated/rounds/{begun}/record").status_code == 200
        assert "less than federated.min_interval_h = 1 h ago" in refusal(post(http, asked(campaign(http))), 409)
        assert not http.get("/v1/federated/rounds").json()["idle"]
        assert post(http, asked(campaign(http)), "ann").status_code == 202, "its operator decides"


def test_what_is_no_round_file_is_refused(box: httpx2.Client) -> None:
    assert "the round file cannot be read" in refusal(post(box, b"\x80\x04"), 400)
    assert '"clip" = 9: federated.clip allows 0.4 at most' in refusal(post(box, asked(campaign(box, clip=9.0))), 400)
    assert "this box serves" in refusal(post(box, asked(campaign(box, model="0" * 64))), 400)
    table = json.dumps({"job": {}, "round": 0, "nonce": "ab" * 16})
    header = json.dumps({"__metadata__": {"edged": table}}).encode()
    assert '"name" is missing' in refusal(post(box, len(header).to_bytes(8, "little") + header), 400)
    large = post(box, b"\0" * ((64 << 20) + 1))
    assert "larger than federated.max_update_mb allows" in refusal(large, 413)


def test_without_federation_nothing_of_it_is_there(http: httpx2.Client) -> None:
    told = http.get("/v1/federated").json()
    assert (told["enabled"], told["consents"]) == (False, [])
    assert "federated.enabled is off" in refusal(http.get("/v1/federated/rounds"), 409)
    assert "federated.enabled is off" in refusal(post(http, asked(campaign(http))), 409)
    assert "federated.enabled is off" in refusal(agree(http, "ann"), 409)
    assert ledger(http) == []


def test_the_role_federated_has_the_rounds_routes_alone_and_is_told_no_names(model: Path, tmp_path: Path) -> None:
    tokens = json.dumps([{"name": "agent", "sha256": token_hash("sesame"), "roles": ["federated"]}])
    settings = {**SETTINGS, "api__listen": "127.0.0.1:0", "access__tokens": tokens}
    with running(tmp_path / "run", model, **settings) as live, live.http() as http:
        teach(http, "philippa", 8)
        agree(http, "philippa")
        with httpx2.Client(
            base_url=f"http://127.0.0.1:{listening(live)}", headers={"Authorization": "Bearer sesame"}, timeout=30.0
        ) as agent:
            for route in ROUTES:
                if route.role not in ("federated", "anybody"):
                    path = route.name.replace("{name}", "x").replace("{id}", "x").replace("{user}", "x")
                    answer = agent.request(route.method, path.replace("{", "").replace("}", ""))
                    assert answer.status_code == 403, route.path
            begun = post(agent, asked(campaign(http)))
            assert begun.status_code == 202, begun.text
            assert post(agent, asked(campaign(http)), "philippa").status_code == 403
            state = ended(agent, begun.json()["id"])
            content = agent.get(f"/v1/federated/rounds/{state['id']}/record").content
            sha256 = hashlib.sha256(content).hexdigest()
            (line,) = agent.get(f"/v1/federated/ledger?sha256={sha256}").json()["ledger"]
            assert (line["user"], line["nonce"], line["bytes"]) == (None, "ab" * 16, len(content))
            assert agent.get(f"/v1/federated/ledger?sha256={'0' * 64}").json()["ledger"] == []
            assert agent.get("/v1/federated/ledger").status_code == 403
            seen = content + agent.get("/v1/federated/rounds").content
            assert b"philippa" not in seen
            assert ledger(http)[0]["user"] == "philippa"


def listening(live: LiveDaemon) -> int:
    """The port of its TCP listener."""
    assert live.process.pid is not None
    found = psutil.Process(live.process.pid).net_connections("tcp")
    return next(each.laddr.port for each in found if each.status == psutil.CONN_LISTEN)
