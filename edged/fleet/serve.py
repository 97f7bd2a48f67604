"""The process of an ingress: its token, its listener, its signals."""

import asyncio
import contextlib
import logging
import os
import signal
import ssl
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

import edged
from edged.fleet.homes_file import HomesFile
from edged.fleet.ingress import Ingress, make_ingress
from edged.fleet.members import Members
from edged.http.access import Access, is_loopback
from edged.http.connections import Site
from edged.http.loop_shares import LoopShares
from edged.http.sockets import tcp_socket, tell_of_full_tables_once
from edged.placement.policies import POLICIES
from edged.runtime import logs
from edged.runtime.process import allow_files
from edged.settings.load import ConfigError, Settings, nearest
from edged.store.data_dir import data_folder

log = logging.getLogger("edged.fleet")
_HANDLERS_END_S = 1.0


def check(settings: Settings) -> None:
    """Raise ConfigError for settings that no ingress can be made of."""
    fleet = settings.fleet
    if not fleet.nodes:
        raise ConfigError("a fleet needs nodes: give --node NAME=URL for each, or fleet.nodes")
    if fleet.policy not in POLICIES:
        raise ConfigError(f'fleet.policy = "{fleet.policy}": {nearest(fleet.policy, POLICIES)}')
    for user, home in fleet.homes.items():
        if home not in fleet.nodes:
            raise ConfigError(
                f'fleet.homes: the home of {user} is "{home}", which is no node: {", ".join(fleet.nodes)}'
            )
    if not fleet.token_file:
        for name, url in fleet.nodes.items():
            if not is_loopback(urlsplit(url).hostname or ""):
                way_out = "make one at each (`edged token new`) and give --token-file"
                raise ConfigError(f'node "{name}" = "{url}" is another machine and needs a token: {way_out}')


def token_of(settings: Settings) -> str:
    """Return the token in `fleet.token_file`, "" where none is named. Raises ConfigError; its message has no token."""
    if not settings.fleet.token_file:
        return ""
    path = Path(settings.fleet.token_file).expanduser()
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f'token file "{path}" may be read by others: chmod 600 it')
        token = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'token file "{path}" cannot be read: {error}') from None
    if not token or not token.isascii() or len(token.split()) != 1:
        raise ConfigError(f'token file "{path}" has no token: write the line that `edged token new` printed')
    return token


def tls_of(settings: Settings) -> ssl.SSLContext:
    """Return the TLS of connections to https nodes. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=settings.fleet.authority or None)
    except OSError as error:
        raise ConfigError(f'fleet.authority = "{settings.fleet.authority}" cannot be used: {error}') from None


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
    tell_of_full_tables_once(loop)
    access = Access(settings.access, settings.api.token)
    homes_file = HomesFile(data_folder(settings.store.data_dir, os.environ), settings.fleet.listen)
    ingress = Ingress(settings, Members(settings.fleet, homes_file), token, tls)
    listener = tcp_socket(settings.fleet.listen, access.has_tokens, "fleet.listen")
    with contextlib.closing(listener):
        runner = web.AppRunner(
            make_ingress(ingress, access), handler_cancellation=True, shutdown_timeout=_HANDLERS_END_S
        )
        await runner.setup()
        try:
            await Site(runner, listener, settings.limits, LoopShares()).start()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop.set)
            loop.add_signal_handler(signal.SIGHUP, _reload, ingress, access, load)
            nodes, listen = ", ".join(settings.fleet.nodes), settings.fleet.listen
            message = (
                f"edged {edged.__version__} answers on http://{listen} for {nodes}; policy {settings.fleet.policy}"
            )
            logs.event(log, logging.INFO, "ready", message, nodes=list(settings.fleet.nodes), listen=listen)
            await stop.wait()
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
