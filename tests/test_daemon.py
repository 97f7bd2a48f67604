"""The daemon's life: what prevents a start, what a stop keeps, what a restart finds."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from edged.daemon import run_daemon
from edged.models import ModelMissing, find_model
from edged.models.whole_files import why_not_whole
from edged.settings.load import ModelSettings, Settings
from edged.store.data_dir import data_folder
from tests.api.live import LiveDaemon, running, started
from tests.api.test_adapters import teach
from tests.models import save_tiny

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[LiveDaemon]:
    with running(tmp_path_factory.mktemp("daemon"), model, api__listen="127.0.0.1:0", api__token="secret") as live:
        yield live


def start(folder: Path, model: Path | str, **api: str) -> int:
    """A start in this process that must fail before it serves; returns the exit code."""
    settings = Settings.model_validate(
        {
            "model": {"path": str(model)},
            "api": {"socket": str(folder / "edged.sock"), **api},
            "store": {"data_dir": str(folder / "data")},
        }
    )
    return run_daemon(settings)


def test_a_second_daemon_on_the_same_socket_is_refused(
    daemon: LiveDaemon, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(tmp_path, model, socket=str(daemon.socket)) == 1
    assert f'socket "{daemon.socket}" is served by another edged (pid {daemon.process.pid})' in capsys.readouterr().err
    with daemon.http() as http:
        assert http.get("/readyz").status_code == 200


def test_a_second_daemon_on_the_same_data_folder_is_refused(
    daemon: LiveDaemon, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = start(daemon.folder, model, socket=str(tmp_path / "other.sock"))
    assert code == 1
    assert f'data folder "{daemon.data}" is in use by another edged' in capsys.readouterr().err


@pytest.mark.parametrize("what", ["*token*", "config.json", "model.safetensors"])
def test_an_incomplete_model_directory_is_refused_with_the_reason(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save_tiny(tmp_path / "tiny")
    for file in directory.glob(what):
        file.unlink()
    assert start(tmp_path, directory) == 1
    message = capsys.readouterr().err
    assert f'edged: model "{directory}"' in message
    assert "Traceback" not in message
    assert not (tmp_path / "edged.sock").exists()


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/model", "nowhere", "~/no-such-model-here"])
def test_a_model_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(ModelMissing, match="is not a directory"):
        find_model(ModelSettings(path=path))


def test_a_listener_open_to_the_network_needs_a_token(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(tmp_path, model, listen="0.0.0.0:0") == 1
    assert "set api.token" in capsys.readouterr().err


def test_models_are_named_after_their_directory(model: Path) -> None:
    assert find_model(ModelSettings(path=str(model))) == (model, "tiny")
    assert find_model(ModelSettings(path=str(model), name="other"))[1] == "other"


@pytest.mark.parametrize(
    ("configured", "environ", "expected"),
    [
        ("/data", {"STATE_DIRECTORY": "/var/lib/edged"}, "/data"),
        ("", {"STATE_DIRECTORY": "/var/lib/edged:/other", "XDG_DATA_HOME": "/x"}, "/var/lib/edged"),
        ("", {"XDG_DATA_HOME": "/x"}, "/x/edged"),
    ],
)
def test_the_data_folder_is_found_as_documented(configured: str, environ: dict[str, str], expected: str) -> None:
    assert data_folder(configured, environ) == Path(expected)


def test_tcp_asks_for_the_token_and_the_socket_does_not(daemon: LiveDaemon) -> None:
    port = tcp_port(daemon.process.pid)
    url = f"http://127.0.0.1:{port}"
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer \xff"}):
        encoded = {name: value.encode("latin-1") for name, value in headers.items()}
        response = httpx2.get(f"{url}/v1/models", headers=encoded)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
    assert httpx2.get(f"{url}/readyz").status_code == 200
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret")
    assert next(iter(client.models.list())).id == "tiny"
    with daemon.http() as http:
        assert http.get("/v1/models").status_code == 200


def tcp_port(pid: int) -> int:
    """The port on which a process listens."""
    import psutil

    return next(c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN)


async def chat(client: openai.AsyncOpenAI, tokens: int) -> Any:
    return await client.chat.completions.create(
        model="tiny", messages=HELLO, user="sam", max_tokens=tokens, extra_body={"ignore_eos": True}
    )


async def test_sigterm_under_load_drains_and_a_restart_finds_everything(tmp_path: Path, model: Path) -> None:
    # A version that the guard took back teaches nothing, and so loses nothing when it is cut.
    settings = {"serving__drain_s": 3.0, "store__save_every_s": 0.1, "align__micro_batch_pairs": 2}
    # On a fast machine a second of feedback is what an hour may bring, and the rest would wait.
    settings |= {"guard__held_out_share": 0.0, "feedback__pairs_per_hour": 1_000_000}
    with running(tmp_path, model, **settings) as first:
        acknowledged = await stop_under_load(first)
        assert "Traceback" not in first.log
    cut_newest_version(first.data)
    with running(tmp_path, model, **settings) as second, second.http() as http:
        assert acknowledged <= {json.loads(line)["chosen"] for line in http.get("/v1/feedback").text.splitlines()}
        assert http.get("/v1/adapters/sam").json()["version"] > 0
        assert "an older version is used" in second.log
        assert "learned again: the versions that had learned them are not on disk" in second.log
        assert await all_learned(http)
        assert second.stop(signal.SIGINT) == 0


async def all_learned(http: httpx2.Client) -> bool:
    """Whether no pair waits any more, in time."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if not http.get("/v1/adapters/sam").json()["pairs_queued"]:
            return True
        await asyncio.sleep(0.05)
    return False


