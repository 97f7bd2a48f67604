"""Several daemons answer as one service: requests are placed, users are taught at their homes.

A node is killed, stopped, drained or of another kind: the others go on, and nothing is lost or learned twice.
"""

from __future__ import annotations

import gzip
import json
import signal
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cli.conftest import edged, wait_for
from tests.fleet.conftest import Fleet, Process, all_up, ask
from tests.fleet.teaching import (
    all_once_at,
    learned,
    lease,
    pair,
    teach,
    teach_at_last,
    wait_for_copy,
    writers,
)


def exported(fleet: Fleet, name: str, user: str) -> list[str]:
    """The chosen answers of a user's pairs at a node."""
    with urllib.request.urlopen(f"{fleet.node_url(name)}/v1/feedback?user={user}") as answer:
        rows = [json.loads(line) for line in answer.read().decode().splitlines()]
    return sorted(row["chosen"] for row in rows if row.get("chosen"))


def test_the_openai_client_is_answered_whole_and_as_a_stream(fleet: Fleet) -> None:
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none")
    asked = {"model": client.models.list().data[0].id, "max_tokens": 8, "temperature": 0}
    messages = [{"role": "user", "content": "Hello there"}]
    whole = client.chat.completions.create(messages=messages, **asked)  # type: ignore[call-overload]
    parts = list(client.chat.completions.create(messages=messages, stream=True, **asked))  # type: ignore[call-overload]
    assert whole.choices[0].message.content == "".join(part.choices[0].delta.content or "" for part in parts)
    assert whole.id.split("-")[1][0] in "abc"


def test_somebody_who_is_not_taught_yet_moves_as_others_do(fleet: Fleet) -> None:
    user = fleet.user_at("b")
    status, told, _ = ask(f"{fleet.url}/v1/fleet/move", {"user": user, "node": "c"})
    assert status == 200, told
    assert ask(f"{fleet.url}/v1/fleet")[1]["homes"][user] == "c"
    teach(fleet, user, 0)
    wait_for(lambda: all_once_at(fleet, user, "c", {0}))


def test_a_node_gives_no_copy_of_somebody_of_whom_it_has_nothing(fleet: Fleet) -> None:
    status, told, _ = ask(f"{fleet.node_url('a')}/v1/leases/nobody/state")
    assert (status, told["error"]["code"]) == (404, "unknown_adapter")


def test_a_response_is_streamed_and_feedback_on_it_reaches_its_node(fleet: Fleet) -> None:
    client, user = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none"), fleet.user_at("b")
    asked: Any = {"model": "tiny", "input": "Hello there", "max_output_tokens": 8, "temperature": 0}
    with client.responses.stream(**asked, user=user) as stream:
        kinds = [event.type for event in stream]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")
    whole = client.responses.with_raw_response.create(**asked, user=user)
    told = {"completion_id": whole.parse().id, "signal": "edit", "text": "Hello"}
    status, taken, headers = ask(f"{fleet.url}/v1/feedback", told)
    assert (status, headers["X-Edged-Node"], len(taken["pair_ids"])) == (200, "b", 1)
    assert ask(f"{fleet.url}/v1/feedback", told | {"completion_id": "resp_b." + "0" * 32})[0] == 404


