"""The process of an ingress: its token, its listener, its signals."""

import asyncio
import contextlib
import logging
import os
import signal
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

import edged
from edged.fleet.app import make_ingress
from edged.fleet.credentials import tls_of, token_of
from edged.fleet.ingress import Ingress
from edged.fleet.members import Members
from edged.fleet.state_file import StateFile, lock_file
from edged.http import sockets
from edged.http.access import Access
from edged.http.connections import Site
from edged.http.loop_shares import LoopShares
from edged.placement.policies import POLICIES
from edged.runtime import logs
from edged.runtime.process import allow_files
from edged.settings.addresses import is_loopback
from edged.settings.load import ConfigError, Settings
from edged.settings.wrong import nearest
from edged.store.data_dir import data_folder
from edged.store.lock import FileLock, LockTaken

log = logging.getLogger("edged.fleet")


def check(settings: Settings) -> None:
    """Raise ConfigError for settings that no ingress can be made of."""
    fleet = settings.fleet
    if not fleet.nodes and not fleet.ingresses:
        raise ConfigError("a fleet needs nodes: give --node NAME=URL for each, or fleet.nodes")
    if fleet.policy not in POLICIES:
        raise ConfigError(f'fleet.policy = "{fleet.policy}": {nearest(fleet.policy, POLICIES)}')
    for user, home in fleet.homes.items():
        if home not in fleet.nodes and not fleet.ingresses:
            raise ConfigError(
                f'fleet.homes: the home of {user} is "{home}", which is no node: {", ".join(fleet.nodes)}'
            )
    if not fleet.token_file:
        for name, url in fleet.nodes.items():
            if not is_loopback(urlsplit(url).hostname or ""):
                way_out = "make one at each (`edged token new`) and give --token-file"
                raise ConfigError(f'node "{name}" = "{url}" is another machine and needs a token: {way_out}')


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock by which Ray's side finds the ingress; a disk that fails is told of, and the ingress goes on."""
    lock = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = FileLock(path)
    except (LockTaken, OSError) as error:
        log.error("the ingress cannot be found by Ray: %s", error)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def run_ingress(settings: Settings, load: Callable[[], Settings]) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reads the settings again by `load`.

    Raises ConfigError, AccessError or ListenError before anything is served.
    """
    check(settings)
    token, tls = token_of(settings), tls_of(settings)
    logs.set_up(
        settings.log, logs.secrets_of(settings, os.environ) | ({token} if token else set()), os.environ, sys.stderr
    )
    allow_files()
    try:
        asyncio.run(_serve(settings, token, tls, load))
    finally:
        logs.take_down()


async def _serve(settings: Settings, token: str, tls: ssl.SSLContext, load: Callable[[], Settings]) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    sockets.tell_of_full_tables_once(loop)
    access = Access(settings.access, settings.api.token)
    own_tls, listen = sockets.tls_of(settings.api), settings.fleet.listen
    folder = data_folder(settings.store.data_dir, os.environ)
    members = Members(settings.fleet, StateFile(folder, listen, "fleet"), StateFile(folder, listen, "members"))
    ingress = Ingress(settings, members, token, tls)
    listener, drain_s = sockets.tcp_socket(listen, access.has_tokens, "fleet.listen"), settings.serving.drain_s
    with contextlib.closing(listener), _locked(lock_file(settings)):
        app = make_ingress(ingress, access)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=drain_s)
        await runner.setup()
        try:
            await Site(runner, listener, settings.limits, LoopShares(), own_tls).start()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop.set)
            loop.add_signal_handler(signal.SIGHUP, _reload, ingress, access, load)
            nodes, where = list(ingress.members.by_name), f"{'https' if own_tls else 'http'}://{listen}"
            for_whom = ", ".join(nodes) or "boxes that register"
            message = f"edged {edged.__version__} answers on {where} for {for_whom}; policy {settings.fleet.policy}"
            logs.event(log, logging.INFO, "ready", message, nodes=nodes, listen=listen)
            await stop.wait()
            message = f"the ingress stops: running answers have {drain_s:g} s"
            logs.event(log, logging.INFO, "stopping", message, drain_s=drain_s)
        finally:
            await runner.cleanup()
    logs.event(log, logging.INFO, "stopped", "the ingress has stopped")


def _reload(ingress: Ingress, access: Access, load: Callable[[], Settings]) -> None:
    """Take other settings over; wrong ones change nothing, and the log says why."""
    try:
        settings = load()
        check(settings)
        access.configure(settings.access)
        ingress.configure(settings)
    except ValueError as error:
        log.error("the settings were not read again: %s", error)
    else:
        log.info("settings reloaded: nodes %s, policy %s", ", ".join(settings.fleet.nodes), settings.fleet.policy)
