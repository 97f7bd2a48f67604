"""Practice through a daemon: what is learned of an adapter's own answers, of edits, and of a written preference."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from edged.align.taste.edits import Operator
from edged.align.taste.model import Taste
from edged.api.practice import Practised
from tests.api.live import LiveDaemon, running
from tests.models import byte_tokenizer, save_tiny

ASKED = [{"role": "user", "content": "How are you?"}]


@pytest.fixture(scope="module")
def practising(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    folder = tmp_path_factory.mktemp("practice")
    save_tiny(folder / "model", "llama")
    byte_tokenizer().save_pretrained(folder / "model")
    with running(folder / "daemon", folder / "model", align__practice="true", guard__held_out_share="0.0") as daemon:
        yield daemon


def until(found: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (what := found()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.1)
    return what


def adapter(http: httpx2.Client, user: str) -> dict[str, Any]:
    answer = http.get(f"/v1/adapters/{user}")
    return answer.json() if answer.is_success else {"versions": [], "beliefs": []}


def reasons(http: httpx2.Client, user: str) -> list[str]:
    return [version["reason"] for version in adapter(http, user)["versions"]]


def teach(http: httpx2.Client, user: str, number: int) -> None:
    body = {"user": user, "prompt": f"How {number}?", "chosen": f"e fine {number}!", "rejected": f"x so so {number}."}
    assert http.post("/v1/feedback", json=body).status_code == 200


def test_an_adapter_practises_once_its_user_s_taste_is_known_and_tells_what_is_believed(practising: LiveDaemon) -> None:
    with practising.http() as http:
        for number in range(12):
            teach(http, "ann", number)
        until(lambda: reasons(http, "ann").count("practised") >= 2)
        found = adapter(http, "ann")
        practised = [version for version in found["versions"] if version["reason"] == "practised"]
        assert any(version["own_kl_nats"] is not None for version in practised)
        assert found["pairs_seen"] == 12, "practice is in no count of pairs"
        assert {"likes: " * each["likes"] + each["text"] for each in found["beliefs"]}
        assert set(found["liked"]) == {"served", "adapter", "base"}
        told = json.dumps(http.get("/v1/status").json()) + http.get("/metrics").text + practising.log
        assert "so so" not in told, "words of signals are for those who may teach"


def test_a_line_that_is_struck_is_believed_no_more(practising: LiveDaemon) -> None:
    with practising.http() as http:
        for number in range(12):
            teach(http, "sue", number)
        beliefs = until(lambda: adapter(http, "sue")["beliefs"])
        answer = http.post("/v1/adapters/sue/strike", json={"key": beliefs[0]["key"]})
        assert answer.json()["struck"] == [beliefs[0]["key"]]
        until(lambda: beliefs[0]["key"] not in [each["key"] for each in adapter(http, "sue")["beliefs"]])
        assert adapter(http, "sue")["struck"] == [beliefs[0]["key"]]


@pytest.mark.slow
def test_edits_that_agree_are_imitated_where_answers_are_served_as_they_are(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    settings = {"align__practice": "true", "guard__held_out_share": "0.0", "serving__best_of": "off"}
    with running(tmp_path / "daemon", tmp_path / "model", **settings) as daemon, daemon.http() as http:
        for _ in range(5):
            body = {"messages": ASKED, "user": "eve", "max_tokens": 24, "ignore_eos": True}
            answer = http.post("/v1/chat/completions", json=body).json()
            text = answer["choices"][0]["message"]["content"]
            edit = {"completion_id": answer["id"], "signal": "edit", "text": f"{text} Yours, Eve"}
            assert http.post("/v1/feedback", json=edit).status_code == 200
        until(lambda: reasons(http, "eve").count("practised") >= 2)


def test_practice_of_edits_goes_on_while_what_is_imitated_becomes_likelier() -> None:
    operator = Operator(ends=" Bye.")
    practised = Practised(Taste.fit([]), operator, [], picks=False)
    for number in range(100):
        practised.imitation_nll = 3.0 - 0.02 * number
        assert not practised.shows(operator)
    for _ in range(40):
        practised.shows(operator)
    assert practised.ended


def test_practice_is_disliked_once_its_user_likes_the_base_s_answers_better() -> None:
    practised = Practised(Taste.fit([]), None, [], picks=True)
    for gain in (0.3, 0.3, 0.3, 0.4, 0.6, 0.7, 0.4):
        practised.note(gain)
        assert not practised.disliked, "it was never better"
    for gain in (0.3, 0.3):
        practised.note(gain)
    assert practised.disliked


def test_a_preference_is_learned_by_what_is_gone_of_the_base_s_distance_to_it() -> None:
    practised = Practised(Taste.fit([]), None, [], picks=False, preference="short")
    for number in range(40):
        chance = 0.03 * (-1) ** number
        practised.distances.append((chance + (0.02 if number < 24 else 0.002), chance + 0.02))
        assert practised.distilled < 0.8 or number >= 37
    assert practised.distilled == pytest.approx(0.9)
    assert not practised.without_effect


def test_a_preference_that_hardly_moves_the_base_is_not_learned_and_known_to_have_no_effect() -> None:
    practised = Practised(Taste.fit([]), None, [], picks=False, preference="xyz")
    for number in range(40):
        practised.distances.append((0.01 * (-1) ** number, 0.01 * (-1) ** number + 0.001))
    assert practised.without_effect
    assert practised.distilled == 0.0


def test_a_preference_is_distilled_and_undone_when_it_is_changed(practising: LiveDaemon) -> None:
    with practising.http() as http:
        for number in range(4):
            asked = [{"role": "user", "content": f"How are you, {number}?"}]
            http.post("/v1/chat/completions", json={"messages": asked, "user": "pia", "max_tokens": 12})
        path = "/v1/adapters/pia/preference"
        assert http.put(path, json={"text": "formal"}).status_code == 200
        until(lambda: http.get(path).json()["distilled"] > 0)
        assert "practised" in reasons(http, "pia")
        assert http.put(path, json={"text": "casual"}).json()["distilled"] == 0
        assert "rollback to 0" in reasons(http, "pia")


def test_a_user_who_is_forgotten_in_the_middle_practises_no_more(practising: LiveDaemon) -> None:
    with practising.http() as http:
        for number in range(12):
            teach(http, "tom", number)
        until(lambda: "practised" in reasons(http, "tom"))
        assert http.delete("/v1/adapters/tom").status_code == 200
        time.sleep(1.0)
        assert http.get("/v1/adapters/tom").status_code == 404
        assert "Traceback" not in practising.log


def test_a_verdict_is_told_where_one_of_several_answers_is_picked(http: httpx2.Client) -> None:
    def pick(number: int) -> None:
        body = {
            "messages": [{"role": "user", "content": f"How is {number}?"}],
            "user": "pippa",
            "n": 4,
            "max_tokens": 8,
        }
        found = http.post("/v1/chat/completions", json=body | {"ignore_eos": True}).json()
        signal = {"completion_id": found["id"], "signal": "chosen", "choice": number % 4}
        assert http.post("/v1/feedback", json=signal).status_code == 200

    pick(0)
    until(lambda: (adapter(http, "pippa").get("version") or 0) > 0)
    for number in range(1, 9):
        pick(number)
    until(lambda: (adapter(http, "pippa").get("liked") or {}).get("adapter"))
    assert adapter(http, "pippa")["liked"]["adapter"]["answers"] == 8, "the first of each: the base may give the last"
    assert adapter(http, "pippa")["liked"]["served"] is None, "nothing was chosen by the daemon"
    assert "of the last 8 answers are liked" in adapter(http, "pippa")["verdict"]
