"""Open WebUI as it is installed, against a daemon with the demo model: what it takes to be taught by thumbs.

Two answers to one question come through its REST API, one is rated up and one down, and the pair must be with edged
within five seconds. Then its export of feedback is imported. Open WebUI runs without torch, in its slim form, and looks
nothing up.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FUNCTION = ROOT / "integrations/open-webui/edged_ratings.py"
PERSON = {"name": "Ann", "email": "ann@example.org", "password": "correct horse battery"}
HEADERS = {"X-Request-Id": "{{MESSAGE_ID}}", "X-Edged-Task": "{{TASK}}"}
EDGED = (sys.executable, "-P", "-m", "edged.cli")
START_S, PAIR_S = 300.0, 5.0


def ask(url: str, body: Any = None, token: str = "") -> Any:
    """Return what a server answers as JSON. Raises SystemExit with its words where it refuses."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url}: {error.code} {error.read().decode()[:500]}") from None


def pairs_of(url: str, token: str) -> list[dict[str, Any]]:
    """Return the pairs that edged has."""
    request = urllib.request.Request(f"{url}/feedback", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        rows = [json.loads(line) for line in answer.read().decode().splitlines()]
    return [row for row in rows if "chosen" in row]


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when a server answers; raises with the end of its log where it ends before."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"{url} does not answer:\n{log.read_text(errors='replace')[-3000:]}")


def started(command: list[str], log: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process that writes into a log."""
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **environ})


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("open_webui", help="the command open-webui of its environment")
    parser.add_argument("--edged-port", type=int, default=8931)
    parser.add_argument("--port", type=int, default=8932)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), given.open_webui, given.edged_port, given.port)


def run(folder: Path, open_webui: str, edged_port: int, port: int) -> None:
    """Start both in a folder, have answers rated, and stop both."""
    about = ("token", "new", "open-webui", "--users", "*", "--identity", "header:X-OpenWebUI-User-Email", "--json")
    token = json.loads(subprocess.check_output([*EDGED, *about]))
    (folder / "edged.toml").write_text(token["toml"])
    where = ("--socket", str(folder / "socket"), "--data-dir", str(folder / "edged"), "-c", str(folder / "edged.toml"))
    url, page = f"http://127.0.0.1:{edged_port}/v1", f"http://127.0.0.1:{port}"
    daemon = started([*EDGED, "serve", "--listen", f"127.0.0.1:{edged_port}", *where], folder / "edged.log", {})
    environ = {
        **dict.fromkeys(
            ("OFFLINE_MODE", "USE_SLIM_DOCKER", "ENABLE_FORWARD_USER_INFO_HEADERS", "HF_HUB_OFFLINE"), "true"
        ),
        **dict.fromkeys(("ENABLE_OLLAMA_API", "ENABLE_VERSION_UPDATE_CHECK", "ANONYMIZED_TELEMETRY"), "false"),
        **{"DATA_DIR": str(folder), "WEBUI_SECRET_KEY": "of-this-trial", "RAG_EMBEDDING_ENGINE": "openai"},
    }
    other = started([open_webui, "serve", "--host", "127.0.0.1", "--port", str(port)], folder / "log", environ)
    try:
        wait_for(f"http://127.0.0.1:{edged_port}/readyz", daemon, folder / "edged.log")
        wait_for(f"{page}/health", other, folder / "log")
        rate(folder, page, url, token["token"], ask(f"{page}/api/v1/auths/signup", PERSON)["token"])
    finally:
        for process in (other, daemon):
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def rate(folder: Path, page: str, url: str, token: str, session: str) -> None:
    """Set Open WebUI up as integrations/open-webui says, ask twice, rate, wait for the pair, and import the export."""
    connections = {"OPENAI_API_BASE_URLS": [url], "OPENAI_API_KEYS": [token]}
    connections |= {"ENABLE_OPENAI_API": True, "OPENAI_API_CONFIGS": {"0": {"enable": True, "headers": HEADERS}}}
    ask(f"{page}/openai/config/update", connections, session)
    function = {"id": "edged_ratings", "name": "Ratings for edged", "meta": {"description": ""}}
    functions = f"{page}/api/v1/functions"
    ask(f"{functions}/create", {**function, "content": FUNCTION.read_text()}, session)
    ask(f"{functions}/id/edged_ratings/valves/update", {"url": url, "token": token}, session)
    ask(f"{functions}/id/edged_ratings/toggle", {}, session)
    (model,) = [each["id"] for each in ask(f"{page}/api/models", token=session)["data"] if each["id"] == "demo"]
    question = {"id": "question", "parentId": None, "role": "user", "content": "Name a dish for the evening."}
    said: dict[str, Any] = {"question": question}
    for message in ("answer-1", "answer-2"):
        asked = {"model": model, "messages": [question], "stream": False, "id": message}
        content = ask(f"{page}/api/chat/completions", asked, session)["choices"][0]["message"]["content"]
        said[message] = {"id": message, "parentId": "question", "role": "assistant", "content": content}
    history = {"messages": said, "currentId": "answer-2"}
    chat = ask(f"{page}/api/v1/chats/new", {"chat": {"title": "Dinner", "history": history}}, session)
    began = time.monotonic()
    for message, rating in (("answer-1", 1), ("answer-2", -1)):
        thumb = {"type": "rating", "data": {"rating": rating, "model_id": model}, "meta": {"message_id": message}}
        ask(f"{page}/api/v1/evaluations/feedback", {**thumb, "snapshot": {"chat": chat}}, session)
    while not (found := pairs_of(url, token)):
        if time.monotonic() - began > PAIR_S:
            raise SystemExit(f"no pair within {PAIR_S:g} s of the thumbs")
        time.sleep(0.1)
    answers = [said[message]["content"] for message in ("answer-1", "answer-2")]
    assert [(pair["user"], pair["chosen"], pair["rejected"]) for pair in found] == [(PERSON["email"], *answers)], found
    print(f"a pair of {PERSON['email']}'s {time.monotonic() - began:.1f} s after the thumbs")
    (folder / "export.json").write_text(
        json.dumps(ask(f"{page}/api/v1/evaluations/feedbacks/all/export", token=session))
    )
    taught = ("feedback", "import", str(folder / "export.json"), "--format", "open-webui", "--user", "ben", "--json")
    told = json.loads(subprocess.check_output([*EDGED, *taught, "--socket", str(folder / "socket"), "--no-wait"]))
    assert (told["pairs"], told["bad_lines"]) == (1, []), told
    (pair,) = [pair for pair in pairs_of(url, token) if pair["user"] == "ben"]
    assert [pair["chosen"], pair["rejected"]] == answers, pair
    print("the same pair from its export")


if __name__ == "__main__":
    main()
