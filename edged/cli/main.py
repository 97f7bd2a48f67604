"""The command group of `edged`.

Commands are imported lazily, so that `edged status --help` appears at once.
"""

import atexit
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any

import click

from edged import __version__
from edged.cli.output import echo
from edged.runtime import plugins

COMMANDS = (
    *(
        "serve",
        "chat",
        "ask",
        "status",
        "metrics",
        "adapters",
        "teach",
        "starts",
        "federated",
        "feedback",
        "reload",
        "align",
        "export",
        "store",
    ),
    *(
        "backup",
        "restore",
        "quarantine",
        "applications",
        "finetune",
        "fleet",
        "files",
        "config",
        "token",
        "doctor",
        "models",
        "trace",
        "profile",
        "bench",
    ),
)
"""Names of the click commands; each is in the module of its name unless MODULES has another, or it is of the lab."""
LAB = ("align", "bench")
"""Commands that are entry points of edged itself."""
MODULES = {
    **{"ask": "chat", "export": "feedback", "quarantine": "feedback", "backup": "store"},
    **{"restore": "store", "config": "settings", "reload": "settings", "token": "settings"},
    **{"files": "finetune", "metrics": "status", "doctor": "doctor.command"},
}
_GROUP = "edged.commands"
"""Entry points of commands, each a click command: the laboratory's and other packages'."""
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}
EXPECTED = {
    *("DaemonError", "ConfigError", "ModelMissing", "ModelRefused", "TokenizerError", "TraceError", "ReplayError"),
    *("CompareError", "DeviceError", "ProfilingFailed", "RebuildError", "BackupError", "FolderTaken", "StoreError"),
    *("PluginError", "CampaignRefused", "RecordRefused", "KitError"),
}
"""Class names of edged's errors that are shown by their message alone; names, so that none is imported for this."""


class Failure(click.ClickException):
    """An expected failure: shown as `edged: message`, exit code 1."""

    def show(self, file: Any = None) -> None:
        echo(f"edged: {self.format_message()}", err=True)


class FailingGroup(click.Group):
    """A click group that turns the EXPECTED errors of its commands into a Failure."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            kinds = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("edged.")}
            if kinds & EXPECTED:
                raise Failure(str(error)) from None
            raise


class LazyGroup(FailingGroup):
    """A group whose commands are imported when they are named or listed; LAB and other packages' are entry points."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        known: Sequence[str] = COMMANDS
        if args[0] in LAB and args[0] not in plugins.own(_GROUP):
            ctx.fail(f'"{args[0]}" was not installed: install edged again (from a checkout: tools/env)')
        if args[0] not in known:
            known = self.list_commands(ctx)
        if args[0] not in known and (near := difflib.get_close_matches(args[0], known, 1)):
            ctx.fail(f'No such command "{args[0]}": did you mean "edged {near[0]}"?')
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *(name for name in plugins.others(_GROUP) if name not in COMMANDS)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in LAB or cmd_name not in COMMANDS:
            points = plugins.own(_GROUP) if cmd_name in LAB else plugins.others(_GROUP)
            return _of_package(points[cmd_name]) if cmd_name in points else None
        module = importlib.import_module(f"edged.cli.{MODULES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, cmd_name)
        return command


def _of_package(point: EntryPoint) -> click.Command:
    """Return the command that a package brings; one that cannot be loaded says why when it is run."""
    try:
        return plugins.load(point, click.Command)
    except plugins.PluginError as error:
        raised = error

    def fail() -> None:
        raise raised

    lenient = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(point.name, lenient, fail, help=str(raised))


@click.group(cls=LazyGroup, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="edged")
def cli() -> None:
    """Serve a language model on this box and align it to each user while it serves."""


def main() -> None:
    """Run the command line; a terminal that cannot show a character gets a replacement instead of an exception.

    Files and pipes are UTF-8 whatever the locale.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding=None if stream.isatty() else "utf-8", errors="replace")
    try:
        cli(prog_name="edged")
    except SystemExit as ended:
        if "torch" in sys.modules and isinstance(ended.code, int):
            # The interpreter's regular end would print what other libraries' bindings have not freed.
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(ended.code)
        raise
