"""A model hub on this box: an HTTP server that answers the hub's client as the Hugging Face hub does."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    """Repositories by name: commits with their files, branches, and whether terms must be accepted first."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, Path]] = {}
        self.refs: dict[str, dict[str, str]] = {}
        self.gated: set[str] = set()
        self.says_larger = 0
        """Bytes by which each file is said to be larger than it is."""
        self.asked: list[str] = []
        self.url = ""

    def push(self, name: str, folder: Path, ref: str = "main") -> str:
        """Make a commit of a folder's files, which `ref` names from then on; return it."""
        made = hashlib.sha1(f"{name} {folder}".encode()).hexdigest()
        self.commits.setdefault(name, {})[made] = folder
        self.refs.setdefault(name, {})[ref] = made
        return made

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the answer to a request."""
        self.asked.append(path)
        words = [unquote(word) for word in urlsplit(path).path.strip("/").split("/")]
        words = words[2:] if words[:2] == ["api", "models"] else words
        name, kind, asked, *file = ["/".join(words[:2]), *(words[2:] or ["revision", "main"])]
        if name not in self.commits:
            return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b""
        sha = self.refs[name].get(asked, asked)
        if (folder := self.commits[name].get(sha)) is None:
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"}, b""
        if name in self.gated and kind == "resolve":
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, b""
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        if kind == "revision":
            siblings = [{"rfilename": each} for each in files]
            return _json({"_id": "0", "id": name, "modelId": name, "sha": sha, "siblings": siblings})
        if kind == "tree":
            return _json([self._entry(each, data) for each, data in files.items()])
        data = files["/".join(file)]
        return 200, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}, data

    def _entry(self, name: str, data: bytes) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that answers at its `url` until the context ends."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            size = len(body) + (hub.says_larger if self.command == "HEAD" else 0)
            for name, value in {**headers, "Content-Length": str(size)}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
