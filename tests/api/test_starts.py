"""Starts over the API: added, listed, refused, taken by a user's pairs, kept over backups, removed."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from edged.align import metrics
from edged.align.taste.model import Taste
from edged.api.event_router import EventRouter
from edged.api.practice import PracticePrompt, Practised
from edged.api.services import Lifecycle
from edged.assembly import assemble
from edged.reload import ReloadResult
from edged.settings.load import load_settings
from edged.store import Store
from tests.api.live import LiveDaemon, running
from tests.api.test_adapters import teach, until
from tests.models import save_tiny


def archive(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return packed.getvalue()


@pytest.fixture
def files(http: httpx2.Client) -> dict[str, bytes]:
    """The files of an adapter that learned something here."""
    if http.get("/v1/adapters/coach").status_code == 404:
        teach(http, "coach")
    exported = http.get("/v1/adapters/coach/export").content
    with tarfile.open(fileobj=io.BytesIO(exported), mode="r:") as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def put(http: httpx2.Client, name: str, content: bytes) -> httpx2.Response:
    return http.put(f"/v1/starts/{name}", content=content, headers={"Content-Type": "application/x-tar"})


def test_a_start_is_added_measured_listed_and_removed(http: httpx2.Client, files: dict[str, bytes]) -> None:
    added = put(http, "kind", archive(files))
    assert added.status_code == 200, added.text
    assert added.json()["scale"] is None
    listed = until(http, "/v1/starts", lambda body: body["starts"][0]["scale"] is not None, 60.0)
    assert [(item["name"], item["default"]) for item in listed["starts"]] == [("kind", False)]
    assert listed["max"] == 8
    teach(http, "tess")
    scores = until(http, "/v1/adapters/tess/starts", lambda body: body["scores"] or body["start"], 60.0)
    assert scores["scores"][0]["start"] == "kind"
    assert http.get("/v1/adapters").text.count("@starts") == 0
    assert http.delete("/v1/starts/kind").json() == {"name": "kind", "removed": True}
    assert http.get("/v1/starts").json()["starts"] == []
    gone = http.delete("/v1/starts/kind")
    assert gone.status_code == 404
    assert gone.json()["error"]["message"] == 'there is no start "kind": known are none'


def changed(files: dict[str, bytes], **config: Any) -> dict[str, bytes]:
    said = json.loads(files["adapter_config.json"])
    return {**files, "adapter_config.json": json.dumps({**said, **config}).encode()}


def test_what_is_no_start_is_refused_with_the_way_out(http: httpx2.Client, files: dict[str, bytes]) -> None:
    config = {"adapter_config.json": files["adapter_config.json"]}
    for name, sent, told in (
        ("a b", files, 'use up to 32 letters, digits and "-"'),
        ("kind", {**config, "adapter_model.bin": b"\x80"}, "is a pickle"),
        ("kind", config, "there is no adapter_model.safetensors"),
        ("kind", changed(files, lora_alpha=1.0), "train a LoRA of align.rank = "),
        ("kind", changed(files, r=3), "says 3"),
    ):
        refused = put(http, name, archive(sent))
        assert refused.status_code == 400, refused.text
        assert told in refused.json()["error"]["message"]
    assert http.get("/v1/starts").json()["starts"] == []


def test_a_ninth_start_is_refused_and_a_backup_has_the_others(
    http: httpx2.Client, daemon: LiveDaemon, files: dict[str, bytes]
) -> None:
    for number in range(8):
        assert put(http, f"kind-{number}", archive(files)).status_code == 200
    ninth = put(http, "kind-8", archive(files))
    assert ninth.status_code == 409
    assert "remove one with `edged starts remove NAME`, or raise starts.max" in ninth.json()["error"]["message"]
    assert put(http, "kind-0", archive(files)).status_code == 200, "one of its name is replaced"
    with tarfile.open(fileobj=io.BytesIO(http.get("/v1/backup").content)) as tar:
        kept = {Path(name).parts[2] for name in tar.getnames() if name.startswith("starts/")}
    assert kept == {f"kind-{number}" for number in range(8)}
    for number in range(8):
        http.delete(f"/v1/starts/kind-{number}")


def test_users_without_pairs_begin_with_the_default_and_may_leave_it(
    files: dict[str, bytes], daemon: LiveDaemon, tmp_path: Path
) -> None:
    with running(tmp_path / "daemon", daemon.model, starts__default="kind") as own, own.http() as http:
        ask = {"prompt": "hi", "max_tokens": 2}
        assert http.post("/v1/completions", json={**ask, "user": "early"}).status_code == 200
        assert http.get("/v1/adapters/early").status_code == 404, "there is no such start yet"
        assert put(http, "kind", archive(files)).status_code == 200
        listed = until(http, "/v1/starts", lambda body: body["starts"][0]["scale"] is not None, 60.0)
        assert listed["starts"][0]["default"]
        assert http.post("/v1/completions", json={**ask, "user": "ann"}).status_code == 200
        found = http.get("/v1/adapters/ann").json()
        assert [(version["version"], version["reason"]) for version in found["versions"]] == [(1, "start kind")]
        assert http.get("/v1/adapters/ann/starts").json()["start"] == "kind"
        used = http.delete("/v1/starts/kind")
        assert used.status_code == 409
        assert used.json()["error"]["code"] == "start_in_use"
        assert http.post("/v1/adapters/ann/rollback", json={"version": 0}).status_code == 200
        assert http.post("/v1/completions", json={**ask, "user": "ann"}).status_code == 200
        reasons = [version["reason"] for version in http.get("/v1/adapters/ann").json()["versions"]]
        assert sorted(reasons) == ["rollback to 0", "start kind"], "who left it is left alone"


async def test_a_start_whose_answers_are_liked_less_than_the_base_s_over_three_rounds_is_taken_back(
    tmp_path: Path,
) -> None:
    save_tiny(tmp_path / "model", "llama")
    overrides = {"model.path": str(tmp_path / "model"), "model.dtype": "float32", "cache.memory_mb": 4}
    settings, store = load_settings(environ={}, overrides=overrides), Store(tmp_path / "edged.db")
    loop = asyncio.get_running_loop()

    async def reload() -> ReloadResult:
        raise AssertionError

    services, journal = await asyncio.to_thread(
        lambda: assemble(settings, store, tmp_path, EventRouter(loop), Lifecycle(), reload)
    )
    engine, practice = services.engine, services.practice
    engine.start()
    try:
        weights = engine.trainer.adapter_cache.build("coach").tensors()
        start = replace(engine.start_files.add("kind", weights), scale=1.0)
        await asyncio.wrap_future(engine.add_start(engine.start_files.remember(start)))

        def reasons(user: str) -> list[str]:
            return [row["reason"] for row in store.read(lambda db: metrics.versions(db, user, 10))]

        async def come(found: Callable[[], object]) -> None:
            async with asyncio.timeout(60):
                while not found():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        async def judged(user: str, *gains: float) -> list[str]:
            """The reasons of a user's versions who took the start, and whose answers were liked so much since."""
            asked = PracticePrompt("How are you?", tuple(services.tokenizer.encode_prompt("How are you?")))
            practised = practice.users[user] = Practised(Taste.fit([]), None, [asked], picks=True)
            await asyncio.wrap_future(engine.take_start(user, start))
            await come(lambda: practised.started and reasons(user))
            for gain in gains:
                practised.note(gain)
            # This round's answers are liked as the base's: a taste that knows nothing says 0.5.
            await come(lambda: engine.finetuning.open_to_practice(user))
            assert await practice._round(user, practised)
            return reasons(user)

        await judged("ann", 0.4, 0.4, 0.4)
        await come(lambda: sorted(reasons("ann")) == ["rollback to 0", "start kind"])
        assert engine.choice("ann").result().start == ""
        assert await judged("ben", 0.5, 0.4, 0.5) == ["start kind"]
        assert await judged("cleo", 0.6, 0.6, 0.6, 0.3, 0.3) == ["start kind"], "it was liked once"
    finally:
        await asyncio.to_thread(engine.stop, 5.0)
        services.feedback_intake.close()
        services.tastes.close()
        journal.flush()
        store.close()
