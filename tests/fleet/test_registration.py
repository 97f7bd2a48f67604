"""Boxes register at an ingress; the commands for a box that Ray keeps refuse what cannot be. Without Ray."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edged.settings.access import token_hash
from examples.quickstart.daemon import free_port
from tests.cli.conftest import edged, wait_for
from tests.fleet.conftest import Process

FLEET, USE = "fleet-token-with-many-letters", "use-token-with-many-letters"
INGRESS = "http://127.0.0.1:1"


@dataclass
class Asked:
    """An ingress without a listed node."""

    process: Process
    url: str

    def ask(self, method: str, path: str, body: Any = None, token: str = FLEET) -> tuple[int, Any]:
        data, headers = None if body is None else json.dumps(body).encode(), {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())["error"]["message"]

    def names(self) -> list[str]:
        return [node["name"] for node in self.ask("GET", "/v1/fleet")[1]["nodes"]]

    def answers(self) -> bool:
        try:
            return self.ask("GET", "/healthz")[0] == 200
        except OSError:
            return False


@pytest.fixture(scope="module")
def ingress(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder, port = tmp_path_factory.mktemp("registration"), free_port()
    token = folder / "token"
    token.touch(0o600)
    token.write_text(FLEET + "\n")
    (folder / "ingress.toml").write_text(
        f'''[access]
tokens = [
  {{ name = "fleet", sha256 = "{token_hash(FLEET)}", roles = ["use", "metrics", "fleet"], users = ["*"] }},
  {{ name = "ann", sha256 = "{token_hash(USE)}", roles = ["use", "train", "metrics"], users = ["ann"] }},
]
[fleet]
ingresses = ["http://127.0.0.1:{port}"]
listen = "127.0.0.1:{port}"
token_file = "{token}"
wait_s = 0.2
[store]
data_dir = "{folder / "data"}"
'''
    )
    process = Process(["fleet", "serve", "-c", str(folder / "ingress.toml")], folder / "ingress.log")
    asked = Asked(process, f"http://127.0.0.1:{port}")
    process.start()
    try:
        wait_for(asked.answers, process.log)
        yield asked
    finally:
        process.kill()
    assert "Traceback" not in process.log.read_text()


def test_an_ingress_that_no_box_has_joined_says_so(ingress: Asked) -> None:
    status, message = ingress.ask("POST", "/v1/chat/completions", {"user": "ann", "messages": []}, USE)
    assert (status, message) == (503, "no box has registered yet")


def test_a_box_registers_again_and_again_and_stays_over_a_restart_until_it_leaves(ingress: Asked) -> None:
    for _ in range(2):
        assert ingress.ask("PUT", "/v1/fleet/nodes/hall", {"url": "https://10.0.0.6:8137"})[0] == 200
    assert ingress.names() == ["hall"]
    assert ingress.process.log.read_text().count("node hall has registered") == 1
    ingress.process.kill()
    ingress.process.start()
    wait_for(ingress.answers, ingress.process.log)
    assert ingress.names() == ["hall"]
    assert ingress.ask("DELETE", "/v1/fleet/nodes/hall")[0] == 200
    assert ingress.names() == []
    assert ingress.ask("DELETE", "/v1/fleet/nodes/hall") == (404, 'no node "hall" has registered here')


def test_only_the_fleet_s_token_registers(ingress: Asked) -> None:
    body = {"url": "https://10.0.0.6:8137"}
    assert ingress.ask("PUT", "/v1/fleet/nodes/hall", body, USE)[0] == 403
    assert ingress.ask("PUT", "/v1/fleet/nodes/hall", body, "another")[0] == 401
    assert ingress.ask("DELETE", "/v1/fleet/nodes/hall", token=USE)[0] == 403


@pytest.mark.parametrize(
    ("name", "body", "sentence"),
    [
        ("a%20b", {"url": "https://10.0.0.6:8137"}, '"a b" cannot name a node'),
        ("hall", {"url": "https://10.0.0.6:8137/v1"}, "without a path"),
        ("hall", {"url": "http://10.0.0.6:8137"}, "registers with https"),
        ("hall", {"url": 7}, "nodes.hall"),
        ("hall", [], "nodes.hall"),
    ],
)
def test_what_is_no_box_is_refused(ingress: Asked, name: str, body: object, sentence: str) -> None:
    status, message = ingress.ask("PUT", f"/v1/fleet/nodes/{name}", body)
    assert status == 400
    assert sentence in message or "string" in message
    assert ingress.names() == []


def test_a_second_ingress_of_one_address_is_refused(ingress: Asked) -> None:
    done = edged("fleet", "serve", "-c", ingress.process.arguments[-1])
    assert done.returncode == 2
    assert "in use" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["init"], 'api.node = ""'),
        (["join", "10.0.0.5", "--name", "a b"], '"a b"'),
        (["join", "10.0.0.5", "--name", "hall"], "fleet.url is not set"),
        (["join", "10.0.0.5", "--name", "hall", "--url", "10.0.0.6"], "write http://HOST:PORT"),
        (["join", "10.0.0.5", "--name", "hall", "--url", "https://10.0.0.6:8137"], "api.certificate"),
        (["leave"], 'api.node = ""'),
    ],
)
def test_a_box_that_cannot_join_is_told_why(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise SystemExit('Ray is imported')")
    config = tmp_path / "fleet.toml"
    config.write_text(f'[fleet]\ningresses = ["{INGRESS}"]\n')
    place = {"PYTHONPATH": str(tmp_path), "EDGED_STORE__DATA_DIR": "/tmp/edged-none"}
    done = edged("fleet", *arguments, "-c", str(config), **place)
    assert done.returncode == 2, done.stdout + done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_without_ray_the_way_out_is_named(tmp_path: Path) -> None:
    hide = "import sys; sys.modules['ray'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(hide)
    done = edged("fleet", "join", "10.0.0.5", "--name", "a", "--url", "http://127.0.0.1:2", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "pip install 'edged[fleet]'" in done.stderr
    assert "Traceback" not in done.stderr