async def stop_under_load(daemon: LiveDaemon) -> set[str]:
    """SIGTERM while short and long answers and feedback are under way; what must hold of them is checked here.

    Returns the chosen answers of all acknowledged pairs.
    """
    acknowledged: set[str] = set()

    def report() -> None:
        with daemon.http() as http:
            for i in range(300):
                body = {"user": "sam", "prompt": f"q{i}", "chosen": f"good {i}", "rejected": f"bad {i}"}
                try:
                    response = http.post("/v1/feedback", json=body)
                except httpx2.TransportError:
                    return
                if response.status_code != 200:
                    assert response.status_code == 503
                    return
                acknowledged.add(f"good {i}")
                time.sleep(0.005)

    reporter = threading.Thread(target=report)
    reporter.start()
    async with daemon.async_openai() as client:
        short = [asyncio.create_task(chat(client, 30)) for _ in range(8)]
        long = [asyncio.create_task(chat(client, 4000)) for _ in range(4)]
        await until_saved_twice(daemon)
        started = time.monotonic()
        daemon.signal(signal.SIGTERM)
        await asyncio.to_thread(until_it_stops, daemon)
        late = await asyncio.gather(chat(client, 4), return_exceptions=True)
        done, cut = await asyncio.gather(
            asyncio.gather(*short, return_exceptions=True), asyncio.gather(*long, return_exceptions=True)
        )
        code = await asyncio.to_thread(daemon.wait)
    await asyncio.to_thread(reporter.join)
    assert code == 0, daemon.log
    assert time.monotonic() - started < 30
    assert isinstance(late[0], openai.APIStatusError)
    assert late[0].status_code == 503
    assert all(not isinstance(answer, BaseException) for answer in done)
    for answer in cut:
        assert not isinstance(answer, openai.APIConnectionError)
        assert not isinstance(answer, BaseException) or "stopped before" in str(answer)
    assert not daemon.socket.exists()
    assert acknowledged
    return acknowledged


def until_it_stops(daemon: LiveDaemon) -> None:
    """Wait until it has said that it takes no more requests."""
    deadline = time.monotonic() + 10
    while "edged stops" not in daemon.log:
        assert time.monotonic() < deadline, daemon.log
        time.sleep(0.05)


async def until_saved_twice(daemon: LiveDaemon) -> None:
    """Wait until two versions of the user's adapter are on disk."""
    deadline = time.monotonic() + 120
    with daemon.http() as http:
        while time.monotonic() < deadline:
            response = await asyncio.to_thread(http.get, "/v1/adapters/sam")
            if sum(version["on_disk"] for version in response.json().get("versions", ())) >= 2:
                return
            await asyncio.sleep(0.05)
    raise AssertionError("nothing was learned")


def cut_newest_version(data: Path) -> None:
    """What a disk that lied about a flush leaves: the newest adapter file is short."""
    newest = max(data.glob("adapters/*/sam/v*/adapter_model.safetensors"), key=lambda file: file.parent.name)
    newest.write_bytes(newest.read_bytes()[:100])


