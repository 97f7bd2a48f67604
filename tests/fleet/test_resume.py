"""An answer whose node is killed goes on at another one: the same tokens, none twice and none lost."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cli.conftest import wait_for
from tests.fleet.conftest import Fleet, all_up, ask

LONG = {"messages": [{"role": "user", "content": "Tell me of rice"}], "max_tokens": 300, "ignore_eos": True}
GREEDY: dict[str, Any] = {**LONG, "temperature": 0}
SEEDED: dict[str, Any] = {**LONG, "seed": 7, "temperature": 0.9, "top_p": 0.95}


class Stream:
    """A stream as its client reads it."""

    def __init__(self, url: str, body: dict[str, Any], path: str = "/v1/chat/completions") -> None:
        data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
        self.answer = urllib.request.urlopen(request, timeout=60)
        self.lines: list[bytes] = []

    def read(self, events: int) -> Stream:
        """Read so many lines of it."""
        self.lines += [self.answer.readline() for _ in range(2 * events)]
        return self

    def end(self) -> list[dict[str, Any]]:
        """Return all of its chunks."""
        self.lines += self.answer.read().splitlines(keepends=True)
        assert b"".join(self.lines).endswith(b"\n\ndata: [DONE]\n\n"), self.lines[-3:]
        assert all(line == b"\n" or line.startswith(b"data: ") for line in self.lines)
        return [json.loads(line[6:]) for line in self.lines if line.startswith(b"data: {")]


def answer_in(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream."""
    texts: dict[int, str] = {}
    reasons: dict[int, list[str]] = {}
    logprobs: list[Any] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            index, said = choice["index"], choice.get("delta", choice)
            texts[index] = texts.get(index, "") + said.get("content", said.get("text", ""))
            logprobs += (choice["logprobs"] or {}).get("content", [])
            reasons.setdefault(index, []).extend([choice["finish_reason"]] if choice["finish_reason"] else [])
    usage = {key: value for key, value in chunks[-1]["usage"].items() if key.endswith("_tokens")}
    roles = sum("role" in choice.get("delta", {}) for chunk in chunks for choice in chunk["choices"])
    told = {"roles": roles, "fingerprint": chunks[-1]["system_fingerprint"]}
    tokens = [entry["token"] for entry in logprobs]
    return {"texts": texts, "reasons": reasons, "usage": usage, "tokens": tokens, **told}


@pytest.fixture
def alone(fleet: Fleet) -> Iterator[Fleet]:
    """The fleet with node a as the only one that takes requests."""
    for name in "bc":
        assert ask(f"{fleet.node_url(name)}/v1/drain", {})[0] == 200
        fleet.wait_for_state(name, "draining")
    yield fleet
    for name in "bc":
        ask(f"{fleet.node_url(name)}/v1/undrain", {})


def stop_a(fleet: Fleet) -> None:
    """Halt node a in the middle of what it does, and let the others take requests."""
    fleet.nodes["a"].send(signal.SIGSTOP)
    for name in "bc":
        ask(f"{fleet.node_url(name)}/v1/undrain", {})
        fleet.wait_for_state(name, "up")


def placed(fleet: Fleet) -> dict[str, int]:
    """How many answers each node has given to the end."""
    found: dict[str, int] = ask(f"{fleet.url}/v1/fleet")[1]["placed"]
    return found


