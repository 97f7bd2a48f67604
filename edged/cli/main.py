"""The command group of `edged`.

`edged status --help` has to appear at once.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from edged import __version__

COMMANDS = (
    *("serve", "chat", "ask", "status", "metrics", "adapters", "feedback", "reload", "align", "export", "store"),
    *("backup", "restore", "quarantine", "config", "token", "doctor", "trace", "profile", "bench"),
)
"""Each is a click command of its name, in the module of its name unless MODULES has another."""
MODULES = {"export": "feedback", "restore": "backup", "config": "configure", "doctor": "doctor.command"}

EXPECTED = (
    ("edged.client.client", "DaemonError"),
    ("edged.settings.load", "ConfigError"),
    ("edged.models.source", "ModelMissing"),
    ("edged.engine.model.loading", "ModelRefused"),
    ("edged.text.tokenizer", "TokenizerError"),
    ("edged.bench.traces", "TraceError"),
    ("edged.bench.replay", "ReplayError"),
    ("edged.bench.compare", "CompareError"),
    ("edged.simulator.device_file", "DeviceError"),
    ("edged.profiler.profile", "ProfilingFailed"),
    ("edged.rebuild.training", "RebuildError"),
    ("edged.store.backup", "BackupError"),
    ("edged.store.lock", "FolderTaken"),
)
"""Modules and names of errors whose message is all that a user needs."""


class Failure(click.ClickException):
    """An expected failure: shown as `edged: message`, exit code 1."""

    def show(self, file: Any = None) -> None:
        click.echo(f"edged: {self.format_message()}", err=True)


class FailingGroup(click.Group):
    """A group whose commands say by one of the EXPECTED errors what a user can put right."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            # What was raised is of a module that is loaded; none is imported for this.
            loaded = [getattr(sys.modules[module], name) for module, name in EXPECTED if module in sys.modules]
            if isinstance(error, tuple(loaded)):
                raise Failure(str(error)) from None
            raise


class LazyGroup(FailingGroup):
    """A group whose commands are imported when they are named or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"edged.cli.{MODULES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, cmd_name)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="edged")
def cli() -> None:
    """Serve a language model on this box and align it to each user while it serves."""


def main() -> None:
    """Run the command line; a terminal that cannot show a character gets a replacement instead of an exception."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    cli(prog_name="edged")
