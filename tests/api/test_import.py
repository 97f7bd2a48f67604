"""An adapter from elsewhere is served when it fits, else refused with the reason; no pickle is opened."""

from __future__ import annotations

import io
import json
import pickle
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load, load_file, save_file

from tests.api.accounts import ANN, Client, open_folder, root_only
from tests.api.live import LiveDaemon, running
from tests.api.test_quarantine import until
from tests.models import save_tiny, tiny_model

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveDaemon]:
    root = tmp_path_factory.mktemp("import")
    model = save_tiny(root / "tiny", max_position_embeddings=512)
    with running(
        root / "run", model, align__rank=4, align__alpha=8.0, store__save_every_s=0.1, limits__patience=0.1
    ) as live:
        yield live


def peft_adapter(folder: Path, rank: int = 4, alpha: float = 8.0, **more: Any) -> Path:
    """What peft's own save_pretrained writes, with weights that change the answers."""
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM", **more)
    model = get_peft_model(tiny_model("llama"), config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(folder)
    return folder


def packed(*members: tuple[str, bytes], kind: bytes = tarfile.REGTYPE) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.type = (len(data), kind) if kind == tarfile.REGTYPE else (0, kind)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def archive(folder: Path) -> bytes:
    return packed(*((path.name, path.read_bytes()) for path in sorted(folder.iterdir())))


def send(http: httpx2.Client, data: bytes, user: str = "ann") -> httpx2.Response:
    return http.post(f"/v1/adapters/{user}/import", content=data, headers={"Content-Type": "application/x-tar"})


def refusal(http: httpx2.Client, data: bytes) -> str:
    answer = send(http, data, "eve")
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "import_refused"
    return str(answer.json()["error"]["message"])


def answer_of(http: httpx2.Client, user: str | None) -> str:
    body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "user": user}
    return str(http.post("/v1/completions", json=body).json()["choices"][0]["text"])


def test_an_imported_adapter_answers_as_a_new_version_and_can_be_rolled_back(
    daemon: LiveDaemon, tmp_path: Path
) -> None:
    folder = peft_adapter(tmp_path / "mine")
    with daemon.http() as http:
        before = answer_of(http, "ann")
        assert send(http, archive(folder)).json() == {"adapter": "ann", "version": 1, "reason": "imported"}
        assert answer_of(http, "ann") != before
        until(lambda: http.get("/v1/adapters/ann/export").status_code == 200)
        exported = http.get("/v1/adapters/ann/export").content
        with tarfile.open(fileobj=io.BytesIO(exported)) as tar:
            kept = load(tar.extractfile(WEIGHTS).read())  # type: ignore[union-attr]
        mine = load_file(folder / WEIGHTS)
        assert all(torch.equal(kept[name], tensor) for name, tensor in mine.items())
        assert send(http, exported, "bob").json()["version"] == 1
        assert answer_of(http, "bob") == answer_of(http, "ann") != before
        assert http.get("/v1/adapters/ann").json()["versions"][0]["reason"] == "imported"
        http.post("/v1/adapters/ann/rollback", json={"version": 0})
        assert answer_of(http, "ann") == before
        http.post("/v1/adapters/ann/rollback", json={"version": 1})
        assert answer_of(http, "ann") != before


def other_form(kind: str, folder: Path) -> Path:
    """An IA3 or DoRA adapter by peft, of weights that change the answers."""
    linears, generator = ["k_proj", "v_proj", "down_proj"], torch.Generator().manual_seed(2)
    ia3 = IA3Config(target_modules=linears, feedforward_modules=["down_proj"])
    config = ia3 if kind == "ia3" else LoraConfig(r=2, target_modules=linears, use_dora=True)
    model = get_peft_model(tiny_model("llama"), config)
    for name, parameter in model.named_parameters():
        if "ia3_l" in name or "lora_magnitude" in name:
            parameter.data *= torch.empty(parameter.shape).uniform_(0.2, 1.8, generator=generator)
        elif "lora_B" in name:
            parameter.data.normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(folder)
    return folder