def test_a_packed_body_is_read_by_the_ingress_and_sent_on_plain(fleet: Fleet) -> None:
    def post(body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        packed = gzip.compress(json.dumps({"prompt": "a", "max_tokens": 2, **body}).encode())
        with urllib.request.urlopen(urllib.request.Request(f"{fleet.url}/v1/completions", packed, headers)) as answer:
            return json.loads(answer.read())  # type: ignore[no-any-return]

    assert post({"ignore_eos": True})["usage"]["completion_tokens"] == 2
    with pytest.raises(urllib.error.HTTPError, match="403"):
        post({"resume": {}})


def test_an_answer_is_the_node_s_own(fleet: Fleet) -> None:
    status, answer, headers = fleet.chat(temperature=0)
    direct = fleet.chat(url=fleet.node_url(headers["X-Edged-Node"]), temperature=0)[1]
    assert status == 200
    assert answer["choices"] == direct["choices"]
    assert answer["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]


def test_requests_without_a_user_go_to_all_nodes(fleet: Fleet) -> None:
    answered = set[str]()
    for _ in range(8):  # a node whose load was not heard of for a moment is asked in the next round
        with ThreadPoolExecutor(24) as pool:
            chats = [pool.submit(fleet.chat) for _ in range(24)]
        answered |= {chat.result()[2]["X-Edged-Node"] for chat in chats}
        if answered == set("abc"):
            return
    raise AssertionError(f"of three nodes only {sorted(answered)} answered")


def test_pairs_are_learned_once_at_their_user_s_home(fleet: Fleet) -> None:
    user = fleet.user_at("b")
    for number in range(4):
        status, taken, headers = ask(f"{fleet.url}/v1/feedback", pair(user, number))
        assert (status, headers["X-Edged-Node"]) == (200, "b")
    wait_for(lambda: ask(f"{fleet.url}/v1/feedback/{taken['id']}")[1]["pairs"][0]["state"] == "trained")
    assert [len(exported(fleet, name, user)) for name in "abc"] == [0, 4, 0]
    listed = ask(f"{fleet.url}/v1/adapters")[1]["adapters"]
    assert [item["node"] for item in listed if item["adapter"] == user] == ["b"]
    assert ask(f"{fleet.url}/v1/adapters/{user}")[2]["X-Edged-Node"] == "b"
    wait_for(lambda: ask(f"{fleet.url}/v1/fleet")[1]["homes"].get(user) == "b")


def test_a_signal_about_an_answer_reaches_the_node_that_gave_it(fleet: Fleet) -> None:
    user = fleet.user_at("c")
    _, answer, answered = fleet.chat(user, n=2)
    told = {"completion_id": answer["id"], "signal": "chosen", "choice": 1}
    status, taken, headers = ask(f"{fleet.url}/v1/feedback", told)
    assert (status, headers["X-Edged-Node"]) == (200, answered["X-Edged-Node"]), taken
    status, refused, _ = ask(f"{fleet.url}/v1/feedback", {"completion_id": "chatcmpl-ffffffff", "signal": "up"})
    assert (status, refused["error"]["message"]) == (404, 'none of 3 nodes has completion "chatcmpl-ffffffff"')


def test_files_and_jobs_of_a_caller_lie_on_one_node(fleet: Fleet) -> None:
    nodes = {ask(f"{fleet.url}/v1/{what}")[2]["X-Edged-Node"] for what in ("files", "fine_tuning/jobs")}
    assert len(nodes) == 1


def test_a_job_is_made_where_its_file_lies(fleet: Fleet, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"Question {number}:", "completion": f" yes {number}"}) for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none")
    with (tmp_path / "rows.jsonl").open("rb") as rows:
        file = client.files.create(file=rows, purpose="fine-tune")
    job = client.fine_tuning.jobs.create(model=client.models.list().data[0].id, training_file=file.id, suffix="rows")
    assert client.fine_tuning.jobs.retrieve(job.id).training_file == file.id
    client.fine_tuning.jobs.cancel(job.id)


@pytest.mark.parametrize("path", ["files/../backup", "files/%2e%2e/backup", "files/%2E./feedback"])
def test_a_path_of_dots_reaches_no_node(fleet: Fleet, path: str) -> None:
    with socket.create_connection(("127.0.0.1", fleet.port), timeout=20) as connection:
        connection.sendall(f"GET /v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    assert "X-Edged-Node" not in answer
    assert answer.split()[1] in ("400", "404", "501")


def test_metrics_and_events_carry_their_node(fleet: Fleet) -> None:
    text = ask(f"{fleet.url}/metrics")[1]
    assert text.count("# TYPE edged_ready gauge") == 1
    assert [line for line in text.splitlines() if line.startswith("edged_ready{")] == [
        f'edged_ready{{node="{name}"}} 1.0' for name in "abc"
    ]
    seen = set()
    with urllib.request.urlopen(f"{fleet.url}/v1/events?events=status", timeout=20) as stream:
        while seen != set("abc"):
            line = stream.readline().decode()
            if line.startswith("data: "):
                seen.add(json.loads(line.removeprefix("data: "))["node"])


def test_what_an_operator_asks_of_a_box_is_refused_at_the_ingress(fleet: Fleet) -> None:
    for path in ("backup", "settings", "store"):
        status, refused, _ = ask(f"{fleet.url}/v1/{path}")
        assert (status, refused["error"]["code"]) == (501, "at_node")
    assert ask(f"{fleet.url}/v1/nothing")[0] == 404


@pytest.mark.parametrize("body", [{"messages": []}, {"messages": "no"}, {"messages": [{"role": "user"}]}])
def test_a_bad_request_is_refused_in_the_node_s_words(fleet: Fleet, body: dict[str, object]) -> None:
    status, refused, headers = ask(f"{fleet.url}/v1/chat/completions", body)
    direct = ask(f"{fleet.node_url(headers['X-Edged-Node'])}/v1/chat/completions", body)
    assert (status, refused["error"]["message"]) == (400, direct[1]["error"]["message"])


def test_status_is_shown_as_a_table_and_as_json(fleet: Fleet) -> None:
    shown = edged("fleet", "status", "--url", fleet.url)
    assert shown.returncode == 0
    assert all(f"│ {name} " in shown.stdout for name in "abc")
    assert edged("status", "--url", fleet.url).stdout.startswith("a: healthy")
    data = json.loads(edged("fleet", "status", "--url", fleet.url, "--json").stdout)
    assert data["placed"].keys() == set("abc")
    assert data["policy"] == "fleet"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "a fleet needs nodes: give --node NAME=URL for each, or fleet.nodes"),
        (["a=http://127.0.0.1:1", "a=http://127.0.0.1:2"], 'two nodes are named "a"'),
        (["a=http://127.0.0.1:1", "b=http://127.0.0.1:1/"], "have one URL"),
        (["a b=http://127.0.0.1:1"], '"a b" cannot name a node'),
        (["a=http://127.0.0.1:1/v1"], "without a path"),
        (["a=ftp://127.0.0.1:1"], "write http://HOST:PORT"),
        (["a"], "write http://HOST:PORT"),
        (["a=http://10.0.0.5:8137"], "is another machine and needs a token"),
        (["a=http://127.0.0.1:1", "--policy", "least-respond"], 'did you mean "least-response"?'),
        (["a=http://127.0.0.1:1", "--listen", "0.0.0.0:0"], "is reachable from other machines"),
        (["a=http://127.0.0.1:1", "--token-file", "/nowhere/token"], "cannot be read"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(arguments: list[str], sentence: str) -> None:
    nodes = [part for item in arguments if "=" in item or item == "a" for part in ("--node", item)]
    others = (
        arguments[arguments.index(next(item for item in arguments if item.startswith("--"))) :]
        if any(item.startswith("--") for item in arguments)
        else []
    )
    refused = edged("fleet", "serve", *nodes, *others)
    assert refused.returncode == 2, refused.stderr
    assert sentence in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_token_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("secret-token-of-the-fleet\n")
    path.chmod(0o644)
    refused = edged("fleet", "serve", "--node", "a=http://127.0.0.1:1", "--token-file", str(path))
    assert refused.returncode == 2
    assert "may be read by others: chmod 600 it" in refused.stderr
    assert "secret" not in refused.stderr


def test_a_killed_node_s_users_are_answered_and_taught_elsewhere_or_when_it_is_back(fleet: Fleet) -> None:
    copied, user = fleet.user_at("a"), fleet.user_at("a")
    for number in range(2):
        taught = teach(fleet, copied, number)
    wait_for(lambda: learned(fleet, taught))
    wait_for_copy(fleet, copied, "a")
    for number in range(3):
        assert ask(f"{fleet.url}/v1/feedback", pair(user, number))[0] == 200
    before = fleet.chat(user, url=fleet.node_url("a"))[1]
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Go on"}], "max_tokens": 400, "stream": True, "user": user,
         "ignore_eos": True}
    ).encode()  # fmt: skip
    asked = urllib.request.Request(f"{fleet.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    for name in "bc":
        assert ask(f"{fleet.node_url(name)}/v1/drain", {})[0] == 200
        fleet.wait_for_state(name, "draining")
    with urllib.request.urlopen(asked, timeout=60) as stream:
        assert b"data: " in stream.readline()
        fleet.nodes["a"].send(signal.SIGSTOP)
        for name in "bc":
            assert ask(f"{fleet.node_url(name)}/v1/undrain", {})[0] == 200
        fleet.nodes["a"].kill()
        rest = stream.read().decode()
    assert 'node \\"a\\" went away in the middle of this answer' in rest
    assert "[DONE]" not in rest
    fleet.wait_for_state("a", "down")

    # Every chat is answered elsewhere, that of a user whom no node knows by the base; neither is taught meanwhile.
    assert all(fleet.chat()[0] == 200 for _ in range(6))
    assert fleet.chat(user)[0] == 200
    stranger = fleet.user_at("a")
    status, away, headers = fleet.chat(stranger)
    assert (status, headers["X-Edged-Home-Away"], away["system_fingerprint"]) == (200, "a", "base")
    signals = [{"completion_id": answer["id"], "signal": "up"} for answer in (away, before)]
    for told in (pair(user, 3), pair(stranger, 0), *signals):
        status, refused, headers = ask(f"{fleet.url}/v1/feedback", told)
        assert (status, refused["error"]["code"], "Retry-After" in headers) == (503, "home_away", True)
        assert "a" in refused["error"]["message"]

    # Another node takes over whom it has a copy of.
    fleet.configure(takeover_s=1.0)
    home = teach_at_last(fleet, copied, 2)
    fleet.configure()
    assert home != "a"

    fleet.nodes["a"].start()
    fleet.wait_for_state("a", "up")
    wait_for(lambda: all_once_at(fleet, copied, home, {0, 1, 2}))
    assert writers(fleet, copied) == [home]
    assert ask(f"{fleet.url}/v1/feedback", pair(user, 3))[0] == 200
    homes = ask(f"{fleet.url}/v1/fleet")[1]["homes"]
    wait_for(lambda: all_once_at(fleet, user, homes[user], set(range(4))))


def test_a_killed_ingress_knows_its_answers_again(fleet: Fleet) -> None:
    _, answer, headers = fleet.chat(fleet.user_at("b"))
    fleet.ingress.kill()
    fleet.ingress.start()
    wait_for(lambda: all_up(fleet))
    told = ask(f"{fleet.url}/v1/feedback", {"completion_id": answer["id"], "signal": "up"})
    assert told[2]["X-Edged-Node"] == headers["X-Edged-Node"]


@pytest.mark.slow
def test_an_ingress_that_starts_while_a_home_is_away_gives_its_users_no_other(fleet: Fleet) -> None:
    user = fleet.user_at("a")
    # Taught at another node than that of the hash, as on a box that had users before there was a fleet.
    assert ask(f"{fleet.node_url('c')}/v1/feedback", pair(user, 1))[0] == 200
    wait_for(lambda: user in ask(f"{fleet.url}/v1/fleet")[1]["homes"])
    wait_for_copy(fleet, user, "c")
    reader = next(name for name in "ab" if lease(fleet, name, user))
    fleet.ingress.kill()
    fleet.nodes["c"].kill()
    assert ask(f"{fleet.node_url(reader)}/v1/feedback", pair(user, 9))[0] == 200
    fleet.ingress.start()
    wait_for(lambda: all_up(fleet, "ab"))
    status, refused, _ = ask(f"{fleet.url}/v1/feedback", pair(user, 2))
    assert (status, refused["error"]["code"]) == (503, "home_away")
    assert fleet.chat(user)[2]["X-Edged-Home-Away"] == "c"
    fleet.nodes["c"].start()
    wait_for(lambda: all_up(fleet))
    assert ask(f"{fleet.url}/v1/feedback", pair(user, 2))[2]["X-Edged-Node"] == "c"
    # What a reader's own socket was told meanwhile is learned at home, too.
    wait_for(lambda: all_once_at(fleet, user, "c", {1, 2, 9}))
    assert ask(f"{fleet.url}/v1/adapters/{user}", method="DELETE")[0] == 200
    assert user not in (fleet.folder / "ingress" / f"fleet-127-0-0-1-{fleet.port}.json").read_text()


def test_a_node_that_takes_no_requests_for_now_has_them_answered_elsewhere(fleet: Fleet) -> None:
    """Before the ingress has heard of it, and so places requests there."""
    for name in "ab":
        assert ask(f"{fleet.node_url(name)}/v1/drain", {})[0] == 200
    assert {fleet.chat()[2]["X-Edged-Node"] for _ in range(3)} == {"c"}
    for name in "ab":
        assert ask(f"{fleet.node_url(name)}/v1/undrain", {})[0] == 200
    wait_for(lambda: all_up(fleet))


def test_a_person_chats_by_command_through_the_ingress(fleet: Fleet) -> None:
    said = edged("chat", "--url", fleet.url, "--user", fleet.user_at("b"), "--max-tokens", "4", input="Hello\n")
    assert said.returncode == 0, said.stderr
    assert "Traceback" not in said.stderr


def test_feedback_and_what_is_held_is_asked_for_by_user(fleet: Fleet) -> None:
    user = fleet.user_at("b")
    assert ask(f"{fleet.url}/v1/feedback", pair(user, 1))[0] == 200
    assert user in str(ask(f"{fleet.url}/v1/feedback?user={user}")[1])
    status, refused, _ = ask(f"{fleet.url}/v1/feedback")
    assert (status, refused["error"]["code"]) == (400, "user_wanted")


def test_a_node_that_is_silent_gets_nothing_and_goes_on_afterwards(fleet: Fleet) -> None:
    user = fleet.user_at("c")
    fleet.nodes["c"].send(signal.SIGSTOP)
    try:
        fleet.wait_for_state("c", "stale")
        with ThreadPoolExecutor(1) as other:
            # Its home alone can take it, and is not gone.
            taken = other.submit(ask, f"{fleet.url}/v1/feedback", pair(user, 1))
            assert all(fleet.chat()[2]["X-Edged-Node"] != "c" for _ in range(9))
            fleet.nodes["c"].send(signal.SIGCONT)
            status, _, headers = taken.result()
    finally:
        fleet.nodes["c"].send(signal.SIGCONT)
    assert (status, headers["X-Edged-Node"]) == (200, "c")
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


@pytest.mark.slow
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
