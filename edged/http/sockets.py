"""Listening sockets: the Unix socket's file, the TCP address, or sockets that systemd opened for the daemon.

While a start is refused, requests on systemd's sockets are answered with 503, so that no client waits in vain. Imports
nothing slow.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import math
import os
import socket
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from edged.runtime import logs
from edged.settings.addresses import MAX_PATH_BYTES, socket_paths, too_long
from edged.settings.load import ApiSettings
from edged.store.lock import FileLock, LockTaken

log = logging.getLogger("edged.api")

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_TELL_AGAIN_S = 60.0
BACKLOG = 1024
"""Connections that may wait to be accepted."""
_FIRST_INHERITED = 3
"""SD_LISTEN_FDS_START of sd_listen_fds(3)."""


_OTHER_PATH = "stop that one, or give --socket another path"
_TCP_MESSAGE = "edged could not start: whoever runs this box finds the reason in its log"
_SILENT = logging.Logger("edged.http.sockets", logging.CRITICAL + 1)
"""A logger that drops aiohttp's tracebacks for requests that it cannot parse."""


class ListenError(RuntimeError):
    """Raised for an address that cannot be listened on; the message names it and the way out."""


class UnixListener:
    """A listening Unix socket, and the lock that keeps a second daemon off it.

    The lock is a file beside the socket, held until `close` or the end of the process, however it ends; so a socket
    file whose lock is free and that refuses connections is a dead daemon's, and is replaced.
    """

    def __init__(self, path: Path, mode: int = 0o660) -> None:
        """Bind and listen; `mode` are the socket file's permissions. Raises ListenError."""
        self.path = path
        if too_long(path):
            raise ListenError(f'socket path "{path}" is longer than {MAX_PATH_BYTES} bytes: give a shorter one')
        try:
            with contextlib.ExitStack() as undo:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._lock = FileLock(path.with_name(path.name + ".lock"))
                undo.callback(self._lock.release)
                _remove_stale(path)
                self.socket = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                self.socket.bind(os.fspath(path))
                # Connections are refused before `listen`, so that there is no moment with wider permissions.
                os.chmod(path, mode)
                self.socket.listen(BACKLOG)
                self._inode = os.stat(path).st_ino
                undo.pop_all()
        except LockTaken as error:
            who = f"another edged (pid {error.holder})"
            raise ListenError(f'socket "{path}" is served by {who}: {_OTHER_PATH}') from None
        except OSError as error:
            way_out = "give --socket (or EDGED_SOCKET) a path in a folder where this user may write"
            raise ListenError(f'cannot listen on "{path}": {error.strerror or error}; {way_out}') from None

    def close(self) -> None:
        """Close the socket, remove its file unless another one has replaced it, and release the lock."""
        with contextlib.suppress(OSError):
            if os.stat(self.path).st_ino == self._inode:
                self.path.unlink()
        self.socket.close()
        self._lock.release()


@dataclass(frozen=True, slots=True)
class Listeners:
    """All listening sockets of the daemon."""

    sockets: tuple[socket.socket, ...]
    inherited: bool
    """Whether all are systemd's, which goes on listening when the daemon has ended, and starts it again."""
    _held: contextlib.ExitStack

    @property
    def names(self) -> list[str]:
        """The address of each socket: a path, or HOST:PORT."""
        return [_name(item) for item in self.sockets]

    def close(self) -> None:
        """Close all of them. The files of those that systemd opened stay, since systemd goes on listening."""
        self._held.close()


def take_addresses(settings: ApiSettings, has_tokens: bool, environ: Mapping[str, str]) -> Listeners:
    """Take the sockets that systemd passed, and listen on the settings' addresses for the others. Raises ListenError.

    A Unix socket of systemd's replaces `api.socket`, TCP sockets of systemd's replace `api.listen`.
    """
    with contextlib.ExitStack() as held:
        taken = [held.enter_context(item) for item in inherited_sockets(environ, os.getpid())]
        inherited_tcp = [item for item in taken if item.family != socket.AF_UNIX]
        for item in inherited_tcp:
            _refuse_open_to_all(f"systemd's socket {_name(item)}", item.getsockname()[0], has_tokens)
        needs_unix, inherited = len(inherited_tcp) == len(taken), len(taken)
        if settings.listen and not inherited_tcp:
            taken.append(held.enter_context(tcp_socket(settings.listen, has_tokens)))
        if needs_unix:
            unix = UnixListener(socket_paths(settings.socket, environ)[0], int(settings.socket_mode, 8))
            held.callback(unix.close)
            taken.insert(0, unix.socket)
        return Listeners(tuple(taken), inherited == len(taken), held.pop_all())