def export_of(http: httpx2.Client, user: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights and configuration of a user's newest version."""
    with tarfile.open(fileobj=io.BytesIO(http.get(f"/v1/adapters/{user}/export").content)) as tar:
        weights = load(tar.extractfile(WEIGHTS).read())  # type: ignore[union-attr]
        return weights, json.loads(tar.extractfile("adapter_config.json").read())  # type: ignore[union-attr]


def learn(http: httpx2.Client, user: str, version: int) -> None:
    """Teach a user's adapter a pair, of which this version is made, and wait until it is on disk."""
    pair = {"prompt": "Once upon a time", "chosen": " there was a fox", "rejected": " nothing"}
    assert http.post("/v1/feedback", json={"user": user, **pair}).status_code == 200
    until(lambda: http.get(f"/v1/adapters/{user}").json()["version"] == version)
    until(lambda: http.get(f"/v1/adapters/{user}/export").headers.get("X-Edged-Version") == str(version))


@pytest.mark.parametrize("kind", ["ia3", "dora"])
def test_an_adapter_of_another_form_is_served_learns_and_is_exported_as_one(
    kind: str, daemon: LiveDaemon, tmp_path: Path
) -> None:
    mine = load_file(other_form(kind, tmp_path) / WEIGHTS)
    with daemon.http() as http:
        before = answer_of(http, kind)
        assert send(http, archive(tmp_path), kind).json()["version"] == 1
        assert answer_of(http, kind) != before
        learn(http, kind, 2)
        learned, config = export_of(http, kind)
    assert (config["peft_type"], bool(config.get("use_dora"))) == (("IA3", False) if kind == "ia3" else ("LORA", True))
    assert config["target_modules"] == ["down_proj", "k_proj", "v_proj"]
    assert learned.keys() == mine.keys()
    assert not any(torch.equal(learned[name], tensor) for name, tensor in mine.items())


def test_a_dora_adapter_survives_rollback_and_power_cut_as_one(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny", max_position_embeddings=512)
    mine = load_file(other_form("dora", tmp_path / "dora") / WEIGHTS)
    how = {"align__rank": 4, "align__alpha": 8.0, "store__save_every_s": 0.1}
    with running(tmp_path / "run", model, **how) as live, live.http() as http:
        assert send(http, archive(tmp_path / "dora")).json()["version"] == 1
        imported = answer_of(http, "ann")
        learn(http, "ann", 2)
        learned = answer_of(http, "ann")
        live.process.kill()
        live.process.join()
    with running(tmp_path / "run", model, **how) as live, live.http() as http:
        assert answer_of(http, "ann") == learned
        http.post("/v1/adapters/ann/rollback", json={"version": 1})
        assert answer_of(http, "ann") == imported
        until(lambda: http.get("/v1/adapters/ann/export").headers.get("X-Edged-Version") == "3")
        weights, config = export_of(http, "ann")
    assert config["use_dora"] is True
    assert all(torch.equal(weights[name], tensor) for name, tensor in mine.items())


class Bomb:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.mark), "w")


def test_a_pickle_is_refused_and_never_runs(daemon: LiveDaemon, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(mark))
    config = (peft_adapter(tmp_path / "a") / "adapter_config.json").read_bytes()
    with daemon.http() as http:
        for name in ("adapter_model.bin", "adapter_model.pt"):
            message = refusal(http, packed(("adapter_config.json", config), (name, bomb)))
            assert "is a pickle, which can run any code when it is loaded" in message
        # Nor by another name.
        assert "is not a safetensors file" in refusal(http, packed(("adapter_config.json", config), (WEIGHTS, bomb)))
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists(), "the bomb works where somebody loads it"


