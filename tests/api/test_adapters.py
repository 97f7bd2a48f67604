"""The adapters' routes and the status."""

from __future__ import annotations

import io
import tarfile
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.api.live import LiveDaemon


def teach(http: httpx2.Client, user: str, pairs: int = 5) -> dict[str, Any]:
    """Give a user pairs and wait until a version learned from them is on disk."""
    for i in range(pairs):
        body = {"user": user, "prompt": f"{user} {i}: ", "chosen": f"yes {i}", "rejected": f"never {i}"}
        assert http.post("/v1/feedback", json=body).status_code == 200
    return until(http, f"/v1/adapters/{user}", lambda body: body.get("pairs_queued") == 0 and saved(body))


def saved(body: dict[str, Any]) -> bool:
    return any(version["on_disk"] and version["version"] == body["version"] for version in body["versions"])


def until(http: httpx2.Client, path: str, happened: Any, within_s: float = 20.0) -> dict[str, Any]:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        response = http.get(path)
        if response.status_code == 200 and happened(response.json()):
            return response.json()
        time.sleep(0.05)
    raise AssertionError(f"{path} never came to it: {http.get(path).text}")


def test_an_adapters_life_versions_rollback_export_forget(http: httpx2.Client, daemon: LiveDaemon) -> None:
    adapter = teach(http, "olga")
    assert adapter["pairs_trained"] + adapter["pairs_held_out"] == 5
    assert len(adapter["series"]) >= adapter["pairs_trained"]
    assert adapter["win_rate"] is not None
    assert [item["adapter"] for item in http.get("/v1/adapters").json()["adapters"]].count("olga") == 1
    assert len(http.get("/v1/adapters/olga?limit=1").json()["series"]) == 1

    path = Path(next(item["path"] for item in adapter["versions"] if item["on_disk"]))
    exported = http.get("/v1/adapters/olga/export")
    assert exported.headers["X-Edged-Version"] == str(adapter["version"])
    with tarfile.open(fileobj=io.BytesIO(exported.content), mode="r:") as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert files == {name: (path / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}

    back = http.post("/v1/adapters/olga/rollback", json={"version": 1})
    assert back.status_code == 200, back.text
    assert back.json() == {"adapter": "olga", "version": adapter["version"] + 1, "restored": 1}
    assert http.get("/v1/adapters/olga").json()["version"] == adapter["version"] + 1

    assert http.delete("/v1/adapters/olga").json()["rows_deleted"]["pairs"] == 5
    assert not path.exists()
    assert http.get("/v1/adapters/olga").status_code == 404
    assert http.get("/v1/feedback?user=olga").text == ""


def test_rollback_refuses_versions_that_are_not_there(http: httpx2.Client) -> None:
    teach(http, "pia")
    deadline = time.monotonic() + 30
    while not (known := [v["version"] for v in http.get("/v1/adapters/pia").json()["versions"] if v["on_disk"]]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    error = http.post("/v1/adapters/pia/rollback", json={"version": 999}).json()["error"]
    assert error["code"] == "unknown_version"
    assert '"pia" has no version 999 on disk: on disk ' in error["message"]
    assert str(known[0]) in error["message"].partition(": on disk ")[2]
    assert "`edged adapters show pia`" in error["message"]
    for body in ({"version": -1}, {"version": "1"}, {}, {"version": 1, "more": 2}):
        assert http.post("/v1/adapters/pia/rollback", json=body).status_code == 400


@pytest.mark.parametrize("name", ["nobody-ever", "..%2F..%2Fetc", "a%20b", "%00"])
def test_unknown_adapters_are_not_found(http: httpx2.Client, name: str) -> None:
    answers = [
        http.get(f"/v1/adapters/{name}"),
        http.get(f"/v1/adapters/{name}/export"),
        http.delete(f"/v1/adapters/{name}"),
        http.post(f"/v1/adapters/{name}/rollback", json={"version": 1}),
    ]
    assert [answer.json()["error"]["code"] for answer in answers] == ["unknown_adapter"] * 4


@pytest.mark.parametrize("limit", ["0", "-1", "x", "9999999999", "²"])
def test_a_senseless_limit_is_refused(http: httpx2.Client, limit: str) -> None:
    response = http.get("/v1/adapters/nobody-ever", params={"limit": limit})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "limit"


def test_the_status_tells_queues_bins_pages_and_device(http: httpx2.Client) -> None:
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 8, "ignore_eos": True})
    status = http.get("/v1/status").json()
    assert status["phase"] == "ready"
    assert status["model"]["name"] == "tiny"
    assert status["uptime_s"] > 0
    assert set(status["queue"]) == {"waiting", "prefill", "decode", "finetune"}
    assert status["totals"]["output_tokens"] >= 8
    assert 0 < len(status["bins"]) <= 32
    assert set(status["bins"][0]) >= {"prefill_tokens", "decode_tokens", "finetune_tokens", "latency_ms"}
    assert status["pages"]["free"] + status["pages"]["cached"] <= status["pages"]["total"]
    assert status["device"]["memory_available_bytes"] <= status["device"]["memory_total_bytes"]
    assert status["device"]["process_rss_bytes"] > 1 << 20


def test_the_probes_answer(http: httpx2.Client) -> None:
    assert http.get("/healthz").json() == {"status": "ok", "phase": "ready"}
    assert http.get("/readyz").json() == {"status": "ready", "degraded": []}