def inherited_sockets(environ: Mapping[str, str], pid: int) -> list[socket.socket]:
    """Return the listening sockets that systemd has passed to process `pid` (sd_listen_fds(3)). Raises ListenError.

    Each call returns duplicates, which may be closed: a start that is then refused still answers on the same sockets.
    """
    count = environ.get("LISTEN_FDS", "")
    if environ.get("LISTEN_PID") != str(pid) or not count.isdigit():
        return []
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    taken: list[socket.socket] = []
    for number in range(int(count)):
        descriptor = _FIRST_INHERITED + number
        name = names[number] if number < len(names) and names[number] else f"number {number}"
        try:
            # Child processes of the daemon must not keep the address open.
            os.set_inheritable(descriptor, False)
            item = socket.socket(fileno=os.dup(descriptor))
            listens = item.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError as error:
            raise ListenError(f"systemd's socket {name} (descriptor {descriptor}) cannot be used: {error}") from None
        known = item.family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
        if not known or not listens or item.type != socket.SOCK_STREAM:
            way_out = "use ListenStream= with Accept=no"
            raise ListenError(f"systemd's socket {name} is not a Unix or TCP socket that listens: {way_out}")
        taken.append(item)
    return taken


def _name(item: socket.socket) -> str:
    address = item.getsockname()
    if isinstance(address, tuple):
        return f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
    return os.fsdecode(address)


def _refuse_open_to_all(what: str, host: str, has_tokens: bool) -> None:
    """Raise ListenError for an address beyond loopback where there are no tokens."""
    if not has_tokens and not ipaddress.ip_address(host).is_loopback:
        way_out = "set api.token or make one (`edged token new`), or listen on 127.0.0.1"
        raise ListenError(f"{what} is reachable from other machines: {way_out}")


def tcp_socket(listen: str, has_tokens: bool, setting: str = "api.listen") -> socket.socket:
    """Listen on `HOST:PORT` over TCP. Raises ListenError, also for an address beyond loopback without tokens."""
    host, separator, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not (port.isascii() and port.isdigit() and int(port[:6]) < 65536):
        raise ListenError(f'{setting} = "{listen}" is not HOST:PORT, such as 127.0.0.1:8080')
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ListenError(f'{setting} = "{listen}": {error.strerror or error}') from None
    _refuse_open_to_all(f'{setting} = "{listen}"', str(address[0]), has_tokens)
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error
        raise ListenError(f'{setting} = "{listen}" cannot be used: {why}') from None


def tls_of(settings: ApiSettings) -> ssl.SSLContext | None:
    """Return the TLS of TCP listeners; None without a certificate. Raises ListenError for files that do not fit."""
    if not settings.certificate:
        if settings.key or settings.authority:
            raise ListenError("api.key and api.authority need api.certificate: name it, or leave them out")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.certificate, settings.key or None)
        if settings.authority:
            context.load_verify_locations(settings.authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        files = ", ".join(filter(None, (settings.certificate, settings.key, settings.authority)))
        why = error.strerror or getattr(error, "reason", "") or error
        raise ListenError(f"api.certificate: {files} cannot be used: {why}") from None
    return context


def tell_of_full_tables_once(loop: asyncio.AbstractEventLoop) -> None:
    """Install an exception handler that logs one line, at most once a minute, when no file descriptor is free.

    asyncio retries every second, and by default logs each connection that it could not accept, with a traceback.
    """
    sparing = logs.Sparing(1, _TELL_AGAIN_S)

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _NO_DESCRIPTOR:
            loop.default_exception_handler(context)
        elif sparing.left_out("no descriptor") is not None:
            log.warning("no file descriptor is free (%s): new clients wait until others leave", error.strerror)

    loop.set_exception_handler(handle)


def _remove_stale(path: Path) -> None:
    """Remove a socket file that refuses connections. Raises ListenError for anything else at the path."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ListenError(f'"{path}" exists and is not a socket: remove it, or give --socket another path')
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except TimeoutError:
            # A program listens but is too busy to accept.
            pass
    raise ListenError(f'socket "{path}" is served by another program: {_OTHER_PATH}')


def over_tcp(request: web.BaseRequest) -> bool:
    """Whether a request came over TCP."""
    connection = request.transport.get_extra_info("socket") if request.transport else None
    return connection is None or connection.family != socket.AF_UNIX


async def answer_refusals(message: str, wait_s: float, environ: Mapping[str, str]) -> None:
    """Answer 503 with `message` for `wait_s` on the sockets of systemd's; over TCP without `message`.

    Raises ListenError where systemd's sockets cannot be used, OSError where they cannot be listened on.
    """
    loop = asyncio.get_running_loop()
    ends_s = loop.time() + wait_s

    async def refuse(request: web.BaseRequest) -> web.StreamResponse:
        shown = _TCP_MESSAGE if over_tcp(request) else f"edged could not start: {message}"
        error = {"message": shown, "type": "server_error", "param": None, "code": "start_refused"}
        headers = {"Retry-After": str(math.ceil(max(1.0, ends_s - loop.time())))}
        return web.json_response({"error": error}, status=503, headers=headers)

    runner = web.ServerRunner(web.Server(refuse, logger=_SILENT), shutdown_timeout=0.0)
    await runner.setup()
    try:
        for item in inherited_sockets(environ, os.getpid()):
            await web.SockSite(runner, item, backlog=BACKLOG).start()
        await asyncio.sleep(ends_s - loop.time())
    finally:
        await runner.cleanup()
