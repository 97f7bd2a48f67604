"""An adapter that several accounts share by name: each teaches it, and none stands in the others' way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.api.accounts import ANN, BOB, Client, open_folder, root_only
from tests.api.jobs.test_accounts import LONG, speaking, until
from tests.api.jobs.test_jobs import SETTINGS, chats, ended, preferences, upload
from tests.api.live import LiveDaemon, running
from tests.models import save_tiny

pytestmark = root_only


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveDaemon]:
    rules = [
        {"peers": [f"user:{ANN}", f"user:{BOB}"], "roles": ["use", "train"], "users": ["@self", "recipes", "soup"]}
    ]
    settings = {**SETTINGS, "api__socket_mode": "0666", "access__rules": json.dumps(rules), "guard__held_out_share": 0}
    with open_folder() as folder:
        save_tiny(folder / "tiny")
        with running(folder / "run", folder / "tiny", **settings) as live:
            yield live


def rate(client: Client, completion: str, signal: str, **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/feedback", {"completion_id": completion, "signal": signal, **more})
    return {"status": answer.status, **answer.json}


def test_who_is_named_for_an_adapter_teaches_it_whoever_was_first(shared: LiveDaemon) -> None:
    ann, bob = Client(ANN, shared.socket), Client(BOB, shared.socket)
    for client, signal in ((ann, "down"), (bob, "up")):
        answer = client.ask(model="tiny:recipes", prompt=f"of {client.name}").json["id"]
        taken = rate(client, answer, signal)
        assert len(taken["pair_ids"]) == 1, taken
    with shared.http() as http:
        stranger = http.post("/v1/completions", json={"model": "tiny:recipes", "prompt": "x", "max_tokens": 4}).json()
        told = http.post("/v1/feedback", json={"completion_id": stranger["id"], "signal": "up"}).json()
    assert told["pair_ids"] == []
    assert "an account that [access] names it for, or who taught the adapter first" in told["reason"]


def test_one_accounts_signals_leave_room_for_anothers_on_the_same_answer(shared: LiveDaemon) -> None:
    ann, bob = Client(ANN, shared.socket), Client(BOB, shared.socket)
    answer = bob.ask(model="tiny:recipes", prompt="whose words").json["id"]
    for number in range(64):
        assert rate(ann, answer, "edit", text=f"poison {number}")["status"] == 200
    refused = rate(ann, answer, "edit", text="one more")
    assert (refused["status"], "64 signals of this account" in refused["error"]["message"]) == (400, True)
    assert len(rate(bob, answer, "edit", text="my own words")["pair_ids"]) == 1


@pytest.mark.slow
def test_a_paused_job_withholds_nothing_and_goes_on_behind_what_was_learned_meanwhile(shared: LiveDaemon) -> None:
    bob = Client(BOB, shared.socket)
    pair = {"user": "soup", "prompt": "q?", "chosen": "good", "rejected": "bad"}
    method: Any = {"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 1, "n_epochs": 2}}}
    with speaking(shared, ANN) as ann:
        jobs = ann.fine_tuning.jobs
        made = jobs.create(model="tiny", training_file=upload(ann, preferences(40)), suffix="soup", method=method)
        until(lambda: any("training loss" in event.message for event in jobs.list_events(made.id).data))
        jobs.pause(made.id)
        taught = bob.post("/v1/feedback", pair).json["id"]
        until(lambda: bob.get(f"/v1/feedback/{taught}").json["pairs"][0]["state"] == "trained")
        jobs.resume(made.id)
        assert ended(ann, made.id).status == "succeeded"
        metrics = [event.data["step"] for event in jobs.list_events(made.id, limit=100).data if event.data]
        assert metrics == list(range(80, 0, -1)), "each step once"


def test_who_speaks_for_an_adapter_may_cancel_the_job_that_makes_it(shared: LiveDaemon) -> None:
    with speaking(shared, ANN) as ann, speaking(shared, BOB) as bob, shared.openai() as admin:
        assert Client("root", shared.socket).call("DELETE", "/v1/adapters/soup").status in (200, 404)
        file_id = upload(ann, preferences(40))
        own = ann.fine_tuning.jobs.create(model="tiny", training_file=file_id, suffix=f"{ANN}-own", method=LONG)
        made = ann.fine_tuning.jobs.create(model="tiny", training_file=file_id, suffix="soup", method=LONG)
        for ask in (bob.fine_tuning.jobs.cancel, bob.fine_tuning.jobs.pause):
            with pytest.raises(openai.NotFoundError):
                ask(own.id)
        with pytest.raises(openai.NotFoundError):
            bob.fine_tuning.jobs.retrieve(made.id)
        assert bob.fine_tuning.jobs.cancel(made.id).status == "cancelled"
        assert admin.fine_tuning.jobs.retrieve(made.id).status == "cancelled"
        assert upload(bob, chats(1))


@pytest.mark.slow
def test_a_job_that_is_paused_and_resumed_amid_anothers_pairs_loses_no_step_and_no_pair(shared: LiveDaemon) -> None:
    bob = Client(BOB, shared.socket)
    assert Client("root", shared.socket).call("DELETE", "/v1/adapters/soup").status in (200, 404)
    method: Any = {"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 1, "n_epochs": 1}}}
    taught = []
    with speaking(shared, ANN) as ann:
        jobs = ann.fine_tuning.jobs
        made = jobs.create(model="tiny", training_file=upload(ann, preferences(160)), suffix="soup", method=method)
        until(lambda: any("training loss" in event.message for event in jobs.list_events(made.id).data))
        for turn in range(4):
            jobs.pause(made.id)
            for number in range(8):
                pair = {
                    "user": "soup",
                    "prompt": f"{turn} {number}? " + "word " * 120,
                    "chosen": "yes",
                    "rejected": "no",
                }
                taught.append(bob.post("/v1/feedback", pair).json["id"])
            jobs.resume(made.id)
        job = ended(ann, made.id, within_s=120)
        assert (job.status, job.error) == ("succeeded", None)
        until(lambda: all(bob.get(f"/v1/feedback/{each}").json["pairs"][0]["state"] != "queued" for each in taught))
    assert "Traceback" not in shared.log
