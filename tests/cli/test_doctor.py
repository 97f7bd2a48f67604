"""`edged doctor` finds what is really broken, says the way out, and leaves what is fine alone."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from edged.cli.doctor import model, storage
from edged.cli.doctor.check import CheckProcess
from edged.cli.doctor.finding import Check, Examination, Finding, State, broken, doubtful, fine, worst
from edged.cli.doctor.model import tensors_of
from edged.models import demo_model_dir
from edged.scheduler.cost.prices import Prices
from edged.scheduler.cost.profile import Profile, Subject
from edged.settings.load import Settings, load_settings
from edged.store import Store
from tests.cli.conftest import Daemon, clean_environment, edged
from tests.models import VOCAB, byte_tokenizer, save_tiny
from tests.store import schemas

LONG_S = 40.0
"""Tests share their processors: here torch may take its time."""


def examination(folder: Path, **changes: Any) -> Examination:
    values = {
        "settings": Settings(),
        "data_dir": folder / "data",
        "sockets": (folder / "edged.sock",),
        "min_free_bytes": 0,
        "within_s": 20.0,
        "checks": Told(*(changes.pop(name, {}) for name in ("torch", "needs", "tokens", "trials"))),
        **changes,
    }
    return Examination(**values)


class Told:
    """A check process that has answered."""

    def __init__(self, *facts: dict[str, Any]) -> None:
        self.facts = facts

    def lines(self, timeout_s: float) -> tuple[dict[str, Any], ...]:
        return self.facts


def only(finding: Finding | None) -> Finding:
    assert isinstance(finding, Finding)
    assert finding.way_out or finding.state == "ok"
    return finding


def by_name(output: str) -> dict[str, dict[str, str]]:
    return {item["name"]: item for item in json.loads(output)["findings"]}


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_running_daemon_is_well(daemon: Daemon) -> None:
    result = daemon.run("doctor", "--json", "--least-free", "0", "--within", str(LONG_S), code=1)
    found = by_name(result.stdout)
    tiny, data = daemon.socket.parent / "tiny", daemon.socket.parent / "data"
    assert found["settings"]["seen"] == f"those of the running daemon: model {tiny}, data in {data}"
    assert str(tiny) in found["model"]["seen"]
    assert str(data) in found["data folder"]["seen"]
    states = {name: item["state"] for name, item in found.items()}
    for name in ("settings", "daemon", "database", "adapters", "model", "tokenizer", "disk", "memory", "torch"):
        assert states[name] == "ok", found[name]
    assert "serves tiny" in found["daemon"]["seen"]
    assert "edged profile" in found["profile"]["way_out"]
    assert json.loads(result.stdout)["state"] == "warn"
    named = by_name(
        edged(
            "doctor", "--json", "--config", "/dev/null", "--within", str(LONG_S), EDGED_SOCKET=str(daemon.socket)
        ).stdout
    )
    assert (named["settings"]["seen"], "serves tiny" in named["daemon"]["seen"]) == ("/dev/null", True)


def test_without_a_daemon_a_table_says_what_to_do(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    (tmp_path / "edged.toml").write_text(
        f'[model]\npath = "{model}"\n[store]\ndata_dir = "{tmp_path / "data"}"\n[api]\nsocket = "{tmp_path / "s"}"\n'
    )
    result = edged("doctor", "--config", str(tmp_path / "edged.toml"), "--within", str(LONG_S), "--least-free", "0")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "none answers on" in result.stdout
    assert "edged serve" in result.stdout
    assert " 0 failures in " in result.stdout


@pytest.mark.slow
def test_settings_that_cannot_be_are_a_failure_and_the_rest_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "edged.toml").write_text("[cache]\npage_sise = 16\n")
    arguments = ("doctor", "--json", "--config", str(tmp_path / "edged.toml"), "--socket", str(tmp_path / "s"))
    result = edged(*arguments, EDGED_STORE__DATA_DIR="", XDG_DATA_HOME=str(tmp_path))
    assert result.returncode == 2
    found = by_name(result.stdout)
    assert 'did you mean "page_size"?' in found["settings"]["seen"]
    assert {"disk", "model", "daemon"} <= found.keys()


def test_modules_in_the_current_folder_are_not_run(tmp_path: Path) -> None:
    """Root looks from wherever it stands, which may be a folder of somebody else's."""
    for name in ("json", "subprocess", "pydantic", "torch", "psutil", "edged"):
        (tmp_path / f"{name}.py").write_text(f"open('ran-{name}', 'w')\n")
    places = ("--socket", str(tmp_path / "s"), "--config", "/dev/null", "--within", str(LONG_S))
    result = subprocess.run(
        [sys.executable, "-P", "-m", "edged.cli", "doctor", "--json", "--least-free", "0", *places],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=clean_environment(EDGED_STORE__DATA_DIR=str(tmp_path / "data")),
    )
    assert not list(tmp_path.glob("ran-*"))
    found = by_name(result.stdout)
    assert (found["torch"]["state"], found["memory"]["state"]) == ("ok", "ok"), result.stdout + result.stderr


