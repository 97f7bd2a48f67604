"""A small HTTP client for the daemon: Unix socket or TCP, JSON, server-sent events; standard library only."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edged.settings.addresses import MAX_PATH_BYTES, socket_paths, too_long

CONNECT_TIMEOUT_S = 10.0
_ASK_AGAIN_S = 0.5
"""Delay between two attempts while the model is being loaded."""


class DaemonError(Exception):
    """An error of a request to the daemon or of the command that sends it; the message says why and what to do."""


class NotRunning(DaemonError):
    """The error that no daemon answers at the address."""


class Refused(DaemonError):
    """An error answer of the daemon. `status` is the HTTP status, `code` is OpenAI's error field."""

    def __init__(self, status: int, answer: Mapping[str, Any]) -> None:
        """Take the message from the body `answer`, or make one of the status if it has no OpenAI `error` object."""
        error = answer.get("error")
        error = error if isinstance(error, dict) else {}
        reason = http.client.responses.get(status, "")
        super().__init__(str(error.get("message") or f"the daemon answered {status} {reason}"))
        self.status = status
        self.code = str(error.get("code") or "")


@dataclass(frozen=True)
class Address:
    """The daemon's address: Unix sockets in order of preference, or one TCP host and port with its token."""

    sockets: tuple[Path, ...] = ()
    host: str = ""
    port: int = 0
    token: str = ""
    tls: bool = False
    """Whether TCP is HTTPS; certificates are checked by the system's authorities, or those in SSL_CERT_FILE."""

    def __str__(self) -> str:
        scheme = "https" if self.tls else "http"
        return f"{scheme}://{self.host}:{self.port}" if self.host else " or ".join(map(str, self.sockets))


def find_address(
    socket_path: str = "", url: str = "", token: str = "", environ: Mapping[str, str] = os.environ
) -> Address:
    """Return the address that flags name, else the environment.

    It is `url`, else `socket_path`, else `EDGED_URL`, else `EDGED_SOCKET`, else every runtime folder where a daemon
    of this user or of the system may listen. Raises DaemonError on a malformed URL.
    """
    if not socket_path:
        url = url or environ.get("EDGED_URL", "")
    if url:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        with contextlib.suppress(ValueError):  # a port that is no number, or too large
            if parts.scheme in ("http", "https") and parts.hostname:
                tls = parts.scheme == "https"
                return Address(host=parts.hostname, port=parts.port or (443 if tls else 80), token=token, tls=tls)
        raise DaemonError(f'address "{url}" is not of the form http://HOST:PORT')
    return Address(sockets=socket_paths(socket_path, environ))


