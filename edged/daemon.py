"""The daemon: takes its addresses, has its parts built, runs them, and stops them in order."""

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web
from transformers.utils import logging as transformers_logging

import edged
from edged.align.journal import Journal
from edged.api.app import make_app
from edged.api.event_router import EventRouter
from edged.api.metrics import STALLS
from edged.api.services import Lifecycle, Services
from edged.api.status import has_work, queue, refused
from edged.assembly import assemble, connect
from edged.engine.model.loading import ModelRefused
from edged.http.access import Access, AccessError
from edged.http.connections import Site
from edged.http.loop_shares import LoopShares
from edged.http.sockets import ListenError, Listeners, take_addresses, tell_of_full_tables_once, tls_of
from edged.models import ModelMissing
from edged.refusal import refuse_start, start_succeeded
from edged.reload import Reloader, ReloadResult
from edged.runtime import logs
from edged.runtime.process import allow_files, in_thread
from edged.runtime.systemd import ServiceManager
from edged.settings.load import ConfigError, Settings
from edged.store import Store, StoreError
from edged.store.base_models import OtherBase
from edged.store.data_dir import DATABASE_FILE, clear_leftovers, data_folder
from edged.text.tokenizer import TokenizerError

T = TypeVar("T")
log = logging.getLogger("edged")

_HANDLERS_END_S = 1.0
"""How long handlers may take to send their last bytes after the engine has stopped."""
_WATCH_EVERY_S = 1.0
_SWITCH_S = 0.0005
"""Time after which a thread lets others run Python: each call of torch or SQLite gives the interpreter back, and waits
so long to have it again while another thread computes. Python's own is 5 ms."""


