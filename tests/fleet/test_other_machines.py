"""Nodes as on other machines: TLS, a token of role "fleet", and callers who stay who they are."""

from __future__ import annotations

import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from edged.settings.access import token_hash
from examples.quickstart.daemon import free_port
from tests.cli.conftest import edged, wait_for
from tests.fleet.conftest import Process, ask
from tests.models import save_tiny

FLEET, PLAIN, ANN = "fleet-token-with-many-letters", "plain-token-with-many-letters", "ann-token-with-many-letters"


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    made, key = folder / "node.pem", folder / "node.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=node"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(made)]
    subprocess.run(command, check=True, capture_output=True)
    return made, key


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """URLs of an ingress and of its one node, which speaks TLS alone; and the node's certificate."""
    folder = tmp_path_factory.mktemp("far")
    model, (made, key), port, own = save_tiny(folder / "tiny"), certificate(folder), free_port(), free_port()
    (folder / "node.toml").write_text(
        f'''[access]
tokens = [
  {{ name = "fleet", sha256 = "{token_hash(FLEET)}", roles = ["use", "train", "metrics", "fleet"], users = ["*"] }},
  {{ name = "plain", sha256 = "{token_hash(PLAIN)}", roles = ["use", "train"], users = ["*"] }},
]
[api]
listen = "127.0.0.1:{port}"
certificate = "{made}"
key = "{key}"
'''
    )
    token = folder / "token"
    token.write_text(FLEET + "\n")
    token.chmod(0o600)
    (folder / "ingress.toml").write_text(
        f'''[access]
tokens = [ {{ name = "ann", sha256 = "{token_hash(ANN)}", roles = ["use", "train", "metrics"], users = ["ann"] }} ]
[fleet]
nodes = {{ far = "https://127.0.0.1:{port}" }}
listen = "127.0.0.1:{own}"
token_file = "{token}"
authority = "{made}"
'''
    )
    place = ["--model", str(model), "--socket", str(folder / "node.sock"), "--data-dir", str(folder / "data")]
    node = Process(["serve", "-c", str(folder / "node.toml"), *place], folder / "node.log")
    ingress = Process(["fleet", "serve", "-c", str(folder / "ingress.toml")], folder / "ingress.log")
    node.start()
    ingress.start()
    try:
        wait_for(lambda: _ready(f"http://127.0.0.1:{own}"), ingress.log, seconds=90)
        yield f"http://127.0.0.1:{own}", f"https://127.0.0.1:{port}", made
    finally:
        for process in (node, ingress):
            process.kill()
    assert FLEET not in node.log.read_text() + ingress.log.read_text()


def _ready(url: str) -> bool:
    try:
        return ask(f"{url}/readyz")[0] == 200
    except OSError:
        return False


def request(url: str, token: str = "", body: bytes | None = None, made: Path | None = None, **headers: str) -> int:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {}), **headers}
    context = ssl.create_default_context(cafile=made) if made else None
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


CHAT = b'{"user": "%s", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}'


def test_a_caller_acts_at_a_node_for_its_own_users_alone(far: tuple[str, str, Path]) -> None:
    url = far[0] + "/v1/chat/completions"
    assert request(url, ANN, CHAT % b"ann") == 200
    assert request(url, ANN, CHAT % b"ben") == 403
    assert request(url, "", CHAT % b"ann") == 401
    # A client's own word about whom it asks for goes no further than the ingress.
    forged = {"X-Edged-Caller": '{"name": "ben", "roles": ["use"], "users": ["ben"]}'}
    assert request(url, ANN, CHAT % b"ben", **forged) == 403


def test_a_node_s_load_and_its_callers_are_for_the_fleet_alone(far: tuple[str, str, Path]) -> None:
    _, url, made = far
    assert request(f"{url}/v1/events?events=load", PLAIN, made=made) == 403
    forged = {"X-Edged-Caller": '{"name": "ben", "roles": ["use"], "users": ["ben"]}'}
    assert request(f"{url}/v1/models", PLAIN, made=made, **forged) == 403
    assert request(f"{url}/v1/models", FLEET, made=made, **forged) == 200
    assert request(f"{url}/v1/drain", FLEET, b"{}", made=made) == 403


def test_a_node_whose_certificate_is_not_known_is_not_asked(far: tuple[str, str, Path]) -> None:
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        request(f"{far[1]}/healthz")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"EDGED_API__KEY": "x.key"}, "api.key and api.authority need api.certificate"),
        ({"EDGED_API__CERTIFICATE": "/nowhere.pem"}, "cannot be used: No such file or directory"),
    ],
)
def test_files_that_make_no_tls_are_refused(settings: dict[str, str], sentence: str, tmp_path: Path) -> None:
    place = ["--socket", str(tmp_path / "s"), "--data-dir", str(tmp_path / "d"), "--listen", "127.0.0.1:0"]
    refused = edged("serve", *place, **settings)
    assert refused.returncode != 0
    assert sentence in refused.stderr
