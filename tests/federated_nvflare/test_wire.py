"""What a box's agent and its jobs write to their connections, before TLS: nothing that was planted on the box."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
from safetensors.numpy import load, load_file

pytest.importorskip("nvflare", reason="edged[federated] is not installed")

from examples.federation.federation import Box, Federation
from tests.federated.planted import Planted, shared_numbers
from tests.federated_nvflare.conftest import SETTINGS
from tests.models import save_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WITHIN_S = 300.0
TAPED = """
import os, sys

if any("nvflare.private" in each for each in sys.orig_argv):
    from nvflare.fuel.f3.sfm.sfm_conn import SfmConnection

    send_frame = SfmConnection.send_frame

    def taped(self, prefix, headers, payload):
        with open(f"{os.environ['TAPES']}/{os.getpid()}", "ab") as tape:
            tape.write((self.headers_to_bytes(headers) or b"") + bytes(payload or b""))
        send_frame(self, prefix, headers, payload)

    SfmConnection.send_frame = taped
"""
"""Python runs it at its start, in the agent and in the processes of its jobs."""


def own_weights(box: Box, user: str) -> bytes:
    """A user's adapter, as a safetensors file."""
    with box.daemon.client() as client:
        exported = io.BytesIO(b"".join(client.download(f"/v1/adapters/{user}/export")[1]))
    with tarfile.open(fileobj=exported) as tar:
        file = tar.extractfile("adapter_model.safetensors")
        assert file is not None
        return file.read()


def test_nothing_planted_on_a_box_is_written_to_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted, hooks, tapes = Planted(1), tmp_path / "hooks", tmp_path / "tapes"
    for folder in (hooks, tapes):
        folder.mkdir()
    (hooks / "sitecustomize.py").write_text(TAPED)
    box = Box(tmp_path / "box", "box", SETTINGS, "--model", str(save_tiny(tmp_path / "model")))
    federation = None
    try:
        box.daemon.wait_until_ready()
        box.teach(planted.users[0], planted.pairs)
        for user in planted.users:
            box.agree(user)
        federation = Federation(tmp_path, {"box": box})
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hooks), os.environ.get("PYTHONPATH", "")]).strip(":"))
        monkeypatch.setenv("TAPES", str(tapes))
        federation.join()
        federation.wait_for(lambda: not box.pairs_waiting(), "learning", WITHIN_S)
        for mode in ("single", "sum"):
            federation.submit(name=mode, demand=1, overcommit=1.0, deadline_s=200, aggregation=mode)
            given = lambda mode=mode: federation.campaigns()[mode]["boxes_with_start"]  # noqa: E731
            federation.wait_for(given, "a round, and its start", WITHIN_S)
        own = own_weights(box, planted.users[0])
        start = load_file(federation.kits / "hub" / "campaigns" / "single" / "start-1" / "adapter_model.safetensors")
        told = box.ask("GET", "/v1/federated")
    finally:
        box.stop()
        if federation is not None:
            federation.hub.stop()
    written = b"".join(path.read_bytes() for path in tapes.iterdir())
    assert len([*tapes.iterdir()]) >= 3, "the agent, and a job for each round at least"
    # The tapes have what leaves: the record that was seen singly. What is searched for is there to be found.
    assert shared_numbers(written, {name: each for name, each in start.items() if ".lora_B" in name})
    assert [each["user"] for each in told["consents"]] == sorted(planted.users)
    assert shared_numbers(own, load(own))
    assert not planted.found_in(written)
    assert not shared_numbers(written, load(own))
