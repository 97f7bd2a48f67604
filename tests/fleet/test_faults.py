"""A node is killed, stopped, drained or of another kind: the others go on, and nothing is lost or learned twice."""

from __future__ import annotations

import json
import signal
import urllib.request

from tests.cli.conftest import wait_for
from tests.fleet.conftest import Fleet, Process, ask
from tests.fleet.test_one_service import exported, pair


def test_a_killed_node_s_users_are_answered_by_the_base_and_taught_when_it_is_back(fleet: Fleet) -> None:
    user = fleet.user_at("a")
    for number in range(3):
        assert ask(f"{fleet.url}/v1/feedback", pair(user, number))[0] == 200
    before = fleet.chat(user)[1]
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Go on"}], "max_tokens": 400, "stream": True, "user": user,
         "ignore_eos": True}
    ).encode()  # fmt: skip
    asked = urllib.request.Request(f"{fleet.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as stream:
        assert b"data: " in stream.readline()
        fleet.nodes["a"].kill()
        rest = stream.read().decode()
    assert 'node \\"a\\" went away in the middle of this answer' in rest
    assert "[DONE]" not in rest
    fleet.wait_for_state("a", "down")

    # Every chat is answered elsewhere, by the base; nothing of this user is taught meanwhile.
    assert all(fleet.chat()[0] == 200 for _ in range(6))
    status, away, headers = fleet.chat(user)
    assert (status, headers["X-Edged-Home-Away"], away["system_fingerprint"]) == (200, "a", "base")
    signals = [{"completion_id": answer["id"], "signal": "up"} for answer in (away, before)]
    for told in (pair(user, 3), *signals):
        status, refused, headers = ask(f"{fleet.url}/v1/feedback", told)
        assert (status, refused["error"]["code"], "Retry-After" in headers) == (503, "home_away", True)
        assert "a" in refused["error"]["message"]

    fleet.nodes["a"].start()
    fleet.wait_for_state("a", "up")
    assert ask(f"{fleet.url}/v1/feedback", pair(user, 3))[0] == 200
    wait_for(lambda: ask(f"{fleet.url}/v1/adapters/{user}")[1]["pairs_seen"] == 4)
    assert [len(exported(fleet, name, user)) for name in "abc"] == [4, 0, 0]
    assert fleet.chat(user)[2]["X-Edged-Node"] == "a"


def test_a_killed_ingress_knows_its_answers_again(fleet: Fleet) -> None:
    answer = fleet.chat(fleet.user_at("b"))[1]
    fleet.ingress.kill()
    fleet.ingress.start()
    wait_for(lambda: _answers(fleet))
    assert ask(f"{fleet.url}/v1/feedback", {"completion_id": answer["id"], "signal": "up"})[2]["X-Edged-Node"] == "b"


def _answers(fleet: Fleet) -> bool:
    try:
        return set(fleet.states().values()) == {"up"}
    except OSError:
        return False


def test_a_node_that_is_silent_gets_nothing_and_goes_on_afterwards(fleet: Fleet) -> None:
    fleet.nodes["c"].send(signal.SIGSTOP)
    try:
        fleet.wait_for_state("c", "stale")
        assert all(fleet.chat()[2]["X-Edged-Node"] != "c" for _ in range(9))
    finally:
        fleet.nodes["c"].send(signal.SIGCONT)
    fleet.wait_for_state("c", "up")


def test_a_drained_node_gets_no_new_requests_and_serves_its_own(fleet: Fleet) -> None:
    url = fleet.node_url("b")
    assert ask(f"{url}/v1/drain", {})[1] == {"drained": True}
    fleet.wait_for_state("b", "draining")
    assert all(fleet.chat()[2]["X-Edged-Node"] != "b" for _ in range(9))
    assert ask(f"{url}/readyz")[1]["error"]["code"] == "drained"
    assert fleet.chat(url=url)[0] == 200
    assert ask(f"{url}/v1/undrain", {})[1] == {"drained": False}
    fleet.wait_for_state("b", "up")


def test_a_node_of_another_model_is_refused_and_the_others_go_on(fleet: Fleet) -> None:
    other = Process(
        ["serve", "--listen", f"127.0.0.1:{fleet.ports['c']}", "--socket", str(fleet.folder / "other.sock"),
         "--data-dir", str(fleet.folder / "other")],
        fleet.folder / "other.log",
    )  # fmt: skip
    fleet.nodes["c"].kill()
    other.start()
    try:
        fleet.wait_for_state("c", "refused")
        problem = next(item["problem"] for item in ask(f"{fleet.url}/v1/fleet")[1]["nodes"] if item["name"] == "c")
        assert "demo" in problem
        assert "one model and LoRA shape make a fleet" in problem
        assert all(fleet.chat()[2]["X-Edged-Node"] != "c" for _ in range(6))
    finally:
        other.kill()
    fleet.nodes["c"].start()
    fleet.wait_for_state("c", "up")