def test_a_daemon_that_was_killed_leaves_nothing_in_the_way(tmp_path: Path, model: Path) -> None:
    with running(tmp_path, model) as first:
        with first.http() as http:
            body = {"user": "tom", "prompt": "q", "chosen": "good", "rejected": "bad"}
            pair_ids = http.post("/v1/feedback", json=body).json()["pair_ids"]
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
    assert first.socket.exists()
    with started(tmp_path, model, download_s=2.0) as second:
        assert early_answer(second) == 503
        with second.wait_until_ready().http() as http:
            assert http.get("/v1/adapters/tom").json()["pairs_seen"] == len(pair_ids) == 1


def test_a_daemon_that_downloads_its_model_answers_and_stops_when_it_is_told_to(tmp_path: Path, model: Path) -> None:
    with started(tmp_path, model, download_s=60.0) as daemon:
        assert early_answer(daemon) == 503
        assert daemon.stop(signal.SIGTERM) == 0
        assert not daemon.socket.exists()


@pytest.mark.slow
def test_each_base_model_finds_what_it_had_learned(tmp_path: Path, model: Path) -> None:
    other = save_tiny(tmp_path / "other", seed=7, max_position_embeddings=4096)
    first = learn_on(tmp_path, model, "good")
    second = learn_on(tmp_path, other, "better", store__new_base="learn")
    assert second["pairs_trained"] + second["pairs_held_out"] == 8
    with running(tmp_path, model, store__save_every_s=0.05, store__new_base="shelve") as daemon, daemon.http() as http:
        assert "another base model was served before" in daemon.log
        assert "learned again" not in daemon.log
        assert wait_until_learned(http)["pairs_seen"] == 8
        again = http.get("/v1/adapters/tom").json()
        assert again["series"][: len(first["series"])] == first["series"]
        known = {version["version"]: version for version in again["versions"]}
        assert [known[version["version"]] | {"on_disk": 1, "path": 1} for version in first["versions"]] == [
            version | {"on_disk": 1, "path": 1} for version in first["versions"]
        ]
        path = Path(next(v["path"] for v in again["versions"] if v["on_disk"]))
        assert path.parent == Path(next(v["path"] for v in first["versions"] if v["path"])).parent


