"""The box's daemon as the agent reaches it: its offer, a round, a record and its line in the ledger. No NVFlare."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

from edged.client.client import Client, DaemonError, Refused, find_address
from edged.federated.signature import Capacity

ROUNDS = "/v1/federated/rounds"
_POLL_S = 0.2
_ANSWER_S = 60.0


class NoRecord(DaemonError):
    """The error of a round without a record."""


def daemon_client() -> Client:
    """Return a client of the daemon at EDGED_URL, with the token of role `federated` in EDGED_TOKEN."""
    return Client(find_address(token=os.environ.get("EDGED_TOKEN", "")), timeout_s=_ANSWER_S)


def ready_capacity(client: Client) -> Capacity | None:
    """Return the classes of this box, None while a round runs on it.

    Where none would begin now it has no participants: it can still be given a start.
    """
    offer = client.get(ROUNDS)
    if offer["busy"]:
        return None
    participants = offer["participants"] if offer["idle"] else 0
    return Capacity(offer["memory_mb"], float(offer["tokens_per_s"]), participants, offer["model"])


def make_record(client: Client, round_file: bytes, is_aborted: Callable[[], bool]) -> bytes:
    """Have the daemon do a round and return its record; the daemon keeps nothing of it. Raises DaemonError."""
    path = f"{ROUNDS}/{client.call('POST', ROUNDS, round_file, 'application/octet-stream')['id']}"
    try:
        while (told := client.get(path))["state"] == "training":
            if is_aborted():
                raise NoRecord("the hub ended the round")
            time.sleep(_POLL_S)
        if told["state"] != "done":
            raise NoRecord(f"the round failed: {told['reason']}")
        return b"".join(client.download(f"{path}/record")[1])
    finally:
        with contextlib.suppress(DaemonError):
            client.call("DELETE", path)


def make_fitting_record(
    client: Client, round_files: Sequence[bytes], is_aborted: Callable[[], bool]
) -> tuple[bytes, bytes]:
    """Have the daemon do the first of these rounds for which it has somebody, and return it with its record.

    Of a campaign's starts a person takes part in that which fits their pairs best. Raises DaemonError.
    """
    refused: DaemonError = NoRecord("the hub asks for no round")
    for asked in round_files:
        try:
            return asked, make_record(client, asked, is_aborted)
        except Refused as error:
            if error.code != "no_participant":
                raise
            refused = error
    raise refused


def is_in_ledger(client: Client, record: bytes, nonce: str) -> bool:
    """Tell whether the daemon's ledger has a line for these very bytes and this nonce."""
    digest = hashlib.sha256(record).hexdigest()
    lines = client.get(f"/v1/federated/ledger?sha256={digest}")["ledger"]
    return any(line["sha256"] == digest and line["nonce"] == nonce for line in lines)


def start_tar(weights: bytes, config: bytes) -> bytes:
    """Return the tar of a PEFT folder, which the daemon checks as an import."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:") as tar:
        for name, content in (("adapter_config.json", config), ("adapter_model.safetensors", weights)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()


def add_start(client: Client, name: str, folder: bytes) -> dict[str, Any]:
    """Have the daemon take a start: `folder` is a tar of a PEFT folder, which it checks as an import."""
    return client.call("PUT", f"/v1/starts/{quote(name, safe='')}", folder, "application/x-tar")


def drop_orphan(client: Client) -> None:
    """Drop the round of a process that ended."""
    if orphan := client.get(ROUNDS)["busy"]:
        client.call("DELETE", f"{ROUNDS}/{orphan}")


def facts_of(content: bytes) -> dict[str, Any]:
    """Return edged's metadata of a round file or record. Raises ValueError, KeyError, TypeError for anything else."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return dict(json.loads(header["__metadata__"]["edged"]))