def test_the_exit_code_is_the_worst_state() -> None:
    states: list[tuple[list[Finding], State]] = [
        ([], "ok"),
        ([fine("")], "ok"),
        ([doubtful("", ""), fine("")], "warn"),
        ([doubtful("", ""), broken("", ""), fine("")], "fail"),
    ]
    for findings, state in states:
        assert worst(findings) == state


def test_a_check_that_breaks_is_a_finding_of_its_name(tmp_path: Path) -> None:
    def breaks(it: Examination) -> Finding:
        raise ZeroDivisionError("oh")

    found = Check("swap", breaks).finding(examination(tmp_path))
    assert found == Finding("swap", "fail", "the check itself failed: ZeroDivisionError: oh", "report this")
    assert Check("swap", lambda it: None).finding(examination(tmp_path)) is None


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_model_dir(), tmp_path / "demo"))


def looked_at(folder: Path, **settings: Any) -> Examination:
    probe = {name: settings.pop(name) for name in ("checks", "tokens") if name in settings}
    settings = {"settings": load_settings(environ={}, overrides=settings)}
    return examination(folder, model_dir=folder, within_s=LONG_S, **settings, **probe)


def states_of(folder: Path) -> dict[str, Finding]:
    it = looked_at(folder)
    assert (model.place(it), model.code(it)) == (None, None)
    return {"model": only(model.weights(it)), "tokenizer": only(model.tokenizer(it))}


def test_a_model_that_is_whole_is_fine(tiny: Path) -> None:
    assert {finding.state for finding in states_of(tiny).values()} == {"ok"}


@pytest.mark.parametrize("size", [4, 100, -1])
def test_truncated_weights_are_found_without_reading_them(tiny: Path, size: int) -> None:
    file = tiny / "model.safetensors"
    os.truncate(file, size if size > 0 else file.stat().st_size + size)
    finding = states_of(tiny)["model"]
    assert finding.state == "fail"
    assert "model.safetensors" in finding.seen
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        tensors_of(file)


def test_a_header_that_is_no_json_is_damage(tiny: Path) -> None:
    file = tiny / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:12] = b"\xff\xff\xff\xff"
    file.write_bytes(content)
    assert "header" in states_of(tiny)["model"].seen


def test_an_index_that_names_what_is_not_there_is_found(tiny: Path) -> None:
    index = tiny / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert "model-00001-of-00002.safetensors is missing" in states_of(tiny)["model"].seen
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert "a is not in the file" in states_of(tiny)["model"].seen
    index.write_text("{")
    assert "cannot be read" in states_of(tiny)["model"].seen