def test_what_does_not_fit_the_model_is_refused_with_the_reason(daemon: LiveDaemon, tmp_path: Path) -> None:
    good = peft_adapter(tmp_path / "good")
    tensors, config = load_file(good / WEIGHTS), json.loads((good / "adapter_config.json").read_text())
    name = next(name for name in tensors if "q_proj.lora_A" in name)

    def changed(tensors: dict[str, torch.Tensor], **settings: Any) -> bytes:
        folder = tmp_path / "changed"
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / WEIGHTS)
        (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))
        return archive(folder)

    vector = name.replace("lora_A.weight", "lora_magnitude_vector")
    ups = {key: value for key, value in tensors.items() if "lora_B" in key}
    vectors = {key.replace("lora_B.weight", "lora_magnitude_vector"): up[:, 0].clone() for key, up in ups.items()}
    dora = {**tensors, **vectors}
    nan = {**tensors, name: tensors[name].clone().fill_(float("nan"))}
    cases = [
        (
            archive(peft_adapter(tmp_path / "wide", rank=8)),
            "its rank is 8, align.rank is 4: raise align.rank, or train",
        ),
        (changed(tensors, lora_alpha="much"), "its lora_alpha is 'much': give a number"),
        (changed(tensors, lora_alpha=10**400), "give a number from 0 to 1e+06"),
        (changed(tensors, lora_alpha=True), "its lora_alpha is 'True': give a number"),
        (changed(tensors, alpha_pattern={"q_proj": None}), "its lora_alpha is 'None': give a number"),
        (changed(tensors, alpha_pattern=5), "alpha_pattern is 5: only at most 1024 names of linears"),
        (changed(tensors, alpha_pattern={"([a-z0-9._]+)+!": 3}), "of letters, digits, dots and _ are taken"),
        (changed(tensors, alpha_pattern={"(": 3}), "of letters, digits, dots and _ are taken"),
        (changed(tensors, r=2), "has the rank 4, and adapter_config.json says 2"),
        (changed(tensors, rank_pattern={"down_proj": 3}), "has the rank 4, and adapter_config.json says 3"),
        (changed(tensors, init_lora_weights="pissa"), "init_lora_weights = 'pissa' changes the base model"),
        (changed(tensors, alora_invocation_tokens=[1]), "alora_invocation_tokens = [1] is not supported"),
        (changed(tensors, layer_replication=[[0, 1]]), "layer_replication = [[0, 1]] is not supported"),
        (changed(tensors, use_rslora="false"), 'use_rslora = "false" is neither true nor false'),
        (packed(("adapter_config.json", b"[" * 100_000), (WEIGHTS, b"x")), "adapter_config.json cannot be read"),
        (
            changed({key: 1e38 * value.sign() for key, value in tensors.items()}, lora_alpha=1e6),
            "or are too large for torch.float32 as they are served",
        ),
        (changed({}), "it has no tensors"),
        (changed(tensors, peft_type="IA3"), f"{min(tensors)} is no part of this model's adapters"),
        (changed(tensors, peft_type="PREFIX_TUNING"), "'PREFIX_TUNING': only LORA and IA3 are served, train one of"),
        (changed(tensors, use_dora=True), "lora_magnitude_vector is missing: A, magnitude and B of a linear belong"),
        (changed(tensors, use_dora="false"), 'use_dora = "false" is neither true nor false'),
        (changed(dora, use_dora=False), "lora_magnitude_vector is no part of this model's adapters"),
        (changed({**dora, vector: torch.ones(9)}, use_dora=True), "has the shape (9,), this model needs (64,)"),
        (
            changed({**dora, vector: torch.full((64,), 3e38)}, use_dora=True),
            f"{vector} holds values that are not finite, or are too large for torch.float32 as they are served",
        ),
        (changed({key: value for key, value in tensors.items() if key != name}), f"{name} is missing"),
        (changed({**tensors, "more": torch.zeros(1)}), "more is no weight of an adapter's linear"),
        (changed({**tensors, name: torch.zeros(4, 9)}), "has the shape (4, 9), this model needs (4, 64)"),
        (changed({**tensors, name: tensors[name].to(torch.int32)}), "is of the type I32"),
        (changed(nan), f"{name} holds values that are not finite"),
        (packed((WEIGHTS, b"x")), "there is no adapter_config.json"),
        (b"no archive at all", "the upload is not a tar archive"),
        (packed(("../adapter_config.json", b"{}")), '"../adapter_config.json" in the archive leads out of it'),
        (packed(("/etc/passwd", b"{}")), "leads out of it"),
        (packed((WEIGHTS, b""), kind=tarfile.SYMTYPE), "is neither a file nor a folder"),
    ]
    with daemon.http() as http:
        for data, words in cases:
            assert words in refusal(http, data)
        too_large = send(http, packed((WEIGHTS, bytes(12 << 20))))
        assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "body_too_large")
        assert http.get("/v1/adapters/eve").status_code == 404
    assert not list(daemon.data.glob(".scratch-*")), "nothing of an upload stays"


def sparse(name: str, size: int) -> bytes:
    """A member of GNU's old sparse format: 512 bytes here, `size` zeros where it is unpacked."""
    info = tarfile.TarInfo(name)
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[386:398] = header[398:410] = b"00000000000\0"
    header[483:495] = b"%011o\0" % size
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def test_a_small_archive_does_not_unpack_to_a_large_one(daemon: LiveDaemon) -> None:
    bomb = sparse(WEIGHTS, 8 << 20)
    with daemon.http() as http:
        assert "neither a file nor a folder" in refusal(http, bomb + bytes(1024))
        twice = packed((f"a/{WEIGHTS}", b"one"), (f"b/{WEIGHTS}", b"two"))
        assert f"{WEIGHTS} is in the archive twice" in refusal(http, twice)
        many = packed(*((f"{i}", b"") for i in range(300)))
        assert "more than 256 members" in refusal(http, many)