class _UnixConnection(http.client.HTTPConnection):
    """An HTTP connection over the first of several Unix sockets that accepts."""

    def __init__(self, paths: tuple[Path, ...], timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._paths = paths

    def connect(self) -> None:
        refused: OSError = FileNotFoundError("no socket path")
        for path in self._paths:
            if too_long(path):
                raise DaemonError(f"socket path {path} is longer than {MAX_PATH_BYTES} bytes: use a shorter one")
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(CONNECT_TIMEOUT_S)
            try:
                self.sock.connect(str(path))
                return self.sock.settimeout(self.timeout)
            except OSError as error:
                self.close()
                refused = error
            if isinstance(refused, PermissionError):
                how = "api.socket_mode; under systemd SocketMode= and SocketGroup= of edged.socket"
                way_out = f"whoever runs edged lets accounts in by the socket's mode and group ({how})"
                raise DaemonError(f"no permission for {path}: {way_out}")
        raise refused


@dataclass(eq=False)
class Client:
    """One keep-alive connection to the daemon; use one client per thread. `timeout_s` bounds each wait for data.

    While the daemon loads its model, a request is repeated for up to `patience_s` (the request that starts the daemon
    by its socket, too); `on_wait` is then called once with the reason.
    """

    address: Address
    timeout_s: float = 300.0
    patience_s: float = 0.0
    on_wait: Callable[[str], None] = lambda message: None
    _connection: http.client.HTTPConnection | None = field(default=None, init=False)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the daemon cancels generations that were still running on it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at `path`."""
        return self.call("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send `body` to `path` and return the JSON answer."""
        return self.call("POST", path, body)

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | bytes | Iterable[bytes] | None = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        """Send one request and return its JSON answer. Raises NotRunning, Refused or DaemonError."""
        return _object(self._body(self._open(method, path, body, content_type)))

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """POST `body` and yield each server-sent event's JSON until `[DONE]`.

        Leaving the iteration early closes the connection, which cancels the request.
        """
        done = False
        try:
            for line in self.lines(path, body):
                if line == b"data: [DONE]":
                    done = True
                elif line.startswith(b"data: "):
                    event = _object(line[len(b"data: ") :])
                    if "error" in event:
                        raise Refused(200, event)
                    yield event
        finally:
            if not done:
                self.close()
        if not done:
            raise DaemonError(f"the daemon at {self.address} ended the answer before it was complete")

    def json_lines(self, path: str) -> Iterator[dict[str, Any]]:
        """Yield the objects of the JSON-lines document at `path` as they arrive."""
        return (_object(line) for line in self.lines(path) if line)

    def lines(self, path: str, body: dict[str, Any] | None = None) -> Iterator[bytes]:
        """GET `path`, or POST `body` to it if there is one, and yield the answer's lines as they arrive."""
        rest = b""
        for data in self._pieces(self._open("POST" if body else "GET", path, body)):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield line.rstrip(b"\r")
        if rest:
            yield rest

    def download(self, path: str) -> tuple[http.client.HTTPMessage, Iterator[bytes]]:
        """GET `path`; returns the answer's headers and its body's chunks as they arrive."""
        response = self._open("GET", path)
        return response.headers, self._pieces(response)

    def _pieces(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        try:
            # Not readline: it mistakes a connection that breaks between two chunks for the end of the document.
            while data := response.read1(1 << 16):
                yield data
            # One whose length was told would be taken for unread, and the next request sent twice.
            response.close()
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from None

    def _open(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | bytes | Iterable[bytes] | None = None,
        content_type: str = "application/json",
    ) -> http.client.HTTPResponse:
        """Send a request and return its response, body unread; repeated while the model is being loaded."""
        payload = json.dumps(body).encode() if isinstance(body, dict) else body
        headers = {"Content-Type": content_type} if payload is not None else {}
        if self.address.token:
            headers["Authorization"] = f"Bearer {self.address.token}"
        waits, until = False, time.monotonic() + self.patience_s
        while True:
            response = self._ask(method, path, payload, headers)
            if response.status < 400:
                return response
            data = self._body(response)
            refused = Refused(response.status, _object(data) if data.startswith(b"{") else {})
            if refused.code != "loading" or time.monotonic() >= until:
                raise refused
            if not waits:
                self.on_wait(str(refused))
            waits = True
            time.sleep(_ASK_AGAIN_S)

    def _ask(
        self, method: str, path: str, payload: bytes | Iterable[bytes] | None, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        """Send a request and return its response, body unread; reconnects once if a kept connection was closed."""
        while True:
            kept = self._connection is not None
            connection = self._connection = self._connection or self._connect()
            try:
                # A daemon that refuses a body early may close before all of it was sent; its answer can still be read.
                with contextlib.suppress(BrokenPipeError):
                    connection.request(method, path, payload, headers)
                return connection.getresponse()
            except TimeoutError:
                self.close()
                raise DaemonError(f"the daemon at {self.address} gave no answer for {self.timeout_s:g} s") from None
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if not kept:
                    raise self._lost(error) from None

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from None

    def _connect(self) -> http.client.HTTPConnection:
        at = self.address
        connection: http.client.HTTPConnection = _UnixConnection(at.sockets, self.timeout_s)
        if at.host:
            kind = http.client.HTTPSConnection if at.tls else http.client.HTTPConnection
            connection = kind(at.host, at.port, timeout=self.timeout_s)
        try:
            connection.connect()
        except ssl.SSLError as error:
            raise DaemonError(f"{at}: {error.reason}; SSL_CERT_FILE names the authority's certificate") from None
        except OSError:
            raise NotRunning(f'no daemon answers on {at}: start it with "edged serve"') from None
        return connection

    def _lost(self, error: Exception) -> DaemonError:
        self.close()
        return DaemonError(f"the connection to {self.address} broke: {str(error) or type(error).__name__}")


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise DaemonError(f"the answer is not a JSON object: {data[:80]!r}; is another program on that address?")
    return value
