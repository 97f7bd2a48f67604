"""Starts over the API: added, listed, refused, taken by a user's pairs, kept over backups, removed."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.api.live import LiveDaemon
from tests.api.test_adapters import teach, until


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