def test_pickles_missing_parts_and_own_code_are_found(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    assert "pickle" in states_of(tiny)["model"].seen
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.Model"}}))
    refused = only(model.code(looked_at(tiny)))
    assert "code of its own" in refused.seen
    assert "runs no code" in refused.way_out
    runs = only(model.code(looked_at(tiny, **{"model.trust_remote_code": True})))
    assert "code of its own" in runs.seen
    assert "runs with all of edged's rights" in runs.seen
    assert "model.trust_remote_code = false" in runs.way_out
    (tiny / "config.json").write_text("{")
    it = looked_at(tiny)
    assert "config.json" in only(model.place(it)).seen
    assert [model.code(it), model.weights(it), model.tokenizer(it)] == [None, None, None]


def test_files_that_are_not_whole_are_found(tiny: Path) -> None:
    for name, data, told in (
        ("model.safetensors", (tiny / "model.safetensors").read_bytes()[:-1], "broke off"),
        *(
            (name, b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer")
            for name in ("chat_template.jinja", "config.json", "model.safetensors")
        ),
    ):
        before = (tiny / name).read_bytes()
        (tiny / name).write_bytes(data)
        found = only(model.place(looked_at(tiny)) or model.weights(looked_at(tiny)))
        assert (found.state, f"{name} {told}" in found.seen) == ("fail", True)
        (tiny / name).write_bytes(before)
    assert model.place(looked_at(tiny)) is None


@pytest.mark.slow
def test_tokens_that_do_not_fit_the_model_are_found(tmp_path: Path) -> None:
    tiny = save_tiny(tmp_path / "tiny")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["smiley"])
    tokenizer.chat_template = "{{ raise_exception('no chats') }}"
    tokenizer.save_pretrained(tiny)
    (tiny / "generation_config.json").write_text('{"eos_token_id": [2, 128009]}')
    found = only(model.tokens(looked_at(tiny, checks=CheckProcess(load_settings(environ={}), tiny))))
    assert found.state == "warn"
    for told in (f'{VOCAB} "smiley"', "end no answer: 128009", "chats are refused: ", "no chats"):
        assert told in found.seen
    tokenizer.eos_token = "smiley"
    tokenizer.save_pretrained(tiny)
    (tiny / "generation_config.json").unlink()
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    found = only(model.tokens(looked_at(tiny, checks=CheckProcess(load_settings(environ={}), tiny))))
    assert (found.state, "no end-of-sequence token" in found.seen) == ("fail", True)
    assert model.tokens(looked_at(tiny, tokens={"problems": []})) is None


def test_a_tokenizer_without_template_or_without_sense_is_found(tiny: Path) -> None:
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (tiny / name).unlink(missing_ok=True)
    assert states_of(tiny)["tokenizer"].state == "warn"
    (tiny / "chat_template.json").write_text('{"chat_template": "of a processor"}')
    assert states_of(tiny)["tokenizer"].state == "ok"
    (tiny / "tokenizer.json").write_text("{")
    assert states_of(tiny)["tokenizer"].state == "fail"
    (tiny / "tokenizer.json").unlink()
    assert states_of(tiny)["tokenizer"].state == "fail"


def test_a_model_that_is_not_there_is_found_without_a_download(tmp_path: Path) -> None:
    def found(path: str) -> Finding | None:
        return model.find(load_settings(environ={}, overrides={"model.path": path}).model)[1]

    assert found("demo") is None
    wrong, away = found(str(tmp_path / "nothing")), found("nobody/nothing")
    assert wrong is not None
    assert wrong.state == "fail"
    assert away is not None
    assert away.state == "warn"


def write_profile(path: Path, of: str, on: str) -> None:
    subject = Subject(model=of, fingerprint="f", device=on, dtype="float32")
    prices = Prices((0.0,) * 8, 32, {})
    Profile(
        subject=subject, created_at="2026-01-02", edged_version="1", prices=prices, overhead_s=0.0, error_percent={}
    ).write(path)


def test_a_missing_foreign_or_broken_profile_is_found(tmp_path: Path) -> None:
    it, folder = examination(tmp_path, torch={"gpu": "Orin"}), tmp_path / "data" / "profiles"
    assert "none of demo" in only(model.profile(it)).seen
    write_profile(folder / "a.json", "llama", "Orin")
    assert "only of llama on Orin" in only(model.profile(it)).seen
    (folder / "a.json").write_text("{}")
    assert "is no profile" in only(model.profile(it)).seen
    write_profile(folder / "b.json", "demo", "Orin")
    assert only(model.profile(it)).state == "ok"
    assert only(model.profile(examination(tmp_path, torch={"gpu": "H200"}))).state == "warn"


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_a_disk_with_less_room_than_asked_for_is_found(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert only(storage.disk(examination(tmp_path))).state == "ok"
    assert only(storage.disk(examination(tmp_path, min_free_bytes=2 * free))).state == "warn"
    assert only(storage.disk(examination(tmp_path, min_free_bytes=100 * free))).state == "fail"


def test_folders_that_cannot_be_written_are_found_even_by_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    places = {"data_dir": Path("/proc/edged"), "sockets": (tmp_path / "file" / "edged.sock",)}
    it = examination(tmp_path, **places)
    data, listener = storage.data_folder(it), storage.socket_folder(it)
    assert (data.state, listener.state) == ("fail", "fail")
    assert "/proc" in data.seen
    assert "is not a folder" in listener.seen
    assert "store.data_dir" in data.way_out
    assert storage.data_folder(examination(tmp_path, data_dir=Path("/proc/self"))).state == "fail"


def test_a_folder_that_everybody_may_use_is_found_and_a_socket_is_guarded_by_access(tmp_path: Path) -> None:
    it = examination(tmp_path)
    it.data_dir.mkdir(mode=0o750)
    assert (storage.data_folder(it).state, storage.socket_folder(it).state) == ("ok", "ok")
    it.data_dir.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(it.sockets[0]))
        it.sockets[0].chmod(0o666)
        data, found = storage.data_folder(it), storage.socket_folder(it)
        assert (data.state, found.state) == ("warn", "ok")
        assert "chmod o=" in data.way_out
        assert "each account for itself" in found.seen
        it.sockets[0].chmod(0o660)
        assert (storage.data_folder(it).state, storage.socket_folder(it).state) == ("warn", "ok")


def test_who_may_not_use_the_socket_is_not_sent_into_the_admins_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = examination(tmp_path)
    it.data_dir.mkdir(mode=0o750)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(it.sockets[0]))
        # Root may use every socket.
        monkeypatch.setattr(os, "access", lambda path, mode, **how: False)
        found = storage.socket_folder(it)
    assert found.state == "warn"
    assert "usermod" not in found.way_out
    assert "SocketMode=0666" in found.way_out


