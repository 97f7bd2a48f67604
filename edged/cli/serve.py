"""The command `edged serve`, which runs the daemon in the foreground."""

import functools
import logging
import os
import sys
from pathlib import Path

import click

from edged.cli.options import config_option, policy_option
from edged.cli.settings import load_settings

_SETTINGS = {
    **{"model": "model.path", "socket": "api.socket", "listen": "api.listen"},
    **{"data_dir": "store.data_dir", "new_base": "store.new_base", "policy": "scheduler.policy"},
}
"""The setting that each flag overrides."""


@click.command()
@config_option
@click.option("--model", "-m", metavar="DIR", help='Directory of save_pretrained, hub name, or "demo".')
@click.option("--socket", metavar="PATH", help="Unix socket to listen on [EDGED_SOCKET].")
@click.option("--listen", metavar="HOST:PORT", help="Listen on TCP too.")
@click.option("--data-dir", metavar="DIR", help="Folder of the database and the adapters.")
@click.option("--new-base", metavar="HOW", help='In a folder of another model: "shelve" or "learn" (store.new_base).')
@policy_option
def serve(config: Path | None, **flags: str | None) -> None:
    """Serve a model on the local socket and learn from feedback.

    Runs in the foreground until SIGTERM or Ctrl-C; running answers are finished first.

    Flags win over environment variables (EDGED_SECTION__KEY), and these over the file. `edged reload`, or SIGHUP where
    no terminal is, reads them again.
    """
    from edged.http.sockets import ListenError, tls_of
    from edged.models import ModelMissing, local_model
    from edged.refusal import refuse_start
    from edged.runtime import logs
    from edged.settings.load import ConfigError, LogSettings, Settings

    load = functools.partial(load_settings, config, overrides={_SETTINGS[flag]: flags[flag] for flag in flags})
    try:
        settings = load()
        # Before torch is imported, which takes seconds.
        local_model(settings.model)
        tls_of(settings.api)
    except (ConfigError, ModelMissing, ListenError) as error:
        logs.set_up(LogSettings(), logs.secrets_of(Settings(), os.environ), os.environ, sys.stderr)
        code = refuse_start(str(error), LogSettings(), os.environ)
        logs.take_down()
        raise SystemExit(code) from None
    from edged.runtime.process import prepare, restart_in_huge_pages

    if not settings.model.device.startswith("cuda") and _is_program():
        restart_in_huge_pages()
    prepare()
    from edged.daemon import run_daemon

    code = run_daemon(settings, load)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is stopped and on disk. A regular interpreter shutdown would only cost time and print messages of
    # other libraries.
    os._exit(code)


def _is_program() -> bool:
    """Whether this process was started as `edged` or `python -m edged.cli`, and not by another program."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return Path(sys.argv[0]).name == "edged" or (spec is not None and spec.name.startswith("edged."))