def connected(daemon: LiveDaemon, length: int) -> socket.socket:
    """A connection that has sent the header of an import with a body of `length` bytes."""
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(0.1)
    raw.connect(str(daemon.socket))
    raw.sendall(f"POST /v1/adapters/ann/import HTTP/1.1\r\nHost: edged\r\nContent-Length: {length}\r\n\r\n".encode())
    return raw


def trickled(raw: socket.socket, pieces: int) -> bytes:
    """What is answered to a byte every tenth of a second."""
    for _ in range(pieces):
        raw.sendall(b"x")
        try:
            return raw.recv(4096)
        except TimeoutError:
            pass
    return b""


@pytest.mark.parametrize("kind", [b"x", b"g", b"X", b"L", b"K"])
def test_a_header_that_takes_long_to_search_is_refused_unread(daemon: LiveDaemon, kind: bytes) -> None:
    """64 KiB of digits took Python 3.11 half a minute, in which nobody else had the interpreter."""
    member = tarfile.TarInfo("header")
    member.type, member.size = kind, 1 << 18
    with daemon.http() as http:
        told = refusal(http, member.tobuf(tarfile.USTAR_FORMAT) + b"1" * member.size + bytes(1024))
    assert told.endswith("a header in the archive has 262144 bytes: at most 2048")


@pytest.mark.parametrize("headers", [[b"x"] * 1500, [b"L"] * 1500, [b"map=a,b"]], ids=["x", "L", "sparse"])
def test_headers_that_tarfile_cannot_read_are_refused(daemon: LiveDaemon, headers: list[bytes]) -> None:
    """A chain of them ends in RecursionError, a map of holes that is none in ValueError."""
    data = b""
    for header in headers:
        member = tarfile.TarInfo("header")
        content = b"23 GNU.sparse.map=a,b\n" if header == b"map=a,b" else b""
        member.type, member.size = b"x" if content else header, len(content)
        data += member.tobuf(tarfile.USTAR_FORMAT) + content.ljust(-(-len(content) // 512) * 512, b"\0")
    member = tarfile.TarInfo("adapter_config.json")
    with daemon.http() as http:
        assert "is not a tar archive" in refusal(http, data + member.tobuf() + bytes(1024))
        assert http.get("/healthz").status_code == 200
    assert "Traceback" not in daemon.log


def test_a_byte_now_and_then_does_not_hold_an_import_open(daemon: LiveDaemon) -> None:
    with connected(daemon, 1000) as raw:
        answer = trickled(raw, 100)
    assert b" 408 " in answer
    assert b"body_too_slow" in answer


@root_only
def test_an_import_that_is_on_its_way_is_in_no_other_accounts_way() -> None:
    with open_folder() as folder:
        model = save_tiny(folder / "tiny", max_position_embeddings=512)
        live = running(folder / "run", model, api__socket_mode="0666")
        with live as daemon, connected(daemon, 1 << 20):
            until(lambda: list(daemon.data.glob(".scratch-*")))
            answer = Client(ANN, daemon.socket).call("POST", f"/v1/adapters/{ANN}/import", {})
            assert (answer.status, answer.code) == (400, "import_refused")


def test_one_import_of_an_account_at_a_time(daemon: LiveDaemon) -> None:
    with daemon.http() as http:
        with connected(daemon, 1 << 20) as raw:
            until(lambda: list(daemon.data.glob(".scratch-*")))
            refused = send(http, packed((WEIGHTS, b"x")))
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "import_busy")
            assert int(refused.headers["Retry-After"]) > 0
            raw.close()
        until(lambda: send(http, packed((WEIGHTS, b"x"))).status_code == 400)


def test_what_an_import_left_that_was_killed_is_removed_by_the_next_start(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny", max_position_embeddings=512)
    with running(tmp_path / "run", model) as live, connected(live, 1000) as raw:
        raw.sendall(b"half")
        until(lambda: [path for path in live.data.rglob("upload.tar")])
        live.process.kill()
        live.process.join()
        assert list(live.data.rglob("upload.tar"))
    with running(tmp_path / "run", model) as live:
        assert not list(live.data.rglob("upload.tar"))