@pytest.mark.slow
def test_another_base_model_is_refused_until_it_is_asked_for_and_then_leaves_earlier_pairs_alone(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_tiny(tmp_path / "other", seed=7, max_position_embeddings=4096)
    first = learn_on(tmp_path, model, "good")
    assert start(tmp_path, other) == 1
    message = capsys.readouterr().err
    for part in (f'data folder "{tmp_path / "data"}"', 'another base model ("tiny"', '"other"', "--new-base shelve"):
        assert part in message
    with running(tmp_path, other, store__new_base="shelve") as daemon, daemon.http() as http:
        assert "were queued" not in daemon.log
        shelved = http.get("/v1/adapters/tom").json()
        assert (shelved["version"], shelved["pairs_queued"], shelved["pairs_trained"]) == (0, 0, 0)
        assert daemon.stop() == 0
    with running(tmp_path, model, align__enabled="false") as daemon, daemon.http() as http:
        assert http.get("/v1/adapters/tom").json()["series"] == first["series"]


def learn_on(folder: Path, model: Path, word: str, **settings: str) -> dict[str, Any]:
    """Serve `model`, teach tom four pairs, and wait until all that he ever gave are learned and saved."""
    with running(folder, model, store__save_every_s=0.05, **settings) as daemon, daemon.http() as http:
        for i in range(4):
            body = {"user": "tom", "prompt": f"q{i}", "chosen": f"{word} {i}", "rejected": f"bad {i}"}
            assert http.post("/v1/feedback", json=body).status_code == 200
        wait_until_learned(http)
        assert daemon.stop() == 0
    with running(folder, model, align__enabled="false") as daemon, daemon.http() as http:
        return dict(http.get("/v1/adapters/tom").json())


def wait_until_learned(http: httpx2.Client) -> dict[str, Any]:
    """Tom's adapter once none of his pairs waits."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        body = http.get("/v1/adapters/tom").json()
        if body.get("pairs_queued") == 0:
            return dict(body)
        time.sleep(0.05)
    raise AssertionError(f"pairs still wait: {body}")


def early_answer(daemon: LiveDaemon) -> int:
    """The status of the first answer of a daemon that has just been started."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            with daemon.http() as http:
                return http.get("/v1/models").status_code
        except httpx2.TransportError:
            time.sleep(0.01)
    raise AssertionError(daemon.log)


def test_the_box_is_watched_until_the_last_answer_has_ended(tmp_path: Path, model: Path) -> None:
    body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with running(tmp_path, model, serving__drain_s=60.0) as daemon, daemon.http() as http:
        with http.stream("POST", "/v1/completions", json=body) as stream:
            chunks = stream.iter_lines()
            next(chunks)
            daemon.signal(signal.SIGTERM)
            seen = set()
            while len(seen) < 4 and next(chunks, None) is not None:
                status = daemon.status()
                if status["phase"] == "draining":
                    seen.add(json.dumps(status["device"]))
            assert len(seen) == 4
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0


def test_a_second_signal_stops_at_once(tmp_path: Path, model: Path) -> None:
    body = b'{"prompt": "a", "max_tokens": 4000, "ignore_eos": true, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with running(tmp_path, model, serving__drain_s=60.0) as daemon, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(daemon.socket))
        client.sendall(head + body)
        assert client.recv(4096)
        started = time.monotonic()
        daemon.signal(signal.SIGTERM)
        until_it_stops(daemon)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait(30) == 0
        assert time.monotonic() - started < 30


@pytest.mark.slow
def test_a_restart_counts_the_pairs_that_wait_and_no_others(tmp_path: Path, model: Path) -> None:
    """Held-out pairs and those that are replayed are read again, too."""
    learning = {"store__save_every_s": 0.1, "guard__held_out_share": 0.25}
    with running(tmp_path, model, **learning) as daemon, daemon.http() as http:
        teach(http, "ann", pairs=12)
        assert daemon.stop() == 0
    with running(tmp_path, model, align__enabled="false") as daemon, daemon.http() as http:
        assert "were queued" not in daemon.log
        for number in range(3):
            pair = {"user": "ann", "prompt": f"waits {number}", "chosen": "yes", "rejected": "no"}
            assert http.post("/v1/feedback", json=pair).status_code == 200
        assert daemon.stop() == 0
    with running(tmp_path, model, align__enabled="false") as daemon:
        assert "3 pairs were queued and go on" in daemon.log


def test_the_token_is_in_no_log_line_and_in_no_status(daemon: LiveDaemon) -> None:
    with daemon.http() as http:
        http.get("/v1/status", headers={"Authorization": "Bearer secret"})
        http.get("/v1/nothing", headers={"Authorization": "Bearer secret"})
        assert "secret" not in http.get("/v1/status").text
        settings = http.get("/v1/settings").json()
        assert (settings["api"]["token"], settings["store"]["data_dir"]) == ("", str(daemon.data))
    assert "secret" not in daemon.log


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "chat_template.jinja"],
)
def test_a_file_of_the_model_that_is_a_pointer_of_git_lfs_is_told(model: Path, tmp_path: Path, name: str) -> None:
    cloned = Path(shutil.copytree(model, tmp_path / "cloned"))
    (cloned / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 98304\n")
    with pytest.raises(ModelMissing, match=f'cloned": {name} is a Git LFS pointer, not the file: run `git lfs pull`'):
        find_model(ModelSettings(path=str(cloned)))


def test_a_download_that_broke_off_is_told(model: Path, tmp_path: Path) -> None:
    cloned = Path(shutil.copytree(model, tmp_path / "cloned"))
    data = (cloned / "model.safetensors").read_bytes()
    for left in (len(data) - 1, len(data) // 2, 100):
        (cloned / "model.safetensors").write_bytes(data[:left])
        with pytest.raises(ModelMissing, match=f"model.safetensors broke off: {left:,} of .* bytes are there: downl"):
            find_model(ModelSettings(path=str(cloned)))


@pytest.mark.parametrize(
    "data",
    [b"\x10" + bytes(7) + b"not json at all!", b"\x02" + bytes(7) + b"{}", b"\xff" * 20, b"\x04" + bytes(7) + b"null"],
)
def test_what_is_no_safetensors_file_is_left_to_its_reader(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    assert why_not_whole(tmp_path / "model.safetensors") == ""