def filled(folder: Path) -> Path:
    """A database of some hundred pages."""
    folder.mkdir()
    path = folder / "edged.db"
    store = Store(path)
    store.write(lambda db: db.execute("CREATE TABLE blobs (id INTEGER PRIMARY KEY, data BLOB)")).result()
    store.write(lambda db: db["blobs"].insert_all({"data": os.urandom(2000)} for _ in range(500))).result()
    store.close()
    return path


def test_a_database_that_is_whole_is_fine_and_is_not_changed(tmp_path: Path) -> None:
    path = filled(tmp_path / "data")
    before = path.read_bytes()
    finding = only(storage.database(examination(tmp_path)))
    assert finding.state == "ok"
    assert "schema m0" in finding.seen
    assert path.read_bytes() == before


def test_a_corrupted_page_is_found(tmp_path: Path) -> None:
    path = filled(tmp_path / "data")
    # In the middle of the rows: whoever reads only the schema sees nothing.
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2 // 4096 * 4096)
        file.write(b"\xff" * 4096)
    finding = only(storage.database(examination(tmp_path)))
    assert finding.state == "fail"
    assert ".recover" in finding.way_out
    path.write_bytes(b"no database at all" * 100)
    assert only(storage.database(examination(tmp_path))).state == "fail"


def test_a_database_of_a_newer_or_older_edged_is_told_apart(tmp_path: Path) -> None:
    path = filled(tmp_path / "data")
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM migrations WHERE name = (SELECT max(name) FROM migrations)")
    older = only(storage.database(examination(tmp_path)))
    assert older.state == "ok"
    assert "up to date" in older.seen
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO migrations VALUES ('m999_future', '')")
    newer = only(storage.database(examination(tmp_path)))
    assert newer.state == "fail"
    assert "m999_future" in newer.seen


@pytest.mark.parametrize(("version", "told"), [(9, "up to date (14 migrations)"), (10, "up to date (13 migrations)")])
def test_a_database_from_before_the_first_release_is_well(tmp_path: Path, version: int, told: str) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "edged.db"
    schemas.load(version, path)
    finding = only(storage.database(examination(tmp_path)))
    assert (finding.state, told in finding.seen) == ("ok", True)
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM migrations WHERE name = 'm003_adapters'")
    finding = only(storage.database(examination(tmp_path)))
    assert (finding.state, "8 of its 9" in finding.seen) == ("fail", True)
    assert "restore another backup" in finding.way_out


def test_a_database_in_use_is_checked_too(tmp_path: Path) -> None:
    filled(tmp_path / "data")
    store = Store(tmp_path / "data" / "edged.db")
    store.write(lambda db: db["blobs"].insert({"data": b"x"})).result()
    assert only(storage.database(examination(tmp_path))).state == "ok"
    store.close()


def test_damaged_adapters_are_found(daemon: Daemon, tmp_path: Path) -> None:
    with daemon.client() as client:
        for seed in range(2):
            body = {"prompt": "hi", "user": "sam", "n": 2, "max_tokens": 8, "seed": seed}
            answer = client.post("/v1/completions", body)
            rating = {"completion_id": answer["id"], "choice": 0, "signal": "chosen"}
            client.post("/v1/feedback", rating)
    learned, deadline = daemon.socket.parent / "data" / "adapters", time.monotonic() + 60
    while not list(learned.glob("*/sam/v*/edged.json")):
        assert time.monotonic() < deadline, "no version was saved"
        time.sleep(0.1)
    # But what is being written.
    shutil.copytree(learned, tmp_path / "data" / "adapters", ignore=shutil.ignore_patterns(".*"))
    it = examination(tmp_path)
    assert only(storage.adapters(it)).state == "ok"
    newest = sorted((tmp_path / "data" / "adapters").glob("*/sam/v*"))[-1]
    weights = newest / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    flipped = only(storage.adapters(it))
    assert flipped.state == "warn"
    assert "not as it was written" in flipped.seen
    os.truncate(weights, len(content) - 10)
    assert "its header says" in only(storage.adapters(it)).seen
    (newest / "edged.json").unlink()
    assert only(storage.adapters(it)).state == "warn"


def test_a_default_that_names_no_start_is_found(tmp_path: Path) -> None:
    settings = load_settings(environ={}, overrides={"starts.default": "kind"})
    missing = only(storage.starts(examination(tmp_path, settings=settings)))
    assert missing.state == "warn"
    assert missing.seen == 'starts.default = "kind" names no start: known are none'
    assert missing.way_out.startswith("`edged starts add kind FOLDER`")
    (tmp_path / "data" / "starts" / "fingerprint" / "kind" / "v000001").mkdir(parents=True)
    assert only(storage.starts(examination(tmp_path, settings=settings))).state == "ok"
    assert storage.starts(examination(tmp_path)) is None
