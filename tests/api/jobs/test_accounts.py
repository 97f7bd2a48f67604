"""Fine-tuning jobs of several accounts: whose an adapter is, how much one may keep, and who has the next turn."""

from __future__ import annotations

import getpass
import json
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from edged.settings.access import token_hash
from examples.quickstart.daemon import free_port
from tests.api.accounts import ANN, BOB, Client, account, open_folder, root_only
from tests.api.jobs.test_jobs import GREEDY, SETTINGS, chats, ended, lines, preferences, upload
from tests.api.live import LiveDaemon, running
from tests.models import save_tiny

LONG: Any = {"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 1, "n_epochs": 50}}}
SHORT: Any = {"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 4, "n_epochs": 1}}}


@pytest.fixture(scope="module")
def tiny() -> Iterator[LiveDaemon]:
    limits = {
        "jobs__files_mb": 4,
        "jobs__max_waiting": 3,
        "jobs__turn_s": 0.2,
        "limits__requests_per_minute": 30,
    }
    with open_folder() as folder:
        save_tiny(folder / "tiny")
        with running(folder / "run", folder / "tiny", api__socket_mode="0666", **SETTINGS, **limits) as live:
            yield live


class Transport(httpx2.HTTPTransport):
    """Connections that an account opens."""

    def __init__(self, live: LiveDaemon, name: str) -> None:
        super().__init__(uds=str(live.socket))
        self._name = name

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        with account(self._name):
            return super().handle_request(request)


@contextmanager
def speaking(live: LiveDaemon, name: str) -> Iterator[openai.OpenAI]:
    """The official client as an account has it."""
    http = httpx2.Client(transport=Transport(live, name), timeout=30.0)
    with openai.OpenAI(base_url="http://edged/v1", api_key="none", http_client=http, max_retries=0) as client:
        yield client
        for job in client.fine_tuning.jobs.list():
            if job.status in ("validating_files", "queued", "running"):
                client.fine_tuning.jobs.cancel(job.id)
        for file in client.files.list():
            client.files.delete(file.id)


def until(condition: Callable[[], Any], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@root_only
def test_an_adapter_is_of_the_account_whose_job_made_it(tiny: LiveDaemon) -> None:
    with speaking(tiny, ANN) as ann, speaking(tiny, BOB) as bob:
        made = ann.fine_tuning.jobs.create(model="tiny", training_file=upload(ann, chats(2)))
        model = ended(ann, made.id).fine_tuned_model
        assert model is not None
        assert model.startswith(f"tiny:{ANN}-")
        assert ann.chat.completions.create(model=model, **GREEDY).choices
        assert model in [each.id for each in ann.models.list()]
        with pytest.raises(openai.PermissionDeniedError, match="is not for"):
            bob.chat.completions.create(model=model, **GREEDY)
        assert model not in [each.id for each in bob.models.list()]
        for ask in (bob.fine_tuning.jobs.retrieve, bob.fine_tuning.jobs.cancel, bob.fine_tuning.jobs.pause):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        with pytest.raises(openai.NotFoundError):
            bob.fine_tuning.jobs.create(model="tiny", training_file=made.training_file)
        file_id = upload(bob, chats(1))
        for suffix in (f"{ANN}-x", getpass.getuser(), "www-data"):
            with pytest.raises(openai.PermissionDeniedError, match=f'let it begin with "{BOB}-"'):
                bob.fine_tuning.jobs.create(model="tiny", training_file=file_id, suffix=suffix)
        named = bob.fine_tuning.jobs.create(model="tiny", training_file=file_id, suffix=f"{BOB}-mine")
        assert ended(bob, named.id).fine_tuned_model == f"tiny:{BOB}-mine"
    with tiny.http() as http, speaking(tiny, ANN) as ann:
        assert http.delete(f"/v1/adapters/{model.removeprefix('tiny:')}").status_code == 200
        with pytest.raises(openai.PermissionDeniedError):
            ann.chat.completions.create(model=model, **GREEDY)


@root_only
def test_an_adapter_is_not_of_the_account_that_later_gets_its_name_nor_of_one_that_no_more_speaks_for_it() -> None:
    settings: dict[str, Any] = {**SETTINGS, "api__socket_mode": "0666"}
    rules = [{"peers": [f"user:{BOB}"], "roles": ["use", "train"], "users": ["@self", "recipes"]}]
    with open_folder() as folder:
        save_tiny(folder / "tiny")
        with running(folder / "run", folder / "tiny", **settings, access__rules=json.dumps(rules)) as live:
            with live.openai() as admin, speaking(live, BOB) as bob:
                for client, name in ((admin, "www-data"), (bob, "recipes")):
                    made = client.fine_tuning.jobs.create(
                        model="tiny", training_file=upload(client, chats(1)), suffix=name
                    )
                    assert ended(client, made.id).status == "succeeded"
                    for model in (f"tiny:{name}", f"tiny:{name}@1"):
                        assert client.chat.completions.create(model=model, **GREEDY).choices
            with speaking(live, "www-data") as own:
                assert own.chat.completions.create(model="tiny:www-data", **GREEDY).choices, "its name is its own"
            live.stop()
        with sqlite3.connect(live.data / "edged.db") as database:
            # As if an account "www" had made it, before there was one of its name.
            database.execute("UPDATE jobs SET owner = 'www' WHERE adapter = 'www-data'")
        rules[0] |= {"peers": [f"user:{ANN}"], "users": ["recipes"]}
        with running(folder / "run", folder / "tiny", **settings, access__rules=json.dumps(rules)) as live:
            with speaking(live, ANN) as ann:
                assert ann.chat.completions.create(model="tiny:recipes@1", **GREEDY).choices, "it goes with recipes"
            for account, name in (("www-data", "www-data"), (BOB, "recipes"), (BOB, "recipes@1")):
                with speaking(live, account) as client:
                    for named in ({"model": f"tiny:{name}"}, {"model": "tiny", "user": name}):
                        with pytest.raises(openai.PermissionDeniedError, match="is not for"):
                            client.chat.completions.create(**named, **GREEDY)
                    assert upload(client, chats(1)), "as an account without a user"


@root_only
@pytest.mark.slow
def test_no_person_is_taken_for_an_adapter_of_anothers_job() -> None:
    rules = [{"peers": [f"user:{BOB}"], "roles": ["use", "train"], "users": ["*"]}]
    settings: dict[str, Any] = {**SETTINGS, "api__socket_mode": "0666", "access__rules": json.dumps(rules)}
    name, other = f"{ANN}-smith", f"{ANN}-jones"
    pair = {"prompt": "my secret", "chosen": "a", "rejected": "b"}
    with open_folder() as folder:
        save_tiny(folder / "tiny")
        with running(folder / "run", folder / "tiny", **settings) as live, speaking(live, ANN) as ann:
            app = Client(BOB, live.socket)
            file_id = upload(ann, chats(1))
            made = ann.fine_tuning.jobs.create(model="tiny", training_file=file_id, suffix=name)
            assert ended(ann, made.id).fine_tuned_model == f"tiny:{name}"
            for user in (name, f"{name}@1"):
                for refused in (app.ask(user=user), app.ask(model=f"tiny:{user}")):
                    assert (refused.status, refused.code) == (403, "forbidden_user"), refused.data
            refused = app.post("/v1/feedback", {"user": name, **pair})
            assert (refused.status, refused.code) == (403, "forbidden_user")
            assert f'is the name of an adapter of a fine-tuning job of \\"{ANN}\\"' in refused.data.decode()
            assert app.call("DELETE", f"/v1/adapters/{name}").status == 403
            with live.http() as admin:
                asked = {"prompt": "hello", "max_tokens": 1}
                for person in (name, f"{name}@1"):
                    assert admin.post("/v1/completions", json={**asked, "user": person}).status_code == 403
                    assert admin.post("/v1/completions", json={**asked, "model": f"tiny:{person}"}).status_code == 200
                assert admin.post("/v1/feedback", json={"user": name, **pair}).status_code == 403
                preference = f"/v1/adapters/{name}/preference"
                assert admin.put(preference, json={"text": "formal"}).json()["error"]["code"] == "forbidden_user"
            assert Client(ANN, live.socket).get(f"/v1/feedback?user={name}").data == b""
            assert ann.chat.completions.create(model=f"tiny:{name}", user=name, **GREEDY).choices, "its owner's"
            assert app.ask(user=other).status == 200
            with pytest.raises(openai.ConflictError, match="is a user of whom answers or pairs are stored"):
                ann.fine_tuning.jobs.create(model="tiny", training_file=file_id, suffix=other)
            assert Client(ANN, live.socket).call("DELETE", f"/v1/adapters/{name}").status == 200
            assert app.ask(user=name).status == 200, "it is free again"
            assert app.post("/v1/feedback", {"user": name, **pair}).status == 200
            assert Client(ANN, live.socket).get(f"/v1/feedback?user={name}").status == 403


def test_no_job_makes_an_adapter_under_the_name_of_another_account_whatever_the_rule(tmp_path: Path) -> None:
    token = {"name": "www", "sha256": token_hash("www"), "roles": ["use", "train"], "users": ["www-*"]}
    port = free_port()
    settings: dict[str, Any] = {**SETTINGS, "api__listen": f"127.0.0.1:{port}", "access__tokens": json.dumps([token])}
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="www", max_retries=0)
    with running(tmp_path / "run", save_tiny(tmp_path / "tiny"), **settings), client as www:
        file_id = upload(www, chats(1))
        with pytest.raises(openai.PermissionDeniedError, match="and be no account's name"):
            www.fine_tuning.jobs.create(model="tiny", training_file=file_id, suffix="www-data")
        made = www.fine_tuning.jobs.create(model="tiny", training_file=file_id, suffix="www-dates")
        assert ended(www, made.id).status == "succeeded"


@root_only
@pytest.mark.slow
def test_anothers_turn_comes_within_a_long_validation(tiny: LiveDaemon) -> None:
    how: Any = {"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 1, "n_epochs": 1}}}
    with speaking(tiny, ANN) as ann, speaking(tiny, BOB) as bob:
        files = {"training_file": upload(ann, preferences(1)), "validation_file": upload(ann, preferences(1500))}
        long = ann.fine_tuning.jobs.create(model="tiny", method=how, **files)
        until(lambda: any("training loss" in event.message for event in ann.fine_tuning.jobs.list_events(long.id).data))
        short = bob.fine_tuning.jobs.create(model="tiny", training_file=upload(bob, preferences(4)), method=SHORT)
        assert ended(bob, short.id).status == "succeeded"
        assert ann.fine_tuning.jobs.retrieve(long.id).status == "running"
        assert ended(ann, long.id, 250).status == "succeeded"
        told = [event.message for event in ann.fine_tuning.jobs.list_events(long.id).data]
        assert sum("full validation loss" in message for message in told) == 1


@root_only
def test_an_adapter_that_was_never_taught_is_nobodys_when_its_job_has_ended(tiny: LiveDaemon) -> None:
    with speaking(tiny, ANN) as ann:
        file_id = upload(ann, preferences(20))
        ann.fine_tuning.jobs.create(model="tiny", training_file=file_id, method=LONG)
        name = f"{ANN}-never"
        waiting = ann.fine_tuning.jobs.create(model="tiny", training_file=file_id, suffix=name, method=SHORT)
        assert ann.chat.completions.create(model=f"tiny:{name}", **GREEDY).choices
        assert ann.fine_tuning.jobs.cancel(waiting.id).status == "cancelled"
        with pytest.raises(openai.PermissionDeniedError, match="is not for"):
            ann.chat.completions.create(model=f"tiny:{name}", **GREEDY)


@root_only
def test_adapters_of_jobs_give_no_further_rate_limits(tiny: LiveDaemon) -> None:
    with speaking(tiny, BOB) as bob:
        made = bob.fine_tuning.jobs.create(model="tiny", training_file=upload(bob, chats(2)))
        model = ended(bob, made.id).fine_tuned_model
        for _ in range(3):
            bob.chat.completions.create(model="tiny", **GREEDY)
        told = bob.chat.completions.with_raw_response.create(model=model, **GREEDY)
        assert int(told.headers["x-ratelimit-remaining-requests"]) < 29


@root_only
def test_an_account_keeps_a_bounded_number_of_files_bytes_and_jobs(tiny: LiveDaemon) -> None:
    with speaking(tiny, ANN) as ann, speaking(tiny, BOB) as bob:
        with pytest.raises(openai.BadRequestError, match='"file" is empty'):
            upload(ann, b"")
        with pytest.raises(openai.APIStatusError, match="larger than 4194304 bytes") as refused:
            upload(ann, b"\n" * (5 << 20))
        assert refused.value.status_code == 413
        upload(ann, b"\n" * (3 << 20))
        with pytest.raises(openai.APIStatusError, match="larger than 1048576 bytes"):
            upload(ann, b"\n" * (2 << 20))
        ids = [upload(ann, preferences(20)) for _ in range(5)]
        for _ in range(94):
            upload(ann, b"\n")
        with pytest.raises(openai.PermissionDeniedError, match=r"100 uploaded files .* 100 files"):
            upload(ann, b"\n")
        file_id = upload(bob, preferences(4))
        for number in range(3):
            ann.fine_tuning.jobs.create(model="tiny", training_file=ids[number], method=LONG)
        with pytest.raises(openai.RateLimitError, match=r"3 of your jobs wait or run, and jobs\.max_waiting = 3"):
            ann.fine_tuning.jobs.create(model="tiny", training_file=ids[0], method=LONG)
        made = bob.fine_tuning.jobs.create(model="tiny", training_file=file_id, method=SHORT)
        assert ended(bob, made.id).status == "succeeded", "nobody's jobs block another's"
        states = [job.status for job in ann.fine_tuning.jobs.list()][:3]
        assert "succeeded" not in states
        assert "running" in states


@pytest.mark.slow
def test_a_check_delays_no_cancel_and_no_stop(tmp_path: Path) -> None:
    content = lines([{"prompt": f"word {number}", "completion": "b"} for number in range(400_000)])
    with running(tmp_path / "run", save_tiny(tmp_path / "tiny"), **SETTINGS) as live:
        with live.openai() as client:
            large = client.fine_tuning.jobs.create(model="tiny", training_file=upload(client, content), suffix="large")
            file_id = upload(client, chats(1))
            small = client.fine_tuning.jobs.create(model="tiny", training_file=file_id, suffix="small")
            assert client.fine_tuning.jobs.cancel(small.id).status == "cancelled"
            assert client.fine_tuning.jobs.retrieve(large.id).status == "validating_files"
        assert live.stop() == 0
        with sqlite3.connect(live.data / "edged.db") as database:
            status, examples = database.execute("SELECT status, examples FROM jobs WHERE id = ?", [large.id]).fetchone()
    assert (status, examples) == ("validating_files", 0)


def test_a_client_that_leaves_leaves_no_job_that_nobody_begins(tiny: LiveDaemon) -> None:
    with tiny.openai() as client:
        file_id = upload(client, chats(1))
        for number in range(10):
            body = f'{{"model": "tiny", "training_file": "{file_id}", "suffix": "left-{number}"}}'.encode()
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(str(tiny.socket))
                head = "POST /v1/fine_tuning/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: "
                raw.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
                time.sleep(0.002 * number)
            until(lambda: all(job.finished_at for job in client.fine_tuning.jobs.list()))
        # The last one may have been stored after it was looked for.
        until(lambda: deleted(client, file_id))


def deleted(client: openai.OpenAI, file_id: str) -> bool:
    try:
        return client.files.delete(file_id).deleted
    except openai.ConflictError:
        return False
