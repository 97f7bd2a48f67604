"""The daemon: builds the parts from the settings, runs them, and stops them in order.

Owns composition, signals and the exit code. Must not know algorithms.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from aiohttp import web
from transformers.utils import logging as transformers_logging

import edged
from edged.align.journal import Journal
from edged.api.addresses import socket_paths
from edged.api.app import make_app
from edged.api.forgetting import finish_forgetting
from edged.api.hub import Hub
from edged.api.services import Lifecycle, Services
from edged.api.sockets import ListenError, UnixListener, notify_systemd, tcp_socket
from edged.api.teacher import Teacher
from edged.config import ModelSettings, Settings
from edged.engine.engine import Engine
from edged.engine.model import ModelRefused
from edged.engine.text import Codec, CodecError
from edged.models import demo_model_dir
from edged.store import Store, StoreError
from edged.telemetry.device import DeviceMonitor

T = TypeVar("T")
log = logging.getLogger("edged")

DATABASE_FILE = "edged.db"
_HANDLERS_END_S = 1.0
"""How long handlers may take to send their last bytes after the engine has stopped."""
_WATCH_EVERY_S = 1.0


class ModelMissing(RuntimeError):
    """The model that the settings name cannot be found; the message says where it was looked for."""


def run_daemon(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. What prevents a start goes to stderr in one sentence."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    transformers_logging.disable_progress_bar()
    try:
        return asyncio.run(Daemon(settings, os.environ).run())
    except (ListenError, StoreError, ModelMissing, ModelRefused, CodecError) as error:
        print(f"edged: {error}", file=sys.stderr, flush=True)
        return 1


def find_model(settings: ModelSettings) -> tuple[Path, str]:
    """(directory, name in the API) of the model. A hub name is downloaded. Raises ModelMissing."""
    if settings.path == "demo":
        try:
            return demo_model_dir(), settings.name or "demo"
        except FileNotFoundError as error:
            raise ModelMissing(str(error)) from None
    path = Path(settings.path).expanduser()
    if path.is_dir():
        return path, settings.name or path.resolve().name
    if path.exists() or settings.path.count("/") != 1 or settings.path.startswith((".", "~", "/")):
        raise ModelMissing(
            f'model "{settings.path}" is not a directory: give one that save_pretrained wrote, a hub name, or "demo"'
        )
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
        patterns += ["*.py"] if settings.trust_remote_code else []
        return Path(snapshot_download(settings.path, allow_patterns=patterns)), settings.name or path.name
    except Exception as error:  # network, names and permissions, each with its own exception
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelMissing(
            f'model "{settings.path}" is not a directory here and could not be downloaded ({reason})'
        ) from error


def data_folder(configured: str, environ: Mapping[str, str]) -> Path:
    """The folder of database and adapters: the setting, systemd's, else the user's."""
    if configured:
        return Path(configured).expanduser()
    if state := environ.get("STATE_DIRECTORY", "").split(":")[0]:
        return Path(state)
    return Path(environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "edged"


class Daemon:
    """One daemon's life: take the addresses, load, serve, drain, stop."""

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        self._settings, self._environ = settings, environ
        self._lifecycle = Lifecycle()
        self._stop = asyncio.Event()
        self._signals = 0
        self._journal: Journal | None = None

    async def run(self) -> int:
        """Returns the exit code. Raises what prevents a start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        folder = data_folder(self._settings.store.data_dir, self._environ)
        store = Store(folder / DATABASE_FILE)
        try:
            listener = UnixListener(socket_paths(self._settings.api.socket, self._environ)[0])
            try:
                return await self._serve(listener, store, folder)
            finally:
                listener.close()
        finally:
            store.close()

    async def _serve(self, listener: UnixListener, store: Store, folder: Path) -> int:
        runner = web.AppRunner(
            make_app(self._settings.api, self._lifecycle),
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,
            shutdown_timeout=_HANDLERS_END_S,
        )
        await runner.setup()
        try:
            await web.SockSite(runner, listener.socket).start()
            if self._settings.api.listen:
                await web.SockSite(runner, tcp_socket(self._settings.api.listen, self._settings.api.token)).start()
            model = self._settings.model.path
            log.info("edged %s loads %s; socket %s, data in %s", edged.__version__, model, listener.path, folder)
            hub = Hub(asyncio.get_running_loop())
            loading = asyncio.ensure_future(_in_thread(lambda: self._load(store, hub, folder), "edged-loader"))
            stopping = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                # The loader cannot be interrupted, and nothing has been acknowledged that is not on disk.
                listener.close()
                store.close()
                os._exit(0)
            services = loading.result()
            return await self._run_until_stopped(services, runner)
        finally:
            await runner.cleanup()

    def _load(self, store: Store, hub: Hub, folder: Path) -> Services:
        """Build what takes time: download, tokenizer, model, cache. Raises ModelMissing, CodecError or ModelRefused."""
        model_dir, name = find_model(self._settings.model)
        model = self._settings.model.model_copy(update={"name": name})
        settings = self._settings.model_copy(update={"model": model})
        if model.trust_remote_code:
            log.warning(
                "model.trust_remote_code is on: Python code in %s runs with all rights of this process", model_dir
            )
        codec = Codec.load(model_dir, model.trust_remote_code)
        finish_forgetting(store, folder / "adapters")
        engine = Engine.build(settings, model_dir, hub.deliver, lambda records: journal.append(records), folder)
        facts = engine.status()["model"]
        journal = Journal(store, facts["fingerprint"], settings.store.keep_samples)
        self._journal = journal
        teacher = Teacher(store, codec, engine, settings)
        services = Services(
            settings=settings,
            model=name,
            vocab_size=facts["vocab_size"],
            engine=engine,
            store=store,
            codec=codec,
            hub=hub,
            teacher=teacher,
            monitor=DeviceMonitor(facts["device"]),
            started_at_s=time.time(),
        )
        if resumed := teacher.resume(facts["fingerprint"]):
            log.info("%d pairs were open and go on", resumed)
        # A full garbage collection looks at every object of torch and transformers, with all threads standing still for
        # 0.2 to 0.5 s. They stay for good: it need not.
        gc.collect()
        gc.freeze()
        return services

    async def _run_until_stopped(self, services: Services, runner: web.AppRunner) -> int:
        services.engine.start()
        self._lifecycle.ready(services)
        notify_systemd("READY=1", self._environ)
        log.info("edged serves %s, context %d tokens", services.model, services.engine.max_context_tokens)
        while not self._stop.is_set() and not services.engine.error:
            try:
                await asyncio.wait_for(self._stop.wait(), _WATCH_EVERY_S)
            except TimeoutError:
                continue
        self._lifecycle.drain()
        notify_systemd("STOPPING=1", self._environ)
        log.info("edged stops: running answers have %g s", self._settings.serving.drain_s)
        for outcome in await asyncio.gather(*services.forgetting, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.error("an adapter was not forgotten to the end: %s", outcome)
        await _in_thread(lambda: services.engine.stop(self._settings.serving.drain_s), "edged-stopper")
        await runner.cleanup()
        services.teacher.close()
        if self._journal is not None:
            self._journal.flush()
        if services.engine.error:
            log.error("%s", services.engine.error)
            return 1
        return 0

    def _on_signal(self) -> None:
        """First signal: drain. Second: stop now; what was acknowledged is on disk."""
        self._signals += 1
        self._stop.set()
        services = self._lifecycle.services
        if self._signals > 1 and services is not None:
            threading.Thread(target=services.engine.stop, args=(0.0,), daemon=True).start()


async def _in_thread(fn: Callable[[], T], name: str) -> T:
    """`fn` on a thread of its own that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[], None]) -> None:
        if not future.done():
            set_it()

    def run() -> None:
        try:
            result = fn()
        except BaseException as error:
            failure = error
            loop.call_soon_threadsafe(settle, lambda: future.set_exception(failure))
        else:
            loop.call_soon_threadsafe(settle, lambda: future.set_result(result))

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future