@pytest.mark.slow
def test_answers_go_on_where_their_node_was_killed(alone: Fleet) -> None:
    stop = answer_in(Stream(alone.node_url("c"), GREEDY).end())["texts"][0][200:204]
    new, other = alone.user_at("a"), alone.user_at("a")
    asked: list[dict[str, Any]] = [
        GREEDY,
        {**SEEDED, "n": 2, "user": new},
        {**GREEDY, "stop": [stop], "user": other},
        {**SEEDED, "logprobs": True, "top_logprobs": 2, "stop": ["\u0001 is nowhere", stop]},
        {**SEEDED, "frequency_penalty": 0.5, "min_tokens": 200},
        {**GREEDY, "qoe": {"deliver": "smooth", "words_per_minute": 3000}},
    ]
    before, most = placed(alone), {**SEEDED, "max_tokens": 400}
    begun = [Stream(alone.url, body).read(9) for body in asked]
    with ThreadPoolExecutor(1) as threads:
        whole = threads.submit(ask, f"{alone.url}/v1/chat/completions", most)
        wait_for(lambda: next(item["requests"] for item in ask(f"{alone.url}/v1/fleet")[1]["nodes"]) == 7)
        stop_a(alone)
        alone.nodes["a"].kill()
        ended = [stream.end() for stream in begun]
        status, answer, headers = whole.result()
    after = placed(alone)
    assert after["a"] == before["a"], "answers were complete before the kill"
    assert sum(after.values()) == sum(before.values()) + len(asked) + 1

    assert (status, headers["X-Edged-Node"] in "bc") == (200, True)
    assert answer["choices"] == ask(f"{alone.node_url('c')}/v1/chat/completions", most)[1]["choices"]
    for body, chunks in zip(asked, ended, strict=True):
        expected = answer_in(Stream(alone.node_url("c"), {**body, "user": None}).end())
        assert answer_in(chunks) == expected
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
        assert chunks[0]["id"].startswith("chatcmpl-a.")
    told = {"completion_id": ended[1][0]["id"], "signal": "chosen", "choice": 1}
    status, taken, headers = ask(f"{alone.url}/v1/feedback", told)
    assert (status, headers["X-Edged-Node"] in "bc", len(taken["pair_ids"])) == (200, True, 1)
    alone.nodes["a"].start()
    alone.wait_for_state("a", "up")
    # An ingress that has started since finds it, too, although the id names another node.
    alone.ingress.kill()
    alone.ingress.start()
    wait_for(lambda: all_up(alone))
    assert ask(f"{alone.url}/v1/feedback", told | {"signal": "up"})[2]["X-Edged-Node"] == headers["X-Edged-Node"]
    # And a user who is forgotten is forgotten there, too.
    ask(f"{alone.url}/v1/adapters/{other}", method="DELETE")
    assert ask(f"{alone.url}/v1/feedback", {"completion_id": ended[2][0]["id"], "signal": "up"})[0] == 404


@pytest.mark.slow
def test_an_answer_that_its_stopping_node_gives_up_goes_on(alone: Fleet) -> None:
    before, long = placed(alone), {**GREEDY, "max_tokens": 400}
    begun = [Stream(alone.url, long).read(2) for _ in range(4)]
    stop_a(alone)
    for number in (signal.SIGTERM, signal.SIGCONT):
        alone.nodes["a"].send(number)
    expected = answer_in(Stream(alone.node_url("c"), long).end())
    assert [answer_in(stream.end()) for stream in begun] == 4 * [expected]
    assert placed(alone)["a"] == before["a"], "answers were complete before the stop"
    assert alone.nodes["a"].process is not None
    alone.nodes["a"].process.wait(30)
    alone.nodes["a"].start()
    alone.wait_for_state("a", "up")


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_client_of_the_ingress_resumes_nothing(fleet: Fleet, mark: str) -> None:
    body = json.dumps({**GREEDY, "resume": {"seed": 1}})
    request = urllib.request.Request(f"{fleet.url}/v1/chat/completions", (mark + body).encode())
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=20)
    assert refused.value.code == 403
    assert json.loads(refused.value.read())["error"]["param"] == "resume"


def test_an_ingress_that_stops_ends_its_streams_first(fleet: Fleet) -> None:
    events = urllib.request.urlopen(f"{fleet.url}/v1/events?events=status", timeout=20)
    assert events.readline()
    stream = Stream(fleet.url, GREEDY).read(9)
    fleet.ingress.send(signal.SIGTERM)
    assert answer_in(stream.end()) == answer_in(Stream(fleet.node_url("c"), GREEDY).end())
    with contextlib.suppress(http.client.IncompleteRead):
        events.read()
    assert fleet.ingress.process is not None
    assert fleet.ingress.process.wait(20) == 0
    fleet.ingress.start()
    wait_for(lambda: all_up(fleet))