def run_daemon(settings: Settings, load: Callable[[], Settings] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. A refused start has its reason on stderr.

    `load` reads the settings again when they shall be reloaded, as they were read for this start.
    """
    _set_up_logs(settings)
    transformers_logging.disable_progress_bar()
    # The library's own handler would write lines of another form.
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    # The watchdog's SIGABRT leaves the stacks of all threads in the journal.
    if not faulthandler.is_enabled():
        faulthandler.enable()
    allow_files()
    sys.setswitchinterval(_SWITCH_S)
    try:
        try:
            return asyncio.run(Daemon(settings, load).run())
        except (AccessError, ListenError, StoreError, ModelMissing, ModelRefused, OtherBase, TokenizerError) as error:
            refused = str(error)
        # A refusal may wait for minutes: not with a model in memory, which the error's traceback refers to.
        gc.collect()
        return refuse_start(refused, settings.log, os.environ)
    finally:
        logs.take_down()


def _set_up_logs(settings: Settings) -> None:
    logs.set_up(settings.log, logs.secrets_of(settings, os.environ), os.environ, sys.stderr)


class Daemon:
    """One daemon's life: take the addresses, load, serve, drain, stop."""

    def __init__(self, settings: Settings, load: Callable[[], Settings] | None) -> None:
        self._settings = settings
        self._lifecycle = Lifecycle()
        self._manager = ServiceManager(os.environ)
        self._reloader = Reloader(settings, load)
        self._reloads: set[asyncio.Task[None]] = set()
        self._loaded = asyncio.Event()
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Run the daemon and return the exit code. Raises the error that prevents a start."""
        loop = asyncio.get_running_loop()
        tell_of_full_tables_once(loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        # A terminal that closes ends what runs in it; elsewhere SIGHUP means "read your settings again".
        loop.add_signal_handler(signal.SIGHUP, self._on_signal if sys.stdin.isatty() else self._on_hangup)
        folder = data_folder(self._settings.store.data_dir, os.environ)
        store = await self._unless_stopped(f"opening {folder / DATABASE_FILE}", lambda: _open_store(folder))
        async with contextlib.AsyncExitStack() as parts:
            parts.callback(store.close)
            access = Access(self._settings.access, self._settings.api.token)
            self._reloader.check(lambda settings: _check_access(access, settings))
            self._reloader.on_change(lambda settings: access.configure(settings.access))
            tls = tls_of(self._settings.api)
            listeners = take_addresses(self._settings.api, access.has_tokens, os.environ)
            parts.callback(listeners.close)
            app = make_app(self._settings, self._lifecycle, access)
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_HANDLERS_END_S)
            parts.push_async_callback(runner.cleanup)
            await runner.setup()
            shares = LoopShares()
            sites = [Site(runner, item, self._settings.limits, shares, tls) for item in listeners.sockets]
            for site in sites:
                await site.start()
            self._tell_start(listeners, folder)
            event_router, model = EventRouter(loop), self._settings.model.path
            load = partial(self._load, store, event_router, folder)
            services, journal = await self._unless_stopped(f"loading {model}", load, listeners, store)
            leave = partial(self._leave, services, shares, sites if listeners.inherited else [])
            return await self._run_until_stopped(services, journal, runner, listeners.names, leave)

    async def _unless_stopped(self, doing: str, fn: Callable[[], T], *opened: Store | Listeners) -> T:
        """Return the result of `fn`, while systemd is asked for the time. It cannot be interrupted: a signal ends the
        process, once what is `opened` is closed.

        Each step of opening a store survives being cut off, and while a model is loaded nothing is acknowledged.
        """
        work = asyncio.ensure_future(_in_thread(fn))
        stopping = asyncio.ensure_future(self._stop.wait())
        async with _beside(self._manager.busy(doing)):
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            for part in opened:
                part.close()
            os._exit(0)
        return work.result()

    def _load(self, store: Store, event_router: EventRouter, folder: Path) -> tuple[Services, Journal]:
        """Build the parts. Raises ModelMissing, TokenizerError, ModelRefused or OtherBase."""
        # A full garbage collection looks at every object of torch and transformers, with all threads standing still for
        # 0.2 to 0.5 s. They stay for good: it need not.
        gc.freeze()
        services, journal = assemble(self._settings, store, folder, event_router, self._lifecycle, self._reload)
        self._reloader.on_change(_set_up_logs)
        connect(services, self._reloader)
        gc.collect()
        gc.freeze()
        return services, journal

    async def _run_until_stopped(
        self,
        services: Services,
        journal: Journal,
        runner: web.AppRunner,
        names: list[str],
        leave: Callable[[], Awaitable[None]],
    ) -> int:
        services.engine.start()
        services.monitor.start()
        services.job_runner.start()
        services.practice.start()
        self._lifecycle.services, self._lifecycle.phase = services, "ready"
        # Maintenance counts all rows first, which takes long in a large database.
        services.maintenance.start()
        self._loaded.set()
        start_succeeded(os.environ)
        self._manager.ready(_status(services))
        self._tell_ready(services, names)
        engine, stalls = services.engine, runner.app[STALLS]
        services.store.on_writes = stalls.wrote
        watchdog = self._manager.watch(lambda: engine.loop.last_sign_s, lambda: _status(services))
        async with _beside(watchdog), _beside(stalls.watch()):
            while not (self._stop.is_set() or engine.error or services.store.failed):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), _WATCH_EVERY_S)
                journal.retry()
                services.runs.sweep()
                await leave()
        self._lifecycle.phase = "draining"
        services.feed.tell_load()
        drain_s = self._reloader.settings.serving.drain_s
        self._manager.stopping(drain_s)
        logs.event(log, logging.INFO, "stopping", f"edged stops: running answers have {drain_s:g} s", drain_s=drain_s)
        for outcome in await asyncio.gather(*services.forgetting, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.error("an adapter was not forgotten to the end: %s", outcome)
        started = time.monotonic()
        await services.practice.close()
        await _in_thread(lambda: engine.stop(drain_s))
        # Governors hold the engine back to its end; a reading may take long, and must not block the event loop.
        await _in_thread(services.monitor.stop)
        await runner.cleanup()
        await _in_thread(services.job_runner.close)
        services.feedback_intake.close()
        services.tastes.close()
        await _in_thread(services.maintenance.stop)
        journal.flush()
        if failed := engine.error or services.store.failed:
            logs.event(log, logging.ERROR, "engine_failed" if engine.error else "store_failed", failed)
            return 1
        seconds = time.monotonic() - started
        logs.event(log, logging.INFO, "stopped", f"edged has stopped after {seconds:.1f} s", seconds=round(seconds, 2))
        return 0

    async def _leave(self, services: Services, shares: LoopShares, sites: list[Site]) -> None:
        """Begin to stop where no request came for `serving.exit_when_idle_s`, and nothing is left to do.

        From the last look on, new connections wait at systemd's socket. `sites` are those of its sockets, if all are.
        """
        idle_s, active_s = self._reloader.settings.serving.exit_when_idle_s, shares.active_s
        if not (idle_s and sites) or time.monotonic() - active_s < idle_s:
            return
        await asyncio.wrap_future(services.feedback_intake.settled())
        works = await _in_thread(lambda: has_work(services))
        # Nothing is awaited from here on: what is idle stays so.
        if works or shares.active_s != active_s or not all(site.is_idle for site in sites):
            return
        for site in sites:
            site.leave()
        message = f"no request came for {idle_s:g} s: edged ends until the next one"
        logs.event(log, logging.INFO, "idle_exit", message, idle_s=idle_s)
        self._stop.set()

    def _tell_start(self, listeners: Listeners, folder: Path) -> None:
        model, sockets = self._settings.model.path, listeners.names
        message = f"edged {edged.__version__} loads {model}; socket {', '.join(sockets)}, data in {folder}"
        logs.event(log, logging.INFO, "start", message, model=model, sockets=sockets, data_dir=str(folder))
        if self._settings.serving.exit_when_idle_s and not listeners.inherited:
            told = "serving.exit_when_idle_s does nothing here: systemd's sockets alone start edged again"
            log.warning("%s; give edged.socket a ListenStream= for each address, and leave api.listen out", told)

    def _tell_ready(self, services: Services, names: list[str]) -> None:
        seconds, context = time.monotonic() - self._lifecycle.opened_s, services.engine.max_context_tokens
        memory = services.monitor.read()["process_rss_bytes"]
        message = f"edged serves {services.model}, context {context} tokens; loaded in {seconds:.1f} s"
        message += f", {memory >> 20} MiB of memory"
        fields = {"model": services.model, "context_tokens": context, "seconds": round(seconds, 2), "rss_bytes": memory}
        logs.event(log, logging.INFO, "ready", message, **fields)
        paths, tcp = [name for name in names if "/" in name], [name for name in names if "/" not in name]
        where = f"--socket {paths[0]} " if paths else f"--url http://{tcp[0]} "
        page = f"http://{tcp[0]}/" if tcp else f"http://127.0.0.1:8137/ after ssh -L 8137:{paths[0]} BOX"
        asked = f'ask: edged ask {where}--user NAME "Hello"; page: {page}; data: {services.store.path.parent}'
        logs.event(log, logging.INFO, "usage", asked)

    def _on_signal(self) -> None:
        """Drain at the first signal, stop at once at the second; acknowledged data is on disk."""
        services = self._lifecycle.services
        if self._stop.is_set() and services is not None:
            threading.Thread(target=services.engine.stop, args=(0.0,), daemon=True).start()
        self._stop.set()

    def _on_hangup(self) -> None:
        reload = asyncio.ensure_future(self._reload_when_loaded())
        self._reloads.add(reload)
        reload.add_done_callback(self._reloads.discard)

    async def _reload_when_loaded(self) -> None:
        """Reload once the daemon is ready; errors in the settings are in the log."""
        await self._loaded.wait()
        if self._lifecycle.phase == "ready":
            with contextlib.suppress(ConfigError):
                await self._reload()

    async def _reload(self) -> ReloadResult:
        """Read the settings again. Raises ConfigError, and nothing has changed then."""
        assert self._lifecycle.services is not None
        self._manager.reloading()
        try:
            return await self._reloader.reload()
        finally:
            self._manager.ready(_status(self._lifecycle.services))


def _open_store(folder: Path) -> Store:
    """Open the store: after a power cut or at an upgrade that takes minutes on slow flash, as all of it is read."""
    store = Store(folder / DATABASE_FILE)
    clear_leftovers(folder)
    return store


def _check_access(access: Access, settings: Settings) -> None:
    """Raise ConfigError for rules or tokens that cannot take the place of those in use."""
    try:
        other = Access(settings.access, settings.api.token)
    except AccessError as error:
        raise ConfigError(str(error)) from None
    if other.has_tokens != access.has_tokens:
        needs = "TCP listeners are open with tokens or without, which needs a restart; nothing was changed"
        raise ConfigError(f"access.tokens: {needs}")


def _status(services: Services) -> str:
    """Return the line that `systemctl status` shows."""
    counts = queue(services)
    running = counts["prefill"] + counts["decode"]
    requests = f"{running} requests running, {counts['waiting']} waiting, {refused(services)} refused since start"
    return f"serves {services.model}: {requests}, {counts['finetune']} pairs to learn"


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` within the context; it is cancelled at the end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _in_thread(fn: Callable[[], T]) -> T:
    return await asyncio.wrap_future(in_thread(fn))
